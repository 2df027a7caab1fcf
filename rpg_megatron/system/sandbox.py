"""What processes can ask of the kernel: those that read foreign input, and programs that a model writes.

What reads foreign input can only compute, read open files and write to pipes. Two means of Linux, each enough
to protect files: a seccomp filter with a list of allowed system calls (no file can be opened, no socket,
process or signal created), and Landlock without any rule (no access to the file system, no TCP, no signals to
processes outside). ``enter`` uses those that the kernel has. Both last until the process ends.

A model's programs run in a sandbox (``environments/sandbox.py``) and need most system calls:
``program_filter`` refuses those that would take memory which cannot be counted, that would outlast a call, or
that open the kernel further. Sources: man pages seccomp(2), landlock(7), and bpf filters in linux/filter.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from rpg_megatron.system.limits import lower_limits
from rpg_megatron.system.process_groups import address_space

_NO_NEW_PRIVILEGES = 38
_SET_FILTER, _ACTION_AVAILABLE, _ALL_THREADS = 1, 2, 1
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | errno.EPERM
_NO_SUCH_CALL = 0x00050000 | errno.ENOSYS
_KILL = 0x80000000
# machine -> audit architecture, number of seccomp(2)
_MACHINES = {"x86_64": (0xC000003E, 317), "aarch64": (0xC00000B7, 277)}
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # the same on both
_VERSION = 1

# name -> numbers on x86_64 and aarch64. Not fstat: C libraries call newfstatat for it, which also tells of
# files by path.
_OPEN_FILES = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "pread64": (17, 67),
    "readv": (19, 65), "writev": (20, 66), "poll": (7, None), "ppoll": (271, 73),
}  # fmt: skip
_MEMORY = {
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "brk": (12, 214),
}  # fmt: skip
_TIME = {
    "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "restart_syscall": (219, 128),
}  # fmt: skip
_THREADS_AND_EXIT = {
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getpid": (39, 172), "gettid": (186, 178),
    "getrusage": (98, 165), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
_ALLOWED = _OPEN_FILES | _MEMORY | _TIME | _THREADS_AND_EXIT
"""What processes that read foreign input get."""

_LASTING = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "vmsplice": (278, 75), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
"""Memory, messages and keys that outlast a process or are not counted."""
_OTHERS = {
    "unshare": (272, 97), "setns": (308, 268), "ptrace": (101, 117), "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
}  # fmt: skip
"""Namespaces and other processes."""
_RARE = {
    "io_setup": (206, 0), "io_uring_setup": (425, 425), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "bpf": (321, 280), "landlock_create_ruleset": (444, 444),
    "syslog": (103, 116),
}  # fmt: skip
"""Large or rarely used parts of the kernel."""
_REFUSED = _LASTING | _OTHERS | _RARE
"""What a model's programs do not get."""
_LIMITED = {
    "clone": (56, 220), "clone3": (435, 435), "fcntl": (72, 25), "mmap": (9, 222), "prctl": (157, 167),
    "setsockopt": (54, 208), "socket": (41, 198), "socketpair": (53, 199),
}  # fmt: skip
"""What they get with some arguments only."""
LARGEST_SHARED = 1 << 20
"""Bytes of a mapping that a model's programs share without a file."""

type _Instruction = tuple[int, int, int, int]
# Instructions of filters: load a word of the call (number, architecture, arguments), compare, answer.
_LOAD, _EQUAL, _ABOVE, _ANY_OF, _AND, _ANSWER = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_REFUSE = (_ANSWER, 0, 0, _DENY)
_NEW_NAMESPACES, _SET_PIPE_SIZE, _SHARED, _FUTEX_HASH = 0x7E020000, 1031, 0x21, 78
"""Flags of clone(2), a command of fcntl(2), MAP_SHARED | MAP_ANONYMOUS of mmap(2), an option of prctl(2)."""
_X32 = 1 << 30
"""Calls of x86_64 for pointers of 32 bits have numbers from here."""

_libc = ctypes.CDLL(None, use_errno=True)


def means() -> list[str]:
    """What this kernel has of the two, by name; empty if foreign input cannot be confined."""
    available = []
    if _filter_available():
        available.append("seccomp")
    if version := _landlock_version():
        available.append(f"Landlock {version}")
    return available


def enter(memory: int) -> None:
    """Confine this process for good. Call it with one thread only: Landlock holds for the calling thread.

    memory: address space that it may use in addition to the present one, bytes. Also sets limits for core
    files and for the size of files that are written (none).
    """
    most = {resource.RLIMIT_AS: address_space() + memory, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    lower_limits(most)
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    if version := _landlock_version():
        _enter_landlock(version)
    if _filter_available():
        _enter_filter()


def _landlock_version() -> int:
    """Version of Landlock's interface; 0 if the kernel has none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def _enter_landlock(version: int) -> None:
    files = (1 << 13) - 1  # the rights of version 1
    for since, right in ((2, 13), (3, 14), (5, 15)):  # refer, truncate, ioctl of devices
        files |= (version >= since) << right
    network = 0b11 if version >= 4 else 0  # bind and connect TCP
    scope = 0b11 if version >= 6 else 0  # abstract Unix sockets and signals
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("=QQQ", files, network, scope)[:size]
    ruleset = int(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0))
    if ruleset < 0 or _libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock failed")
    os.close(ruleset)


def _filter_available() -> bool:
    machine = _MACHINES.get(platform.machine())
    action = ctypes.c_uint32(_DENY & 0xFFFF0000)
    return machine is not None and _libc.syscall(machine[1], _ACTION_AVAILABLE, 0, ctypes.byref(action)) == 0


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _enter_filter() -> None:
    allowed = [(number, _ALLOW) for number in _numbers(_ALLOWED)]
    code = _assemble(allowed, _DENY)
    described = _Program(len(code) // 8, code)
    seccomp = _MACHINES[platform.machine()][1]
    if _libc.syscall(seccomp, _SET_FILTER, _ALL_THREADS, ctypes.byref(described)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp failed")


def program_filter() -> bytes:
    """The filter of a model's programs, as ``bwrap --seccomp`` reads it; empty on an unknown machine."""
    if platform.machine() not in _MACHINES:
        return b""
    clone, clone3, fcntl, mmap, prctl, setsockopt, socket_, socketpair = _numbers(_LIMITED)
    rules = [(number, _DENY) for number in _numbers(_REFUSED)]
    rules.append((clone3, _NO_SUCH_CALL))  # libc then uses clone, whose flags can be seen
    # Of datagrams, a socket keeps those of many others.
    streams = [(_LOAD, 0, 0, 16), (_EQUAL, 0, 3, socket.AF_UNIX), (_LOAD, 0, 0, 24), (_AND, 0, 0, 15)]
    streams += [(_EQUAL, 0, 1, socket.SOCK_DGRAM), _REFUSE]
    buffer = [(_LOAD, 0, 0, 24), (_EQUAL, 0, 3, socket.SOL_SOCKET), (_LOAD, 0, 0, 32)]
    buffer += [(_EQUAL, 0, 1, socket.SO_SNDBUF), _REFUSE]
    large = [(_LOAD, 0, 0, 28), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, 24), (_ABOVE, 0, 1, LARGEST_SHARED)]
    special = [
        *_when(clone, [(_LOAD, 0, 0, 16), (_ANY_OF, 0, 1, _NEW_NAMESPACES), _REFUSE]),
        *_when(fcntl, [(_LOAD, 0, 0, 24), (_EQUAL, 0, 1, _SET_PIPE_SIZE), _REFUSE]),
        *_when(prctl, [(_LOAD, 0, 0, 16), (_EQUAL, 0, 1, _FUTEX_HASH), _REFUSE]),
        *_when(setsockopt, buffer),
        *_when(socket_, streams),
        *_when(socketpair, streams),
        # What is shared without a file is seen by the number of its mappings only, not by their size.
        *_when(mmap, [(_LOAD, 0, 0, 40), (_AND, 0, 0, _SHARED), (_EQUAL, 0, 5, _SHARED), *large, _REFUSE]),
    ]
    return _assemble(rules, _ALLOW, special)


def _numbers(calls: Mapping[str, tuple[int | None, int | None]]) -> list[int]:
    column = list(_MACHINES).index(platform.machine())
    return [number for each in calls.values() if (number := each[column]) is not None]


def _when(number: int, then: Sequence[_Instruction]) -> list[_Instruction]:
    """Instructions for one system call; what follows them sees its number again."""
    return [(_EQUAL, 0, len(then) + 1, number), *then, (_LOAD, 0, 0, 0)]


def _assemble(
    rules: Sequence[tuple[int, int]], otherwise: int, special: Sequence[_Instruction] = ()
) -> bytes:
    """A filter: an answer for each of some system calls, instructions for others, an answer for the rest."""
    program = [
        (_LOAD, 0, 0, 4),  # the architecture: on x86_64, programs can also use 32-bit calls
        (_EQUAL, 1, 0, _MACHINES[platform.machine()][0]),
        (_ANSWER, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the system call's number
        (_ABOVE, 0, 1, _X32 - 1),
        _REFUSE,
        *(each for number, answer in rules for each in ((_EQUAL, 0, 1, number), (_ANSWER, 0, 0, answer))),
        *special,
        (_ANSWER, 0, 0, otherwise),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def find_reachable(_files: object, parent: int) -> Iterator[list[str]]:
    """A reader for ``foreign_input.py`` that tries what it should not be able to do; returns what succeeds.

    parent: process id to send a signal to, of number 0, which has no effect.
    """
    attempts: dict[str, Callable[[], object]] = {
        "write files": lambda: os.open(os.devnull, os.O_WRONLY),
        "open connections": socket.socket,
        "signal other processes": lambda: os.kill(parent, 0),
    }
    reachable = []
    for name, attempt in attempts.items():
        with suppress(OSError):
            attempt()
            reachable.append(name)
    yield reachable
