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

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

MODULUS = 1 << 64
BLOCK_BYTES = 1 << 20
"""Unaligned slices are copied into aligned blocks of about this size, which fits the cache of a core."""
ROW_SEED = 0x9E3779B97F4A7C15
WORD_SEED = 0xD1B54A32D192ED03


def checksum(values: torch.Tensor, start: Sequence[int]) -> int:
    """Contribution of one slice to its tensor's checksum; add the slices' results modulo 2**64.

    values: the slice, on a CPU, with any strides; elements of 1, 2, 4 or 8 bytes. It has at most two
    dimensions, or is of a convolution over single channels [channels, 1, kernel], summed as a matrix.
    start: index of its first element in the full tensor. A vector counts as one row.
    """
    return _sum_slice(*as_matrix(values, start)) % MODULUS


def as_matrix(values: torch.Tensor, start: Sequence[int]) -> tuple[torch.Tensor, tuple[int, int]]:
    """A slice as a matrix, and the index of its first element, as ``checksum`` counts them."""
    if values.dim() == 3 and values.shape[1] == 1 and tuple(start[1:2]) == (0,):
        values, start = values[:, 0], (start[0], start[2])
    if values.dim() > 2 or values.dim() != len(start):
        raise ValueError(
            f"checksum of {values.dim()} dimensions at {tuple(start)}: pass a matrix or a vector"
        )
    while values.dim() < 2:
        values, start = values[None], (0, *start)
    return values, (start[0], start[1])


def _sum_slice(values: torch.Tensor, start: tuple[int, int]) -> int:
    """Checksum of a matrix on a CPU, not yet reduced modulo MODULUS."""
    rows, columns = values.shape
    if not rows or not columns:
        return 0
    per_word = 8 // values.element_size()
    first_word, lead = divmod(start[1], per_word)
    words = -(-(lead + columns) // per_word)
    row_weights = _weights(start[0], rows, ROW_SEED)
    word_weights = _weights(first_word, words, WORD_SEED)
    aligned = _as_words(values) if lead == 0 and words * per_word == columns else None
    if aligned is not None:
        return _weighted_sum(aligned, row_weights, word_weights)
    step = max(1, BLOCK_BYTES // (8 * words))
    # An engine's default device is its GPU.
    block = torch.zeros((min(step, rows), words * per_word), dtype=values.dtype, device="cpu")
    total = 0
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
    words: torch.Tensor, row_weights: npt.NDArray[np.uint64], word_weights: npt.NDArray[np.uint64]
) -> int:
    # einsum multiplies and adds in one pass without a temporary; numpy's integers wrap modulo 2**64.
    return int(np.einsum("ij,j->i", words.numpy().view(np.uint64), word_weights).dot(row_weights))


@lru_cache(maxsize=128)
def _weights(start: int, count: int, seed: int) -> npt.NDArray[np.uint64]:
    """Odd pseudo-random numbers for the positions ``start .. start + count``: splitmix64's finaliser."""
    with np.errstate(over="ignore"):
        z = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(seed)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        return z | np.uint64(1)
