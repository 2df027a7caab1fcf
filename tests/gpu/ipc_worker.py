"""The processes of test_cuda_ipc: a trainer that publishes, and a reader as an engine has one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from rpg_megatron.models.boxes import Box
from rpg_megatron.models.registry import mapping_for


def publish(folder: Path) -> None:
    from benchmarks.policies import SHAPES, build, start

    device, mesh = start("cuda")
    from rpg_megatron.bridge.transports.cuda_ipc import CudaIpcPublisher
    from rpg_megatron.models.partition import RankCoordinates

    shape = SHAPES["tiny"]
    policy = build(shape, mesh, device, "bf16")
    bridge = folder / "bridge"
    bridge.mkdir(mode=0o700)
    place = RankCoordinates(
        rank=0, tensor=1, tensor_rank=0, pipeline_rank=0, data_rank=0, context_rank=0, vocab_multiple=1
    )
    params = policy.served.tensors
    publisher = CudaIpcPublisher(bridge, place, params, mapping_for(shape), torch.bfloat16)
    command = [sys.executable, "-m", "tests.gpu.ipc_worker", str(folder), "read"]
    for version in (1, 2):
        with torch.no_grad():
            for p in params.values():
                p.normal_()
        manifest = publisher.publish(version)
        assert manifest is not None
        request = json.dumps([manifest.place, version, {n: manifest.checksum(n) for n in manifest.tensors}])
        subprocess.run([*command, request], check=True, env=os.environ)
        weights = {name: p.detach().cpu() for name, p in params.items()}
        save_file(weights, folder / f"wanted_{version}.safetensors")
        publisher.retract()
    publisher.close()
    (folder / "result.json").write_text("true")


def read(folder: Path, request: str) -> None:
    from rpg_megatron.bridge.transports.mapped_reader import ShardReader

    place, version, sums = json.loads(request)
    reader = ShardReader(folder / "bridge")
    manifest = reader.open(place, version)
    boxes = [(name, Box.whole(tensor.shape)) for name, tensor in manifest.tensors.items()]
    sums_read = reader.check(boxes)
    assert {name: total for name, (total, _) in sums_read.items()} == sums
    reader.begin()
    save_file({name: reader.whole(name).cpu() for name, _ in boxes}, folder / f"read_{version}.safetensors")
    reader.end()
    reader.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        read(Path(sys.argv[1]), sys.argv[3])
    else:
        publish(Path(sys.argv[1]))
