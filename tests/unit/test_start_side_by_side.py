"""Colocated engines and ranks start at the same time, and ranks allocate when the engines sleep.

Why: a rank that builds its model while an engine measures its largest batch may exceed the GPU's memory, and
one that starts later imports for half a minute alone. Not covered: the launcher, which touches
the file before ranks start and removes it when all engines sleep (tests/integration/test_colocated_nodes.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpg_megatron.config import load_settings
from rpg_megatron.config.cluster import ENGINES_START
from rpg_megatron.training import rank


@pytest.mark.parametrize(
    ("colocated", "number", "waits"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_a_rank_builds_its_model_when_the_engines_sleep(
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    colocated: bool,
    number: int,
    waits: bool,
) -> None:
    """Rank 0 looks at the file; the others, also on other nodes, wait for rank 0."""
    start, events = tmp_path / ENGINES_START, []
    start.touch()

    def sleep(_: float) -> None:
        events.append("waits")
        if len(events) == 3:
            start.unlink()

    def build(*_: Any) -> SimpleNamespace:
        events.append("builds")
        return SimpleNamespace()

    monkeypatch.setattr(rank.time, "sleep", sleep)
    monkeypatch.setattr(rank, "barrier", lambda: events.append("meets"))
    settings = load_settings(config_file, [f"engine.colocated={colocated}"])
    mesh: Any = SimpleNamespace(rank=number)
    process = rank.RankProcess(settings, tmp_path, tmp_path, tmp_path, "", mesh, torch.device("cpu"))
    process.start_run(build)  # type: ignore[type-var]
    assert events == ["waits"] * 3 * waits + ["meets"] * colocated + ["builds"]
    assert start.exists() == (not waits)
