"""What ``plan`` says of every GPU example and of a thousand other layouts, and what a change does to it.

The formulas of ``plan`` are estimates, so each could be simpler or finer: this says what it costs. Record the
answers before and after, then compare them::

    python -m benchmarks.plan_verdicts --out before.json
    python -m benchmarks.plan_verdicts --out after.json
    python -m benchmarks.plan_verdicts --compare before.json after.json

Examples: all files under ``examples/`` with ``device: cuda``, as they are. Sweep: of those outside the
paper's tables, whose rows differ in their loss, layouts, micro-batches, recomputation, engines and GPUs drawn
with a fixed seed. Published: the steps of ``tests/support/published_steps.py``. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpg_megatron.commands.plan.plan import Plan, make_plan, smallest
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from tests.support.published_steps import ROWS, predict
from tests.support.recipes import EXAMPLES, PAPER

GIB = 1024**3
SIZES: dict[str, tuple[Any, ...]] = {
    "parallel.tensor": (1, 1, 2, 4, 8),
    "parallel.pipeline": (1, 1, 1, 2, 4, 8),
    "parallel.context": (1, 1, 1, 2, 4),
    "parallel.expert": (1, 4, 8, 16),
    "parallel.data": (1, 2, 4, 8, 16),
    "training.tokens_per_microbatch": (None, None, 9216, 18432, 36864),
    "memory.recompute": (None, "none", "selective", "full"),
    "engine.tensor": (None, 1, 2, 4, 8),
}
"""Setting -> values to draw from; None: the example's."""
MORE = (
    (),
    (),
    (),
    ("precision.fp8={recipe: blockwise}",),
    ("lora={rank: 32}", "optimizer.distributed=true"),
    ("training.share_prompts=auto",),
    ("model.implementation=local",),
    ("engine.colocated=false", "bridge.transport=process_group"),
)
CARDS = ("a100-40", "a100-80", "h100-80", "h100-80", "h200-141", "b200-180")


def examples() -> dict[str, Path]:
    """The runs on GPUs by their paths under ``examples/``; parts that others extend name no model."""
    files = {}
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        try:
            settings = load_settings(file)
        except UserError:
            continue
        if settings.device == "cuda" and (settings.model.path / "config.json").is_file():
            files[str(file.relative_to(EXAMPLES))] = file
    return files


def described(plan: Plan) -> dict[str, Any]:
    """Verdict and sizes of a plan."""
    return {
        "fits": plan.fits,
        "need": plan.need / GIB,
        "engine": plan.engine.total / GIB,
        "host": sum(part.nbytes for part in plan.host) / GIB,
        "warnings": len(plan.warnings),
    }


def changed(settings: Settings, draw: random.Random) -> tuple[list[str], str]:
    """Overrides and a GPU, drawn at random."""
    values = {key: draw.choice(choices) for key, choices in SIZES.items()}
    if read_model_shape(settings.model.path).experts is None:
        values.pop("parallel.expert")
    overrides = [f"{key}={value}" for key, value in values.items() if value is not None]
    overrides += [f"parallel.sequence={str(values['parallel.tensor'] > 1).lower()}", *draw.choice(MORE)]
    return overrides, draw.choice(CARDS)


def sweep(name: str, file: Path, number: int) -> Iterator[tuple[str, Plan]]:
    """That many plans of other layouts of an example which ``train`` would accept, the same in each call."""
    draw, settings, found = random.Random(name), load_settings(file), 0
    for _ in range(40 * number):
        overrides, card = changed(settings, draw)
        try:
            plan = make_plan(load_settings(file, overrides), card)
        except UserError:
            continue
        yield f"{name} {' '.join(overrides)} {card}", plan
        if (found := found + 1) == number:
            return


def record(number: int) -> dict[str, Any]:
    """All answers, with ``number`` layouts of each example."""
    answers: dict[str, Any] = {"examples": {}, "sweep": {}}
    for name, file in examples().items():
        plan = make_plan(load_settings(file))
        layout = smallest(plan)
        smaller = {"smallest": layout and layout.overrides}
        answers["examples"][name] = described(plan) | smaller
        if not file.is_relative_to(PAPER):
            answers["sweep"] |= {case: described(other) for case, other in sweep(name, file, number)}
    answers["published"] = {row.name: predict(row).step / row.seconds for row in ROWS}
    return answers


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print what changed between two records."""
    for part in ("examples", "sweep"):
        pairs = [(name, old, after[part][name]) for name, old in before[part].items() if name in after[part]]
        fitted = sum(old["fits"] for _, old, _ in pairs)
        print(f"{part}: {len(pairs)} of {len(before[part])} compared, {fitted} fitted before")
        for key in ("fits", "smallest", "warnings"):
            other = [(name, old[key], new[key]) for name, old, new in pairs if old.get(key) != new.get(key)]
            print(f"  {key}: {len(other)} changed")
            for name, old_value, new_value in other[:12]:
                print(f"    {name}: {old_value} -> {new_value}")
        for key in ("need", "engine", "host"):
            by_size = sorted(
                ((new[key] - old[key], name) for name, old, new in pairs), key=lambda x: abs(x[0])
            )
            beyond = sum(abs(difference) > 0.5 for difference, _ in by_size)
            print(
                f"  {key}, GiB: at most {by_size[-1][0]:+.2f} ({by_size[-1][1]}); {beyond} by more than 0.5"
            )
    print("published steps, plan / published:")
    for name, ratio in before["published"].items():
        print(f"  {name}: {ratio:.3f} -> {after['published'][name]:.3f}")


def main() -> None:
    """Record, or compare two records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record here, otherwise print it")
    parser.add_argument("--layouts", type=int, default=45, metavar="N", help="layouts of each example: 45")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        compare(*(json.loads(file.read_text()) for file in options.compare))
        return
    began = time.monotonic()
    text = json.dumps(record(options.layouts), indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)
        print(f"{options.out}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
