"""Settings and options that are gone, and what to use instead. An entry is removed at version 0.3."""

from __future__ import annotations

import re
from typing import Any

RENAMED: dict[str, tuple[Any, ...]] = {
    "rollout.dynamic.surplus": (
        "remove it: groups beyond a step's batch are always discarded, and come again in the next step",
    ),
    "--tensor": ("remove it: a converted checkpoint has no layout; that of a run is parallel.tensor",),
    "--pipeline": ("remove it: a converted checkpoint has no layout; that of a run is parallel.pipeline",),
    "--assume nvlink": ("choose a GPU with --gpu: it is the data sheet's",),
    "--assume requeue": ("remove it: it is 120 s",),
    "--assume save": ("remove it: it is 60 s",),
    "--assume start": ("remove it: it is 300 s",),
    "--assume warning": ("remove it: it is 600 s",),
    "aggregation.constant": (
        "remove it: the divisor is rollout.max_response_tokens; optimizer.lr scales the loss",
        None,
    ),
    "anchor.decay": ("remove it: it is 0.9", 0.9),
    "bridge.address": ("set cluster.interface to the network that engines use", None),
    "bridge.bucket_mib": ("remove it: it is 256", 256),
    "bridge.timeout": ("remove it: it is 120 s", 120),
    "checkpoint.keep_best.export": ("remove it: with export.enabled the best one is exported", True),
    "evaluation.min_p": ("use evaluation.top_p or evaluation.top_k", 0),
    "export.max_shard_gib": ("remove it: files have at most 4 GiB; convert has --max-shard-gib", 4),
    "guards.engine_ratio": ("remove it: it is 8; guards.mismatch=off turns the comparison of engines off", 8),
    "guards.probe_prompts": ("remove it: there are 16", 16),
    "guards.probe_tokens": ("remove it: there are 8", 8),
    "guards.reward_failures_share": (
        "remove it: it is 0.5; guards.reward_failures=warn never stops a run",
        0.5,
    ),
    "guards.skipped_updates": ("remove it: it is 5", 5),
    "job.backoff": ("remove it: it is 120 s, doubled for each further restart", 120),
    "lora.dropout": (
        "remove it: with dropout the loss's ratio to the old policy would not be 1 at the first update",
        0,
    ),
    "rendezvous_port": ("remove it: a free port is chosen", 0),
    "reward.memory_gib": ("remove it: a worker may take 2 GiB more than its imports", 2),
    "rollout.episode.memory_gib": ("remove it: a process may take 4 GiB more than its imports", 4),
    "rollout.min_p": ("use rollout.top_p or rollout.top_k", 0),
    "teacher.concurrency": ("remove it: it is 64", 64),
    "teacher.timeout": ("remove it: it is 600 s", 600),
    "training.epochs": (
        "use training.ppo_epochs for passes over a step's batch; a run has training.steps, or sft.epochs",
        1,
    ),
    "trackers.entity": ("set the environment variable WANDB_ENTITY", None),
    "trackers.group": ("set the environment variable WANDB_RUN_GROUP", None),
    "trackers.offline": ("set the environment variable WANDB_MODE=offline", False),
    "trackers.responses": ("remove it: tensorboard shows 4 of each step", 4),
    "trackers.system": ("remove it: use of the first node is always logged", True),
    "trackers.tags": ("for wandb set the environment variable WANDB_TAGS; mlflow logs all settings", [], {}),
}
"""Dotted key of a setting (without an index: ``trackers.url``), or an option (``--gpus``) -> what to do, such
as "use rollout.dynamic.oversample"; then the values with which a file may still have it, since they now
always apply: the ``config.yaml`` of a run has all settings of the version that has written it."""


def explain_renamed(key: str) -> str | None:
    """The message for a key or option that is gone; None: it never existed."""
    gone = RENAMED.get(re.sub(r"\[\d+\]", "", key))
    return f"{key!r} is gone; {gone[0]}" if gone is not None else None


def remove_gone(raw: dict[str, Any]) -> list[str]:
    """Remove settings that are gone from plain values, in place, where they have the value that applies.

    Returns a message for each of the others. Keys of the user's own code are its own, but for ``memory_gib``,
    which never reached it.
    """
    messages = []
    for key, (instead, *values) in RENAMED.items():
        *path, last = key.split(".")
        sections: list[Any] = [raw]
        for part in path:
            inner = [s.get(part) for s in sections if isinstance(s, dict)]
            sections = [s for each in inner for s in (each if isinstance(each, list | tuple) else [each])]
        for section in sections:
            if not isinstance(section, dict) or last not in section:
                continue
            kind = str(section.get("type", "tensorboard"))
            if (":" in kind and last != "memory_gib") or (last == "responses" and kind != "tensorboard"):
                continue
            if section[last] in values:
                del section[last]
            else:
                messages.append(f"{key!r} is gone; {instead}")
    return messages
