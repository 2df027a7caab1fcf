"""Largest use of the KV cache between two readings of the engine's metrics.

vLLM's own gauge has the latest value only. A rollout of seconds is read once or twice, at any moment, so the
largest of these values goes up and down from step to step with nothing changed.
"""

from __future__ import annotations

from typing import Any

KV_PEAK = "rpg:kv_cache_usage_peak"
"""Metric: the largest fraction of the KV cache in use since the last reading, 0 to 1."""


class PeakUse:
    """Has the methods of vLLM's ``StatLoggerBase``; the server calls ``record`` after each engine step."""

    def __init__(self) -> None:
        self._peak = 0.0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Take the statistics of a step; None if it has none."""
        if scheduler_stats is not None:
            self._peak = max(self._peak, scheduler_stats.kv_cache_usage)

    def pop(self) -> float:
        """The largest use since the last call, 0 to 1; 0 without a step."""
        peak, self._peak = self._peak, 0.0
        return peak

    def log(self) -> None:
        """Nothing to log."""

    def log_engine_initialized(self) -> None:
        """Nothing to log."""

    def record_sleep_state(self, *_: Any) -> None:
        """A sleeping engine takes no steps."""


def add_metric(engine_client: Any) -> None:
    """Add the metric ``KV_PEAK`` to the server; each reading starts a new one.

    engine_client: vLLM's. Without its statistics the metric is missing.
    """
    from prometheus_client import Gauge

    if engine_client.logger_manager is None:
        return
    use = PeakUse()
    engine_client.logger_manager.stat_loggers.append(use)
    Gauge(KV_PEAK, "Largest fraction of the KV cache in use since the last reading").set_function(use.pop)
