"""Readers for test_foreign_input.py: code of an attacker, who has taken over the process that reads a file.

The module is imported before the process gives up its rights, so all that an attacker could load is there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import itertools
import mmap
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rpg_megatron.checkpoints import foreign_reader

_libc = ctypes.CDLL(None, use_errno=True)
_SYSCALLS = 600


def prepare() -> None:
    """The same as for the readers of checkpoints."""
    foreign_reader.prepare()


def echo(files: Sequence[BinaryIO], argument: Any) -> Iterator[Any]:
    """Give back the argument, then the files' content."""
    yield argument
    for file in files:
        yield file.read()


def stay(_files: Sequence[BinaryIO], _argument: Any) -> Iterator[str]:
    """Give a value and do not end."""
    yield "ready"
    threading.Event().wait()


def misbehave(_files: Sequence[BinaryIO], how: str) -> Iterator[Any]:
    """End in the requested way."""
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "memory":
        yield len(bytearray(1 << 40))
    elif how == "hang":
        threading.Event().wait()
    elif how == "flood":
        os.write(_answer(), b"\xff" * 8)
    elif how == "garbage":
        os.write(_answer(), b"\0\0\0\x03\xc1\xc1\xc1")
    elif how == "no text":
        os.write(_answer(), b"\0\0\0\x04\x92\x01\xa1\xff")
    elif how == "long text":
        data = b"\x92\x01\xda\x07\xd0" + b"x" * 2000
        os.write(_answer(), len(data).to_bytes(4) + data)
    elif how == "close":
        os.close(_answer())
        threading.Event().wait()
    elif how == "deep":
        os.write(_answer(), (100_002).to_bytes(4) + b"\x92\0" + b"\x91" * 100_000)
    elif how == "exit":
        os._exit(3)
    elif how == "refuse":
        raise ValueError("it is\nno file")
    elif how == "fail":
        raise KeyError("x")
    yield "done"


def repeat(_files: Sequence[BinaryIO], value: Any) -> Iterator[Any]:
    """Yield the same value forever."""
    return itertools.repeat(value)


def _answer() -> int:
    """The pipe to the parent: the only one of the open files that can be written, besides /dev/null."""
    return max(n for n in range(64) if _writes(n))


def _writes(number: int) -> bool:
    with suppress(OSError):
        return os.write(number, b"") == 0
    return False


def attack(files: Sequence[BinaryIO], targets: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Try to reach what is outside; returns what succeeded.

    targets: ``file``, ``folder``, ``unix``, ``port``, ``udp``, ``parent``.
    """
    file, folder = Path(targets["file"]), Path(targets["folder"])

    def connect(family: int, kind: int, address: Any) -> None:
        socket.socket(family, kind).connect(address)

    def create(where: str) -> None:
        name = f"{where}/foreign-input-test-{os.getpid()}"
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT))
        os.unlink(name)

    def ask_for_signal() -> None:
        fcntl.fcntl(files[0], fcntl.F_SETOWN, targets["parent"])
        fcntl.fcntl(files[0], fcntl.F_SETSIG, signal.SIGUSR1)
        fcntl.fcntl(files[0], fcntl.F_SETFL, os.O_ASYNC)

    def write_through_memory() -> None:
        mmap.mmap(files[0].fileno(), 1, prot=mmap.PROT_READ | mmap.PROT_WRITE)[0] = 0

    attempts: dict[str, Callable[[], Any]] = {
        "read a file": lambda: file.read_bytes(),
        "read its own memory's file": lambda: os.open("/proc/self/mem", os.O_RDONLY),
        "write a file": lambda: file.write_bytes(b"x"),
        "append": lambda: os.open(file, os.O_WRONLY | os.O_APPEND),
        "create": lambda: os.open(folder / "new", os.O_WRONLY | os.O_CREAT),
        "create in /tmp": lambda: create("/tmp"),
        "create in shared memory": lambda: create("/dev/shm"),
        "truncate": lambda: os.truncate(file, 0),
        "truncate what is open": lambda: os.ftruncate(files[0].fileno(), 0),
        "write to what is open": lambda: os.write(files[0].fileno(), b"x"),
        "map and write": write_through_memory,
        "open again to write": lambda: os.open(f"/proc/self/fd/{files[0].fileno()}", os.O_WRONLY),
        "link": lambda: os.link(file, folder / "link"),
        "symlink": lambda: os.symlink(file, folder / "symlink"),
        "mkdir": lambda: os.mkdir(folder / "mkdir"),
        "chmod": lambda: os.chmod(file, 0o777),
        "chmod what is open": lambda: os.fchmod(files[0].fileno(), 0o777),
        "chown": lambda: os.chown(file, 1, 1),
        "times": lambda: os.utime(file),
        "attribute": lambda: os.setxattr(file, "user.x", b"x"),
        "see a file": lambda: os.stat(file),
        "list": lambda: os.listdir(folder),
        "chdir": lambda: os.chdir(folder),
        "connect to a unix socket": lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, targets["unix"]),
        "connect": lambda: connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", targets["port"])),
        "send a datagram": lambda: connect(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", targets["udp"])),
        "listen": lambda: socket.create_server(("127.0.0.1", 0)),
        "socket pair": lambda: socket.socketpair(),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "signal the parent": lambda: os.kill(targets["parent"], signal.SIGUSR1),
        "signal its group": lambda: os.killpg(os.getpgid(targets["parent"]), signal.SIGUSR1),
        "signal by a pidfd": lambda: os.pidfd_open(targets["parent"]),
        "a signal by a file": ask_for_signal,
        "limit the parent": lambda: resource.prlimit(targets["parent"], resource.RLIMIT_NOFILE, (3, 3)),
        "priority of the parent": lambda: os.setpriority(os.PRIO_PROCESS, targets["parent"], 19),
        "processors of the parent": lambda: os.sched_setaffinity(targets["parent"], {0}),
        "read the parent's memory": lambda: _call("process_vm_readv", targets["parent"], None, 0, None, 0, 0),
        "trace the parent": lambda: _call("ptrace", 16, targets["parent"], None, None),
        "fork": lambda: os.fork() or os._exit(0),
        "thread": lambda: threading.Thread(target=lambda: None).start(),
        "execute": lambda: subprocess.run(["/bin/true"], check=False),
        "become another user": lambda: os.setuid(1),
        "leave the limits": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1)),
        "user namespace": lambda: os.unshare(os.CLONE_NEWUSER),
        "shared memory of others": lambda: _call("shmget", 0x1234, 4096, 0o1600),
        "message queue": lambda: _call("msgget", 0x1234, 0o1600),
        "keys": lambda: _call("syscall", 250, 0, -3, 1),
        "memory file": lambda: os.memfd_create("x"),
        "terminal": lambda: _call("ioctl", 0, 0x5412, b"x"),
        "rename": lambda: os.rename(file, folder / "renamed"),
        "remove": lambda: [os.unlink(entry) for entry in folder.iterdir() if entry.is_file()],
    }
    succeeded = {}
    for name, attempt in attempts.items():
        try:
            succeeded[name] = repr(attempt())[:100]
        except Exception:
            continue
    yield succeeded


def call_all(_files: Sequence[BinaryIO], left_out: list[int]) -> Iterator[list[int]]:
    """Numbers of the system calls that are not refused."""
    allowed = []
    for number in set(range(_SYSCALLS)) - set(left_out):
        if _libc.syscall(number, -1, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
            allowed.append(number)
    yield allowed


def read_indexes(_files: Sequence[BinaryIO], indexes: list[bytes]) -> Iterator[str]:
    """Whether each index is read or refused."""
    for data in indexes:
        try:
            list(foreign_reader.read_index([io.BytesIO(data)], None))
            yield "read"
        except ValueError:
            yield "refused"


def _call(name: str, *arguments: Any) -> int:
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
