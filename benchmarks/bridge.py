"""Time and memory of a weight sync from the trainers to an engine, compared with a checkpoint on disk."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.policies import QWEN3, write_checkpoint
from benchmarks.setup import Report, Watch, benchmark, main, memory_of, seconds
from rpg_megatron.bridge.controller import sync_engine
from rpg_megatron.bridge.publisher import published
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.config import Settings
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.registry import mapping_for
from tests.support.bridge_trainers import PublishingRanks
from tests.support.engine import Engine, running_engines

SHAPE = replace(
    QWEN3,
    family="qwen2",
    num_layers=24,
    hidden_size=896,
    ffn_hidden_size=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    qk_norm=False,
    qkv_bias=True,
    max_positions=2048,
)
"""Qwen2.5-0.5B's."""
DTYPE = torch.bfloat16
METHODS = ("shared_memory", "process_group", "disk")


@benchmark(layers=1, repeat=1)
def bridge(
    report: Report,
    trainer_tensor: int = 2,
    engine_tensor: int = 1,
    repeat: int = 5,
    layers: int = SHAPE.num_layers,
) -> None:
    """Weight syncs of a random bfloat16 model of Qwen2.5-0.5B's shape (988 MB) into one real vLLM engine.

    Trainer ranks hold it sharded as by Megatron (no training, so no Megatron). It is synced by shared memory
    and by process group; and, with the same engine, by disk: the ranks export a Hugging Face checkpoint, and
    the engine loads it with vLLM's own ``reload_weights``.

    Times are medians, after one sync that is not counted (it makes the plan). The ratio is to one copy of as
    many bytes, from memory to memory, on one core. Memory is the growth of the process's private memory
    (RssAnon), sampled 200 times a second; engines keep freed memory for the next sync, so theirs appears in
    the first method only.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    shape = replace(SHAPE, num_layers=layers)
    with tempfile.TemporaryDirectory(prefix="rpg-") as place:
        work = Path(place)
        settings = Settings.model_validate(
            {
                "device": "cpu",
                "model": {"path": str(write_checkpoint(work / "model", shape))},
                "data": {"path": "unused", "max_prompt_tokens": 32},
                "precision": {"dtype": "bfloat16"},
                "rollout": {"max_response_tokens": 32},
                "engine": {"tensor": engine_tensor, "max_sequences": 4, "kv_cache_gib": 0.25},
            }
        )
        with running_engines(work, [settings], weights="checkpoint") as (engine,):
            trainers = PublishingRanks(_rank, trainer_tensor, trainer_tensor, shape, work, engine.bridge)
            try:
                rows = {method: _measure(trainers, engine, method, repeat, work) for method in METHODS}
            finally:
                trainers.stop()
    moved = rows["shared_memory"]["bytes"]
    source = torch.ones(moved, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy = seconds(lambda: target.copy_(source), repeat=5)
    title = (
        f"trainer TP{trainer_tensor} -> engine TP{engine_tensor}, {moved / 1e9:.3f} GB; median of {repeat}"
    )
    columns = ("method", "seconds|.3f", "GB/s|.2f", "first time, s|.2f", "trainer rank, MB|.0f")
    table = report.table(*columns, "engine worker, MB|.0f", "phases", ratio="seconds", title=title)
    table.row("copy in memory", copy, moved / 1e9 / copy, None, None, None, "")
    for method, row in rows.items():
        total = sum(row["phases"].values())
        phases = ", ".join(f"{phase} {spent:.3f}" for phase, spent in row["phases"].items())
        grown = (row["trainer"] / 1e6, row["worker"] / 1e6)
        table.row(method, total, moved / 1e9 / total, row["first"], *grown, phases)


def _measure(
    trainers: PublishingRanks, engine: Engine, method: str, repeat: int, work: Path
) -> dict[str, Any]:
    """Seconds of each phase, bytes and growth of memory of a method."""
    pids = {
        "trainer": trainers.tell("pid"),
        "worker": [answer["pid"] for answer in engine.rpc("rpg_version")],
    }
    times: list[dict[str, float]] = []
    grown = dict.fromkeys(pids, 0)
    moved = 0

    def sizes() -> dict[str, list[int]]:
        return {role: [memory_of(pid, "RssAnon") for pid in group] for role, group in pids.items()}

    for _ in range(repeat + 1):
        before = sizes()
        with Watch(sizes, every=0.005) as watch:
            if method == "disk":
                times.append(_reload(trainers, engine, work / "exported"))
            else:
                phases, moved = _sync(trainers, engine, method, len(times) + 1 + 1000 * METHODS.index(method))
                times.append(phases)
        for role in pids:
            for _, sample in watch.samples:
                growth = max(now - then for now, then in zip(sample[role], before[role], strict=True))
                grown[role] = max(grown[role], growth)
    phases = {phase: statistics.median(t[phase] for t in times[1:]) for phase in times[0]}
    return {"first": sum(times[0].values()), "phases": phases, "bytes": moved, **grown}


def _sync(
    trainers: PublishingRanks, engine: Engine, transport: str, version: int
) -> tuple[dict[str, float], int]:
    """One sync through the bridge: seconds of its phases, bytes."""
    start = time.perf_counter()
    manifest = trainers.tell((transport, version))[0]
    publish = time.perf_counter() - start
    options: dict[str, Any] = {"version": version, "engine_tensor": engine.tensor, "timeout": 600}
    report = asyncio.run(sync_engine(engine.post, manifest, **options))
    trainers.tell("done")
    return {"publish": publish, **report.seconds}, sum(report.bytes_per_worker)


def _reload(trainers: PublishingRanks, engine: Engine, folder: Path) -> dict[str, float]:
    """The trainers export a checkpoint, the engine loads it as vLLM does: seconds of both."""
    write = seconds(lambda: trainers.tell(("disk", folder)))
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    start = time.perf_counter()
    for path, body in (
        ("/pause?mode=keep", None),
        ("/collective_rpc", reload),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/resume", None),
    ):
        status, text = engine.call("POST", path, body, 600)
        if status != 200:
            raise SystemExit(f"{path} answered {status}: {text[:300]}")
    return {"write": write, "reload": time.perf_counter() - start}


# -- a trainer rank ------------------------------------------------------------------------------------------


def _rank(
    rank: int, commands: Any, answers: Any, world: int, shape: ModelShape, work: Path, bridge: Path
) -> None:
    """One tensor-parallel rank: answers each command, until None comes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=world)
    layout, placement = mapping_for(shape), RankCoordinates(rank, world, rank, 0, 0, 0, 128)
    layers = range(shape.num_layers)
    shapes = layout.stage_params(placement, layers=layers, first=True, last=True)
    params = {n: torch.randn(s).mul_(0.02).to(DTYPE) for n, s in shapes.items()}
    cut = (placement, params, layout, DTYPE)
    publishers = {
        "process_group": GroupPublisher("127.0.0.1", *cut, timeout=120, bucket_bytes=64 << 20),
        "shared_memory": SharedMemoryPublisher(bridge, *cut),
    }
    while (command := commands.get()) is not None:
        if command == "pid":
            answers.put((rank, os.getpid()))
            continue
        kind, argument = command
        if kind == "disk":
            export_hf(argument, work / "model", params, layout, placement, dtype=DTYPE, replace=True)
        else:
            with published(publishers[kind], argument) as manifest:
                answers.put((rank, manifest))
                commands.get()  # the engine is done
        answers.put((rank, None))
    os._exit(0)


if __name__ == "__main__":
    main(__doc__, bridge)
