"""Draws docs/losses.svg: loss and gradient weight of a token against its ratio w, computed by rpg_loss.

    python tools/draw_losses.py > docs/losses.svg

The colours are readable on white and on black. A test compares the file with the output of this script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpg_megatron.objectives import Clip, rpg_loss

CLIP = Clip(low=0.2, high=0.28, c=2.25)
"""The default bounds, except for c: the paper draws about 2.25."""
CLIPS: dict[str, dict[str, Any]] = {
    "dual": {"clip": CLIP},
    "truncate": {"clip": Clip("truncate", CLIP.low, CLIP.high, CLIP.c)},
    "no clip": {"clip": None},
}
KLS: dict[str, dict[str, Any]] = {
    name.upper(): {"divergence": name, "clip": None, "beta": 1.0} for name in ("fkl", "ufkl", "rkl", "urkl")
}


def loss(w: Tensor, advantage: float, settings: Mapping[str, Any]) -> Tensor:
    """Value of the differentiable loss; with an advantage, the KL is folded into the clip. Shape of w."""
    inputs = w.log(), torch.zeros_like(w), torch.full_like(w, advantage)
    placement = "folded" if advantage else "additive"
    return rpg_loss(*inputs, estimator="differentiable", kl_placement=placement, **settings).per_token


def weight(w: Tensor, advantage: float, settings: Mapping[str, Any]) -> Tensor:
    """Weight of the gradient of log p in the REINFORCE loss, by autograd. Shape of w."""
    logp = w.log().requires_grad_()
    losses = rpg_loss(logp, torch.zeros_like(w), torch.full_like(w, advantage), **settings).per_token
    return -torch.autograd.grad(losses.sum(), logp)[0]


class Panel(NamedTuple):
    """One diagram."""

    title: str
    value: Callable[[Tensor, float, Mapping[str, Any]], Tensor]
    advantage: float
    curves: Mapping[str, Mapping[str, Any]]
    low: int
    high: int


PANELS = (
    Panel("Loss, A = 1", loss, 1.0, CLIPS, -3, 0),
    Panel("Loss, A = −1", loss, -1.0, CLIPS, 0, 3),  # noqa: RUF001 (a minus sign)
    Panel("Weight of ∇log p, A = 1", weight, 1.0, CLIPS, 0, 3),
    Panel("Weight of ∇log p, A = −1", weight, -1.0, CLIPS, -3, 0),  # noqa: RUF001
    Panel("KL penalty / b, differentiable", loss, 0.0, KLS, -1, 3),
    Panel("KL part C / b of the weight, REINFORCE", weight, 0.0, KLS, -3, 1),
)

_STYLES = (("#3b82d0", ""), ("#d9772b", "8 4"), ("#8b93a1", "2 4"), ("#2f9e6e", "9 3 2 3"))
_TEXT = "#7d8590"
_LEFT, _TOP, _WIDTH, _HEIGHT, _COLUMN, _ROW = 40, 50, 350, 170, 420, 262
_END = 3.0
_EDGES = (0.02, 1 - CLIP.low, 1 + CLIP.high, CLIP.c, _END)
"""A weight jumps at the inner ones."""


def draw() -> str:
    """The picture, as SVG."""
    width, height = 2 * _COLUMN, _ROW * (len(PANELS) // 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" font-size="12" fill="{_TEXT}" stroke="none">'
    ]
    for i, panel in enumerate(PANELS):
        lines.append(f'<g transform="translate({_LEFT + _COLUMN * (i % 2)} {_TOP + _ROW * (i // 2)})">')
        lines += [*_axes(panel), *_curves(panel), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axes(panel: Panel) -> Iterable[str]:
    yield f'<text y="-34" font-size="14" font-weight="bold">{panel.title}</text>'
    for tick in range(panel.low, panel.high + 1):
        y = _y(panel, tick)
        yield f'<path d="M0 {y:.1f}h{_WIDTH}" stroke="{_TEXT}" stroke-opacity="{0.3 if tick else 0.9}"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{tick}</text>'
    marks = _EDGES[1:-1] if panel.advantage else ()
    for w in (0, 1, *marks, 2, _END):
        x, y = w / _END * _WIDTH, _HEIGHT + (30 if w in marks else 16)
        style = 'stroke-opacity="0.9" stroke-dasharray="1 3"' if w in marks else 'stroke-opacity="0.3"'
        yield f'<path d="M{x:.1f} 0v{_HEIGHT}" stroke="{_TEXT}" {style}/>'
        yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{f"{w:g}" if w else "w = 0"}</text>'


def _curves(panel: Panel) -> Iterable[str]:
    for (name, settings), (colour, dashes), i in zip(panel.curves.items(), _STYLES, range(4), strict=False):
        path = ""
        for start, end in pairwise(_EDGES):
            w = torch.linspace(start + 1e-9, end - 1e-9, 21, dtype=torch.float64)
            values = panel.value(w, panel.advantage, settings).tolist()
            inside = [(x, v) for x, v in zip(w.tolist(), values, strict=True) if panel.low <= v <= panel.high]
            path += "".join(
                f"{'L' if j else 'M'}{x / _END * _WIDTH:.1f} {_y(panel, v):.1f}"
                for j, (x, v) in enumerate(inside)
            )
        stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        yield f'<path d="{path}" {stroke}/>'
        yield f'<path d="M{96 * i} -16h24" {stroke}/><text x="{96 * i + 30}" y="-12">{name}</text>'


def _y(panel: Panel, value: float) -> float:
    return (panel.high - value) / (panel.high - panel.low) * _HEIGHT


if __name__ == "__main__":
    print(draw(), end="")
