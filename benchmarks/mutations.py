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
    "config/families.py",
    "config/model_config.py",
    "config/expert_config.py",
    "config/model_shape.py",
    "models/partition.py",
    "models/layer.py",
    "models/decoder.py",
    "policy/layer_specs.py",
    "policy/latent_attention.py",
    "policy/rotary.py",
    "policy/layers.py",
    "policy/attention.py",
    "checkpoints/hf_forms.py",
]
LAYER_TESTS = [
    [
        "tests/unit/test_model_shape.py",
        "tests/unit/test_model_mapping.py",
        "tests/unit/test_mappings_against_megatron_bridge.py",
        "tests/unit/test_packed_attention.py",
        "tests/unit/test_hf_checkpoints.py",
        "tests/unit/test_fp8_files.py",
        "tests/unit/test_layer_checks.py",
        "tests/unit/test_audit_verdict.py",
        "tests/unit/test_checks.py",
        "tests/unit/test_examples.py",
    ],
    ["tests/distributed/test_families.py"],
    ["tests/distributed/test_layouts.py", "tests/distributed/test_experts.py"],
    ["tests/distributed/test_plan_memory.py", "tests/integration/test_convert_tools.py"],
]
"""Of the default tier, in groups, the fastest first."""
_RUN = "tests/integration/test_feature_pair_runs.py"
_UPDATES = [
    *("tests/unit/test_training_metrics.py", "tests/unit/test_step_warnings.py"),
    *(
        f"tests/distributed/test_{name}.py"
        for name in ("training_knobs", "old_from_update", "skipped_updates")
    ),
    *(f"tests/distributed/test_{name}.py" for name in ("probes", "router_replay", "batch_scatter")),
]
PAIRS = {
    "bridge/controller.py": ["tests/unit/test_sync_controller.py", "tests/unit/test_weight_checksum.py"],
    "bridge/publisher.py": [
        *("tests/unit/test_shared_memory_transport.py", "tests/distributed/test_publisher_ranks.py"),
        "tests/distributed/test_process_group_transport.py",
    ],
    "policy/lora.py": ["tests/unit/test_lora.py", "tests/distributed/test_lora_layouts.py"],
    "policy/microbatch.py": [
        "tests/unit/test_shared_prompt_rows.py",
        "tests/distributed/test_shared_prompts.py",
    ],
    "policy/policy.py": ["tests/unit/test_router_routes.py", "tests/distributed/test_layouts.py"],
    "policy/router_replay.py": [
        "tests/unit/test_router_routes.py",
        "tests/distributed/test_router_replay.py",
    ],
    "policy/teacher.py": ["tests/distributed/test_teachers.py"],
    "rollout/admission.py": ["tests/unit/test_admission.py"],
    "rollout/conversation.py": [
        *("tests/unit/test_conversations.py", "tests/unit/test_episodes.py", "tests/unit/test_gateway.py"),
        "tests/unit/test_episode_pool.py",
    ],
    "rollout/kept_groups.py": ["tests/unit/test_kept_groups.py"],
    "rollout/producer.py": [
        *("tests/unit/test_sampler_ahead.py", "tests/unit/test_sampled_ahead.py"),
        *("tests/unit/test_sampler.py", "tests/unit/test_plan_ahead.py"),
    ],
    "training/advantages.py": _UPDATES,
    "training/batch_scoring.py": ["tests/unit/test_shared_prompt_rows.py", *_UPDATES],
    "training/off_policy.py": ["tests/unit/test_training_metrics.py", *_UPDATES],
    "training/run.py": ["tests/unit/test_lora.py", "tests/unit/test_weight_sync.py", *_UPDATES],
    "training/trainer.py": [
        "tests/unit/test_open_metrics.py",
        "tests/unit/test_hf_checkpoints.py",
        "tests/unit/test_layer_checks.py",
        *_UPDATES,
    ],
    "training/weight_sync.py": [
        *("tests/unit/test_weight_sync.py", "tests/distributed/test_weight_fan_out.py"),
        *_UPDATES,
    ],
}
"""Module where features meet -> tests of the default tier that reach it; the run of pairs comes last."""
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}
_COMPARED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}


@dataclass(frozen=True)
class Mutation:
    """One change of a module: characters ``start`` to ``end`` of a line become ``text``."""

    module: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, root: Path) -> None:
        """Change the module in a copy of the repository."""
        file = root / "rpg_megatron" / self.module
        lines = file.read_text().splitlines(keepends=True)
        old = lines[self.line - 1].encode()
        lines[self.line - 1] = (old[: self.start] + self.text.encode() + old[self.end :]).decode()
        file.write_text("".join(lines))

    def __str__(self) -> str:
        """Place, and the line before and after."""
        line = (ROOT / "rpg_megatron" / self.module).read_text().splitlines()[self.line - 1].encode()
        changed = (line[: self.start] + self.text.encode() + line[self.end :]).decode().strip()
        return f"{self.module}:{self.line}: {line.decode().strip()}  ->  {changed}"


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
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return failed[0] if failed else f"pytest ended with {done.returncode}"
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
    drawn = random.Random(options.seed).sample(everything, options.count)
    print(
        f"{len(everything)} mutations in {len(modules)} modules; {len(drawn)} drawn with seed {options.seed}"
    )
    survivors, began = [], time.monotonic()
    for number, mutation in enumerate(drawn[options.first :], options.first + 1):
        print(f"{number:2} {mutation}", flush=True)
        if options.list:
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "copy"
            ignore = shutil.ignore_patterns(".git", ".venv*", "runs", "evals", "site", "*_cache")
            shutil.copytree(ROOT, root, ignore=ignore, symlinks=True)
            mutation.apply(root)
            tests = [[test] for test in [*PAIRS[mutation.module], _RUN]] if pairs else LAYER_TESTS
            found = first_failure(root, tests)
        print(f"   {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", flush=True)
        survivors += [] if found else [mutation]
    if not options.list:
        print(f"found: {len(drawn) - options.first - len(survivors)} of {len(drawn) - options.first}")
        print(*survivors, sep="\n")


if __name__ == "__main__":
    main()
