"""Settings of profiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rpg_megatron.config.base import Section


class ProfileSettings(Section, affects="files"):
    """Profiler traces, as files in <run>/profile. Traced steps are slower."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps to trace with torch's profiler: step_NNNNNN_rank_R.json.gz, for Perfetto or chrome://tracing."""
    ranks: tuple[int, ...] = Field((0,), min_length=1)
    """Trainer ranks to trace."""
    memory: bool = False
    """Also record GPU allocations: step_NNNNNN_rank_R.pickle, for pytorch.org/memory_viz."""
    nvtx: bool = False
    """NVTX ranges for the phases of every step, on all ranks, for Nsight Systems."""

    def _problems(self) -> Iterator[str]:
        if self.memory and not self.steps:
            yield "memory has no effect without steps; set the steps to trace"
