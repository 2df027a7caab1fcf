"""No module calls torch's object collectives, reads pickles, or has a barrier in the default process group.

Why: torch's object collectives unpickle what arrives over gloo, which has no authentication; ours
(``system/collectives``) do not. On GPUs the default group is NCCL's: ranks that wait there would wait in a
kernel, on GPUs that engines share. Not covered: which group it is that a barrier names, and calls of
Megatron's own; the runs on fake GPUs (tests/distributed/test_fake_cuda) see both.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rpg_megatron"
OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
BARRIERS = {"barrier", "monitored_barrier"}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
USES_PICKLES = {
    "checkpoints/megatron_writer.py": "writes the index of torch's format, which is one",
    "training/profiling.py": "writes one, which torch's memory_viz reads",
}
TORCH = {"torch.distributed", "torch.distributed.distributed_c10d"}


def collective_lines(source: str) -> list[int]:
    """Lines of a module that call torch's object collectives, or a barrier that names no group."""
    tree = ast.parse(source)
    modules, names = set(TORCH), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.asname and a.name in TORCH}
        elif isinstance(node, ast.ImportFrom):
            for a in node.names:
                if f"{node.module}.{a.name}" in TORCH:
                    modules.add(a.asname or a.name)
                elif node.module in TORCH and a.name in OBJECTS | BARRIERS:
                    names[a.asname or a.name] = a.name
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = None
        if isinstance(called, ast.Attribute):
            if ast.unparse(called.value).removesuffix(".distributed_c10d") in modules:
                name = called.attr
        elif isinstance(called, ast.Name):
            name = names.get(called.id)
        group = next((k.value for k in node.keywords if k.arg == "group"), None)
        default = group is None or (isinstance(group, ast.Constant) and group.value is None)
        if name in OBJECTS or (name in BARRIERS and default):
            lines.append(node.lineno)
    return sorted(lines)


def imports(source: str) -> set[str]:
    """The packages that a module imports, anywhere in it."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.partition(".")[0])
    return packages


def sources() -> dict[str, str]:
    return {str(f.relative_to(PACKAGE)): f.read_text(encoding="utf-8") for f in PACKAGE.rglob("*.py")}


def test_no_object_collective_and_no_default_group_barrier() -> None:
    calls = [f"{file}:{line}" for file, source in sources().items() for line in collective_lines(source)]
    assert not calls, f"use those of system/collectives: {', '.join(calls)}"


def test_modules_that_use_pickles_are_listed_with_the_reason() -> None:
    assert {file for file, source in sources().items() if imports(source) & PICKLES} == USES_PICKLES.keys()


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
dist.all_gather_object(out, 1, group=control)
dist.all_reduce(x)
gather_on_first(1)
other.barrier()
"""
    assert collective_lines(source) == [7, 8, 9, 10, 11, 12, 14]
    assert imports(source) == {"torch", "rpg_megatron"}
