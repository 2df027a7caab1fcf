"""Which features meet in which run, and which pairs are refused: the tables of two feature-pairs.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations

from rpg_megatron.config import Settings, load_settings
from tests.support.runs import QUICKSTART, QUICKSTART_MOE

MODEL, MIXTURE = (
    file.parent / "quickstart" / name for file, name in ((QUICKSTART, "model"), (QUICKSTART_MOE, "moe_model"))
)
PROMPTS, SAMPLES, STEPS = 8, 2, 3
WARM_START = QUICKSTART.with_name("warm_start.yaml")
SFT = [
    "parallel.tensor=1",
    "training.tokens_per_microbatch=256",
    "sft.epochs=0.2",
    "sft.batch_size=16",
    "sft.every=2",
    "evaluation.data.limit=4",
    "engine.max_sequences=16",
    "engine.kv_cache_gib=0.25",
    "checkpoint.every=1",
]
RL = [
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.samples_per_prompt={SAMPLES}",
    f"training.steps={STEPS}",
    "training.minibatches=2",
    "training.tokens_per_microbatch=256",
    "parallel.tensor=1",
    "engine.max_sequences=16",
    "engine.kv_cache_gib=0.25",
    "evaluation=null",
    "optimizer.lr=1e-3",
]
"""Of every run but fine-tuning."""
FEATURES: dict[str, Callable[[Settings], bool]] = {
    "adapters": lambda s: s.lora is not None,
    "teacher": lambda s: s.teacher is not None,
    "branches": lambda s: "branching" in str(getattr(s.rollout.episode, "type", "")),
    "colocated": lambda s: s.engine.colocated,
    "ahead": lambda s: s.rollout.ahead > 0,
    "shared prompts": lambda s: s.training.share_prompts is True,
    "mixture": lambda s: s.model.path.name == MIXTURE.name,
    "router replay": lambda s: s.training.router_replay == "rollout",
    "old: update": lambda s: s.training.old == "update",
    "old: engine": lambda s: s.training.old == "engine",
    "fine-tuning": lambda s: s.sft is not None,
    "held anchor": lambda s: s.anchor.type != "old",
    "KL in the reward": lambda s: s.reward.kl is not None,
    "FP8 emulation": lambda s: s.precision.fp8 is not None,
    "correction": lambda s: s.correction is not None,
    "epochs": lambda s: s.training.ppo_epochs > 1,
    "Muon": lambda s: s.optimizer.type == "muon",
    "kept groups": lambda s: s.sft is None,  # each run is stopped in a rollout, and goes on
    "resume": lambda s: True,
}
"""Name -> whether a run with these settings has the feature."""

_ADAPTERS = "lora={rank: 4, alpha: 8, targets: [q_proj, k_proj, v_proj, o_proj]}"
_BRANCHES = "rollout.episode={type: tests.support.episodes:branching, workers: 2}"
_TEACHER, _DISTIL = f"teacher={{path: {MODEL}}}", "objective={type: distil, clip: null}"
_AHEAD, _COLOCATED = "rollout.ahead=1", "engine.colocated=true"
_SHARED, _REPLAY = "training.share_prompts=true", "training.router_replay=rollout"
_ENGINE = "training.old=engine"
_UPDATE = ["training.old=update", "training.minibatches=1"]
_ANCHOR = "anchor={type: every, updates: 2}"
_KL = ["objective={type: ppo}", "advantage.type=grpo", "reward.kl={}", _ANCHOR]
_FP8 = ["precision={dtype: bfloat16, fp8: {recipe: blockwise}}", "guards.mismatch=warn"]
_CORRECTION, _EPOCHS = "correction.type=truncate", "training.ppo_epochs=2"
_MUON = "optimizer={type: muon, distributed: false, lr: 1e-3}"
_MIXTURE = f"model.path={MIXTURE}"
_ALL = [_BRANCHES, _SHARED, _CORRECTION]

RUNS: dict[str, list[str]] = {
    "adapters ahead of a mixture": [_ADAPTERS, _AHEAD, *_ALL, _MIXTURE, _REPLAY, _EPOCHS, *_KL],
    "adapters by turns": [_ADAPTERS, _COLOCATED, *_ALL, _MIXTURE, _REPLAY, *_UPDATE, _EPOCHS, _ANCHOR],
    "Muon by turns": [_MUON, _COLOCATED, *_ALL, _MIXTURE, _REPLAY, _EPOCHS, *_KL],
    "Muon ahead": [_MUON, _AHEAD, *_ALL, _MIXTURE, _REPLAY, *_UPDATE, _ANCHOR],
    "a teacher of adapters": [_TEACHER, _DISTIL, _ADAPTERS, _AHEAD, *_ALL, _MIXTURE, _REPLAY, _EPOCHS],
    "a teacher by turns": [_TEACHER, _DISTIL, _MUON, _COLOCATED, *_ALL, _MIXTURE, _REPLAY, *_UPDATE],
    "old of the engine, ahead": [_ENGINE, _AHEAD, _ADAPTERS, _BRANCHES, _SHARED, _MIXTURE, _REPLAY, _ANCHOR],
    "old of the engine, by turns": [
        *(_ENGINE, _COLOCATED, _MUON, _BRANCHES, _SHARED, _MIXTURE, _REPLAY, _EPOCHS, _TEACHER, _DISTIL)
    ],
    "FP8 by turns": [*_FP8, _ADAPTERS, _COLOCATED, *_ALL, _EPOCHS, *_KL],
    "FP8 ahead": [*_FP8, _MUON, _AHEAD, *_ALL, *_UPDATE, _ANCHOR],
    "FP8 with a teacher": [*_FP8, _TEACHER, _DISTIL, _ENGINE, _BRANCHES, _SHARED],
}
COVERING = "adapters ahead of a mixture"
"""The run of the default tier."""
TUNED: dict[str, list[str]] = {
    "fine-tuning of adapters": [_ADAPTERS, _MIXTURE, _COLOCATED, _BRANCHES],
    "fine-tuning by Muon": [_MUON, _MIXTURE],
    "fine-tuning in FP8": [*_FP8],
}
"""Runs of fine-tuning, with an evaluation by an engine."""

_NO_EFFECT = "has no effect with sft"
REFUSED: dict[tuple[str, str], tuple[list[str], str]] = {
    ("adapters", "Muon"): ([_ADAPTERS, _MUON], "lora excludes optimizer.type muon"),
    ("teacher", "fine-tuning"): ([_TEACHER], f"teacher {_NO_EFFECT}"),
    ("teacher", "held anchor"): ([_TEACHER, _DISTIL, _ANCHOR], "teacher takes the place of the anchor"),
    ("teacher", "KL in the reward"): ([_TEACHER, _DISTIL, "reward.kl={}"], "reward.kl and teacher exclude"),
    ("colocated", "ahead"): ([_COLOCATED, _AHEAD, _CORRECTION], "rollout.ahead excludes engine.colocated"),
    ("ahead", "fine-tuning"): ([_AHEAD], f"rollout.ahead {_NO_EFFECT}"),
    ("shared prompts", "fine-tuning"): ([_SHARED], "training.share_prompts has no effect"),
    ("mixture", "FP8 emulation"): ([_MIXTURE, *_FP8], "precision.fp8 is not supported for mixtures"),
    ("router replay", "fine-tuning"): ([_MIXTURE, _REPLAY], f"training.router_replay {_NO_EFFECT}"),
    ("router replay", "FP8 emulation"): ([_MIXTURE, _REPLAY, *_FP8], "not supported for mixtures"),
    ("old: update", "fine-tuning"): (["training.old=update"], f"training.old {_NO_EFFECT}"),
    ("old: update", "KL in the reward"): (
        [*_KL, "training.old=update"],
        "training.old update excludes reward.kl",
    ),
    ("old: engine", "fine-tuning"): ([_ENGINE], f"training.old {_NO_EFFECT}"),
    ("old: engine", "KL in the reward"): ([*_KL, _ENGINE], "training.old engine excludes reward.kl"),
    ("old: engine", "correction"): ([_ENGINE, _CORRECTION], "so correction has no effect"),
    ("fine-tuning", "held anchor"): ([_ANCHOR], f"anchor {_NO_EFFECT}"),
    ("fine-tuning", "KL in the reward"): (["reward.kl={}"], f"reward.kl {_NO_EFFECT}"),
    ("fine-tuning", "correction"): ([_CORRECTION], f"correction {_NO_EFFECT}"),
    ("fine-tuning", "epochs"): ([_EPOCHS], f"training.ppo_epochs {_NO_EFFECT}"),
}
"""Pair -> settings that ask for both, and what the refusal says."""
APART = {
    ("old: update", "old: engine"): "two values of one setting",
    ("fine-tuning", "kept groups"): "no rollouts",
}
"""Pairs that cannot be asked for."""


def settings_of(name: str) -> Settings:
    """The settings of a run."""
    if name in TUNED:
        return load_settings(WARM_START, [*SFT, *TUNED[name]])
    return load_settings(QUICKSTART, [*RL, *RUNS[name]])


def features_of(settings: Settings) -> list[str]:
    """The names of its features, in the order of the table."""
    return [name for name, has in FEATURES.items() if has(settings)]


def pairs_of(features: Iterable[str]) -> set[tuple[str, str]]:
    """Pairs in the order of the table."""
    return set(combinations(features, 2))


def meetings() -> dict[tuple[str, str], list[str]]:
    """Pair -> the runs in which its features meet."""
    met: dict[tuple[str, str], list[str]] = {}
    for name in (*RUNS, *TUNED):
        for pair in pairs_of(features_of(settings_of(name))):
            met.setdefault(pair, []).append(name)
    return met


def table() -> str:
    """What docs/evidence/feature-pairs.md says: the runs, and the numbers of those in which a pair meets."""
    met, numbers = meetings(), {name: str(n) for n, name in enumerate((*RUNS, *TUNED), 1)}
    names = list(FEATURES)
    lines = ["| |" + "".join(f" {name} |" for name in names[1:]), "|---" * len(names) + "|"]
    for row in names[:-1]:
        cells = [row]
        for column in names[1:]:
            pair = row, column
            runs = " ".join(numbers[name] for name in met.get(pair, ()))
            before = names.index(column) <= names.index(row)
            cells.append("" if before else "refused" if pair in REFUSED else APART.get(pair, runs))
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        *(f"{numbers[name]}. {name}: {', '.join(features_of(settings_of(name)))}" for name in numbers),
    ]
    return "\n".join(lines)


def refusals() -> str:
    """The table of docs/feature-pairs.md."""
    lines = ["| refused | with | |", "|---|---|---|"]
    lines += [f'| {a} | {b} | "{message}" |' for (a, b), (_, message) in REFUSED.items()]
    return "\n".join(lines)
