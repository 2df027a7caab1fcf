"""The process of test_update_calls: what the host asks of a fake GPU in an update, by its parts.

``python update_calls_worker.py FOLDER TENSOR [SHAPE]``: so many tensor-parallel ranks. Parts are differences
of two updates: a model of two layers less one of one layer, and so on. SHAPE: a key of
benchmarks.policies.SHAPES, whose whole update is counted too: four micro-batches of eight chunks each.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.policies import SHAPES, batch_of
from rpg_megatron.config import Settings
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.policy import logprobs
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.microbatch import TeacherRow, TeacherTop
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support import fake_cuda

CHUNK, TOP = 32, 8
"""Tokens whose logits are computed at once; likeliest tokens of a teacher."""
SINGLE = ("gather", "scatter_", "scatter_add_")
"""Operations on a few logits of each token."""
PRODUCTS = ("mm", "addmm", "addmm_")
NO_KERNEL = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "_unsafe_view", "device")
DISTIL = {"type": "distil", "reward": 1.0}
HEADS: dict[str, dict[str, Any]] = {
    "log-probs": {},
    "entropy bonus": {"objective": {"entropy_bonus": 0.01}},
    "rkl": {"teacher": {"path": "/"}, "objective": {**DISTIL, "form": "full"}},
    "fkl": {"teacher": {"path": "/"}, "objective": {**DISTIL, "form": "full", "divergence": "fkl"}},
    "likeliest": {
        "teacher": {"url": "http://unused/v1", "top_k": 8},
        "objective": {**DISTIL, "form": "top_k"},
    },
}


def is_view(func: Any) -> bool:
    """Whether an operation returns a view of an argument and writes nothing."""
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


class Calls(TorchDispatchMode):
    """Counts torch's operations, views included; those that are kernels on a GPU; kernels that read or write
    all logits of a chunk, without products (passes); and messages to other ranks.

    A function that a GPU would compile is one of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.compiled = False
        self.logits = torch.Size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts["messages"] += 1
        elif func.namespace == "aten" and not self.compiled:  # the others are fake tensors'
            self.counts["calls"] += 1
            name = func.overloadpacket.__name__
            kernel = not is_view(func) and name not in NO_KERNEL
            self.counts["kernels"] += kernel
            if kernel and name not in (*PRODUCTS, *SINGLE):
                self.counts["passes"] += self.logits in [getattr(x, "shape", None) for x in args]
        return func(*args, **(kwargs or {}))


CALLS = Calls()


def compiled(function: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
    """In place of ``logprobs._fused``."""

    def call(*inputs: Any) -> Any:
        CALLS.counts.update(calls=1, kernels=1, passes=1)
        CALLS.compiled = True
        try:
            return function(*inputs)
        finally:
            CALLS.compiled = False

    return call


@contextmanager
def counted() -> Iterator[Counter[str]]:
    result: Counter[str] = Counter()
    recorder = fake_cuda.RECORDER
    before, waits = CALLS.counts.copy(), Counter(recorder.waits)
    with CALLS:
        yield result
    result.update(CALLS.counts - before)
    result["waits"] = sum((recorder.waits - waits).values())


class Update:
    """Updates of a policy; more: its settings."""

    def __init__(self, mesh: Mesh, shape: ModelShape, more: dict[str, Any]) -> None:
        self.settings, self.shape = settings_of(mesh.tensor, more), shape
        self.policy = Policy(self.settings, self.shape, mesh, torch.device("cuda", 0), lambda _: None)
        self.run(1, 1)  # the first makes what later ones keep, and learns the names of the metrics

    def teacher(self, places: int) -> TeacherRow | TeacherTop | None:
        s = self.settings
        if s.full_divergence is not None:
            weight = next(p.detach() for n, p in self.policy.named_parameters() if "embedding" in n)
            hidden = torch.empty(places, weight.size(1), dtype=weight.dtype, pin_memory=True)
            return TeacherRow(hidden, weight, s.full_divergence)
        if s.top_divergence is not None:
            ids = torch.zeros(places, TOP, dtype=torch.int64, device="cuda")
            known = torch.ones(places, dtype=torch.bool, device="cuda")
            return TeacherTop(ids, torch.empty(places, TOP, device="cuda"), known, s.top_divergence)
        return None

    def run(self, number: int, chunks: int) -> Counter[str]:
        """An update of so many micro-batches of so many chunks."""
        batch = batch_of([chunks * CHUNK + 1], self.shape.vocab_size)
        for t in batch:
            t.old = t.anchor = t.behaviour
        packed = self.policy.pack(batch)
        rows = [replace(packed, teacher=self.teacher(packed.tokens.size(1)))] * number
        CALLS.logits = torch.Size([CHUNK, self.shape.vocab_size // self.settings.parallel.tensor])
        loss, aggregator = build_loss(self.settings), build_aggregator(self.settings)
        with self.policy.updating(), counted() as calls:
            self.policy.update(rows, loss, aggregator, lr=1e-6)
        return calls


def less(more: Counter[str], fewer: Counter[str]) -> dict[str, int]:
    return {name: more[name] - fewer[name] for name in more.keys() | fewer.keys()}


def settings_of(tensor: int, more: dict[str, Any]) -> Settings:
    base = {"model": {"path": "-"}, "data": {"path": "-"}, "device": "cuda"}
    base |= {"training": {"minibatches": 1, "logprob_chunk": CHUNK}, "memory": {"recompute": "none"}}
    base |= {"precision": {"dtype": "bfloat16"}, "parallel": {"tensor": tensor, "sequence": tensor > 1}}
    return Settings.model_validate(base | more)


def count(mesh: Mesh, whole: list[str]) -> dict[str, Any]:
    two = replace(SHAPES["tiny"], num_layers=2, num_heads=4, num_kv_heads=2)
    one = replace(two, num_layers=1)
    small, large = (Update(mesh, shape, {}) for shape in (one, two))
    result: dict[str, Any] = {
        "layer": less(large.run(1, 1), small.run(1, 1)),
        "micro-batch": less(small.run(2, 1), small.run(1, 1)),
        "update": small.run(1, 1),
    }
    for name, more in HEADS.items():
        update = Update(mesh, one, more)
        result[f"chunk: {name}"] = less(update.run(1, 3), update.run(1, 2))
    for name in whole:
        result[f"whole: {name}"] = Update(mesh, SHAPES[name], {}).run(4, 8)
    return result


def main() -> None:
    folder, tensor, whole = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    gc.disable()  # the process ends soon
    with fake_cuda.fake_cuda(0, tensor):
        logprobs._fused, logprobs.FUSE = compiled, True
        start_process_group(start_device("cuda"))
        fake_cuda.flags_are_set[0] = False
        result = count(start_mesh(settings_of(tensor, {}).parallel), whole)
    result["faults"] = fake_cuda.RECORDER.faults
    (folder / "result.json").write_text(json.dumps(result))
    fake_cuda.leave()


if __name__ == "__main__":
    main()
