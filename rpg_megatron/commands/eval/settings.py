"""Settings from the options of ``rpg-megatron eval``: model, problem sets, sampling."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.checkpoint_path import EXPORTS, kind_of, list_exports, open_step
from rpg_megatron.checkpoints.hf_hub import download
from rpg_megatron.checkpoints.run_folder import MODEL
from rpg_megatron.commands.convert.command import open_hf, open_megatron
from rpg_megatron.commands.convert.staging import Source
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.config.affects import tag_of_setting
from rpg_megatron.config.base import NAME
from rpg_megatron.config.evaluation import OWN_SAMPLING, EvaluationSettings
from rpg_megatron.config.explanation import valid_keys
from rpg_megatron.config.files import real_path
from rpg_megatron.config.merging import apply_override
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
    "model": "give the model as MODEL",
    "rollout.max_response_tokens": "use --max-response-tokens",
    "evaluation": "use --suite, --data, --samples and the other options",
}
"""Settings, or a section of them, for which there are options."""
_STYLE = {"template", "chat", "system", "thinking"}
"""Settings of a run's problems that other problems take over."""
_KEPT = {"stop", "stop_token_ids", "episode", "tool_call_parser"}
"""Settings of a run's rollouts that its evaluation takes over."""
_ENDINGS = (".jsonl", ".parquet", ".arrow", "")
_TEST = {"gsm8k": "test", "math": "test"}
"""Held-out split of presets whose default is the training split."""
_RESPONSE = 4096
_PROMPT = 2048
"""Default tokens of response and prompt, limited by the model's positions."""
_Raw = dict[str, Any]
"""A section of settings as plain values."""


@dataclass
class EvalRequest:
    """What to evaluate. What is not given has the run's value if MODEL is a run, else a default."""

    model: Path
    suites: str = ""
    """Known sets, NAME or NAME=FILE, separated by commas."""
    files: Sequence[str] = ()
    """FILE or NAME=FILE."""
    folder: Path | None = None
    """Folder with the files of the suites."""
    sampling: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Key of ``OWN_SAMPLING`` -> its [SET=]VALUE, for all sets and for each."""
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class EvalModel:
    """The model to evaluate."""

    path: Path
    """Its checkpoint."""
    run: Path | None
    """The run that wrote it, if any."""
    source: Source | None = None
    """A checkpoint of Megatron's format or in FP8, which must be converted for the engines; None: not so."""

    @property
    def config(self) -> Path:
        """Folder with config.json and tokenizer."""
        return self.path if self.source is None else self.source.config

    @property
    def label(self) -> str:
        """Its name, for a folder."""
        name = self.path.absolute().name
        return re.sub(r"[^A-Za-z0-9._-]", "_", f"{self.run.name}-{name}" if self.run else name)


def make_request(request: EvalRequest) -> tuple[Settings, EvalModel]:
    """Settings whose ``model.path`` is the checkpoint, and the model. Raises UserError for bad options."""
    model = find_model(request.model)
    path = str(model.path.absolute())
    shape = read_model_shape(model.config)
    positions = shape.max_positions
    if model.run is not None:
        base = load_run_settings(model.run / CONFIG)
    else:
        limit = {"max_response_tokens": min(_RESPONSE, positions // 2)}
        raw: _Raw = {"model": {"path": path}, "data": {"path": path}, "reward": {"type": "auto"}}
        base = make_settings(raw | {"rollout": limit}, None, "eval")
    evaluation, sets = _problems(base, request)
    for_all = (text for text in request.sampling.get("max_response_tokens", ()) if "=" not in text)
    response: Any = next(for_all, base.rollout.max_response_tokens)
    limits = (response, *(part.get("max_response_tokens") for part in (evaluation, *sets.values())))
    longest = max((int(limit) for limit in limits if str(limit).isdecimal()), default=0)
    for part in sets.values():
        part.setdefault("max_prompt_tokens", max(1, min(_PROMPT, positions - longest)))
        for item in request.overrides:
            if item.startswith("data."):
                apply_override({"data": part}, item)
    first = next(iter(sets.values()))
    raw = {
        "name": "eval",
        "seed": base.seed,
        "device": "cuda" if has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") else "cpu",
        "model": {"path": path},
        "precision": {"dtype": "float32" if shape.dtype == "float32" else "bfloat16"},
        "rollout": base.rollout.model_dump(mode="json", include=_KEPT) | {"max_response_tokens": response},
        "engine": base.engine.model_dump(include={"max_sequences"}),
        "guards": base.guards.model_dump(include={"reward_failures"}),
        "reward": _reward(base.reward, request.overrides),
        "data": {key: value for key, value in first.items() if key not in ("name", *OWN_SAMPLING)},
        "evaluation": evaluation,
    }
    settings = make_settings(
        raw, [item for item in request.overrides if not item.startswith("data.")], "eval"
    )
    for prompts in settings.prompt_sets[1:]:
        if prompts.tokens > positions:
            raise UserError(
                f"data.max_prompt_tokens ({prompts.data.max_prompt_tokens}) + --max-response-tokens "
                f"({prompts.response_tokens}) is more than the model's {positions} positions "
                "(max_position_embeddings); lower one of the two"
            )
    return settings, model


def _problems(base: Settings, request: EvalRequest) -> tuple[_Raw, dict[str, _Raw]]:
    """The section ``evaluation`` with the sampling, and the section of each of its sets in it, by name.

    What is given for all sets replaces also the own values of a set; what is given for one set is last.
    Raises UserError.
    """
    own = base.evaluation
    if own is not None and _asks_for_own(own, request):
        section = own.model_dump(mode="json")
        parts = section["sets"] or [section["data"]]
        sets = dict(zip([part.name for part in own.heldout], parts, strict=True))
    else:
        data = own.heldout[0].data if own else base.sft.data if base.sft else base.data
        assert data is not None
        style = data.model_dump(mode="json", include=_STYLE)
        parts = [style | part for part in find_sets(request.suites, request.files, request.folder)]
        sets = {part["name"]: part for part in parts}
        section = own.model_dump(include={*OWN_SAMPLING, "top_k"}) if own is not None else {}
        section["sets"] = parts
    places = {"": section} | (sets if section["sets"] else dict.fromkeys(sets, section))
    for key, texts in request.sampling.items():
        option, given = f"--{key.replace('_', '-')}", set[str]()
        for name, _, value in sorted(text.rpartition("=") for text in texts):  # those for all sets first
            if name not in places:
                known = ", ".join(sets)
                raise UserError(f"{option} {name}=...: there is no set {name}; the sets are {known}")
            if name in given:
                raise UserError(f"{option} is given twice for {name or 'all sets'}; remove one of them")
            given.add(name)
            for part in () if name else sets.values():
                part.pop(key, None)
            places[name][key] = value
    return section, sets


def _reward(reward: RewardSettings, overrides: Sequence[str]) -> _Raw:
    """The run's reward without KL, which needs the trainer.

    Of several terms, only the first one, which decides what is correct. A type on the command line replaces
    the run's, including its settings.
    """
    raw = reward.model_dump(mode="json") | {"kl": None}
    if any(item.startswith("reward.type=") for item in overrides):
        return {key: raw[key] for key in RewardSettings.model_fields if key != "terms"}
    return raw | {"terms": {name: raw["terms"][name] | {"weight": 1.0} for name in list(raw["terms"])[:1]}}


def _asks_for_own(own: EvaluationSettings, request: EvalRequest) -> bool:
    """Whether a run is to be evaluated as it evaluates itself: no set is given, or the file of its only set.

    Seeds depend on the name of the set in the run, so this gives the same result as the run itself.
    """
    if request.suites or len(request.files) != 1 or own.data is None or own.data.path is None:
        return not request.files and not request.suites
    name, _, file = request.files[0].rpartition("=")
    return name in ("", own.name) and real_path(Path(file).absolute()) == real_path(own.data.path)


def check_request(settings: Settings, model: EvalModel) -> None:
    """Checks before any process is started. Raises UserError."""
    has = ALL - {"trainer"} if model.source is None else ALL - {"trainer", "weights"}
    try:
        check_start(CheckedRun(settings.changed(model={"path": model.config}), has))
    except UserError as e:  # of a key that only these options set
        message = str(e).replace("engine: tensor", "--tensor: tensor", 1)
        raise UserError(message.replace("data.path: ", "--data: ", 1)) from None


def find_model(path: Path) -> EvalModel:
    """The checkpoint that MODEL means; the id of a model on the hub is downloaded.

    A run means its newest export or, without one, its newest checkpoint; a checkpoint of a run means the
    export of that step if there is one. Raises UserError.
    """
    if is_hub_id(path) and not path.exists() and path.parent.name != "runs":
        path = download(str(path), key="MODEL")
    kind, whole = kind_of(path, "MODEL"), path.absolute()
    run, exports = None, []
    if kind == "hf":
        run, exports = whole.parents[1] if whole.parent.name == EXPORTS else None, [path]
    elif kind == "run":
        run, exports = whole, list_exports(path)
    elif kind == "step":
        step = open_step(path, "MODEL")
        run = step.run
        exports = [e for e in list_exports(run) if (e.name, MODEL) == (step.folder.name, step.weights.name)]
    run = run if run is not None and (run / CONFIG).is_file() else None
    if exports:
        converted = read_model_shape(exports[-1]).fp8_files  # engines are to have what a run trains
        return EvalModel(exports[-1], run, open_hf(exports[-1]) if converted else None)
    source = open_megatron(path, name="MODEL")
    return EvalModel(source.whole, run, source)


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
        place = {"path": str(path.absolute())} if path else {"split": _TEST[name]} if name in _TEST else {}
        sets.append({"name": name, "preset": name} | place)
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
    return sets


def _find_copy(name: str, folder: Path) -> Path:
    """The file of a suite: its name, or the name and ``_test`` or ``-test``."""
    files = (folder / f"{name}{test}{end}" for test in ("", "_test", "-test") for end in _ENDINGS)
    if (file := next(filter(Path.exists, files), None)) is None:
        raise UserError(
            f"--data-dir: {folder} has no file for {name} ({name}.jsonl, .parquet or .arrow); give it with "
            f"--suite {name}=FILE"
        )
    return file


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise UserError for settings of the user that have no effect, or for which there are options."""
    known = set(valid_keys(Settings))
    for item in overrides:
        key = item.partition("=")[0]
        if instead := _OPTIONS.get(key) or _OPTIONS.get(key.partition(".")[0]):
            raise UserError(f"{item!r}: {instead}")
        if key in known and "." not in key and tag_of_setting(key).evaluated:
            raise UserError(f"{item!r}: give the keys of this section one by one, as {key}.KEY=VALUE")
        if "." not in key or (key in known and not tag_of_setting(key).evaluated):
            raise UserError(f"{item!r}: has no effect on an evaluation; remove it")
