"""The switches of ``profile``: a trace of the named steps and ranks with its phases, and no other file.

Why: a trace is requested once in a run of days; it must then exist and be complete, and cost nothing before.
Not covered: what is recorded of a GPU, NVTX (tests/gpu).
"""

import gzip
import json
from pathlib import Path

import pytest
import torch
import yaml

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.config.profile import ProfileSettings
from rpg_megatron.training.profiling import Profiler

CPU = torch.device("cpu")


def run_steps(folder: Path, settings: ProfileSettings, rank: int) -> list[str]:
    messages: list[str] = []
    profiler = Profiler(settings, folder, rank, CPU)
    for step in range(1, 4):
        with profiler.step(step, messages.append), profiler.phase("update"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    return messages


def test_named_steps_of_named_ranks_are_traced(tmp_path: Path) -> None:
    settings = ProfileSettings(steps=(2, 3), ranks=(1,))
    for rank in range(2):
        assert run_steps(tmp_path, settings, rank) == []
    files = sorted(tmp_path.rglob("*.*"))
    assert [f.name for f in files] == ["step_000002_rank_1.json.gz", "step_000003_rank_1.json.gz"]
    for file in files:
        names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert {"update", "aten::matmul"} <= names


def test_a_step_that_fails_leaves_no_file_and_the_next_is_traced(tmp_path: Path) -> None:
    profiler = Profiler(ProfileSettings(steps=(1, 2)), tmp_path, 0, CPU)
    with pytest.raises(KeyError), profiler.step(1, print):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with profiler.step(2, print):
        pass
    assert [f.name for f in (tmp_path / "profile").iterdir()] == ["step_000002_rank_0.json.gz"]


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    messages = run_steps(tmp_path, ProfileSettings(steps=(1,)), 0)
    assert len(messages) == 1
    assert "step 1: the profile cannot be written" in messages[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["profile.memory=true"], "memory has no effect without steps"),
        (["profile.steps=[0]"], "profile.steps[0]: must be greater than or equal to 1"),
        (["profile={steps: [1], memory: true}", "device=cpu"], "profile.memory needs device cuda"),
        (["profile.nvtx=true", "device=cpu"], "profile.nvtx needs device cuda"),
        (["profile.ranks=[0, 2]", "parallel.tensor=2"], "there is no rank 2; the last one is 1"),
        (["engine.quantization=fp8", "device=cpu"], "engine.quantization fp8 needs device cuda"),
    ],
)
def test_settings_without_effect(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"path": "d"}}))
    with pytest.raises(UserError) as caught:
        load_settings(file, overrides)
    assert message in str(caught.value)
