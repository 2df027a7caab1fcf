"""A finding of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rpg_megatron.models.activation_sites import split_site


@dataclass
class Finding:
    """One problem."""

    kind: str
    """weights, layer, routing, rope, packing, attention, temperature, vocabulary, precision, other."""
    side: str
    """engine or trainer: the side whose value does not match its own earlier values."""
    text: str
    """What is wrong and where."""
    advice: str
    layers: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    """Hugging Face names."""
    values: dict[str, float] = field(default_factory=dict)
    """Measured values: a factor, a base, a temperature."""


def layers_of(sites: Sequence[str]) -> list[int]:
    """Layers of the sites, ascending."""
    return sorted({layer for layer, _ in map(split_site, sites) if layer is not None})


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: 0-3, 7."""
    parts: list[list[int]] = [[numbers[0]]] if numbers else []
    for a, b in pairwise(numbers):
        if b == a + 1:
            parts[-1].append(b)
        else:
            parts.append([b])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
