"""How busy the engines were is in a step's row and, for each engine, in a file and on the timeline.

Why: a full KV cache or a long queue explains a slow step, and with many engines one of them may be the cause.
Only the timeline tells who waited for whom. Engines are stand-ins.
Not covered: vLLM's metrics themselves (tests/integration/test_rollout_engine.py).
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.bridge.vllm.peak_use import KV_PEAK
from rpg_megatron.config.rollout import EngineSettings
from rpg_megatron.engine.client import EngineUnavailable
from rpg_megatron.engine.metrics import KV_USE, PREEMPTIONS, RUNNING, TOKENS, WAITING, read_metrics
from rpg_megatron.rollout.engine_load import EngineLoad, EngineTimeline
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.system import timeline
from rpg_megatron.system.timeline import EARLIER, TIMELINE, Timeline

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="policy"} 1.0e+06
vllm:generation_tokens_total{engine="1",model_name="policy"} 24.0
"""


def sample(
    kv_use: float, running: int, waiting: int, preemptions: int, tokens: int, *, peak: float | None = None
) -> dict[str, float]:
    """peak: the largest use since the last sample; by default that of this sample."""
    gauges = {KV_USE: kv_use, KV_PEAK: kv_use if peak is None else peak, RUNNING: running}
    return gauges | {WAITING: waiting, PREEMPTIONS: preemptions, TOKENS: tokens}


class Engine:
    """Answers probes, and requests for its metrics as long as there are samples."""

    def __init__(self, index: int, samples: list[dict[str, float]]):
        self.index, self.samples = index, samples
        self.refused = 0

    async def wait_ready(self, timeout: float) -> None:
        pass

    async def is_progressing(self, timeout: float) -> bool:
        return True

    async def metrics(self, timeout: float) -> dict[str, float]:
        if not self.samples:
            self.refused += 1
            raise EngineUnavailable("no answer")
        return self.samples.pop(0)


def test_prometheus_text() -> None:
    assert read_metrics(TEXT) == {RUNNING: 3.0, TOKENS: 1_000_024.0}
    with pytest.raises(ValueError, match="float"):
        read_metrics("<html>\n")


def test_a_row_for_the_step_and_a_line_for_each_engine(tmp_path: Path) -> None:
    engines: Any = [
        Engine(0, [sample(0.2, 4, 0, 0, 100), sample(0.6, 8, 5, 2, 300), sample(0, 0, 0, 2, 300)]),
        Engine(1, [sample(0.9, 8, 1, 1, 50)]),
        Engine(2, []),
    ]
    file = tmp_path / "engines.jsonl"

    async def scene() -> None:
        pool = EnginePool(EngineSettings(health_timeout=0.1), engines, tmp_path, file)
        pool.require_version(None)
        async with asyncio.timeout(20):
            while any(
                engine.refused < 2 for engine in engines
            ):  # a request without an answer changes nothing
                await asyncio.sleep(0.01)
        pool.version = 7
        counts = pool.pop_counts()
        assert counts.pop("engine/tokens_per_second") > 0
        assert counts == {
            "engine/restarts": 0,
            "engine/requests_resent": 0,
            "engine/kv_use_max": 0.9,
            "engine/waiting_max": 5,
            "engine/preemptions": 3,
        }
        assert pool.pop_counts().keys() == {"engine/restarts", "engine/requests_resent"}  # no samples since

    asyncio.run(scene())
    polls = [json.loads(line) for line in (tmp_path / TIMELINE).read_text().splitlines()]
    assert all(len(poll["running"]) == len(poll["waiting"]) == 3 for poll in polls)
    assert {poll["running"][2] for poll in polls} == {None}
    assert 8 in {poll["running"][0] for poll in polls}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.pop("tokens_per_second") > 0 for line in lines] == [True, True]
    step = {"step": 7}
    assert lines == [
        step
        | {"engine": 0, "kv_use_max": 0.6, "kv_use_mean": 0.4, "waiting_max": 5}
        | {"running_max": 8, "preemptions": 2, "tokens": 300},
        step
        | {"engine": 1, "kv_use_max": 0.9, "kv_use_mean": 0.9, "waiting_max": 1}
        | {"running_max": 8, "preemptions": 1, "tokens": 50},
    ]


def test_counters_go_on_over_rows_and_restarts() -> None:
    load = EngineLoad()
    start = load._sampled
    load.add(sample(0.1, 1, 0, 0, 1000), start + 2)
    load.add(sample(0.1, 0, 0, 0, 1000), start + 4)  # nothing new: no time of work
    row = load.pop(0)
    assert (row["tokens"], row["tokens_per_second"]) == (1000, 500)
    load.add(sample(0.1, 1, 0, 0, 1300), start + 6)
    load.add(sample(0.1, 1, 0, 0, 100), start + 8)  # a new process
    row = load.pop(0)
    assert (row["tokens"], row["tokens_per_second"]) == (400, 100)
    assert load.pop(0) == {}


def test_the_largest_use_does_not_depend_on_when_it_is_sampled() -> None:
    """Steps of the same use, sampled at the start, in the middle, and when nothing runs any more."""
    load = EngineLoad()
    rows = []
    for use, running in [(0.02, 8), (0.31, 3), (0.0, 0), (0.44, 8), (0.0, 0)]:
        load.add(sample(use, running, 0, 0, 100, peak=0.45), 0.0)
        load.add(sample(0.0, 0, 0, 0, 100), 2.0)
        rows.append(load.pop(0))
    assert [row["kv_use_max"] for row in rows] == [0.45] * 5
    assert [row["kv_use_mean"] for row in rows] == [0.02, 0.31, 0.0, 0.44, 0.0]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_poll_of_all_engines_is_one_row(tmp_path: Path) -> None:
    file = tmp_path / TIMELINE
    engines = EngineTimeline(Timeline(file, pytest.fail), 2, 2.0)
    engines.add(0, sample(0, 3, 1, 0, 0), 10.0)
    engines.add(1, sample(0, 7, 0, 0, 0), 10.5)  # in the row of the next poll
    engines.add(0, sample(0, 4, 0, 0, 0), 12.0)
    engines.add(1, sample(0, 8, 0, 0, 0), 12.5)
    for now in (14.0, 16.0, 18.0, 20.0):  # engine 1 is away
        engines.add(0, sample(0, 5, 0, 0, 0), now)
    rows = rows_of(file)
    assert [row["running"] for row in rows] == [[3, None], [4, 7], [5, 8], [5, 8], [5, 8], [5, None]]
    assert [row["waiting"] for row in rows][:2] == [[1, None], [0, 0]]
    assert all(row["time"] > 1.7e9 for row in rows)


def test_a_phase_that_ends_with_an_error_is_on_the_timeline(tmp_path: Path) -> None:
    line = Timeline(tmp_path / TIMELINE, pytest.fail)
    with pytest.raises(KeyError), line.phase("step", 3), line.phase("update", 3):
        raise KeyError
    inner, outer = rows_of(tmp_path / TIMELINE)
    assert (inner["phase"], inner["step"], outer["phase"]) == ("update", 3, "step")
    assert outer["begin"] <= inner["begin"] <= inner["end"] <= outer["end"]


def test_a_timeline_that_cannot_be_written_warns_once(tmp_path: Path) -> None:
    warnings: list[OSError] = []
    line = Timeline(tmp_path / "runs" / TIMELINE, warnings.append)
    for _ in range(3):
        line.write({"start": 1})
    assert len(warnings) == 1
    (tmp_path / "runs").mkdir()
    line.write({"start": 2})
    assert rows_of(tmp_path / "runs" / TIMELINE) == [{"start": 2}]
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    line.write({"start": 3})
    assert len(warnings) == 2


def test_the_timeline_of_a_long_run_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_LIMIT", 2000)
    trainer = Timeline(tmp_path / TIMELINE, pytest.fail)
    sampler = Timeline(tmp_path / TIMELINE, pytest.fail, rotates=True)
    for number in range(300):
        (trainer if number % 10 else sampler).write({"start": number})
    rows = rows_of(tmp_path / EARLIER) + rows_of(tmp_path / TIMELINE)
    assert [row["start"] for row in rows] == list(range(rows[0]["start"], 300))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5000
