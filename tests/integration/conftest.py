"""Fixtures of the integration tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import Command
from tests.support.launcher import Launch, living, wait_for


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


@pytest.fixture
def launch(tmp_path: Path, config_file: Path) -> Iterator[Callable[..., Launch]]:
    """Start a launcher with stand-ins, which follow the plan given; the end of the test ends it."""
    started: list[Launch] = []

    def start(*options: str, **plan: str) -> Launch:
        started.append(Launch(tmp_path, config_file, *options, **plan))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
        wait_for(lambda one=one: not living(one.stand_ins()), 20)
