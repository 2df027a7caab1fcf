"""Settings of profiling."""

from __future__ import annotations

from pydantic import Field, model_validator

from rpg_megatron.config.base import Section


class ProfileSettings(Section, affects="files"):
    """Profiler traces, as files in <run>/profile. Traced steps are slower."""

    steps: tuple[int, ...] = ()
    """Steps to trace with torch's profiler: step_NNNNNN_rank_R.json.gz, for Perfetto or chrome://tracing."""
    ranks: tuple[int, ...] = Field((0,), min_length=1)
    """Trainer ranks to trace."""
    memory: bool = False
    """Also record GPU allocations: step_NNNNNN_rank_R.pickle, for pytorch.org/memory_viz."""
    nvtx: bool = False
    """NVTX ranges for the phases of every step, on all ranks, for Nsight Systems."""

    @model_validator(mode="after")
    def _check_steps(self) -> ProfileSettings:
        if self.memory and not self.steps:
            raise ValueError("memory has no effect without steps; set the steps to trace")
        if any(number < 1 for number in self.steps):
            raise ValueError("steps start at 1")
        return self
