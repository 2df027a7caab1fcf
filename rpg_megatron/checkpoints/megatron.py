"""Saves and loads Megatron-Core distributed checkpoints (torch_dist), in any parallel layout.

Keys are those of ``GPTModel.sharded_state_dict``, as in Megatron-LM: a checkpoint holds full tensors, of
which each rank writes and reads its own slices. Optimizer state is in the same dictionary in Megatron's fully
reshardable format, with the keys and shapes of the weights.
"""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from rpg_megatron.checkpoints.index import (
    Index,
    StoredPart,
    from_torch,
    read_index,
    stored_part,
    write_plain_index,
)
from rpg_megatron.checkpoints.megatron_folder import CONTENT, MEGATRON, check_tensors
from rpg_megatron.checkpoints.plain_loading import drop_pickled_states, plain_loading
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import open_own, open_regular, places_of
from rpg_megatron.models.lora import is_adapter
from rpg_megatron.system.collectives import default_group_on_host, gather_objects

_MAIN_WEIGHTS = "fp32_from_fp16_params"
"""Megatron's name of the float32 weights in the state of an optimizer that is not distributed."""


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy, with access to its plan, so that we can end a save ourselves.

    In Megatron's own way, if rank 0 cannot write the index, it raises and the other ranks hang in a
    broadcast.
    """

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> Any:
        self.writer, self.index = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned, async_strategy)


@dataclass
class PlannedSave:
    """This rank's part of a save that is planned, but not written yet."""

    folder: Path
    files: list[str]
    """Names of the files that this rank writes: none or one."""
    _strategy: _Strategy

    def write(self) -> list[StoredPart]:
        """Write and fsync the files; returns what was written where. Not collective.

        May be called from any thread.
        Raises the writer's exception, mostly an OSError.
        """
        writer, parts = self._strategy.writer, []
        for bucket in writer.write_buckets:
            # During this, Megatron disables Python's garbage collector in the whole process.
            _, result = writer.write_preloaded_data(
                [writer.transforms], 0, bucket, None, None, use_fsync=True
            )
            if isinstance(result, BaseException):
                raise result
            parts += [stored_part(r.index, r.storage_data) for r in result]
        writer.write_buckets = []  # frees the staged copies
        return parts

    def finish(self, everyone: list[list[StoredPart]]) -> None:
        """Write the index, from the results of ``write`` on all ranks. Rank 0, after all have written."""
        results = [[_write_result(part) for part in parts] for parts in everyone]
        self._strategy.writer.finish(self._strategy.index, results)
        pieces = list(chain.from_iterable(everyone))
        write_plain_index(self.folder, from_torch(self._strategy.index, pieces))
        save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(self.folder))
        with open_own(self.folder / MEGATRON) as file:
            os.fsync(file.fileno())


def _write_result(part: StoredPart) -> WriteResult:
    # Interned, so that the index holds each name once.
    index = MetadataIndex(sys.intern(part.name), part.offset, part.number)
    place = _StorageInfo(sys.intern(part.file), part.begin, part.length)
    return WriteResult(index, part.length, place)


def plan_save(
    folder: Path,
    models: Sequence[GPTModel],
    optimizer: MegatronOptimizer | None = None,
    iteration: int = 0,
    *,
    stage: bool,
) -> PlannedSave:
    """Plan a save: decide which rank writes which weights. Collective; ``folder`` exists and is empty.

    models: the pipeline chunks of this rank, one without virtual stages. Weights keep their dtype. optimizer:
    the models' optimizer, saved as well: float32 main weights, moments, step. stage: copy what this rank
    writes to host memory, so that weights and moments may change once this returns; otherwise they must not
    change until ``write`` is done. On a GPU it is always copied: Megatron's writer takes host memory only.
    """
    state: dict[str, Any] = _describe(models, CONTENT)
    if optimizer is not None:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.init_state_fn(part.optimizer, part.config)  # creates missing moments
        with _gathered_once(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(state, metadata=_metadata(CONTENT))
        for part in state["optimizer"].values():
            if isinstance(part, dict) and not any(part.get(_MAIN_WEIGHTS, [True])):
                del part[_MAIN_WEIGHTS]  # rank 0 would write empty lists, which others could not fill
    # For Megatron-LM: without a version it would assume its oldest order of QKV.
    state |= {"checkpoint_version": 3.0, "iteration": iteration}
    if stage or next(models[0].parameters()).is_cuda:
        # Megatron's staging copies GPU tensors, and CPU tensors only if they are part of a larger one: it
        # relies on a forked writer for the rest, and a fork does not copy shared memory.
        apply_factories(state)
        copied = _copy_gathered(state.get("optimizer", {}))
        for leaf in nested_values(state):
            if (
                isinstance(leaf, ShardedTensor)
                and is_main_replica(leaf.replica_id)
                and id(leaf) not in copied
            ):
                leaf.data = leaf.data.detach().to("cpu", copy=True)
    strategy = _Strategy(thread_count=1)
    with _queue_in_process(), default_group_on_host():
        dist_checkpointing.save(
            state,
            str(folder),
            strategy,
            async_sharded_save=True,
            async_strategy="mcore",
            content_metadata=dict(CONTENT),
        )
    return PlannedSave(folder, [name for _, name, _ in strategy.writer.write_buckets], strategy)


@contextmanager
def _gathered_once(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within the block, the state of distributed optimizers is gathered on the first replica, the writer.

    Megatron gathers it on all replicas: each would need host memory for all of it, on a node of eight ranks
    eight times. Its switch for that (``distrib_optim_fully_reshardable_mem_efficient``) gathers over gloo.
    """
    distributed = _distributed_parts(optimizer)
    for part in distributed:
        part.get_parameter_state_dp_zero = partial(_gather_state, part)
    try:
        yield
    finally:
        for part in distributed:
            del part.get_parameter_state_dp_zero


def _distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def _copy_gathered(state: dict[str, Any]) -> set[int]:
    """Copy the parts of the buffers that Megatron gathered, so that each buffer is freed with its last part.

    Otherwise Megatron copies them, with all buffers still there. Returns the ids of the parts.
    """
    parts = [leaf for leaf in nested_values(state) if isinstance(leaf, ShardedTensor)]
    parts = [x for x in parts if x.data.is_cpu and x.data.nbytes < x.data.untyped_storage().nbytes()]
    parts.sort(key=lambda x: x.data.untyped_storage().data_ptr())
    for part in parts:
        part.data = part.data.clone()
    return set(map(id, parts))


def _gather_state(part: DistributedOptimizer, **options: Any) -> Any:
    how = options | {"return_on_all_ranks": False}
    return DistributedOptimizer.get_parameter_state_dp_zero(part, **how)


def load_weights(
    folder: Path,
    models: Sequence[GPTModel],
    vocab: int,
    optimizer: MegatronOptimizer | None = None,
    *,
    trusted: bool = False,
) -> None:
    """Fill the models' parameters in place, from a checkpoint of any layout. Collective.

    vocab: the true vocabulary size, rows that the embedding must have at least. Values are cast to the
    parameters' dtype. Vocabulary padding becomes zero.
    optimizer: receives the checkpoint's optimizer state. It must have the same type; the layout may differ.
    trusted: it is the run's own. Otherwise no code runs that it refers to, and Transformer Engine's FP8
    states, which it unpickles, are left out: scales start anew.
    Raises UserError on every rank that lists missing, unexpected and wrongly shaped tensors.
    """
    with plain_loading(folder):
        _load(folder, models, vocab, optimizer, trusted)


def _load(
    folder: Path, models: Sequence[GPTModel], vocab: int, optimizer: MegatronOptimizer | None, trusted: bool
) -> None:
    index = read_index(folder)
    objects = set(index.objects)
    try:  # Megatron opens it by its name
        open_regular(folder / MEGATRON, *places_of(folder)).close()
    except OSError as e:
        raise UserError(f"{folder / MEGATRON}: {e.strerror}; copy the checkpoint again") from None
    content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    # Transformer Engine's layers have more states than Megatron's local ones. FP8 scales that are missing in
    # the checkpoint are initialised.
    _, state = extract_matching_values(
        _describe(models, content),
        lambda leaf: isinstance(leaf, ShardedObject) and leaf.unique_key not in objects,
    )
    _check_tensors(folder, index, state, vocab)
    keys = list(state)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=_metadata(content))
    with default_group_on_host():
        loaded = dist_checkpointing.load(state, str(folder), TorchDistLoadShardedStrategy())
    with torch.no_grad():
        for key, model in zip(keys, models, strict=True):
            if not trusted:
                drop_pickled_states(loaded[key])
            # Not strict: Megatron's empty extra states are not parameters and not in the checkpoint.
            model.load_state_dict(loaded[key], strict=False)
        if optimizer is not None:
            if not _distributed_parts(optimizer):
                _add_missing_states(loaded["optimizer"])
            optimizer.load_state_dict(loaded["optimizer"])
            _add_missing_steps(optimizer)


def _add_missing_states(loaded: dict[Any, Any]) -> None:
    """Add the states that Megatron leaves out of what it returns, in place, because they are empty: those of
    optimizers without a parameter on this rank, such as that of experts on a stage of dense layers.
    """
    for part in (each for each in [loaded, *loaded.values()] if isinstance(each, dict)):
        if "optimizer" in part:  # of 16-bit weights
            part.setdefault(_MAIN_WEIGHTS, [])
        inner = part.get("optimizer", part)
        if "param_groups" in inner:
            inner.setdefault("state", {})


def _add_missing_steps(optimizer: MegatronOptimizer) -> None:
    """Set the step of groups that the checkpoint has no step of: rank 0, which writes them, counts none for a
    group without a parameter on its stage.
    """
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    steps = {type(each): group["step"] for each in inner for group in each.param_groups if "step" in group}
    for each in inner:
        for group in each.param_groups if type(each) in steps else ():  # Muon counts none
            group.setdefault("step", steps[type(each)])


def _describe(models: Sequence[GPTModel], content: dict[str, Any]) -> dict[str, Any]:
    names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    state = {n: m.sharded_state_dict(metadata=_metadata(content)) for n, m in zip(names, models, strict=True)}
    for name, model in zip(names, models, strict=True):
        if (lora := getattr(getattr(model, "output_layer", None), "lora", None)) is not None:
            # Megatron's layer takes the parameters of its children for whole ones.
            state[name] |= lora.sharded_state_dict("output_layer.lora.", (), _metadata(content))
    if any(is_adapter(key) for part in state.values() for key in part):
        # Of a model with adapters only they are trained. States of layers are no weights.
        state = {
            n: {k: v for k, v in part.items() if is_adapter(k) or isinstance(v, ShardedObject)}
            for n, part in state.items()
        }
    return state


def _metadata(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def _check_tensors(folder: Path, index: Index, state: dict[str, Any], vocab: int) -> None:
    """Compare the tensors of all ranks with the stored ones; Megatron would stop at the first difference."""
    own_tensors: dict[str, tuple[tuple[int, ...], bool]] = {}
    for leaf in nested_values(state):
        parts = nested_values(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else [leaf]
        for part in parts:
            if isinstance(part, ShardedTensor):
                own_tensors[part.key] = (tuple(part.global_shape), bool(part.allow_shape_mismatch))
    everyone = gather_objects(own_tensors, dict[str, tuple[tuple[int, ...], bool]])
    expected = {key: value for rank in everyone for key, value in rank.items()}
    check_tensors(folder, index.weights, expected, vocab)


@contextmanager
def _queue_in_process() -> Iterator[None]:
    """Within the block, Megatron's writer starts no process for its results queue.

    Only writers in other processes need one; it is slow to start and outlives a rank that is killed.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
