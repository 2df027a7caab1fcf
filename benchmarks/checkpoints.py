"""Checkpoints: how much saving slows training, and the memory of a conversion."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open

from benchmarks.policies import QWEN3, on_ranks, trajectory_of, write_checkpoint
from benchmarks.setup import Report, benchmark, main, seconds
from rpg_megatron.checkpoints.hf_files import list_checkpoint
from rpg_megatron.config import Settings, read_model_shape

TOKENS = 256


@benchmark(layers=1, hidden=128, repeat=1)
def save(
    report: Report,
    tensor: int = 2,
    data: int = 1,
    layers: int = 8,
    hidden: int = 512,
    repeat: int = 5,
    folder: Path | None = None,
) -> None:
    """How long training waits for a save against its total, synchronous and asynchronous.

    A random bfloat16 policy with the distributed optimizer on tensor x data ranks of this machine's CPUs
    (hidden: a multiple of 64) is saved ``repeat`` times each way, to a temporary folder below ``folder``,
    which is on the disk to measure. Total ends when the manifest is written and the checkpoint has its name.
    Updates are made during a background save and without one. Then the checkpoint is loaded. Medians; the
    first round, with new moments and cold caches, is not counted.
    """
    shape = replace(
        QWEN3,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 64,
        head_dim=64,
        vocab_size=16384,
        tied_embeddings=False,
    )
    with tempfile.TemporaryDirectory(prefix="rpg-", dir=folder) as name:
        place = Path(name)
        (place / "config.yaml").write_text("")
        settings = Settings.model_validate(
            {
                "device": "cpu",
                "model": {"path": str(write_checkpoint(place / "model", shape))},
                "data": {"path": "unused"},
                "parallel": {"tensor": tensor, "data": data},
                "precision": {"dtype": "bfloat16"},
                "checkpoint": {"keep": 1},
            }
        )
        result = on_ranks(tensor * data, _save_and_load, settings, place, repeat)
    size = f"{layers} layers of {hidden}, {result['bytes'] / 1e9:.3f} GB"
    title = f"TP{tensor} x DP{data}, {size}; median of {repeat}"
    columns = (
        "save",
        "training waits, s|.2f",
        "total, s|.2f",
        "waits / total|.2f",
        "updates meanwhile take x|.2f",
    )
    table = report.table(*columns, ratio="training waits, s", title=title)
    for kind in ("synchronous", "asynchronous"):
        row = result[kind]
        table.row(kind, row["critical"], row["total"], row["critical"] / row["total"], row["beside"])
    table.row("load", result["load"], result["load"], None, None)


def _save_and_load(device: torch.device, settings: Settings, folder: Path, repeat: int) -> dict[str, Any]:
    """On each rank: median seconds of the saves and of a load, and the bytes of a checkpoint."""
    from rpg_megatron.policy.model import start_mesh
    from rpg_megatron.policy.policy import Policy
    from rpg_megatron.training.checkpoint_saver import Saver, load_model
    from rpg_megatron.training.loss import build_aggregator, build_loss

    mesh = start_mesh(settings.parallel)
    policy = Policy(settings, read_model_shape(settings.model.path), mesh, device, lambda policy: None)
    packs = [policy.pack([trajectory_of(np.arange(TOKENS, dtype=np.int32), 8)])]
    loss, aggregator = build_loss(settings), build_aggregator(settings)

    def update() -> None:
        policy.update(packs, loss, aggregator, lr=1e-6)

    update()
    gc.collect()
    gc.freeze()  # as a trainer does
    rows: dict[str, list[dict[str, float]]] = {"synchronous": [], "asynchronous": []}
    savers = {
        kind: Saver(
            folder,
            policy,
            None,
            settings.checkpoint.model_copy(update={"asynchronous": kind == "asynchronous"}),
        )
        for kind in rows
    }
    step = 0
    for _ in range(repeat + 1):
        undisturbed = seconds(update)
        for kind, saver in savers.items():
            step += 1
            dist.barrier()
            critical = seconds(lambda saver=saver, step=step: saver.start(step, dict))
            updates, start = 0, time.perf_counter()
            while kind == "asynchronous" and _busy(saver):
                update()
                updates += 1
            beside = (time.perf_counter() - start) / updates / undisturbed if updates else 1.0
            saver.wait()
            (outcome,) = saver.pop_results()
            if outcome.problem:
                raise SystemExit(outcome.problem)
            rows[kind].append({"critical": critical, "total": outcome.seconds, "beside": beside})
    dist.barrier()
    load: Callable[[], object] = lambda: load_model(outcome.folder, policy, None)  # noqa: E731
    load()
    medians: dict[str, Any] = {
        kind: {key: statistics.median(row[key] for row in kind_rows[1:]) for key in kind_rows[0]}
        for kind, kind_rows in rows.items()
    }
    size = sum(f.stat().st_size for f in outcome.folder.rglob("*") if f.is_file())
    return medians | {"load": seconds(load, repeat), "bytes": size}


def _busy(saver: Any) -> bool:
    """Whether a save is in progress on any rank, so that all ranks make the same updates."""
    flag = torch.tensor([0.0 if saver.wait(timeout=0) else 1.0])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


@benchmark(layers=1, file_mb=20)
def convert(report: Report, layers: int = 28, file_mb: int = 100) -> None:
    """Peak memory and time of a conversion, each in a process of its own.

    A random bfloat16 model is converted to Megatron and back; no tensor may change. Peak is the largest
    resident set, mapped files included, less that of the same command with a tiny model.
    """
    shape = replace(
        QWEN3,
        num_layers=layers,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=32000,
        tied_embeddings=False,
    )
    tiny = replace(shape, num_layers=1, hidden_size=64, ffn_hidden_size=64, vocab_size=64)
    with tempfile.TemporaryDirectory() as name:
        folder, peaks = Path(name), []
        for part, model in (("tiny", tiny), ("model", shape)):
            place = folder / part
            original = write_checkpoint(place / "hf", model, file_bytes=file_mb * 10**6)
            there = ["hf-to-megatron", "--hf", original, "--out", place / "megatron"]
            back = ["megatron-to-hf", "--megatron", place / "megatron", "--out", place / "back"]
            back += ["--max-shard-gib", file_mb * 10**6 / 1024**3]
            peaks.append([_measure("convert", *command) for command in (there, back)])
        size = sum(file.stat().st_size for file in original.glob("*.safetensors"))
        title = f"{size / 1e6:.0f} MB of weights, files of at most {file_mb} MB"
        table = report.table("", "peak, MB|.0f", "s|.1f", title=title)
        directions = zip(("HF -> Megatron", "Megatron -> HF"), *peaks, strict=True)
        for direction, (before, _), (peak, took) in directions:
            table.row(direction, peak - before, took)
        if not _same(original, place / "back"):
            raise SystemExit("tensors changed")


def _measure(*words: object) -> tuple[float, float]:
    """Peak memory of a command, MB, and its seconds."""
    command = [sys.executable, "-m", "rpg_megatron.cli", *map(str, words)]
    began = time.perf_counter()
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    peak = output.partition("peak memory ")[2].split()[0]
    return float(peak.replace(",", "")), time.perf_counter() - began


def _same(a: Path, b: Path) -> bool:
    """Whether two HF checkpoints hold the same tensors bit by bit."""
    first, second = list_checkpoint(a), list_checkpoint(b)

    def read(stored: dict, name: str) -> torch.Tensor:
        with safe_open(stored[name].file, framework="pt") as f:
            return f.get_tensor(name).view(torch.int16)

    return set(first) == set(second) and all(torch.equal(read(first, n), read(second, n)) for n in first)


if __name__ == "__main__":
    main(__doc__, save, convert)
