"""Do the tests find a fault? Mutations drawn by a seed, and the tests that fail.

    python -m benchmarks.mutations layers --list
    python -m benchmarks.mutations layers --count 30
    python -m benchmarks.mutations pairs --count 20 --seed 69

layers: each mutation changes one place of the modules that describe families and layers: a number by one, a
flag, an operator, a name. pairs: one place of the modules where features meet; also a factor that is dropped,
and a guard that never fires. It is applied to a copy of the repository, in which tests of the default tier
run until the first one fails. Mutations that no test finds are printed at the end: each is a gap, or does not
change what is computed. The places are those of the commit: commit and seed fix the draw.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = [
    *("config/families.py", "config/model_config.py", "config/expert_config.py", "config/model_shape.py"),
    *("models/partition.py", "models/layer.py", "models/decoder.py", "policy/layer_specs.py"),
    *("policy/latent_attention.py", "policy/rotary.py", "policy/layers.py", "policy/attention.py"),
    "checkpoints/hf_forms.py",
]
LAYER_TESTS = [
    "unit/model_shape unit/model_mapping unit/mappings_against_megatron_bridge unit/packed_attention "
    "unit/hf_checkpoints unit/fp8_files unit/layer_checks unit/audit_verdict unit/checks unit/examples "
    "unit/shared_prompt_rows",
    "distributed/families",
    "distributed/layouts distributed/experts",
    "distributed/plan_memory integration/convert_tools",
]
"""Of the default tier, in groups, the fastest first."""
_UPDATES = (
    " unit/training_metrics unit/step_warnings distributed/training_knobs distributed/old_from_update"
    " distributed/skipped_updates distributed/probes distributed/router_replay distributed/batch_scatter"
)
PAIRS = {
    "bridge/controller.py": "unit/sync_controller unit/weight_checksum",
    "bridge/publisher.py": "unit/shared_memory_transport distributed/publisher_ranks "
    "distributed/process_group_transport",
    "policy/lora.py": "unit/lora distributed/lora_layouts",
    "policy/microbatch.py": "unit/shared_prompt_rows distributed/shared_prompts",
    "policy/policy.py": "unit/router_routes distributed/layouts",
    "policy/router_replay.py": "unit/router_routes distributed/router_replay",
    "policy/teacher.py": "distributed/teachers",
    "rollout/admission.py": "unit/admission",
    "rollout/conversation.py": "unit/conversations unit/episodes unit/gateway unit/episode_pool",
    "rollout/kept_groups.py": "unit/kept_groups",
    "rollout/producer.py": "unit/sampler_ahead unit/sampled_ahead unit/sampler unit/plan_ahead",
    "training/advantages.py": _UPDATES,
    "training/batch_scoring.py": "unit/shared_prompt_rows" + _UPDATES,
    "training/off_policy.py": _UPDATES,
    "training/run.py": "unit/lora unit/weight_sync" + _UPDATES,
    "training/trainer.py": "unit/open_metrics unit/hf_checkpoints unit/layer_checks" + _UPDATES,
    "training/weight_sync.py": "unit/weight_sync distributed/weight_fan_out" + _UPDATES,
}
"""Module where features meet -> tests of the default tier that reach it; the run of pairs comes last."""
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}
_COMPARED = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
}


def files_of(tests: str) -> list[str]:
    """``unit/lora distributed/teachers`` -> their files, which must exist."""
    files = ["tests/{}/test_{}.py".format(*test.split("/")) for test in tests.split()]
    if missing := [file for file in files if not (ROOT / file).exists()]:
        raise SystemExit(f"no such tests: {', '.join(missing)}")
    return files


def failure_of(output: str) -> str:
    """The first test that failed in pytest's output, else the output's end."""
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else output[-300:]


@dataclass(frozen=True)
class Mutation:
    """One change of a module: characters ``start`` to ``end`` of a line become ``text``."""

    module: str
    line: int
    start: int
    end: int
    text: str

    def changed(self, source: str) -> tuple[list[str], str]:
        """The module's lines, of which one is changed, and that line before."""
        lines = source.splitlines(keepends=True)
        old = lines[self.line - 1].encode()
        lines[self.line - 1] = (old[: self.start] + self.text.encode() + old[self.end :]).decode()
        return lines, old.decode()

    def apply(self, root: Path) -> None:
        """Change the module in a copy of the repository."""
        file = root / "rpg_megatron" / self.module
        file.write_text("".join(self.changed(file.read_text())[0]))

    def __str__(self) -> str:
        """Place, and the line before and after."""
        lines, old = self.changed((ROOT / "rpg_megatron" / self.module).read_text())
        return f"{self.module}:{self.line}: {old.strip()}  ->  {lines[self.line - 1].strip()}"


def find_mutations(module: str, *, logic: bool = False) -> list[Mutation]:
    """All mutations of a module, but not in docstrings, messages and annotations; logic: factors, guards."""
    tree = ast.parse((ROOT / "rpg_megatron" / module).read_text())
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Expr | ast.Raise | ast.Assert | ast.JoinedStr):
            parts = [node]
        elif isinstance(node, ast.AnnAssign | ast.arg):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.keyword) and node.arg == "strict":  # it only asserts
            parts = [node.value]
        elif isinstance(node, ast.Assign) and "NOT_SUPPORTED" in ast.unparse(node.targets[0]):
            parts = [node]
        skipped |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    found = []
    for node in ast.walk(tree):
        if id(node) not in skipped and getattr(node, "lineno", 0) == getattr(node, "end_lineno", 1):
            found += _mutations(module, node)
            if logic and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                found.append(_replaced(module, node, ast.unparse(node.left)))
        if logic and isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise | ast.Return):
            test = node.test
            if test.lineno == test.end_lineno:
                found.append(_replaced(module, test, "False"))
    return found


def _replaced(module: str, part: ast.AST, text: str) -> Mutation:
    return Mutation(module, part.lineno, part.col_offset, part.end_col_offset, text)  # type: ignore[attr-defined]


def _mutations(module: str, node: ast.AST) -> list[Mutation]:
    replace = partial(_replaced, module)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [replace(node, str(not node.value))]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [replace(node, str(node.value + 1))]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value:
        return [replace(node, repr(node.value.replace("_", "", 1)))]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        gap = _between(node.left, node.right, _OPERATORS[type(node.op)], module)
        return [gap] if gap else []
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        gap = _between(node.left, node.comparators[0], _COMPARED[type(node.ops[0])], module)
        return [gap] if gap else []
    if isinstance(node, ast.IfExp):
        return [replace(node, f"({ast.unparse(node.body)})")]
    return []


def _between(left: ast.expr, right: ast.expr, text: str, module: str) -> Mutation | None:
    """A change of the operator between two operands; None if there are parentheses around one of them."""
    line = (ROOT / "rpg_megatron" / module).read_text().splitlines()[left.lineno - 1].encode()
    start, end = left.end_col_offset or 0, right.col_offset
    if left.end_lineno != right.lineno or b"(" in line[start:end] or b")" in line[start:end]:
        return None
    return Mutation(module, left.lineno, start, end, f" {text} ")


def first_failure(root: Path, groups: list[list[str]]) -> str:
    """The first test that fails in a copy, or an empty text."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for tests in groups:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long and not gpu", *tests]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return failure_of(done.stdout) or f"pytest ended with {done.returncode}"
    return ""


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=("layers", "pairs"))
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=65)
    parser.add_argument("--first", type=int, default=0, help="Skip so many of the draw.")
    parser.add_argument("--list", action="store_true", help="Only print the draw.")
    options = parser.parse_args()
    pairs = options.subject == "pairs"
    modules = list(PAIRS) if pairs else LAYERS
    everything = [mutation for module in modules for mutation in find_mutations(module, logic=pairs)]
    drawn, seed = random.Random(options.seed).sample(everything, options.count), options.seed
    print(f"{len(everything)} mutations in {len(modules)} modules; {len(drawn)} drawn with seed {seed}")
    survivors, began = [], time.monotonic()
    for number, mutation in enumerate(drawn[options.first :], options.first + 1):
        print(f"{number:2} {mutation}", flush=True)
        if options.list:
            continue
        groups = [files_of(tests) for tests in LAYER_TESTS]
        if pairs:
            run = "integration/feature_pair_runs"
            groups = [[file] for file in files_of(f"{PAIRS[mutation.module]} {run}")]
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "copy"
            ignore = shutil.ignore_patterns(".git", ".venv*", "runs", "evals", "site", "*_cache")
            shutil.copytree(ROOT, root, ignore=ignore, symlinks=True)
            mutation.apply(root)
            found = first_failure(root, groups)
        print(f"   {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", flush=True)
        survivors += [] if found else [mutation]
    if not options.list:
        print(f"found: {len(drawn) - options.first - len(survivors)} of {len(drawn) - options.first}")
        print(*survivors, sep="\n")


if __name__ == "__main__":
    main()
