"""Settings and options that are gone, and what to use instead. An entry is removed at version 0.3."""

from __future__ import annotations

import re

RENAMED: dict[str, str] = {
    "rollout.dynamic.surplus": "remove it: groups beyond a step's batch are always discarded, and "
    "their prompts come again in the next step",
    "--tensor": "remove it: a Megatron checkpoint has no layout, and is loaded in any",
    "--pipeline": "remove it: a Megatron checkpoint has no layout, and is loaded in any",
    "--assume peak_fp8": "use peak_bf16, in proportion to which it is",
    "--assume peak_fp32": "use peak_bf16, in proportion to which it is",
    "--assume prefill_mfu": "use score_mfu",
    "--assume link_efficiency": "use nvlink and network: 70% of them is reached",
    "--assume host_link": "remove it: it is the data sheet's",
    "--assume gloo": "remove it: it is the measured 0.98 GB/s",
    "--assume allreduce_latency": "use decode_overhead",
    "--assume length_spread": "remove it: responses have the mean length",
    "--assume update_overhead": "use step_overhead, which includes the updates'",
    "--assume sync_overhead": "use step_overhead, which includes the sync's",
    "--assume handover_overhead": "remove it: it is 2 s, beside step_overhead",
    "--assume trainer_share": "plan with engine.colocated=false and the layout that you mean",
}
"""Dotted key of a setting (without an index: ``trackers.url``), or an option (``--gpus``) -> what to do, such
as "use rollout.dynamic.oversample" or "remove it: it had no effect"."""


def explain_renamed(key: str) -> str | None:
    """The message for a key or option that is gone; None: it never existed."""
    instead = RENAMED.get(re.sub(r"\[\d+\]", "", key))
    return f"{key!r} is gone; {instead}" if instead is not None else None
