"""One of the two ranks of test_two_gpus, and the reader that stands for an engine's worker.

``two_gpus_worker FOLDER DEVICE``: a rank (RANK, WORLD_SIZE, ... in the environment); DEVICE is "cuda", or
"cpu" to try the script itself. ``two_gpus_worker FOLDER read DEVICE TOLD``: a reader, started by rank 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.policies import SHAPES
from rpg_megatron.bridge.publisher import node_name
from rpg_megatron.bridge.transports.cuda_ipc import CudaIpcPublisher, gpu_of
from rpg_megatron.bridge.transports.mapped_reader import ShardReader
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.process_group_reader import GroupReader
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.system.collectives import broadcast_object, gather_objects

WAIT_SECONDS = 4.0
"""Seconds for which rank 1 waits for rank 0."""
READER_SECONDS = 120.0
LAYOUT = mapping_for(SHAPES["tiny"])


def wait_for_first(device: torch.device) -> dict[str, Any]:
    """Rank 1 waits for rank 0, as while responses are sampled: is its GPU free meanwhile?

    Another thread of rank 1 puts a little work on the default stream and measures its duration.
    """
    result: dict[str, Any] = {}

    def look() -> None:
        time.sleep(WAIT_SECONDS / 4)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        began = time.monotonic()
        work = torch.ones(1 << 20, device=device)
        work.mul_(2).sum().item()
        result["work"] = time.monotonic() - began
        # Over the second before it is asked; what the work itself took is a millionth of that.
        time.sleep(WAIT_SECONDS / 2)
        result["busy"] = utilization(device)

    looking = threading.Thread(target=look)
    if dist.get_rank() == 0:
        time.sleep(WAIT_SECONDS)
    else:
        looking.start()
    began = time.monotonic()
    broadcast_object("go on")
    result["waited"] = time.monotonic() - began
    if looking.ident is not None:
        looking.join()
    return result


def utilization(device: torch.device) -> int | None:
    """Percent of the last second in which kernels ran on the GPU; None if the driver does not report it."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    if device.type == "cpu":
        return None
    output = subprocess.run(
        [*query, "-i", f"GPU-{gpu_of(device)}"], capture_output=True, text=True, check=False
    )
    return int(output.stdout) if output.stdout.strip().isdigit() else None


def parameters(place: RankCoordinates, device: torch.device) -> dict[str, torch.Tensor]:
    """Random weights of one rank: the same on ranks that hold the same."""
    generator = torch.Generator().manual_seed(place.tensor_rank)
    shapes = LAYOUT.stage_params(place, layers=range(LAYOUT.shape.num_layers), first=True, last=True)
    return {n: torch.randn(s, generator=generator).to(device, torch.bfloat16) for n, s in shapes.items()}


def publish(publisher: Any, folder: Path, readers: list[tuple[str, str]]) -> list[Any]:
    """Two versions, as ``training/weight_sync`` publishes them: rank 0 lets engines read, the others wait.

    readers: device and node of each reader. Returns what each of them read, in both versions.
    """
    reads: list[Any] = []
    for version in (1, 2):
        manifest = publisher.publish(version)
        if manifest is not None:
            sums = {name: manifest.checksum(name) for name in manifest.tensors}
            for device, node in readers:
                request = json.dumps([manifest.transport, manifest.place, version, node])
                command = [sys.executable, __file__, str(folder), "read", device, request]
                done = subprocess.run(command, capture_output=True, text=True, timeout=READER_SECONDS)
                assert done.returncode == 0, done.stderr[-3000:]
                read_sums, ranks_read = json.loads(done.stdout.splitlines()[-1])
                assert read_sums == sums
                reads.append({"device": device, "ranks_read": ranks_read})
        broadcast_object("read")
        publisher.retract()
    publisher.close()
    return reads


def read(folder: Path, device: torch.device, request: str) -> None:
    """Read a whole publication; prints each tensor's sum, and which ranks it was read from."""
    transport, place, version, node = json.loads(request)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    reader: Any = (
        ShardReader(folder / "bridge", gpu_of(device))
        if transport == "cuda_ipc"
        else GroupReader(device, node=node)
    )
    boxes = [(n, Box.whole(t.shape)) for n, t in reader.open(place, version).tensors.items()]
    summed = reader.check(boxes)
    reader.begin()
    for name, _ in boxes:
        reader.whole(name)
    sums = reader.end() | summed
    ranks = sorted({rank for name, _ in boxes for rank in reader.ranks_read(name)})
    print(json.dumps([{name: sums[name][0] for name, _ in boxes}, ranks]))
    reader.close()


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    if kind == "read":
        read(folder, torch.device(sys.argv[3]), sys.argv[4])
        return
    device = start_device(kind)
    start_process_group(device)
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1, device=device))  # NCCL is at work before anything is measured
    default: Any = dist.group.WORLD
    results: dict[str, Any] = {"bound": str(default.bound_device_id), "wait": wait_for_first(device)}

    bridge = folder / "bridge"
    if rank == 0:
        bridge.mkdir(mode=0o700)
    broadcast_object(None)
    # Colocated: the reader shares the first rank's GPU, and links go through host memory. With a third GPU,
    # another reader is there, over NCCL.
    count = torch.cuda.device_count() if kind == "cuda" else 0
    place = RankCoordinates(
        rank=rank, tensor=2, tensor_rank=rank, pipeline_rank=0, data_rank=0, context_rank=0, vocab_multiple=16
    )
    for name, reader, colocated in (("host", 0, bridge), ("nccl", 2, None))[: 2 if count > 2 else 1]:
        publisher = GroupPublisher(
            os.environ["MASTER_ADDR"],
            place,
            parameters(place, device),
            LAYOUT,
            torch.bfloat16,
            timeout=60.0,
            bucket_bytes=1 << 20,
            colocated_in=colocated,
        )
        where = f"cuda:{reader}" if kind == "cuda" else "cpu"
        node = node_name(bridge.resolve()) if colocated else ""
        results[name] = publish(publisher, folder, [(where, node)])
    if kind == "cuda":
        place = RankCoordinates(
            rank=rank,
            tensor=1,
            tensor_rank=0,
            pipeline_rank=0,
            data_rank=rank,
            context_rank=0,
            vocab_multiple=1,
        )
        replicas = CudaIpcPublisher(bridge, place, parameters(place, device), LAYOUT, torch.bfloat16)
        results["ipc"] = publish(replicas, folder, [("cuda:0", ""), ("cuda:1", "")])
    everyone = gather_objects(results)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
