"""When weights change while responses are under way: the moment, and which weights each token is of.

An engine that is held has sampled a set number of tokens of each response. This file is also the plug-in that
holds it (``register``).

Every token of a response is compared with the trainer's log-probs, under the old weights up to one position
and under the new ones from there on. A router that decides between two experts whose logits differ by no more
than rounding may decide otherwise in the engine; all that follows is then different, by up to some nats. So
there are further references, in which the trainer decides such ties the other way. No token is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BOUND = 1e-4
"""Largest difference of log-probs (nats) of a token to those of the weights that sampled it."""
MARGINS = (0.0, 1e-6, 3e-6, 1e-5)
"""Ties that are decided the other way: logits of two experts that differ by less than this. Engines were seen
to decide otherwise up to 2.2e-6."""
_FILE = "held_at"

Values = NDArray[np.float32]


def hold_at(bridge: Path, requests: int, tokens: int) -> None:
    """Engines of this bridge stop, as if paused, when they have this number of requests and each of these
    has so many tokens or more. A resume lets them go on.
    """
    new = bridge / f"{_FILE}.new"
    new.write_text(f"{requests} {tokens}")
    new.rename(bridge / _FILE)


def register() -> None:
    """The plug-in of the engine."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    file, update = Path(os.environ["RPG_BRIDGE_DIR"]) / _FILE, Scheduler.update_from_output

    def update_from_output(self: Any, *args: Any) -> Any:
        outputs = update(self, *args)
        if file.exists():
            requests, tokens = map(int, file.read_text().split())
            lengths = [request.num_output_tokens for request in self.running]
            if len(lengths) == requests and min(lengths) == tokens:
                self.set_pause_state(PauseState.PAUSED_ALL)
        return outputs

    Scheduler.update_from_output = update_from_output


@contextmanager
def near_ties_flipped(layers: Iterable[tuple[int, Any]], margin: float) -> Iterator[None]:
    """Within the block, Megatron's routers exchange the logits of the last expert that they choose and of
    the next one, where these differ by less than ``margin``.
    """
    routers = [layer.mlp.router for _, layer in layers]

    def wrapped(router: Any) -> Any:
        plain = router.gating

        def gating(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = plain(hidden)
            top = logits.topk(router.topk + 1, dim=-1)
            last, places = top.values[..., -2:], top.indices[..., -2:]
            near = last[..., :1] - last[..., 1:] < margin
            return torch.where(near, logits.scatter(-1, places, last.flip(-1)), logits)

        return gating

    for router in routers:
        router.gating = wrapped(router)
    try:
        yield
    finally:
        for router in routers:
            del router.gating


@dataclass(frozen=True)
class Switch:
    """How one change of weights explains the tokens of a response."""

    position: int
    """Tokens from here on are of the new weights, those before of the old ones."""
    length: int
    gap: float
    """Largest difference of a token's log-probs (nats)."""
    odd: list[tuple[int, float, float, float]]
    """Unexplained tokens: position, and log-probs of the engine, the old weights and the new ones."""
    ties: bool
    """Whether the references are those with ties decided the other way."""


def find_switch(engine: Values, olds: Sequence[Values], news: Sequence[Values]) -> Switch:
    """The switch that leaves the fewest tokens unexplained, under any pair of references. All are [tokens];
    the first references are those without ties.
    """
    found = [
        _switch(engine, old, new, ties=(i, k) != (0, 0))
        for i, old in enumerate(olds)
        for k, new in enumerate(news)
    ]
    return min(found, key=lambda switch: (len(switch.odd), switch.gap))


def _switch(engine: Values, old: Values, new: Values, *, ties: bool) -> Switch:
    gaps = np.abs(engine - old), np.abs(engine - new)
    not_old, not_new = (np.cumsum(np.concatenate([[0], ~(gap < BOUND)])) for gap in gaps)
    position = int(np.argmin(not_old + not_new[-1] - not_new))
    gap = np.where(np.arange(len(engine)) < position, *gaps)
    odd = [(int(i), float(engine[i]), float(old[i]), float(new[i])) for i in np.flatnonzero(~(gap < BOUND))]
    return Switch(position, len(engine), float(gap.max()), odd, ties)
