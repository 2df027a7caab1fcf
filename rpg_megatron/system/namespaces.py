"""Linux namespaces: a process that has a root folder, a network and process numbers of its own.

The new root is a file system in memory with the given folders of the machine, read-only, and an empty folder
``/work``. There is no network, not even loopback, and other processes can neither be seen nor be signalled.
Unless the user is root, this needs user namespaces, which some clusters do not allow. Sources: man pages
unshare(2), pivot_root(2), mount_setattr(2) (Linux 5.12), user_namespaces(7).

``python -m rpg_megatron.system.namespaces`` tries it, and prints "ok" or why the machine does not allow it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rpg_megatron.config.errors import UserError

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""What programs of the machine need, without its settings and users."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_NEW_ROOT = "/tmp"
"""Where the new root is mounted before it becomes the root; any folder that exists."""
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _NOEXEC, _DETACH = 0x1000, 0x4000, 1 << 18, 2, 4, 8, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_ATTR_READ_ONLY, _ATTR_NOSUID = 1, 2
_PR_SET_DUMPABLE, _NO_NEW_PRIVILEGES = 4, 38

_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces(size: int, folders: Sequence[str] = ()) -> int:
    """Move this process, which must have one thread, to namespaces of its own, and fork.

    size: bytes of the file system in memory. folders: of the machine, besides ``SYSTEM``. Returns 0 in the
    child, which is process 1 of its namespace: all other processes there end with it. In the parent, returns
    the child's pid. Raises UserError if the kernel does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    kinds = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    try:
        if user:
            os.unshare(os.CLONE_NEWUSER)
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{user} {user} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
        os.unshare(kinds)
        _make_root(size, [*SYSTEM, *folders])
        if child := os.fork():
            return child
        # While the machine's can still be seen: only then it is allowed in a user namespace.
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
        _check(_libc.umount2(b"/old", _DETACH), "umount2")
        os.rmdir("/old")
    except OSError as e:
        raise UserError(
            f"this machine's kernel allows no sandbox ({e}); it needs Linux 5.12 and user namespaces "
            "(/proc/sys/user/max_user_namespaces above 0, and no profile that forbids them)"
        ) from None
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # processes of the same user can neither trace it nor read it
    return 0


def find_problem() -> str | None:
    """Why this machine does not allow it; None if it does. Another process tries it."""
    command = [sys.executable, "-P", "-m", "rpg_megatron.system.namespaces"]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.stdout == "ok\n" else done.stdout.strip() or done.stderr[-300:].strip() or "no answer"


def _make_root(size: int, folders: Sequence[str]) -> None:
    _mount("none", "/", None, _REC | _PRIVATE)
    # Opened first: the new root may hide their paths, as it does below /tmp.
    sources = {path: os.open(path, os.O_PATH) for path in (*folders, *_DEVICES) if os.path.exists(path)}
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _NOSUID | _NODEV, f"size={size},mode=755")
    for path, descriptor in sources.items():
        target = Path(_NEW_ROOT + path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(path):  # such as /bin
            target.symlink_to(os.readlink(path))
            continue
        if os.path.isdir(path):
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        _mount(f"/proc/self/fd/{descriptor}", str(target), None, _BIND | _REC)
        _set_attributes(str(target), (0 if path in _DEVICES else _ATTR_READ_ONLY) | _ATTR_NOSUID)
        os.close(descriptor)
    for name, mode in (("work", 0o777), ("tmp", 0o1777), ("proc", 0o555), ("old", 0o700)):
        Path(_NEW_ROOT, name).mkdir()
        Path(_NEW_ROOT, name).chmod(mode)
    os.chdir(_NEW_ROOT)
    number = _PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, b".", b"old"), "pivot_root")
    os.chdir("/work")


def _set_attributes(path: str, attributes: int) -> None:
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    arguments = _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(values), ctypes.c_size_t(32)
    _check(_libc.syscall(_MOUNT_SETATTR, *arguments), "mount_setattr")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = kind.encode() if kind else None
    done = _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), data.encode())
    _check(done, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def forbid_new_privileges() -> None:
    """For good, also for the programs that this process becomes: set-user-id files have no effect."""
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def python_folders() -> list[str]:
    """Folders of this Python, unless they are among ``SYSTEM``: for programs in Python."""
    return [prefix for prefix in {sys.base_prefix} if not prefix.startswith("/usr")]


def main() -> None:
    """Try it."""
    try:
        if child := enter_namespaces(1 << 20):
            os.waitpid(child, 0)
        else:
            print("ok", flush=True)
    except UserError as e:
        print(e, flush=True)


if __name__ == "__main__":
    main()
