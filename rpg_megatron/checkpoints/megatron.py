"""Weights to and from Megatron-Core's distributed checkpoints (torch_dist), which load in any layout.

What is written is what ``GPTModel.sharded_state_dict`` describes, under Megatron-LM's keys: a checkpoint
holds whole tensors, each rank writes its parts, and a rank of another layout reads those parts that make up
its own. Optimizer state travels in the same dictionary, in Megatron's fully reshardable form: with the keys
and shapes of the weights that it belongs to.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from rpg_megatron.checkpoints.megatron_folder import MEGATRON, Contents, read_contents
from rpg_megatron.config.errors import UserError
from rpg_megatron.system.collectives import barrier, default_group_on_host, gather_objects, gather_on_first

CONTENT = {
    # Layers under keys of their own: Megatron is about to drop the other way, one tensor over all layers.
    "non_homogeneous_layers": True,
    "singleton_local_shards": False,
    # The default cannot be saved at all; this one can be read in any layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""How keys are formed. Megatron keeps it in the checkpoint, and readers form theirs alike."""


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's, which also says what it has planned: its own way to end a save is no use to us.

    If rank 0 cannot write the index, that raises there and leaves the other ranks in a broadcast.
    """

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> Any:
        self.writer, self.index = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned, async_strategy)


@dataclass
class PlannedSave:
    """This rank's part of a save: who writes what is agreed upon, nothing is written."""

    folder: Path
    files: list[str]
    """Names of those that this rank writes; none or one."""
    _strategy: _Strategy

    def write(self) -> list[Any]:
        """Write them, through to the disk; returns Megatron's description of them. Not collective.

        Any thread may do it. Raises what went wrong, an OSError mostly.
        """
        writer, found = self._strategy.writer, []
        for bucket in writer.write_buckets:
            # Megatron keeps Python's garbage collector off meanwhile, in the whole process.
            _, result = writer.write_preloaded_data(
                [writer.transforms], 0, bucket, None, None, use_fsync=True
            )
            if isinstance(result, BaseException):
                raise result
            found += result
        writer.write_buckets = []  # the staged copies can go
        return found

    def finish(self, everyone: list[list[Any]]) -> None:
        """Write the index, from what ``write`` returned on every rank. On rank 0, when all have written."""
        self._strategy.writer.finish(self._strategy.index, everyone)
        save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(self.folder))
        with (self.folder / MEGATRON).open("rb") as file:
            os.fsync(file.fileno())


def plan_save(
    folder: Path,
    models: Sequence[GPTModel],
    optimizer: MegatronOptimizer | None = None,
    iteration: int = 0,
    *,
    stage: bool,
) -> PlannedSave:
    """Decide which rank writes what of the weights. Collective; ``folder`` exists and is empty.

    models: the pipeline chunks of this rank, one without virtual stages. Weights keep their dtype.
    optimizer: theirs, written as well: float32 main weights, moments, step.
    stage: copy to host memory what this rank will write, so that weights and moments may change as soon as
    this returns; otherwise they must stay as they are until ``write`` is done.
    """
    state: dict[str, Any] = _describe(models, CONTENT)
    if optimizer is not None:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.init_state_fn(part.optimizer, part.config)  # before the first update it has no moments
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=_metadata(CONTENT))
    # What Megatron-LM looks for: without a version it would take QKV to have its oldest order.
    state |= {"checkpoint_version": 3.0, "iteration": iteration}
    if stage:
        # Megatron's own staging copies what lies on a GPU, and of other memory only what is part of something
        # larger: it counts on a forked writer to keep the rest, and a fork does not keep shared memory.
        apply_factories(state)
        for leaf in nested_values(state):
            if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
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


def save_weights(folder: Path, models: Sequence[GPTModel], iteration: int = 0) -> None:
    """Write this rank's part of the weights, without optimizer. Collective; ``folder`` exists and is empty.

    For programs that end when a rank fails: the others would wait.
    """
    planned = plan_save(folder, models, iteration=iteration, stage=False)
    if everyone := gather_on_first(planned.write()):
        planned.finish(everyone)
    barrier()


def load_weights(
    folder: Path, models: Sequence[GPTModel], vocab: int, optimizer: MegatronOptimizer | None = None
) -> None:
    """Fill the models' parameters in place, from a checkpoint of any layout. Collective.

    vocab: the true vocabulary size, rows that the embedding must have at least. Values are cast to the
    parameters' dtype. Vocabulary padding becomes zero.
    optimizer: takes up what the checkpoint's had. It must be of the same kind; the layout may be another one.
    Raises UserError on every rank, listing what the checkpoint lacks, has too much or has in another shape.
    """
    content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    contents = read_contents(folder)
    # Layers of Transformer Engine have more states than Megatron's own. Those of scales that are not there
    # begin anew.
    _, state = extract_matching_values(
        _describe(models, content),
        lambda leaf: isinstance(leaf, ShardedObject) and leaf.unique_key not in contents.objects,
    )
    _check_tensors(folder, contents, state, vocab)
    keys = list(state)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=_metadata(content))
    with default_group_on_host():
        loaded = dist_checkpointing.load(state, str(folder), TorchDistLoadShardedStrategy())
    with torch.no_grad():
        for key, model in zip(keys, models, strict=True):
            # Not strict: Megatron's empty extra states, which are no parameters, are in no checkpoint.
            model.load_state_dict(loaded[key], strict=False)
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])


def stored_dtype(contents: Contents) -> str:
    """The one dtype of a checkpoint's weights, as torch names it; UserError if there are several."""
    dtypes = sorted({t.dtype for t in contents.weights.values()})
    if len(dtypes) != 1:
        raise UserError(f"the checkpoint's weights are of several types ({', '.join(dtypes)}), not of one")
    return dtypes[0]


def _describe(models: Sequence[GPTModel], content: dict[str, Any]) -> dict[str, Any]:
    names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    return {n: m.sharded_state_dict(metadata=_metadata(content)) for n, m in zip(names, models, strict=True)}


def _metadata(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def _check_tensors(folder: Path, contents: Contents, state: dict[str, Any], vocab: int) -> None:
    """Compare what all ranks want with what is stored, before Megatron stops at the first difference."""
    mine: dict[str, tuple[tuple[int, ...], bool]] = {}
    for leaf in nested_values(state):
        parts = nested_values(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else [leaf]
        for part in parts:
            if isinstance(part, ShardedTensor):
                mine[part.key] = (tuple(part.global_shape), bool(part.allow_shape_mismatch))
    wanted = {key: value for rank in gather_objects(mine) for key, value in rank.items()}
    stored = contents.weights
    problems = [f"missing: {n}" for n in wanted if n not in stored]
    problems += [f"unexpected: {n}" for n in stored if n not in wanted]
    problems += [
        f"wrong shape: {n} is {list(stored[n].shape)}, not {list(shape)}"
        for n, (shape, padded) in wanted.items()
        if n in stored and not _fits(stored[n].shape, shape, vocab if padded else None)
    ]
    if problems:
        more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
        raise UserError(
            f"{folder}: the tensors are not those of the model that its config.json describes\n  "
            + "\n  ".join(problems[:40])
            + more
        )


def _fits(stored: tuple[int, ...], wanted: tuple[int, ...], vocab: int | None) -> bool:
    """Whether a stored tensor can be read; of a vocabulary, padding rows may be more or fewer."""
    return stored == wanted if vocab is None else stored[1:] == wanted[1:] and stored[0] >= vocab


@contextmanager
def _queue_in_process() -> Iterator[None]:
    """Keep Megatron's writer from starting a process for its results.

    Only writers in other processes need it; it imports everything anew and outlives a rank that is killed.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
