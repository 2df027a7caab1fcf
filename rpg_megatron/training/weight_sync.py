"""Weight sync from the trainer ranks to the vLLM engines, after every step and after an engine restart.

All ranks publish weights together. Rank 0 alone is connected to the sampler, and broadcasts what to do next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rpg_megatron.bridge.controller import SyncReport
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.publisher import Publisher, published
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.cluster import ADDRESS_VARIABLE
from rpg_megatron.config.rollout import BUCKET_BYTES, LINK_SECONDS, BridgeSettings
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.policy.offload import StateOffloader
from rpg_megatron.rollout.sampler_client import ResyncRequired, SamplerClient, SyncResult
from rpg_megatron.system.collectives import any_rank, broadcast_object
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.training.preemption import Stopped, StopRequest
from rpg_megatron.training.trainer import Trainer


class WeightSync:
    """The publisher of this rank and, on rank 0, the sampler's client.

    Methods are collective, and raise Stopped on all ranks if rank 0 got a stop signal while it waited.
    """

    def __init__(
        self,
        publisher: Publisher | None,
        sampler: SamplerClient | None,
        stop: StopRequest,
        adapters: Collection[str] | None = None,
    ):
        """publisher: None in a run without engines, which has nothing to publish. adapters: HF names of the
        only tensors that change; the others are published until all engines have them.
        """
        self._publisher, self._sampler, self._stop = publisher, sampler, stop
        self._adapters, self._complete = adapters, False
        self._version = -1
        self._manifest: Manifest | None = None

    def sync(self, version: int, *, trial: bool = False) -> list[SyncReport]:
        """Publish the current weights as ``version`` and load them into all engines that are running.

        trial: no rollouts are sampled with them.

        Returns one report per engine, on rank 0. Engines that are restarting get the weights afterwards.
        Raises UserError (rank 0) if an engine rejects them twice; the message names tensor, rank and file.
        """
        self._version, self._manifest = version, None
        return self._publish(again=False, trial=trial)

    def call_with_resync[T](self, call: Callable[[SamplerClient], T | ResyncRequired]) -> T | None:
        """Call the sampler from rank 0; returns the result there, None elsewhere.

        Engines that restart during the call get the weights again, published by all ranks.
        """
        result: T | ResyncRequired | Stopped | None = self._call(call)
        while _broadcast(isinstance(result, ResyncRequired), isinstance(result, Stopped)):
            self._publish(again=True)
            result = self._call(lambda sampler: sampler.resume_request())
        assert not isinstance(result, ResyncRequired | Stopped)
        return result

    def sleep(self, level: int) -> None:
        """Put the engines to sleep (see ``EnginePool.sleep``); no rank returns before all of them sleep."""
        _broadcast(False, isinstance(self._call(lambda sampler: sampler.sleep(level)), Stopped))

    def wake(self) -> None:
        """Wake engines that sleep at level 1."""
        _broadcast(False, isinstance(self._call(lambda sampler: sampler.wake()), Stopped))

    @contextmanager
    def state_on_gpu(self, offloader: StateOffloader) -> Iterator[None]:
        """Within the block, offloaded state is on the GPU, and the colocated engines sleep."""
        offloaded = offloader.is_offloaded
        if offloaded:
            self.sleep(1)
            offloader.reload()
        yield
        if offloaded:
            offloader.offload()
            self.wake()

    def check_stop(self) -> None:
        """Raise Stopped on all ranks if any of them got a stop signal."""
        if any_rank(self._stop.received):
            raise Stopped

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the sampler's state from a checkpoint (rank 0)."""
        if self._sampler:
            self._sampler.restore(state)

    def close(self) -> None:
        """Retract the weights and disconnect from the sampler."""
        if self._publisher is not None:
            self._publisher.close()
        if self._sampler is not None:
            self._sampler.close()

    def _publish(self, *, again: bool, trial: bool = False) -> list[SyncReport]:
        reports: list[SyncReport] = []
        refused: list[str] = []
        assert self._publisher is not None
        # Adapters alone are tried once more than all weights: an engine that was restarted has none.
        only = self._adapters if self._complete and not again else None
        for attempt in (1, 2) if only is None else (0, 1, 2):
            only = only if attempt == 0 else None
            with published(self._publisher, self._version, only) as manifest:
                stopped = False
                if manifest is not None:
                    self._check_unchanged(manifest, refused)
                    result = self._call(
                        partial(_sync, manifest, self._version, again or bool(refused), trial)
                    )
                    if isinstance(result, SyncResult):
                        reports, refused = reports + result.reports, result.refused
                    stopped = isinstance(result, Stopped)
                    if refused:
                        print("warning: publishing again: " + "; ".join(refused), flush=True)
                # The published weights must not change until every engine has loaded them.
                if not _broadcast(bool(refused), stopped):
                    self._complete = True
                    return reports
        if self._sampler is None:
            raise RuntimeError("engines refused the weights twice; see the error of rank 0")
        raise UserError("weights were refused twice: " + "; ".join(refused))

    def _call(self, call: Callable[[SamplerClient], Any]) -> Any:
        """A call's result on rank 0, or Stopped after a stop signal; None elsewhere. Not collective."""
        if self._sampler is None:
            return None
        try:
            return call(self._sampler)
        except Stopped as stopped:
            return stopped
        except (RuntimeError, UserError):
            # Engines and sampler may have exited on the same stop signal.
            if self._stop.explains_failure():
                return Stopped()
            raise

    def _check_unchanged(self, manifest: Manifest, refused: list[str]) -> None:
        """Check that the checksums of a version are the same each time it is published.

        Raises UserError that names the changed tensors. With shared memory these are the parameters
        themselves, so they must be used neither by engines nor for training.
        """
        before, self._manifest = self._manifest or manifest, manifest
        changed = [
            f"{name} (in {manifest.shards[new.shard]})"
            for name, tensor in manifest.tensors.items()
            if before is not manifest and name in before.tensors
            for new, *sums in zip(tensor.boxes, before.box_sums(name), manifest.box_sums(name), strict=True)
            if sums[0] != sums[1]
        ]
        if changed:
            more = " and more" if len(changed) > 5 else ""
            raise UserError(
                f"weights of version {self._version} changed after they were first published: "
                f"{', '.join(changed[:5])}{more}. Other code wrote into the trainers' memory, "
                f"or the memory is faulty. {' '.join(refused)}".rstrip()
            )


def open_weight_sync(
    settings: Settings, folder: Path, trainer: Trainer, sampler: SamplerClient | None, stop: StopRequest
) -> WeightSync:
    """The sync of a trainer's weights over the configured transport. Collective. sampler: on rank 0.

    folder: RPG_BRIDGE_DIR of this node's engines.
    """
    if not settings.engine.replicas:
        return WeightSync(None, sampler, stop)
    mapping, adapters = trainer.published
    publisher = open_publisher(
        settings.bridge,
        folder,
        trainer.mesh.coordinates(settings.model.vocab_multiple),
        trainer.policy.served.tensors,
        mapping,
        torch_dtype(settings.precision.dtype),
        adopt=not settings.optimizer.distributed,  # the distributed one keeps views of the parameters
        colocated=settings.engine.colocated,
    )
    return WeightSync(publisher, sampler, stop, adapters)


def open_publisher(
    settings: BridgeSettings,
    folder: Path,
    coordinates: RankCoordinates,
    params: Mapping[str, torch.Tensor],
    mapping: ModelMapping,
    dtype: torch.dtype,
    *,
    adopt: bool,
    colocated: bool = False,
) -> Publisher:
    """The publisher of the configured transport (``bridge.transport``). Collective.

    folder: RPG_BRIDGE_DIR of this node's engines. params: live parameters by Megatron name. dtype: what
    engines receive. adopt: whether parameters may be moved into shared memory for good. colocated: engines
    share the trainers' GPUs, on every node.
    """
    if settings.transport == "process_group":
        from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher

        return GroupPublisher(
            os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"),
            coordinates,
            params,
            mapping,
            dtype,
            timeout=LINK_SECONDS,
            bucket_bytes=BUCKET_BYTES,
            colocated_in=folder if colocated else None,
            private=None if ADDRESS_VARIABLE in os.environ else folder,
        )
    if settings.transport == "cuda_ipc":
        from rpg_megatron.bridge.transports.cuda_ipc import CudaIpcPublisher

        return CudaIpcPublisher(folder, coordinates, params, mapping, dtype)
    from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher

    return SharedMemoryPublisher(folder, coordinates, params, mapping, dtype, adopt=adopt)


def _sync(manifest: Manifest, version: int, again: bool, trial: bool, sampler: SamplerClient) -> SyncResult:
    """Calls ``EnginePool.sync`` in the sampler process, over its socket."""
    return sampler.sync(manifest, version, again, trial)


def _broadcast(publish: bool, stopped: bool) -> bool:
    """Rank 0's ``publish``, on every rank. Raises Stopped on all ranks if rank 0's ``stopped`` is set."""
    publish, stopped = broadcast_object((publish, stopped), tuple[bool, bool])
    if stopped:
        raise Stopped
    return publish
