"""Packed micro-batches: sequences end to end in one row, without padding between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from rpg_megatron.data.packing import fill_length, sequence_multiple
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.context_parallel import zigzag_places


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed row, whole even where the row is cut over context ranks."""

    lengths: list[int] = field(kw_only=True)
    """Places of each sequence, filling included, as plain integers."""
    places: Tensor = field(kw_only=True)
    """int64 [context, t / context]: the places of the row that each context rank holds."""


@dataclass(frozen=True)
class ResponseTokens:
    """What a loss may know of a micro-batch's response tokens, besides their log-probs. Everything is [n]."""

    old: Tensor
    """float32, nats: trainer's log-prob before the update."""
    anchor: Tensor
    """float32, nats: the KL anchor's."""
    behaviour: Tensor
    """float32, nats: the engine's when it sampled."""
    advantages: Tensor
    """float32."""
    sequences: Tensor
    """int64: number of the token's response within the micro-batch."""
    sequence_count: int | None = None
    """How many responses the micro-batch has: their numbers lie below it. None: unknown, any labels."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the device. t counts its tokens, alignment included.

    A sequence of n tokens takes n - 1 places: at place i its token i is read and its token i + 1 predicted,
    so arrays over predictions (labels, mask, old, ...) stand at the place before the token they speak of.
    What the model reads is cut over the context ranks: c = t / context places on each. What the loss reads is
    whole on all of them, so that it sees whole sequences.
    """

    trajectories: list[Trajectory]
    tokens: Tensor
    """int64 [1, c]."""
    labels: Tensor
    """int64 [1, c]: the next token; 0 on alignment."""
    positions: Tensor
    """int64 [1, c]: place within the sequence."""
    mask: Tensor
    """bool [t]: the label is a response token to learn from."""
    learnt: Tensor
    """int64 [n]: the places where the mask is set, ascending. To index with the mask itself, the host would
    have to wait for the device, to count them."""
    label_range: tuple[int, int]
    """The smallest and the largest label of the whole row."""
    old: Tensor
    """float32 [t]: trainer's log-prob before the update; 0 where unknown or not in the response."""
    anchor: Tensor
    """float32 [t]: anchor's log-prob; likewise."""
    behaviour: Tensor
    """float32 [t]: engine's log-prob; likewise."""
    advantage: Tensor
    """float32 [t]: advantage of the response the label belongs to; 0 elsewhere."""
    sequence: Tensor
    """int64 [t]: number of the trajectory within the row."""
    packed: PackedSequences

    @property
    def size(self) -> int:
        """Places in the row, on all context ranks together."""
        return sum(self.packed.lengths)

    def used(self) -> Tensor:
        """Places of the row that hold a trajectory's tokens and no filling: int64, ascending, on the CPU."""
        starts = np.cumsum([0, *self.packed.lengths])
        parts = [s + np.arange(t.length - 1) for s, t in zip(starts, self.trajectories, strict=False)]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))

    def response_tokens(self) -> ResponseTokens:
        """The loss's inputs at the places of the mask, in order, and so those of its metrics."""
        return ResponseTokens(
            old=self.old.index_select(0, self.learnt),
            anchor=self.anchor.index_select(0, self.learnt),
            behaviour=self.behaviour.index_select(0, self.learnt),
            advantages=self.advantage.index_select(0, self.learnt),
            sequences=self.sequence.index_select(0, self.learnt),
            sequence_count=len(self.trajectories),
        )

    def split(self, values: Tensor) -> Iterator[tuple[Trajectory, Tensor]]:
        """Per trajectory, the part of ``values`` [t] that speaks of its response: [R] each."""
        start = 0
        for trajectory, length in zip(self.trajectories, self.packed.lengths, strict=False):
            end = start + trajectory.length - 1
            yield trajectory, values[end - len(trajectory.response) : end]
            start += length


def make_micro_batch(
    trajectories: Sequence[Trajectory],
    device: torch.device,
    *,
    align: int = 1,
    context: int = 1,
    context_rank: int = 0,
    mask_truncated: bool = False,
) -> MicroBatch:
    """Pack whole trajectories (none: a row without a response token, for a rank that has no work).

    ``align``: the part of the row on each context rank is filled up to a multiple of it; sequence parallelism
    needs the tensor-parallel size. With ``context`` ranks each sequence is filled up as well, to a multiple
    of twice their number. The filling stands after a sequence: nothing attends to it and nothing is learnt
    from it. ``mask_truncated``: nor from responses that were cut at the limit, which are scored all the same.
    """
    lengths = [fill_length(t.length - 1, context) for t in trajectories] or [fill_length(1, context)]
    step = sequence_multiple(context)
    while sum(lengths) % (align * context):
        lengths[-1] += step
    size = sum(lengths)
    ints = {name: np.zeros(size, np.int64) for name in ("tokens", "labels", "sequence")}
    floats = {name: np.zeros(size, np.float32) for name in ("old", "anchor", "behaviour", "advantage")}
    mask = np.zeros(size, bool)
    starts = np.cumsum([0, *lengths])
    for number, t in enumerate(trajectories):
        start = starts[number]
        whole = np.concatenate([t.prompt, t.response])
        end = start + len(whole) - 1
        answer = slice(end - len(t.response), end)
        ints["tokens"][start:end] = whole[:-1]
        ints["labels"][start:end] = whole[1:]
        mask[answer] = not (mask_truncated and t.finish == "length")
        ints["sequence"][answer] = number
        floats["advantage"][answer] = t.advantage
        floats["behaviour"][answer] = t.behaviour
        if len(t.old):
            floats["old"][answer] = t.old
        if len(t.anchor):
            floats["anchor"][answer] = t.anchor
    bounds = _copy(starts.astype(np.int32), device)
    longest = max(lengths)
    places = zigzag_places(lengths, context)
    mine = places[context_rank]
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
        places=_copy(places, device),
    )
    positions = np.concatenate([np.arange(n) for n in lengths])
    return MicroBatch(
        trajectories=list(trajectories),
        **{name: _copy(ints[name][mine], device)[None] for name in ("tokens", "labels")},
        sequence=_copy(ints["sequence"], device),
        positions=_copy(positions[mine], device)[None],
        mask=_copy(mask, device),
        learnt=_copy(np.flatnonzero(mask), device),
        label_range=(int(ints["labels"].min()), int(ints["labels"].max())),
        **{name: _copy(x, device) for name, x in floats.items()},
        packed=packed,
    )


def _copy(values: NDArray[Any], device: torch.device) -> Tensor:
    """On the device; from pinned memory, or the host would wait until a GPU has done all that is queued."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
