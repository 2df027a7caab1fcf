"""Parts of a report: reading run folders, verdicts, the choice of responses, escaping.

Why: users decide by a report what to do with a run that cost days, often one that broke. It must neither fail
on a broken folder nor call a faulty run healthy. Folders are written by training's own writers. Not covered:
how a browser shows the page (tests/integration/test_report_browser).
"""

import dataclasses
import hashlib
import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rpg_megatron import cli
from rpg_megatron.commands import train
from rpg_megatron.commands.report import render
from rpg_megatron.commands.report.changes import change_as_plain, find_changes, wilson
from rpg_megatron.commands.report.health import check_health
from rpg_megatron.commands.report.render import write_report
from rpg_megatron.commands.report.run_files import name_runs, read_run, thin_rows
from rpg_megatron.commands.report.samples import choose_samples
from rpg_megatron.commands.report.timeline import last_steps
from rpg_megatron.commands.sample import print_samples
from rpg_megatron.config import Settings, UserError
from rpg_megatron.data import rollout_files
from rpg_megatron.data.rollout_files import read_rollouts, write_rollouts
from rpg_megatron.data.trajectory import NOT_SAMPLED
from rpg_megatron.launcher.environment import record_environment
from rpg_megatron.launcher.run_dir import LOCK, hold_folder
from tests.support.report_runs import HOSTILE, PROBLEMS, make_run, page_data, write_timeline


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 120 steps that learnt. Shared: do not write to it."""
    folder = tmp_path_factory.mktemp("runs") / "good-001"
    return make_run(folder, steps=120, rollouts_every=10, evaluate_every=40, text=HOSTILE)


def rows_of(folder: Path, rows: list[dict[str, Any]], config: str = "training: {steps: 50}\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def verdicts(folder: Path) -> dict[str, str]:
    return {check.name: check.verdict for check in check_health(read_run(folder))}


# -- reading -------------------------------------------------------------------------------------------------


def test_everything_of_a_run_is_in_the_page(run: Path, tmp_path: Path) -> None:
    file = write_report([run], tmp_path / "r.html")
    (shown,) = page_data(file)["runs"]
    assert (shown["name"], shown["state"], shown["steps"]) == ("good-001", "finished", 120)
    assert shown["step"] == list(range(121))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for key, values in shown["metrics"].items():
        for row, value in zip(rows, values, strict=True):
            assert (key in row) == (value is not None)
            assert value is None or value == pytest.approx(row[key], rel=1e-4)
    assert shown["config"]["objective.divergence"] == "urkl"
    (start,) = shown["starts"]
    assert start["packages.torch"] == "2.13.0"
    assert shown["notes"] == []


def test_the_page_needs_nothing_else(run: Path, tmp_path: Path) -> None:
    page = write_report([run], tmp_path / "r.html").read_text()
    assert not re.search(
        r"(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", _outside_data(page)
    )


def _outside_data(page: str) -> str:
    """The page without its data and the address of uPlot in the first line of its file."""
    page = page.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "", 1)
    return re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)


def test_the_library_of_the_charts_is_the_released_one(run: Path, tmp_path: Path) -> None:
    """Files of the npm package uplot 1.6.32, unchanged, and its license in every page that has them."""
    folder = Path(render.__file__).parent / "vendor"
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert digests == {
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "vendor/*" in project["tool"]["setuptools"]["package-data"]["rpg_megatron.commands.report"]
    page = write_report([run], tmp_path / "r.html").read_text()
    for name in digests:
        text = (folder / name).read_text()
        assert (html.escape(text) if name == "LICENSE" else text) in page


def test_hostile_text_stays_text(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'x"><script>alert(1)'
    folder.mkdir()
    rows_of(folder, [{"step": 1, HOSTILE: 1.0, "bad": "\u2028"}], f"name: {json.dumps(HOSTILE)}\n")
    page = write_report([run, folder], tmp_path / "r.html").read_text()
    assert len(re.findall(r"<script", page)) == 2  # the data and the page's own
    assert len(re.findall(r"</script", page)) == 2
    assert "window.hacked" not in _outside_data(page)
    assert "alert(1)" not in _outside_data(page).replace("&lt;script&gt;alert(1)", "")
    data = page_data(tmp_path / "r.html")
    assert any(item["text"].startswith(HOSTILE) for item in data["runs"][0]["samples"]["items"])
    assert data["runs"][1]["config"]["name"] == HOSTILE
    assert data["runs"][1]["metrics"][HOSTILE] == [1]


def test_broken_lines_nan_and_repeated_steps(tmp_path: Path) -> None:
    folder = rows_of(tmp_path / "run", [{"step": s, "reward/mean": s / 10, "text": "x"} for s in (0, 1, 2)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "reward/mean": 0.9, "policy/loss": NaN, "n": 1' + b"0" * 400 + b"}\n")
        file.write(
            b'[1, 2]\n{"no": "step"}\n\xff\xfe\n{"step": 3, "policy/loss": -Infinity}\n{"step": 4, "rew'
        )
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    assert run.rows[2]["reward/mean"] == 0.9
    assert math.isnan(run.rows[2]["policy/loss"])
    assert run.notes == ["metrics.jsonl: 4 of 9 lines could not be read and are skipped"]
    assert verdicts(folder)["numbers"] == "bad"
    assert "from step 2 on: policy/loss" in str(check_health(run))
    (shown,) = page_data(write_report([folder]))["runs"]
    assert shown["metrics"]["policy/loss"] == [None, None, "nan", "-inf"]


def test_an_empty_run_and_damaged_files_make_a_page_all_the_same(run: Path, tmp_path: Path) -> None:
    folder = rows_of(tmp_path / "empty", [], config="a: [1\n")
    (folder / "summary.json").write_text("{")
    (folder / "environment.json").write_text('{"not": "a list"}')
    for name, content in (
        ("rollouts/step_000001.parquet", b"no parquet"),
        ("rollouts/step_000002.parquet", (run / "rollouts/step_000010.parquet").read_bytes()[:300]),
        ("evaluation/step_000000.jsonl", b'{"prompt_id": 0}\n'),
        ("evaluation/notes.jsonl", b"mine"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (shown,) = page_data(write_report([folder]))["runs"]
    assert shown["state"] == "not finished"
    for name in ("config.yaml", "summary.json", "environment.json", "step_000001", "step_000000"):
        assert any(name in note for note in shown["notes"]), (name, shown["notes"])


def _each_step(value: object, count: int = 12) -> str:
    keys = ("time/step", "reward/mean", "reward/accuracy", "reward/std", "eval/e/avg@1", "policy/grad_norm")
    return "".join(json.dumps({"step": s, **dict.fromkeys(keys, value)}) + "\n" for s in range(count))


def _problem(**fields: object) -> str:
    row: dict[str, object] = {"set": "e", "prompt_id": 1, "prompt": "p", "answer": "a", "responses": ["r"]}
    row |= {"correct": [True], "lengths": [3], "finishes": ["stop"]} | fields
    return json.dumps(row) + "\n" + json.dumps(row | fields.fromkeys(fields, [[1]])) + "\n"


_TIMELINE = """\
{"phase": "update", "step": 1, "begin": 1, "end": 9}
{"time": 2, "running": [1, 2]}
{"time": 3, "running": [1]}
{"phase": "update", "running": 5}
{"phase": "update", "step": 1, "begin": 1, "end": 2, "running": 5}
"""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", _each_step(1.7e308), None),
        ("metrics.jsonl", '{"step": 1}\n{"step": 1%s}\n{"step": -1}\n' % ("0" * 4000), "2 of 3 lines"),
        ("metrics.jsonl", "".join(f'{{"step": 1, "k{n}": 1}}\n' for n in range(1100)), "100 metrics are"),
        ("summary.json", '{"seconds": 1%s}' % ("0" * 400), "cannot be read"),
        ("summary.json", '{"seconds": NaN}', "cannot be read"),
        ("environment.json", f"[{'{"a":' * 1200}1{'}' * 1200}]", "cannot be read"),
        ("config.yaml", "rollout: {prompts_per_step: 1%s}\n" % ("0" * 400), None),
        ("config.yaml", "a: [{2020-01-01: 1}]\n", "cannot be read"),
        ("evaluation/step_000000.jsonl", "[1]\n", "1 of 1 lines"),
        ("evaluation/step_000000.jsonl", _problem(responses=["a", "b"]), "2 of 2 lines"),
        ("evaluation/step_000000.jsonl", _problem(lengths=[3]), "1 of 2 lines"),
        ("evaluation/step_000000.jsonl", _problem(lengths=["x"]), "2 of 2 lines"),
        ("evaluation/step_000000.jsonl", _problem(finishes=[[math.nan]]), "2 of 2 lines"),
        ("evaluation/step_\u00b2.jsonl", _problem(), None),
        ("timeline.jsonl", _TIMELINE, "1 of 5 lines"),
    ],
)
def test_values_of_another_form_do_not_reach_the_arithmetic(
    tmp_path: Path, name: str, content: str, message: str | None
) -> None:
    rows = [json.loads(line) for line in _each_step(0.5).splitlines()]
    folder = rows_of(tmp_path / "run", rows, "rollout: {prompts_per_step: 4}\n")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    (shown,) = page_data(write_report([folder]))["runs"]
    assert [name in note and message in note for note in shown["notes"]] == ([True] if message else [])


def test_a_folder_that_cannot_be_listed_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(run: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rollout_files, "list_rollouts", closed)
    folder = rows_of(tmp_path / "run", [{"step": 1}])
    (shown,) = page_data(write_report([folder]))["runs"]
    assert shown["notes"] == ["training responses cannot be read (Permission denied)"]


def test_a_page_has_nothing_of_files_to_which_a_run_only_links(run: Path, tmp_path: Path) -> None:
    """The run may be another user's, and the page has more readers than a private file."""
    names = ("metrics.jsonl", "summary.json", "environment.json", "timeline.jsonl")
    names += ("evaluation/step_000040.jsonl", "rollouts/step_000010.parquet")
    folder = rows_of(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(run / name)
    os.mkfifo(folder / LOCK)  # opening it would block
    (shown,) = page_data(write_report([folder]))["runs"]
    assert (shown["steps"], shown["samples"]["items"], shown["starts"], shown["timeline"]) == (
        0,
        [],
        [],
        None,
    )
    for name in names:
        assert any(Path(name).name in note for note in shown["notes"]), (name, shown["notes"])


def test_a_run_that_is_held_is_running(tmp_path: Path) -> None:
    folder = rows_of(tmp_path / "run", [{"step": 3}])
    lock = hold_folder(folder)
    assert read_run(folder).running
    assert verdicts(folder)["end"] == "good"
    lock.close()
    assert not read_run(folder).running
    assert verdicts(folder)["end"] == "warn"
    assert hold_folder(folder) is not None, "a look at a run must not hold it"


@pytest.mark.parametrize(
    ("target", "message"),
    [("missing", "no such folder"), ("file", "is a file"), ("empty", "not the folder of a run")],
)
def test_no_run_is_one_message(run: Path, tmp_path: Path, capfd: Any, target: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty" / "deeper" / "run").mkdir(parents=True)
    (tmp_path / "empty" / "deeper" / "run" / "config.yaml").write_text("name: run\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(run), str(tmp_path / target)])
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (run / "report.html").exists()


def test_a_file_that_cannot_be_written_is_one_message(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no/r\.html: cannot be written .* --out"):
        write_report([run], tmp_path / "no" / "r.html")


def test_names_tell_runs_apart() -> None:
    assert name_runs([Path("/a/x-001"), Path("/a/x-002")]) == ["x-001", "x-002"]
    assert name_runs([Path("/a/x-001"), Path("/b/x-001")]) == ["a/x-001", "b/x-001"]


def test_thinned_rows_keep_maxima_evaluations_and_nan() -> None:
    rows = [
        {"step": s, "a": float(s), "ratio/max": -float(s), "b": math.nan if s == 3 else 0} for s in range(10)
    ]
    rows[1]["eval/x/avg@1"] = 0.5
    (thin,), width = thin_rows([rows], 4)
    assert (width, len(thin)) == (3, 4)
    assert thin[0] == {"step": 2, "a": 1.0, "ratio/max": 0.0, "b": 0, "eval/x/avg@1": 0.5}
    assert math.isnan(thin[1]["b"])
    assert [row["step"] for row in thin] == [2, 5, 8, 9]
    assert thin_rows([rows], 10) == ([rows], 1)


# -- verdicts ------------------------------------------------------------------------------------------------


def test_the_best_evaluation_is_the_earliest_of_the_highest(tmp_path: Path) -> None:
    values = {0: 0.2, 10: 0.5, 20: 0.5, 30: 0.3}
    run = read_run(rows_of(tmp_path / "r", [{"step": s, "eval/e/avg@2": v} for s, v in values.items()]))
    (change,) = find_changes(run, {})
    assert (change.before, change.after, change.best) == (0.2, 0.3, (10, 0.5))
    assert change_as_plain(change)["best"] == (10, 0.5)


def test_a_good_run_is_called_good(run: Path) -> None:
    assert set(verdicts(run).values()) == {"good"}
    changes = {c.name: c for c in find_changes(read_run(run), {"aime24": PROBLEMS})}
    assert list(changes) == ["aime24/avg@4", "reward/accuracy", "reward/mean"]
    assert {c.verdict for c in changes.values()} == {"up"}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert changes["aime24/avg@4"].before == rows[0]["eval/aime24/avg@4"]
    assert changes["aime24/avg@4"].after == rows[-1]["eval/aime24/avg@4"]
    evaluations = [(r["step"], r["eval/aime24/avg@4"]) for r in rows if "eval/aime24/avg@4" in r]
    assert changes["aime24/avg@4"].best == max(evaluations, key=lambda item: (item[1], -item[0]))
    assert changes["reward/mean"].best is None
    assert changes["reward/mean"].after == pytest.approx(sum(r["reward/mean"] for r in rows[-10:]) / 10)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([2.0, 1.5, 1.2, 1.1, 1.0], "up"),
        ([2.0, 1.995], "flat"),
        ([1.0, 0.5, 1.2], "down"),
    ],
)
def test_a_fine_tuning_is_judged_by_its_held_out_loss(tmp_path, losses: list[float], verdict: str) -> None:
    rows = [{"step": step, "sft/heldout_loss": loss, "policy/loss": 1.0} for step, loss in enumerate(losses)]
    rows[0]["eval/e/avg@1"] = rows[-1]["eval/e/avg@1"] = 0.5
    loss, accuracy = find_changes(read_run(rows_of(tmp_path / "run", rows)), {})
    assert (loss.name, loss.before, loss.after) == ("sft/heldout_loss", losses[0], losses[-1])
    assert (loss.verdict, accuracy.verdict) == (verdict, "unknown")
    assert find_changes(read_run(rows_of(tmp_path / "one", rows[:1])), {}) == []


def test_held_out_change_within_its_error_is_no_change(tmp_path: Path) -> None:
    folder = rows_of(tmp_path / "run", [{"step": s, "eval/e/avg@1": v} for s, v in ((0, 0.50), (9, 0.55))])
    run = read_run(folder)
    (small,), (large,) = find_changes(run, {"e": 100}), find_changes(run, {"": 10_000})
    assert small.margin == pytest.approx(2 * math.sqrt((0.25 + 0.2475) / 100), rel=0.05)
    assert large.margin == pytest.approx(2 * math.sqrt((0.25 + 0.2475) / 10_000), rel=0.05)
    assert (small.verdict, large.verdict) == ("flat", "up")
    rows = [{"step": s, "eval/e/avg@1": v} for s, v in ((0, -(2**999)), (1, -1e99), (9, 2.0))]
    (odd,) = find_changes(read_run(rows_of(tmp_path / "odd", rows)), {"e": 100})
    assert (odd.before, odd.verdict) == (-1e99, "unknown")  # no share of problems
    (unknown,) = find_changes(run, {})  # nobody knows how many problems it has
    assert (unknown.verdict, unknown.margin) == ("unknown", None)


@pytest.mark.parametrize(
    ("before", "after", "problems", "verdict"),
    [
        (1 / 64, 0.0, 64, "flat"),  # one response
        (0.0, 1.0, 1, "flat"),
        (0.0, 0.0, 64, "flat"),
        (0.0, 1.0, 8, "up"),
        (0.6, 0.3, 200, "down"),
    ],
)
def test_few_problems_prove_little(
    tmp_path: Path, before: float, after: float, problems: int, verdict: str
) -> None:
    """Held out, and in a short training run, whose steps are too few for an error from their scatter."""
    values = ((1, before), (4, after))
    held_out = rows_of(tmp_path / "a", [{"step": s, "eval/e/avg@1": v} for s, v in values])
    (change,) = find_changes(read_run(held_out), {"e": problems})
    assert change.verdict == verdict
    rows = [
        {"step": s, "reward/accuracy": v, "reward/mean": 2 * v - 1, "reward/std": 2 * (v * (1 - v)) ** 0.5}
        for s, v in values
    ]
    training = rows_of(tmp_path / "b", rows, f"rollout: {{prompts_per_step: {problems}}}\n")
    assert find_changes(read_run(training), {})[0].verdict == verdict
    assert {c.verdict for c in find_changes(read_run(rows_of(tmp_path / "c", rows)), {})} == {"unknown"}


def test_intervals_are_wilsons() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, and 0 of 20; his z is 1.96.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=2e-3)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=6e-3)


def test_a_vanished_signal_is_no_spike_of_the_gradient(tmp_path: Path) -> None:
    def row(step: int, silent: bool) -> dict[str, float]:
        no_signal = {"reward/std": 0.0, "groups/equal_rewards": 1.0, "policy/grad_norm": 1e-7}
        return {"step": step, **(no_signal if silent else {"reward/std": 0.5, "groups/equal_rewards": 0.4})}

    rows = [row(s, silent=s > 3) for s in range(1, 11)]
    for r, norm in zip(rows, (1.0, 1.2, 0.9), strict=False):
        r["policy/grad_norm"] = norm
    config = "advantage: {type: grpo}\nrollout: {samples_per_prompt: 8}\n"
    checks = {c.name: c for c in check_health(read_run(rows_of(tmp_path / "run", rows, config)))}
    assert "spike" not in checks["gradient"].text
    assert checks["gradient"].verdict == "good"
    rows[2]["policy/grad_norm"] = 1e-7
    rows[2] |= {"reward/std": 0.0, "groups/equal_rewards": 1.0}
    of_two = {c.name: c for c in check_health(read_run(rows_of(tmp_path / "of two", rows, config)))}
    assert of_two["gradient"].text == "median norm 1.1, largest 1.2"
    assert checks["signal"].verdict == "warn"
    assert checks["signal"].text == (
        "100% of the last groups had equal rewards; no signal in 7 steps (4, 5, 6, …): all rewards were equal"
    )
    # Rewards of another group may still tell a group of equal ones apart from it.
    for r in rows:
        r["reward/std"] = 0.5
    batch = rows_of(tmp_path / "batch", rows, config.replace("grpo", "batch_mean"))
    assert verdicts(batch)["signal"] == "good"


MISMATCH = {"mismatch/logp_mean": 1e-3, "mismatch/logp_max": 1.0}
ENGINE = {"mismatch/logp_engine_mean": 0.02, "mismatch/logp_engine_ratio": 20.0}
QUIET_ENGINE = {"mismatch/logp_engine_mean": 1e-3, "mismatch/logp_engine_ratio": 1.1}


@pytest.mark.parametrize(
    ("name", "verdict", "change"),
    [
        ("mismatch", "bad", lambda s: MISMATCH | {"mismatch/logp_mean": 0.06 if s == 30 else 1e-3}),
        ("mismatch", "bad", lambda s: MISMATCH | {"mismatch/logp_engine_mean": 0.06 if s == 30 else 1e-3}),
        ("mismatch", "bad", lambda s: MISMATCH | (ENGINE if s == 30 else QUIET_ENGINE)),
        ("mismatch", "good", lambda s: {"mismatch/logp_mean": 0.04, "mismatch/logp_max": 3.0}),
        ("rewards", "bad", lambda s: {"reward/failed_frac": 0.5 if s == 30 else 0.0}),
        ("rewards", "bad", lambda s: {"reward/failed_frac": 0.0, "eval/a/failed_frac": float(s == 30)}),
        ("rewards", "warn", lambda s: {"reward/failed_frac": 0.01}),
        ("tools", "good", lambda s: {"env/t_calls": 2.0, "env/t_errors": 1.0, "env/t_raised": 0.0}),
        ("tools", "warn", lambda s: {"env/t_calls": 2.0, "env/t_errors": 1.0, "env/t_raised": 0.5}),
        ("tools", "warn", lambda s: {"env/t_calls": 2.0, "env/t_errors": 1.9, "env/t_raised": 0.0}),
        ("rewards", "good", lambda s: {"reward/failed_frac": 0.0, "eval/a/failed_frac": 0.0}),
        ("entropy", "warn", lambda s: {"policy/entropy": math.exp(-s / 8)}),
        ("entropy", "warn", lambda s: {"policy/entropy": 0.3 + s / 10}),
        ("entropy", "good", lambda s: {"policy/entropy": math.exp(-s / 30)}),
        ("length", "warn", lambda s: {"response/truncated_frac": s / 100}),
        ("length", "warn", lambda s: {"response/truncated_frac": float(s == 9)}),
        ("length", "good", lambda s: {"response/truncated_frac": 0.9 * (s == 9)}),
        ("updates", "warn", lambda s: {"policy/skipped_updates": float(s == 9)}),
        ("updates", "good", lambda s: {"policy/skipped_updates": 0.0}),
        ("gradient", "warn", lambda s: {"policy/grad_norm": 20.0 if s == 25 else 1.0}),
        ("clipping", "warn", lambda s: {f"policy/clip_frac_{k}": 0.01 * s for k in ("high", "low", "c")}),
        ("engines", "warn", lambda s: {"engine/restarts": float(s == 9)}),
        ("engines", "good", lambda s: {"engine/restarts": 0.0}),
    ],
)
def test_what_is_sick_is_called_so(tmp_path: Path, name: str, verdict: str, change: Any) -> None:
    folder = rows_of(tmp_path / "run", [{"step": s, **change(s)} for s in range(1, 51)])
    assert verdicts(folder)[name] == verdict


def test_an_engine_that_fell_back_is_remembered(tmp_path: Path) -> None:
    folder = rows_of(tmp_path / "run", [{"step": 1, "engine/restarts": 0.0}])
    (folder / "logs").mkdir()
    startup = "engine 0 is up after 9 s\n"
    for line, verdict in (
        ("", "good"),
        ("warning: engine 0 ... (VLLM_USE_V2_MODEL_RUNNER=0); log: x\n", "warn"),
    ):
        (folder / "logs" / "launcher.log").write_text(line + startup)
        assert verdicts(folder)["engines"] == verdict


def test_sample_prints_responses_of_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_samples(run, None, None, 3)
    newest = capsys.readouterr().out
    assert newest.startswith("step 120, prompt ")
    assert newest.count("-- response ") == 3
    assert newest.endswith("3 of 16 responses; raise --count for more\n")
    assert "\x1b" not in newest
    print_samples(run, 10, "tokens", 99)
    chosen = capsys.readouterr().out
    assert "step 10, prompt 1003, answer" in chosen
    assert "Step 10: 17 * 3 = 51." in chosen
    assert "-- response 2: reward " in chosen
    for t in read_rollouts(run / "rollouts" / "step_000010.parquet"):
        verdict = "correct" if t.correct else "wrong"
        assert f"-- response {t.sample}: reward {t.reward:.4g}, {verdict}, {t.sampled} tokens" in chosen
    for step, prompt, message in (
        (11, None, "no rollouts of step 11, but of 1 to 120"),
        (10, "x&y", "no prompt"),
    ):
        with pytest.raises(UserError, match=message):
            print_samples(run, step, prompt, 1)


def test_the_mismatch_has_the_guards_bounds(tmp_path: Path) -> None:
    row = {"step": 1, "mismatch/logp_mean": 1e-6, "mismatch/logp_max": 2e-3}
    for config, verdict in (
        ("precision: {dtype: float32}\n", "bad"),
        ("precision: {dtype: bfloat16}\n", "good"),
        ("precision: {dtype: float32}\nguards: {mismatch: warn, mismatch_max: 0.01}\n", "good"),
        ("precision: {dtype: float32}\nguards: {of_an_older: version, mismatch_max: -1}\n", "bad"),
    ):
        assert verdicts(rows_of(tmp_path / "run", [row], config))["mismatch"] == verdict, config
    assert verdicts(rows_of(tmp_path / "ratio", [{"step": 1} | MISMATCH | ENGINE], ""))["mismatch"] == "bad"


# -- responses -----------------------------------------------------------------------------------------------


def test_changed_verdicts_are_shown_with_both_responses(run: Path) -> None:
    samples = choose_samples(read_run(run), read=10**8, room=10**6)
    first, last = (
        {
            row["prompt_id"]: 2 * sum(row["correct"]) >= len(row["correct"])
            for row in map(json.loads, (run / f"evaluation/step_{step:06d}.jsonl").read_text().splitlines())
        }
        for step in (0, 120)
    )
    assert samples.sizes == {"": PROBLEMS}
    learnt = {f"held-out/{i}" for i in first if last[i] and not first[i]}
    forgotten = {f"held-out/{i}" for i in first if first[i] and not last[i]}
    assert samples.changed == {"learnt": len(learnt), "forgotten": len(forgotten)}
    assert learnt
    pairs: dict[str, list[Any]] = {}
    for item in samples.items:
        if "change" in item:
            assert item["change"] == (
                "learnt" if item["id"] in {int(k.split("/")[1]) for k in learnt} else "forgotten"
            )
            pairs.setdefault(f"{item['set']}/{item['id']}", []).append((item["step"], item["right"]))
    expected = {key: [(0, False), (120, True)] for key in learnt}
    assert pairs == expected | {key: [(0, True), (120, False)] for key in forgotten}
    for key in learnt:
        assert [mark[0] for mark in samples.verdicts[key]] == [0, 40, 80, 120]
        assert samples.prompts[key]["answer"] == str(17 * int(key.split("/")[1]) % 1000)


def test_held_out_sets_of_one_run_are_told_apart(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2, evaluate_every=1)
    for file in (folder / "evaluation").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        twice = [row | {"set": name} for name in ("aime24", "amc23") for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in twice))
    samples = choose_samples(read_run(folder), read=10**8, room=10**6)
    assert samples.sizes == {"aime24": PROBLEMS, "amc23": PROBLEMS}
    assert {i["set"] for i in samples.items} == {"training", "held-out aime24", "held-out amc23"}


def test_training_responses_have_their_numbers(run: Path) -> None:
    samples = choose_samples(read_run(run), read=10**8, room=10**6)
    training = [item for item in samples.items if item["set"] == "training"]
    assert {item["step"] for item in training} >= {1, 120}
    written = read_rollouts(run / "rollouts" / "step_000120.parquet")
    lengths = {t.prompt_id: len(t.response) for t in written if t.finish == "length"}  # of one in each group
    shown = [item for item in training if item["step"] == 120 and item["finish"] == "length"]
    assert shown
    assert all(item["tokens"] == lengths[item["id"]] - 8 for item in shown), "without an environment's"
    assert all(20 <= item["tokens"] < 60 for item in training)
    mixed = [item for item in training if "versions" in item]
    assert mixed
    for item in mixed:
        assert [version for version, _ in item["versions"]] == [item["step"] - 2, item["step"] - 1]
        assert sum(tokens for _, tokens in item["versions"]) == item["tokens"]
    assert {item["reward"] for item in training} == {1.0, -1.0}
    assert {item["finish"] for item in training} == {"stop", "length"}
    assert "12 tokens; no tokenizer.json" in samples.prompts[f"training/{training[0]['id']}"]["text"]


def test_prompts_are_decoded_by_the_exported_tokenizer(run: Path, tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, steps=2, rollouts_every=1)
    (folder / "hf" / "step_000002").mkdir(parents=True)
    (folder / "hf" / "step_000002" / "tokenizer.json").write_bytes(
        (checkpoint / "tokenizer.json").read_bytes()
    )
    texts = training_prompts(folder)
    assert texts
    assert all("tokenizer.json" not in text and len(text) == 12 for text in texts)
    _check_turns(folder)
    (folder / "hf" / "step_000002" / "tokenizer.json").unlink()
    (folder / "hf" / "step_000002" / "tokenizer.json").symlink_to(checkpoint / "tokenizer.json")
    assert all("no tokenizer.json was found" in text for text in training_prompts(folder))


def _check_turns(folder: Path) -> None:
    """Conversations are shown by turns: what the policy sampled, the environment's tokens, the rest."""
    items = choose_samples(read_run(folder), read=10**8, room=10**6).items
    items = [item for item in items if item["set"] == "training"]
    shown = [item for item in items if "turns" in item]
    assert shown
    assert len(shown) < len(items), "the others have one turn"
    assert all("text" in item for item in items if item not in shown)
    for item in shown:
        assert "text" not in item
        assert [sampled for sampled, _ in item["turns"]] == [True, False, True]
        first, given, last = (len(text) for _, text in item["turns"])  # a character is a token
        whole = item["tokens"]
        assert (given, first, last) == (8, whole // 2, whole - whole // 2)


def test_long_conversations_are_shortened(tmp_path: Path, checkpoint: Path) -> None:
    """Their first and last turns are shown; the text of each stays within the budget."""
    folder = make_run(tmp_path / "run", steps=2, rollouts_every=1)
    (folder / "hf" / "step_000002").mkdir(parents=True)
    shutil.copy(checkpoint / "tokenizer.json", folder / "hf" / "step_000002")
    file = folder / "rollouts" / "step_000002.parquet"
    (t, *_) = [t for t in read_rollouts(file) if t.sample == 1]
    turns = 2000
    response = np.tile(np.array([33, 33, 33, 34], np.int32), turns)
    mask = np.tile([True, True, True, False], turns)
    logp = np.zeros(4 * turns, np.float32)
    arrays = {"versions": np.where(mask, 1, NOT_SAMPLED).astype(np.int32), "behaviour": logp, "old": logp}
    row = dataclasses.replace(t, response=response, mask=mask, branch=2, anchor=logp, **arrays)
    write_rollouts(file, [row])
    items = choose_samples(read_run(folder), read=10**8, room=10**6).items
    (item,) = [item for item in items if item.get("branch")]
    assert item["branch"] == 2
    assert len(item["turns"]) == 41
    assert item["turns"][0][0]
    assert not item["turns"][-1][0]
    assert item["turns"][20] == (False, f"[… {2 * turns - 40:,} turns left out …]")
    assert {len(text) for sampled, text in item["turns"] if sampled} == {3}


def test_a_tokenizer_that_ends_its_process_is_a_note(tmp_path: Path) -> None:
    """Its decoder strips more than a token has, for which the Rust library has no error."""
    folder = tmp_path / "run"
    make_run(folder, steps=2, rollouts_every=1)
    export = folder / "hf" / "step_000002"
    export.mkdir(parents=True)
    words = {"a" * (number + 1): number for number in range(1000)}
    tokenizer = json.loads(Tokenizer(WordLevel(words, "a")).to_str())
    tokenizer["decoder"] = {"type": "Strip", "content": "a", "start": 2000, "stop": 5}
    (export / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = read_run(folder)
    samples = choose_samples(run, read=10**8, room=10**6)
    assert "tokenizer.json: prompts cannot be shown as text (its reader ended: exit code 1)" in run.notes
    assert any("no tokenizer.json was found" in each["text"] for each in samples.prompts.values())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_the_settings_of_others_choose_no_tokenizer(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, steps=2, rollouts_every=1)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"]["path"] = str(checkpoint)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert all("tokenizer.json" not in text for text in training_prompts(folder))
    os.chown(folder, 12345, -1)
    assert all("no tokenizer.json was found" in text for text in training_prompts(folder))


def training_prompts(folder: Path) -> list[str]:
    samples = choose_samples(read_run(folder), read=10**8, room=10**6)
    return [prompt["text"] for key, prompt in samples.prompts.items() if key.startswith("training/")]


def test_budgets_of_reading_and_of_the_page_are_kept(run: Path) -> None:
    small = choose_samples(read_run(run), read=40_000, room=10**6)
    assert all("the beginning of each" in part for part in small.read)
    assert small.sizes == {}
    assert small.items
    for room in (3000, 30_000):
        samples = choose_samples(read_run(run), read=10**8, room=room)
        assert 0 < len(json.dumps(samples.items)) < 2 * room
    assert choose_samples(read_run(run), read=1000, room=10**6).items == []


# -- timeline ------------------------------------------------------------------------------------------------


def test_the_last_steps_of_the_timeline(tmp_path: Path) -> None:
    folder = rows_of(tmp_path / "run", [{"step": 1}])
    assert last_steps(read_run(folder)) is None
    end = write_timeline(folder, range(1, 9), engines=2)
    with (folder / "timeline.jsonl").open("ab") as file:
        file.write(b'{"phase": "update"}\n[1]\n{"time": NaN, "running": [1]}\n\xff\n{"phase": "coll')
    timeline = last_steps(read_run(folder))
    assert (timeline["steps"], timeline["seconds"]) == ([3, 4, 5, 6, 7, 8], 240)
    assert timeline["phases"][:5] == [
        ["collect", 3, 0, 18],
        ["logprobs", 3, 18, 24],
        ["update", 3, 24, 39],
        ["sync", 3, 39, 40],
        ["collect", 4, 40, 58],
    ]
    assert len(timeline["polls"]) == 120
    assert [lane["name"] for lane in timeline["lanes"]] == ["engine 0", "engine 1"]
    assert timeline["lanes"][1]["values"][:10] == [101] * 9 + [0]
    assert timeline["shares"] == pytest.approx({"collect": 0.45, "sync": 0.025, "engines": 0.55})

    write_timeline(folder, range(5, 7), engines=2, begin=end + 9000)  # resumed: without the time between
    resumed = last_steps(read_run(folder))
    assert (resumed["steps"], resumed["seconds"]) == ([5, 6], 80)
    assert page_data(write_report([folder]))["runs"][0]["timeline"]["steps"] == [5, 6]


def test_many_engines_are_summed_and_a_rotated_file_is_read(tmp_path: Path) -> None:
    folder = rows_of(tmp_path / "run", [{"step": 1}])
    write_timeline(folder, range(1, 41), engines=64)
    data = (folder / "timeline.jsonl").read_bytes()
    middle = data.index(b"\n", len(data) * 9 // 10) + 1
    (folder / "timeline_earlier.jsonl").write_bytes(data[:middle])
    (folder / "timeline.jsonl").write_bytes(data[middle:])
    timeline = last_steps(read_run(folder))
    assert timeline["steps"] == list(range(35, 41))
    assert {lane["name"]: lane["values"][0] for lane in timeline["lanes"]} == {
        "engines busy": 64,
        "requests": sum(range(100, 164)),
    }


# -- environment, launcher -----------------------------------------------------------------------------------


def test_each_start_is_recorded_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hush-1")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(sys, "argv", ["rpg-megatron", "train", "engine.arguments=[--api-key, hush-2]"])
    (tmp_path / "environment.json").write_text("torn")
    settings = Settings.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})
    for _ in range(2):
        assert record_environment(tmp_path, settings) == []
    text = (tmp_path / "environment.json").read_text()
    assert "hush" not in text
    starts = json.loads(text)
    assert len(starts) == 2
    assert starts[0]["variables"]["SLURM_JOB_ID"] == "4711"
    assert starts[0]["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert starts[0]["packages"]["megatron-core"] == "0.19.2"


def test_code_of_the_user_that_has_changed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    reward, loss = tmp_path / "my_reward.py", tmp_path / "elsewhere" / "my_losses.py"
    reward.write_text("one")
    loss.write_text("one")
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "objective": {"type": "my_losses:Soft"}}
    terms = {"a": {"type": "my_reward:digits"}, "b": {"type": "no_such_module:f"}, "c": {"type": "boxed"}}
    settings = Settings.model_validate(raw | {"reward": {"terms": terms}})
    assert record_environment(tmp_path / "run", settings) == []
    assert record_environment(tmp_path / "run", settings) == []
    for file, name in ((reward, "my_reward.py"), (loss, "my_losses.py")):
        file.write_text("two")
        (warning,) = record_environment(tmp_path / "run", settings)
        assert warning.startswith(f"warning: {name} has changed since the last start;")
        assert record_environment(tmp_path / "run", settings) == []
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [list(start["own_code"]) for start in starts] == [["my_losses.py", "my_reward.py"]] * 6


def test_a_broken_report_does_not_fail_the_run(run: Path, monkeypatch, capsys) -> None:
    def broken(*_: object, **options: object) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(render, "write_report", broken)
    train._report(run)
    assert "warning: no report was written: MemoryError('full')" in capsys.readouterr().out


def test_reading_a_run_needs_no_torch(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from rpg_megatron import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "finally: print([m for m in ('torch', 'vllm', 'transformers', 'megatron') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, "report", str(run), "--out", str(tmp_path / "r.html")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.stderr == ""
    assert process.stdout.splitlines() == [str(tmp_path / "r.html"), "[]"]
