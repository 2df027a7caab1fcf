"""Layout of a packed row: where the tokens of each trajectory stand, and which prompts are shared.

A sequence of n tokens takes n - 1 positions (see ``policy.microbatch.MicroBatch``). Responses to one prompt
may stand behind a single copy of it. The last token of the prompt predicts the first token of every response,
so it is not shared: a prompt of P tokens shares its first P - 1, and a response of R tokens has R positions
of its own, those of the prompt's last token and of its own tokens but the last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rpg_megatron.data.trajectory import NOT_SAMPLED, Trajectory


@dataclass(frozen=True)
class RowPiece:
    """Consecutive positions of a row: a whole sequence, a shared prompt, or a response behind one."""

    trajectory: int
    """Number of the trajectory in the row; of a shared prompt, the first of those that share it."""
    first: int
    """The first position's token: its number in the trajectory, and its position for rotary embeddings."""
    tokens: int
    """Number of positions without padding."""
    prompt: int | None = None
    """Of a response behind a shared prompt: the number of the prompt's piece in the row."""
    shared: bool = False
    """The piece is a shared prompt."""


def shareable(prompt: int, response: int, least: float | None) -> int:
    """Positions that a prompt can share, P - 1; 0 if the response does not share its prompt.

    prompt, response: tokens. least: the smallest share of the sequence's positions at which they are shared
    (``TrainingSettings.shared_from``); None: never.
    """
    shared = prompt - 1
    return shared if least is not None and shared >= least * (shared + response) else 0


def routed_by(trajectory: Trajectory) -> int:
    """Version of the weights that routed its prompt, by its first sampled token; -1: it has no routes."""
    sampled = trajectory.versions[trajectory.versions != NOT_SAMPLED]
    return int(sampled[0]) if len(trajectory.routes) and len(sampled) else -1


def lay_out(trajectories: Sequence[Trajectory], least: float | None = None) -> list[RowPiece]:
    """The pieces of a row, in order. least: see ``shareable``.

    Trajectories with the same prompt tokens share them if there are at least two; with routes, which a shared
    prompt has from its first response, those of the same weights. Responses follow their prompt; everything
    else keeps the order of the trajectories.
    """
    members: dict[Hashable, list[int]] = {}
    for number, t in enumerate(trajectories):
        shares = shareable(len(t.prompt), len(t.response), least) > 0
        key = (t.prompt.tobytes(), routed_by(t)) if shares else number
        members.setdefault(key, []).append(number)
    pieces: list[RowPiece] = []
    for numbers in members.values():
        prompt, first = None, 0
        if len(numbers) > 1:
            prompt, first = len(pieces), len(trajectories[numbers[0]].prompt) - 1
            pieces.append(RowPiece(numbers[0], 0, first, shared=True))
        pieces += [RowPiece(n, first, trajectories[n].length - 1 - first, prompt) for n in numbers]
    return pieces
