"""A whole run on one GPU that engine and trainer share: where a step's time goes, and whether memory is flat.

``python -m benchmarks.gpu_run --shape 0.6b --response 2048`` makes a random checkpoint of the shape, runs
``rpg-megatron train`` on it for a few steps, colocated, and reads the run's metrics. Random weights rarely
sample an end: nearly all responses have full length. Rewards are random: where all are equal, gradients are
zero, and a GPU multiplies zeros faster than other numbers. Memory is what nvidia-smi reports, all processes
together, sampled five times a second; phases are placed by the metrics' seconds, so a peak at a border may
count for its neighbour. Sync is compared with copying on the device, measured just before. Not yet run on a
GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_policies import BF16_FLOPS, QUICKSTART, SHAPES, flops, write_checkpoint

PHASES = ("collect", "handover", "logprobs", "update", "sync")
"""In the order of a step, as the metrics name them; handover is in part of sync."""
_COPY = """
import torch, time
x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"); y = torch.empty_like(x)
for _ in range(3): y.copy_(x)
torch.cuda.synchronize(); t = time.perf_counter()
for _ in range(20): y.copy_(x)
torch.cuda.synchronize(); print(20 * x.nbytes / (time.perf_counter() - t))
"""


class MemoryWatch:
    """Samples of the card's used memory, in MiB, with the time of each."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        while not self._end.wait(0.2):
            told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
            if told.strip().isdigit():
                self.samples.append((time.time(), int(told)))

    def peak(self, start: float, end: float) -> int:
        """Largest sample of a span, MiB; 0 if there is none."""
        return max((used for at, used in self.samples if start <= at <= end), default=0)

    def close(self) -> None:
        """End the looking."""
        self._end.set()
        self._thread.join()


def settings_of(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The run, as YAML has it."""
    engine = {
        "colocated": True,
        "kv_cache_gib": args.kv_cache_gib,
        "max_sequences": args.sequences,
        "start_timeout": 400.0,
    }
    if args.engine_fp8:
        engine["quantization"] = "fp8"
    precision = {"dtype": "bfloat16"} | ({"fp8": {"recipe": args.fp8}} if args.fp8 else {})
    return {
        "name": "gpu",
        "runs": str(folder / "runs"),
        "device": "cuda",
        "model": {"path": str(model)},
        "data": {"path": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 32},
        "reward": {"type": "operator:gt"},  # of response and answer, as texts
        "precision": precision,
        "bridge": {"transport": args.transport},
        "rollout": {
            "prompts_per_step": args.prompts,
            "samples_per_prompt": 8,
            "max_response_tokens": args.response,
        },
        "training": {
            "steps": args.steps,
            "minibatches": 2,
            "tokens_per_microbatch": max(8192, args.response + 64),
            "logprob_chunk": 2048,
        },
        "engine": engine,
        "export": {"enabled": False},
        "checkpoint": {"every": None},
        "guards": {"mismatch": "warn"},
    }


def run(config: Path, folder: Path) -> tuple[list[dict[str, Any]], list[float], MemoryWatch]:
    """Train; rows of the metrics, when each was first seen, and the memory meanwhile."""
    watch = MemoryWatch()
    log = folder / "train.log"
    seen: list[float] = []
    with log.open("w") as out:
        command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(config)]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            rows = read_rows(folder)
            for row in rows[len(seen) :]:  # should the run not come to its end, this is all that is known
                spans = {key: f"{value:.1f} s" for key, value in row.items() if key.startswith("time/")}
                print(f"step {row['step']}: {spans}, sync {row.get('sync/seconds', 0.0):.2f} s", flush=True)
            seen += [time.time()] * (len(rows) - len(seen))
            time.sleep(0.1)
    rows = read_rows(folder)
    seen += [time.time()] * (len(rows) - len(seen))
    watch.close()
    if process.returncode:
        logs = sorted((folder / "runs").glob("*/logs/*.log"))
        tails = "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-6000:]}" for f in logs)
        raise SystemExit(f"the run ended with {process.returncode}\n{log.read_text()[-3000:]}\n{tails}")
    return rows, seen, watch


def read_rows(folder: Path) -> list[dict[str, Any]]:
    files = list((folder / "runs").glob("*/metrics.jsonl"))
    whole = files[0].read_text().rpartition("\n")[0] if files else ""
    return [json.loads(row) for row in whole.splitlines()]


def report(
    rows: list[dict[str, Any]], seen: list[float], watch: MemoryWatch, copied: float, args: argparse.Namespace
) -> None:
    shape = SHAPES[args.shape]
    print(
        f"{'step':>4} {'s':>7} " + " ".join(f"{p:>9}" for p in PHASES) + f" {'tokens/s':>9} {'peak MiB':>9}"
    )
    ends = []
    for row, end in zip(rows[1:], seen[1:], strict=True):
        seconds = row["time/step"]
        peak = watch.peak(end - seconds, end)
        print(
            f"{row['step']:>4} {seconds:7.2f} "
            + " ".join(f"{row.get(f'time/{p}', 0.0):9.2f}" for p in PHASES)
            + f" {row['throughput/tokens_per_second']:9.0f} {peak:9d}"
        )
        ends.append((row, end, peak))
    steady = ends[1:]  # the first step compiles and fills pools
    tokens = [row["step/tokens"] / (args.prompts * 8) for row, *_ in steady]
    work = [flops(shape, [round(n)] * args.prompts * 8) for n in tokens]
    mfu = [w / row["time/update"] / BF16_FLOPS for w, (row, *_) in zip(work, steady, strict=True)]
    print(f"MFU of the update: {', '.join(f'{x:.1%}' for x in mfu)}")
    for row, end, _ in steady[-1:]:
        at = end - row["time/step"]
        for phase in PHASES:
            print(f"peak of {phase}: {watch.peak(at, at + row.get(f'time/{phase}', 0.0))} MiB")
            at += row.get(f"time/{phase}", 0.0)
    rates = [row["sync/bytes"] / row["sync/seconds"] for row, *_ in steady]
    print(
        f"sync: {', '.join(f'{row["sync/seconds"]:.2f} s' for row, *_ in steady)}; "
        f"{max(rates) / 1e9:.1f} GB/s at best, {max(rates) / copied:.1%} of a copy on the device "
        f"({copied / 1e9:.0f} GB/s)"
    )
    peaks = [peak for _, _, peak in steady]
    print(f"memory over steps 2 to {len(ends)}: {min(peaks)} to {max(peaks)} MiB")
    print(f"mismatch/logp_mean: {', '.join(f'{row["mismatch/logp_mean"]:.1e}' for row, *_ in ends)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--response", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=16, help="a step; 8 responses each")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--kv-cache-gib", type=float, default=30.0)
    parser.add_argument("--fp8", choices=("blockwise", "tensorwise", "delayed"), help="in the trainer")
    parser.add_argument("--engine-fp8", action="store_true")
    parser.add_argument("--transport", choices=("cuda_ipc", "process_group"), default="cuda_ipc")
    args = parser.parse_args()
    copied = float(
        subprocess.run([sys.executable, "-c", _COPY], capture_output=True, text=True, check=True).stdout
    )
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        model = write_checkpoint(folder / "model", SHAPES[args.shape])
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(settings_of(model, folder, args)), encoding="utf-8")
        rows, seen, watch = run(config, folder)
        how = f"FP8 {args.fp8}" if args.fp8 else "BF16"
        served = "FP8" if args.engine_fp8 else "BF16"
        print(
            f"{args.shape}, {args.prompts} x 8 responses of {args.response}; trainer {how}, engine {served}"
        )
        report(rows, seen, watch, copied, args)


if __name__ == "__main__":
    main()
