"""Every recipe of the paper and the H100 examples, run by the command line with the quickstart's model.

Why: a recipe that loads and plans may still ask for something that does not train. Loss, advantage, anchor,
optimizer, dynamic sampling, penalty and reward are the file's own; model, data, layout and batch are
overridden (tests/support/recipes), after which all 49 files are 17 different runs
(test_examples::test_with_small_sizes_each_file_is_a_rehearsed_run), one test each. Not
covered: mathematics, GPUs, and whether a row's figure comes out.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rpg_megatron.config import load_settings
from tests.support.recipes import EXAMPLES, REHEARSED, shrink

pytestmark = pytest.mark.usefixtures("forked_starts")


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("file", REHEARSED, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_the_quickstart_model_runs_through(file: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rpg_megatron.cli", "train", str(file), *shrink(file), f"runs={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tmp_path.iterdir()
    check_run(run, file)


def check_run(run: Path, file: Path) -> None:
    """The folder of a run is that of two steps of this file, and its numbers are sound."""
    settings = load_settings(run / "config.yaml")
    assert run.name == f"{load_settings(file).name}-001"
    assert settings.objective == load_settings(file).objective

    before, *steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "eval/heldout/avg@1" in before
    assert [row["step"] for row in steps] == [1, 2]
    assert [row["lr"] for row in steps] == pytest.approx([1e-7, 2e-7])  # warm-up over 10 steps
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
        assert row["policy/grad_norm"] > 0
        assert ("sampling/generated" in row) == (settings.rollout.dynamic is not None)
        assert row["mismatch/tokens"] > 0
        assert row.get("mismatch/logp_max", 0) < 1e-3
    assert (run / "hf" / "step_000002" / "config.json").is_file()
