"""The settings of a run: read from YAML and key=value pairs, checked without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from rpg_megatron.config.combinations import find_problems
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.explanation import explain_errors
from rpg_megatron.config.merging import apply_override, read_merged
from rpg_megatron.config.renamed import remove_gone
from rpg_megatron.config.secret_values import refuse_secrets
from rpg_megatron.config.sections import Sections


class Settings(Sections):
    """All settings of a run."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        """Defaults that depend on other settings."""
        refuse_secrets(raw)
        if not isinstance(raw, dict):
            return raw
        engine, bridge = raw.get("engine", {}), raw.get("bridge", {})
        if raw.get("sft") is not None and raw.get("evaluation") is None and isinstance(engine, dict):
            # Fine-tuning needs engines only for its evaluation.
            raw = raw | {"engine": engine | {"replicas": 0, "colocated": False}}
        if raw.get("device", "cuda") == "cuda" and isinstance(bridge, dict):
            raw = raw | {"bridge": {"transport": "cuda_ipc"} | bridge}
        return raw

    def _problems(self) -> Iterator[str]:
        if self.sft is None and self.data is None:
            yield "data is missing: the training prompts; for supervised fine-tuning add sft"
        prompts, parts = self.rollout.prompts_per_step, self.training.minibatches
        if self.sft is None and prompts % parts:
            yield (
                f"rollout.prompts_per_step ({prompts}) must be a multiple of training.minibatches ({parts}); "
                f"try {prompts - prompts % parts or parts}"
            )
        overlong, longest = self.reward.overlong, self.rollout.max_response_tokens
        if overlong is not None and overlong.buffer is not None and overlong.buffer > longest:
            yield (
                f"reward.overlong.buffer ({overlong.buffer}) is longer than a response "
                f"(rollout.max_response_tokens {longest}); try {max(longest // 4, 1)}"
            )
        yield from find_problems(self)


def load_settings(file: Path, overrides: list[str] | None = None) -> Settings:
    """Read a YAML file and apply ``key.sub=value`` overrides (values are YAML).

    Paths of inputs are taken relative to the YAML file; in an override, to the working directory.
    ``extends: FILE`` (or a list of files; later ones override earlier ones) inherits from other files.
    Raises UserError that names the file and key, and for an unknown key the nearest valid one.
    """
    return make_settings(read_merged(file, Settings), overrides, str(file))


def make_settings(raw: dict[str, Any], overrides: list[str] | None, where: str) -> Settings:
    """Apply ``key.sub=value`` overrides to plain values, and check them.

    Raises UserError that begins with ``where`` and names the key.
    """
    for item in overrides or []:
        apply_override(raw, item)
    if gone := remove_gone(raw):
        raise UserError("\n".join(f"{where}: {message}" for message in gone))
    try:
        return Settings.model_validate(raw)
    except ValidationError as e:
        raise UserError(explain_errors(Settings, where, e)) from None
