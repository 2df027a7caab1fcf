"""Studies: which runs a file means, their names and settings, and what is done again.

Why: a study is days of many GPUs. A combination that is missing, a seed that two runs share, or a name that
two arms share makes its table wrong without a word. Not covered: Slurm (test_slurm_scripts.py), the report
(test_report_study.py).
"""

import itertools
import json
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rpg_megatron.cli import app
from rpg_megatron.commands import study as command
from rpg_megatron.config import UserError, load_settings
from rpg_megatron.config.study import is_study, load_study
from rpg_megatron.launcher.checks import CheckedRun
from rpg_megatron.launcher.resume import find_finished
from rpg_megatron.launcher.run_dir import create_run, newest_run


@pytest.fixture
def write(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "rates.yaml") -> Path:
        file = config_file.parent / name
        file.write_text(f"config: {config_file.name}\nsettings: {{runs: {tmp_path / 'runs'}}}\n{text}")
        return file

    return write


def test_every_combination_once_seeds_outermost(write) -> None:
    file = write(
        "arms: {grpo: {objective: {type: grpo}, advantage.type: grpo, anchor.type: fixed}, rpg: {}}\n"
        "grid: {optimizer.lr: [1e-6, 3.0e-6], training.ppo_epochs: [1, 2]}\nseeds: [0, 7]\nat_once: 3\n"
    )
    study = load_study(file)
    assert [run.number for run in study.runs] == list(range(1, 17))
    expected = list(itertools.product([0, 7], ["grpo", "rpg"], [1e-6, 3e-6], [1, 2]))
    actual = [
        (
            run.settings.seed,
            run.settings.objective.type,
            run.settings.optimizer.lr,
            run.settings.training.ppo_epochs,
        )
        for run in study.runs
    ]
    assert actual == expected
    assert study.at_once == 3
    names = [run.settings.name for run in study.runs]
    assert len(set(names)) == 16
    assert names[0] == "rates-grpo-lr1e-6-ppo_epochs1-s0"
    assert names[-1] == "rates-rpg-lr3e-06-ppo_epochs2-s7"


def test_names_are_of_what_differs(write) -> None:
    arms = "arms:\n- {objective.beta: 0.1, objective.clip: {type: dual}}\n- {objective.beta: 0.2}\n"
    names = [run.arm for run in load_study(write(arms.replace(", objective.clip: {type: dual}", ""))).runs]
    assert names == ["beta0.1", "beta0.2"]
    only = load_study(write("seeds: [4, 5]\n", "my study!.yaml"))
    assert [run.settings.name for run in only.runs] == ["my-study-s4", "my-study-s5"]
    listed = load_study(write("arms:\n- {}\n- {training.ppo_epochs: 2}\n"))
    assert [run.settings.name for run in listed.runs] == [
        "rates-base",
        "rates-ppo_epochs2",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: [1, 1]\n", "seeds has 1 twice"),
        ("seeds: [0, 0]\n", "seeds has 0 twice"),
        ("arms:\n- {training.ppo_epochs: 2}\n- {training.ppo_epochs: 2}\n", "arms has base twice"),
        ("arms:\n- {optimizer.lr: 1.0}\n- {optimizer.lrr: 1.0}\n", "optimizer.lrr"),
        ("grid: {optimizer.lr: []}\n", "grid.optimizer.lr"),
        (
            "grid: {a: [1,2,3,4,5,6,7,8,9,10], b: [1,2,3,4,5,6,7,8,9,10], c: [1,2,3,4,5,6,7,8,9,10,11]}\n",
            "1,100 runs",
        ),
        ("sedes: [1]\n", "seeds"),
        ("seeds: 3\n", "seeds"),
        ("at_once: 0\n", "at_once"),
        ("name: a/b\n", "name"),
        ("seeds: [-1]\n", "seeds"),
        ("arms: {}\n", "arms"),
    ],
)
def test_mistakes_are_one_message(write, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_study(write(text))
    assert "rates.yaml" in str(error.value)


@pytest.mark.parametrize("override", ["optimizer.lr=1e-5", "optimizer={lr: 1e-5}", "seed=3", "name=x"])
def test_what_is_compared_cannot_be_overridden(write, override: str) -> None:
    file = write("grid: {optimizer.lr: [1e-6, 3e-6]}\nseeds: [1]\n")
    with pytest.raises(UserError, match="the study sets"):
        load_study(file, [override])
    assert len(load_study(file, ["training.ppo_epochs=2"]).runs) == 2


def test_odd_values_have_names(write) -> None:
    names = [run.arm for run in load_study(write("grid: {data.limit: [null, 5]}\n")).runs]
    assert names == ["limitNone", "limit5"]
    dates = write("arms:\n- {training.ppo_epochs: 1}\n- {training.ppo_epochs: 2024-01-01}\n")
    with pytest.raises(UserError, match=r"training\.ppo_epochs"):
        load_study(dates)


def test_a_finished_run_is_found_by_what_it_recorded(write, tmp_path: Path) -> None:
    """A model from the hub is recorded as its folder in the cache."""
    run = load_study(write("seeds: [1]\n")).runs[0]
    finish(run)
    model = run.settings.model.model_copy(update={"path": Path("some/model")})
    hub = run.settings.model_copy(update={"model": model})
    assert find_finished(hub) is not None
    assert find_finished(hub.model_copy(update={"seed": 5})) is None


def test_a_config_given_as_a_study_is_one_line(config_file: Path) -> None:
    with pytest.raises(UserError, match="is no study: it has no key config") as error:
        load_study(config_file)
    assert "\n" not in str(error.value)


def test_train_names_the_command_for_a_study(write) -> None:
    result = CliRunner().invoke(app, ["train", str(write("seeds: [1]\n"))])
    assert "is a study; use rpg-megatron study" in str(result.exception)


def test_a_plain_config_is_no_study(config_file: Path, tmp_path: Path) -> None:
    assert not is_study(config_file)
    assert not is_study(tmp_path / "absent")
    (tmp_path / "list.yaml").write_text("- config: x\n")
    assert not is_study(tmp_path / "list.yaml")


def finish(run, steps: int | None = None) -> Path:
    folder = create_run(run.settings)
    (folder / "summary.json").write_text(json.dumps({"steps": steps or run.settings.training.steps}))
    return folder


def test_finished_runs_are_not_done_again(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("grid: {optimizer.lr: [1e-6, 2e-6]}\nseeds: [1, 2]\n")
    runs = load_study(file).runs
    finish(runs[1])
    finish(runs[2], steps=1)  # it was shorter
    create_run(runs[3].settings)
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/said\necho Submitted batch job 7\n')
    queue = fake.with_name("squeue")
    queue.write_text("#!/bin/bash\n")
    for program in (fake, queue):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    result = CliRunner().invoke(app, ["study", str(file), "-o", "--partition=gpu", "training.ppo_epochs=1"])
    assert result.exit_code == 0, result.output
    said = (tmp_path / "said").read_text().splitlines()
    assert said[:2] == ["--array=1,3-4", "--job-name=rates"]
    assert said[3] == "--partition=gpu"
    assert said[5:] == [str(file), "training.ppo_epochs=1"]
    assert "Submitted batch job 7" in result.output
    # What waits or runs is not submitted twice.
    queue.write_text("#!/bin/bash\necho 3; echo 1\n")
    assert "--array=4 " in CliRunner().invoke(app, ["study", str(file), "--dry-run"]).output
    queue.write_text("#!/bin/bash\nprintf '%s\n' 1 3 4\n")
    (tmp_path / "said").unlink()
    assert "wait or run in a job" in CliRunner().invoke(app, ["study", str(file)]).output
    queue.write_text("#!/bin/bash\necho no controller >&2; exit 1\n")
    refused = CliRunner().invoke(app, ["study", str(file)])
    assert "squeue failed" in str(refused.exception)
    assert "no controller" in str(refused.exception)
    assert not (tmp_path / "said").exists()
    queue.write_text("#!/bin/bash\n")
    # Other settings train something else.
    again = CliRunner().invoke(app, ["study", str(file), "objective.beta=0.3", "--dry-run"])
    assert "--array=1-4 " in again.output
    for run in (runs[0], runs[2], runs[3]):
        finish(run)
    assert "all 4 runs are finished" in CliRunner().invoke(app, ["study", str(file)]).output
    assert [f.name for f in command.folders_of(file)] == [
        "rates-lr1e-6-s1-001",
        "rates-lr2e-6-s1-001",
        "rates-lr1e-6-s2-002",
        "rates-lr2e-6-s2-002",
    ]


def test_a_task_is_a_run_or_a_seed(write, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("grid: {optimizer.lr: [1e-6, 2e-6]}\nseeds: [5]\n")
    settings = command.settings_of_task(file, [], 2)
    assert (settings.seed, settings.optimizer.lr, settings.name) == (5, 2e-6, "rates-lr2e-6-s5")
    with pytest.raises(UserError, match="there is no run 3; the study has 1 to 2"):
        command.settings_of_task(file, [], 3)
    finish(load_study(file).runs[1])
    assert command.settings_of_task(file, [], 2) is None
    assert "run 2 of 2 is finished" in capsys.readouterr().out
    plain = command.settings_of_task(config_file, ["optimizer.lr=5e-7"], 3)
    assert (plain.seed, plain.optimizer.lr, plain.name.endswith("-s3")) == (3, 5e-7, True)


def test_the_newest_run_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("math-001", "math-002", "math-1000", "math-2-001", "other-007"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "math-003").mkdir()
    assert newest_run(Path("math")) == Path("runs/math-1000")
    assert newest_run(Path("runs/math")) == Path("runs/math-1000")
    assert newest_run(tmp_path / "runs" / "math-2") == tmp_path / "runs" / "math-2-001"
    assert newest_run(Path("runs/math-001")) == Path("runs/math-001")
    assert newest_run(Path("none")) == Path("none")
    assert newest_run(Path("Qwen/Qwen3-4B")) == Path("Qwen/Qwen3-4B")


# -- no setting is lost --------------------------------------------------------------------------------------


def test_a_section_is_merged_as_by_extends(write, config_file: Path) -> None:
    """A section that replaces the config's would train with other settings than the file says."""
    (config_file.parent / "base.yaml").write_text(
        f"extends: {config_file.name}\noptimizer: {{beta1: 0.8, schedule: {{type: cosine}}}}\n"
        "evaluation: {data: {path: train.jsonl}}\n"
    )
    file = write(
        "arms:\n  plain: {}\n  merged: {optimizer: {lr: 1.0e-5}, training: {ppo_epochs: 2}}\n"
        "  other: {optimizer: {schedule: {type: linear}}, evaluation: null}\n"
        "grid: {optimizer: [{warmup_steps: 3}, {warmup_steps: 4}]}\n"
    )
    file.write_text(file.read_text().replace(f"config: {config_file.name}", "config: base.yaml"))
    study = load_study(file)
    plain, merged, other = study.runs[0].settings, study.runs[2].settings, study.runs[4].settings
    assert [run.settings.optimizer.warmup_steps for run in study.runs] == [3, 4] * 3
    assert {run.settings.optimizer.beta1 for run in study.runs} == {0.8}
    assert (plain.optimizer.lr, merged.optimizer.lr, merged.training.ppo_epochs) == (1e-6, 1e-5, 2)
    assert merged.optimizer.schedule.type == "cosine"
    assert merged.training.steps == plain.training.steps
    assert (other.optimizer.schedule.type, other.evaluation) == ("linear", None)
    # What is started has the same settings.
    for run in study.runs:
        assert load_settings(study.config, list(run.overrides)) == run.settings


def test_settings_of_all_runs_are_merged_with_those_of_an_arm(write) -> None:
    text = "arms:\n  a: {optimizer: {beta2: 0.9}}\n  b: {optimizer.lr: 0.5}\n"
    file = write(text)
    file.write_text(file.read_text().replace("settings: {", "settings: {optimizer: {beta1: 0.7}, "))
    a, b = (run.settings.optimizer for run in load_study(file).runs)
    assert (a.beta1, a.beta2, b.beta1, b.lr) == (0.7, 0.9, 0.7, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms:\n- {seed: 4}\n- {}\nseeds: [1, 2]\n", "arms and seeds both set seed; remove one of the two"),
        ("grid: {seed: [4, 5]}\nseeds: [1, 2]\n", "grid and seeds both set seed; remove one of the two"),
        ("grid: {name: [a, b]}\n", "grid sets name, which the study gives each run; remove it"),
        ("arms:\n- {name: a}\n- {name: b}\n", "arms sets name"),
        ("arms: {a: {}, b: {optimizer.lr: 1.0e-6}}\n", "arms a and b have the same settings; change or"),
        (
            "arms: {a: {training: {ppo_epochs: 2}}, b: {training.ppo_epochs: 2}}\n",
            "arms a and b have the same settings",
        ),
        ("grid: {optimizer.lr: [1.0e-6, 0.000001]}\n", "arms has .* twice|have the same settings"),
        ("arms: {a: {optimizer.lr: 1.0}}\ngrid: {optimizer.lr: [2.0, 3.0]}\n", "arms set optimizer.lr, and"),
        ("arms: {a: {optimizer: {lr: 1.0}}}\ngrid: {optimizer.lr: [2.0]}\n", "arms set optimizer.lr, and"),
    ],
)
def test_a_setting_without_effect_is_refused(write, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_study(write(text))
    assert "rates.yaml" in str(error.value)


def test_an_error_of_all_runs_is_said_once_before_the_first(write, config_file, monkeypatch) -> None:
    (config_file.parent / "train.jsonl").write_text('{"prompt": "no answer"}\n')
    monkeypatch.setattr(command, "_train_here", lambda *_: pytest.fail("started a run"))
    result = CliRunner().invoke(app, ["study", str(write("seeds: [1, 2]\n")), "--local"])
    assert isinstance(result.exception, UserError), result.output
    assert "train.jsonl:1" in str(result.exception)


def test_an_error_of_a_later_run_is_said_before_the_first(write, config_file, monkeypatch) -> None:
    monkeypatch.setattr(command, "_train_here", lambda *_: pytest.fail("started a run"))
    arms = "arms: {a: {}, b: {data.path: gone.jsonl}, c: {parallel.tensor: 3}}\nseeds: [1, 2]\n"
    result = CliRunner().invoke(app, ["study", str(write(arms)), "--local"])
    assert str(result.exception).startswith("run 2 (rates-b-s1): data.path: ")


def test_runs_that_differ_by_seed_are_checked_once(write, config_file, monkeypatch) -> None:
    started, checked = [], []

    def check(run: CheckedRun, *, told: bool) -> list[str]:
        checked.append((run.settings.optimizer.lr, "data" in run.has))
        return ["the same of all"]

    monkeypatch.setattr(command, "_train_here", lambda _, numbers: started.extend(numbers))
    monkeypatch.setattr(command, "run_checks", check)
    file = write("grid: {optimizer.lr: [0.5, 1.0]}\nseeds: [1, 2]\n")
    result = CliRunner().invoke(app, ["study", str(file), "--local"])
    assert (started, checked) == ([1, 2, 3, 4], [(0.5, True), (1.0, False)]), result.exception
    assert result.output.count("warning: the same of all") == 1
