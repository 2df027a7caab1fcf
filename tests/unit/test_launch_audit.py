"""The audit's launcher: its exit codes, what it prints, which weights and tokens it takes from a run.

Why: scripts act on the exit code, and an audit starts all that a run starts, so it must leave as little
behind. Engines and ranks are test_launch's stand-ins. Not covered: what an audit finds (test_audit,
test_audit_verdict).
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rpg_megatron import cli
from rpg_megatron.commands.audit.command import plan_audit
from rpg_megatron.config import UserError
from tests.support.launcher import Launch, assert_nothing_left, living, wait_for

CLEAN = {
    "clean": True,
    "dtype": "float32",
    "synced": True,
    "engines": [
        {
            "engine": 0,
            "clean": True,
            "sequences": 6,
            "tokens": 214,
            "first": None,
            "broken": [],
            "findings": [],
            "drift": {"layers.0.input": 0.0, "layers.0.input_norm": 2e-7, "final_norm": 3e-7},
            "logprobs": {"mean": 1e-7, "max": 2e-6, "tokens": 160.0},
        }
    ],
}
BROKEN = {"side": "engine", "site": "layers.0.input_norm", "error": 0.01, "tolerance": 5e-5}
FINDING = {"kind": "weights", "text": "model.layers.0.input_layernorm.weight is off", "advice": "sync it"}
DRIFTED = CLEAN | {
    "clean": False,
    "engines": [
        CLEAN["engines"][0] | {"clean": False, "first": BROKEN, "broken": [BROKEN], "findings": [FINDING] * 9}
    ],
}


def writes(report: dict) -> str:
    """What a rank does instead of auditing."""
    text = json.dumps(report)
    check = "assert len(sys.argv) == 4 and pathlib.Path(sys.argv[1], 'audit_request.json').exists()"
    return f"{check}; pathlib.Path(sys.argv[1], 'audit.json').write_text({text!r}); os._exit(0)"


@pytest.fixture
def launch(tmp_path: Path, config_file: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(*options: str, **plan: str) -> Launch:
        started.append(Launch(tmp_path, config_file, *options, command="audit", **plan))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
        wait_for(lambda one=one: not living(one.stand_ins()), 20)


def test_agreement_is_exit_code_0(launch: Callable[..., Launch], tmp_path: Path) -> None:
    one = launch(rank_0=writes(CLEAN), rank_1="os._exit(0)")
    code, out, err = one.finish()
    assert (code, err) == (0, "")
    assert "clean: every module of both sides follows from its input" in out
    assert "report: runs/tiny-audit-001/audit.json" in out
    assert_nothing_left(one)


def test_drift_is_exit_code_1_and_the_place_is_marked(launch: Callable[..., Launch], tmp_path: Path) -> None:
    one = launch("--json", str(tmp_path / "copy.json"), rank_0=writes(DRIFTED), rank_1="os._exit(0)")
    code, out, err = one.finish()
    assert (code, err) == (1, "")
    assert "layer    input     norm" in out
    assert "    0    0e+00   *2e-07" in out
    assert "first: layers.0.input_norm of the engine, off by 1.0e-02 (rounding explains 5e-05)" in out
    assert out.count("weights: model.layers.0.input_layernorm.weight is off.") == 6
    assert "and 3 more findings" in out
    assert json.loads((tmp_path / "copy.json").read_text()) == DRIFTED
    assert_nothing_left(one)


def test_a_process_that_dies_is_neither(launch: Callable[..., Launch]) -> None:
    one = launch(rank_0="print('last words', flush=True); os._exit(1)")
    code, _, err = one.finish()
    assert code == 3
    assert "last words" in err
    assert_nothing_left(one)


def test_ctrl_c_leaves_nothing(launch: Callable[..., Launch]) -> None:
    one = launch()
    one.wait_until_up()
    one.process.send_signal(signal.SIGINT)
    code, _, err = one.finish()
    assert code == 130
    assert err.startswith("stopped: Ctrl-C; the audit's folder stays: ")
    assert_nothing_left(one)


def test_a_run_gives_its_newest_weights_and_tokens(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny-001"
    for step in (1, 2, 10):
        (run / "hf" / f"step_{step:06d}").mkdir(parents=True)
    (run / "rollouts").mkdir()
    for step in (9, 10):
        (run / "rollouts" / f"step_{step:06d}.jsonl.zst").touch()
    shutil.copyfile(config_file, run / "config.yaml")
    shutil.copyfile(config_file.parent / "train.jsonl", run / "train.jsonl")
    settings, request = plan_audit(run, ["seed=5"])
    assert settings.model.path == run / "hf" / "step_000010"
    assert (settings.name, settings.runs, settings.seed) == ("tiny-audit", run.parent, 5)
    assert request["rollouts"] == str(run / "rollouts" / "step_000010.jsonl.zst")
    assert [Path(p).name for p in request["others"].values()] == ["model", "step_000001", "step_000002"]
    settings, request = plan_audit(config_file, None)
    assert (settings.name, request) == ("tiny-audit", {})
    with pytest.raises(UserError, match=r"holds no config\.yaml; give a config file, or the folder of a run"):
        plan_audit(tmp_path, None)


def test_what_cannot_be_audited_is_said_before_anything_starts(
    config_file: Path, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    def refusal(*options: str) -> str:
        result = CliRunner().invoke(cli.app, ["audit", str(config_file), *options])
        assert isinstance(result.exception, UserError), result
        return str(result.exception)

    larger = make_checkpoint(tmp_path / "larger", num_hidden_layers=3)
    assert "is another model than model.path (num_layers 3, not 2)" in refusal("--engine-model", str(larger))
    nowhere = tmp_path / "nowhere"
    assert f"--engine-model: {nowhere} is not a directory" in refusal("--engine-model", str(nowhere))
    assert "make it, or choose another" in refusal("--json", str(tmp_path / "no" / "file"))
    settings = yaml.safe_load(config_file.read_text()) | {
        "data": {"path": "missing.jsonl", "max_prompt_tokens": 9}
    }
    config_file.write_text(yaml.safe_dump(settings))
    assert "missing.jsonl" in refusal()
    assert not (tmp_path / "runs").exists()
