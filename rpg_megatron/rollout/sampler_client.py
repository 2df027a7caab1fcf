"""Rank 0's client of the sampler process, the leaders' client of its workers, and the messages' types."""

# mypy: disable-error-code="empty-body"
# The methods of SamplerRequests have no bodies: the sampler has them, and a client calls it.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

import msgspec

from rpg_megatron.bridge.controller import SyncReport
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.data.batch_index import BatchIndex
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.system.messages import Client, remote_calls

SOCKET = "sampler.sock"
"""File name of the sampler's socket in the work folder."""
_FETCH_SIZE = 64
"""Maximum number of trajectories in an answer to ``fetch``."""


class RolloutBatch(msgspec.Struct, tag=True):
    """The graded rollouts of a step; the workers keep the trajectories."""

    index: BatchIndex
    metrics: dict[str, float] = {}
    """Metrics such as ``reward/*``, ``response/*`` and ``time/*``."""
    seconds: float = 0.0
    """From the request to the last graded response."""
    state: dict[str, Any] = {}
    """The sampler's state after these rollouts, for a checkpoint: JSON-serialisable."""
    probes: BatchIndex | None = None
    """The engines' answers to probes (``probes.py``), one entry per response, sampled with the weights of the
    last sync; ``group`` is the engine's index. None if there are no probes."""
    failures: FailureCount = FailureCount()
    """Failures of the reward in all groups that were graded for the step."""


class EvaluatedSets(msgspec.Struct, tag=True):
    """Results of an evaluation."""

    results: list[EvalResult]
    """In the order of the sets."""
    failures: list[FailureCount]
    """Failures of the reward in each set."""


@dataclass
class SyncResult:
    """Result of a sync. Engines that are being restarted appear in neither list."""

    reports: list[SyncReport] = field(default_factory=list)
    """One for each engine that serves the new weights now."""
    refused: list[str] = field(default_factory=list)
    """Messages of engines whose check failed; they keep their old weights. A retry may succeed."""


class ResyncRequired(msgspec.Struct, tag=True, frozen=True):
    """Returned instead of a result: engines were restarted, and the weights must be published again.

    Publish, call ``sync(..., resync=True)``, then ``resume_request``; the request continues meanwhile.
    """

    engines: tuple[int, ...]


class SamplerRequests:
    """What the sampler process does for rank 0. ``Sampler`` has these methods as coroutines.

    Every method raises UserError for errors that the user can fix and RuntimeError for all others, with the
    sampler's message.
    """

    def rollout(self, step: int, version: int) -> RolloutBatch | ResyncRequired:
        """Sample and grade the prompts of a step. version: of the weights that the engines serve."""

    def held_out(self) -> RolloutBatch:
        """All held-out conversations of a fine-tuning run."""

    def sync(self, manifest: Manifest, version: int, resync: bool = False, trial: bool = False) -> SyncResult:
        """Load the published weights into the engines. resync: only into those that do not serve them.

        trial: no rollouts are sampled with them.
        """

    def probe(self, version: int) -> RolloutBatch | ResyncRequired:
        """Let all engines answer probes with the weights ``version``, for the guard on mismatch."""

    def sleep(self, level: int) -> None:
        """Put the engines to sleep. Level 1: until ``wake``. Level 2: until ``sync``; drops the weights."""

    def wake(self) -> None:
        """Wake engines that sleep at level 1."""

    def evaluate(self) -> EvaluatedSets | ResyncRequired:
        """Sample and grade the held-out sets."""

    def resume_request(self) -> RolloutBatch | EvaluatedSets | ResyncRequired:
        """The result of the ``rollout`` or ``evaluate`` that returned ResyncRequired, or ResyncRequired."""

    def release(self) -> None:
        """Let the workers discard the last rollout: every leader has fetched its trajectories."""

    def addresses(self) -> list[str]:
        """Addresses from which trajectories are fetched, by number of the worker."""

    def counts(self) -> dict[str, float]:
        """``engine/*`` metrics since the last call."""

    def state(self) -> dict[str, Any]:
        """The sampler's state for a checkpoint: position in the data."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state()`` returned."""


class SamplerClient(SamplerRequests):
    """Blocking client of the sampler process. One request at a time."""

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
        self._client = Client(
            f"ipc://{socket}", token, name="sampler", timeout=timeout, while_waiting=while_waiting
        )
        vars(self).update(remote_calls(SamplerRequests, self._client.call))

    def close(self) -> None:
        """Disconnect. The sampler waits for the next client; the launcher ends it."""
        self._client.close()

    def __enter__(self) -> SamplerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrajectoryClient:
    """``TrajectorySource`` that fetches from the workers; connects to a worker when first needed."""

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        *,
        timeout: float = 120.0,
        while_waiting: Callable[[], None] = lambda: None,
    ):
        """timeout: seconds to wait for a worker, also while it restarts. while_waiting: see SamplerClient."""
        self._addresses, self._token = addresses, token
        self._timeout, self._while_waiting = timeout, while_waiting
        self._clients: dict[int, Client] = {}

    def fetch(self, worker: Sequence[int], ticket: Sequence[int], row: Sequence[int]) -> list[Trajectory]:
        """Trajectories with these numbers, in this order."""
        by_place: dict[int, Trajectory] = {}
        for number in sorted(set(worker)):
            places = [i for i, w in enumerate(worker) if w == number]
            for chunk in batched(places, _FETCH_SIZE):
                answer = self._client(number).call(
                    "fetch",
                    list[Trajectory],
                    [int(ticket[i]) for i in chunk],
                    [int(row[i]) for i in chunk],
                )
                by_place |= dict(zip(chunk, answer, strict=True))
        return [by_place[i] for i in range(len(worker))]

    def close(self) -> None:
        """Disconnect."""
        for client in self._clients.values():
            client.close()

    def _client(self, number: int) -> Client:
        if number not in self._clients:
            self._clients[number] = Client(
                self._addresses[number],
                self._token,
                name=f"sampler worker {number}",
                timeout=self._timeout,
                while_waiting=self._while_waiting,
                reconnect=True,
            )
        return self._clients[number]
