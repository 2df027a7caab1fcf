"""Settings from the options of ``rpg-megatron eval``: model, problem sets, sampling."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.hf_hub import download
from rpg_megatron.checkpoints.megatron_folder import is_megatron
from rpg_megatron.checkpoints.run_folder import CHECKPOINTS, list_steps
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.evaluation import NAME, EvaluationSettings
from rpg_megatron.config.policy import is_hub_id
from rpg_megatron.config.reward import RewardSettings
from rpg_megatron.config.settings import make_settings
from rpg_megatron.data.presets import find_preset
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.launcher.input_checks import check_prompt_lengths, check_reward
from rpg_megatron.launcher.nodes import NodeAssignment
from rpg_megatron.launcher.preflight import (
    check_expert_columns,
    check_gpus,
    check_head_dim,
    check_model,
    check_packages,
    has_gpu,
)
from rpg_megatron.launcher.run_dir import CONFIG
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.models.registry import check_layout

_SECTIONS = ("data", "reward", "engine", "precision")
"""Sections that KEY=VALUE may set; the others have no effect without trainers."""
_OWN = tuple(f"data.{key}" for key in ("path", "hub", "subset", "split", "preset", "source", "mixture"))
_STYLE = ("template", "chat", "system", "thinking")
_ENDINGS = (".jsonl", ".parquet", ".arrow", "")
_TEST = {"gsm8k": "test", "math": "test"}
"""Held-out split of presets whose default is the training split."""
_RESPONSE = 4096
_PROMPT = 2048
"""Default tokens of response and prompt, limited by the model's positions."""


@dataclass
class EvalRequest:
    """The options. None: not given; the run's value is used if MODEL is a run, else a default."""

    model: Path
    suites: str = ""
    """Known sets, NAME or NAME=FILE, separated by commas."""
    files: Sequence[str] = ()
    """FILE or NAME=FILE."""
    folder: Path | None = None
    """Folder with the files of the suites."""
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_response_tokens: int | None = None
    seed: int | None = None
    engines: int = 1
    tensor: int = 1
    device: str | None = None
    overrides: Sequence[str] = ()


def make_request(request: EvalRequest) -> tuple[Settings, str]:
    """Settings, and a name for the model. Raises UserError for invalid options."""
    model, run = find_model(request.model)
    trained = load_settings(run / CONFIG) if run is not None else None
    own = _own_sets(trained, request)
    sets = [] if own else find_sets(request.suites, request.files, request.folder)
    sampling = _sampling(trained, request)
    if sampling["temperature"] == 0 and sampling["samples"] > 1:
        raise UserError("--temperature 0 samples the same response each time; use -n 1")
    _check_overrides(request.overrides)
    shape = read_model_shape(model)
    response = request.max_response_tokens or (
        trained.rollout.max_response_tokens if trained else min(_RESPONSE, shape.max_positions // 2)
    )
    if response >= shape.max_positions:
        raise UserError(
            f"--max-response-tokens: {response} leaves no room for a prompt: the model has "
            f"{shape.max_positions} positions (max_position_embeddings)"
        )
    reward: dict[str, Any] = {"type": "auto"}
    rollout: dict[str, Any] = {"max_response_tokens": response}
    engine: dict[str, Any] = {"replicas": request.engines, "tensor": request.tensor}
    data: dict[str, Any] = {"max_prompt_tokens": min(_PROMPT, shape.max_positions - response)}
    if trained is not None:
        heldout = trained.evaluation.heldout[0].data if trained.evaluation else trained.data
        data |= {key: getattr(heldout, key) for key in _STYLE}
        if own is not None:
            data = heldout.model_dump(exclude={"name"})
        reward = _reward(trained.reward, request.overrides)
        rollout |= {"stop": trained.rollout.stop, "stop_token_ids": trained.rollout.stop_token_ids}
        engine["max_sequences"] = trained.engine.max_sequences
    if sets:
        data |= {key: value for key, value in sets[0].items() if key != "name"}
    raw = {
        "name": "eval",
        "seed": request.seed if request.seed is not None else trained.seed if trained else 0,
        "device": request.device or _device(),
        "model": {"path": str(model.absolute())},
        "precision": {"dtype": "float32" if shape.dtype == "float32" else "bfloat16"},
        "rollout": rollout,
        "engine": engine,
        "reward": reward,
        "data": data,
    }
    settings = make_settings(raw, list(request.overrides), "eval")
    prompt = settings.data.max_prompt_tokens
    if prompt + response > shape.max_positions:
        raise UserError(
            f"data.max_prompt_tokens ({prompt}) + --max-response-tokens ({response}) is more than the "
            f"model's {shape.max_positions} positions (max_position_embeddings); lower one of the two"
        )
    if own is not None:
        problems = _overridden(own, settings, request.overrides)
    else:
        common = settings.data.model_dump(exclude={"path", "preset", "split"})
        problems = {"sets": [common | part for part in sets]}
    evaluation = EvaluationSettings.model_validate(problems | sampling)
    settings = settings.model_copy(update={"evaluation": evaluation})
    name = f"{run.name}-{model.name}" if run is not None else model.absolute().name
    return settings, re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _reward(trained: RewardSettings, overrides: Sequence[str]) -> dict[str, Any]:
    """The run's reward without KL, which needs the trainer.

    Of several terms, only the first one, which decides what is correct. A type on the command line replaces
    the run's, including its settings.
    """
    reward = trained.model_dump(mode="json") | {"kl": None}
    if any(item.startswith("reward.type=") for item in overrides):
        return {key: reward[key] for key in RewardSettings.model_fields if key != "terms"}
    terms = list(reward["terms"].items())[:1]
    return reward | {"terms": {name: term | {"weight": 1.0} for name, term in terms}}


def _own_sets(trained: Settings | None, request: EvalRequest) -> EvaluationSettings | None:
    """The run's own evaluation, if it is requested: no set is given, or the file of its only set.

    Seeds depend on the name of the set in the run, so this gives the same result as the run itself.
    """
    if trained is None or trained.evaluation is None or request.suites:
        return None
    if not request.files:
        return trained.evaluation
    data = trained.evaluation.data
    if data is None or data.path is None or len(request.files) > 1:
        return None
    name, _, file = request.files[0].rpartition("=")
    same = Path(file).absolute().resolve() == data.path.resolve() and name in ("", trained.evaluation.name)
    return trained.evaluation if same else None


def _sampling(trained: Settings | None, request: EvalRequest) -> dict[str, Any]:
    """Responses per problem and sampling: as given, else as in the run, else the defaults."""
    base = (trained and trained.evaluation) or EvaluationSettings.model_construct()
    fields = ("samples", "temperature", "top_p")
    given = {key: getattr(request, key) for key in fields} | {"top_k": None, "min_p": None}
    return {key: getattr(base, key) if value is None else value for key, value in given.items()}


def _overridden(own: EvaluationSettings, settings: Settings, overrides: Sequence[str]) -> dict[str, Any]:
    """The run's sets, with the keys of ``data`` that the command line sets."""
    keys = {item.split(".")[1].partition("=")[0] for item in overrides if item.startswith("data.")}
    given = settings.data.model_dump(include=keys)
    if own.data is not None:
        return {"name": own.name, "data": own.data.model_dump() | given}
    return {"sets": [part.model_dump() | given for part in own.sets]}


def check_request(settings: Settings) -> None:
    """Checks before any process is started. Raises UserError."""
    check_packages(settings.device)
    shape = check_model(settings.model.path)
    try:
        check_layout(shape, settings.engine.tensor, 1)
    except UserError as e:
        raise UserError(f"--tensor: {e}") from None
    check_head_dim(settings, shape)
    check_expert_columns(settings, shape)
    if settings.device == "cuda":
        check_gpus(settings, NodeAssignment(range(0), range(settings.engine.replicas)))
    assert settings.evaluation is not None
    for part in settings.evaluation.heldout:
        try:
            problems, *_ = read_problems_with_counts(part.data)
        except UserError as e:  # KEY=VALUE sets keys of data, but not its path
            raise UserError(str(e).replace("data.path: ", "--data: ", 1)) from None
        for text in check_prompt_lengths(problems, part.data, settings.model.path, "data"):
            print(f"warning: {text}", file=sys.stderr, flush=True)
    check_reward(settings.reward)


def find_model(path: Path) -> tuple[Path, Path | None]:
    """The Hugging Face checkpoint, and the run that exported it, if any.

    The id of a model on the hub is downloaded. For a Megatron checkpoint, raises UserError with the command
    that converts it.
    """
    if is_hub_id(path) and not path.exists():
        return download(str(path), key="MODEL"), None
    if not path.is_dir():
        state = "is a file" if path.is_file() else "does not exist"
        raise UserError(f"MODEL: {path} {state}; give the folder of a Hugging Face checkpoint, or of a run")
    if (path / "config.json").is_file():
        run = path.absolute().parents[1] if path.absolute().parent.name == "hf" else None
        return path, run if run is not None and (run / CONFIG).is_file() else None
    checkpoint: Path | None = None
    if (path / CONFIG).is_file():
        if exports := sorted(p for p in (path / "hf").glob("step_*") if (p / "config.json").is_file()):
            return exports[-1], path.absolute()
        checkpoint = next(iter(list_steps(path).values()), None)
        if checkpoint is None:
            raise UserError(
                f"MODEL: the run {path} has neither a model in hf/ nor a checkpoint in {CHECKPOINTS}/ yet"
            )
    elif is_megatron(path):
        checkpoint = path
    if checkpoint is not None:
        raise UserError(
            f"MODEL: {path} is not a Hugging Face checkpoint, which engines need; convert it with\n"
            f"  rpg-megatron convert megatron-to-hf --megatron {display_path(checkpoint)} --out DIR\n"
            "and evaluate DIR"
        )
    raise UserError(
        f"MODEL: {path} has no config.json; give the folder of a Hugging Face checkpoint, or of a run"
    )


def find_sets(suites: str, files: Sequence[str], folder: Path | None) -> list[dict[str, Any]]:
    """Name of each set, and its preset, path and split, if any. Raises UserError."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--data-dir: {folder} is not a folder")
    found: list[dict[str, Any]] = []
    for item in filter(None, map(str.strip, suites.split(","))):
        name, _, file = item.partition("=")
        try:
            find_preset(name)
        except UserError as e:
            raise UserError(str(e).replace("data.preset", "--suite", 1)) from None
        path = Path(file) if file else _find_copy(name, folder) if folder is not None else None
        part: dict[str, Any] = {"name": name, "preset": name}
        if path is not None:
            part["path"] = str(path.absolute())
        elif name in _TEST:
            part["split"] = _TEST[name]
        found.append(part)
    for item in files:
        # Paths may contain "=" too, so the part before it must be a valid name.
        name, eq, file = item.partition("=")
        if not eq or not re.fullmatch(NAME, name):
            name, file = Path(item).stem, item
            if not re.fullmatch(NAME, name):
                raise UserError(f"--data: {name!r} is not a valid name of a set; give NAME={item}")
        found.append({"name": name, "path": str(Path(file).absolute())})
    if not found:
        raise UserError("no problems to evaluate; give --suite NAME,NAME or --data FILE")
    names = [part["name"] for part in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two sets are named {twice}; rename one of them with --data NAME=FILE")
    return found


def _find_copy(name: str, folder: Path) -> Path:
    """The file of a suite: its name, or the name and ``_test`` or ``-test``."""
    tried = [folder / f"{stem}{end}" for stem in (name, f"{name}_test", f"{name}-test") for end in _ENDINGS]
    path = next((p for p in tried if p.is_file() or (p / "dataset_info.json").is_file()), None)
    if path is None:
        raise UserError(
            f"--data-dir: {folder} has no file for {name} ({name}.jsonl, .parquet or .arrow); give it with "
            f"--suite {name}=FILE"
        )
    return path


def _check_overrides(overrides: Sequence[str]) -> None:
    for item in overrides:
        key = item.partition("=")[0]
        if key.split(".")[0] not in _SECTIONS or "." not in key:
            raise UserError(
                f"{item!r}: has no effect on an evaluation; KEY=VALUE may set "
                f"{', '.join(f'{section}.*' for section in _SECTIONS)}"
            )
        if key in _OWN:
            raise UserError(f"{item!r}: select the problems with --suite or --data")


def _device() -> str:
    """The device: cuda if there is a GPU, else cpu."""
    return "cuda" if has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") else "cpu"
