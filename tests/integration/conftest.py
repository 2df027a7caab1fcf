"""Fixtures of the integration tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.config import load_settings
from tests.support.commands import Command
from tests.support.engine import Service, running_service
from tests.support.forking import forked_starts
from tests.support.launcher import Launch, living, wait_for
from tests.support.launcher_pair import Pair
from tests.support.runs import QUICKSTART, SERVED
from tests.support.slurm import Slurm, start_slurm


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start ``rpg-megatron ARGUMENTS``; the end of the test ends it."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield start
    for running in started:
        for pid in running.processes():
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        assert running.process.stderr is not None
        running.process.stderr.close()


@pytest.fixture
def launch(tmp_path: Path, config_file: Path) -> Iterator[Callable[..., Launch]]:
    """Start a launcher with stand-ins, which follow the plan given; the end of the test ends it."""
    started: list[Launch] = []

    def start(*options: str, **plan: Any) -> Launch:
        started.append(Launch(tmp_path, config_file, *options, **plan))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.communicate()
        wait_for(lambda launcher=launcher: not living(launcher.stand_ins()))


@pytest.fixture
def pair(tmp_path: Path, config_file: Path) -> Iterator[Callable[..., Pair]]:
    """Two launchers with stand-ins that follow the plan given; the end of the test ends them."""
    pairs: list[Pair] = []

    def make(**plan: str) -> Pair:
        pairs.append(Pair(tmp_path, config_file, **plan))
        return pairs[-1]

    yield make
    for nodes in pairs:
        for launcher in nodes.launchers:
            launcher.kill()
            launcher.wait()
        wait_for(lambda nodes=nodes: not nodes.living(), message=nodes.logs)


@pytest.fixture(name="forked_starts", scope="module")
def _forked_starts() -> Iterator[None]:
    """Processes that this module starts are forked from one that has imported their packages."""
    with forked_starts():
        yield


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    yield from start_slurm()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The quickstart's engine and sampler, for files whose ranks train against one."""
    with running_service(tmp_path_factory.mktemp("service"), load_settings(QUICKSTART, SERVED)) as service:
        yield service
