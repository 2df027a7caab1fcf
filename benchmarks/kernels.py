"""How many kernels a layer launches on a GPU, and the bytes that they read and write, counted without one.

On fake CUDA tensors (tests/support/fake_cuda.py): each operation of torch that writes a tensor is a kernel.
The layers are our local ones, as on a CPU; those of Transformer Engine, which GPUs use where it is installed,
do not run without a GPU. What fake tensors compute for attention step by step is left out: on a GPU it is one
kernel. So are the kernels of the optimizer's step, which do not grow with the tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.policies import SHAPES, batch_of
from benchmarks.setup import ROOT, Report, benchmark, main
from rpg_megatron.config import Settings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support import fake_cuda
from tests.support.ranks import free_port

PRODUCTS = ("mm", "addmm", "addmm_")
COPIES = ("copy_", "_to_copy", "clone", "cat")
NO_KERNEL = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
    "device",
)
_ATTENTION = ("bmm", "ones", "scalar_tensor")
KINDS = ("products", "copies", "other")
PHASES = ("pass", "update")


class Count(TorchDispatchMode):
    """Counts kernels, and the bytes of their arguments and results, by kind."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor) and x.is_cuda]
        square = any(set(x.shape[-2:]) <= {self._tokens - 1, self._tokens} for x in tensors if x.dim() > 1)
        long = any(x.numel() >= self._tokens - 1 for x in tensors)
        if long and not square and not is_view(func) and name not in (*NO_KERNEL, *_ATTENTION):
            kind = "products" if name in PRODUCTS else "copies" if name in COPIES else "other"
            self.kernels[kind] += 1
            self.bytes[kind] += sum({id(x): x.numel() * x.element_size() for x in tensors}.values())
        return out


def is_view(func: Any) -> bool:
    """Whether an operation returns a view of an argument and writes nothing."""
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@benchmark(tokens=64)
def kernels(report: Report, shape: Literal["4b", "8b", "tiny"] = "4b", tokens: int = 8192) -> None:
    """A layer's kernels in a scoring pass and in an update: of a model of two layers less those of one.

    One sequence of ``tokens``, bfloat16, no recomputation. KB a token: read and written.
    """
    counts = [_in_own_process(shape, layers, tokens) for layers in (1, 2)]
    table = report.table("phase", *KINDS, "all", "KB a token|.0f", title=f"one layer of {shape}")
    for phase in PHASES:
        one, two = (c[phase] for c in counts)
        numbers = [two["kernels"].get(kind, 0) - one["kernels"].get(kind, 0) for kind in KINDS]
        moved = sum(two["bytes"].values()) - sum(one["bytes"].values())
        table.row(phase, *numbers, sum(numbers), moved / tokens / 1000)


def _in_own_process(shape: str, layers: int, tokens: int) -> Any:
    """fake_cuda changes torch for good."""
    command = [sys.executable, "-m", "benchmarks.kernels", "--worker", shape, str(layers), str(tokens)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _work(name: str, layers: int, tokens: int) -> None:
    settings = Settings.model_validate(
        {
            "model": {"path": "-"},
            "data": {"path": "-"},
            "device": "cuda",
            "training": {"minibatches": 1, "tokens_per_microbatch": tokens},
            "memory": {"recompute": "none"},
        }
    )
    shape = replace(SHAPES[name], num_layers=layers)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with fake_cuda.fake_cuda(0, 1):
        device = start_device("cuda")
        start_process_group(device)
        policy = Policy(settings, shape, start_mesh(settings.parallel), device, lambda _: None)
        rows = [policy.pack(batch_of([tokens], shape.vocab_size))]
        loss, aggregator = build_loss(settings), build_aggregator(settings)
        results = {}
        for phase in PHASES:
            with policy.updating() if phase == "update" else nullcontext(), Count(tokens) as count:
                if phase == "update":
                    policy.accumulate(rows, loss, aggregator)
                else:
                    policy.logprobs(rows)
            results[phase] = {"kernels": count.kernels, "bytes": count.bytes}
        print(json.dumps(results), flush=True)
    fake_cuda.leave()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    main(__doc__, kernels)
