"""The RPG-style clip: which tokens keep their gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """Bounds on the ratio w = p/q.

    ``dual``: a token keeps its gradient while ``w < 1 + high`` if its weight is not negative, and while
    ``1 - low < w < c`` if it is. ``truncate``: w is clamped to ``[1 - low, 1 + high]`` and every token keeps
    a gradient.
    """

    kind: Literal["dual", "truncate"] = "dual"
    low: float = 0.2
    high: float = 0.28
    c: float = 10.0

    def __post_init__(self) -> None:
        if self.kind not in ("dual", "truncate"):
            raise ValueError(f"clip kind {self.kind!r} is not known; use dual or truncate")
        if not (0 <= self.low < 1 and self.high >= 0 and self.c > 1 + self.high):
            raise ValueError(f"clip bounds need 0 <= low < 1, high >= 0 and c > 1 + high; got {self}")

    def clamp(self, w: Tensor) -> Tensor:
        """``w`` limited to [1 - low, 1 + high]; same shape."""
        return w.clamp(1 - self.low, 1 + self.high)


def dual_bounds(weight: Tensor, w: Tensor, clip: Clip) -> tuple[Tensor, Tensor, Tensor]:
    """Which bound, if any, drops each token: boolean masks (high, low, c), shaped as ``weight`` and ``w``.

    ``weight`` is the signed policy-gradient weight; since w > 0, its sign is that of the regularised
    advantage. Source: arXiv 2505.17508, algorithm 2; at a bound itself the token is dropped.
    """
    positive = weight >= 0
    high = positive & (w >= 1 + clip.high)
    low = ~positive & (w <= 1 - clip.low)
    cut = ~positive & (w >= clip.c)
    return high, low, cut


def dual_clip_loss(w: Tensor, advantage: Tensor, clip: Clip) -> Tensor:
    """PPO's dual-clip loss of each token; the gradient flows through ``w`` and is zero for a dropped token.

    Shapes: all the same. Source: the dual clip of arXiv 2505.17508, section 3.3, with the advantage detached.
    """
    pessimistic = torch.maximum(-w * advantage, -clip.clamp(w) * advantage)
    return torch.where(advantage >= 0, pessimistic, torch.minimum(pessimistic, -clip.c * advantage))
