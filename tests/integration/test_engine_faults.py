"""An engine that dies twice of the same error, with no step between, is not restarted a third time.

Why: a request that kills an engine kills each new one too, and each takes a minute to start. Stand-ins print
the test's text and end; process, log and restart are real. Not covered: the whole launcher
(test_launcher.py), vLLM's own messages (test_engine_command.py).
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.engine.process import EngineProcess
from rpg_megatron.launcher import engines as module
from rpg_megatron.launcher import node_agent
from rpg_megatron.launcher.cluster import Engine
from rpg_megatron.launcher.engines import Engines
from rpg_megatron.launcher.stopping import RunFailed
from tests.support.launcher import single_node, wait_for

SAYS_AND_ENDS = (
    'echo "ImportError: of no importance"; while [ ! -e "$0" ]; do sleep 0.01; done; cat "$0"; rm "$0"'
)
LINE = "(EngineCore pid={}) ERROR 01-02 03:04:05 [core.py:6] {}\n"
OUT_OF_RANGE = "IndexError: request 5f{0}e: index {0} is out of range at 0x7f{0}"
DEAD = LINE.format(1, "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue")


class StandIn(EngineProcess):
    """Runs a script of ``scripts``; healthy when the test adds its index to ``up``."""

    scripts: ClassVar[list[list[str]]] = []
    up: ClassVar[set[int]] = set()

    def __init__(self, settings: Settings, index: int, **places: Any):
        super().__init__(settings, index, **places)
        self._command = self.scripts[index]

    def start(self) -> None:
        self.up.discard(self.index)
        super().start()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "EngineProcess", StandIn)
    monkeypatch.setattr(Engine, "healthy", lambda self, timeout=5.0: self.index in StandIn.up)
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.0)
    StandIn.up.clear()


def test_an_engine_that_dies_twice_in_the_same_way(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    words, settings = tmp_path / "words", load_settings(config_file)
    StandIn.scripts = [["sh", "-c", SAYS_AND_ENDS, str(words)]]
    messages: list[str] = []
    shown: Any = SimpleNamespace(status=messages.append, step=0)

    with single_node(settings, tmp_path) as (cluster, agent):
        engines, engine = Engines(settings, tmp_path, cluster, shown, restarts=99), cluster.engines[0]

        def has_begun() -> bool:
            return "no importance" in engine.process.log.read_text()[agent._engines[0].log_start :]

        def die(message: str, step: int) -> str:
            """The message that is shown when it dies after a step with a message in its log."""
            wait_for(has_begun)
            StandIn.up.add(0)
            engines.check(lambda: False)
            assert engines.all_up
            shown.step = step
            (tmp_path / "w").write_text(message)
            (tmp_path / "w").rename(words)
            wait_for(lambda: cluster.pump() or not engine.runs)
            engines.check(lambda: False)
            return next(text for text in reversed(messages) if "restart" in text)

        engines.start()
        first = die(LINE.format(10, OUT_OF_RANGE.format(10)), step=0)
        assert first.startswith(f"warning: engine 0 died: {OUT_OF_RANGE.format(10)}; restart 1 of 99; log: ")
        die(LINE.format(11, OUT_OF_RANGE.format(11)), step=1)  # a step was completed
        for _ in range(2):
            assert "engine 0 died; restart" in die("", step=1)  # killed: the log has no reason
            assert "engine 0 died; restart" in die(DEAD, step=1)
        die(LINE.format(12, OUT_OF_RANGE.format(12)), step=1)
        die(LINE.format(13, "ValueError: another"), step=1)
        die(LINE.format(14, OUT_OF_RANGE.format(14)), step=1)
        with pytest.raises(RunFailed) as error:
            die(LINE.format(15, OUT_OF_RANGE.format(15)), step=1)
    assert str(error.value).startswith(
        "engine 0 died twice of the same error, without a step in between, and is not restarted again: "
        f"{OUT_OF_RANGE.format(15)}; a new engine would get the same requests: "
    )
    assert str(error.value).endswith("engine_0.log")
    assert len([text for text in messages if "; restart " in text]) == 9


BY_RUNNER = """
case "$VLLM_USE_V2_MODEL_RUNNER" in
    0) echo "runner V1" ;;
    *) echo "(EngineCore pid=7) ERROR 01-02 03:04:05 [runner.py:6] NotImplementedError: no kernel" ; exit 1 ;;
esac
"""
REFUSES = 'echo "api_server.py: error: argument --x: no"; exit 2'


@pytest.mark.parametrize(
    ("script", "device", "variable", "another", "starts"),
    [
        (BY_RUNNER + "sleep 60", "cuda", None, "", 2),
        (BY_RUNNER + "exit 1", "cuda", None, "", 2),
        (BY_RUNNER, "cuda", "1", "", 1),  # the user has chosen
        (BY_RUNNER, "cpu", None, "", 1),
        (BY_RUNNER, "cuda", None, "is up", 1),  # so the runner is not the reason
        (BY_RUNNER, "cuda", None, "comes up meanwhile", 1),
        (REFUSES, "cuda", None, "", 1),
    ],
    ids=["V1 starts", "neither starts", "chosen", "on a CPU", "another is up", "meanwhile", "arguments"],
)
def test_a_failed_start_is_repeated_once_with_runner_v1(
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    device: str,
    variable: str | None,
    another: str,
    starts: int,
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if variable:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
    settings = load_settings(config_file, [f"device={device}", f"engine.replicas={2 if another else 1}"])
    StandIn.scripts = [["sh", "-c", script], ["sh", "-c", "sleep 60"]]
    messages: list[str] = []
    shown: Any = SimpleNamespace(status=messages.append, step=0)
    with single_node(settings, tmp_path) as (cluster, _):
        engines, first = Engines(settings, tmp_path, cluster, shown, restarts=0), cluster.engines[0]

        def has_ended() -> bool:
            cluster.pump()
            return not first.runs

        engines.start()
        if another:
            StandIn.up.add(1)
        if another == "is up":
            engines.check(lambda: False)
        wait_for(has_ended)
        if starts == 2:
            engines.check(lambda: False)
            (warning,) = [text for text in messages if text.startswith("warning")]
            assert warning.startswith(
                "warning: engine 0 ended while starting: NotImplementedError: no kernel; starting it once "
                "more with vLLM's model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0); log: "
            )
            wait_for(lambda: "runner V1" in first.process.log.read_text())
        if "sleep" in script:
            StandIn.up.add(0)
            engines.check(lambda: False)
            assert engines.all_up
        else:
            wait_for(has_ended)
            with pytest.raises(UserError, match="arguments" if script is REFUSES else "ended while starting"):
                engines.check(lambda: False)
    assert first.process.log.read_text().count("no kernel") + first.process.log.read_text().count(
        "runner V1"
    ) == (0 if script is REFUSES else starts)
