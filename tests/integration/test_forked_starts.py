"""A forked process (``tests/support/forking``) looks and ends like a started one.

Why: most tests of whole runs rely on it: they kill, signal and find processes by what is compared here.
Not covered: what a process imports, its memory, global random generators.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.system.parent_death import with_parent_death_signal
from tests.support.commands import read_proc_file
from tests.support.forking import forked_starts, fresh_starts
from tests.support.launcher import wait_for

Starts = Callable[[], AbstractContextManager[None]]
OTHERS = 1 << (signal.SIGSEGV - 1) | 1 << 32
"""Signals that imported packages and threads catch."""
REAPER = [sys.executable, "-P", "-m", "rpg_megatron.launcher.reaper"]


def appearance(command: list[str], starts: Starts, folder: Path, **options: Any) -> dict[str, Any]:
    """What /proc shows of a process that waits for its input, and how it ends."""
    # Without LC_CTYPE, Python adds it for the programs that it starts.
    environment = {"PATH": os.environ["PATH"], "A": "1 2\n3", "LC_CTYPE": "C.UTF-8"}
    with starts(), (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder, env=environment, **options
        )
    place = Path(f"/proc/{process.pid}")
    # It ignores SIGUSR1 once its main function runs.
    ignored = 1 << (signal.SIGUSR1 - 1)
    wait_for(lambda: int(re.findall(r"SigIgn:\s*(\w+)", (place / "status").read_text())[0], 16) & ignored)
    status = (place / "status").read_text()
    facts = {name: (place / name).read_bytes() for name in ("cmdline", "environ")}
    facts |= dict(re.findall(r"(PPid|Umask|SigBlk|SigIgn|SigCgt):\s*(\w+)", status))
    facts["SigCgt"] = int(facts["SigCgt"], 16) & ~OTHERS
    facts["folder"] = os.readlink(place / "cwd")
    facts["files"] = {fd.name: os.readlink(fd).split(":")[0] for fd in (place / "fd").iterdir()}
    facts["leads"] = [get(process.pid) == process.pid for get in (os.getsid, os.getpgid)]
    process.kill()
    facts["end"] = process.wait(), process.returncode
    assert process.stdin is not None
    process.stdin.close()
    return facts


@pytest.mark.parametrize(
    "options",
    [{}, {"start_new_session": True, "umask": 0o077}, {"process_group": 0}],
    ids=["plain", "session", "group"],
)
@pytest.mark.parametrize("dies_with_its_parent", [False, True])
def test_a_forked_process_looks_as_one_that_was_started(
    tmp_path: Path, options: dict[str, Any], dies_with_its_parent: bool
) -> None:
    command = with_parent_death_signal(REAPER, signal.SIGKILL) if dies_with_its_parent else REAPER
    fresh, forked = (
        appearance(command, starts, tmp_path, **options) for starts in (fresh_starts, forked_starts)
    )
    assert forked == fresh
    assert fresh["cmdline"].endswith(b"rpg_megatron.launcher.reaper\0")
    assert fresh["PPid"] == str(os.getpid())
    assert sorted(fresh["files"]) == ["0", "1", "2"]


@pytest.mark.parametrize("arguments", [["--version"], ["train", "no.yaml"], ["no-command"], ["plan"]])
def test_what_it_says_and_its_exit_code_are_the_same(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "rpg_megatron.cli", *arguments]
    answers = []
    for starts in (fresh_starts, forked_starts):
        with starts():
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        answers.append((done.returncode, done.stdout, done.stderr))
    assert answers[0] == answers[1]
    assert answers[0][0] == (0 if arguments == ["--version"] else 2)


# Long: the second imports everything once more.
@pytest.mark.parametrize("starts", [fresh_starts, pytest.param(forked_starts, marks=pytest.mark.long)])
def test_it_ends_with_its_parent(tmp_path: Path, starts: Starts) -> None:
    code = (
        "import signal, subprocess, time\n"
        "from rpg_megatron.system.parent_death import with_parent_death_signal\n"
        f"from tests.support.forking import {starts.__name__}\n"
        f"command = with_parent_death_signal({REAPER}, signal.SIGKILL)\n"
        f"with {starts.__name__}():\n"
        "    child = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: b"launcher.reaper" in read_proc_file(pid, "cmdline"))
    handle = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([handle], [], [], 60)[0], "it outlives its parent"
    os.close(handle)
