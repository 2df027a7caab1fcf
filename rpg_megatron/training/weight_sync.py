"""Keeps the engines on the trainers' weights: after every update, and whenever one of them comes back.

Every rank holds one. Rank 0 talks to the sampler; the others hear from it what is to be done, because weights
are published by all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rpg_megatron.bridge.controller import SyncReport
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.publisher import Publisher, published
from rpg_megatron.config import UserError
from rpg_megatron.rollout.sampler_client import SamplerClient, SyncResult, WeightsWanted
from rpg_megatron.system.collectives import broadcast_object, gather_objects
from rpg_megatron.training.preemption import Stopped, StopRequest


class Serving:
    """The publisher of this rank and, on rank 0, the line to the sampler. Methods are collective, and raise
    Stopped on all ranks if rank 0 was asked to stop while it waited.
    """

    def __init__(self, publisher: Publisher, sampler: SamplerClient | None, stop: StopRequest):
        self._publisher, self._sampler, self._stop = publisher, sampler, stop
        self._version = -1
        self._manifest: Manifest | None = None

    def sync(self, version: int) -> list[SyncReport]:
        """Publish the present weights as ``version`` and bring them into all engines that are there.

        Returns one report an engine, on rank 0. Engines that are away get the weights when they are back.
        Raises UserError (rank 0) if an engine refuses them twice; the message names tensor, rank and file.
        """
        self._version, self._manifest = version, None
        return self._publish(again=False)

    def call_with_resync[T](self, ask: Callable[[SamplerClient], T | WeightsWanted]) -> T | None:
        """Rank 0's question to the sampler, with all ranks at hand to publish for engines that come back.

        Returns the answer on rank 0, None elsewhere.
        """
        answer: T | WeightsWanted | Stopped | None = self._ask(ask)
        while _agree(isinstance(answer, WeightsWanted), isinstance(answer, Stopped)):
            self._publish(again=True)
            answer = self._ask(lambda sampler: sampler.resume_request())
        assert not isinstance(answer, WeightsWanted | Stopped)
        return answer

    def sleep(self, level: int) -> None:
        """Have the engines leave the GPUs (see ``EnginePool.sleep``); no rank returns before they have."""
        _agree(False, isinstance(self._ask(lambda sampler: sampler.sleep(level)), Stopped))

    def wake(self) -> None:
        """Let engines serve again that sleep by level 1."""
        _agree(False, isinstance(self._ask(lambda sampler: sampler.wake()), Stopped))

    def check_stop(self) -> None:
        """Raise Stopped on all ranks if any of them was asked to."""
        if any(gather_objects(self._stop.came)):
            raise Stopped

    def restore(self, state: dict[str, Any]) -> None:
        """Let the sampler take up its part of a checkpoint. Rank 0's work."""
        if self._sampler:
            self._sampler.restore(state)

    def close(self) -> None:
        """Take the weights back, hang up."""
        self._publisher.close()
        if self._sampler:
            self._sampler.close()

    def _publish(self, *, again: bool) -> list[SyncReport]:
        reports: list[SyncReport] = []
        refused: list[str] = []
        for attempt in (1, 2):
            with published(self._publisher, self._version) as manifest:
                stopped = False
                if manifest is not None:
                    self._compare(manifest, refused)
                    result = self._ask(partial(_sync, manifest, self._version, again or attempt == 2))
                    if isinstance(result, SyncResult):
                        reports, refused = reports + result.reports, result.refused
                    stopped = isinstance(result, Stopped)
                    if refused:
                        print("warning: publishing again: " + "; ".join(refused), flush=True)
                # The weights must stay as they are until every engine has them.
                if not _agree(bool(refused), stopped):
                    return reports
        if self._sampler is None:
            raise RuntimeError("engines refused the weights twice; rank 0 says why")
        raise UserError("weights were refused twice: " + "; ".join(refused))

    def _ask(self, ask: Callable[[SamplerClient], Any]) -> Any:
        """Rank 0's question; Stopped as its answer where that came first. None elsewhere. Not collective."""
        if self._sampler is None:
            return None
        try:
            return ask(self._sampler)
        except Stopped as stopped:
            return stopped
        except (RuntimeError, UserError):
            # Engines and sampler may have got the signal too, and be gone.
            if self._stop.explains_failure():
                return Stopped()
            raise

    def _compare(self, manifest: Manifest, refused: list[str]) -> None:
        """The same version has the same weights however often it is published.

        Raises UserError that names what has changed: in shared memory that is the parameter itself, which may
        neither be served nor trained on.
        """
        before, self._manifest = self._manifest or manifest, manifest
        changed = [
            f"{name} (in {manifest.shards[new.shard]})"
            for name, tensor in manifest.tensors.items()
            for old, new in zip(before.tensors[name].boxes, tensor.boxes, strict=True)
            if old.checksum != new.checksum
        ]
        if changed:
            more = " and more" if len(changed) > 5 else ""
            raise UserError(
                f"weights of version {self._version} changed after they were published first: "
                f"{', '.join(changed[:5])}{more}. Something else wrote into the trainers' memory, "
                f"or it is faulty. {' '.join(refused)}".rstrip()
            )


def _sync(manifest: Manifest, version: int, again: bool, sampler: SamplerClient) -> SyncResult:
    return sampler.sync(manifest, version, again=again)


def _agree(more: bool, stopped: bool) -> bool:
    """Rank 0's ``more``, on every rank; the others wait for it. Raises Stopped on all of them if it stops."""
    more, stopped = broadcast_object((more, stopped))
    if stopped:
        raise Stopped
    return more
