"""Plant faults in the code that only a GPU runs, one at a time: which of them do the tests find?

    python -m benchmarks.gpu_faults list
    python -m benchmarks.gpu_faults run FOLDER [--only NAME ...] [--tests PATH ...]

Each fault is planted in a copy of the repository in FOLDER, and the tests of its place (``TESTS``) run on it
until the first failure. Outcomes are kept in FOLDER/outcomes.jsonl: the same command goes on where it
stopped, and tries again the faults that were not found. tests/cuda needs .venv-cuda (``make test-cuda``).

The listed faults come from two reviews; the tests of their time did not find most of them. More are drawn
(``DRAWS``) from all places where a wait, an event, a copy, a device or a check can be removed, moved or
weakened.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

from benchmarks.mutations import failure_of, files_of
from benchmarks.setup import ROOT

PLACES = (
    "rpg_megatron/bridge/transports",
    "rpg_megatron/bridge/vllm",
    "rpg_megatron/policy/host_memory.py",
    "rpg_megatron/policy/anchor.py",
    "rpg_megatron/policy/offload.py",
    "rpg_megatron/training/weight_sync.py",
)
MORE_PLACES = (
    *PLACES,
    *(f"rpg_megatron/bridge/{name}.py" for name in ("publisher", "slice_table")),
    *(f"rpg_megatron/policy/{name}.py" for name in ("device", "divergence", "length_groups", "logprobs")),
    *(f"rpg_megatron/policy/{name}.py" for name in ("precision", "attention", "teacher")),
    "rpg_megatron/system/collectives.py",
)
LAST = "91a53d2"
"""The sources when the later draws were made."""


@dataclass(frozen=True)
class Draw:
    """Faults drawn from the sources of a commit. ``seed`` was written here before the draw was looked at."""

    seed: int
    number: int
    commit: str
    places: tuple[str, ...] = PLACES
    still_in: str | None = None
    """Only of places that this commit has, too."""


DRAWS = (
    Draw(20261126, 20, "fe73f58"),  # before the checker of order was written
    Draw(20261130, 3, "ddc6c18f", still_in=LAST),  # for those of the first whose places have gone
    Draw(20261201, 10, LAST, MORE_PLACES),
)
WAITS = {"synchronize", "wait_event", "wait_stream", "wait", "_wait", "join", "finish", "result"}
WAITS |= {"_broadcast"}
CHECKS = {"check_version", "_check_unchanged", "_check_types", "check_cover", "_check_complete"}
DEVICES = {"set_device"}
REMOVABLE = WAITS | CHECKS | DEVICES | {"copy_", "retract", "_unregister", "restore_layers", "_refresh"}
"""Functions whose calls can be removed if the result is not used."""

_TRANSPORTS = (
    " unit/stream_order unit/cuda_transports unit/shared_memory_transport unit/sync_controller unit/nccl_use"
    " distributed/sync_calls distributed/process_group_transport distributed/publisher_ranks"
    " distributed/weight_fan_out"
)
_FAKE_GPUS, _ONE_LAYOUT = " distributed/fake_cuda", "::test_a_layout_runs_on_fake_gpus"
TESTS = {
    "rpg_megatron/bridge/transports": _TRANSPORTS,
    "rpg_megatron/bridge/publisher.py": _TRANSPORTS,
    "rpg_megatron/bridge/slice_table.py": "distributed/slice_kernels" + _TRANSPORTS,
    "rpg_megatron/bridge/vllm": "unit/weight_loader unit/load_recorder unit/engine_routes "
    "unit/sync_controller unit/vllm_contract unit/engine_liveness cuda/load_plan",
    "rpg_megatron/launcher": "unit/rank_env",
    "rpg_megatron/policy/logprobs.py": "unit/logprobs" + _FAKE_GPUS,
    "rpg_megatron/policy/precision.py": "unit/precision" + _FAKE_GPUS,
    "rpg_megatron/policy/attention.py": "unit/shared_prompt_rows" + _FAKE_GPUS,
    "rpg_megatron/policy/teacher.py": _FAKE_GPUS + " distributed/teachers",
    "rpg_megatron/policy": f"unit/stream_order unit/host_memory unit/nccl_use{_FAKE_GPUS} "
    "distributed/offload_for_engines",
    "rpg_megatron/system": "unit/object_collectives" + _TRANSPORTS,
    "rpg_megatron/training/weight_sync.py": "unit/nccl_use unit/rank_env",
    "rpg_megatron/training/run.py": "unit/lora",
    "rpg_megatron/training/efficiency.py": "unit/efficiency" + _FAKE_GPUS,
}
"""Tests that reach a file or folder, the quickest first; the first entry that fits a fault's file counts."""

HARMLESS = {
    "weight_loader.py:173 without synchronize": "all this work is on one stream, for which own_stream waits "
    "before anything is acknowledged",
}
"""Part of a fault's name -> why nothing changes that could be observed."""


@dataclass(frozen=True)
class Fault:
    """A change of one place of a file."""

    name: str
    file: str
    old: str
    new: str


def _named() -> list[Fault]:
    transports, vllm = PLACES[0], PLACES[1]
    publisher, ipc = f"{transports}/process_group_publisher.py", f"{transports}/cuda_ipc.py"
    synchronise = "        torch.cuda.synchronize()"
    return [
        Fault("ipc handles without a wait", ipc, f"    {synchronise}\n", ""),
        Fault("event_sync_required kept", ipc, "    parts[7] = False", "    pass"),
        Fault("the link's event only of the first version", publisher,
              'if self._device.type == "cuda":\n            self._published',
              'if self._device.type == "cuda" and self._published is None:\n            self._published'),
        Fault("no set_device in serving threads", publisher, "torch.cuda.set_device(self._device)", "pass"),
        Fault("off-load frees before its copies end", PLACES[4], f"{synchronise}  # the copies", "        #"),
        Fault("reload without a wait", PLACES[4], f"{synchronise}\n        self._offloaded = None",
              "        self._offloaded = None"),
        Fault("one send buffer for all buckets", publisher, "self._buffers[i % 2]", "self._buffers[0]"),
        Fault("LOCAL_RANK is the global rank", "rpg_megatron/launcher/rank_env.py",
              '"LOCAL_RANK": str(place)', '"LOCAL_RANK": str(rank)'),
        Fault("experts of FlashInfer's layout loaded in place", f"{vllm}/weight_loader.py",
              "return method.unquantized_backend is not UnquantizedMoeBackend.TRITON", "return False"),
        # The comparison of dtypes and shapes is removed too, since it alone would find the fault.
        Fault("quantised layers loaded in place", f"{vllm}/weight_loader.py",
              "if _is_processed(plan.layer, device):\n        return False\n    expected",
              'if getattr(plan.layer, "quant_method", None) is not None:\n        return True\n    expected'),
        Fault("shared prompts are not causal", "rpg_megatron/policy/attention.py",
              "window_size=(-1, 0)", "window_size=(-1, -1)"),
        Fault("a CPU tensor in NCCL's all-reduce", "rpg_megatron/training/efficiency.py",
              "[peak_memory_bytes(self._device)], dtype=torch.float64, device=self._device",
              "[peak_memory_bytes(self._device)], dtype=torch.float64"),
        Fault("apex taken for granted", "rpg_megatron/policy/precision.py",
              ' and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None', ""),
        Fault("a teacher that stays on the GPU", "rpg_megatron/policy/teacher.py",
              "            for p, held in self._held:\n                p.data = held", "            pass"),
        Fault("log-prob kernels compiled for each shape", "rpg_megatron/policy/logprobs.py",
              "dynamic=True", "dynamic=False"),
        Fault("freed memory stays in torch's cache", PLACES[4],
              "        torch.cuda.empty_cache()  # returns", "        # returns"),
        Fault("FP8's copies of weights stay while engines run", PLACES[4],
              'getattr(module, "_fp8_workspaces", {}).clear()', "pass"),
        Fault("engines with adapters lose the model's weights", "rpg_megatron/training/run.py",
              "self._weight_sync.sleep(2 if self._trainer.published[1] is None else 1)",
              "self._weight_sync.sleep(2)"),
    ]  # fmt: skip


def candidates(commit: str, places: tuple[str, ...]) -> Iterator[Fault]:
    """Every fault that can be drawn, in the order of the files."""
    for place in places:
        for file in _git("ls-tree", "-r", "--name-only", commit, place).split():
            source = _git("show", f"{commit}:{file}")
            for node in ast.walk(ast.parse(source)):
                for kind, line, old, new in _changes_of(node, source):
                    yield _in_context(f"{file}:{line} {kind}", file, source, line, old, new)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _in_context(name: str, file: str, source: str, line: int, old: str, new: str) -> Fault:
    """The change with enough lines around it that its text occurs once in the file."""
    lines = source.splitlines(keepends=True)
    at = source.index(old, sum(map(len, lines[: line - 1])))
    first, last = line - 1, source.count("\n", 0, at + len(old))
    while source.count(context := "".join(lines[first : last + 1])) > 1:
        first, last = max(0, first - 1), last + 1
    at -= sum(map(len, lines[:first]))
    return Fault(name, file, context, context[:at] + new + context[at + len(old) :])


def _changes_of(node: ast.AST, source: str) -> Iterator[tuple[str, int, str, str]]:
    """(name, line, old text, new text) of each change of a node."""

    def text(n: ast.AST) -> str:
        return ast.get_source_segment(source, n) or ""

    if _is_call(node):
        name = _called(node.value)
        if name in REMOVABLE:
            yield f"without {name}", node.lineno, text(node), "pass"
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and not node.orelse:
        yield f"no check: {text(node.test)[:60]}", node.test.lineno, text(node.test), "False"
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "device":
                yield "device=cpu", keyword.lineno, text(keyword), 'device="cpu"'
            if keyword.arg == "pin_memory":
                yield "not pinned", keyword.lineno, text(keyword), "pin_memory=False"
        if _called(node) == "copy_" and len(node.args) == 1 and not node.keywords:
            yield "copy without a wait", node.lineno, text(node), text(node)[:-1] + ", non_blocking=True)"
        if _called(node) in ("record_event", "clone") and isinstance(node.func, ast.Attribute):
            replacement = "None" if _called(node) == "record_event" else text(node.func.value)
            yield f"without {_called(node)}", node.lineno, text(node), replacement
    for body in (getattr(node, "body", None), getattr(node, "finalbody", None)):
        for first, second in pairwise(body if isinstance(body, list) else ()):
            calls = {_called(n.value) for n in (first, second) if _is_call(n)}
            if calls & (WAITS | CHECKS | DEVICES) and first.lineno < second.lineno:
                lines = source.splitlines(keepends=True)[first.lineno - 1 : second.end_lineno]
                middle = (first.end_lineno or 0) - first.lineno + 1
                swapped = "".join(lines[middle:]).rstrip("\n") + "\n" + "".join(lines[:middle])
                yield f"swapped with the next: {text(first)[:40]}", first.lineno, "".join(lines), swapped


def _is_call(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _called(call: ast.expr) -> str:
    function = call.func if isinstance(call, ast.Call) else call
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def faults() -> list[Fault]:
    """Those that are listed and those drawn."""
    return _named() + [fault for draw in DRAWS for fault in _drawn(draw)]


def _drawn(draw: Draw) -> list[Fault]:
    faults = list(candidates(draw.commit, draw.places))
    if draw.still_in is not None:
        files = _git("ls-tree", "-r", "--name-only", draw.still_in).split()
        sources = {f.file: "" for f in faults}
        sources |= {file: _git("show", f"{draw.still_in}:{file}") for file in sources if file in files}
        faults = [f for f in faults if sources[f.file].count(f.old) == 1]
    return random.Random(draw.seed).sample(faults, draw.number)


def plant(fault: Fault, folder: Path) -> None:
    """Change the file in a copy of the repository. Raises ValueError unless the old text occurs once."""
    file = folder / fault.file
    source = file.read_text()
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: its place is {source.count(fault.old)} times in {fault.file}")
    file.write_text(source.replace(fault.old, fault.new))


def run(folder: Path, tests: list[str], only: list[str]) -> None:
    """Plant each fault in turn and run the tests on it; prints the test that found it, if any.

    tests: instead of those of the fault's place.
    """
    ignored = shutil.ignore_patterns(".venv*", ".git", "runs", "site", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    file = folder / "outcomes.jsonl"
    outcomes = dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}
    chosen = [f for f in faults() if not only or any(word in f.name for word in only)]
    for fault in chosen:
        harmless = next((why for name, why in HARMLESS.items() if name in fault.name), "")
        start = time.monotonic()
        if harmless:
            outcomes[fault.name] = _HARMLESS
            print(f"{fault.name}: changes nothing: {harmless}", flush=True)
        elif outcomes.get(fault.name, _NOT_FOUND) == _NOT_FOUND:
            outcomes[fault.name] = _outcome(fault, folder, tests or tests_of(fault))
            with file.open("a") as f:
                print(json.dumps([fault.name, outcomes[fault.name]]), file=f)
            name, seconds = " ".join(fault.name.split())[:90], time.monotonic() - start
            print(f"{name}: {outcomes[fault.name]} ({seconds:.0f} s)", flush=True)
    results = Counter(outcomes[fault.name] for fault in chosen)
    missed, gone, harmless = (results.pop(outcome, 0) for outcome in (_NOT_FOUND, _GONE, _HARMLESS))
    of = f"{results.total()} of {results.total() + missed} found"
    print(f"{of}; {harmless} change nothing, the places of {gone} are gone")


_NOT_FOUND, _GONE, _HARMLESS = "NOT FOUND", "its place is gone", "changes nothing"


def tests_of(fault: Fault) -> list[str]:
    """The tests that reach a fault's place."""
    files = files_of(next(tests for place, tests in TESTS.items() if fault.file.startswith(place)))
    return [f + _ONE_LAYOUT if f.endswith("test_fake_cuda.py") else f for f in files]


def _outcome(fault: Fault, folder: Path, tests: list[str]) -> str:
    """What found the fault: the first line of a failure."""
    shutil.copy(ROOT / fault.file, folder / fault.file)
    try:
        plant(fault, folder)
    except ValueError:
        return _GONE
    on_cuda = [test for test in tests if test.startswith("tests/cuda")]
    try:
        failure = _run_forked(folder, [test for test in tests if test not in on_cuda])
        return failure or _run_on_cuda(folder, on_cuda) or _NOT_FOUND
    finally:
        shutil.copy(ROOT / fault.file, folder / fault.file)


def _run_forked(folder: Path, tests: list[str]) -> str:
    """What failed, in a fork of this process: importing the libraries is most of the time of a test."""
    for library in _LIBRARIES:
        importlib.import_module(library)
    output = folder / "output.txt"
    if (pid := os.fork()) == 0:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
        os._exit(importlib.import_module("pytest").main([*_OPTIONS, *tests]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return failure_of(output.read_text())[:150] if code else ""


def _run_on_cuda(folder: Path, tests: list[str]) -> str:
    """What failed in .venv-cuda, as ``make test-cuda`` runs it; nothing without that environment."""
    python = ROOT / ".venv-cuda/bin/python"
    if not tests or not python.exists():
        return ""
    environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "RPG_CUDA_STUBS": "1"}
    environment["LD_LIBRARY_PATH"] = str(ROOT / ".venv-cuda/stubs")
    command = [python, "-m", "pytest", *_OPTIONS, *tests]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return failure_of(process.stdout)[:150] if process.returncode else ""


_LIBRARIES = (
    "torch",
    "hypothesis",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "vllm.distributed.weight_transfer.factory",
    "vllm.model_executor.layers.quantization.base_config",
    "vllm.model_executor.model_loader.reload.layerwise",
)
_OPTIONS = ("-x", "-q", "--no-header", "--timeout", "300", "-m", "not long and not gpu")


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names of the faults")
    runs = commands.add_parser("run", help="plant each fault and run the tests on it")
    runs.add_argument("folder", type=Path, help="folder for the copy and the outcomes")
    runs.add_argument("--only", nargs="*", default=[], help="faults whose name contains one of these")
    runs.add_argument("--tests", nargs="*", default=[], help="what pytest gets, instead of TESTS")
    options = parser.parse_args()
    if options.command == "list":
        print(*(fault.name for fault in faults()), sep="\n")
    else:
        run(options.folder, options.tests, options.only)


if __name__ == "__main__":
    main()
