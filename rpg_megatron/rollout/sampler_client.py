"""Rank 0's client of the sampler process, and the types that they exchange.

Requests and answers are pickled by ``multiprocessing.connection`` over a unix socket in a private folder; the
run's token authenticates both sides. A request is ``(method, keyword arguments)``, an answer ``(kind,
value)`` with kind "ok", "user_error" or "error".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from rpg_megatron.bridge.controller import SyncReport
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config import UserError
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.system.events import EVENTS as EVENTS

SOCKET = "sampler.sock"
"""File name of the sampler's socket in the work folder."""
_POLL_SECONDS = 0.2


@dataclass
class RolloutBatch:
    """The scored rollouts of a step."""

    trajectories: list[Trajectory]
    """Sorted by group, in the order of the prompts, then by sample."""
    metrics: dict[str, float] = field(default_factory=dict)
    """``reward/*``, ``response/*``, ``time/*``."""
    seconds: float = 0.0
    """From the request to the last scored response."""


@dataclass
class SyncResult:
    """Result of a sync. Engines that are being restarted appear in neither list."""

    reports: list[SyncReport] = field(default_factory=list)
    """One for each engine that serves the new weights now."""
    refused: list[str] = field(default_factory=list)
    """Messages of engines whose check failed; they keep their old weights. Publishing again may help."""


@dataclass(frozen=True)
class ResyncRequired:
    """Returned instead of a result: engines were restarted, and the weights must be published again.

    Publish, ``sync(..., again=True)``, then ``resume_request``; meanwhile the request continues.
    """

    engines: tuple[int, ...]


class SamplerClient:
    """Blocking client of the sampler process. One request at a time.

    Every method raises UserError for errors that the user can fix and RuntimeError for all others, with the
    sampler's message.
    """

    def __init__(
        self,
        socket: Path,
        token: str,
        *,
        timeout: float = 120.0,
        while_waiting: Callable[[], None] = lambda: None,
    ):
        """Connect; waits up to ``timeout`` seconds for the sampler to listen.

        while_waiting: called a few times a second during a request. If it raises, the request ends with that
        exception and the client must not be used again.
        """
        self._while_waiting = while_waiting
        end = time.monotonic() + timeout
        while True:
            try:
                self._connection = Client(str(socket), family="AF_UNIX", authkey=token.encode())
                return
            except AuthenticationError:
                raise RuntimeError(f"the sampler at {socket} refuses our token") from None
            except (OSError, EOFError) as e:
                if time.monotonic() > end:
                    raise RuntimeError(f"no sampler answers at {socket} ({e}); see its log") from None
                time.sleep(0.05)

    def rollout(self, step: int, version: int) -> RolloutBatch | ResyncRequired:
        """Sample and score the next prompts; ``version``: of the weights that the engines serve."""
        answer: RolloutBatch | ResyncRequired = self._call("rollout", step=step, version=version)
        return answer

    def sync(self, manifest: Manifest, version: int, *, again: bool = False) -> SyncResult:
        """Load the published weights into the engines; ``again``: only into those that do not serve them."""
        answer: SyncResult = self._call("sync", manifest=manifest, version=version, again=again)
        return answer

    def sleep(self, level: int) -> None:
        """Put the engines to sleep. Level 1: until ``wake``. Level 2 discards the weights: until ``sync``."""
        self._call("sleep", level=level)

    def wake(self) -> None:
        """Wake engines that sleep at level 1."""
        self._call("wake")

    def evaluate(self) -> list[EvalResult] | ResyncRequired:
        """Sample and grade the held-out sets; results in their order."""
        answer: list[EvalResult] | ResyncRequired = self._call("evaluate")
        return answer

    def resume_request(self) -> Any:
        """The result of the ``rollout`` or ``evaluate`` that returned ResyncRequired, or ResyncRequired."""
        return self._call("resume_request")

    def counts(self) -> dict[str, float]:
        """``engine/restarts`` and ``engine/requests_resent`` since the last call."""
        answer: dict[str, float] = self._call("counts")
        return answer

    def state(self) -> dict[str, Any]:
        """The sampler's state for a checkpoint: position in the data, and surplus groups."""
        answer: dict[str, Any] = self._call("state")
        return answer

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state()`` returned."""
        self._call("restore", state=state)

    def close(self) -> None:
        """Disconnect. The sampler waits for the next client; the launcher ends it."""
        self._connection.close()

    def __enter__(self) -> SamplerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, **arguments: Any) -> Any:
        try:
            self._connection.send((method, arguments))
            while not self._connection.poll(_POLL_SECONDS):
                self._while_waiting()
            kind, value = self._connection.recv()
        except (EOFError, ConnectionError, OSError) as e:
            raise RuntimeError(
                f"the sampler is gone ({type(e).__name__} while waiting for {method}); see its log"
            ) from None
        if kind == "user_error":
            raise UserError(value)
        if kind == "error":
            raise RuntimeError(value)
        return value
