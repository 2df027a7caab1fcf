"""How long new weights take from the trainers into an engine, and what memory that takes, against two other
methods.

``python -m benchmarks.bridge`` makes a random bfloat16 model of Qwen2.5-0.5B's shape (988 MB), cuts it over
trainer ranks as Megatron does (no training, so no Megatron), starts one real vLLM engine, and syncs it by
shared memory and by process group. In the same run and with the same engine:

- *gather*: all ranks send what they have to rank 0, which hands full tensors over in shared memory, and the
  engine loads them with vLLM's own ``reload_weights``;
- *disk*: the ranks export a Hugging Face checkpoint and the engine reloads that.

Times are medians, after one sync that is not counted (it makes the plan). Ratios are to copying as many bytes
once, from memory to memory, on one core of the same machine. Memory is private memory (RssAnon) above what
the process had before, sampled 200 times a second; engines keep freed memory for the next sync, so theirs
appears in the first method only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

from rpg_megatron.bridge.controller import sync_engine
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.publisher import published
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.config import Settings
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.engine.process import EngineProcess, engine_socket
from rpg_megatron.models.placement import RankCoordinates, RankShards, assign_owners
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.collectives import gather_objects

SHAPE = ModelShape(
    family="qwen2",
    num_layers=24,
    hidden_size=896,
    ffn_hidden_size=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=151936,
    tied_embeddings=True,
    qk_norm=False,
    qkv_bias=True,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_positions=2048,
    dtype="bfloat16",
)
DTYPE = torch.bfloat16
BUCKET = 64 << 20


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trainer-tensor", type=int, default=2)
    parser.add_argument("--engine-tensor", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SHAPE.num_layers, help="fewer for a quick look")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    shape = replace(SHAPE, num_layers=options.layers)
    with workplace() as (work, bridge):
        model = work / "model"
        write_model(model, shape)
        asyncio.run(measure(options, shape, model, work, bridge))


@contextmanager
def workplace() -> Iterator[tuple[Path, Path]]:
    """A folder on disk and one in shared memory, gone afterwards."""
    work, bridge = (
        Path(tempfile.mkdtemp(prefix="rpg-")),
        Path(tempfile.mkdtemp(prefix="rpg-", dir="/dev/shm")),
    )
    try:
        yield work, bridge
    finally:
        shutil.rmtree(work)
        shutil.rmtree(bridge)


def write_model(folder: Path, shape: ModelShape) -> None:
    """A random checkpoint."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(size, generator=generator) * 0.02).to(DTYPE)
        for name, size in mapping_for(shape).hf_tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


# -- trainers ------------------------------------------------------------------------------------------------


def trainer_rank(
    rank: int, world: int, shape: ModelShape, place: tuple[Path, Path, Path], commands: Any, answers: Any
) -> None:
    """One tensor-parallel rank: does as it is told until the word is None."""
    model, work, bridge = place
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=world)
    layout = mapping_for(shape)
    placement = RankCoordinates(rank, world, rank, 0, 0, 0, 128)
    shapes = layout.stage_params(
        layers=range(shape.num_layers), first=True, last=True, tensor=world, vocab_multiple=128
    )
    generator = torch.Generator().manual_seed(rank)
    params = {n: (torch.randn(s, generator=generator) * 0.02).to(DTYPE) for n, s in shapes.items()}
    publishers = {
        "process_group": GroupPublisher(
            "127.0.0.1", placement, params, layout, DTYPE, timeout=120, bucket_bytes=BUCKET
        ),
        "shared_memory": SharedMemoryPublisher(bridge, placement, params, layout, DTYPE),
    }
    answers.put((rank, os.getpid()))
    while (command := commands.get()) is not None:
        kind, argument = command
        if kind == "gather":
            gather_to_file(argument, layout, placement, params)
            answers.put((rank, None))
        elif kind == "disk":
            export_hf(argument, model, params, layout, placement, dtype=DTYPE, replace=True)
            answers.put((rank, None))
        else:
            with published(publishers[kind], argument) as manifest:
                answers.put((rank, manifest))
                commands.get()  # the engine is done
            answers.put((rank, None))
    os._exit(0)


def gather_to_file(
    file: Path, layout: Any, placement: RankCoordinates, params: dict[str, torch.Tensor]
) -> None:
    """Send everything to rank 0, which puts full tensors together and writes them to a file."""
    holding = RankShards(placement, tuple((n, tuple(p.shape)) for n, p in params.items()))
    sources = assign_owners(layout, gather_objects(holding, RankShards))
    full = {}
    for name, size in layout.hf_tensors().items():
        if placement.rank == 0:
            full[name] = torch.empty(size, dtype=DTYPE)
        for source in sources[name]:
            piece = source.piece
            if source.rank == placement.rank:
                values = params[source.param][piece.local.slices()].contiguous()
                if placement.rank == 0:
                    full[name][piece.hf.slices()] = values
                else:
                    dist.send(values, 0)
            elif placement.rank == 0:
                values = torch.empty(piece.hf.extent, dtype=DTYPE)
                dist.recv(values, source.rank)
                full[name][piece.hf.slices()] = values
    if placement.rank == 0:
        save_file(full, file, metadata={"format": "pt"})


class Trainers:
    """The ranks, seen from the process that measures."""

    def __init__(self, world: int, shape: ModelShape, place: tuple[Path, Path, Path]) -> None:
        context = mp.get_context("spawn")
        self._commands, self._answers = [context.Queue() for _ in range(world)], context.Queue()
        self._processes = [
            context.Process(target=trainer_rank, args=(r, world, shape, place, q, self._answers), daemon=True)
            for r, q in enumerate(self._commands)
        ]
        for p in self._processes:
            p.start()
        self.pids = [pid for _, pid in self._hear()]

    def _hear(self) -> list[tuple[int, Any]]:
        return sorted((self._answers.get(timeout=600) for _ in self._processes), key=lambda a: a[0])

    def tell(self, *command: Any) -> list[Any]:
        """The same to all ranks; their answers in order."""
        for q in self._commands:
            q.put(command)
        return [answer for _, answer in self._hear()]

    def stop(self) -> None:
        """End the ranks."""
        for q in self._commands:
            q.put(None)
        for p in self._processes:
            p.join(20)


# -- memory --------------------------------------------------------------------------------------------------


class Memory:
    """Watches the private memory of some processes while its block runs."""

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self._pids = pids

    def __enter__(self) -> Memory:
        self._before = {pid: private_bytes(pid) for pids in self._pids.values() for pid in pids}
        self._peak = dict(self._before)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            for pid in self._peak:
                self._peak[pid] = max(self._peak[pid], private_bytes(pid))

    def above(self, who: str) -> int:
        """Largest growth of any of these processes, in bytes."""
        return max(self._peak[p] - self._before[p] for p in self._pids[who])


def private_bytes(pid: int) -> int:
    """RssAnon of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


# -- measuring -----------------------------------------------------------------------------------------------


async def measure(
    options: argparse.Namespace, shape: ModelShape, model: Path, work: Path, bridge: Path
) -> None:
    """Start all, run every way in turn, print."""
    token = secrets.token_urlsafe(16)
    settings = Settings.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(model)},
            "data": {"path": "unused", "max_prompt_tokens": 32},
            "precision": {"dtype": "bfloat16"},
            "rollout": {"max_response_tokens": 32},
            "engine": {"tensor": options.engine_tensor, "max_sequences": 4, "kv_cache_gib": 0.25},
        }
    )
    engine = EngineProcess(
        settings,
        0,
        socket=engine_socket(work, 0),
        log=work / "engine.log",
        bridge_dir=bridge,
        token=token,
        weights="checkpoint",
    )
    engine.start()
    trainers = Trainers(options.trainer_tensor, shape, (model, work, bridge))
    client = EngineClient(0, engine.socket, token, timeout=600)
    try:
        await asyncio.to_thread(engine.wait_healthy)
        _, text = await client.post("/collective_rpc", {"method": "rpg_version"})
        workers = [int(r["pid"]) for r in json.loads(text)["results"]]
        pids = {"trainers": trainers.pids, "workers": workers}
        rows = await all_ways(options, trainers, client, pids, work, bridge)
    finally:
        await client.close()
        trainers.stop()
        engine.stop()
    report(options, shape, rows, memcpy_seconds(rows))


async def all_ways(
    options: argparse.Namespace,
    trainers: Trainers,
    client: EngineClient,
    pids: dict[str, list[int]],
    work: Path,
    bridge: Path,
) -> dict[str, dict[str, Any]]:
    """Figures of each way: seconds by phase, bytes and memory."""
    rows: dict[str, dict[str, Any]] = {}
    version = 0
    for way in ("shared_memory", "process_group", "gather", "disk"):
        times: list[dict[str, float]] = []
        most = dict.fromkeys(pids, 0)
        for attempt in range(options.repeat + 1):
            version += 1
            print(f"{way}: {attempt} of {options.repeat}", end="\r", flush=True)
            with Memory(pids) as memory:
                if way in ("gather", "disk"):
                    file = bridge / "full" if way == "gather" else work / "exported"
                    found, moved, checked = await reload_way(trainers, client, way, file), 0, 0
                else:
                    found, moved, checked = await sync_way(
                        trainers, client, way, version, options.engine_tensor
                    )
            times.append(found)
            for who in pids:
                most[who] = max(most[who], memory.above(who))
        rows[way] = {
            "first": sum(times[0].values()),
            "phases": {p: statistics.median(t[p] for t in times[1:]) for p in times[0]},
            "moved": moved,
            "checked": checked,
            "trainer": most["trainers"],
            "worker": most["workers"],
        }
    return rows


async def sync_way(
    trainers: Trainers, client: EngineClient, transport: str, version: int, workers: int
) -> tuple[dict[str, float], int, int]:
    """One sync through the bridge."""
    start = time.perf_counter()
    answers = await asyncio.to_thread(trainers.tell, transport, version)
    publish = time.perf_counter() - start
    manifest: Manifest = answers[0]
    report = await sync_engine(client.post, manifest, version=version, engine_tensor=workers, timeout=600)
    await asyncio.to_thread(trainers.tell, "done", None)
    return {"publish": publish, **report.seconds}, sum(report.bytes_per_worker), sum(report.bytes_checked)


async def reload_way(trainers: Trainers, client: EngineClient, way: str, place: Path) -> dict[str, float]:
    """One of the other ways: the trainers write full tensors, the engine loads them as vLLM does."""
    start = time.perf_counter()
    if way == "gather":
        place.mkdir(exist_ok=True)
        await asyncio.to_thread(trainers.tell, "gather", place / "model.safetensors")
    else:
        await asyncio.to_thread(trainers.tell, "disk", place)
    write = time.perf_counter() - start
    start = time.perf_counter()
    for path, body in (
        ("/pause?mode=keep", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/resume", None),
    ):
        status, text = await client.post(path, body, 600)
        if status != 200:
            raise RuntimeError(f"{path} answered {status}: {text[:300]}")
    return {"write": write, "reload": time.perf_counter() - start}


def memcpy_seconds(rows: dict[str, dict[str, Any]]) -> float:
    """Seconds to copy as many bytes as a sync moves, from memory to memory, once."""
    source = torch.ones(rows["shared_memory"]["moved"], dtype=torch.uint8)
    target = torch.zeros_like(source)
    return statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))


def timed(work: Callable[[], object]) -> float:
    """Wall seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(
    options: argparse.Namespace, shape: ModelShape, rows: dict[str, dict[str, Any]], memcpy: float
) -> None:
    """Print the tables."""
    moved = rows["shared_memory"]["moved"]
    print(
        f"trainer TP{options.trainer_tensor} -> engine TP{options.engine_tensor}, {shape.num_layers} layers, "
        f"{moved / 1e9:.3f} GB bfloat16; median of {options.repeat}; memcpy {memcpy:.3f} s"
    )
    print(
        "| way | seconds | x memcpy | GB/s | first time, s | trainer rank, MB | engine worker, MB | phases |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for way, row in rows.items():
        total, first = sum(row["phases"].values()), row["first"]
        phases = ", ".join(f"{p} {s:.3f}" for p, s in row["phases"].items())
        print(
            f"| {way} | {total:.2f} | {total / memcpy:.1f} | {moved / 1e9 / total:.2f} | {first:.2f} | "
            f"{row['trainer'] / 1e6:.0f} | {row['worker'] / 1e6:.0f} | {phases} |"
        )
    for way in ("shared_memory", "process_group"):
        row = rows[way]
        print(f"{way}: {row['moved']} bytes into the model, {row['checked']} read beforehand to check them")


if __name__ == "__main__":
    main()
