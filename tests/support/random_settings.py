"""Random changes of settings, in and out of their ranges: from a walk over the settings' classes, and listed
ones that the walk would hardly reach (layouts, FP8, experts, placements, own code, columns of data).
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel

from rpg_megatron.config import Settings
from rpg_megatron.config.base import sections_in

OWN_MODULE = """
class Loss:
    def __init__(self, beta: float = 0.1):
        pass

    def __call__(self, *args, **keywords):
        pass


def loss(*args):
    pass


def advantage(rewards, group, lengths, scale: float = 1.0):
    return rewards


def reward(response, answer, bonus: float = 0.0):
    return float(response == answer) + bonus


def fails(response, answer):
    raise KeyError("meta")


def needs_column(response, answer, row):
    return float(row["level"])


def rows(count: int = 8):
    for number in range(count):
        yield {"prompt": f"{number}+1", "answer": str(number + 1)}
"""
"""To be imported as ``own_code_of_test``."""
_OWN = "own_code_of_test"
_LISTED = (
    *(f"parallel.{key}={size}" for key in ("tensor", "pipeline", "context", "data") for size in (2, 3, 4)),
    *("parallel.sequence=true", "parallel.virtual=2", "parallel.expert=2", "parallel.expert=3"),
    *("parallel.expert_tensor=2", "engine.tensor=2", "engine.tensor=3", "engine.tensor=4"),
    *("engine.replicas=2", "engine.replicas=3", "engine.colocated=true", "engine.kv_cache_gib=0.001"),
    "engine.arguments=['--max-num-seqs=8']",
    "engine.arguments=['--max-nom-seqs=8']",
    *(f"bridge.transport={kind}" for kind in ("shared_memory", "process_group", "cuda_ipc")),
    *(
        f"precision={{dtype: bfloat16, fp8: {{recipe: {kind}}}}}"
        for kind in ("blockwise", "tensorwise", "delayed")
    ),
    "precision={dtype: bfloat16, fp8: {recipe: tensorwise, first_last_bf16: 2}}",
    *("precision.fp8={}", "precision.dtype=bfloat16", "device=cuda", "device=cpu"),
    *("training.minibatches=64", "training.minibatches=7", "training.router_replay=trainer"),
    *("training.router_replay=rollout", "training.router_aux_loss=0.01", "memory.recompute=selective"),
    *("rollout.max_response_tokens=100000", "rollout.stop_token_ids=[100000]", "rollout.ahead=1"),
    *("rollout.samples_per_prompt=1", "rollout.dynamic={}", "correction.type=truncate"),
    *(f"objective={{type: {kind}}}" for kind in ("rpg", "grpo", "dapo", "reinforce_plus_plus", "nothing")),
    *("anchor.type=fixed", "advantage.type=grpo", "aggregation.type=sequence_mean"),
    *(f"objective={{type: '{_OWN}:{name}'}}" for name in ("Loss", "loss", "Missing", "advantage")),
    f"objective={{type: '{_OWN}:Loss', beta: 0.2}}",
    f"objective={{type: '{_OWN}:Loss', bet: 0.2}}",
    "objective={type: 'no_such_module:Loss'}",
    f"advantage={{type: '{_OWN}:advantage', scale: 2}}",
    f"advantage={{type: '{_OWN}:advantage', scale: much}}",
    f"optimizer.schedule={{type: '{_OWN}:nothing'}}",
    *(f"reward={{type: '{_OWN}:{name}'}}" for name in ("reward", "fails", "needs_column", "Missing")),
    f"reward={{type: '{_OWN}:reward', bonus: 1}}",
    f"reward={{type: '{_OWN}:reward', bonis: 1}}",
    "reward.type=no_such_module:reward",
    f"data.source={{type: '{_OWN}:rows'}}",
    "data.path=/nowhere/train.jsonl",
    *("data.prompt_key=prompt", "data.prompt_key=question", "data.answer_key=missing", "data.chat=true"),
    *("data.answer_after='####'", "data.preset=gsm8k", "data.preset=gsm9k", "data.max_prompt_tokens=1"),
    *("data.max_prompt_tokens=1", "data.max_prompt_tokens=100000", "data.template=no place", "data.limit=1"),
    *("data.order_by=level", "data={mixture: [{path: TRAIN}, {path: /nowhere.jsonl}]}"),
    "data={mixture: [{path: TRAIN}, {path: TRAIN, weight: 2}]}",
    "evaluation={data: {path: TRAIN, max_prompt_tokens: 1}}",
    "evaluation={sets: [{name: a, path: TRAIN}, {name: b, path: /nowhere.jsonl}]}",
    *(
        "evaluation=null",
        "evaluation.samples=0",
        "model.path=/nowhere",
        "model.path=MIXTURE",
        "model.path=DENSE",
    ),
    *("model.path=DESCRIPTION", "model.path=DAMAGED", "trackers=[]", "trackers=[tensorboard, tensorboard]"),
    *("profile.ranks=[1]", "profile.ranks=[9]", "cluster.trainer_nodes=1", "checkpoint.every=null"),
    *("rollouts.keep=2", "no_such_key=1", "parallel.tensr=2"),
)


def random_changes(random: Random) -> list[str]:
    """One to four ``key=value`` pairs."""
    walked = list(_leaves(Settings))
    changes = []
    for _ in range(random.randint(1, 4)):
        if random.random() < 0.7:
            changes.append(random.choice(_LISTED))
        else:
            key, annotation, limits = random.choice(walked)
            changes.append(f"{key}={json.dumps(_value(random, annotation, limits))}")
    return changes


_NOT_WALKED = ("name", "runs", "model.path", "model.revision", "hub", "subset", "split", "url", "interface")
"""A path is in the list; a name on the hub would be looked up there."""


def _leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, dict[str, float]]]:
    """Dotted key, annotation and limits of each value that is no section."""
    for name, field in section.model_fields.items():
        key = prefix + name
        if (
            name in _NOT_WALKED
            or key in _NOT_WALKED
            or name in ("path", "source", "mixture", "sets", "terms")
        ):
            continue
        inner = sections_in(field.annotation)
        for part in inner:
            yield from _leaves(part, f"{key}.")
        if not inner:
            limits = {
                mark: value
                for item in field.metadata
                for mark in ("ge", "gt", "le", "lt")
                if (value := getattr(item, mark, None)) is not None
            }
            yield key, field.annotation, limits


def _value(random: Random, annotation: Any, limits: dict[str, float]) -> Any:
    """A value of this type, or a wrong one."""
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    kind = random.choice(kinds)
    if random.random() < 0.05:
        return random.choice(["nonsense", -1, [], {"a": 1}, None])
    if kind is type(None):
        return None
    if typing.get_origin(kind) is typing.Literal:
        return random.choice([*typing.get_args(kind), "nonsense"])
    if kind is bool:
        return random.random() < 0.5
    low = limits.get("ge", limits.get("gt", 0))
    high = limits.get("le", limits.get("lt", low + 8))
    if kind is int:
        return random.choice([int(low) - 1, int(low), int(low) + 1, int(high), int(high) + 1, 2, 4])
    if kind is float:
        return random.choice([low - 0.5, low, (low + high) / 2, high, high + 0.5])
    if kind is str or kind is Path:
        return random.choice(["", "text", "a/b", "x" * 300])
    return random.choice([[], [1], ["text"], {}, "text", 1])


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
