"""The checksum is the same however a tensor is cut, and sees the damage that matters.

Formula proved against a direct sum over elements in Python integers. Not covered: speed (benchmarks), and
collisions of unrelated changes, which a 64-bit sum has with probability about 2**-64.
"""

import random

import pytest
import torch

from rpg_megatron.bridge.checksum import MODULUS, ROW_SEED, WORD_SEED, _weights, checksum

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def by_definition(t):
    if t.dim() == 1:
        t = t[None]
    size = t.element_size()
    w = 8 // size
    a = _weights(0, t.shape[0], ROW_SEED).tolist()
    b = _weights(0, t.shape[1], WORD_SEED).tolist()
    bits = t.view(BITS[size]).tolist()
    return (
        sum(
            a[r] * b[c // w] * (bits[r][c] % (1 << 8 * size)) << (8 * size * (c % w))
            for r in range(t.shape[0])
            for c in range(t.shape[1])
        )
        % MODULUS
    )


def cuts(n, parts, rng):
    inside = sorted(rng.sample(range(1, n), min(parts, n) - 1)) if n > 1 else []
    return list(zip([0, *inside], [*inside, n], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(16, 32), (7, 13), (5, 1), (1, 9), (33,), (1,)])
def test_any_partition_adds_up_to_the_definition(dtype, shape):
    rng = random.Random(0)
    t = (torch.randn(shape) * 50).to(dtype)
    expected = by_definition(t)
    assert checksum(t, (0,) * len(shape)) == expected
    for parts in (2, 3, 5):
        total = 0
        grid = [cuts(n, parts, rng) for n in shape]
        if len(shape) == 1:
            total = sum(checksum(t[a:b], (a,)) for a, b in grid[0])
        else:
            for r0, r1 in grid[0]:
                for c0, c1 in grid[1]:
                    part = t[r0:r1, c0:c1]
                    total += checksum(part if rng.random() < 0.5 else part.clone(), (r0, c0))
        assert total % MODULUS == expected


def test_strides_and_addresses_do_not_matter():
    t = torch.randn(12, 20).bfloat16()
    expected = checksum(t, (0, 0))
    assert checksum(t.T.contiguous().T, (0, 0)) == expected
    shifted = torch.empty(12 * 20 + 1, dtype=torch.bfloat16)[1:].view(12, 20).copy_(t)
    assert shifted.data_ptr() % 8
    assert checksum(shifted, (0, 0)) == expected


def test_large_unaligned_slices_go_through_blocks():
    t = torch.randn(3000, 1001).bfloat16()
    assert checksum(t, (0, 0)) == (checksum(t[:, :500], (0, 0)) + checksum(t[:, 500:], (0, 500))) % MODULUS
    assert checksum(t, (0, 0)) != checksum(t, (1, 0))
    with torch.device("meta"):  # as an engine's GPU, while it loads what is in the host's memory
        total = checksum(t[:, :500], (0, 0)) + checksum(t[:, 500:], (0, 500))
    assert total % MODULUS == checksum(t, (0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_flip_and_every_swap_is_seen(dtype):
    t = torch.randn(6, 10).to(dtype)
    expected = checksum(t, (0, 0))
    size = t.element_size()
    for i in range(t.numel()):
        for bit in range(8 * size):
            damaged = t.clone()
            damaged.view(BITS[size]).view(-1)[i] ^= (1 << bit) - (1 << 8 * size if bit == 8 * size - 1 else 0)
            assert checksum(damaged, (0, 0)) != expected, (i, bit)
    for rows in ((0, 1), (2, 5)):
        damaged = t.clone()
        damaged[list(rows)] = t[list(reversed(rows))]
        assert checksum(damaged, (0, 0)) != expected
    damaged = t.clone()
    damaged[:, [0, 1]] = t[:, [1, 0]]  # inside one word
    assert checksum(damaged, (0, 0)) != expected
    assert checksum(t.flip(1), (0, 0)) != expected
    zeroed = t.clone()
    zeroed[3, 4] = 0
    assert checksum(zeroed, (0, 0)) != expected


def test_more_than_two_dimensions_are_refused():
    for values, start in ((torch.zeros(2, 2, 2), (0, 0, 0)), (torch.zeros(2, 1, 2), (0, 1, 0))):
        with pytest.raises(ValueError, match="3 dimensions"):
            checksum(values, start)


def test_convolutions_over_single_channels_are_matrices():
    t = torch.randn(6, 1, 4)
    parts = checksum(t[:4], (0, 0, 0)) + checksum(t[4:, :, :3], (4, 0, 0)) + checksum(t[4:, :, 3:], (4, 0, 3))
    assert parts % MODULUS == checksum(t, (0, 0, 0)) == checksum(t[:, 0], (0, 0))
