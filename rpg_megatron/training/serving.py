"""Keeps the engines on the trainers' weights: after every update, and whenever one of them comes back.

Every rank holds one. Rank 0 talks to the sampler; the others hear from it what is to be done, because weights
are published by all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.publish import Publisher, published
from rpg_megatron.bridge.sync import SyncReport
from rpg_megatron.config import UserError
from rpg_megatron.rollout.channel import SamplerClient, WeightsWanted


class Serving:
    """The publisher of this rank and, on rank 0, the line to the sampler. Methods are collective."""

    def __init__(self, publisher: Publisher, sampler: SamplerClient | None):
        self._publisher, self._sampler = publisher, sampler
        self._version = -1
        self._manifest: Manifest | None = None

    def sync(self, version: int) -> list[SyncReport]:
        """Publish the present weights as ``version`` and bring them into all engines that are there.

        Returns one report an engine, on rank 0. Engines that are away get the weights when they are back.
        Raises UserError (rank 0) if an engine refuses them twice; the message names tensor, rank and file.
        """
        self._version, self._manifest = version, None
        return self._publish(again=False)

    def attend[T](self, ask: Callable[[SamplerClient], T | WeightsWanted]) -> T | None:
        """Rank 0's question to the sampler, with all ranks at hand to publish for engines that come back.

        Returns the answer on rank 0, None elsewhere.
        """
        answer = ask(self._sampler) if self._sampler else None
        while _from_rank_0(isinstance(answer, WeightsWanted)):
            self._publish(again=True)
            answer = self._sampler.go_on() if self._sampler else None
        assert not isinstance(answer, WeightsWanted)
        return answer

    def counts(self) -> dict[str, float]:
        """What went wrong with engines since this was asked last, as metrics. Rank 0's work."""
        return self._sampler.counts() if self._sampler else {}

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
                if self._sampler and manifest is not None:
                    self._compare(manifest, refused)
                    result = self._sampler.sync(manifest, self._version, again=again or attempt == 2)
                    reports, refused = reports + result.reports, result.refused
                    if refused:
                        print("warning: publishing again: " + "; ".join(refused), flush=True)
                # The weights must stay as they are until every engine has them.
                if not _from_rank_0(bool(refused)):
                    return reports
        if self._sampler is None:
            raise RuntimeError("engines refused the weights twice; rank 0 says why")
        raise UserError("weights were refused twice: " + "; ".join(refused))

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


def _from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank; the others wait for it."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
