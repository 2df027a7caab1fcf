"""No process of a run imports from the working directory, but for a reward function that the user names.

Why: a file ``json.py`` or ``cv2.py`` that happens to be there would be executed in every process. Not
covered: vLLM's own processes, which get PYTHONSAFEPATH (tests/unit/test_engine_command); that a user's
function in the working directory is found (test_reward_pool).
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rpg_megatron.config import load_settings
from rpg_megatron.launcher.nodes import NodeAssignment
from rpg_megatron.launcher.rank_env import NodeSpec, rank_starts
from rpg_megatron.launcher.reaper import Reaper
from rpg_megatron.launcher.scratch_dirs import Workspace
from rpg_megatron.rewards.pool import WorkerPool, start_function
from rpg_megatron.system.parent_death import with_parent_death_signal

NAMES = ("shutil", "ctypes", "math_verify", "torch", "numpy")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts modules into the working directory that report their import; returns the file of the reports."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'trapped')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "trapped"


def test_helpers_of_the_launcher(trap: Path) -> None:
    Reaper().dismiss()
    subprocess.run(with_parent_death_signal(["true"], signal.SIGKILL), check=True)
    assert not trap.exists()


def test_reward_workers(trap: Path) -> None:
    function = start_function("rpg_megatron.rewards.reward:overlong_penalty", 60, 1 << 33)
    with closing(WorkerPool(function, 1)):
        assert not trap.exists()


def test_ranks(trap: Path, config_file: Path, tmp_path: Path) -> None:
    settings = load_settings(config_file)
    share, module = NodeAssignment(range(1), range(0)), "rpg_megatron.data.trajectory"
    spec, space = (
        NodeSpec(settings, Path("no-run"), "", share, rank_module=module),
        Workspace(tmp_path, tmp_path),
    )
    ((_, command, environment),) = rank_starts(spec, space, None, "127.0.0.1", 1)
    assert command[0] == sys.executable
    subprocess.run(command, env=environment, check=True)
    assert not trap.exists()
