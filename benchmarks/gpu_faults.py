"""Plant faults in the code that only a GPU runs, one at a time: which of them do the tests find?

    python -m benchmarks.gpu_faults list
    python -m benchmarks.gpu_faults run FOLDER [--only NAME ...] [--tests PATH ...]

Each fault is planted in a copy of the repository in FOLDER, and the tests run on it until the first failure.
Ten faults are listed here: a review found them, the tests of its time did not. ``DRAWN`` more are drawn from
all places where a wait, an event, a copy, a device or a check can be removed, moved or weakened.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEED, DRAWN, COMMIT = 20261126, 20, "fe73f58"
"""Fixed before the checker of order was written; the draw is from the sources of that commit."""
PLACES = (
    "rpg_megatron/bridge/transports",
    "rpg_megatron/bridge/vllm",
    "rpg_megatron/policy/host_memory.py",
    "rpg_megatron/policy/anchor.py",
    "rpg_megatron/policy/offload.py",
    "rpg_megatron/training/weight_sync.py",
)
WAITS = {
    "synchronize",
    "wait_event",
    "wait_stream",
    "wait",
    "_wait",
    "join",
    "finish",
    "result",
    "_broadcast",
}
CHECKS = {"check_version", "_check_unchanged", "_check_types", "check_cover", "_check_complete"}
DEVICES = {"set_device"}
REMOVABLE = WAITS | CHECKS | DEVICES | {"copy_", "retract", "_unregister", "restore_layers", "_refresh"}
"""Functions whose calls can be removed if the result is not used."""


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
        Fault(
            "the link's event only of the first version",
            publisher,
            'if self._device.type == "cuda":\n            self._published',
            'if self._device.type == "cuda" and self._published is None:\n            self._published',
        ),
        Fault("no set_device in serving threads", publisher, "torch.cuda.set_device(self._device)", "pass"),
        Fault("off-load frees before its copies end", PLACES[4], f"{synchronise}  # the copies", "        #"),
        Fault("reload without a wait", PLACES[4], f"{synchronise}\n        self._offloaded = None",
              "        self._offloaded = None"),
        Fault("one send buffer for all buckets", publisher, "self._buffers[i % 2]", "self._buffers[0]"),
        Fault(
            "LOCAL_RANK is the global rank",
            "rpg_megatron/launcher/rank_env.py",
            "str(rank - assignment.ranks.start)",
            "str(rank)",
        ),
        Fault(
            "experts of FlashInfer's layout loaded in place",
            f"{vllm}/weight_loader.py",
            "return method.unquantized_backend is not UnquantizedMoeBackend.TRITON",
            "return False",
        ),
        Fault(
            "quantised layers loaded in place",
            f"{vllm}/weight_loader.py",
            "if _is_processed(plan.layer, device):\n        return False\n    expected",
            # The comparison of dtypes and shapes is removed too, since it alone would find the fault.
            'if getattr(plan.layer, "quant_method", None) is not None:\n        return True\n    expected',
        ),
    ]  # fmt: skip


def candidates() -> Iterator[Fault]:
    """Every fault that can be drawn, in the order of the files."""
    for place in PLACES:
        for file in _git("ls-tree", "-r", "--name-only", COMMIT, place).split():
            source = _git("show", f"{COMMIT}:{file}")
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

    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
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
        statements = body if isinstance(body, list) else []
        for statement, following in pairwise(statements):
            calls = [
                _called(n.value)
                for n in (statement, following)
                if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
            ]
            if set(calls) & (WAITS | CHECKS | DEVICES) and statement.lineno < following.lineno:
                pair = "".join(source.splitlines(keepends=True)[statement.lineno - 1 : following.end_lineno])
                first = "".join(source.splitlines(keepends=True)[statement.lineno - 1 : statement.end_lineno])
                yield (
                    f"swapped with the next: {text(statement)[:40]}",
                    statement.lineno,
                    pair,
                    pair[len(first) :].rstrip("\n") + "\n" + first,
                )


def _called(call: ast.expr) -> str:
    function = call.func if isinstance(call, ast.Call) else call
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def faults() -> list[Fault]:
    """The ten that are listed and those drawn."""
    return _named() + random.Random(SEED).sample(list(candidates()), DRAWN)


def plant(fault: Fault, folder: Path) -> None:
    """Change the file in a copy of the repository. Raises ValueError unless the old text occurs once."""
    file = folder / fault.file
    source = file.read_text()
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: its place is {source.count(fault.old)} times in {fault.file}")
    file.write_text(source.replace(fault.old, fault.new))


def run(folder: Path, tests: list[str], only: list[str]) -> None:
    """Plant each fault in turn and run the tests on it; prints the test that found it, if any."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "site", ".*_cache"))
    detected = gone = 0
    chosen = [f for f in faults() if not only or any(word in f.name for word in only)]
    for fault in chosen:
        shutil.copy(ROOT / fault.file, folder / fault.file)
        try:
            plant(fault, folder)
        except ValueError as e:
            print(f"gone: {e}", flush=True)
            gone += 1
            continue
        start = time.monotonic()
        process = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--timeout", "300", *tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        shutil.copy(ROOT / fault.file, folder / fault.file)
        failures = [line for line in process.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        detected += process.returncode != 0
        output = "NOT FOUND" if process.returncode == 0 else process.stdout[-300:]
        outcome = failures[0][:150] if failures else output
        print(f"{fault.name[:90]}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{detected} of {len(chosen) - gone} found; the places of {gone} are gone")


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names of the faults")
    runs = commands.add_parser("run", help="plant each fault and run the tests on it")
    runs.add_argument("folder", type=Path, help="new folder for the copy")
    runs.add_argument("--only", nargs="*", default=[], help="faults whose name contains one of these")
    runs.add_argument("--tests", nargs="*", default=["tests/unit"], help="what pytest gets")
    options = parser.parse_args()
    if options.command == "list":
        print(*(fault.name for fault in faults()), sep="\n")
    else:
        run(options.folder, options.tests, options.only)


if __name__ == "__main__":
    main()
