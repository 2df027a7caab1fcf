"""When weights change while responses are under way: the moment, and which weights each token is of.

An engine that is held has sampled a set number of tokens of each response. This file is also the plug-in that
holds it (``register``).

Every token of a response is compared with the trainer's log-probs: under the old weights up to that number,
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
_FILE, _HELD = "hold_at", "held_"

Values = NDArray[np.float32]


def hold_at(bridge: Path, requests: int, tokens: int) -> None:
    """Engines of this bridge begin when they have this number of requests, all at once, and stop, as if
    paused, after so many tokens of each. A resume lets them go on. tokens: 0 for no hold.
    """
    for file in bridge.glob(f"{_HELD}*"):
        file.unlink()
    new = bridge / f"{_FILE}.new"
    new.write_text(f"{requests} {tokens}")
    new.rename(bridge / _FILE)


def engines_held(bridge: Path) -> int:
    """Number of engines that have stopped since ``hold_at``."""
    return len(list(bridge.glob(f"{_HELD}*")))


def register() -> None:
    """The plug-in of the engine."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    bridge = Path(os.environ["RPG_BRIDGE_DIR"])
    add, update = Scheduler.add_request, Scheduler.update_from_output

    def hold() -> tuple[int, int]:
        file = bridge / _FILE
        requests, tokens = map(int, file.read_text().split()) if file.exists() else (0, 0)
        return requests, tokens

    def add_request(self: Any, request: Any) -> None:
        add(self, request)
        requests, tokens = hold()
        if tokens:
            begin = len(self.requests) == requests
            self.set_pause_state(PauseState.UNPAUSED if begin else PauseState.PAUSED_ALL)

    def update_from_output(self: Any, *args: Any) -> Any:
        outputs = update(self, *args)
        _, tokens = hold()
        if tokens and {request.num_output_tokens for request in self.running} == {tokens}:
            self.set_pause_state(PauseState.PAUSED_ALL)
            (bridge / f"{_HELD}{os.getpid()}").touch()
        return outputs

    Scheduler.add_request, Scheduler.update_from_output = add_request, update_from_output


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
class Comparison:
    """A response's log-probs, and those of the weights that its tokens should be of."""

    gap: float
    """Largest difference (nats)."""
    odd: list[tuple[int, float, float, float]]
    """Tokens that differ by ``BOUND`` or more: position, and log-probs of the engine, the old weights and the
    new ones.
    """
    ties: bool
    """Whether the references are those with ties decided the other way."""


def compare_tokens(engine: Values, olds: Sequence[Values], news: Sequence[Values], switch: int) -> Comparison:
    """Compare a response, whose tokens from ``switch`` on are of the new weights, with the pair of references
    that leaves the fewest tokens odd. All are [tokens]; the first references are those without ties.
    """
    found = [
        _compare(engine, old, new, switch, ties=(i, k) != (0, 0))
        for i, old in enumerate(olds)
        for k, new in enumerate(news)
    ]
    return min(found, key=lambda comparison: (len(comparison.odd), comparison.gap))


def _compare(engine: Values, old: Values, new: Values, switch: int, *, ties: bool) -> Comparison:
    gap = np.abs(engine - np.concatenate([old[:switch], new[switch:]]))
    odd = [(int(i), float(engine[i]), float(old[i]), float(new[i])) for i in np.flatnonzero(~(gap < BOUND))]
    return Comparison(float(gap.max()), odd, ties)
