"""A study: runs with the same settings and different seeds are an arm; means and differences for the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rpg_megatron.commands.report.run_files import RunFiles, as_text, mean, run_ends
from rpg_megatron.commands.report.seeds import compare, estimate, t_quantile
from rpg_megatron.config.affects import tag_of_setting

_COMPARED = 8
"""Maximum arms whose pairs are compared: 28 pairs."""
_SHOWN, _VALUE = 3, 28
"""Settings in each arm's name, beyond which a name has only what is unusual; characters of a value."""
_LOSS = "sft/heldout_loss"


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed only."""

    name: str
    """The settings that tell it from the other arms."""
    runs: dict[str, int]
    """Seed -> index of its run."""
    repeats: tuple[int, ...]
    """Runs whose seed another run with more steps has; they are not counted."""


def find_arms(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Arm]:
    """The arms in the order of the runs; none unless one of them has two seeds.

    names: of the runs. A run without readable settings is an arm of its own, which has its name.
    """
    groups: dict[Any, list[int]] = {}
    configs: dict[Any, dict[str, str]] = {}
    for i, run in enumerate(runs):
        config = {key: as_text(value) for key, value in run.config.items() if not _is_ignored(key)}
        group = frozenset(config.items()) if run.config else i
        groups.setdefault(group, []).append(i)
        configs[group] = config
    known = [group for group in groups if not isinstance(group, int)]
    titles: dict[Any, str] = {group: names[group] for group in groups if isinstance(group, int)}
    titles |= dict(zip(known, name_arms([configs[group] for group in known]), strict=True))
    arms = []
    for group, members in groups.items():
        seeds: dict[str, int] = {}
        for i in sorted(members, key=lambda i: -runs[i].steps):
            seeds.setdefault(as_text(runs[i].config.get("seed")), i)
        ordered = dict(sorted(seeds.items(), key=lambda item: (len(item[0]), item[0])))
        arms.append(Arm(titles[group], ordered, tuple(i for i in members if i not in ordered.values())))
    return arms if any(len(arm.runs) > 1 for arm in arms) else []


def _is_ignored(key: str) -> bool:
    """Whether runs of an arm may differ in it: the seed, and what affects results by rounding at most."""
    return key.partition(".")[0] == "seed" or tag_of_setting(key).what not in ("training", "results")


def name_arms(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """A unique name for each of these different settings, of as few of them as tell all apart."""
    differing = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if len({config.get(key) for config in configs}) > 1
    ]
    keys: list[str] = []
    told = 1
    # Settings that all have come first: the keys of a section may depend on its type.
    for key in sorted(differing, key=lambda key: any(key not in config for config in configs)):
        apart = len({tuple(config.get(k) for k in (*keys, key)) for config in configs})
        if apart > told:
            keys, told = [*keys, key], apart
        if told == len(configs):
            break
    usual = {key: Counter(config.get(key) for config in configs).most_common(1)[0][0] for key in keys}
    short = {key: re.sub(r"(?<=.)\.(path|type)$", "", key).rpartition(".")[2] for key in keys}
    labels = {key: key if list(short.values()).count(name) > 1 else name for key, name in short.items()}
    names: list[str] = []
    for config in configs:
        shown = keys if len(keys) <= _SHOWN else [key for key in keys if config.get(key) != usual[key]]
        title = " · ".join(_setting(labels[key], config.get(key, "null")) for key in shown)
        title = title or ("usual settings" if keys else "all runs")
        names.append(f"{title} ({names.count(title) + 1})" if title in names else title)
    return names


def _setting(label: str, value: str) -> str:
    """A word by itself, such as ``urkl``; another value behind its key, the end of a path only."""
    value = value.rstrip("/").rpartition("/")[2] if value.startswith(("/", "./", "~")) else value
    value = value if len(value) <= _VALUE else value[: _VALUE - 1] + "…"
    if value == "null":
        return f"{label} none"
    unclear = value in ("true", "false", "auto", "on", "off", "all", "none")
    word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", value) and not unclear
    return value if word else f"{label} {value}"


def describe_study(runs: Sequence[RunFiles], arms: Sequence[Arm]) -> dict[str, Any]:
    """Arms, their means and their differences as a dict for JSON."""
    keys = dict.fromkeys(k for run in runs for row in run.rows for k in row if _is_measure(k))
    most = max(len(arm.runs) for arm in arms)
    return {
        "arms": [_describe_arm(runs, arm) for arm in arms],
        "measures": [_describe_measure(runs, arms, key) for key in keys],
        "compared": min(len(arms), _COMPARED),
        "ignored": sorted({key for run in runs for key in run.config if _is_ignored(key)}),
        "t": [0.0, *(t_quantile(freedom) for freedom in range(1, most))],
    }


def _is_measure(key: str) -> bool:
    return key == _LOSS or (key.startswith("eval/") and "/avg@" in key)


def _describe_arm(runs: Sequence[RunFiles], arm: Arm) -> dict[str, Any]:
    members = [runs[i] for i in arm.runs.values()]
    rewards = [run.series("reward/mean") for run in members]
    speeds = [run.series("throughput/tokens_per_second") for run in members]
    return {
        "name": arm.name,
        "runs": [*arm.runs.values()],
        "repeats": arm.repeats,
        "finished": sum(run.finished for run in members),
        "running": sum(run.running and not run.finished for run in members),
        "steps": _ends(run.steps for run in members),
        "reward": estimate([mean([v for _, v in run_ends(series)[1]]) for series in rewards if series]),
        "speed": estimate([mean([v for _, v in series]) for series in speeds if series]),
    }


def _describe_measure(runs: Sequence[RunFiles], arms: Sequence[Arm], key: str) -> dict[str, Any]:
    best = min if key == _LOSS else max
    series = [{seed: s for seed, i in arm.runs.items() if (s := runs[i].series(key))} for arm in arms]
    last = [{seed: s[-1][1] for seed, s in of_arm.items()} for of_arm in series]
    steps = [[s[-1][0] for s in of_arm.values()] for of_arm in series]
    pairs = []
    for j, i in combinations(range(min(len(arms), _COMPARED)), 2):  # a later arm against an earlier one
        if (found := compare(last[i], last[j])) is not None:
            pair = {"arms": (i, j), "difference": found.value, "interval": found.interval}
            pair |= {"paired": found.paired, "seeds": (len(last[i]), len(last[j]))}
            pairs.append(pair | {"verdict": found.verdict, "steps": _ends(steps[i] + steps[j])})
    return {
        "name": "held-out loss" if key == _LOSS else key.removeprefix("eval/"),
        "kind": "number" if key == _LOSS else "percent",
        "last": [estimate([*of_arm.values()]) for of_arm in last],
        "best": [estimate([best(v for _, v in s) for s in of_arm.values()]) for of_arm in series],
        "steps": [_ends(of_arm) for of_arm in steps],
        "pairs": pairs,
    }


def _ends(values: Iterable[int]) -> tuple[int, int] | None:
    known = [*values]
    return (min(known), max(known)) if known else None
