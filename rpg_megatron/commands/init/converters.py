"""Converters for ``init --from``, by our key: values that need more than taking over."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from rpg_megatron.config.parsing import read_yaml
from rpg_megatron.config.policy import is_hub_id

STACKS: dict[str, Any] = read_yaml(Path(__file__).with_name("stacks.yaml"))
_SWITCHES = ("rollout.dynamic", "reward.overlong", "reward.kl", "lora")
_NO_BOUND = 1e9


def convert(stack: str, given: dict[str, list[Any]]) -> tuple[dict[str, Any], set[str]]:
    """Our settings by dotted key, and the keys of which theirs were not taken.

    given: our key -> values of their keys, in the page's order; None: not set.
    """
    refused: set[str] = set()
    if stack == "TRL":  # its loss_type has both
        given["aggregation.type"] = given["objective.type"][:1]
        use_vllm = given["correction"][-1] and given["correction"][0] is not False
        given["correction.type"] = given["correction.type"] if use_vllm else []
    ours: dict[str, Any] = {}
    for key, values in given.items():
        value = next((v for v in reversed(values) if v is not None), None)
        words = STACKS["words"].get(key)
        if words and value is not None and (value := words.get(str(values[0]))) is None:
            refused.add(key)
        if value is not None:
            ours[key] = value
    if ours.get("name"):
        ours["name"] = re.sub(r"[^\w.-]", "-", Path(str(ours["name"])).name)
    for key in ("rollout.top_k", "evaluation.top_k"):
        if _number(ours.get(key)) <= 0:
            ours.pop(key, None)
    _convert_sizes(stack, given, ours, refused)
    _convert_loss(given, ours, refused)
    _convert_data(stack, given, ours)
    _convert_reward(given, ours, refused)
    for section in _SWITCHES:
        below = [key for key in ours if key.startswith(f"{section}.")]
        if not ours.pop(section, None if section != "lora" else ours.get("lora.rank")):
            for key in below:
                del ours[key]
        elif not below:
            ours[section] = {}
    return ours, refused


def _number(value: Any, default: float = 0) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _product(values: list[Any]) -> Any:
    return math.prod(v for v in values if _number(v))


def _convert_sizes(stack: str, given: dict[str, list[Any]], ours: dict[str, Any], refused: set[str]) -> None:
    """GPUs, batches, and numbers of updates there that are steps here."""
    sizes = [ours.get(f"parallel.{name}") for name in ("tensor", "pipeline", "context")]
    gpus, engines = _product(given["parallel.data"]), given["engine.replicas"]
    if ours.get("engine.colocated", True):
        ours["engine.replicas"] = gpus // _product([ours.get("engine.tensor")])
    elif any(engines):
        own = _product(engines) if engines[0] else engines[1] * given["parallel.data"][0]
        gpus, ours["engine.replicas"] = gpus - own, own // _product([ours.get("engine.tensor")])
    ours["parallel.data"] = max(gpus // _product(sizes), 1)
    samples, prompts = ours.get("rollout.samples_per_prompt"), ours.get("rollout.prompts_per_step")
    update = ours.get("training.minibatches")
    if stack == "TRL":
        size, per_generation, batch = given["rollout.prompts_per_step"]
        update = _product([size, gpus, update])
        batch = batch or _product([size, gpus, per_generation or given["training.minibatches"][0]])
        prompts = ours["rollout.prompts_per_step"] = max(batch // _product([samples]), 1)
    total = _product([prompts] if stack == "verl" else [prompts, samples])
    parts = total // update if _number(update) and total % update == 0 else 1
    if parts == 1 and total != update:
        refused.add("training.minibatches")
    ours["training.minibatches"] = parts
    schedule = ours.get("optimizer.warmup_steps")
    if isinstance(schedule, list):  # NeMo-RL's
        warmups = [s["kwargs"].get("total_iters") for s in schedule if "LinearLR" in str(s.get("name"))]
        ours["optimizer.warmup_steps"] = next(iter(warmups), 0)
    counted = ("training.steps", "checkpoint.every", "evaluation.every", "optimizer.warmup_steps")
    for key in counted if stack == "TRL" else counted[3:] if stack == "NeMo-RL" else ():
        if _number(ours.get(key)) >= 1:
            ours[key] = max(round(ours[key] / parts / _product([ours.get("training.epochs")])), 1)
