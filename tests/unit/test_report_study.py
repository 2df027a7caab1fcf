"""Studies in the report: which runs are one arm, means and intervals over seeds, differences between arms.

Why: a wrong interval looks like any other number, and a wrong pairing makes a difference out of noise. The
statistics are checked against published tables, and against integrals and samples of numpy, not against their
own formulas. Not covered: curves and bands, which the page computes (tests/integration/test_report_browser).
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rpg_megatron import cli
from rpg_megatron.commands.report.render import write_report
from rpg_megatron.commands.report.run_files import read_run, thin_rows
from rpg_megatron.commands.report.seeds import compare, estimate, t_quantile
from rpg_megatron.commands.report.study import Arm, describe_study, find_arms, name_arms
from tests.support.report_runs import page_data

Settings = dict[str, Any]


def make(folder: Path, values: list[float], config: Settings | str, **more: float) -> Path:
    """A run with a held-out accuracy at each step. config: settings, or the text of the file."""
    folder.mkdir(parents=True)
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    (folder / "config.yaml").write_text(text)
    rows = [{"step": step, "eval/e/avg@1": value, **more} for step, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arm(seed: int | None, lr: float = 1e-6, **more: Any) -> Settings:
    return {"seed": seed, "name": f"r{seed}", "optimizer": {"lr": lr, "beta1": 0.9}, **more}


def arms_of(folders: list[Path]) -> list[Arm]:
    return find_arms([read_run(folder) for folder in folders], [folder.name for folder in folders])


def study_of(folders: list[Path]) -> Any:
    """What the page has, after JSON."""
    study = page_data(write_report(folders, folders[0] / "r.html"))["study"]
    runs = [read_run(folder) for folder in folders]
    plain = json.loads(json.dumps(describe_study(runs, arms_of(folders)), allow_nan=False))
    assert study == plain | {"width": 1}
    return study


# -- arms ----------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_seed_and_whereabouts_are_one_arm(tmp_path: Path) -> None:
    elsewhere = {"runs": "/b", "cluster": {"interface": "ib0"}, "checkpoint": {"every": 7}, "trackers": []}
    folders = [
        make(tmp_path / "a", [0.1], arm(0)),
        make(tmp_path / "b", [0.1], arm(0, 2e-6)),
        make(tmp_path / "c", [0.1], arm(10, **elsewhere)),
        make(tmp_path / "d", [0.1], arm(2)),
        make(tmp_path / "e", [0.1], arm(1, 2e-6)),
    ]
    first, second = arms_of(folders)
    assert (first.name, first.runs, first.repeats) == ("lr 1e-06", {"0": 0, "2": 3, "10": 2}, ())
    assert (second.name, second.runs) == ("lr 2e-06", {"0": 1, "1": 4})


def test_of_runs_of_one_seed_the_longest_counts(tmp_path: Path) -> None:
    folders = [
        make(tmp_path / name, [0.1] * steps, arm(seed))
        for name, seed, steps in (("a", 0, 3), ("b", 0, 9), ("c", 1, 4))
    ]
    (only,) = arms_of(folders)
    assert (only.runs, only.repeats, only.name) == ({"0": 1, "1": 2}, (0,), "all runs")


def test_unrelated_runs_have_no_study(tmp_path: Path) -> None:
    """Nor have repetitions of one run: their page is as before."""
    unrelated = [make(tmp_path / f"u{i}", [0.1], arm(i, 1e-6 * (i + 1))) for i in range(2)]
    repeated = [make(tmp_path / f"r{i}", [0.1] * 9000, arm(3)) for i in range(2)]
    for folders in (unrelated, repeated):
        assert arms_of(folders) == []
        data = page_data(write_report(folders, tmp_path / "r.html"))
        assert "study" not in data
        assert set(data) == {"made", "version", "refresh", "runs"}
    assert "means over 3 steps" in data["runs"][0]["notes"][0]


def test_runs_without_settings_are_arms_of_their_own(tmp_path: Path) -> None:
    folders = [make(tmp_path / f"r{seed}", [0.1, 0.2], arm(seed)) for seed in (0, 1)]
    folders += [make(tmp_path / name, [0.3], text) for name, text in (("x", "a: [1\n"), ("y", ""))]
    found = arms_of(folders)
    assert [(one.name, list(one.runs.values())) for one in found] == [
        ("all runs", [0, 1]),
        ("x", [2]),
        ("y", [3]),
    ]
    assert arms_of(folders[2:]) == [], "nobody knows whether these two have the same settings"


@pytest.mark.parametrize(
    ("configs", "names"),
    [
        ([{"o.lr": "1e-06", "p": "urkl"}, {"o.lr": "1e-06", "p": "rkl"}], ["urkl", "rkl"]),
        ([{"d.path": "/x/aa.jsonl"}, {"d.path": "/y/bb.jsonl"}], ["d aa.jsonl", "d bb.jsonl"]),
        ([{"d.path": "/x/a", "m.path": "/m"}, {"d.path": "/y/a", "m.path": "/m"}], ["a", "a (2)"]),
        ([{"a.k": "1", "b.k": "1"}, {"a.k": "1", "b.k": "2"}, {"a.k": "2", "b.k": "1"}],
         ["a.k 1 · b.k 1", "a.k 1 · b.k 2", "a.k 2 · b.k 1"]),
        ([{"t": "rpg", "beta": "1"}, {"t": "grpo"}], ["rpg", "grpo"]),
        ([{"k": "null"}, {}, {"k": "true"}], ["k none", "k none (2)", "k true"]),
        ([{key: "1" if key == own else "0" for key in "vwxyz"} for own in "vwxyz_"],
         ["v 1", "w 1", "x 1", "y 1", "z 1", "usual settings"]),
    ],
)  # fmt: skip
def test_names_are_what_tells_arms_apart(configs: list[dict[str, str]], names: list[str]) -> None:
    assert name_arms(configs) == names


# -- statistics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (30, 2.042), (100, 1.984)],
)
def test_quantiles_are_those_of_the_table(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


@pytest.mark.parametrize("freedom", [1.5, 2.7, 6.31, 41.9, 5000.5])
def test_quantiles_between_whole_numbers_hold_their_share(freedom: float) -> None:
    t = np.linspace(0, t_quantile(freedom), 200_001)
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(scale) * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    assert np.trapezoid(density, t) == pytest.approx(0.475, abs=1e-8)
    values = [t_quantile(freedom + step) for step in (0, 0.5, 1, 10)]
    assert all(a > b for a, b in pairwise(values))


def test_means_and_their_intervals() -> None:
    found = estimate([0.5, 0.6, 0.55])
    assert found is not None
    assert found == pytest.approx((0.55, 4.302653 * np.std([0.5, 0.6, 0.55], ddof=1) / math.sqrt(3), 3))
    assert estimate([0.3]) == (0.3, None, 1)
    assert estimate([]) is None
    assert estimate([1e100, -1e100]) == pytest.approx((0.0, 12.7062047 * 1e100, 2))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of samples with known means: 4 pairs that share noise, and 3 and 5 values of unequal scatter."""
    rng = np.random.default_rng(0)
    held = {"mean": 0, "paired": 0, "welch": 0}
    number = 2000
    for _ in range(number):
        shared = rng.normal(size=5)
        a = dict(zip("0123", (shared[:4] + 0.3 * rng.normal(size=4) + 0.7).tolist(), strict=True))
        b = dict(zip("0123", (shared[:4] + 0.3 * rng.normal(size=4)).tolist(), strict=True))
        c = dict(zip("45678", (3 * shared).tolist(), strict=True))
        mean = estimate([*a.values()])
        assert mean.margin is not None
        held["mean"] += abs(mean.mean - 0.7) < mean.margin
        for kind, other in (("paired", b), ("welch", c)):
            few = dict(zip("012", (0.7 + 0.5 * rng.normal(size=3)).tolist(), strict=True))
            found = compare(a if kind == "paired" else few, other)
            assert found.paired == (kind == "paired")
            held[kind] += found.interval.low < 0.7 < found.interval.high
    for kind, count in held.items():
        assert count / number == pytest.approx(0.95, abs=0.02), kind


def test_pairs_take_out_what_seeds_share() -> None:
    a, b = {"0": 0.30, "1": 0.50, "2": 0.71}, {"0": 0.24, "1": 0.45, "2": 0.64}
    paired = compare(a, b)
    welch = compare(a, {"3": 0.24, "1": 0.45, "2": 0.64})
    assert paired.value == pytest.approx(0.06)
    assert (paired.paired, paired.verdict) == (True, "higher")
    half = 4.302653 * 0.01 / 3**0.5
    assert paired.interval == pytest.approx((0.06 - half, 0.06 + half))
    assert (welch.value, welch.paired, welch.verdict) == (pytest.approx(0.06), False, "unclear")
    reverse = compare(b, a)
    assert reverse.verdict == "lower"


def test_welchs_interval_by_hand() -> None:
    # Variances 4 and 1 of 4 and 2 values: 1 + 0.5 = 1.5; freedom 1.5² / (1² / 3 + 0.5² / 1) = 3.857.
    a = {str(i): v for i, v in enumerate((10 - 3**0.5, 10 - 3**0.5, 10 + 3**0.5, 10 + 3**0.5))}
    b = {"0": 7 - 0.5**0.5, "1": 7 + 0.5**0.5}
    found = compare(a, b)
    assert found.interval.margin == pytest.approx(t_quantile(2.25 / (1 / 3 + 0.25)) * 1.5**0.5)
    assert found.interval == pytest.approx((3 - 2.8176 * 1.5**0.5, 3 + 2.8176 * 1.5**0.5), abs=1e-3)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"0": 0.5}, {"0": 0.4}),
        ({"0": 0.5}, {"0": 0.4, "1": 0.3}),
        ({"0": 0.5, "1": 0.5}, {"0": 0.4, "2": 0.4}),
        ({"0": 0.3, "1": 0.6}, {"0": 0.2, "1": 0.5}),  # their differences are equal but for rounding
    ],
)
def test_without_a_spread_of_seeds_there_is_no_interval(a: dict[str, float], b: dict[str, float]) -> None:
    found = compare(a, b)
    assert found.value > 0
    assert (found.interval, found.verdict) == (None, "unknown")
    assert compare(a, {}) is None


# -- the page ------------------------------------------------------------------------------------------------


def test_a_study_of_two_settings(tmp_path: Path) -> None:
    last = {1e-6: [0.40, 0.50, 0.45], 2e-6: [0.50, 0.58, 0.55]}
    folders = [
        make(tmp_path / f"{lr}-{seed}", [0.1, 0.6, value], arm(seed, lr), **{"reward/mean": value - 1})
        for lr, values in last.items()
        for seed, value in enumerate(values)
    ]
    (folders[0] / "summary.json").write_text("{}")
    study = study_of(folders)
    slow, fast = study["arms"]
    assert (slow["name"], slow["runs"], slow["finished"], slow["running"]) == ("lr 1e-06", [0, 1, 2], 1, 0)
    assert (fast["runs"], fast["finished"], fast["steps"], fast["speed"]) == ([3, 4, 5], 0, [2, 2], None)
    assert slow["reward"] == pytest.approx([-0.55, 4.302653 * 0.05 / 3**0.5, 3])
    (measure,) = study["measures"]
    assert (measure["name"], measure["kind"], measure["steps"]) == ("e/avg@1", "percent", [[2, 2], [2, 2]])
    assert measure["last"][0] == pytest.approx([0.45, 4.302653 * 0.05 / 3**0.5, 3])
    assert measure["best"] == [pytest.approx([0.6, 0.0, 3])] * 2
    (pair,) = measure["pairs"]
    assert (pair["arms"], pair["paired"], pair["seeds"], pair["verdict"]) == ([1, 0], True, [3, 3], "higher")
    assert pair["value"] == pytest.approx(0.28 / 3)
    assert study["t"] == [0.0, t_quantile(1), t_quantile(2)]


def test_unequal_lengths_missing_sets_and_nan(tmp_path: Path) -> None:
    """Each mean is over the seeds that have a finite value, and says how many."""
    nan = float("nan")
    folders = [
        make(tmp_path / "a0", [0.1, 0.4, 0.5], arm(0), **{"reward/mean": nan}),
        make(tmp_path / "a1", [0.1, 0.6], arm(1)),
        make(tmp_path / "a2", [nan, float("inf")], arm(2)),
        make(tmp_path / "a3", [], arm(3)),
        make(tmp_path / "b0", [0.2, 0.3, nan], arm(0, 2e-6), **{"sft/heldout_loss": 2.0}),
    ]
    study = study_of(folders)
    first, second = study["arms"]
    assert (first["steps"], second["steps"]) == ([0, 2], [2, 2])
    assert (first["reward"], second["reward"]) == (None, None)
    accuracy, loss = study["measures"]
    assert accuracy["last"][0] == pytest.approx([0.55, 12.7062047 * 0.05, 2])
    assert (accuracy["last"][1], accuracy["steps"]) == ([0.3, None, 1], [[1, 2], [1, 1]])
    (pair,) = accuracy["pairs"]
    assert (pair["verdict"], pair["seeds"], pair["steps"], pair["paired"]) == (
        "unknown",
        [1, 2],
        [1, 2],
        False,
    )
    assert (loss["name"], loss["kind"], loss["last"], loss["pairs"]) == (
        "held-out loss",
        "number",
        [None, [2.0, None, 1]],
        [],
    )


def test_the_best_loss_is_the_lowest(tmp_path: Path) -> None:
    folders = [make(tmp_path / str(seed), [0.1] * 3, arm(seed)) for seed in range(2)]
    for folder in folders:
        rows = [{"step": step, "sft/heldout_loss": loss} for step, loss in enumerate((3.0, 1.0, 2.0))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (measure,) = study_of(folders)["measures"]
    assert (measure["last"], measure["best"]) == ([[2.0, 0.0, 2]], [[1.0, 0.0, 2]])


def test_huge_values_and_odd_settings_make_a_page(tmp_path: Path) -> None:
    odd: Settings = {"seed": [{"a": 1}], "optimizer": {"lr": "<b>" * 99}, "reward": {"terms": {}}}
    folders = [
        make(tmp_path / "a", [1e100], arm(0)),
        make(tmp_path / "b", [-1e100], arm(1)),
        make(tmp_path / "c", [1e100], odd),
        make(tmp_path / "d", [-9e99], odd | {"seed": {"b": None}}),
        make(tmp_path / "e", [-9e99], odd | {"seed": True}),
    ]
    study = study_of(folders)
    assert [len(one["runs"]) for one in study["arms"]] == [2, 3]
    assert max(len(one["name"]) for one in study["arms"]) < 40
    (pair,) = study["measures"][0]["pairs"]
    assert (pair["verdict"], pair["paired"]) == ("unclear", False)


def test_pairs_are_limited(tmp_path: Path) -> None:
    folders = [
        make(tmp_path / f"{n}-{seed}", [0.1 * seed + 0.01 * n * n], arm(seed, (n + 1) * 1e-6))
        for n in range(10)
        for seed in range(2)
    ]
    study = study_of(folders)
    assert (len(study["arms"]), study["compared"], len(study["measures"][0]["pairs"])) == (10, 8, 28)
    assert {i for pair in study["measures"][0]["pairs"] for i in pair["arms"]} == set(range(8))


def test_the_same_steps_are_merged_in_all_runs() -> None:
    long = [{"step": step, "a": float(step)} for step in range(100)]
    short = [{"step": step, "a": float(step)} for step in range(1, 51)]
    sparse = [{"step": 10 * step, "a": 1.0} for step in range(60)]
    merged, width = thin_rows([long, short], 20)
    assert width == 5
    assert [row["step"] for row in merged[0]] == list(range(4, 100, 5))
    assert merged[1][1:10] == merged[0][1:10]
    assert (merged[1][0], merged[1][-1]) == ({"step": 4, "a": 2.5}, {"step": 50, "a": 50.0})
    assert all(len(rows) <= 20 for rows in thin_rows([long, sparse], 20)[0])
    far = [*long, {"step": 2**53, "a": 0.0}]
    assert thin_rows([far], 20)[1] < 10, "one far step does not merge the others"


def test_a_folder_of_runs_is_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study"
    for number in range(24):
        make(study / f"s-{number:03d}", [0.1, 0.2], arm(number % 6, (number // 6 + 1) * 1e-6))
    make(tmp_path / "private", [0.9], arm(0))
    (study / "s-100").symlink_to(tmp_path / "private")
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(study), str(study / "s-000")])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{study / 'report.html'}\n"
    data = page_data(study / "report.html")
    assert [run["name"] for run in data["runs"]] == [f"s-{number:03d}" for number in range(24)]
    assert [len(one["runs"]) for one in data["study"]["arms"]] == [6] * 4
