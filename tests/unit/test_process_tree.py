"""The memory of processes: each kind that a program can take is seen, by at least its size.

Why: the limit of a sandbox is on this sum, and what it leaves out is free to take. A real child takes each
kind; test_sandbox_attacks has what a sandbox does about it. Not covered: tables of pages, swap.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rpg_megatron.system.process_tree import MemoryOfProcesses, descendants
from tests.support.launcher import wait_for

MIB = 1 << 20
BEGIN = (
    "import mmap, os, select, socket, sys, threading, time, ctypes\n"
    "print('begun', flush=True)\nsys.stdin.readline()\n"
)
KINDS: dict[str, tuple[str, int]] = {
    "memory": ("x = bytearray(b'1' * (50 << 20))", 50 * MIB),
    "memory of a child": ("os.fork() or [bytearray(b'1' * (50 << 20)), time.sleep(100)]", 50 * MIB),
    "memory of a process whose first thread has ended": (
        "def run():\n while not ended(): time.sleep(0.001)\n x = bytearray(b'1' * (50 << 20))\n"
        " print('taken', flush=True); time.sleep(99)\n"
        "def ended(): return open(f'/proc/{os.getpid()}/stat').read().rsplit(') ')[-1][0] == 'Z'\n"
        "threading.Thread(target=run).start()\nctypes.CDLL(None).syscall(EXIT, 0)",
        50 * MIB,
    ),
    "pipes": ("x = [os.pipe() for _ in range(100)]", 100 << 16),
    "links of epoll": ("x = [select.epoll() for _ in range(100)]", 100 << 16),
    "mappings": (
        "m = ctypes.CDLL(None).mmap; m.argtypes = [ctypes.c_size_t] * 6\n"
        "for i in range(5000): m(0, 4096, i & 1, 34, 2**64 - 1, 0)",
        5000 << 10,
    ),
    "very many mappings": (
        "m = ctypes.CDLL(None).mmap; m.argtypes = [ctypes.c_size_t] * 6\n"
        "for i in range(50000): m(0, 4096, i & 1, 34, 2**64 - 1, 0)",
        50000 << 10,
    ),
    "shared memory that is no more in the process": (
        "x = [mmap.mmap(-1, 1 << 20) for _ in range(20)]\nfor m in x: m.write(bytes(1 << 20)); m.madvise(4)",
        20 * MIB,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_memory_is_seen(kind: str) -> None:
    code, least = KINDS[kind]
    code = code.replace("EXIT", "60" if os.uname().machine == "x86_64" else "93")
    code = BEGIN + code + "\nprint('taken', flush=True)\ntime.sleep(100)"
    memory = MemoryOfProcesses([])
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, start_new_session=True
    ) as child:
        try:
            child.stdout.readline()
            mine = [pid for pid in descendants() if os.getsid(pid) == child.pid]
            before = memory.look(mine)
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()

            def seen() -> bool:
                mine = [pid for pid in descendants() if os.getsid(pid) == child.pid]
                return memory.look(mine) - before > 0.9 * least

            wait_for(seen, 20)  # the child of the child takes it later
        finally:
            os.killpg(child.pid, 9)


def test_files_in_memory_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them by their number, those of the second folder by their content too."""
    full = SimpleNamespace(f_files=1000, f_ffree=0, f_blocks=100, f_bfree=40, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    assert MemoryOfProcesses(["/a"]).look([]) == 1000 * 1536
    assert MemoryOfProcesses(["/a", "/b"]).look([]) == 2000 * 1536 + 60 * 4096
