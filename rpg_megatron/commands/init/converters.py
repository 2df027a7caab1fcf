"""Converters for ``init --from``, by our key: values that need more than taking over."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from rpg_megatron.config.parsing import read_yaml
from rpg_megatron.config.policy import is_hub_id

STACKS: dict[str, Any] = read_yaml(Path(__file__).with_name("stacks.yaml"))


def convert(stack: str, given: dict[str, list[Any]]) -> tuple[dict[str, Any], set[str]]:
    """Our settings by dotted key, and the keys of which theirs were not taken.

    given: our key -> values of their keys, in the page's order; None: not set.
    """
    ours: dict[str, Any] = {}
    refused: set[str] = set()
    if stack == "TRL":
        given["aggregation.type"] = given["objective.type"][:1]  # loss_type is both
    for key, values in given.items():
        found = [value for value in values if value is not None]
        if found and key in STACKS["words"]:
            found = [STACKS["words"][key].get(str(found[0]))]
        if found and found[-1] is not None:
            ours[key] = found[-1]
        elif found:
            refused.add(key)
    _convert_sizes(stack, given, ours, refused)
    _convert_loss(stack, given, ours, refused)
    _convert_data(stack, ours)
    _convert_names(stack, given, ours, refused)
    for section in ("rollout.dynamic", "reward.overlong", "reward.kl", "lora"):
        if not ours.pop(section, section not in given and ours.get(f"{section}.rank")):
            ours = {key: value for key, value in ours.items() if not key.startswith(f"{section}.")}
        elif not any(key.startswith(f"{section}.") for key in ours):
            ours[section] = {}
    return ours, refused


def _product(*values: Any) -> Any:
    return math.prod(v for v in values if isinstance(v, int | float) and v and math.isfinite(v))


def _convert_sizes(stack: str, given: dict[str, list[Any]], ours: dict[str, Any], refused: set[str]) -> None:
    """GPUs, batches, and numbers of updates there that are steps here."""
    gpus, tensor = _product(*given["parallel.data"]), _product(ours.get("engine.tensor"))
    engines = gpus
    if not ours.get("engine.colocated", True):
        each, nodes = given["engine.replicas"] or (tensor, None)
        engines = _product(each or given["parallel.data"][0], nodes)
        gpus -= engines if stack == "NeMo-RL" else 0
    ours["engine.replicas"] = engines // tensor
    split = _product(*(ours.get(f"parallel.{name}") for name in ("tensor", "pipeline", "context")))
    ours["parallel.data"] = max(gpus // split, 1)
    samples, update = ours.get("rollout.samples_per_prompt"), ours.get("training.minibatches")
    batch = _product(ours.get("rollout.prompts_per_step"), samples if stack == "NeMo-RL" else 1)
    if stack == "TRL":
        each, times, total = given["rollout.prompts_per_step"]
        batch = _product(total) if total else _product(each, gpus, times or update)
        update = _product(each, gpus, update)
        ours["rollout.prompts_per_step"] = max(batch // _product(samples), 1)
    parts = ours["training.minibatches"] = max(batch // _product(update), 1)
    if parts * _product(update) != batch:
        ours["training.minibatches"] = parts = 1
        refused.add("training.minibatches")
    if stack == "verl" and "rollout.dynamic.oversample" in ours:  # theirs: prompts
        ours["rollout.dynamic.oversample"] = _product(ours["rollout.dynamic.oversample"]) / batch
    counted = ("optimizer.warmup_steps", "training.steps", "checkpoint.every", "evaluation.every")
    for key in {"TRL": counted, "NeMo-RL": counted[:1]}.get(stack, ()):
        if _product(ours.get(key, 0)) > 1:
            ours[key] = max(round(ours[key] / parts / _product(ours.get("training.ppo_epochs"))), 1)


def _convert_loss(stack: str, given: dict[str, list[Any]], ours: dict[str, Any], refused: set[str]) -> None:
    flags = given["advantage.type"]
    if stack == "NeMo-RL":
        scaled, others = (old if new is None else new for old, new in zip(flags[:2], flags[2:], strict=True))
        ours["advantage.type"] = "grpo" if scaled else "leave_one_out" if others else "rpg"
    elif flags[1:] == [False] and ours.get("advantage.type") == "grpo":
        ours["advantage.type"] = "rpg"
    advantage, kind = ours.setdefault("advantage.type", "grpo"), ours.get("objective.type", "grpo")
    kind = "gspo" if "sequence" in given["objective.type"] else kind
    ours["objective.type"] = "ppo" if (kind, advantage) == ("grpo", "rpg") else kind
    low, high, bound = (ours.pop(f"objective.clip.{name}", None) for name in ("low", "high", "c"))
    high = low if high is None else high
    if kind == "grpo":
        ours |= {"objective.clip.low": low, "objective.clip.high": high, "objective.clip.c": bound or 1e9}
    elif stack == "TRL" and kind == "cispo" and isinstance(high, float):
        ours |= {"objective.low": 1.0, "objective.high": high - 1}
    else:
        ours |= {"objective.low": low, "objective.high": high}
    if kind == "gspo":
        ours["aggregation.type"] = "sequence_mean"
    beta, switch = ours.pop("objective.beta", 0), (stack, ours.pop("anchor.type", None))
    beta = 0 if switch == ("verl", "old") else beta
    if ours["objective.type"] == "grpo":
        ours["objective.beta"] = beta
    elif beta:
        refused.add("objective.beta")
    if not ours.get("objective.corrected"):
        ours.pop("objective.corrected", None)
    if ours.get("reward.kl") or ours.get("objective.beta"):
        ours["anchor.type"] = "every" if switch == ("TRL", "fixed") else "fixed"


def place(name: str) -> str:
    """A name on the hub, or a path from the root: theirs are relative to the working directory."""
    return name if _on_hub(name) else os.path.abspath(os.path.expanduser(name))


def _on_hub(name: str) -> bool:
    return is_hub_id(name) and not os.path.exists(name)


def _sources(value: Any) -> list[dict[str, Any]]:
    """Files, names on the hub, and names that the stack knows."""
    names = [str(name) for name in (value if isinstance(value, list) and value else [value or "train.jsonl"])]
    known: dict[str, dict[str, Any]] = STACKS["data_sets"]
    return [known.get(name) or {"hub" if _on_hub(name) else "path": place(name)} for name in names]


def _convert_data(stack: str, ours: dict[str, Any]) -> None:
    ours |= {"model.path": place(str(ours.get("model.path", "model"))), "data.chat": True}
    fields = {k: ours.pop(f"data.{k}") for k in ("prompt_key", "answer_key") if f"data.{k}" in ours}
    if answer := {"verl": "reward_model.ground_truth", "TRL": "solution"}.get(stack):
        fields = {"answer_key": answer} | fields
    hub = ours.pop("data.hub", None)
    sources = [fields | source for source in _sources(ours.pop("data.path", hub))]
    ours |= (
        {f"data.{k}": v for k, v in sources[0].items()} if len(sources) == 1 else {"data.mixture": sources}
    )
    if heldout := ours.pop("evaluation.data", None):
        shared = {"chat": True, "max_prompt_tokens": ours.get("data.max_prompt_tokens", 2048)}
        shared["limit"] = ours.pop("evaluation.data.limit", None)
        parts = (
            [sources[0] | {"split": heldout}]
            if stack == "TRL"
            else [fields | part for part in _sources(heldout)]
        )
        ours["evaluation.sets"] = [
            {"name": f"heldout{i or ''}"} | part | shared for i, part in enumerate(parts)
        ]
        if stack == "verl":
            ours.setdefault("evaluation.temperature", 0)


def _function(name: Any) -> str:
    """Our name of a reward function of TRL's; empty: not here."""
    return "auto" if name == "accuracy_reward" else ":".join(str(name).rsplit(".", 1)) * ("." in str(name))


def _convert_names(stack: str, given: dict[str, list[Any]], ours: dict[str, Any], refused: set[str]) -> None:
    path, *names = given["reward.type"] or [None]
    functions = {str(f).rpartition(".")[2]: _function(f) for f in path} if isinstance(path, list) else {}
    weights = ours.pop("reward.terms", None)
    each = weights if isinstance(weights, list) else [1.0] * len(functions)
    if stack == "verl" and path:
        ours["reward.type"] = f"{Path(str(path)).stem}:{names[0] or 'compute_score'}"
    elif len(functions) == 1 and "." in str(path[0]):
        (ours["reward.type"],) = functions.values()
    elif all(functions.values()) and len(functions) == len(path or ()) == len(each) > 1:
        terms = zip(functions.items(), each, strict=True)
        ours["reward.terms"] = {n: {"type": f, "wrong": 0.0, "weight": weight} for (n, f), weight in terms}
        del ours["reward.type"]
    else:
        ours |= {"reward.type": "auto", "reward.correct": 1.0, "reward.wrong": 0.0}
        refused |= {"reward.type"} if (path or any(names)) and path != ["accuracy_reward"] else set()
    refused |= {"reward.terms"} if weights is not None and "reward.terms" not in ours else set()
    if "name" in ours:
        ours["name"] = Path(str(ours["name"])).name
    if "trackers" in ours:
        kinds = ("tensorboard", "wandb", "mlflow")
        ours["trackers"] = [k for k in kinds if re.search(rf"\b({k}|all)\b", str(ours["trackers"]))]
    if False in given["checkpoint.every"] or -1 in given["checkpoint.every"]:
        ours["checkpoint.every"] = None
