"""Time and memory on a GPU: a whole colocated run, updates in FP8 against BF16, and chunked log-probs.

``update`` and ``logprobs`` with ``--device cpu --shape tiny`` are dry runs; their figures mean nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml

from benchmarks.policies import SHAPES, batch_of, build, forget, start, write_checkpoint
from benchmarks.setup import QUICKSTART, Report, Watch, benchmark, main, seconds, train
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.policy.logprobs import Head, token_logprobs
from rpg_megatron.training.loss import build_aggregator, build_loss

BF16_FLOPS = 989e12
"""Dense bfloat16 of one H100 or H200 (SXM), by its data sheet: what MFU is relative to, FP8 included."""
PHASES = ("collect", "handover", "logprobs", "update", "sync")
"""In the order of a step, as the metrics name them; handover is in part of sync."""
Shape = Literal["0.6b", "4b", "8b", "29m", "tiny"]
Device = Literal["cuda", "cpu"]
_COPY = """
import torch, time
x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"); y = torch.empty_like(x)
for _ in range(3): y.copy_(x)
torch.cuda.synchronize(); t = time.perf_counter()
for _ in range(20): y.copy_(x)
torch.cuda.synchronize(); print(20 * x.nbytes / (time.perf_counter() - t))
"""


def flops(shape: ModelShape, lengths: list[int]) -> float:
    """Floating-point operations of forward and backward of these sequences, without recomputation."""
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * heads + 2 * kv + 3 * shape.ffn_hidden_size)
    matrices = shape.num_layers * layer + shape.hidden_size * shape.vocab_size
    attention = shape.num_layers * 2 * heads  # a causal token sees half the sequence: 4 n heads / 2
    return 3 * sum(2 * matrices * n + attention * n * n for n in lengths)


def run(
    report: Report,
    shape: Shape = "0.6b",
    response: int = 2048,
    prompts: int = 16,
    steps: int = 5,
    sequences: int = 128,
    kv_cache_gib: float = 30.0,
    fp8: Literal["blockwise", "tensorwise", "delayed"] | None = None,
    engine_fp8: bool = False,
    transport: Literal["cuda_ipc", "process_group"] = "cuda_ipc",
) -> None:
    """A run on one GPU that engine and trainer share: where a step's time goes, and whether memory is flat.

    The checkpoint is random and rarely samples an end: nearly all responses have full length. A step has 8
    responses to each of ``prompts``. Rewards are random: where all are equal, gradients are zero, and a GPU
    multiplies zeros faster than other numbers. fp8: of the trainer. Memory is what nvidia-smi reports, all
    processes together, sampled five times a second; phases are placed by the metrics' seconds, so a peak at a
    border may count for its neighbour. Sync is compared with copying on the device, measured just before.
    """
    process = subprocess.run([sys.executable, "-c", _COPY], capture_output=True, text=True, check=True)
    copy_rate = float(process.stdout)
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]

    def show(row: dict[str, Any]) -> None:  # the only results if the run fails
        spans = {key: f"{value:.1f} s" for key, value in row.items() if key.startswith("time/")}
        report.say(f"step {row['step']}: {spans}, sync {row.get('sync/seconds', 0.0):.2f} s")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings: dict[str, Any] = {
            "device": "cuda",
            "model": {"path": str(write_checkpoint(folder / "model", SHAPES[shape]))},
            "data": {"path": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 32},
            "reward": {"type": "operator:gt"},  # of response and answer, as texts
            "precision": {"dtype": "bfloat16"} | ({"fp8": {"recipe": fp8}} if fp8 else {}),
            "bridge": {"transport": transport},
            "rollout": {
                "prompts_per_step": prompts,
                "samples_per_prompt": 8,
                "max_response_tokens": response,
            },
            "training": {
                "steps": steps,
                "minibatches": 2,
                "tokens_per_microbatch": max(8192, response + 64),
                "logprob_chunk": 2048,
            },
            "engine": {
                "colocated": True,
                "kv_cache_gib": kv_cache_gib,
                "max_sequences": sequences,
                "start_timeout": 400.0,
            }
            | ({"quantization": "fp8"} if engine_fp8 else {}),
            "export": {"enabled": False},
            "checkpoint": {"every": None},
            "guards": {"mismatch": "warn"},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        with Watch(lambda: int(subprocess.check_output(query)), every=0.2) as memory:
            train_run = train(folder, config=folder / "run.yaml", on_row=show)

    def peak(begin: float, end: float) -> int:
        return max((mib for when, mib in memory.samples if begin <= when <= end), default=0)

    trainer, engine = (f"FP8 {fp8}" if fp8 else "BF16"), ("FP8" if engine_fp8 else "BF16")
    report.say(f"{shape}, {prompts} x 8 responses of {response}; trainer {trainer}, engine {engine}")
    columns = ["step", "s|.2f", *(f"{phase}|.2f" for phase in PHASES), "tokens/s|.0f", "peak MiB", "MFU|.1%"]
    table, peaks = report.table(*columns), []
    for row, end in zip(train_run.rows, train_run.ends, strict=True):
        if not row["step"]:
            continue
        step_seconds, count = row["time/step"], prompts * 8
        mfu = flops(SHAPES[shape], [round(row["step/tokens"] / count)] * count)
        mfu /= row["time/update"] * BF16_FLOPS
        phase_seconds = [row.get(f"time/{phase}", 0.0) for phase in PHASES]
        peaks.append(peak(end - step_seconds, end))
        speed = row["throughput/tokens_per_second"]
        table.row(row["step"], step_seconds, *phase_seconds, speed, peaks[-1], mfu)
    begin = end - step_seconds
    for phase, span in zip(PHASES, phase_seconds, strict=True):
        report.say(f"peak of {phase}: {peak(begin, begin + span)} MiB")
        begin += span
    steady = train_run.steps[1:]  # the first step compiles and fills pools
    rate = max(row["sync/bytes"] / row["sync/seconds"] for row in steady)
    report.say(
        f"sync: {', '.join(f'{row["sync/seconds"]:.2f} s' for row in steady)}; "
        f"{rate / 1e9:.1f} GB/s at best, {rate / copy_rate:.1%} of a copy on the device: "
        f"{copy_rate / 1e9:.0f} GB/s"
    )
    report.say(f"memory over steps 2 to {len(peaks)}: {min(peaks[1:])} to {max(peaks[1:])} MiB")
    report.say(f"mismatch/logp_mean: {', '.join(f'{r["mismatch/logp_mean"]:.1e}' for r in train_run.steps)}")


@benchmark(device="cpu", shape="tiny", tokens=128, length=64, micro=1, repeat=1, precisions=("bf16",))
def update(
    report: Report,
    shape: Shape = "4b",
    layers: int | None = None,
    tokens: int = 8192,
    length: int = 2048,
    micro: int = 4,
    repeat: int = 10,
    precisions: tuple[str, ...] = ("bf16", "blockwise", "tensorwise", "delayed"),
    device: Device = "cuda",
) -> None:
    """How fast updates are in FP8 relative to BF16: forward, backward and optimizer of whole layers.

    Updates of a random model with this many layers of the shape (fewer, where the card does not hold all),
    each of ``micro`` packs of ``tokens`` tokens in sequences of ``length``. Median of ``repeat`` updates,
    after three. MFU is relative to the card's dense BF16 rate, for FP8 too, and leaves recomputation out.
    """
    place, mesh = start(device)
    model = replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)
    lengths = [length] * (tokens // length)
    title = f"{shape}, {model.num_layers} layers; {micro} packs of {lengths} tokens"
    columns = ("precision", "seconds|.3f", "tokens/s|.0f", "MFU|.1%", "peak GiB|.1f")
    table = report.table(*columns, ratio="seconds", title=title)
    for name in precisions:
        forget()
        sections = {"training": {"tokens_per_microbatch": tokens}, "memory": {"recompute": "selective"}}
        policy = build(model, mesh, place, name, **sections)
        packs = [policy.pack(batch_of(lengths, policy.vocab, seed=i)) for i in range(micro)]
        loss, aggregator = build_loss(policy.settings), build_aggregator(policy.settings)

        def once(policy=policy, packs=packs, loss=loss, aggregator=aggregator) -> None:
            with policy.updating():
                policy.update(packs, loss, aggregator, lr=1e-6)
            _wait(place)

        seconds(once, repeat=3)
        median = seconds(once, repeat)
        mfu = flops(model, lengths) * micro / median / BF16_FLOPS
        table.row(name, median, micro * sum(lengths) / median, mfu, _peak_gib(place))
        del policy, packs, once


Logprobs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@benchmark(device="cpu", tokens=64, hidden=16, vocab=128, chunks=(16,), repeat=1)
def logprobs(
    report: Report,
    tokens: int = 8192,
    hidden: int = 4096,
    vocab: int = 151936,
    chunks: tuple[int, ...] = (512, 1024, 2048, 4096),
    repeat: int = 10,
    device: Device = "cuda",
) -> None:
    """Chunked log-probs against plain ones: time and peak memory, forward and backward, in BF16.

    Plain: all logits in float32, log_softmax, gather, and the entropy from the same logits. Median of
    ``repeat`` after two; memory above that of the inputs.
    """
    place, _ = start(device)
    kind = {"device": place, "dtype": torch.bfloat16}
    states = torch.randn(tokens, hidden, **kind).requires_grad_()
    weight = torch.empty(vocab, hidden, **kind).normal_(std=0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=place)

    def plain(
        states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp = torch.log_softmax((states @ weight.t()).float(), -1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def chunked(chunk: int) -> Logprobs:
        return lambda *tensors: token_logprobs(*tensors, Head(1.0, chunk, vocab), group=dist.group.WORLD)

    methods: dict[str, Logprobs] = {"plain": plain, **{f"chunks of {n}": chunked(n) for n in chunks}}
    title = f"{tokens} tokens x {vocab}, hidden size {hidden}"
    columns = ("log-probs", "seconds|.4f", "peak GiB|.2f", "largest difference|.1e")
    table, expected = report.table(*columns, ratio="seconds", title=title), None
    for name, method in methods.items():
        result: list[torch.Tensor] = []

        def once(method=method, result=result) -> None:
            states.grad = weight.grad = None
            logp, _ = method(states, weight, targets)
            logp.sum().backward()
            result[:] = [logp.detach()]
            _wait(place)

        seconds(once, repeat=2)
        states.grad = weight.grad = None
        result.clear()
        forget()
        baseline = _peak_gib(place)
        median, peak = seconds(once, repeat), _peak_gib(place)
        expected = result[0] if expected is None else expected
        table.row(name, median, peak - baseline, (result[0] - expected).abs().max().item())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 1024**3 if device.type == "cuda" else float("nan")


if __name__ == "__main__":
    main(__doc__, run, update, logprobs)
