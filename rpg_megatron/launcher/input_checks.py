"""Checks of a run's inputs before anything is started: data, prompt lengths, reward functions and other
custom code, trackers, disk space.

They import no torch. Each raises UserError for problems that would end the run, and returns other problems as
warnings. Commands run them by the table in ``launcher/checks.py`` only.
"""

from __future__ import annotations

import importlib.util
import json
import math
import netrc
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape
from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.data import DataSettings, SourceSettings
from rpg_megatron.config.errors import gib
from rpg_megatron.config.files import read_text
from rpg_megatron.config.losses import ImportedLossSettings
from rpg_megatron.config.rollout import DynamicSamplingSettings, EpisodeSettings
from rpg_megatron.config.trackers import PACKAGES, ImportedTrackerSettings, WandbSettings
from rpg_megatron.data.presets import find_preset
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.data.stored_problems import LeftOut, Problem
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.data.vocabulary import check_stops, warn_of_unused
from rpg_megatron.launcher.preflight import has_tokenizer
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.rollout.seeds import stop_tokens
from rpg_megatron.system.child import module_command
from rpg_megatron.system.custom_code import CustomCode
from rpg_megatron.system.dtypes import ITEM_BYTES

_MAX_MEASURED = 5000
"""Maximum number of prompts whose length is measured; of a larger set, evenly spaced ones."""
_MANY = 0.1
"""Fraction of prompts that are too long from which a warning is given."""
CUSTOM_CODE_SECONDS = 300
"""Time limit for importing custom code; importing torch from a busy network disk may take a minute."""


def check_data(settings: Settings, *, trainer: bool = True, offline: bool = False) -> list[str]:
    """Check that all data can be read, and that prompts are not all longer than ``max_prompt_tokens``.

    trainer: whether the training set counts; without it, the keys of all sets are those of ``data``.
    offline: leave out data on the hub, and lengths if the model's folder has no tokenizer.
    """
    model, warnings = settings.model.path, []
    tokenized = not offline or has_tokenizer(model)
    for key, data, *_ in settings.prompt_sets:
        if key == "data" and not trainer:
            continue
        where = key if trainer else "data"
        if tokenized and data.chat and not has_chat_template(model):
            raise UserError(
                f"{where}.chat: {model} has no chat template; copy its chat_template.jinja "
                f"there, or set {where}.chat to false"
            )
        if trainer and key != "data" and settings.sft is None and data.sources == settings.data.sources:
            warnings.append(f"{key}: its problems are those of data, which are trained on; hold some out")
        for at, part in _local_sources(where, data) if offline else [(where, data)]:
            # With the rows, if the sampler needs them: it then finds what this call has kept of large data.
            problems, *_ = read_problems_with_counts(part, at, rows=settings.needs_rows, first=1)
            scored = key != "data" or settings.uses_rewards
            if "####" in problems[0].answer and scored and not settings.reward.has_custom:
                fix = f"set {at}.answer_after to '####' (quoted: # begins a comment), or {at}.preset to gsm8k"
                raise UserError(f"{problems[0].where}: the answer contains ####, so none is right; {fix}")
            if tokenized:
                warnings += check_prompts(problems, part, model, at, settings.rollout.stop_token_ids)
            per_step = settings.rollout.prompts_per_step
            if at == key == "data" and len(problems) < per_step and not data.streaming:
                warnings.append(
                    f"data: {len(problems)} problems, fewer than the {per_step} of a step "
                    "(rollout.prompts_per_step): some come more than once in a step"
                )
    return [*dict.fromkeys(warnings)]


def _local_sources(where: str, data: DataSettings) -> Iterator[tuple[str, DataSettings]]:
    """Key and settings of the sources that need no hub: all at once or, of a mixture with others, each."""
    if not any(source.on_hub for source in data.sources):
        yield where, data
        return
    for number, source in enumerate(data.sources):
        at = f"{where}.mixture[{number}]" if data.mixture else where
        if not source.on_hub:
            values = {name: getattr(source, name) for name in SourceSettings.model_fields}
            yield at, data.model_copy(update={"mixture": (), **values})
        elif source.preset is not None:
            find_preset(source.preset, at)


def check_prompts(
    problems: Sequence[Problem], data: DataSettings, model: Path, where: str, stops: Sequence[int]
) -> list[str]:
    """Check that not all prompts are too long, and that the model has their tokens and one that ends a
    response; returns a warning if many are too long, or if the tokenizer declares tokens beyond the model's.

    where: key of ``data`` in the settings. stops: ``rollout.stop_token_ids``. Does nothing if the
    tokenizer needs transformers.
    """
    from rpg_megatron.data.prompts import fit_prompts  # needs numpy, which a login node may lack

    tokenizer = open_tokenizer(model, chat=data.chat)
    if tokenizer is None:
        return []
    measured = problems[:: math.ceil(len(problems) / _MAX_MEASURED)]
    try:
        vocab = read_model_shape(model).vocab_size
    except UserError:  # check_model reports it
        vocab = None
    refused = LeftOut()
    _, too_long = fit_prompts(measured, data, tokenizer, where, vocab=vocab, refused=refused)
    warnings = [f"{where}: prompts that are left out: {refused.first}"] if refused.first else []
    if data.thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
        warnings.append(f"{where}.thinking: the chat template does not read enable_thinking; remove it")
    if vocab is not None:
        if tokenizer.eos_token_id is not None:  # else it may stand in a file that only transformers reads
            check_stops(stop_tokens(model, tokenizer, stops), vocab)
        warnings += warn_of_unused(tokenizer.largest_id, vocab)
    if too_long < _MANY * len(measured):
        return warnings
    effect = "are left out" if data.too_long == "drop" else "lose their beginning"
    return [
        *warnings,
        f"{where}: {too_long} of {len(measured)} prompts are longer than {data.max_prompt_tokens} tokens and "
        f"{effect} ({where}.max_prompt_tokens, too_long)",
    ]


def warn_of_settings(settings: Settings) -> Iterator[str]:
    """Warnings of settings that have no effect together, or hardly the wanted one."""
    s, loss, advantage = settings, settings.objective, settings.advantage
    held = "teacher" if s.teacher else "anchor"
    if s.sft is not None:
        return
    across_groups = isinstance(advantage, ImportedSettings) or advantage.across_groups
    if not across_groups and s.rollout.samples_per_prompt == 1:
        yield (
            f"rollout.samples_per_prompt is 1, so advantage.type {advantage.type} has no group to compare "
            "with: the advantage is the reward itself; raise it, or set advantage.type to batch_mean"
        )
    idle = not isinstance(loss, ImportedSettings) and getattr(loss, "beta", 1) == 0 and s.reward.kl is None
    if idle and (s.teacher or s.anchor.type != "old"):
        yield f"objective.beta is 0, so {held} trains nothing: kl/anchor costs a pass; set beta, or remove it"
    if (high := getattr(getattr(loss, "clip", None), "high", 0)) >= 1:
        yield f"objective.clip.high {high:g} bounds ratios by {1 + high:g}; for {high:g} write {high - 1:.3g}"
    if s.teacher and s.teacher.path == s.model.path and s.model.adapter is None:
        yield "teacher.path is model.path: the policy starts as its teacher; give another model"
    yield from s.optimizer.warnings(s.training.steps)


def check_custom_code(settings: Settings) -> None:
    """Check ``list_custom_code`` in another process, since it may import torch. Raises UserError."""
    items = list(list_custom_code(settings))
    if not items:
        return
    command = module_command("rpg_megatron.system.custom_code")
    request = json.dumps([item._asdict() for item in items])
    names, limit = ", ".join(item.path for item in items), CUSTOM_CODE_SECONDS
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"importing {names} has not ended after {limit} s; do slow work in the first call, not in the "
            "import"
        ) from None
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"importing {names} ended the process (exit code {done.returncode}): {last}; fix it")
    if problems := json.loads(done.stdout):
        raise UserError("\n".join(problems))


def list_custom_code(settings: Settings) -> Iterator[CustomCode]:
    """Custom code that the settings name by import path, except rewards and prompt sources."""
    if isinstance(settings.objective, ImportedSettings):
        loss, reserved = settings.objective, tuple(ImportedLossSettings.model_fields)
        yield CustomCode("objective", loss.type, loss.keywords, 0, instantiate=True, reserved=reserved)
    if isinstance(advantage := settings.advantage, ImportedSettings):
        size, count = settings.rollout.samples_per_prompt, range(settings.sequences)
        trial = [1.0 - i % 2 for i in count], [i // size for i in count], [i % 8 + 1 for i in count]
        yield CustomCode("advantage", advantage.type, advantage.keywords, 3, trial_calls=(trial,))
    schedule, steps = settings.optimizer.schedule, settings.training.steps
    if isinstance(schedule, ImportedSettings):
        trial_calls = tuple((step, steps) for step in range(1, steps + 1, -(-steps // 10_000)))
        yield CustomCode("optimizer.schedule", schedule.type, schedule.keywords, 2, trial_calls=trial_calls)
    for place, tracker in enumerate(settings.trackers):
        if isinstance(tracker, ImportedTrackerSettings):
            yield CustomCode(f"trackers[{place}]", tracker.type, tracker.keywords, 1)
    if settings.rollout.dynamic is not None and ":" in settings.rollout.dynamic.type:
        dynamic, reserved = settings.rollout.dynamic, tuple(DynamicSamplingSettings.model_fields)
        yield CustomCode("rollout.dynamic", dynamic.type, dynamic.keywords, 1, reserved=reserved)
    if (episode := settings.rollout.episode) is not None:
        reserved = tuple(EpisodeSettings.model_fields)
        path, keywords = episode.type, episode.keywords
        yield CustomCode("rollout.episode", path, keywords, 3, reserved=reserved, coroutine=True)


def check_trackers(settings: Settings, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Check that the trackers' packages are installed; returns a warning if an API key may be missing."""
    for place, tracker in enumerate(settings.trackers):
        package = PACKAGES.get(tracker.type)
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                f"trackers[{place}]: the python package {package} is not installed; install it with pip "
                f"install {package} (the extra 'rpg-megatron[{package}]'), or remove it from trackers"
            )
    if not any(isinstance(tracker, WandbSettings) for tracker in settings.trackers):
        return []
    fix = "set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
    return [] if _has_wandb_key(environment) else [f"trackers: wandb finds no API key; {fix}"]


def _has_wandb_key(environment: Mapping[str, str]) -> bool:
    """Whether Weights & Biases finds a key in the environment or in .netrc, or needs none."""
    if environment.get("WANDB_MODE") in ("offline", "disabled", "shared"):
        return True
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        file = environment.get("NETRC") or Path.home() / ".netrc"
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return False


def check_disk(settings: Settings, shape: ModelShape) -> list[str]:
    """Check that ``runs`` is writable, and its disk has room for a checkpoint and the export.

    Returns a warning if it has too little for all checkpoints that are kept.
    """
    folder = nearest_folder(settings.runs)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"runs: {folder} is not writable; choose another folder with runs=...")
    free, needed = shutil.disk_usage(folder).free, disk_bytes(settings, shape)
    least = disk_bytes(settings, shape, checkpoints=1)
    fix = "remove old runs, lower checkpoint.keep, or choose a larger disk with runs=..."
    if free < least:
        raise UserError(
            f"runs: {folder} has {gib(free)} free, one checkpoint and the export need {gib(least)}; {fix}"
        )
    if free < needed:
        return [f"runs: {folder} has {gib(free)} free, checkpoints and export need {gib(needed)}; {fix}"]
    return []


def disk_bytes(settings: Settings, shape: ModelShape, checkpoints: int | None = None) -> int:
    """Bytes of checkpoints and exports. checkpoints: their number; None: those kept and the one being
    written.
    """
    numbers = mapping_for(shape).parameters
    adapters = 0 if settings.lora is None else AdapterMapping(shape, settings.lora).parameters
    item = ITEM_BYTES[settings.precision.dtype]
    trained = numbers if settings.lora is None else adapters
    checkpoint = trained * (item + 8 + (4 if item < 4 else 0))  # weights, moments, float32 copy
    if settings.checkpoint.every is None:
        checkpoint = 0
    export = (numbers + adapters) * ITEM_BYTES[settings.export.dtype or settings.precision.dtype]
    best = settings.checkpoint.keep_best
    kept = settings.checkpoint.keep + 1 + (best.k if best is not None else 0)
    exports = 2 if best is not None else 1
    return checkpoint * (checkpoints or kept) + (exports * export if settings.export.enabled else 0)


def nearest_folder(path: Path) -> Path:
    """The folder, or its nearest existing parent."""
    folder = path.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def has_chat_template(model: Path) -> bool:
    """Whether the tokenizer's files include a chat template; True if they cannot be read."""
    if any((model / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return '"chat_template"' in read_text(model / "tokenizer_config.json")
    except (OSError, UnicodeDecodeError) as e:
        return not isinstance(e, FileNotFoundError)
