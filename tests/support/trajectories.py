"""Trajectories made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rpg_megatron.data.trajectory import Trajectory


def make_trajectory(prompt: int | Sequence[int], response: int | Sequence[int], **fields: Any) -> Trajectory:
    """prompt, response: token ids, or how many. Other fields are zeros and empty texts, unless given."""
    tokens = [np.arange(x) if isinstance(x, int) else np.asarray(x) for x in (prompt, response)]
    n = len(tokens[1])
    plain = {"prompt_id": 0, "sample": 0, "finish": "stop", "text": ""}
    plain |= {"behaviour": np.zeros(n, np.float32), "versions": np.zeros(n, np.int32)}
    return Trajectory(
        prompt=tokens[0].astype(np.int32), response=tokens[1].astype(np.int32), **plain | fields
    )
