"""Packed micro-batches: sequences end to end in one row, without padding between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rpg_megatron.data.trajectory import Trajectory


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed row, with the lengths as plain integers as well."""

    lengths: list[int] = field(default_factory=list)


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


@dataclass(frozen=True)
class Pack:
    """One micro-batch on the device. t counts its tokens, alignment included.

    A sequence of n tokens takes n - 1 places: at place i its token i is read and its token i + 1 predicted,
    so arrays over predictions (labels, mask, old, ...) stand at the place before the token they speak of.
    """

    trajectories: list[Trajectory]
    tokens: Tensor
    """int64 [1, t]."""
    labels: Tensor
    """int64 [1, t]: the next token; 0 on alignment."""
    positions: Tensor
    """int64 [1, t]: place within the sequence."""
    mask: Tensor
    """bool [t]: the label is a response token."""
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
        """Tokens in the row."""
        return self.tokens.size(1)

    def response_tokens(self) -> ResponseTokens:
        """The loss's inputs at the places of the mask, in order."""
        m = self.mask
        return ResponseTokens(
            old=self.old[m],
            anchor=self.anchor[m],
            behaviour=self.behaviour[m],
            advantages=self.advantage[m],
            sequences=self.sequence[m],
        )

    def split(self, values: Tensor) -> Iterator[tuple[Trajectory, Tensor]]:
        """Per trajectory, the part of ``values`` [t] that speaks of its response: [R] each."""
        start = 0
        for trajectory in self.trajectories:
            end = start + trajectory.length - 1
            yield trajectory, values[end - len(trajectory.response) : end]
            start = end


def make_pack(trajectories: Sequence[Trajectory], device: torch.device, *, align: int = 1) -> Pack:
    """Pack whole trajectories (none: a row without a response token, for a rank that has no work).

    ``align``: the row is filled up to a multiple of it, by tokens after the last sequence that nothing
    attends to and nothing is learnt from. Sequence parallelism needs the tensor-parallel size.
    """
    lengths = [t.length - 1 for t in trajectories] or [1]
    used = sum(lengths)
    size = -(-used // align) * align
    # The filling belongs to the last sequence: it comes after it, so causal attention never reads it.
    lengths[-1] += size - used
    ints = {name: np.zeros(size, np.int64) for name in ("tokens", "labels", "sequence")}
    floats = {name: np.zeros(size, np.float32) for name in ("old", "anchor", "behaviour", "advantage")}
    mask = np.zeros(size, bool)
    start = 0
    for number, t in enumerate(trajectories):
        whole = np.concatenate([t.prompt, t.response])
        end = start + len(whole) - 1
        answer = slice(end - len(t.response), end)
        ints["tokens"][start:end] = whole[:-1]
        ints["labels"][start:end] = whole[1:]
        mask[answer] = True
        ints["sequence"][answer] = number
        floats["advantage"][answer] = t.advantage
        floats["behaviour"][answer] = t.behaviour
        if len(t.old):
            floats["old"][answer] = t.old
        if len(t.anchor):
            floats["anchor"][answer] = t.anchor
        start = end
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)
    longest = max(lengths)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )
    positions = np.concatenate([np.arange(n) for n in lengths])
    return Pack(
        trajectories=list(trajectories),
        **{name: torch.from_numpy(ints[name]).to(device)[None] for name in ("tokens", "labels")},
        sequence=torch.from_numpy(ints["sequence"]).to(device),
        positions=torch.from_numpy(positions).to(device)[None],
        mask=torch.from_numpy(mask).to(device),
        **{name: torch.from_numpy(x).to(device) for name, x in floats.items()},
        packed=packed,
    )
