"""Emulated FP8: every quantiser is bit-equal to an independent reference; layers round the right operands.

Why: with a scale that is off by a factor of two, or taken along the wrong axis, training still runs; only the
recipe looks worse, or better, than it is.
Not covered: Transformer Engine's kernels, which need a GPU (tests/gpu); several ranks
(tests/distributed/test_fp8_layouts.py).
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rpg_megatron.policy import fp8_emulation as fp8
from rpg_megatron.policy.fp8_emulation import E4M3, E5M2

FORMS = [E4M3, E5M2]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


# -- the reference: a table of all values, and loops over blocks ---------------------------------------------


def all_values(form: torch.dtype) -> list[float]:
    """All finite non-negative values, ordered by their bits; value i has an even mantissa iff i is even."""
    exponent_bits, mantissa_bits = (4, 3) if form is E4M3 else (5, 2)
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for e, m in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = m / 2**mantissa_bits
        values.append(math.ldexp(fraction, 1 - bias) if e == 0 else math.ldexp(1 + fraction, e - bias))
    # E4M3's last bit pattern is NaN; E5M2's last exponent is infinity and NaN.
    return values[:-1] if form is E4M3 else values[:-4]


def nearest(values: np.ndarray, form: torch.dtype) -> np.ndarray:
    """Round to the table; ties go to the even mantissa, larger values to the last; signs and NaN stay."""
    table = all_values(form)
    even_first = np.array(table[::2] + table[1::2])  # argmin takes the first of two that are as near
    sizes = np.minimum(np.abs(values.astype(np.float64)), table[-1])
    chosen = even_first[np.abs(sizes[..., None] - even_first).argmin(-1)]
    return np.copysign(np.where(np.isnan(values), np.nan, chosen), values).astype(np.float32)


def reference_scale(amax: np.float32, form: torch.dtype, power_of_two: bool) -> np.float32:
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(LARGEST[form]) / amax
    scale = np.float32(min(scale, np.finfo(np.float32).max))
    return np.float32(math.ldexp(1.0, math.frexp(scale)[1] - 1)) if power_of_two else scale


def reference(
    x: torch.Tensor, form: torch.dtype, block: tuple[int, int] | None, power_of_two: bool
) -> np.ndarray:
    values = x.float().numpy()
    rows, columns = block or values.shape
    out = np.empty_like(values)
    for top in range(0, values.shape[0], rows):
        for left in range(0, values.shape[1], columns):
            part = values[top : top + rows, left : left + columns]
            sizes = np.abs(part)[~np.isnan(part)]
            scale = reference_scale(sizes.max(initial=np.float32(0)), form, power_of_two)
            with np.errstate(over="ignore"):
                scaled = part * scale
            out[top : top + rows, left : left + columns] = nearest(scaled, form) * (np.float32(1) / scale)
    return out


def awkward(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers over many magnitudes, with zeros, subnormals, and blocks of 128 that are special."""
    torch.manual_seed(m * n)
    x = torch.randn(m, n) * torch.exp2(torch.randint(-20, 20, (m, n)).float())
    x[0] = 0.0  # a block of zeros, if it is of one row
    x[-1] = torch.randn(n) * 1e-39  # scales beyond float32, values below its normal ones
    x[1, 0] = 3e38
    x[2] *= 1e-30
    x[3] = torch.randint(-9, 9, (n,)).float() / 8  # ties
    x[m // 2, n // 2] = 0.0
    x[4, :3] = torch.tensor([torch.inf, -torch.inf, 500.0])
    x[5, -1] = torch.nan
    return x.to(dtype)


def same_bits(actual: torch.Tensor, expected: np.ndarray) -> bool:
    nan = np.isnan(expected)
    actual = actual.numpy()
    return bool(
        (np.isnan(actual) == nan).all() and (actual.view(np.int32) == expected.view(np.int32))[~nan].all()
    )


@pytest.mark.parametrize("form", FORMS)
def test_all_values_and_midpoints_round_to_the_table(form: torch.dtype) -> None:
    table = all_values(form)
    assert table[-1] == LARGEST[form] == torch.finfo(form).max
    halves = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    near = [math.nextafter(h, side) for h in halves for side in (0.0, math.inf)]
    beyond = [table[-1] * 1.01, table[-1] * 3, 1e38, math.inf]
    values = np.array([*table, *halves, *near, *beyond], np.float32)
    values = np.concatenate([values, -values])
    result = fp8.round_scaled(torch.from_numpy(values), torch.ones(1), form)
    assert same_bits(result, nearest(values, form))
    assert fp8.round_scaled(torch.tensor([torch.nan]), torch.ones(1), form).isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(8, 256), (130, 131), (7, 5)])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_blocks_are_bit_equal_to_the_reference(
    form: torch.dtype, dtype: torch.dtype, size: tuple[int, int], block: tuple[int, int]
) -> None:
    x = awkward(*size, dtype)
    assert same_bits(fp8.round_blocks(x, form, block), reference(x, form, block, power_of_two=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_tensors_are_bit_equal_to_the_reference(form: torch.dtype, dtype: torch.dtype) -> None:
    x = awkward(40, 33, dtype)
    finite = x.nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)
    small = torch.randn(4, 9).mul(1e-3).to(dtype)
    for case in (x, finite, small, torch.zeros(3, 4, dtype=dtype), small * 1e-38):
        assert same_bits(fp8.round_whole(case, form), reference(case, form, None, power_of_two=False))


def test_the_reference_finds_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong power of two, blocks along the wrong axis, rounding twice, a cast that does not saturate."""
    x = awkward(130, 256, torch.bfloat16)
    expected = reference(x, E4M3, (1, 128), power_of_two=True)
    assert same_bits(fp8.round_blocks(x, E4M3, (1, 128)), expected)
    assert not same_bits(fp8.round_blocks(x, E4M3, (128, 1)), expected)

    scale_of, round_scaled = fp8.scale_of, fp8.round_scaled
    for factor in (0.5, 2.0):
        monkeypatch.setattr(fp8, "scale_of", lambda *a, factor=factor, **k: scale_of(*a, **k) * factor)
        assert not same_bits(fp8.round_blocks(x, E4M3, (1, 128)), expected)
    monkeypatch.setattr(fp8, "scale_of", scale_of)
    largest = torch.finfo(E4M3).max
    overflown = lambda scaled: torch.where(scaled.abs() > largest, torch.nan, scaled)  # noqa: E731
    monkeypatch.setattr(fp8, "round_scaled", lambda x, s, form: overflown(x * s).to(form).float() / s)
    assert not same_bits(fp8.round_blocks(x, E4M3, (1, 128)), expected)
    monkeypatch.setattr(fp8, "round_scaled", round_scaled)

    monkeypatch.setattr(fp8, "scale_of", lambda amax, form, **_: torch.finfo(form).max / amax)
    sizes = torch.rand(64, 64) + 0.1
    wrong = [
        not same_bits(fp8.round_whole(part[None], E4M3), reference(part[None], E4M3, None, False))
        for part in sizes
    ]
    assert any(wrong)  # 448 times a reciprocal is not always 448 over the number


# -- a layer -------------------------------------------------------------------------------------------------


class _OneRankGroup:
    """An amax reduction group of one rank."""

    @staticmethod
    def size() -> int:
        return 1


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8.mpu, "get_amax_reduction_group", lambda **_: _OneRankGroup())


def product(recipe: str) -> fp8.EmulatedProduct:
    return fp8.RECIPES[recipe]()


def multiply(
    layer: fp8.EmulatedProduct, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return layer(input=x, weight=w, bias=bias, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)


def operands(tokens: int = 256, inner: int = 384, outer: int = 128) -> list[torch.Tensor]:
    """X [t, 1, k], w [n, k], bias [n], g [t, 1, n] in bfloat16; rows and columns differ in size."""
    torch.manual_seed(0)

    def uneven(*shape: int) -> torch.Tensor:
        rows, columns = torch.randn(shape[0], 1).exp2(), torch.randn(1, shape[-1]).mul(2).exp2()
        return (torch.randn(shape[0], shape[-1]) * rows * columns).view(shape).bfloat16()

    return [
        uneven(tokens, 1, inner),
        uneven(outer, inner),
        torch.randn(outer).bfloat16(),
        uneven(tokens, 1, outer),
    ]


def rounded(x: torch.Tensor, form: torch.dtype, block: tuple[int, int] | None) -> torch.Tensor:
    """Round by the reference."""
    return torch.from_numpy(reference(x, form, block, power_of_two=block is not None))


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_layer_outputs_and_gradients_use_rounded_operands(recipe: str) -> None:
    """Each operand is rounded along the summed dimension; the weight's gradient sums over tokens."""
    x, w, bias, g = operands()
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    y = multiply(product(recipe), x, w, bias)
    dx, dw, db = torch.autograd.grad(y, leaves, g)
    with torch.no_grad():
        x2, g2 = x[:, 0], g[:, 0]
        row, column, square, grad_form = ((1, 128), (128, 1), (128, 128), E4M3)
        if recipe == "tensorwise":
            row = column = square = None
            grad_form = E5M2
        qw = rounded(w, E4M3, square)
        assert torch.equal(y[:, 0], (rounded(x2, E4M3, row) @ qw.t() + bias).bfloat16())
        assert torch.equal(dx[:, 0], (rounded(g2, grad_form, row) @ qw).bfloat16())
        expected = (rounded(g2, grad_form, column).t() @ rounded(x2, E4M3, column)).bfloat16()
        assert torch.equal(dw, expected)
        assert torch.equal(db, g2.sum(0))
        if recipe == "blockwise":  # blocks along the features would give another result
            assert not torch.equal(dw, (rounded(g2, grad_form, row).t() @ rounded(x2, E4M3, row)).bfloat16())


class Tracked:
    """Delayed scaling of one tensor by definition: a list of the largest values of the last passes."""

    def __init__(self, form: torch.dtype, window: int = 1024) -> None:
        self.form, self.scale, self.window = form, np.float32(1), window
        self.latest, self.passes = np.float32(0), [np.float32(0)]

    def see(self, x: torch.Tensor) -> None:
        self.latest = max(self.latest, np.float32(x.detach().float().abs().max().item()))

    def move_on(self) -> None:
        if self.latest != 0:
            self.passes = [*self.passes, self.latest][-self.window :]
            if np.isfinite(max(self.passes)):
                self.scale = reference_scale(max(self.passes), self.form, power_of_two=False)
        self.latest = np.float32(0)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x.detach().float().numpy() * self.scale
        return torch.from_numpy(nearest(scaled, self.form) * (np.float32(1) / self.scale))


def test_delayed_scales_come_from_earlier_passes() -> None:
    """Four passes of two micro-batches, two of them without gradients; weights change in between."""
    layer = product("delayed")
    trackers = {"x": Tracked(E4M3), "w": Tracked(E4M3), "g": Tracked(E5M2)}
    x, w, _, g = operands(tokens=16, inner=32, outer=16)
    w.requires_grad_()
    for number, training in enumerate([False, True, False, True]):
        layer.train(training)
        weight = trackers["w"].round(w)  # once per pass: a scale updated by the first micro-batch waits
        trackers["w"].see(w)
        for factor in (0.5, 3.0):
            part, grad = (x * (factor + number)).requires_grad_(), g * factor / (1 + number)
            expected = (trackers["x"].round(part)[:, 0] @ weight.t()).bfloat16()
            with torch.set_grad_enabled(training):
                y = multiply(layer, part, w)
            assert torch.equal(y[:, 0], expected), (number, factor)
            rounded_x = trackers["x"].round(part)[:, 0]
            trackers["x"].see(part)
            if not training:
                continue
            trackers["x"].move_on()
            trackers["w"].move_on()
            dx, dw = torch.autograd.grad(y, [part, w], grad)
            rounded_g = trackers["g"].round(grad)[:, 0]
            trackers["g"].see(grad)
            trackers["g"].move_on()
            assert torch.equal(dx[:, 0], (rounded_g @ weight).bfloat16())
            assert torch.equal(dw, (rounded_g.t() @ rounded_x).bfloat16())
        with torch.no_grad():
            w += 0.1
    assert layer.scale.tolist() == [float(t.scale) for t in trackers.values()]
    assert (layer.scale != 1).all()


def test_delayed_scales_forget_and_outlast_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is limited; zeros and NaN add nothing to it, and infinity leaves the scale as it is."""
    monkeypatch.setattr(fp8, "_HISTORY", 4)
    layer, tracker = product("delayed").train(), Tracked(E4M3, window=4)
    w, scales = torch.ones(16, 16).bfloat16(), []
    for size in [8.0, 1.0, 0.0, 0.5, 0.5, torch.nan, 0.25, 0.25, 3e-39, torch.inf, *[2.0] * 5]:
        x = torch.full((16, 1, 16), size).bfloat16()
        multiply(layer, x, w)
        tracker.see(x.nan_to_num(nan=0.0, posinf=torch.inf))
        tracker.move_on()
        scales.append(float(layer.scale[0]))
        assert scales[-1] == tracker.scale, size
    assert scales[:4] == [56.0, 56.0, 56.0, 56.0]
    assert scales[-1] == 224.0
    assert scales[9:13] == [scales[8]] * 4  # while infinity is in the history


def test_recomputation_uses_the_scales_of_the_first_forward() -> None:
    """Several forwards run before the first backward, as in a pipeline."""
    x, w, _, g = operands(tokens=16, inner=32, outer=16)
    plain, recomputing = product("delayed").train(), product("delayed").train()
    results = []
    for layer, recomputed in ((plain, False), (recomputing, True)):
        weight = w.clone().requires_grad_()
        parts = [(x * f).requires_grad_() for f in (1.0, 4.0, 2.0)]
        run = partial(multiply, layer)
        outputs = [
            checkpoint(run, p, weight, use_reentrant=True) if recomputed else run(p, weight) for p in parts
        ]
        for y in outputs:
            y.backward(g)
        results.append([*outputs, *[p.grad for p in parts], weight.grad, layer.scale, layer.seen])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not recomputing._recomputed


def test_delayed_scales_are_in_checkpoints() -> None:
    x, w, _, _ = operands(tokens=16, inner=32, outer=16)
    layer, restored = product("delayed").train(), product("delayed").train()
    multiply(layer, x, w)
    state = layer.state_dict()
    multiply(layer, x * 5, w)
    assert set(state) == {"_extra_state"}
    assert state["_extra_state"]["seen"].max() < layer.seen.max()  # a copy, which may be written later
    restored.load_state_dict(layer.state_dict())
    assert torch.equal(restored.scale, layer.scale)
    assert torch.equal(restored.seen, layer.seen)
    assert not product("blockwise").state_dict()
