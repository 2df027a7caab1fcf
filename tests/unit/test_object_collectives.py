"""No object collective and no barrier of the package uses the default process group.

Why: on GPUs that group is NCCL's. Objects would take memory on the GPU, on the first one if a thread has set
no other, and ranks that wait would wait in a kernel, on GPUs that engines share. They belong to a gloo group,
which each call has to name. Not covered: which group it is that a call names, and calls of Megatron's own;
the runs on fake GPUs (tests/distributed/test_fake_cuda) see both.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rpg_megatron"
COLLECTIVES = {
    "all_gather_object",
    "barrier",
    "broadcast_object_list",
    "gather_object",
    "monitored_barrier",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


TORCH = {"torch.distributed", "torch.distributed.distributed_c10d"}


def without_group(source: str) -> list[int]:
    """Lines of a module that call torch's object collectives and name no group."""
    tree = ast.parse(source)
    modules, names = set(TORCH), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.asname and a.name in TORCH}
        elif isinstance(node, ast.ImportFrom):
            for a in node.names:
                if f"{node.module}.{a.name}" in TORCH:
                    modules.add(a.asname or a.name)
                elif node.module in TORCH and a.name in COLLECTIVES:
                    names.add(a.asname or a.name)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute):
            module = ast.unparse(called.value).removesuffix(".distributed_c10d")
            ours = module in modules and called.attr in COLLECTIVES
        else:
            ours = isinstance(called, ast.Name) and called.id in names
        group = next((k.value for k in node.keywords if k.arg == "group"), None)
        if ours and (group is None or (isinstance(group, ast.Constant) and group.value is None)):
            found.append(node.lineno)
    return sorted(found)


def test_every_object_collective_names_its_group() -> None:
    found = [
        f"{file.relative_to(PACKAGE.parent)}:{line}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line in without_group(file.read_text(encoding="utf-8"))
    ]
    assert not found, f"object collectives over the default process group: {', '.join(found)}"


def test_calls_are_found_however_they_are_spelled() -> None:
    source = """
import torch
import torch.distributed as dist
from torch import distributed as td
from torch.distributed import broadcast_object_list, barrier as meet
from rpg_megatron.system.collectives import gather_on_first
dist.all_gather_object(out, 1)
td.gather_object(1, out, dst=0, group=None)
torch.distributed.scatter_object_list(out, given)
broadcast_object_list(box, src=0)
meet()
dist.distributed_c10d.barrier()
dist.barrier(group=control)
dist.all_reduce(x)
gather_on_first(1)
other.barrier()
"""
    assert without_group(source) == [7, 8, 9, 10, 11, 12]
