"""Chunked log-probs against plain ones on a GPU: time and peak memory, forward and backward.

``python -m benchmarks.gpu_logprobs``: 8,192 tokens of hidden size 4,096, a vocabulary of 151,936, BF16.
Plain: all logits in float32, log_softmax, gather, the entropy from the same. Median of ten after two; memory
above what the inputs take. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.gpu_policies import machine, start
from rpg_megatron.policy.logprobs import token_logprobs

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device, _ = start(args.device)
    dtype = torch.bfloat16
    hidden = torch.randn(args.tokens, args.hidden, device=device, dtype=dtype).requires_grad_()
    weight = (
        torch.empty(args.vocab, args.hidden, device=device, dtype=dtype).normal_(std=0.02).requires_grad_()
    )
    targets = torch.randint(0, args.vocab, (args.tokens,), device=device)

    def chunked(chunk: int) -> Way:
        return lambda h, w, t: token_logprobs(
            h, w, t, temperature=1.0, chunk=chunk, vocab=args.vocab, group=dist.group.WORLD
        )

    ways: dict[str, Way] = {"plain": plain, **{f"chunks of {n}": chunked(n) for n in args.chunks}}
    print(machine(device))
    print(f"{args.tokens} tokens x {args.vocab}, hidden size {args.hidden}")
    print(f"{'':<16} {'ms':>9} {'to plain':>9} {'peak GiB':>9} {'largest difference':>19}")
    wanted = base = None
    for name, way in ways.items():
        times, peak = [], float("nan")
        for i in range(12):
            hidden.grad = weight.grad = None
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            torch.cuda.synchronize()
            began = time.perf_counter()
            logp, entropy = way(hidden, weight, targets)
            logp.sum().backward()
            torch.cuda.synchronize()
            if i >= 2:
                times.append(time.perf_counter() - began)
            if device.type == "cuda":
                peak = (torch.cuda.max_memory_allocated() - held) / 1024**3
        seconds = statistics.median(times)
        wanted, base = (logp.detach() if wanted is None else wanted), base or seconds
        gap = (logp.detach() - wanted).abs().max().item()
        print(f"{name:<16} {1e3 * seconds:9.1f} {seconds / base:9.2f} {peak:9.2f} {gap:19.1e}", flush=True)
        del logp, entropy


if __name__ == "__main__":
    main()
