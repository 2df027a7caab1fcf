"""A KL anchor (reference model) with its own weights in host memory, swapped into the policy's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rpg_megatron.config.objective import AnchorSettings
from rpg_megatron.policy import host_memory

_DECAY = 0.9
"""Decay of the moving average of the KL, per step, for type kl_trigger."""
_PART = 1 << 24
"""Number of elements swapped at a time, which bounds the extra memory on the device."""


class HeldAnchor:
    """This rank's part of the anchor's weights, in host memory; initially a copy of the current weights.

    All ranks construct it and call its methods in the same order; there is no communication.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], settings: AnchorSettings) -> None:
        self._settings = settings
        self._params = list(params)
        self._held = [
            host_memory.host_tensor(p.shape, p.dtype, pinned=p.device.type == "cuda") for p in self._params
        ]
        self.refreshes = -1
        self._updates = 0
        self._kl: float | None = None
        self._take()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model has the anchor's weights; its own are restored bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> dict[str, Any]:
        """The counters as JSON, equal on every rank; the weights are saved while ``swapped_in``."""
        return {"refreshes": self.refreshes, "updates": self._updates, "kl": self._kl}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore counters from ``state()``."""
        self.refreshes, self._updates, self._kl = state["refreshes"], state["updates"], state["kl"]

    def after_step(self, updates: int, kl: float) -> bool:
        """Copy the current weights to the anchor if a refresh is due; returns whether it was.

        ``updates``: optimizer updates of the step; ``kl``: its mean token KL to the anchor (nats), the same
        number on every rank. ``every`` counts updates, ``kl_trigger`` averages the KL of the steps
        exponentially.
        """
        s = self._settings
        self._updates += updates
        self._kl = kl if self._kl is None else _DECAY * self._kl + (1 - _DECAY) * kl
        due = (s.type == "every" and self._updates >= s.updates) or (
            s.type == "kl_trigger" and self._kl > s.kappa
        )
        if due:
            self._take()
        return due

    @torch.no_grad()
    def _take(self) -> None:
        for held, p in zip(self._held, self._params, strict=True):
            held.copy_(p, non_blocking=True)
        self._wait()
        self.refreshes += 1
        self._updates = 0
        self._kl = None

    @torch.no_grad()
    def _swap(self) -> None:
        # On one stream: copies keep their order, and the CPU waits once, at the end.
        for held, p in zip(self._held, self._params, strict=True):
            parts = held.view(-1).split(_PART), p.detach().view(-1).split(_PART)
            for waiting, live in zip(*parts, strict=True):
                present = live.clone()  # on the device, to avoid a second buffer in host memory
                live.copy_(waiting, non_blocking=True)
                waiting.copy_(present, non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        """Wait until all copies are done."""
        if any(p.device.type == "cuda" for p in self._params):
            torch.cuda.synchronize()
