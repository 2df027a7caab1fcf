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
from benchmarks.setup import QUICKSTART, Table, Watch, benchmark, main, seconds, train
from rpg_megatron.policy.logprobs import Head, token_logprobs
from rpg_megatron.training.efficiency import peak_flops
from rpg_megatron.training.loss import build_aggregator, build_loss

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


def run(
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
        print(f"step {row['step']}: {spans}, sync {row.get('sync/seconds', 0.0):.2f} s", flush=True)

    engine = {"colocated": True, "kv_cache_gib": kv_cache_gib, "max_sequences": sequences}
    engine |= {"start_timeout": 400.0} | ({"quantization": "fp8"} if engine_fp8 else {})
    training = {"minibatches": 2, "tokens_per_microbatch": max(8192, response + 64), "logprob_chunk": 2048}
    settings: dict[str, Any] = {
        "device": "cuda",
        "data": {"path": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 32},
        "reward": {"type": "operator:gt"},  # of response and answer, as texts
        "precision": {"dtype": "bfloat16"} | ({"fp8": {"recipe": fp8}} if fp8 else {}),
        "bridge": {"transport": transport},
        "rollout": {"prompts_per_step": prompts, "samples_per_prompt": 8, "max_response_tokens": response},
        "training": {"steps": steps} | training,
        "engine": engine,
        "export": {"enabled": False},
        "checkpoint": {"every": None},
        "guards": {"mismatch": "warn"},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings["model"] = {"path": str(write_checkpoint(folder / "model", SHAPES[shape]))}
        (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        with Watch(lambda: int(subprocess.check_output(query)), every=0.2) as memory:
            train_run = train(folder, config=folder / "run.yaml", on_row=show)

    def peak(begin: float, end: float) -> int:
        return max((mib for when, mib in memory.samples if begin <= when <= end), default=0)

    kinds = f"trainer {f'FP8 {fp8}' if fp8 else 'BF16'}, engine {'FP8' if engine_fp8 else 'BF16'}"
    columns = ["step", "s|.2f", *(f"{phase}|.2f" for phase in PHASES), "tokens/s|.0f", "peak MiB", "MFU|.1%"]
    table = Table(*columns, title=f"{shape}, {prompts} x 8 responses of {response}; {kinds}")
    peaks = []
    for row, end in zip(train_run.rows, train_run.ends, strict=True):
        if row["step"]:
            step_seconds, spans = row["time/step"], [row.get(f"time/{phase}", 0.0) for phase in PHASES]
            peaks.append(peak(end - step_seconds, end))
            speed = row["throughput/tokens_per_second"]
            table.row(row["step"], step_seconds, *spans, speed, peaks[-1], row.get("gpu/mfu_update"))
    begin = end - step_seconds
    for phase, span in zip(PHASES, spans, strict=True):
        print(f"peak of {phase}: {peak(begin, begin + span)} MiB")
        begin += span
    steady = train_run.steps[1:]  # the first step compiles and fills pools
    rate = max(row["sync/bytes"] / row["sync/seconds"] for row in steady)
    times = ", ".join(f"{row['sync/seconds']:.2f} s" for row in steady)
    share = f"{rate / copy_rate:.1%} of a copy on the device: {copy_rate / 1e9:.0f} GB/s"
    print(f"sync: {times}; {rate / 1e9:.1f} GB/s at best, {share}")
    print(f"memory over steps 2 to {len(peaks)}: {min(peaks[1:])} to {max(peaks[1:])} MiB")
    print("mismatch/logp_mean:", ", ".join(f"{row['mismatch/logp_mean']:.1e}" for row in train_run.steps))


@benchmark(device="cpu", shape="tiny", tokens=128, length=64, micro=1, repeat=1, precisions=("bf16",))
def update(
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
    after three. MFU is relative to the dense BF16 rate of the card (if unknown, of an H100), for FP8 too, and
    leaves recomputation out.
    """
    place, mesh = start(device)
    model = replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)
    lengths = [length] * (tokens // length)
    title = f"{shape}, {model.num_layers} layers; {micro} packs of {lengths} tokens"
    columns = ("precision", "seconds|.3f", "tokens/s|.0f", "MFU|.1%", "peak GiB|.1f")
    table = Table(*columns, ratio="seconds", title=title)
    flops = 3 * micro * model.forward_flops(sum(lengths), sum(n * n for n in lengths))
    card = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
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
        mfu = flops / median / (card or 989e12)
        table.row(name, median, micro * sum(lengths) / median, mfu, _peak_gib(place))
        del policy, packs, once


@benchmark(device="cpu", tokens=64, hidden=16, vocab=128, chunks=(16,), repeat=1)
def logprobs(
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

    def plain(states: Any, weight: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logp = torch.log_softmax((states @ weight.t()).float(), -1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def chunked(chunk: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        return lambda *tensors: token_logprobs(*tensors, Head(1.0, chunk, vocab), group=dist.group.WORLD)

    methods = {"plain": plain, **{f"chunks of {n}": chunked(n) for n in chunks}}
    title = f"{tokens} tokens x {vocab}, hidden size {hidden}"
    columns = ("log-probs", "seconds|.4f", "peak GiB|.2f", "largest difference|.1e")
    table, expected = Table(*columns, ratio="seconds", title=title), None
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
