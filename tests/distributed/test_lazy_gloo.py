"""Large gloo groups connect two ranks when these first exchange something, and everything works as before.

Why: gloo connects each rank of a group with every other one, which no job of thousands of ranks can afford.
Torch makes such groups lazy on request, which few programs use.
Proved, with every group lazy, against groups that are connected at once: collectives of all kinds and
dtypes, in groups of all and of two ranks; messages between any two; objects and errors; two new groups in two
threads; groups go on when another one is destroyed; torch's checkpoint; Megatron's pipeline schedules,
optimizer and checkpoint give the same numbers, bit for bit. When a rank dies, the others fail within the
group's time limit, those that were connected with it and those that were not.
Not covered: several nodes, thousands of ranks (docs/evidence/scale.md).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import make_resume_case, write_batch
from tests.support.ranks import run_ranks

WORKER, WORLD = "tests.distributed.lazy_gloo_worker", 4
AT_ONCE, LAZY = "32", "0"


def check_deaths(folder: Path) -> None:
    """Every survivor got an error from both groups long before gloo's usual limit, 12 hours here."""
    for rank in range(WORLD - 1):
        errors = json.loads((folder / f"deaths_{rank}.json").read_text())
        assert errors.keys() == {"used", "fresh"}, rank
        for name, (seconds, message) in errors.items():
            assert seconds < 60, (rank, name, seconds, message)
            assert "gloo" in message, (rank, name, message)


def test_collectives_of_lazy_groups(tmp_path: Path) -> None:
    results = {}
    for mesh in (AT_ONCE, LAZY):
        folder = tmp_path / mesh
        folder.mkdir()
        results[mesh] = run_ranks(WORKER, WORLD, folder, mesh)
        check_deaths(folder)
    made = {mesh: [rank.pop("made") for rank in ranks] for mesh, ranks in results.items()}
    assert made == {AT_ONCE: [[WORLD - 1, 0]] * WORLD, LAZY: [[0, 1]] * WORLD}, "connections, ports"
    assert results[LAZY] == results[AT_ONCE]
    first, last = results[LAZY][0], results[LAZY][-1]
    assert first["objects"]["flags"] == [False, True, -4]
    assert first["objects"]["on the first"] == ["", "y", "yy", "yyy"]
    assert first["objects"]["failures"] == ["list index out of range", "rank 3: list index out of range"]
    assert last["objects"]["failures"] == ["rank 0: list index out of range", "list index out of range"]
    assert first["checkpoint"] == [1.5] * 4 + [1.0] * 2
    assert first["threads"] == [[[[r, n, i] for r in range(WORLD)] for n in range(5)] for i in range(2)]


@pytest.mark.long
def test_megatron_on_lazy_groups(tmp_path: Path) -> None:
    """An update at TP2xPP2, saved, then one at PP2xVPP2xDP2 from that checkpoint."""
    write_batch(tmp_path)
    results = []
    for mesh in (AT_ONCE, LAZY):
        folder = tmp_path / mesh
        folder.mkdir()
        (folder / "batch.pkl").symlink_to(tmp_path / "batch.pkl")
        square, interleaved = {"tensor": 2, "pipeline": 2}, {"pipeline": 2, "virtual": 2, "data": 2}
        saved = f"saved {mesh}"
        cases = {
            "save": make_resume_case(tmp_path, "distributed", square, None, [saved]),
            "load": make_resume_case(tmp_path, "distributed", interleaved, saved, [None]),
        }
        (folder / "cases.json").write_text(json.dumps(cases))
        results.append(run_ranks(WORKER, WORLD, folder, mesh, "tests.distributed.resume_worker"))
    assert results[0] == results[1]
