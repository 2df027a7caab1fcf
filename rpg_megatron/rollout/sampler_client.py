"""Rank 0's line to the sampler: what is asked, what comes back, and the client.

Requests and answers are pickled by ``multiprocessing.connection`` over a unix socket in a private folder;
both sides prove that they know the run's token. Every request is ``(method, keyword arguments)``, every
answer ``(kind, value)`` with kind "ok", "user_error" or "error".
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

SOCKET = "sampler.sock"
"""File name of the sampler's socket in the work folder."""
EVENTS = "events.sock"
"""File name of the progress display's socket in the work folder."""
_POLL_SECONDS = 0.2


@dataclass
class RolloutBatch:
    """A step's rollouts, scored."""

    trajectories: list[Trajectory]
    """In the order in which the stream gave the prompts, then by sample; each prompt's responses stand
    together.
    """
    metrics: dict[str, float] = field(default_factory=dict)
    """``reward/*``, ``response/*``, ``time/*``."""
    seconds: float = 0.0
    """From the request to the last scored response."""


@dataclass
class SyncResult:
    """What came of a sync. Engines that are being restarted appear in neither list."""

    reports: list[SyncReport] = field(default_factory=list)
    """One for each engine that serves the new weights now."""
    refused: list[str] = field(default_factory=list)
    """Why an engine took nothing; it holds its old weights. Publishing again may mend it."""


@dataclass(frozen=True)
class ResyncRequired:
    """Instead of an answer: engines were restarted and need the weights to be published again.

    Publish, ``sync(..., again=True)``, then ``resume_request``: what was asked for is under way.
    """

    engines: tuple[int, ...]


class SamplerClient:
    """Blocking client of the sampler process. One request at a time.

    Every method raises UserError for what the user can mend and RuntimeError for everything else, with the
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

        while_waiting: called a few times a second while an answer is awaited. What it raises ends the wait,
        and the client is of no more use.
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
        """Sample and score the next prompts; ``version`` is that of the weights the engines serve."""
        answer: RolloutBatch | ResyncRequired = self._ask("rollout", step=step, version=version)
        return answer

    def sync(self, manifest: Manifest, version: int, *, again: bool = False) -> SyncResult:
        """Bring the published weights into the engines; ``again``: into those that do not serve them yet."""
        answer: SyncResult = self._ask("sync", manifest=manifest, version=version, again=again)
        return answer

    def sleep(self, level: int) -> None:
        """Have the engines leave their GPUs: 1, until ``wake``; 2, weights too, until the next ``sync``."""
        self._ask("sleep", level=level)

    def wake(self) -> None:
        """Let engines that sleep by level 1 serve again."""
        self._ask("wake")

    def evaluate(self) -> list[EvalResult] | ResyncRequired:
        """Sample and grade the whole held-out set, in its own order."""
        answer: list[EvalResult] | ResyncRequired = self._ask("evaluate")
        return answer

    def resume_request(self) -> Any:
        """The answer to the ``rollout`` or ``evaluate`` that wanted weights; it may want some again."""
        return self._ask("resume_request")

    def counts(self) -> dict[str, float]:
        """``engine/restarts`` and ``engine/requests_resent`` since this was asked last."""
        answer: dict[str, float] = self._ask("counts")
        return answer

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the prompts to go on where they are."""
        answer: dict[str, Any] = self._ask("state")
        return answer

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a ``state()``."""
        self._ask("restore", state=state)

    def close(self) -> None:
        """Hang up. The sampler goes on and waits for the next client; the launcher ends it."""
        self._connection.close()

    def __enter__(self) -> SamplerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, **arguments: Any) -> Any:
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
