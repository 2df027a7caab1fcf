"""Triton kernels over a table of slices (``slice_table``): checksums and copies of all of them in one launch.

A program works on one tile of one slice, ROWS by COLUMNS elements; ``tiles`` says of which slice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rpg_megatron.bridge.checksum import ROW_SEED, WORD_SEED

_fields = tl.constexpr(11)  # slice_table.FIELDS
_row_seed, _word_seed = tl.constexpr(ROW_SEED), tl.constexpr(WORD_SEED)
_mix_1, _mix_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _weight(position, seed: tl.constexpr):
    """``checksum._weights`` of one position."""
    z = (position + 1).to(tl.uint64) * seed
    z ^= z >> 30
    z *= _mix_1
    z ^= z >> 27
    z *= _mix_2
    z ^= z >> 31
    return z | 1


@triton.jit
def _pointer(address, SIZE: tl.constexpr):
    if SIZE == 1:
        return address.to(tl.pointer_type(tl.uint8))
    elif SIZE == 2:
        return address.to(tl.pointer_type(tl.uint16))
    elif SIZE == 4:
        return address.to(tl.pointer_type(tl.uint32))
    else:
        return address.to(tl.pointer_type(tl.uint64))


@triton.jit
def _tile(table, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's slice, its row of the table, and the tile's first row and column."""
    index = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    row = table + index * _fields
    tile = tl.program_id(0) - tl.load(row + 5)
    across = tl.cdiv(tl.load(row + 2), COLUMNS)
    return index, row, tile // across * ROWS, tile % across * COLUMNS


@triton.jit
def sum_slices(
    table,
    tiles,
    sums,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Add each tile's part of its slice's checksum to ``sums``; the order does not matter modulo 2**64."""
    index, row, first_row, first_column = _tile(table, tiles, ROWS, COLUMNS)
    memory = _pointer(tl.load(row), SIZE)
    rows, columns = tl.load(row + 1), tl.load(row + 2)
    row_stride, column_stride = tl.load(row + 3), tl.load(row + 4)
    start_row, start_column = tl.load(row + 6), tl.load(row + 7)
    column = first_column + tl.arange(0, COLUMNS).to(tl.int64)
    total = tl.zeros([STEP, COLUMNS], tl.uint64)
    for step in range(0, ROWS, STEP):
        here = first_row + step + tl.arange(0, STEP).to(tl.int64)
        inside = (here < rows)[:, None] & (column < columns)[None, :]
        at = here[:, None] * row_stride + column[None, :] * column_stride
        value = tl.load(memory + at, mask=inside, other=0).to(tl.uint64)
        total += value * _weight(start_row + here, _row_seed)[:, None]
    position = start_column + column
    by_word = _weight(position // (8 // SIZE), _word_seed)
    shift = (position % (8 // SIZE)) * (8 * SIZE)
    total *= (by_word << shift.to(tl.uint64))[None, :]
    tl.atomic_add(sums + index, tl.sum(tl.sum(total, axis=1), axis=0).to(tl.int64))


@triton.jit
def copy_slices(
    table,
    tiles,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Copy each slice to its target, bit by bit."""
    _, row, first_row, first_column = _tile(table, tiles, ROWS, COLUMNS)
    memory, target = _pointer(tl.load(row), SIZE), _pointer(tl.load(row + 8), SIZE)
    rows, columns = tl.load(row + 1), tl.load(row + 2)
    row_stride, column_stride = tl.load(row + 3), tl.load(row + 4)
    target_row_stride, target_column_stride = tl.load(row + 9), tl.load(row + 10)
    column = first_column + tl.arange(0, COLUMNS).to(tl.int64)
    for step in range(0, ROWS, STEP):
        here = first_row + step + tl.arange(0, STEP).to(tl.int64)
        inside = (here < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(
            memory + here[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0
        )
        at = here[:, None] * target_row_stride + column[None, :] * target_column_stride
        tl.store(target + at, value, mask=inside)
