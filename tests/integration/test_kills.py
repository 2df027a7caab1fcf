"""A run that is killed five times ends, bit for bit, as an undisturbed one. Up to 180 kills in 36 runs.

Why: what a kill at one moment breaks, another moment does not show, and whatever a checkpoint forgets shows
only as a run that learns a little worse. The kills are drawn from a seed (``tests/support/kills``): SIGKILL
to every process at once, the launcher, a rank, the sampler or one of its workers, a reward worker or its fork
server, an engine's server or its core; in a start, rollout, update, save, sync, evaluation or export. Real
engines and two ranks by the command line, in two layouts, with both transports. After each kill, and the
resume by the same command where the run ended, the rows of metrics equal those of the undisturbed run; so do,
at the end, weights, checkpoints, rollouts and evaluations; nothing is left of it. A row for each kill is in
``docs/evidence/kills.jsonl``: ``hit`` is the phase that the run was in when all of its processes had been
stopped for the kill.

A third layout samples ahead (``rollout.ahead=2``), with responses that continue over weight updates: contents
depend on timing there, so ``tests/support/ahead_runs`` compares which groups each step holds, the age of each
token and the guard's numbers. Kills are aimed at rollout, update and sync; Ctrl-C and SIGTERM, after which
the run saves and resumes, are among them. ``interrupted`` counts responses of several versions so far.

In another layout there are two launchers, as on two nodes, each with a rank and an engine; either is killed.
In a fourth layout a response has two turns, sampled by an episode: environment workers are killed as reward
workers are, being forks of fork servers too. In a fifth one only adapters (LoRA) are trained. In a sixth one,
episodes of verifiers call a tool: the servers that run them are killed as well.

Four of five runs fork vLLM's processes (``tests/support/engine``): the same processes die, but an engine's
start, in which kills hit too, is shorter. Not covered: GPUs, several nodes, a machine that loses power.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.long_results import code_commit, put_row
from tests.support.ahead_runs import compare_ahead, count_mixed
from tests.support.engine import install_plugin
from tests.support.kills import KilledRun, draw
from tests.support.watched_runs import (
    ADAPTERS,
    AHEAD,
    EPISODES,
    LAYOUTS,
    VERIFIERS,
    Reference,
    leave_alone,
    private_tmp,
)

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "evidence" / "kills.jsonl"
FORKED = """
import os
from vllm.platforms.cpu import CpuPlatform

def register():
    plain = CpuPlatform.check_and_update_config.__func__

    def check(cls, config):
        plain(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check)
"""
"""A plug-in: on a CPU vLLM spawns its core and workers to bind their threads; ours are not bound."""
RUNS = [
    (seed, layout)
    for layout in LAYOUTS
    for seed in range(6 if layout in (AHEAD, EPISODES, ADAPTERS, VERIFIERS) else 12)
]


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that makes vLLM fork its processes."""
    return install_plugin(tmp_path_factory.mktemp("plugin"), "forked", FORKED)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, forked: Path) -> Callable[[str], Reference]:
    """The reference of a layout; it runs once."""
    runs: dict[str, Reference] = {}

    def get(layout: str) -> Reference:
        if layout not in runs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", str(forked), prepend=os.pathsep)
                run = leave_alone(tmp_path_factory.mktemp("reference") / "run", layout)
            if layout == AHEAD:
                assert compare_ahead(run.folder, run.folder) == []
                assert count_mixed(run.folder) > 0
            runs[layout] = run
        return runs[layout]

    return get


@pytest.mark.long  # five kills take five minutes
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("seed", "layout"), RUNS)
def test_killed_five_times(
    layout: str,
    seed: int,
    undisturbed: Callable[[str], Reference],
    forked: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if layout == VERIFIERS and not (ROOT / ".venv-verifiers" / ".complete").exists():
        pytest.skip("run make .venv-verifiers")
    commit, changed = code_commit(ROOT)

    def record(row: dict[str, Any]) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        full_row = {
            "layout": layout,
            "seed": seed,
            **row,
            "commit": commit + "+changes" * changed,
            "date": now,
        }
        put_row(FILE, "layout", "seed", "kill", row=full_row)

    reference = undisturbed(layout)
    if seed % 5 < 4:
        monkeypatch.setenv("PYTHONPATH", str(forked), prepend=os.pathsep)
    with private_tmp() as tmp:
        KilledRun(tmp_path / "run", layout, tmp, reference, record).go(draw(layout, seed))
