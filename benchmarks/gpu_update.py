"""How fast updates are in FP8 relative to BF16, in one run: forward, backward and optimizer of whole layers.

``python -m benchmarks.gpu_update --shape 4b --layers 12`` times updates of a random model of the shape's
layers (fewer of them, where the card does not hold all), each of ``--micro`` packs of ``--tokens`` tokens.
Median of ``--repeat`` updates, after three. MFU is relative to the card's dense BF16 rate, for FP8 too, and
leaves recomputation out. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from benchmarks.gpu_policies import BF16_FLOPS, SHAPES, batch_of, build, flops, forget, machine, start
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss


def update_seconds(policy: Policy, lengths: list[int], micro: int, repeat: int) -> float:
    """Median seconds of an update."""
    packs = [policy.pack(batch_of(lengths, policy.vocab, seed=i)) for i in range(micro)]
    loss, aggregator = build_loss(policy.settings), build_aggregator(policy.settings)
    times = []
    for i in range(repeat + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with policy.updating():
            policy.update(packs, loss, aggregator, lr=1e-6)
        torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--tokens", type=int, default=8192, help="of a pack")
    parser.add_argument("--length", type=int, default=2048, help="of a sequence")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "blockwise", "tensorwise", "delayed"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device, mesh = start(args.device)
    shape = SHAPES[args.shape]
    shape = replace(shape, num_layers=args.layers or shape.num_layers)
    lengths = [args.length] * (args.tokens // args.length)
    work = flops(shape, lengths) * args.micro
    print(machine(device))
    print(f"{args.shape}, {shape.num_layers} layers; {args.micro} packs of {lengths} tokens")
    print(f"{'precision':<18} {'ms':>9} {'tokens/s':>10} {'MFU':>6} {'speed':>6} {'peak GiB':>9}")
    base = None
    for name in args.precisions:
        forget()
        budget = {"tokens_per_microbatch": args.tokens}
        policy = build(shape, mesh, device, name, training=budget, memory={"recompute": "selective"})
        seconds = update_seconds(policy, lengths, args.micro, args.repeat)
        base = base or seconds
        peak = torch.cuda.max_memory_allocated() / 1024**3 if device.type == "cuda" else float("nan")
        print(
            f"{name:<18} {1e3 * seconds:9.1f} {args.micro * sum(lengths) / seconds:10.0f} "
            f"{work / seconds / BF16_FLOPS:6.1%} {base / seconds:6.2f} {peak:9.1f}",
            flush=True,
        )
        del policy


if __name__ == "__main__":
    main()
