"""Load of the engines: vLLM's metrics, sampled while engines work, summarised per step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rpg_megatron.bridge.vllm.peak_use import KV_PEAK
from rpg_megatron.config.files import open_own
from rpg_megatron.engine.metrics import KV_USE, PREEMPTIONS, RUNNING, TOKENS, WAITING
from rpg_megatron.system.timeline import Timeline

ENGINES = "engines.jsonl"
"""File in the run's folder with the load of each engine in each step."""


class EngineLoad:
    """Samples of one engine since the last row. Create it when the engine's counters are 0."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._sampled = time.monotonic()
        self._reset()

    def _reset(self) -> None:
        self._samples, self._kv_use, self._kv_peak = 0, list[float](), 0.0
        self._waiting = self._running = self._preemptions = self._tokens = self._seconds = 0.0

    def add(self, values: Mapping[str, float], now: float) -> None:
        """Add a sample. values: as ``read_metrics`` returns them. now: ``time.monotonic()``."""
        self._samples += 1
        if tokens := self._increase(TOKENS, values):
            self._tokens += tokens
            self._seconds += now - self._sampled
        self._preemptions += self._increase(PREEMPTIONS, values)
        running, waiting = values.get(RUNNING, 0.0), values.get(WAITING, 0.0)
        if running:
            self._kv_use.append(values.get(KV_USE, 0.0))
        self._kv_peak = max(self._kv_peak, values.get(KV_PEAK, 0.0))
        self._running, self._waiting = max(self._running, running), max(self._waiting, waiting)
        self._before, self._sampled = values, now

    def _increase(self, counter: str, values: Mapping[str, float]) -> float:
        before, now = self._before.get(counter, 0.0), values.get(counter, 0.0)
        return now - before if now >= before else now  # a restarted engine counts from 0 again

    def pop(self, index: int) -> dict[str, float]:
        """The row of engine ``index`` since the last call (see docs/metrics.md); empty without samples.

        kv_use_max is the engine's own maximum up to the last sample. kv_use_mean is a mean over samples with
        running requests. tokens_per_second is over the time between
        samples that had new tokens.
        """
        kv_use = self._kv_use or [0.0]
        row = {
            "engine": index,
            "kv_use_max": self._kv_peak,
            "kv_use_mean": sum(kv_use) / len(kv_use),
            "waiting_max": self._waiting,
            "running_max": self._running,
            "preemptions": self._preemptions,
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / self._seconds if self._seconds else 0.0,
        }
        sampled = self._samples > 0
        self._reset()
        return row if sampled else {}


class EngineTimeline:
    """Writes the engines' rows of the timeline: one row for all engines, at most every ``seconds``."""

    def __init__(self, timeline: Timeline, engines: int, seconds: float):
        self._timeline, self._seconds = timeline, seconds
        self._written = -math.inf
        self._sampled = [-math.inf] * engines
        self._values: list[Mapping[str, float]] = [{}] * engines

    def add(self, index: int, values: Mapping[str, float], now: float) -> None:
        """Add a sample of engine ``index``. values, now: as in ``EngineLoad.add``."""
        self._sampled[index], self._values[index] = now, values
        if now < self._written + self._seconds:
            return
        self._written = now
        self._timeline.write(
            {
                "time": round(time.time(), 2),
                "running": self._latest(RUNNING),
                "waiting": self._latest(WAITING),
            }
        )

    def _latest(self, name: str) -> list[int | None]:
        """The latest value of each engine; None if it has no recent sample, as while it restarts."""
        oldest = self._written - 3 * self._seconds
        pairs = zip(self._sampled, self._values, strict=True)
        return [int(values.get(name, 0)) if at >= oldest else None for at, values in pairs]


def summarise(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics ``engine/*`` of a step over all engines. rows: one per engine."""
    return {
        "engine/kv_use_max": max(row["kv_use_max"] for row in rows),
        "engine/waiting_max": max(row["waiting_max"] for row in rows),
        "engine/preemptions": sum(row["preemptions"] for row in rows),
        "engine/tokens_per_second": sum(row["tokens_per_second"] for row in rows),
    }


def append_rows(file: Path, step: int | None, rows: Sequence[Mapping[str, float]]) -> None:
    """Append a line for each row. Raises OSError."""
    with open_own(file, "a", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)
