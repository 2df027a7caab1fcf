"""Settings of a teacher for distillation."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rpg_megatron.config.base import HubOrInputPath, Section


class TeacherSettings(Section, affects="training"):
    """A fixed policy that the trained one learns from; it takes the place of the anchor.

    Held by the trainer ranks in the policy's layout (``path``), or asked over HTTP (``url``). Its tokenizer
    must be the policy's.
    """

    path: HubOrInputPath | None = None
    """Its Hugging Face checkpoint, of any supported family and size. The ranks hold it in host memory, and on
    a GPU while they score; with objective.form full also its last hidden states of a step's tokens."""
    url: str | None = None
    """Base URL of a vLLM server with its weights, such as http://node7:8000/v1: log-probs of the sampled
    tokens by /completions with prompt_logprobs. Asked with token ids, never with text."""
    model: str | None = None
    """url: name of the model on the server; null: the first one that the server lists."""
    top_k: int | None = Field(None, ge=1)
    """url: log-probs of this many of the likeliest tokens at each place, for objective.form top_k. The server
    must allow it (vLLM: --max-logprobs, 20 unless set)."""
    api_key_variable: str | None = None
    """url: environment variable with the server's key; null: none."""

    def _problems(self) -> Iterator[str]:
        if (self.path is None) == (self.url is None):
            yield "needs either path (held by the trainer ranks) or url (a server)"
        if self.url is None:
            for key in ("model", "top_k", "api_key_variable"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    yield f"{key} has no effect without url; remove it"
