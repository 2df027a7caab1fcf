"""The process of test_sorting_kernels: Transformer Engine's kernels under Triton's interpreter, on the CPU.

``python sorting_worker.py FOLDER``, with ``TRITON_INTERPRET=1``. Writes the gaps to Megatron's torch code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

torch.cuda.is_available = lambda: True
import transformer_engine.pytorch.triton.permutation as permutation  # noqa: E402, looks at the driver
from triton.runtime.autotuner import Autotuner  # noqa: E402

TOKENS, EXPERTS, TOPK, HIDDEN = 20, 4, 2, 8


class HostTorch:
    """torch for functions that make tensors on a GPU."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return (lambda *a, **k: value(*a, **k | {"device": "cpu"})) if name in ("empty", "zeros") else value


def untuned(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of measurements of block sizes, which take a GPU: the first one."""
    return tuner.fn.run(*args, **kwargs, **tuner.configs[0].all_kwargs())


def there_and_back(chosen: torch.Tensor, sizes: list[int], fused: bool) -> list[torch.Tensor]:
    """A layer's tokens sorted by expert, then in chunks, and all of it undone; with gradients."""
    from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

    noise = torch.Generator().manual_seed(3)
    tokens, weights = (torch.randn(TOKENS, n, generator=noise).requires_grad_() for n in (HIDDEN, EXPERTS))
    rows, probs, order, *_ = permute(tokens, chosen, weights, TOKENS * TOPK, fused=fused)
    chunks, back = torch.tensor([1, 3, 0, 2]), torch.tensor([2, 0, 3, 1])
    lengths = torch.tensor(sizes)
    rows, probs = sort_chunks_by_idxs(rows, lengths, chunks, probs=probs, fused=fused)
    rows = rows * probs[:, None]
    restored, _ = sort_chunks_by_idxs(rows, lengths[chunks], back, fused=fused)
    out = unpermute(restored, order, tokens.shape, routing_map=chosen, fused=fused)
    out.backward(torch.randn(out.shape, generator=noise))
    assert tokens.grad is not None
    assert weights.grad is not None
    return [rows, probs, out, tokens.grad, weights.grad]


def main() -> None:
    Autotuner.run = untuned
    permutation.torch = HostTorch()
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    noise = torch.Generator().manual_seed(1)
    likely = torch.rand(TOKENS, EXPERTS, generator=noise)
    idle = likely.clone()
    idle[:, 2] = -1  # an expert without tokens
    gaps = {}
    for name, scores in (("all", likely), ("one idle", idle)):
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(TOPK).indices, True)
        sizes = chosen.sum(0).tolist()
        kernels, plain = (there_and_back(chosen, sizes, fused) for fused in (True, False))
        gaps[name] = [(a - b).abs().max().item() for a, b in zip(kernels, plain, strict=True)]
    (Path(sys.argv[1]) / "result.json").write_text(json.dumps({"gaps": gaps, "idle": sizes[2]}))


if __name__ == "__main__":
    main()
