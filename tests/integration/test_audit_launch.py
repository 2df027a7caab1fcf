"""The audit's launcher: its exit codes, what it prints, and that it leaves nothing behind.

Why: scripts act on the exit code, and an audit starts all that a run starts, so it must leave as little
behind. Engines and ranks are test_launcher's stand-ins. Not covered: what an audit finds (test_audit,
test_audit_verdict).
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launcher import Launch, assert_nothing_left

pytestmark = pytest.mark.usefixtures("forked_starts")

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
            "routes": {},
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
    """The code that a rank runs instead of auditing."""
    text = json.dumps(report)
    check = "assert len(sys.argv) == 4 and pathlib.Path(sys.argv[1], 'audit_request.json').exists()"
    return f"{check}; pathlib.Path(sys.argv[1], 'audit.json').write_text({text!r}); os._exit(0)"


@pytest.fixture
def launch(launch: Callable[..., Launch]) -> Callable[..., Launch]:
    return functools.partial(launch, command="audit")


def test_agreement_is_exit_code_0(launch: Callable[..., Launch], tmp_path: Path) -> None:
    launcher = launch(rank_0=writes(CLEAN), rank_1="os._exit(0)")
    code, out, err = launcher.finish()
    assert (code, err) == (0, "")
    assert "clean: every module of both sides matches its input" in out
    assert "report: runs/tiny-audit-001/audit.json" in out
    assert "choices of experts" not in out, "of a dense model"
    assert_nothing_left(launcher)


def test_drift_is_exit_code_1_and_the_place_is_marked(launch: Callable[..., Launch], tmp_path: Path) -> None:
    launcher = launch("--json", str(tmp_path / "copy.json"), rank_0=writes(DRIFTED), rank_1="os._exit(0)")
    code, out, err = launcher.finish()
    assert (code, err) == (1, "")
    assert "layer    input     norm" in out
    assert "    0    0e+00   *2e-07" in out
    assert "first: layers.0.input_norm of the engine, off by 1.0e-02 (rounding explains 5e-05)" in out
    assert out.count("weights: model.layers.0.input_layernorm.weight is off.") == 6
    assert "and 3 more findings" in out
    assert json.loads((tmp_path / "copy.json").read_text()) == DRIFTED
    assert_nothing_left(launcher)


def test_a_process_that_dies_is_neither(launch: Callable[..., Launch]) -> None:
    launcher = launch(rank_0="print('last words', flush=True); os._exit(1)")
    code, _, err = launcher.finish()
    assert code == 3
    assert "last words" in err
    assert_nothing_left(launcher)


def test_ctrl_c_leaves_nothing(launch: Callable[..., Launch]) -> None:
    launcher = launch()
    launcher.wait_until_up()
    launcher.process.send_signal(signal.SIGINT)
    code, _, err = launcher.finish()
    assert code == 130
    assert err.startswith("stopped: Ctrl-C; the audit's folder is kept: ")
    assert_nothing_left(launcher)
