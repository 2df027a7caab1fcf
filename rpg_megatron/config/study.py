"""A study: one config trained with several settings and seeds, each combination a run of its own."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from rpg_megatron.config.base import NAME, Section
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.explanation import explain_errors
from rpg_megatron.config.files import flatten
from rpg_megatron.config.merging import apply_override, merge_section, read_merged
from rpg_megatron.config.parsing import read_yaml
from rpg_megatron.config.settings import Settings, make_settings

_MOST = 1000
"""Largest number of runs."""
_UNFIT = re.compile(r"[^A-Za-z0-9.]+")
"""Characters of a value that a run's name leaves out."""
Changes = dict[str, Any]
"""Dotted key of a setting -> its value."""


class StudySettings(Section, affects="files"):
    """A file for ``rpg-megatron study``."""

    config: Path
    """The config of all runs, relative to this file."""
    name: Annotated[str, Field(pattern=NAME)] | None = None
    """The runs' names begin with it; null: the name of this file."""
    settings: Changes = Field(default_factory=dict)
    """Settings of all runs, by dotted key: {training.steps: 100}. A section is merged with the config's, as
    with extends; also in arms and grid."""
    arms: dict[Annotated[str, Field(pattern=NAME)], Changes] | list[Changes] | None = Field(
        None, min_length=1
    )
    """What is compared: settings by name, or a list of settings, whose names are made of what differs; null:
    only the grid."""
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Values of settings, by dotted key. Every arm is trained with every combination."""
    seeds: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Seeds of each arm; null: that of the config."""
    at_once: int | None = Field(None, ge=1)
    """Slurm: how many runs may run at the same time; null: all."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study."""

    number: int
    """From 1: the task of a job array."""
    arm: str
    seed: int | None
    overrides: tuple[str, ...]
    """key=value for the config, its name included."""
    settings: Settings


@dataclass(frozen=True)
class Study:
    """A study that was read and checked."""

    name: str
    config: Path
    runs: tuple[StudyRun, ...]
    at_once: int | None


def is_study(file: Path) -> bool:
    """Whether a YAML file is a study's. False for a file that cannot be read."""
    try:
        raw = read_yaml(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(raw, dict) and isinstance(raw.get("config"), str)


def load_study(file: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study, and the settings of all of its runs. overrides: KEY=VALUE for all runs.

    Seeds are the outer loop, so an interrupted study has whole sets of arms. Raises UserError.
    """
    try:
        raw = read_yaml(file)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    except yaml.YAMLError as e:
        raise UserError(f"{file}: not valid YAML: {shorten(' '.join(str(e).split()), 300)}") from None
    if isinstance(raw, dict) and "config" not in raw:
        fix = f"write a file with config: {file.name}, and seeds or arms"
        if not raw.keys().isdisjoint(("seeds", "arms", "grid")):
            fix = "add config: FILE, the config of all runs"
        raise UserError(f"{file}: is no study: it has no key config; {fix} (docs/studies.md)")
    try:
        study = StudySettings.model_validate(raw)
    except ValidationError as e:
        raise UserError(explain_errors(StudySettings, str(file), e)) from None
    name = study.name or _UNFIT.sub("-", file.stem).strip("-") or "study"
    seeds: list[int | None] = [None] if study.seeds is None else list(study.seeds)
    count = len(seeds) * len(_arms(study)) * math.prod(map(len, study.grid.values()))
    if count > _MOST:
        raise UserError(f"{file}: {count:,} runs; a study has at most {_MOST:,}")
    _check_keys(study, file)
    pairs = list(itertools.product(_arms(study), _points(study.grid)))
    arms = [arm | point for arm, point in pairs]
    names = _names(study, arms)
    for kind, values in (("seeds", seeds), ("arms", names)):
        twice: Any = next((v for i, v in enumerate(values) if v in values[:i]), None)
        if twice is not None:
            raise UserError(f"{file}: {kind} has {twice} twice; remove one of the two")
    compared = {"name", *(["seed"] if study.seeds else []), *(key for arm in arms for key in arm)}
    for item in overrides:
        key = item.partition("=")[0]
        clash = [k for k in compared if f"{k}.".startswith(f"{key}.") or key.startswith(f"{k}.")]
        if clash:
            raise UserError(f"{item}: the study sets {clash[0]} itself; change it in {file}")
    config = file.parent / study.config
    base = read_merged(config, Settings)
    runs = []
    for number, (seed, (arm, changes)) in enumerate(
        itertools.product(seeds, zip(names, pairs, strict=True)), 1
    ):
        full = "-".join([name, *filter(None, [arm, None if seed is None else f"s{seed}"])])
        own = _overrides(base, [study.settings, *changes])
        own += [*overrides, *([] if seed is None else [f"seed={seed}"]), f"name={full}"]
        settings = make_settings(copy.deepcopy(base), own, f"{file}: run {number} ({full})")
        runs.append(StudyRun(number, arm, seed, tuple(own), settings))
    known: dict[str, str] = {}
    for run in runs[: len(arms)]:
        plain = run.settings.model_dump(mode="json") | {"name": ""}
        same = known.setdefault(json.dumps(plain, sort_keys=True), run.arm)
        if same != run.arm:
            raise UserError(f"{file}: arms {same} and {run.arm} have the same settings; change or remove one")
    return Study(name, config, tuple(runs), study.at_once)


def _check_keys(study: StudySettings, file: Path) -> None:
    """Raise UserError if a setting is given in two places, of which one would have no effect."""
    arms = {key for arm in _arms(study) for key in flatten(arm) if arm}
    grid = {key for point in _points(study.grid) for key in flatten(point) if point}
    for where, keys in (("settings", study.settings), ("arms", arms), ("grid", grid)):
        if "name" in keys:
            raise UserError(f"{file}: {where} sets name, which the study gives each run; remove it")
        if study.seeds and "seed" in keys:
            raise UserError(f"{file}: {where} and seeds both set seed; remove one of the two")
    for key, other in itertools.product(sorted(arms), sorted(grid)):
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            raise UserError(f"{file}: arms set {key}, and grid sets {other}; remove one of the two")


def _overrides(base: dict[str, Any], changes: Sequence[Changes]) -> list[str]:
    """key=value for each change. A section is merged with what is below it, as with ``extends``."""
    raw, own = copy.deepcopy(base), []
    for key, value in (item for part in changes for item in part.items()):
        whole = merge_section(raw, key, value, Settings) if isinstance(value, dict) else value
        own.append(f"{key}={_as_yaml(whole)}")
        apply_override(raw, own[-1])
    return own


def _arms(study: StudySettings) -> list[Changes]:
    return list(study.arms.values()) if isinstance(study.arms, dict) else study.arms or [{}]


def _points(grid: dict[str, list[Any]]) -> list[Changes]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _names(study: StudySettings, arms: Sequence[Changes]) -> list[str]:
    """Names of the arms, of what differs between them; empty for a single one without a name."""
    given = list(study.arms) if isinstance(study.arms, dict) else [""] * len(_arms(study))
    points = _points(study.grid)
    labels = [part for part in given for _ in points]
    differing = {
        key
        for key in {k for arm in arms for k in arm}
        if len({json.dumps(a.get(key), default=str) for a in arms}) > 1
    }
    if isinstance(study.arms, dict):
        differing &= set(study.grid)
    return [
        "-".join(filter(None, [label, *(_label(k, v) for k, v in arm.items() if k in differing)]))
        or ("base" if len(arms) > 1 else "")
        for label, arm in zip(labels, arms, strict=True)
    ]


def _label(key: str, value: Any) -> str:
    """Such as lr1e-06: the last part of the key, and the value or, of a section, its type."""
    if isinstance(value, dict):
        value = value.get("type", "-".join(f"{k}{v}" for k, v in value.items()))
    return key.rpartition(".")[2] + (_UNFIT.sub("-", str(value)).rstrip("-") or "none")


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n...\n").strip()
