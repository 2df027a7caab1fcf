"""The best checkpoints by an evaluation stay, whatever else is removed, and after a kill at any moment.

Why: a run that overfits has its best weights in the middle, and pruning would remove them. Proved on folders
and rows as a run leaves them. Not covered: saving and exporting them (tests/distributed/test_preemption.py).
"""

import json
import math
from pathlib import Path

import pytest

from rpg_megatron.checkpoints import run_folder
from rpg_megatron.checkpoints.megatron_folder import MANIFEST
from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.settings import make_settings
from rpg_megatron.training.best_checkpoints import BestCheckpoints

KEY = "eval/heldout/avg@1"
VALUES = {0: 0.9, 1: 0.3, 2: 0.5, 3: 0.5, 4: math.nan, 5: 0.2, 6: 0.4}


def settings(best: str, *overrides: str) -> Settings:
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "evaluation": {"data": {"path": "h"}}}
    return make_settings(raw, [f"checkpoint={{keep: 1, keep_best: {best}}}", *overrides], "x")


def write_run(folder: Path, steps: list[int]) -> None:
    rows = [json.dumps({"step": step, KEY: value, "reward/mean": 0.1}) for step, value in VALUES.items()]
    (folder / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 7, "reward/mean": 1}', '{"step": 8,']))
    for step in steps:
        step_folder = folder / "checkpoints" / f"step_{step:06d}"
        step_folder.mkdir(parents=True)
        (step_folder / MANIFEST).touch()


@pytest.mark.parametrize(
    ("best", "order", "kept"),
    [
        ("{k: 1}", [2], [7, 2]),
        ("{k: 2}", [2, 3], [7, 3, 2]),
        ("{k: 3}", [2, 3, 6], [7, 6, 3, 2]),
        ("{k: 2, mode: min}", [5, 1], [7, 5, 1]),
        ("{k: 9}", [2, 3, 6, 1, 5], [7, 6, 5, 3, 2, 1]),
        ("null", [], [7]),
    ],
)
def test_what_is_kept(tmp_path: Path, best: str, order: list[int], kept: list[int]) -> None:
    write_run(tmp_path, list(range(1, 8)))
    ranking = BestCheckpoints(settings(best), tmp_path)
    ranking.prune()
    assert list(list_steps(tmp_path)) == kept
    if not order:
        assert not (tmp_path / "checkpoints" / "best.json").exists()
        return
    best_steps = json.loads((tmp_path / "checkpoints" / "best.json").read_text())["best"]
    assert [item["step"] for item in best_steps] == order
    assert best_steps[0] == {"step": order[0], "folder": f"step_{order[0]:06d}", "value": VALUES[order[0]]}
    assert ranking.summary() == {"metric": KEY, **best_steps[0]}


def test_a_step_is_saved_when_it_is_among_the_best(tmp_path: Path) -> None:
    ranking, due = BestCheckpoints(settings("{k: 2}"), tmp_path), []
    for step, value in VALUES.items():
        ranking.add({"step": step, KEY: value})
        due.append(ranking.includes(step))
    assert due == [False, True, True, True, False, False, False]
    assert not BestCheckpoints(settings("null"), tmp_path).includes(1)


def test_a_kill_during_pruning_loses_none_of_the_best(tmp_path, monkeypatch) -> None:
    write_run(tmp_path, [1, 2, 5, 6])

    def killed(folder: Path, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        BestCheckpoints(settings("{k: 1}"), tmp_path).prune()
    monkeypatch.undo()
    assert set(list_steps(tmp_path)) >= {2, 6}
    run_folder.remove_parts(tmp_path)
    BestCheckpoints(settings("{k: 1}"), tmp_path).prune()
    assert list(list_steps(tmp_path)) == [6, 2]


@pytest.mark.parametrize(
    ("best", "overrides", "message"),
    [
        (
            "{metric: evaluation/accuracy}",
            (),
            "has no metric 'evaluation/accuracy'; use one of eval/held",
        ),
        ("{}", ("evaluation=null",), "needs an evaluation"),
        ("{}", ("checkpoint.every=null",), "needs checkpoints"),
        ("{k: 0}", (), "checkpoint.keep_best.k"),
    ],
)
def test_settings_that_cannot_work(best: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        settings(best, *overrides)
    assert message in str(error.value)
