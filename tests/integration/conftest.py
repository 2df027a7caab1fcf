"""Fixtures of the integration tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import Command


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start ``rpg-megatron ARGUMENTS``; the end of the test ends it."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        for pid in one.processes():
            os.kill(pid, signal.SIGKILL)
        one.process.wait()
        assert one.process.stderr is not None
        one.process.stderr.close()
