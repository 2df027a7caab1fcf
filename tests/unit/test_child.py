"""A child and all that it starts end together; its exit code and its log tell why.

Why: launcher, engines and converters keep their children with it, and a process that is left behind
holds a GPU. Proved with real processes. Not covered: what each does with its children (test_launcher,
test_engine_process, test_convert_tools), a parent that is killed (the same).
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.system import child, process_groups
from rpg_megatron.system.child import (
    Child,
    describe_end,
    explain,
    start_child,
    tail_of,
    user_error,
)
from tests.support.launcher import wait_for

DEAF = "trap '' TERM; sleep 600 & echo up; wait; wait"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def make(script: str, **options: Any) -> Child:
        log = options.pop("log", tmp_path / "logs" / f"{len(children)}.log")
        children.append(start_child("one", ["sh", "-c", script], dict(os.environ), log, **options))
        return children[-1]

    yield make
    for made in children:
        made.kill()
        made.reap()


def wait_for_end(child: Child) -> int:
    wait_for(lambda: child.exit_code() is not None, 30)
    return child.exit_code() or 0


def test_programs_that_go_on_are_started_here_only() -> None:
    """Each ends with its parent then, and Ctrl-C is its parent's."""
    folder = Path(child.__file__).parents[1]
    files = [file for file in folder.rglob("*.py") if "Popen(" in file.read_text(encoding="utf-8")]
    known = {"system/child.py", "launcher/reaper.py"}  # the latter outlives the launcher
    assert {str(file.relative_to(folder)) for file in files} == known


def test_a_child_ends_with_all_that_it_started(start: Callable[..., Child]) -> None:
    """It leads a session of its own."""
    child = start(DEAF)
    wait_for(lambda: "up" in tail_of(child.log), 30)
    assert os.getpgid(child.pid) == child.pid
    assert os.getsid(child.pid) == child.pid
    assert len(process_groups.members(child.pid)) == 2
    child.warn()  # to itself, which ignores it
    assert child.exit_code() is None
    child.kill()
    assert process_groups.members(child.pid) == []
    assert child.exit_code() == -signal.SIGKILL


def test_what_a_dead_child_started_is_found_until_it_is_reaped(start: Callable[..., Child]) -> None:
    child = start("sleep 600 & exit 7")
    assert wait_for_end(child) == 7
    assert not child.is_reaped
    assert len(process_groups.members(child.pid)) == 1
    child.kill()
    assert child.is_reaped
    assert process_groups.members(child.pid) == []
    child.kill()  # once more does nothing
    assert child.exit_code() == 7


def test_private_children_write_private_files(start: Callable[..., Child], tmp_path: Path) -> None:
    child = start(f"touch {tmp_path}/made", private=True)
    assert wait_for_end(child) == 0
    assert [f.stat().st_mode & 0o777 for f in (tmp_path / "made", child.log)] == [0o600, 0o600]


def test_the_end_of_a_child_is_explained(start: Callable[..., Child]) -> None:
    failed = start("echo working; echo 'error: the path is wrong;'; echo 'mend it'; exit 2")
    assert wait_for_end(failed) == 2
    assert user_error(failed) == "the path is wrong;\nmend it"
    torn = start("printf '    self.write(data)error: disk full\\n'; echo 'mend it'; exit 2")  # by two threads
    assert wait_for_end(torn) == 2
    assert user_error(torn) == "disk full\nmend it"
    crashed = start("echo 'error: not this'; exit 3")
    wait_for_end(crashed)
    assert user_error(crashed) is None
    assert explain(crashed) == f"one ended with exit code 3; the end of {crashed.log}:\nerror: not this"
    killed = start("kill -9 $$")
    wait_for_end(killed)
    assert describe_end(killed) == "was killed (SIGKILL; often the machine ran out of memory)"


def test_a_log_that_was_deleted_can_still_be_read(start: Callable[..., Child]) -> None:
    child = start("echo last words; exit 1")
    wait_for_end(child)
    child.log.unlink()
    child.log.parent.rmdir()
    assert "(the file was deleted during the run)\nlast words" in explain(child)
    assert wait_for_end(start("exit 0")) == 0  # the folder is made again
