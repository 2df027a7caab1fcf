"""Settings of what is measured within a step."""

from __future__ import annotations

from pydantic import Field, model_validator

from rpg_megatron.config.base import Section


class ProfileSettings(Section):
    """Where a step's time and memory go, as files in the run's folder ``profile``. Costs time while on."""

    steps: tuple[int, ...] = ()
    """Steps to trace with torch's profiler: step_NNNNNN_rank_R.json.gz, for Perfetto or chrome://tracing."""
    ranks: tuple[int, ...] = Field((0,), min_length=1)
    """Trainer ranks that are traced."""
    memory: bool = False
    """With each trace the GPU's allocations: step_NNNNNN_rank_R.pickle, for pytorch.org/memory_viz."""
    nvtx: bool = False
    """Name the phases of all steps for Nsight Systems, on every rank."""

    @model_validator(mode="after")
    def _memory_belongs_to_a_trace(self) -> ProfileSettings:
        if self.memory and not self.steps:
            raise ValueError("memory has no effect without steps; name the steps to look at")
        if any(number < 1 for number in self.steps):
            raise ValueError("steps start at 1")
        return self
