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

from rpg_megatron.config.model_shape import ExpertShape, Rope
from rpg_megatron.data.packing import padded_length, sequence_multiple
from rpg_megatron.data.row_layout import RowPiece, lay_out
from rpg_megatron.data.trajectory import Trajectory, route_dtype
from rpg_megatron.objectives import ResponseTokens
from rpg_megatron.policy.context_parallel import zigzag_places
from rpg_megatron.policy.length_groups import LengthGroups, copy_to, group_by_length


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
    rotary: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict, kw_only=True)
    """Cosines and sines of the positions; the first layer with a ``Rope`` sets them for all that have it."""
    routes: MicroBatchRoutes | None = field(default=None, kw_only=True)
    """The experts of each token; None: the routers choose them."""
    prompts: list[tuple[int, int]] | None = field(default=None, kw_only=True)
    """For each sequence, start and length of the shared prompt in the row that it continues; the length is 0
    if it continues none. None: no sequence does.
    """
    runs: Any = field(default=None, kw_only=True)
    """``attention.Runs``, where they are needed; the first layer sets them for all layers."""

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
    pieces: list[RowPiece]
    """What the row's sequences, ``packed.lengths``, hold; without trajectories none."""
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
        return replace(self, packed=replace(self.packed, routes=None, rotary={}))

    @property
    def tokens_computed(self) -> int:
        """Positions that are not padding; those of a shared prompt count once."""
        return sum(piece.tokens for piece in self.pieces)

    def real_positions(self) -> Tensor:
        """Positions that are not padding: int64, ascending, on the CPU."""
        starts = np.cumsum([0, *self.packed.lengths])
        parts = [s + np.arange(piece.tokens) for s, piece in zip(starts, self.pieces, strict=False)]
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
        answers = _answers(self.trajectories, self.pieces, self.packed.lengths)
        for trajectory, answer in zip(self.trajectories, answers, strict=True):
            yield trajectory, values[answer]


def _answers(
    trajectories: Sequence[Trajectory], pieces: Sequence[RowPiece], lengths: Sequence[int]
) -> list[slice]:
    """The positions of each trajectory's response tokens."""
    answers = [slice(0)] * len(trajectories)
    start = 0
    for piece, length in zip(pieces, lengths, strict=False):
        if not piece.shared:
            end = start + piece.tokens
            answers[piece.trajectory] = slice(end - len(trajectories[piece.trajectory].response), end)
        start += length
    return answers


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
    share: float | None = None,
) -> MicroBatch:
    """Pack complete trajectories into a row; without any, a row of padding, for a rank without work.

    align: the positions on each context rank are padded to a multiple of this; sequence parallelism needs the
    tensor-parallel size. context: number of context ranks; each sequence is padded to a multiple of twice
    this number. Padding follows a sequence: nothing attends to it and it is not in the loss. mask_truncated:
    exclude truncated responses from the loss; their log-probs are still computed. experts: replay the
    routes of the trajectories, which all or none of them have. direction: of the divergence to the teacher's
    likeliest tokens, which trajectories may have; None: they are not used. share: the responses to one prompt
    stand behind a single copy of it, see ``row_layout.lay_out``.
    Raises ValueError if some have routes and some do not.
    """
    pieces = lay_out(trajectories, share)
    lengths = [padded_length(p.tokens, context) for p in pieces] or [padded_length(1, context)]
    step = sequence_multiple(context)
    while sum(lengths) % (align * context):
        lengths[-1] += step
    size = sum(lengths)
    ints = {name: np.zeros(size, np.int64) for name in ("tokens", "labels", "sequence")}
    floats = {name: np.zeros(size, np.float32) for name in ("old", "anchor", "behaviour", "advantage")}
    mask, padding = np.zeros(size, bool), np.ones(size, bool)
    starts = np.cumsum([0, *lengths]).tolist()
    for start, piece in zip(starts, pieces, strict=False):
        t = trajectories[piece.trajectory]
        whole, end, last = (
            np.concatenate([t.prompt, t.response]),
            start + piece.tokens,
            piece.first + piece.tokens,
        )
        ints["tokens"][start:end] = whole[piece.first : last]
        ints["labels"][start:end] = whole[piece.first + 1 : last + 1]
        padding[start:end] = False
    answers = _answers(trajectories, pieces, lengths)
    for number, (t, answer) in enumerate(zip(trajectories, answers, strict=True)):
        mask[answer] = t.mask & (not (mask_truncated and t.finish == "length"))
        ints["sequence"][answer] = number
        floats["advantage"][answer] = t.advantage
        floats["behaviour"][answer] = t.behaviour
        if len(t.old):
            floats["old"][answer] = t.old
        if len(t.anchor):
            floats["anchor"][answer] = t.anchor
    prompts = None
    if any(p.shared for p in pieces):
        prompts = [
            (0, 0) if p.prompt is None else (starts[p.prompt], pieces[p.prompt].tokens) for p in pieces
        ]
    packed = pack_lengths(lengths, device, context=context, context_rank=context_rank, prompts=prompts)
    own_places = zigzag_places(lengths, context)[context_rank]
    if experts is not None and any(len(t.routes) for t in trajectories):
        packed.routes = _pack_routes(trajectories, pieces, lengths, own_places, experts, device)
    teacher = None
    if direction is not None:
        teacher = _pack_top(trajectories, answers, own_places, size, direction, device)
    values: dict[str, Any] = {name: copy_to(x, device) for name, x in floats.items()}
    for name in ("tokens", "labels"):
        values[name] = copy_to(ints[name][own_places], device)[None]
    return MicroBatch(
        trajectories=list(trajectories),
        sequence=copy_to(ints["sequence"], device),
        positions=packed.positions[None],
        padding=copy_to(padding[own_places], device)[None],
        mask=copy_to(mask, device),
        loss_positions=copy_to(np.flatnonzero(mask), device),
        label_range=(int(ints["labels"].min()), int(ints["labels"].max())),
        packed=packed,
        pieces=pieces,
        teacher=teacher,
        **values,
    )


def _pack_top(
    trajectories: Sequence[Trajectory],
    answers: Sequence[slice],
    places: NDArray[np.int64],
    size: int,
    direction: Literal["rkl", "fkl"],
    device: torch.device,
) -> TeacherTop:
    """The likeliest tokens at the positions ``places`` of a row of ``size``. answers: as of ``_answers``."""
    k = max((t.top_ids.shape[1] for t in trajectories), default=0) or 1
    ids, logps, known = np.zeros((size, k), np.int64), np.zeros((size, k), np.float32), np.zeros(size, bool)
    logps -= 1 + np.arange(k, dtype=np.float32)  # of places without: any finite numbers
    for answer, t in zip(answers, trajectories, strict=True):
        if len(t.top_ids):
            ids[answer], logps[answer], known[answer] = t.top_ids, t.top_logps, True
    on_device = [copy_to(x[places], device) for x in (ids, logps, known)]
    return TeacherTop(on_device[0], on_device[1], on_device[2], direction)


def _pack_routes(
    trajectories: Sequence[Trajectory],
    pieces: Sequence[RowPiece],
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
    for piece, length in zip(pieces, lengths, strict=True):
        t = trajectories[piece.trajectory]
        if t.routes.shape != (t.length - 1, *rows.shape[1:]):
            raise ValueError(
                f"routes of prompt {t.prompt_id}, sample {t.sample} have shape {t.routes.shape}; "
                f"its tokens need {(t.length - 1, *rows.shape[1:])}"
            )
        part = slice(start, start + piece.tokens)
        rows[part], real[part] = t.routes[piece.first : piece.first + piece.tokens], True
        start += length
    by_layer = np.ascontiguousarray(rows[places].swapaxes(0, 1))
    return MicroBatchRoutes(copy_to(by_layer, device), copy_to(real[places], device))


def pack_lengths(
    lengths: list[int],
    device: torch.device,
    *,
    context: int = 1,
    context_rank: int = 0,
    prompts: list[tuple[int, int]] | None = None,
) -> PackedSequences:
    """A row of sequences of these lengths; with several context ranks, multiples of 2 x ``context``.

    prompts: see ``PackedSequences``; the positions of a sequence continue its prompt's.
    """
    on_host = np.cumsum([0, *lengths], dtype=np.int32)
    bounds = copy_to(on_host, device)
    bounds.on_host = torch.from_numpy(on_host)  # type: ignore[attr-defined]  # see delta_net
    places = zigzag_places(lengths, context)
    before = [length for _, length in prompts or [(0, 0)] * len(lengths)]
    positions = np.concatenate([p + np.arange(n) for p, n in zip(before, lengths, strict=True)])
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
        positions=copy_to(positions[places[context_rank]], device),
        places=copy_to(places, device),
        prompts=prompts,
    )
