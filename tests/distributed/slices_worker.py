"""The process of test_slice_kernels: ``bridge/slice_kernels`` under Triton's interpreter, on CPU memory.

``python slices_worker.py FOLDER NUMBER``, with ``TRITON_INTERPRET=1``: compares NUMBER random slices with
what torch and the CPU's checksums say.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from rpg_megatron.bridge import slice_table
from rpg_megatron.bridge.checksum import checksum
from rpg_megatron.bridge.slice_table import COLUMNS, ROWS, SliceTable, modulo

DTYPES = torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.float64


def random_slice(rng: random.Random) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A part of a matrix, vector or convolution, of any dtype and strides and at any address."""
    dtype = rng.choice(DTYPES)
    kind = rng.choice(["matrix"] * 6 + ["vector"] * 2 + ["convolution"])
    rows, columns = (rng.choice([rng.randint(1, 9), rng.randint(1, n)]) for n in (2 * ROWS, 2 * COLUMNS))
    shift = rng.choice([0, 0, 1, 3])
    memory = torch.from_numpy(
        np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (rows * columns + shift) * 8, np.uint8)
    )
    values = memory.view(dtype)[shift : shift + rows * columns]
    if kind == "vector":
        first = rng.choice([0, rng.randrange(rows * columns)])
        return values[first:], (first + rng.choice([0, 4, 7, 10**6]),)
    matrix = values.view(rows, columns)
    row, column = (rng.choice([0, rng.randrange(n)]) for n in (rows, columns))
    matrix = matrix[
        row : rng.choice([rows, rng.randint(row + 1, rows)]),
        column : rng.choice([columns, rng.randint(column + 1, columns)]),
    ]
    start = row + rng.choice([0, 1, 5, 150_000]), column + rng.choice([0, 0, 2, 4, 9])
    if kind == "convolution":
        return matrix[:, None], (start[0], 0, start[1])
    return (matrix.T, (start[1], start[0])) if rng.random() < 0.2 else (matrix, start)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(number)
    wrong, launches, sums = [], [], set()
    for first in range(0, number, 500):
        slice_table.STEP = 8 if first == 0 else ROWS  # fewer operations, for the interpreter is slow
        slices = [random_slice(rng) for _ in range(first, min(first + 500, number))]
        # Targets of other strides and addresses, with something around them that must stay.
        around = [torch.zeros((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype) for x, _ in slices]
        targets = [x[..., 1 + i % 2 : x.shape[-1] - 2 + i % 2] for i, x in enumerate(around)]
        table = SliceTable(slices, targets)
        launches.append(table.launches)
        found = modulo(table.sums())
        table.copy()
        for (values, start), total, target, frame in zip(slices, found, targets, around, strict=True):
            if total != checksum(values, start) or not torch.equal(bits_of(values), bits_of(target)):
                wrong.append([str(values.dtype), *values.shape, *start])
            target.zero_()
            if bits_of(frame).any():
                wrong.append("wrote beside the target")
        sums |= set(found)
    empty = SliceTable([(torch.zeros(0, 5), (0, 0)), (torch.ones(1), (3,))])
    result = {
        "wrong": wrong[:5],
        "launches": max(launches),
        "sums": len(sums),
        "empty": modulo(empty.sums())[0],
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
