"""The chunked log-prob head equals log_softmax and its entropy, forward and backward, and keeps no logits.

Numbers are compared with float64, within twice the error of float32 torch: chunk sizes that do and do not
divide the tokens, temperatures, a padded vocabulary. Allocations of tensors are watched: two chunks of logits
at most, and never anything of the size of all tokens' logits. What a GPU compiles is traced here, without
kernels: no graph break, no fixed shape, the same bits. With torch's kernels for a CPU (long), numbers are as
close to float64.
Not covered: the vocabulary cut over ranks (test_vocab_parallel_logprobs), real sizes (long:
tests/distributed/test_long_context.py), what a kernel takes and gives back inside one operation, a GPU's
kernels (benchmarks/gpu.py logprobs).
"""

from typing import Any

import pytest
import torch

from rpg_megatron.policy import logprobs
from rpg_megatron.policy.logprobs import Head, token_logprobs
from rpg_megatron.policy.microbatch import TeacherRow, TeacherTop
from tests.support.allocations import AllocationWatch
from tests.support.logprob_reference import measure_errors


@pytest.mark.parametrize("temperature", [0.6, 0.85, 1.0])
@pytest.mark.parametrize("chunk", [1, 8, 37, 64])
@pytest.mark.parametrize("padding", [0, 6])
def test_equals_float64(temperature: float, chunk: int, padding: int) -> None:
    sizes = {"vocab": 250, "tokens": 37, "width": 48, "chunk": chunk}
    assert not measure_errors(**sizes, temperature=temperature, padding=padding)
    assert not measure_errors(**sizes, temperature=temperature, padding=padding, scale=0.2)
    assert not measure_errors(**sizes, temperature=temperature, padding=padding, adapter=5)


def test_equals_float64_on_a_large_vocabulary_and_on_one_token() -> None:
    assert not measure_errors(vocab=20011, tokens=150, width=64, chunk=64, temperature=0.6, scale=0.5)
    assert not measure_errors(vocab=250, tokens=1, width=64, chunk=64, temperature=0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True], ids=["log-prob alone", "with entropy"])
def test_holds_two_chunks_of_logits_at_most(dtype: torch.dtype, entropy: bool) -> None:
    tokens, vocab, width, chunk = 1024, 3000, 16, 100
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    logits = 4 * chunk * vocab
    with AllocationWatch() as watch:
        logp, h = token_logprobs(hidden, weight, targets, Head(0.7, chunk, vocab))
        forward, live = watch.peak, watch.live
        (logp + h if entropy else logp).sum().backward()
    small = 4 * (2 * tokens * width + 16 * tokens)
    gradients = 4 * vocab * width * (1 if dtype is torch.float32 else 2)
    assert forward <= 2 * logits + small
    assert live <= small
    assert watch.peak <= 2 * logits + small + gradients
    assert torch.Size(watch.largest).numel() == chunk * vocab  # never [tokens, vocab]


def test_a_frozen_weight_has_no_gradient_in_memory() -> None:
    """Beside an adapter: neither a gradient of the weight's size, nor a sum of the weight and B A."""
    tokens, vocab, width, rank, chunk = 64, 3000, 128, 4, 8
    narrow, b = torch.randn(tokens, rank).requires_grad_(), torch.randn(vocab, rank).requires_grad_()
    hidden, weight = torch.randn(tokens, width).requires_grad_(), torch.randn(vocab, width)
    targets = torch.randint(0, vocab, (tokens,))
    row = TeacherRow(torch.randn(tokens, 2), torch.randn(vocab, 2), "rkl")
    with AllocationWatch() as watch:
        for teacher in (None, row):
            head = Head(1.0, chunk, vocab, teacher=teacher)
            rows = token_logprobs(hidden, weight, targets, head, added=(narrow, b))
            torch.stack(rows).sum().backward()
    assert watch.peak < 4 * weight.numel()


def test_gradients_in_bfloat16_are_as_good_as_its_products() -> None:
    torch.manual_seed(3)
    hidden, weight = torch.randn(300, 64).bfloat16(), (0.2 * torch.randn(1000, 64)).bfloat16()
    targets = torch.randint(0, 1000, (300,))
    inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
    token_logprobs(*inputs, targets, Head(1.0, 64, 1000))[0].sum().backward()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].t()
    torch.log_softmax(logits, -1).gather(1, targets[:, None]).sum().backward()
    for x, y in zip(inputs, exact, strict=True):
        assert ((x.grad - y.grad).norm() / y.grad.norm()).item() < 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ["log-prob", "entropy", "rkl", "fkl", "likeliest"])
def test_what_a_gpu_compiles_can_be_traced(dtype: torch.dtype, rows: str, monkeypatch) -> None:
    traced: list[str] = []
    teachers: dict[str, Any] = {
        name: TeacherRow(torch.randn(70, 4).to(dtype), torch.randn(45, 4).to(dtype), name)  # type: ignore[arg-type]
        for name in ("rkl", "fkl")
    }
    likeliest = torch.randn(70, 41).log_softmax(-1).topk(3)
    known = torch.arange(70) != 5
    teachers["likeliest"] = TeacherTop(likeliest.indices, likeliest.values, known, "rkl")
    head = Head(0.7, 32, 41, teacher=teachers.get(rows))  # the last chunk is shorter

    def run() -> list[torch.Tensor]:
        hidden, weight = (torch.randn(n, 16, generator=noise).to(dtype) for n in (70, 45))
        leaves = [x.requires_grad_() for x in (hidden, weight)]
        outputs = token_logprobs(*leaves, torch.arange(70) % 41, head)
        (outputs[0] if rows == "log-prob" else torch.stack(outputs)).sum().backward()
        return [x.detach() for x in (*outputs, hidden.grad, weight.grad)]

    compile_it = torch.compile

    def compiled(function: Any, **options: Any) -> Any:
        traced.append(function.__name__)
        return compile_it(function, **options, backend=backend)

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append("graph")
        return graph

    noise = torch.Generator().manual_seed(5)
    plain = run()
    monkeypatch.setattr(torch, "compile", compiled)  # with the product's options
    logprobs._compiled.cache_clear()
    monkeypatch.setattr(logprobs, "_compiles", lambda tensor: True)
    torch.compiler.reset()
    noise.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(run(), plain, strict=True))
    logprobs._compiled.cache_clear()
    assert traced.count("graph") == 2, "one for each function, whatever the chunk's length"
    assert set(traced) == {"graph", "_sums_of_exponentials", "_logit_gradients"}


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_compiled_kernels_equal_float64(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_compiles", lambda tensor: True)
    sizes = {"vocab": 250, "tokens": 37, "width": 48, "padding": 6}
    assert not measure_errors(**sizes, chunk=8, temperature=temperature)
    assert not measure_errors(**sizes, chunk=64, temperature=temperature, scale=0.2)


@pytest.mark.parametrize("known_range", [None, (11, 11)])
@pytest.mark.parametrize(("target", "first"), [(11, 0), (-1, -1)])
def test_target_outside_the_vocabulary_is_refused(
    target: int, first: int, known_range: tuple[int, int] | None
) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 10"):
        token_logprobs(
            torch.ones(1, 4),
            torch.ones(12, 4),
            torch.tensor([target]),
            Head(1.0, 4, 10, known_range and (first, target)),
        )


def test_entropies_alone_have_a_gradient() -> None:
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(12, 8)
    token_logprobs(hidden, weight, torch.zeros(5, dtype=torch.int64), Head(1.0, 2, 12))[1].sum().backward()
    gradient = hidden.grad
    exact = hidden.detach().requires_grad_()
    logp = torch.log_softmax(exact @ weight.t(), -1)
    (-(logp.exp() * logp).sum()).backward()
    torch.testing.assert_close(gradient, exact.grad)
