"""Settings from the options of ``rpg-megatron eval``: model, problem sets, sampling."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rpg_megatron.checkpoints.checkpoint_path import EXPORTS, kind_of, list_exports, open_step
from rpg_megatron.checkpoints.hf_hub import download
from rpg_megatron.checkpoints.run_folder import MODEL
from rpg_megatron.commands.convert.command import Source, open_megatron
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.config.affects import tag_of_setting
from rpg_megatron.config.base import NAME
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.evaluation import OWN_SAMPLING, EvaluationSettings
from rpg_megatron.config.explanation import valid_keys
from rpg_megatron.config.files import real_path
from rpg_megatron.config.policy import is_hub_id
from rpg_megatron.config.reward import RewardSettings
from rpg_megatron.config.settings import make_settings
from rpg_megatron.data.presets import find_preset
from rpg_megatron.launcher.checks import ALL, CheckedRun, check_start
from rpg_megatron.launcher.preflight import has_gpu
from rpg_megatron.launcher.run_dir import CONFIG, load_run_settings

_OPTIONS = {
    **dict.fromkeys(
        (f"data.{key}" for key in ("path", "hub", "subset", "split", "preset", "source", "mixture")),
        "select the problems with --suite or --data",
    ),
    "seed": "use --seed",
    "device": "use --device",
    "model.path": "give the model as MODEL",
    "model.revision": "give the model as MODEL",
    "rollout.max_response_tokens": "use --max-response-tokens",
    "evaluation": "use --suite, --data, --samples and the other options",
}
"""Settings, or a section of them, for which there are options."""
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
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a set -> those of the four values above that it has of its own."""
    seed: int | None = None
    engines: int = 1
    tensor: int = 1
    device: str | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class EvalModel:
    """The model to evaluate."""

    path: Path
    """Its checkpoint."""
    run: Path | None
    """The run that wrote it, if any."""
    source: Source | None = None
    """A checkpoint of Megatron's format, which must be converted for the engines; None: ``path`` is HF's."""

    @property
    def config(self) -> Path:
        """Folder with config.json and tokenizer."""
        return self.path if self.source is None else self.source.config


def make_request(request: EvalRequest) -> tuple[Settings, EvalModel]:
    """Settings whose ``model.path`` is the checkpoint, and the model. Raises UserError for bad options."""
    model_source = find_model(request.model)
    model, run = model_source.path, model_source.run
    trained = load_run_settings(run / CONFIG) if run is not None else None
    run_evaluation = _own_sets(trained, request)
    sets = [] if run_evaluation else find_sets(request.suites, request.files, request.folder)
    sampling = _sampling(trained, request)
    _check_overrides(request.overrides)
    shape = read_model_shape(model_source.config)
    response = request.max_response_tokens or (
        trained.rollout.max_response_tokens if trained else min(_RESPONSE, shape.max_positions // 2)
    )
    own_sampling = _own_sampling(run_evaluation, sets, request)
    limits = [part.get("max_response_tokens") for part in (sampling, *own_sampling.values())]
    longest = max(response, *(limit or 0 for limit in limits))
    if longest >= shape.max_positions:
        raise UserError(
            f"--max-response-tokens: {longest} leaves no room for a prompt: the model has "
            f"{shape.max_positions} positions (max_position_embeddings)"
        )
    reward: dict[str, Any] = {"type": "auto"}
    guards: dict[str, Any] = {}
    rollout: dict[str, Any] = {"max_response_tokens": response}
    engine: dict[str, Any] = {"replicas": request.engines, "tensor": request.tensor}
    data: dict[str, Any] = {"max_prompt_tokens": min(_PROMPT, shape.max_positions - longest)}
    if trained is not None:
        heldout = (
            trained.evaluation.heldout[0].data
            if trained.evaluation
            else trained.sft.data
            if trained.sft
            else trained.data
        )
        data |= {key: getattr(heldout, key) for key in _STYLE}
        if run_evaluation is not None:
            data = heldout.model_dump(include=set(DataSettings.model_fields))
        reward = _reward(trained.reward, request.overrides)
        kept = {"stop", "stop_token_ids", "episode", "tool_call_parser"}
        rollout |= trained.rollout.model_dump(mode="json", include=kept)
        engine["max_sequences"] = trained.engine.max_sequences
        guards = trained.guards.model_dump(include={"reward_failures"})
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
        "guards": guards,
        "data": data,
    }
    settings = make_settings(raw, list(request.overrides), "eval")
    if run_evaluation is not None:
        problems = _overridden(run_evaluation, settings, request.overrides)
    else:
        common = settings.data.model_dump(exclude={"path", "preset", "split"})
        problems = {"sets": [common | part for part in sets]}
    if run_evaluation is not None and run_evaluation.data is not None:
        sampling |= own_sampling[run_evaluation.name]
    else:
        none = dict.fromkeys(OWN_SAMPLING)
        names = [part["name"] or part["preset"] for part in problems["sets"]]
        merged = zip(names, problems["sets"], strict=True)
        problems["sets"] = [part | none | own_sampling[name] for name, part in merged]
    try:
        evaluation = EvaluationSettings.model_validate(problems | sampling)
    except ValidationError as e:
        raise UserError(f"eval: {e.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    settings = settings.model_copy(update={"evaluation": evaluation})
    for part in settings.prompt_sets[1:]:
        if part.tokens > shape.max_positions:
            raise UserError(
                f"data.max_prompt_tokens ({part.data.max_prompt_tokens}) + --max-response-tokens "
                f"({part.response_tokens}) is more than the model's {shape.max_positions} positions "
                "(max_position_embeddings); lower one of the two"
            )
    return settings, model_source


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
    same = real_path(Path(file).absolute()) == real_path(data.path) and name in ("", trained.evaluation.name)
    return trained.evaluation if same else None


def _sampling(trained: Settings | None, request: EvalRequest) -> dict[str, Any]:
    """Responses per problem and sampling: as given, else as in the run, else the defaults."""
    base = (trained and trained.evaluation) or EvaluationSettings.model_construct()
    requested = {key: getattr(request, key) for key in OWN_SAMPLING} | {"top_k": None}
    return {key: getattr(base, key) if value is None else value for key, value in requested.items()}


def _own_sampling(
    evaluation: EvaluationSettings | None, sets: Sequence[dict[str, Any]], request: EvalRequest
) -> dict[str, dict[str, Any]]:
    """Name of each set -> its own values, as given for it, or as in the run unless one is given for all sets.

    Raises UserError if a set with own values is not evaluated.
    """
    by_set: dict[str, dict[str, Any]] = {part["name"]: {} for part in sets}
    for part in evaluation.heldout if evaluation is not None else ():
        keys = [key for key in OWN_SAMPLING if getattr(request, key) is None]
        by_set[part.name] = {key: getattr(part.data, key, None) for key in keys}
    for name, values in request.own.items():
        if name not in by_set:
            option = next(iter(values)).replace("_", "-")
            raise UserError(
                f"--{option} {name}=...: there is no set {name}; the sets are {', '.join(by_set)}"
            )
        by_set[name] |= values
    return {name: {k: v for k, v in values.items() if v is not None} for name, values in by_set.items()}


def _overridden(
    evaluation: EvaluationSettings, settings: Settings, overrides: Sequence[str]
) -> dict[str, Any]:
    """The run's sets, with the keys of ``data`` that the command line sets."""
    keys = {item.split(".")[1].partition("=")[0] for item in overrides if item.startswith("data.")}
    data = settings.data.model_dump(include=keys)
    if evaluation.data is not None:
        return {"name": evaluation.name, "data": evaluation.data.model_dump() | data}
    return {"sets": [part.model_dump() | data for part in evaluation.sets]}


def check_request(settings: Settings, model: EvalModel) -> None:
    """Checks before any process is started. Raises UserError."""
    has = ALL - {"trainer"} if model.source is None else ALL - {"trainer", "weights"}
    loaded = settings.model.model_copy(update={"path": model.config})
    try:
        check_start(CheckedRun(settings.model_copy(update={"model": loaded}), has))
    except UserError as e:  # of a key that only these options set
        message = str(e)
        for key, option in (("engine: tensor", "--tensor: tensor"), ("data.path: ", "--data: ")):
            message = message.replace(key, option, 1)
        raise UserError(message) from None


def find_model(path: Path) -> EvalModel:
    """The checkpoint that MODEL means; the id of a model on the hub is downloaded.

    A run means its newest export or, without one, its newest checkpoint; a checkpoint of a run means the
    export of that step if there is one. Raises UserError.
    """
    if is_hub_id(path) and not path.exists():
        return EvalModel(download(str(path), key="MODEL"), None)
    kind = kind_of(path, "MODEL")
    if kind == "hf":
        run = path.absolute().parents[1] if path.absolute().parent.name == EXPORTS else None
        return EvalModel(path, run if run is not None and (run / CONFIG).is_file() else None)
    if kind == "megatron":
        source = open_megatron(path, name="MODEL")
        return EvalModel(source.whole, None, source)
    if kind == "run":
        run, exports = path.absolute(), list_exports(path)
    else:
        step = open_step(path, "MODEL")
        run = step.run
        exports = [e for e in list_exports(run) if (e.name, MODEL) == (step.folder.name, step.weights.name)]
    if exports:
        return EvalModel(exports[-1], run)
    source = open_megatron(path, name="MODEL")
    return EvalModel(source.whole, run if (run / CONFIG).is_file() else None, source)


def model_label(model: EvalModel) -> str:
    """Name of the model for a folder."""
    path = model.path.absolute()
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{model.run.name}-{path.name}" if model.run else path.name)


def find_sets(suites: str, files: Sequence[str], folder: Path | None) -> list[dict[str, Any]]:
    """Name of each set, and its preset, path and split, if any. Raises UserError."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--data-dir: {folder} is not a folder")
    sets: list[dict[str, Any]] = []
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
        sets.append(part)
    for item in files:
        # Paths may contain "=" too, so the part before it must be a valid name.
        name, eq, file = item.partition("=")
        if not eq or not re.fullmatch(NAME, name):
            name, file = Path(item).stem, item
            if not re.fullmatch(NAME, name):
                raise UserError(f"--data: {name!r} is not a valid name of a set; give NAME={item}")
        sets.append({"name": name, "path": str(Path(file).absolute())})
    if not sets:
        raise UserError("no problems to evaluate; give --suite NAME,NAME or --data FILE")
    names = [part["name"] for part in sets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two sets are named {twice}; rename one of them with --data NAME=FILE")
    return sets


def _find_copy(name: str, folder: Path) -> Path:
    """The file of a suite: its name, or the name and ``_test`` or ``-test``."""
    tried = [folder / f"{stem}{end}" for stem in (name, f"{name}_test", f"{name}-test") for end in _ENDINGS]
    path = next((p for p in tried if p.exists()), None)
    if path is None:
        raise UserError(
            f"--data-dir: {folder} has no file for {name} ({name}.jsonl, .parquet or .arrow); give it with "
            f"--suite {name}=FILE"
        )
    return path


def _check_overrides(overrides: Sequence[str]) -> None:
    known = set(valid_keys(Settings))
    for item in overrides:
        key = item.partition("=")[0]
        if instead := _OPTIONS.get(key) or _OPTIONS.get(key.partition(".")[0]):
            raise UserError(f"{item!r}: {instead}")
        if "." not in key or (key in known and not tag_of_setting(key).evaluated):
            raise UserError(f"{item!r}: has no effect on an evaluation; remove it")


def _device() -> str:
    """The device: cuda if there is a GPU, else cpu."""
    return "cuda" if has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") else "cpu"
