"""Packed micro-batches (THD): sequences concatenated in one row, without padding between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.data.packing import padded_length, sequence_multiple
from rpg_megatron.data.trajectory import Trajectory, route_dtype
from rpg_megatron.objectives import ResponseTokens
from rpg_megatron.policy.context_parallel import zigzag_places

_MAX_PADDING = 4 / 3
"""Maximum ratio of padded to real tokens in a group of sequences that share one attention call: for short
sequences a call costs more than the padding.
"""
_MAX_LENGTH_GAP = 64
"""Maximum difference of the lengths in a group, in tokens, since the cost of attention is quadratic."""


@dataclass
class MicroBatchRoutes:
    """The experts that router replay assigns to the c tokens of a micro-batch on this context rank."""

    experts: Tensor
    """uint8 or int16 [layers with experts, c, experts of a token]. Those of padding are arbitrary."""
    real: Tensor
    """bool [c]: the token is not padding."""
    changed: Tensor | None = None
    """int32 [c], after ``start_counting``: in how many of this rank's layers the router's choice differs."""

    def start_counting(self) -> None:
        """Count in ``changed`` from now on, for one pass."""
        self.changed = torch.zeros_like(self.real, dtype=torch.int32)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's PackedSeqParams of a full row, also where the row is split over context ranks."""

    lengths: list[int] = field(kw_only=True)
    """Length of each sequence, padding included."""
    positions: Tensor = field(kw_only=True)
    """int64 [t / context]: position in its sequence of each of this context rank's tokens."""
    places: Tensor = field(kw_only=True)
    """int64 [context, t / context]: positions in the row that each context rank holds."""
    rotary: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    """Cosines and sines of the positions; ``layers.Rotary`` of the first layer sets them for all layers."""
    routes: MicroBatchRoutes | None = field(default=None, kw_only=True)
    """The experts of each token; None: the routers choose them."""

    @cached_property
    def groups(self) -> LengthGroups:
        """The sequences grouped by length, on the device of ``positions``."""
        return group_by_length(self.lengths, self.positions.device)


@dataclass(frozen=True)
class TeacherRow:
    """What a teacher's distributions at a row's places are computed from."""

    hidden: Tensor
    """[c, hidden size of the teacher]: its last hidden states on this context rank; in host memory."""
    weight: Tensor
    """[padded vocabulary / tp, hidden size of the teacher]: this rank's rows of its output layer."""
    direction: Literal["rkl", "fkl"]

    def part(self, places: slice, device: torch.device) -> Tensor:
        """The hidden states of some places, on a device."""
        return self.hidden[places].to(device, non_blocking=True)


@dataclass(frozen=True)
class TeacherTop:
    """The likeliest tokens of a teacher at a row's places."""

    ids: Tensor
    """int64 [c, k]."""
    logps: Tensor
    """float32 [c, k]."""
    known: Tensor
    """bool [c]: whether the teacher has given them for this place; elsewhere the divergence is 0."""
    direction: Literal["rkl", "fkl"]


@dataclass(frozen=True)
class LengthGroups:
    """Sequences of a row, grouped by length; each group is padded to its longest sequence."""

    shapes: list[tuple[int, int]]
    """(sequences, length of the longest) of each group."""
    padded: Tensor | None
    """int64 [n]: for each position of all groups, sequences x longest each, its position in the row. Padding
    repeats a sequence's last position. None: the groups are the row's sequences, one by one.
    """
    restored: Tensor | None
    """int64 [t]: for each position of the row, its index in ``padded``."""


def group_by_length(lengths: Sequence[int], device: torch.device) -> LengthGroups:
    """Group sequences of a row by length, shortest first; see ``_MAX_PADDING`` and ``_MAX_LENGTH_GAP``."""
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    members: list[list[int]] = []
    total = 0
    for i in np.argsort(sizes, kind="stable").tolist():
        n = lengths[i]
        group = members[-1] if members else []
        if (
            group
            and n - lengths[group[0]] <= _MAX_LENGTH_GAP
            and n * (len(group) + 1) <= _MAX_PADDING * (total + n)
        ):
            group.append(i)
            total += n
        else:
            members.append([i])
            total = n
    if all(len(m) == 1 for m in members):
        return LengthGroups([(1, n) for n in lengths], None, None)
    shapes, padded, restored, offset = [], [], np.empty(sizes.sum(), np.int64), 0
    for m in members:
        sizes_of_group = sizes[m, None]
        column = np.arange(sizes_of_group.max())
        rows = starts[m, None] + np.minimum(column, sizes_of_group - 1)
        real = column < sizes_of_group
        restored[rows[real]] = offset + np.flatnonzero(real)
        shapes.append(rows.shape)
        padded.append(rows.ravel())
        offset += rows.size
    return LengthGroups(shapes, _copy(np.concatenate(padded), device), _copy(restored, device))


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the device: t positions, padding included.

    A sequence of n tokens takes n - 1 positions: position i holds token i and predicts token i + 1. So arrays
    over predictions (labels, mask, old, ...) are at the position before their token. The model's inputs are
    split over the context ranks: c = t / context positions on each. The loss's inputs are complete on all of
    them, so that it sees full sequences.
    """

    trajectories: list[Trajectory]
    tokens: Tensor
    """int64 [1, c]."""
    labels: Tensor
    """int64 [1, c]: the next token; 0 on padding."""
    positions: Tensor
    """int64 [1, c]: position in the sequence."""
    padding: Tensor
    """bool [1, c]: no token of a trajectory."""
    mask: Tensor
    """bool [t]: the label is a response token that the policy sampled, and is in the loss."""
    loss_positions: Tensor
    """int64 [n]: positions where the mask is set, ascending. Indexing with the mask itself would make the
    host wait for the device.
    """
    label_range: tuple[int, int]
    """Smallest and largest label of the full row."""
    old: Tensor
    """float32 [t]: trainer's log-prob before the update; 0 where unknown or outside the response."""
    anchor: Tensor
    """float32 [t]: anchor's log-prob; 0 likewise."""
    behaviour: Tensor
    """float32 [t]: engine's log-prob; 0 likewise."""
    advantage: Tensor
    """float32 [t]: advantage of the label's response; 0 elsewhere."""
    sequence: Tensor
    """int64 [t]: index of the label's trajectory; 0 outside responses."""
    packed: PackedSequences
    teacher: TeacherRow | TeacherTop | None = field(default=None, kw_only=True)
    """For an update: what the divergence to a teacher is computed from."""

    @property
    def size(self) -> int:
        """Positions in the row, t, on all context ranks together."""
        return sum(self.packed.lengths)

    def without_routes(self) -> MicroBatch:
        """The same tokens, with the experts chosen by the routers."""
        return replace(self, packed=replace(self.packed, routes=None))

    def for_other_model(self) -> MicroBatch:
        """The same tokens for a model of another shape: ``packed.rotary`` has the first model's angles."""
        return replace(self, packed=replace(self.packed, routes=None, rotary=None))

    def real_positions(self) -> Tensor:
        """Positions that are not padding: int64, ascending, on the CPU."""
        starts = np.cumsum([0, *self.packed.lengths])
        parts = [s + np.arange(t.length - 1) for s, t in zip(starts, self.trajectories, strict=False)]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))

    def response_tokens(self) -> ResponseTokens:
        """The loss's inputs at the positions of the mask, in order."""
        return ResponseTokens(
            old=self.old.index_select(0, self.loss_positions),
            anchor=self.anchor.index_select(0, self.loss_positions),
            behaviour=self.behaviour.index_select(0, self.loss_positions),
            advantages=self.advantage.index_select(0, self.loss_positions),
            sequences=self.sequence.index_select(0, self.loss_positions),
            sequence_count=len(self.trajectories),
        )

    def split(self, values: Tensor) -> Iterator[tuple[Trajectory, Tensor]]:
        """For each trajectory, the part of ``values`` [t] at its response tokens: [R] each."""
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
    experts: ExpertShape | None = None,
    direction: Literal["rkl", "fkl"] | None = None,
) -> MicroBatch:
    """Pack complete trajectories into a row; without any, a row of padding, for a rank without work.

    align: the positions on each context rank are padded to a multiple of this; sequence parallelism needs the
    tensor-parallel size. context: number of context ranks; each sequence is padded to a multiple of twice
    this number. Padding follows a sequence: nothing attends to it and it is not in the loss. mask_truncated:
    exclude truncated responses from the loss; their log-probs are still computed. experts: replay the
    routes of the trajectories, which all or none of them have. direction: of the divergence to the teacher's
    likeliest tokens, which trajectories may have; None: they are not used.
    Raises ValueError if some have routes and some do not.
    """
    lengths = [padded_length(t.length - 1, context) for t in trajectories] or [padded_length(1, context)]
    step = sequence_multiple(context)
    while sum(lengths) % (align * context):
        lengths[-1] += step
    size = sum(lengths)
    ints = {name: np.zeros(size, np.int64) for name in ("tokens", "labels", "sequence")}
    floats = {name: np.zeros(size, np.float32) for name in ("old", "anchor", "behaviour", "advantage")}
    mask, padding = np.zeros(size, bool), np.ones(size, bool)
    starts = np.cumsum([0, *lengths])
    for number, t in enumerate(trajectories):
        start = starts[number]
        whole = np.concatenate([t.prompt, t.response])
        end = start + len(whole) - 1
        answer = slice(end - len(t.response), end)
        ints["tokens"][start:end] = whole[:-1]
        ints["labels"][start:end] = whole[1:]
        padding[start:end] = False
        mask[answer] = t.mask & (not (mask_truncated and t.finish == "length"))
        ints["sequence"][answer] = number
        floats["advantage"][answer] = t.advantage
        floats["behaviour"][answer] = t.behaviour
        if len(t.old):
            floats["old"][answer] = t.old
        if len(t.anchor):
            floats["anchor"][answer] = t.anchor
    packed = pack_lengths(lengths, device, context=context, context_rank=context_rank)
    own_places = zigzag_places(lengths, context)[context_rank]
    if experts is not None and any(len(t.routes) for t in trajectories):
        packed.routes = _pack_routes(trajectories, lengths, own_places, experts, device)
    teacher = None
    if direction is not None:
        teacher = _pack_top(trajectories, starts, own_places, size, direction, device)
    values: dict[str, Any] = {name: _copy(x, device) for name, x in floats.items()}
    for name in ("tokens", "labels"):
        values[name] = _copy(ints[name][own_places], device)[None]
    return MicroBatch(
        trajectories=list(trajectories),
        sequence=_copy(ints["sequence"], device),
        positions=packed.positions[None],
        padding=_copy(padding[own_places], device)[None],
        mask=_copy(mask, device),
        loss_positions=_copy(np.flatnonzero(mask), device),
        label_range=(int(ints["labels"].min()), int(ints["labels"].max())),
        packed=packed,
        teacher=teacher,
        **values,
    )


def _pack_top(
    trajectories: Sequence[Trajectory],
    starts: NDArray[Any],
    places: NDArray[np.int64],
    size: int,
    direction: Literal["rkl", "fkl"],
    device: torch.device,
) -> TeacherTop:
    """The likeliest tokens at the positions ``places`` of a row of ``size``. starts: of the sequences."""
    k = max((t.top_ids.shape[1] for t in trajectories), default=0) or 1
    ids, logps, known = np.zeros((size, k), np.int64), np.zeros((size, k), np.float32), np.zeros(size, bool)
    logps -= 1 + np.arange(k, dtype=np.float32)  # of places without: any finite numbers
    for start, t in zip(starts, trajectories, strict=False):
        if len(t.top_ids):
            answer = slice(start + len(t.prompt) - 1, start + t.length - 1)
            ids[answer], logps[answer], known[answer] = t.top_ids, t.top_logps, True
    on_device = [_copy(x[places], device) for x in (ids, logps, known)]
    return TeacherTop(on_device[0], on_device[1], on_device[2], direction)


def _pack_routes(
    trajectories: Sequence[Trajectory],
    lengths: Sequence[int],
    places: NDArray[np.int64],
    experts: ExpertShape,
    device: torch.device,
) -> MicroBatchRoutes:
    """The routes at the positions ``places`` of a row of sequences of these lengths, padding included."""
    size, topk = sum(lengths), experts.per_token
    # Padding may use any experts, as long as those of one token differ. These spread the work evenly.
    spread = (np.arange(size)[:, None] * topk + np.arange(topk)) % experts.count
    rows = np.repeat(spread.astype(route_dtype(experts.count))[:, None], len(experts.layers), axis=1)
    real = np.zeros(size, bool)
    start = 0
    for t, length in zip(trajectories, lengths, strict=True):
        part = slice(start, start + t.length - 1)
        if t.routes.shape != rows[part].shape:
            raise ValueError(
                f"routes of prompt {t.prompt_id}, sample {t.sample} have shape {t.routes.shape}; "
                f"its tokens need {rows[part].shape}"
            )
        rows[part], real[part] = t.routes, True
        start += length
    by_layer = np.ascontiguousarray(rows[places].swapaxes(0, 1))
    return MicroBatchRoutes(_copy(by_layer, device), _copy(real[places], device))


def pack_lengths(
    lengths: list[int], device: torch.device, *, context: int = 1, context_rank: int = 0
) -> PackedSequences:
    """A row of sequences of these lengths; with several context ranks, multiples of 2 x ``context``."""
    bounds = _copy(np.cumsum([0, *lengths], dtype=np.int32), device)
    places = zigzag_places(lengths, context)
    positions = np.concatenate([np.arange(n) for n in lengths])
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
        positions=_copy(positions[places[context_rank]], device),
        places=_copy(places, device),
    )


def _copy(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device, to a GPU from pinned memory: otherwise the host would wait for all queued work."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
