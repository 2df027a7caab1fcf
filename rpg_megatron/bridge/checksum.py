"""Additive 64-bit checksum of a tensor: partial sums over any partition add up to the sum of the whole.

    sum over elements (r, c) of  A(r) * B(c // w) * 2**(bits * (c % w)) * value(r, c)      modulo 2**64

``value`` is the element's bit pattern as an unsigned integer, ``w`` the number of elements in 8 bytes, A
and B fixed tables of odd numbers. Properties:

- It is additive: trainer shards and engine shards may be cut differently and still be compared.
- A and B are odd, hence invertible: every change inside one 8-byte word is detected. They differ by position,
  so swapped rows, columns or heads are detected too, unlike with a plain sum or XOR.
- Inside a word the weights are powers of two, so ``w`` neighbouring elements count as the 64-bit word that
  they form in memory. Where a slice ends inside a word, the missing elements count as zero: slices need no
  alignment, and aligned ones are summed at memory speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

MODULUS = 1 << 64
BLOCK_BYTES = 1 << 20
"""Unaligned slices are copied into aligned blocks of about this size, which fits the cache of a core."""
DEVICE_BLOCK_BYTES = 64 << 20
"""Temporary memory of the sums on a GPU."""

_ROW_SEED = 0x9E3779B97F4A7C15
_WORD_SEED = 0xD1B54A32D192ED03


def checksum(values: torch.Tensor, start: Sequence[int]) -> int:
    """Contribution of one slice to its tensor's checksum; add the slices' results modulo 2**64.

    values: the slice, on any device, with any strides; elements of 1, 2, 4 or 8 bytes. It has at most two
    dimensions, or is of a convolution over single channels [channels, 1, kernel], summed as a matrix.
    start: index of its first element in the full tensor. A vector counts as one row.
    """
    return checksums([(values, start)])[0]


def checksums(slices: Iterable[tuple[torch.Tensor, Sequence[int]]]) -> list[int]:
    """``checksum`` of each slice. The host waits once for all slices on a GPU."""
    sums = [_sum_slice(values, start) for values, start in slices]
    on_device = [x for x in sums if isinstance(x, torch.Tensor)]
    copied = iter(torch.stack(on_device).tolist() if on_device else [])
    return [(next(copied) if isinstance(x, torch.Tensor) else x) % MODULUS for x in sums]


def _sum_slice(values: torch.Tensor, start: Sequence[int]) -> int | torch.Tensor:
    """One slice's checksum, not yet reduced modulo MODULUS; for a slice on a GPU a scalar tensor there."""
    if values.dim() == 3 and values.shape[1] == 1 and tuple(start[1:2]) == (0,):
        values, start = values[:, 0], (start[0], start[2])
    if values.dim() > 2 or values.dim() != len(start):
        raise ValueError(
            f"checksum of {values.dim()} dimensions at {tuple(start)}: pass a matrix or a vector"
        )
    while values.dim() < 2:
        values, start = values[None], (0, *start)
    rows, columns = values.shape
    if not rows or not columns:
        return 0
    per_word = 8 // values.element_size()
    first_word, lead = divmod(start[1], per_word)
    words = -(-(lead + columns) // per_word)
    device = values.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    row_weights = _weights(start[0], rows, _ROW_SEED, device, stream)
    word_weights = _weights(first_word, words, _WORD_SEED, device, stream)
    aligned = _as_words(values) if lead == 0 and words * per_word == columns else None
    if aligned is not None:
        return _weighted_sum(aligned, row_weights, word_weights)
    step = max(1, BLOCK_BYTES // (8 * words))
    block = torch.zeros((min(step, rows), words * per_word), dtype=values.dtype, device=values.device)
    total: int | torch.Tensor = 0
    for row in range(0, rows, step):
        part = values[row : row + step]
        block[: len(part), lead : lead + columns].copy_(part)
        words_of_part = _as_words(block[: len(part)])
        assert words_of_part is not None
        total = total + _weighted_sum(words_of_part, row_weights[row : row + step], word_weights)
    return total


def _as_words(values: torch.Tensor) -> torch.Tensor | None:
    """The same memory as 64-bit words, or None if strides or addresses do not allow it."""
    row_bytes = values.stride(0) * values.element_size()
    contiguous = values.stride(1) == 1 or values.shape[1] == 1
    if not contiguous or row_bytes % 8 or values.data_ptr() % 8:
        return None
    if values.element_size() != 8:
        values = values.view(torch.int64)
    return values.view(torch.int64)


def _weighted_sum(
    words: torch.Tensor, row_weights: torch.Tensor, word_weights: torch.Tensor
) -> int | torch.Tensor:
    if words.device.type != "cpu":
        return _weighted_sum_on_device(words, row_weights, word_weights)
    # einsum multiplies and adds in one pass without a temporary; numpy's integers wrap modulo 2**64.
    w, by_row, by_word = (x.numpy().view(np.uint64) for x in (words, row_weights, word_weights))
    return int(np.einsum("ij,j->i", w, by_word).dot(by_row))


def _weighted_sum_on_device(
    words: torch.Tensor, row_weights: torch.Tensor, word_weights: torch.Tensor
) -> torch.Tensor:
    """The same with torch's signed integers, which wrap equally; temporaries of ``DEVICE_BLOCK_BYTES``."""
    step = max(1, (DEVICE_BLOCK_BYTES // 8) // words.shape[1])
    parts = zip(words.split(step), row_weights.split(step), strict=True)
    sums = [((w * word_weights).sum(1) * r).sum() for w, r in parts]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


@lru_cache(maxsize=128)
def _weights(
    start: int, count: int, seed: int, device: torch.device, stream: torch.cuda.Stream | None
) -> torch.Tensor:
    """Odd pseudo-random numbers for the positions ``start .. start + count`` (splitmix64's finaliser), int64.

    They stay on the device: the time of a GPU's checksums is that of the calls per slice, and copying the
    numbers for each slice was a quarter of it. stream: the current one of a GPU, on which they arrive.
    """
    with np.errstate(over="ignore"):
        z = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(seed)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    weights = torch.from_numpy((z | np.uint64(1)).view(np.int64))
    # From pinned memory: otherwise the host would wait for all queued work.
    return weights.pin_memory().to(device, non_blocking=True) if stream is not None else weights.to(device)
