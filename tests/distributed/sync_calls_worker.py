"""The process of test_sync_calls: what the hosts ask of two fake GPUs in a sync by CUDA IPC.

``python sync_calls_worker.py FOLDER MODEL...``: MODEL is a key of ``MODELS``. Writes the calls of a trainer
rank that publishes and of an engine worker that checks and loads, at the first sync and at the second.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.policies import SHAPES
from rpg_megatron.bridge.slice_table import TableCache
from rpg_megatron.bridge.transports import cuda_ipc, mapped_reader
from rpg_megatron.bridge.transports.mapped_reader import Copies, ShardReader
from rpg_megatron.config.model_shape import ExpertShape, ModelShape
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.device import start_device, start_process_group
from tests.support import fake_cuda

EXPERTS = {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_heads": 32,
    "num_kv_heads": 4,
    "tied_embeddings": False,
}
MODELS: dict[str, ModelShape] = {
    **{name: SHAPES[name] for name in ("0.6b", "4b", "8b")},
    "30b-a3b": replace(
        SHAPES["4b"], family="qwen3_moe", experts=ExpertShape(128, 8, 768, True, tuple(range(48))), **EXPERTS
    ),
}


class Calls(TorchDispatchMode):
    """Counts torch's operations, views of tensors included."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.namespace == "aten"  # not what fake tensors ask for
        return func(*args, **(kwargs or {}))


def measure(name: str, folder: Path) -> dict[str, Any]:
    shape, device = MODELS[name], torch.device("cuda", 0)
    mapping = mapping_for(shape)
    sizes = mapping.stage_params(ONE_RANK, layers=range(shape.num_layers), first=True, last=True)
    params = {n: torch.empty(s, dtype=torch.bfloat16, device=device) for n, s in sizes.items()}
    storages: list[torch.UntypedStorage] = []

    def export(storage: torch.UntypedStorage) -> tuple[str, str]:
        storages.append(storage)
        return "gpu", str(len(storages) - 1)

    def open_memory(copy: Any) -> torch.Tensor:
        return torch.empty(storages[int(copy.handle)].nbytes(), dtype=torch.uint8, device=device)

    cuda_ipc._export, mapped_reader.open_memory = export, open_memory
    bridge = folder / name
    bridge.mkdir(mode=0o700)
    place = ONE_RANK
    publisher = cuda_ipc.CudaIpcPublisher(bridge, place, params, mapping, torch.bfloat16)
    reader = ShardReader(bridge, "gpu")
    wanted = [(n, Box.whole(s)) for n, s in mapping.hf_tensors().items()]
    targets = [torch.empty(box.extent, dtype=torch.bfloat16, device=device) for _, box in wanted]
    copies = Copies(wanted, targets, lambda: targets, TableCache())
    result: dict[str, Any] = {"slices": len(wanted)}

    @contextmanager
    def counted(side: str) -> Iterator[None]:
        recorder = fake_cuda.RECORDER
        launches, waits = Counter(recorder.launches), Counter(recorder.waits)
        start = time.process_time()
        with Calls() as calls:
            yield
        result[side] = {
            "calls": calls.number,
            "launches": sum((recorder.launches - launches).values()),
            "waits": sum((recorder.waits - waits).values()),
            "seconds": time.process_time() - start,
        }

    for sync in ("first", "second"):
        version = int(sync == "second")
        with counted(f"trainer, {sync}"):
            manifest = publisher.publish(version)
        assert manifest is not None
        with counted(f"engine, {sync}"):
            reader.open(manifest.place, version)
            reader.check(wanted)
            reader.begin()
            reader.load(copies)
            reader.end()
        publisher.retract()
    result["faults"] = fake_cuda.RECORDER.faults
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    with fake_cuda.fake_cuda(0, 1):
        start_process_group(start_device("cuda"))
        results = {name: measure(name, folder) for name in sys.argv[2:]}
    (folder / "result.json").write_text(json.dumps(results))
    fake_cuda.leave()


if __name__ == "__main__":
    main()
