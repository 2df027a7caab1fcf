"""Profile chosen steps: a PyTorch trace, CUDA memory snapshots, and NVTX ranges for Nsight Systems."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rpg_megatron.config.files import atomic_write, open_own
from rpg_megatron.config.profile import ProfileSettings

_MAX_ALLOCATIONS = 200_000
"""The last allocations of a step, as many as a snapshot holds."""


class Profiler:
    """Profiler of one rank. Nothing here is collective."""

    def __init__(self, settings: ProfileSettings, folder: Path, rank: int, device: torch.device) -> None:
        """folder: the run's."""
        self._settings, self._folder = settings, folder / "profile"
        self._rank, self._device = rank, device
        self._tracing = False

    @contextmanager
    def step(self, number: int, warn: Callable[[str], None]) -> Iterator[None]:
        """Profile the block if this step is to be profiled on this rank, and write the files at its end.

        A block that raises writes none. warn: called with a message if they cannot be written.
        """
        settings = self._settings
        if number not in settings.steps or self._rank not in settings.ranks:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with ExitStack() as stack:
            if settings.memory:
                torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
                stack.callback(torch.cuda.memory._record_memory_history, None)
            self._tracing = True
            try:
                with profile(activities=activities, acc_events=True) as trace:
                    yield
            finally:
                self._tracing = False
            name = self._folder / f"step_{number:06d}_rank_{self._rank}"
            try:
                self._folder.mkdir(exist_ok=True)
                with (
                    atomic_write(name.with_suffix(".json.gz")) as file,
                    TemporaryDirectory() as part,
                ):
                    plain = Path(part) / "trace.json"  # torch writes to a path only
                    trace.export_chrome_trace(str(plain))
                    with gzip.open(file, "wb") as packed, open_own(plain) as source:
                        packed.writelines(source)
                if settings.memory:
                    with atomic_write(name.with_suffix(".pickle")) as file:
                        pickle.dump(torch.cuda.memory._snapshot(), file)
            except OSError as e:
                warn(f"step {number}: the profile cannot be written ({e})")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the block in the trace and as an NVTX range."""
        with ExitStack() as stack:
            if self._tracing:
                stack.enter_context(record_function(name))
            if self._settings.nvtx:
                torch.cuda.nvtx.range_push(name)
                stack.callback(torch.cuda.nvtx.range_pop)
            yield
