"""The files of a sandbox in an image: read-only below, a writable layer in memory above, and the tests.

The process of a sandbox (``sandbox_process.py``) enters a user namespace, in which user 0 owns the image and
runs the policy's programs without privileges, and mounts the image by the kernel's overlay. Before the tests,
``begin_tests`` takes out of the writable layer what could run in place of the tests' own programs. As root,
and where ``newuidmap`` gives this user a second one, tests then run as that: user 0 of another namespace,
where the policy's is user 1. Sources: man pages user_namespaces(7), openat2(2), and the kernel's
filesystems/overlayfs.rst (``userxattr``).
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import posixpath
import pwd
import re
import shutil
import stat
import struct
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from rpg_megatron.config.files import read_text, remove
from rpg_megatron.environments.sandbox_limits import SandboxLimits, own_user

_OWN = "/sys"
"""Where this process mounts its folders: it is on every machine, and no program here needs it."""
LAYER, _LOWER, _ROOT, _GIVEN, _RESULTS = (
    f"{_OWN}/{name}" for name in ("work", "image", "root", "given", "logs")
)
_PRIVATE, NOSUID_NODEV, DETACH, _BIND = 0x4000 | 1 << 18, 2 | 4, 2, 0x1000 | 0x4000
_IN_ROOT, _OPENAT2, _SET_DUMPABLE = 0x10 | 0x02, 437, 4
_GIVEN_MIB, _RESULTS_MIB = 256, 16
_CAPABILITIES = "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"
"""What root of a container has, for tests that run as another user."""
DEVICES = {"/dev/null": "null", "/dev/full": "zero", "/dev/urandom": "urandom", "/dev/random": "random"}
"""/dev/full reads as /dev/zero does, but cannot be mapped: the size of such memory cannot be seen."""

SYSTEM = frozenset(
    [
        "bin",
        "boot",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "logs",
        "opt",
        "proc",
        "root",
        "run",
        "sbin",
        "solution",
        "sys",
        "tests",
        "usr",
    ]
)
"""Folders at the top of an image that tests see as the image has them."""
START_UP = re.compile(
    r"conftest\.py|(site|user)customize(\..*)?|.*\.(pth|pyc)|.*\.(egg|dist)-info|__pycache__|"
    r"\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|"
    r"pyproject\.toml|\.(bashrc|bash_profile|bash_login|profile|zshenv|zshrc|zprofile|gitconfig|npmrc|pdbrc)"
)
"""Names of files, and of folders, that interpreters, shells and test runners read by themselves."""
_OF_GIT = frozenset(("commondir", "config", "config.worktree", "hooks", "info", "modules"))
_libc = ctypes.CDLL(None, use_errno=True)


def mount(place: str, kind: str | None, flags: int, data: str = "", source: str = "none") -> None:
    """Mount a file system, or change a mount. Raises OSError."""
    encoded = kind.encode() if kind else None
    if _libc.mount(source.encode(), place.encode(), encoded, ctypes.c_ulong(flags), data.encode()):
        raise OSError(ctypes.get_errno(), f"mount {place}: {os.strerror(ctypes.get_errno())}")


def enter_own_mounts(size: str = "64k") -> None:
    """Mounts of this process are its own from here; ``_OWN`` is an empty folder."""
    os.unshare(os.CLONE_NEWNS)
    mount("/", None, _PRIVATE)
    mount(_OWN, "tmpfs", NOSUID_NODEV, f"size={size},mode=777")


class ImageRoot:
    """An image with its writable layer, in this process for good."""

    def __init__(self, limits: SandboxLimits):
        """Raises OSError."""
        self.limits, self.testing, self._given = limits, False, dict[str, str]()
        user, group = os.geteuid(), os.getegid()
        if user == 0:  # while the image can be reached: its folder may be root's only
            enter_own_mounts()
            self._bind_image()
            self.other_user = _enter_users([(n, own_user(n)) for n in range(3)], own_user(0), "")
            os.unshare(os.CLONE_NEWNS)
        else:
            second = _subordinate_user()
            users = [(0, user)] + ([(1, second), (2, second + 1)] if second else [])
            self.other_user = _enter_users(users, group, shutil.which("newuidmap") or "")
            enter_own_mounts()
            self._bind_image()
        for place in (LAYER, _ROOT, _GIVEN, _RESULTS):
            os.mkdir(place)
        mount(
            LAYER,
            "tmpfs",
            NOSUID_NODEV,
            f"size={limits.files_mib}m,nr_inodes={256 * limits.files_mib},mode=755",
        )
        mount(_GIVEN, "tmpfs", NOSUID_NODEV, f"size={_GIVEN_MIB}m,mode=755")
        os.mkdir(f"{LAYER}/upper", 0o755)
        os.mkdir(f"{LAYER}/work", 0o755)
        self._mount_root()

    def options(self) -> list[str]:
        """Options of bubblewrap."""
        options = ["--bind", _ROOT, "/", "--proc", "/proc", "--tmpfs", "/dev"]
        for name, value in self.variables().items():  # not bwrap's own: its loader would read them
            options += ["--setenv", name, value]
        for source, name in DEVICES.items():
            options += ["--dev-bind", source, f"/dev/{name}"]
        for number, name in enumerate(("fd", "stdin", "stdout", "stderr")):
            options += [
                "--symlink",
                f"/proc/self/fd/{number - 1}" if number else "/proc/self/fd",
                f"/dev/{name}",
            ]
        options += ["--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"]
        for path in filter(os.path.exists, ("/proc/keys", "/proc/key-users")):
            options += ["--ro-bind", "/dev/null", path]
        if self.limits.network and not self.testing:
            options += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        for place, source in self._given.items():
            options += ["--ro-bind", source, place]
        if self.testing:
            options += ["--bind", _RESULTS, "/logs"]
        if self.testing and self.other_user:
            options += [part for name in _CAPABILITIES for part in ("--cap-add", f"CAP_{name}")]
        try:
            os.close(_open_inside(_ROOT, self.limits.workdir, os.O_PATH | os.O_DIRECTORY))
        except OSError:  # the policy may have removed it
            return [*options, "--chdir", "/"]
        return [*options, "--chdir", self.limits.workdir]

    def variables(self) -> dict[str, str]:
        """Environment variables of programs."""
        given = {name: value for name, value in self.limits.variables if name and "=" not in name}
        return {"HOME": "/root", "LANG": "C.UTF-8"} | given

    def give(self, place: str, tar: bytes) -> None:
        """Let programs read a folder, from a tar file. Only the tests' user can read /tests."""
        folder = Path(_GIVEN, str(len(self._given)))
        folder.mkdir()
        with tarfile.open(fileobj=io.BytesIO(tar)) as members:
            members.extractall(folder, filter="tar")
        if self.other_user and place == "/tests":
            os.chown(folder, 1, 1)
        os.chmod(folder, 0o700 if place == "/tests" else 0o755)
        self._given[place] = str(folder)

    def begin_tests(self, keep: Sequence[str]) -> None:
        """Undo changes that could run in place of the tests' programs; programs are tests from here.

        No program of the policy may run. keep: paths whose changes stay although they are in ``SYSTEM`` or
        have a name of ``START_UP``. Raises OSError, RecursionError.
        """
        _libc.umount2(_ROOT.encode(), DETACH)
        variables = dict(self.limits.variables)
        programs = ":".join(variables.get(name, "") for name in ("PATH", "LD_LIBRARY_PATH")).split(":")
        restore(f"{LAYER}/upper", _LOWER, [*keep, self.limits.workdir], programs)
        self._mount_root()
        mount(_RESULTS, "tmpfs", NOSUID_NODEV, f"size={_RESULTS_MIB}m,mode=755")
        for name in ("", "verifier", "agent", "artifacts"):
            os.makedirs(f"{_RESULTS}/{name}", 0o755, exist_ok=True)
            os.chown(f"{_RESULTS}/{name}", *((1, 1) if self.other_user else (0, 0)))
        if self.other_user:
            _enter_users([(0, 1), (1, 2), (2, 0)], 1, "")
            os.unshare(os.CLONE_NEWNS)
        self.testing = True

    def read(self, path: str, most: int) -> bytes:
        """The content of a file. Raises OSError, also if it has more bytes."""
        path = posixpath.join(self.limits.workdir, path)
        root, place = (_RESULTS, path[5:]) if self.testing and path.startswith("/logs/") else (_ROOT, path)
        with open(_open_inside(root, place, os.O_RDONLY), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, f"{path} is no file")
            content = file.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, f"{path} has more than {most >> 20} MiB")
        return content

    def write(self, path: str, content: bytes) -> None:
        """Write a file; its folders are made. Raises OSError."""
        path = posixpath.join(self.limits.workdir, path)
        folder = "/"
        for name in path.split("/")[1:-1]:
            above, folder = folder, posixpath.join(folder, name)
            try:
                os.close(_open_inside(_ROOT, folder, os.O_PATH | os.O_DIRECTORY))
            except FileNotFoundError:
                descriptor = _open_inside(_ROOT, above, os.O_PATH | os.O_DIRECTORY)
                os.mkdir(name, 0o755, dir_fd=descriptor)
                os.close(descriptor)
        with open(_open_inside(_ROOT, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), "wb") as file:
            file.write(content)

    def _bind_image(self) -> None:
        os.mkdir(_LOWER)
        mount(_LOWER, None, _BIND, source=self.limits.root)

    def _mount_root(self) -> None:
        layers = f"lowerdir={_LOWER},upperdir={LAYER}/upper,workdir={LAYER}/work"
        mount(_ROOT, "overlay", NOSUID_NODEV, f"{layers},userxattr")


def find_layer_problem(folder: str) -> str:
    """Why this machine cannot mount a writable layer, or "ok". folder: an empty one."""
    try:
        os.mkdir(f"{folder}/usr")
        os.chmod(folder, 0o755)
        if os.geteuid() == 0:
            os.chown(f"{folder}/usr", own_user(0), own_user(0))
        ImageRoot(SandboxLimits(files_mib=1, root=folder))
        os.rmdir(f"{_ROOT}/usr")
        os.mkdir(f"{_ROOT}/usr")  # the layer hides what is below, which needs an extended attribute
    except OSError as e:
        return str(e)
    return "ok"


def restore(upper: str, lower: str, keep: Sequence[str], programs: Sequence[str]) -> None:
    """Undo changes in a writable layer: of ``SYSTEM``, of folders of programs, of what runs by itself.

    keep: absolute paths, with all below them, that are not of the system. programs: folders of PATH and of
    libraries. A folder in which the image has an interpreter (``pyvenv.cfg``, ``conda-meta``) is one too.
    """
    keep = [path for each in keep if (path := posixpath.normpath(each)) != "/"]
    programs = [posixpath.normpath(each) for each in programs if each.startswith("/")]
    above = {posixpath.dirname(each) for each in programs if posixpath.basename(each) == "bin"}
    above = {each for each in above if not any(f"{path}/".startswith(f"{each}/") for path in keep)}
    programs += [*above, *(f"{each}/{name}" for each in above for name in ("lib", "lib64"))]
    folders = [("/", False)]
    while folders:
        place, is_system = folders.pop()
        with os.scandir(upper + place) as found:
            entries = [(each.name, each.is_dir(follow_symlinks=False), each.is_symlink()) for each in found]
        for name, is_folder, is_link in entries:
            path = posixpath.join(place, name)
            image = lower + path
            runs = START_UP.fullmatch(name) or (name == ".git" and not is_folder)
            runs = runs or (posixpath.basename(place) == ".git" and name in _OF_GIT)
            runs = runs or any(os.path.lexists(f"{image}/{each}") for each in ("pyvenv.cfg", "conda-meta"))
            is_own = path in keep
            in_system = is_system or path in programs or (place == "/" and name in SYSTEM)
            in_system = in_system and not is_own
            leads = is_folder and any(each.startswith(path + "/") for each in keep)
            # A link in place of a folder above programs would lead to others of the same names.
            hides = (
                not is_own
                and is_link
                and (
                    any(each.startswith(path + "/") for each in programs)
                    or (os.path.isdir(image) and not os.path.islink(image))
                )
            )
            if hides or (runs and not is_own) or (in_system and not leads):
                remove(Path(upper + path))
            elif is_folder:
                folders.append((path, in_system))


def _enter_users(users: Sequence[tuple[int, int]], group: int, program: str) -> bool:
    """Enter a user namespace as its user 0; whether it has a second user.

    users: user inside and outside; groups are the same but the first, which is ``group``. program: newuidmap,
    if another program must write the maps of two users.
    """
    pid, (read, write) = os.getpid(), os.pipe()
    groups = [(users[0][0], group), *users[1:]]
    if (child := os.fork()) == 0:  # it stays outside, where it has the right to write
        status = 1
        try:
            os.read(read, 1)
            if len(users) == 1:
                Path(f"/proc/{pid}/setgroups").write_text("deny")
            for kind, lines in (("uid_map", users), ("gid_map", groups)):
                parts = [f"{inside} {outside} 1" for inside, outside in lines]
                if program and len(users) > 1:
                    command = [program.replace("uid", kind[:3]), str(pid), *" ".join(parts).split()]
                    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
                else:
                    Path(f"/proc/{pid}/{kind}").write_text("\n".join(parts))
            status = 0
        finally:
            os._exit(status)
    os.close(read)
    os.unshare(os.CLONE_NEWUSER)
    os.write(write, b"x")
    os.close(write)
    if os.waitpid(child, 0)[1]:
        raise OSError(errno.EPERM, "the users of a user namespace cannot be set")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if len(users) > 1:
        os.setgroups([])
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else the next namespace's maps could not be written
    return len(users) > 1


def _subordinate_user() -> int | None:
    """The first of two more users that this one may use, by /etc/subuid and newuidmap; None without them."""
    if not shutil.which("newuidmap") or not shutil.which("newgidmap"):
        return None
    try:
        names = pwd.getpwuid(os.geteuid()).pw_name, str(os.geteuid())
        tables = [read_text(Path(f"/etc/{name}")).splitlines() for name in ("subuid", "subgid")]
        rows = [[line.split(":") for line in each] for each in tables]
        first = [{int(at) for name, at, count in each if name in names and int(count) > 1} for each in rows]
        return min(first[0] & first[1], default=None)
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _open_inside(root: str, path: str, flags: int, mode: int = 0) -> int:
    """Open a file as a program with this root would: no link leads outside. Raises OSError."""
    if not isinstance(path, str) or "\0" in path:
        raise OSError(errno.EINVAL, f"{path!a} is no path")
    try:
        encoded = path.encode()
    except UnicodeEncodeError as e:
        raise OSError(errno.EINVAL, f"{path!a} is no path: {e}") from None
    flags |= os.O_CLOEXEC | (0 if flags & os.O_PATH else os.O_NONBLOCK | os.O_NOCTTY)
    how = struct.pack("=QQQ", flags, mode, _IN_ROOT)
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = int(_libc.syscall(_OPENAT2, folder, encoded, how, ctypes.c_size_t(len(how))))
    finally:
        os.close(folder)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return descriptor
