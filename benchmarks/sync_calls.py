"""What a weight sync costs the sampler's process: its calls to all engines, and the comparison of checksums.

    python -m benchmarks.sync_calls [--engines 256] [--workers 8] [--repeat 5]

The engine pool, the controller and the HTTP client are the product's; the manifest is that of a model of
Qwen3-32B's shape (707 tensors), published by TP8 x PP8. The stand-ins are sockets of one other process, which
answer at once like an engine whose workers have read everything. No weights are moved. CPU seconds are of the
sampler's process, and do not depend much on what else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from rpg_megatron.bridge.manifest import Manifest, PublishedBox, PublishedTensor, Shard
from rpg_megatron.bridge.vllm.sync_route import SYNC, StepsDone, sum_acks
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.config.rollout import EngineSettings
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.engine.process import engine_socket
from rpg_megatron.models.placement import RankCoordinates, RankShards, assign_owners
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.rollout.engine_pool import EnginePool

SHAPE = ModelShape(
    family="qwen3",
    num_layers=64,
    hidden_size=5120,
    ffn_hidden_size=25600,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    tied_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_positions=40960,
    dtype="bfloat16",
)
TENSOR, PIPELINE = 8, 8


def main() -> None:
    """Sync the stand-ins several times and print CPU and wall seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8, help="of each engine")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.serve:
        asyncio.run(serve(a.serve, a.engines, a.workers))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.sync_calls", *sys.argv[1:], "--serve", folder]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            server.stdout.readline()
            asyncio.run(measure(Path(folder), a))
        finally:
            server.kill()
            server.wait()


def make_manifest() -> Manifest:
    """What the ranks publish; the checksums are made up, and the same in both processes."""
    mapping, numbers = mapping_for(SHAPE), random.Random(0)
    layers = SHAPE.num_layers // PIPELINE
    ranks = []
    for rank in range(TENSOR * PIPELINE):
        stage, tensor_rank = divmod(rank, TENSOR)
        params = mapping.stage_params(
            layers=range(stage * layers, (stage + 1) * layers),
            first=stage == 0,
            last=stage == PIPELINE - 1,
            tensor=TENSOR,
            vocab_multiple=128,
        )
        place = RankCoordinates(rank, TENSOR, tensor_rank, stage, 0, 0, 128)
        ranks.append(RankShards(place, tuple(params.items())))
    tensors = {
        name: PublishedTensor(
            "bfloat16",
            mapping.hf_tensors()[name],
            tuple(
                PublishedBox(s.rank, 0, s.piece.hf.extent, s.piece.local, s.piece.hf, numbers.getrandbits(64))
                for s in owners
            ),
        )
        for name, owners in assign_owners(mapping, ranks).items()
    }
    place = {"address": "10.0.0.1", "port": 29500, "secret": "s" * 22, "timeout": 120.0, "backend": "nccl"}
    shards = tuple(Shard(rank, 1 << 30) for rank in range(len(ranks)))
    return Manifest("process_group", place, 0, shards, tensors)


async def measure(folder: Path, a: argparse.Namespace) -> None:
    """The engine pool's syncs; the first also connects."""
    manifest = make_manifest()
    clients = [EngineClient(i, engine_socket(folder, i), "token", timeout=600) for i in range(a.engines)]
    pool = EnginePool(EngineSettings(replicas=a.engines, tensor=a.workers), clients, folder)
    cpu, wall = [], []
    for version in range(a.repeat + 1):
        cpu.append(-time.process_time())
        wall.append(-time.monotonic())
        result = await pool.sync(manifest, version, resync=False)
        cpu[-1] += time.process_time()
        wall[-1] += time.monotonic()
        assert len(result.reports) == a.engines, result.refused
        assert all(len(report.bytes_per_worker) == a.workers for report in result.reports)
    boxes = sum(len(t.boxes) for t in manifest.tensors.values())
    print(f"{a.engines} engines of {a.workers} workers, {len(manifest.tensors)} tensors, {boxes} slices")
    typical = statistics.median(cpu[1:])
    print(
        f"a sync: {typical:.2f} s of CPU ({1e3 * typical / a.engines:.1f} ms an engine), "
        f"{statistics.median(wall[1:]):.2f} s; the first {cpu[0]:.2f} and {wall[0]:.2f} s"
    )
    for client in clients:
        await client.close()


async def serve(folder: Path, engines: int, workers: int) -> None:
    """The stand-ins: HTTP/1.1 on a unix socket each."""
    manifest, numbers = make_manifest(), random.Random(1)
    sums: list[dict[str, tuple[int, int]]] = [{} for _ in range(workers)]
    for name, tensor in manifest.tensors.items():
        whole = 2
        for size in tensor.shape:
            whole *= size
        rest = tensor.checksum
        for rank in range(workers):
            if len(tensor.shape) == 1:  # each worker reads all of it
                sums[rank][name] = tensor.checksum, whole
                continue
            part = rest if rank == workers - 1 else numbers.getrandbits(64)
            rest = (rest - part) % 2**64
            share = whole // workers + (whole % workers if rank == 0 else 0)
            sums[rank][name] = part, share

    def acks(phase: str) -> list[dict[str, Any]]:
        known = {"ok": True, "pid": 12345, "version": 1, "phase": phase, "transport": "process_group"}
        known |= {"session": "SESSION", "mode": "slices", "reason": "", "seconds": 0.123, "bytes": 1 << 33}
        return [
            {"rank": rank, **known, "sums": sums[rank] if phase == "apply" else {}} for rank in range(workers)
        ]

    def answer(steps: list[str]) -> bytes:
        done = StepsDone(
            {step: 0.1 for step in steps}, [{"rank": r, "unsettled": False} for r in range(workers)]
        )
        if steps[0] in ("check", "apply"):
            done = StepsDone({steps[0]: 0.1}, totals=sum_acks(acks(steps[0])))
        return msgspec.json.encode(done)

    answers: dict[str, bytes] = {}

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                _, _, length = head.partition("content-length:")
                body = await reader.readexactly(int(length.split()[0])) if length else b""
                out = b""
                if head.split()[1] == SYNC:
                    asked = json.loads(body)
                    key = str(asked["steps"])
                    answers[key] = answers.get(key) or answer(asked["steps"])
                    out = answers[key].replace(b"SESSION", asked["update_info"].get("session", "").encode())
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(out) + out)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    servers = [await asyncio.start_unix_server(connection, engine_socket(folder, i)) for i in range(engines)]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    main()
