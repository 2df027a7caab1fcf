"""The process of a sandbox (``sandbox.py``): runs its calls and keeps its files.

Each call is a command of bubblewrap or Apptainer. When it has ended, all that it has started is killed, even
if that has left its session and its parents. The memory of a call is looked at every 5 to 50 ms, the oftener,
the less is left. Sources: man pages bwrap(1), tmpfs(5).

``python -m rpg_megatron.environments.sandbox_process LIMITS`` tries limits given as JSON: it prints "ok", or
why they are impossible here.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rpg_megatron.config.errors import UserError
from rpg_megatron.environments import image_root
from rpg_megatron.environments.image_root import DETACH, LAYER, NOSUID_NODEV, ImageRoot, mount
from rpg_megatron.environments.sandbox_limits import SandboxLimits, find_problem, own_user
from rpg_megatron.system.child import start_program
from rpg_megatron.system.fork_server import Serve, send_line
from rpg_megatron.system.limits import lower_limits
from rpg_megatron.system.parent_death import end_with_parent, set_child_subreaper, set_parent_death_signal
from rpg_megatron.system.process_tree import MemoryOfProcesses, descendants, kill_descendants
from rpg_megatron.system.sandbox import program_filter

_POLL, _FASTEST = 0.005, 2 << 30
"""Seconds between two looks at the memory of a call, at least; bytes a second that a core can fill."""
_LARGEST = 8 << 20
"""Bytes of a file that can be read: it is one line of the connection."""
_OF_APPTAINER, _OF_APPTAINER_PROCESSES = 128, 8
"""MiB and processes of Apptainer itself, which are not counted."""
_OF_BWRAP_PROCESSES = 3
"""This process and two of bwrap: they count for the limit of a user who is not root."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""What programs of the machine need, without its settings and users."""
_WORK, _SCRATCH = LAYER, "/sys/tmp"

_libc = ctypes.CDLL(None, use_errno=True)


def load_server(**limits: Any) -> tuple[Serve, dict[str, Any]]:
    """Loader (``system/forked_workers.py``). Raises UserError if no sandbox can be made."""
    checked = SandboxLimits(**limits | {"folders": tuple(limits["folders"])})
    if problem := find_problem(checked):
        raise UserError(problem)
    description = {"async": True, "deadline": checked.seconds}
    return lambda connection: _serve(connection, checked), description


def _serve(connection: socket.socket, limits: SandboxLimits) -> None:
    outside, image = os.getpid(), None
    work = tempfile.mkdtemp(prefix="sandbox-") if limits.image else _WORK
    if child := _fork_under_guardian(work if limits.image else None):
        connection.close()
        os.waitpid(child, 0)
        return
    parent = os.getppid()
    if not limits.image and not limits.root:
        _mount_folders(limits)
    os.umask(0)
    set_child_subreaper()
    send_line(connection, outside)
    for line in connection.makefile("rb"):
        number, arguments = json.loads(line)
        try:
            if "exec" in arguments:
                command, text, seconds = (arguments[key] for key in ("exec", "input", "seconds"))
                value: Any = _execute(command, text, seconds, limits, image or work)
            elif "open" in arguments:
                limits = SandboxLimits(**arguments["open"])
                os.umask(0o022)
                image, value = ImageRoot(limits), ""
                end_with_parent(parent)  # new rights have ended that
            elif "write" in arguments:
                value = _write_file(image or work, arguments["write"], base64.b64decode(arguments["content"]))
            elif "read" in arguments:
                value = _read_file(image or work, arguments["read"])
            else:
                assert image is not None
                value = ""
                for place, tar in arguments["give"].items():
                    image.give(place, base64.b64decode(tar))
                if (keep := arguments.get("tests")) is not None:
                    kill_descendants()
                    image.begin_tests(keep)
                    end_with_parent(parent)
        except (OSError, RecursionError, tarfile.TarError) as e:
            value = [getattr(e, "errno", None) or errno.EIO, getattr(e, "strerror", "") or str(e)]
        send_line(connection, {"number": number, "exits": False, "value": value})


def _fork_under_guardian(folder: str | None) -> int:
    """Fork. The parent of the child, a process between the two, ends what the child has started, and removes
    the folder, when one of them has ended, even by kill -9: Apptainer's processes outlive their parent, and
    so do those of bwrap while it starts.

    Returns 0 in the child, else the pid of the process between.
    """
    read, write = os.pipe()
    if guardian := os.fork():
        os.close(read)  # the other end is closed with this process
        return guardian
    os.setsid()
    set_child_subreaper()
    if (child := os.fork()) == 0:
        set_parent_death_signal(signal.SIGKILL)
        os.close(read)
        os.close(write)
        return 0
    try:
        os.closerange(0, read)
        os.closerange(read + 1, 4096)
        select.select([read, os.pidfd_open(child)], [], [])
        kill_descendants()
        if folder:
            subprocess.run(["rm", "-rf", folder])  # of any depth
    finally:
        os._exit(0)


def _mount_folders(limits: SandboxLimits) -> None:
    """Mount /work, with its limits, for this process and what it starts; it ends with the last of them."""
    parent, user, group = os.getppid(), os.geteuid(), os.getegid()
    if user:
        os.unshare(os.CLONE_NEWUSER)
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            Path("/proc/self", name).write_text(text)
    image_root.enter_own_mounts()
    end_with_parent(parent)  # new rights have ended that
    os.mkdir(_SCRATCH)
    os.mkdir(_WORK)
    _mount_tmpfs(_WORK, limits)


def _mount_tmpfs(place: str, limits: SandboxLimits) -> None:
    sizes = f"size={limits.files_mib}m,nr_inodes={256 * limits.files_mib}"
    mount(place, "tmpfs", NOSUID_NODEV, f"{sizes},mode={777 if place == _WORK else 1777}")


@contextmanager
def _scratch(limits: SandboxLimits) -> Iterator[None]:
    """Mount /tmp for a call, unless Apptainer does, or the image has it."""
    if limits.image or limits.root:
        yield
        return
    _mount_tmpfs(_SCRATCH, limits)
    try:
        yield
    finally:
        _libc.umount2(_SCRATCH.encode(), DETACH)


def _in_image(command: Sequence[str], limits: SandboxLimits, work: str) -> list[str]:
    """The command line that runs a program in the image."""
    options = ["--containall", "--no-privs", "--net", "--network=none", "--pwd=/work", "--env=HOME=/tmp"]
    options += [f"--bind={work}:/work", *(f"--bind={folder}:{folder}:ro" for folder in limits.folders)]
    # In the image: Apptainer itself needs more address space.
    limit = ["sh", "-c", f'ulimit -v {4 * limits.memory_mib << 10} && exec "$@"', "sh"]
    return ["apptainer", "--silent", "exec", *options, limits.image, *limit, *command]


def _by_bwrap(
    command: Sequence[str], folders: Sequence[str], rules: int, status: int, image: ImageRoot | None
) -> list[str]:
    """The command line that runs a program of the machine, or of an unpacked image.

    rules: descriptor of the filter. status: one where bwrap says what it does, which programs do not get.
    """
    network = image is not None and image.limits.network and not image.testing
    options = [f"--unshare-{kind}" for kind in ("ipc", "pid", "uts", "cgroup-try")]
    options += [] if network else ["--unshare-net", "--seccomp", str(rules)]
    options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--json-status-fd", str(status)]
    if image is not None:
        return ["bwrap", *options, *image.options(), "--", *command]
    options += ["--proc", "/proc", "--bind", _WORK, "/work", "--bind", _SCRATCH, "/tmp"]
    options += ["--dir", "/dev", "--dir", "/etc", "--symlink", "/tmp", "/dev/shm"]
    for source, name in image_root.DEVICES.items():
        options += ["--dev-bind", source, f"/dev/{name}"]
    for path in filter(os.path.lexists, _SYSTEM):
        options += ["--symlink", os.readlink(path)] if os.path.islink(path) else ["--ro-bind", path]
        options.append(path)
    own = [] if sys.base_prefix.startswith("/usr") else [sys.base_prefix]
    for folder in [*own, *folders]:
        for parent in reversed(Path(folder).parents):  # those that bwrap makes by itself are root's only
            options += ["--dir", str(parent)]
        options += ["--ro-bind", folder, folder]
    for path in filter(os.path.exists, ("/proc/keys", "/proc/key-users")):
        options += ["--ro-bind", "/dev/null", path]
    options += ["--remount-ro", "/", "--chdir", "/work"]
    if os.geteuid() == 0:  # another user, once files that only root can read are there
        user = own_user(os.getpid())
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--", *command]
    return ["bwrap", *options, "--", *command]


def _execute(
    command: list[str], text: str, seconds: float, limits: SandboxLimits, work: str | ImageRoot
) -> tuple[str, int | None, str]:
    """Run a program and end all that it has started; the fields of ``SandboxResult``."""
    image = work if isinstance(work, ImageRoot) else None
    with open(os.memfd_create("status"), "rb") as status, _scratch(limits):
        try:
            if not command:
                raise ValueError("it is empty")
            with _sealed(text.encode(errors="replace")) as stdin, _sealed(program_filter()) as rules:
                if limits.image:
                    process = _start(_in_image(command, limits, str(work)), stdin, (), limits)
                else:
                    others = rules, status.fileno()
                    line = _by_bwrap(command, limits.folders, *others, image)
                    process = _start(line, stdin, others, limits, image)
        except (TypeError, ValueError, OSError) as e:  # no text, NUL, half a character, too long
            return f"this command cannot be run: {e}\n", 127, ""
        try:
            kept, ended = _watch(process, time.monotonic() + seconds, limits)
        finally:
            kill_descendants()
        has_run = b"exit-code" in os.pread(status.fileno(), 4096, 0)
    output, code = kept.decode(errors="replace"), process.returncode
    if code == 1 and not has_run and output.startswith("bwrap: "):  # not the program, which may write that
        code, ended = (127, "") if output.startswith("bwrap: execvp") else (None, "closed")
    return output, None if ended else code, ended


def _start(
    line: list[str],
    stdin: int,
    others: tuple[int, ...],
    limits: SandboxLimits,
    image: ImageRoot | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command line. others: descriptors that it gets too."""
    fixed = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_SIGPENDING: 1024}
    fixed |= dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE), 0)
    path = os.pathsep.join(["/usr/local/bin", "/usr/bin", "/bin", f"{sys.base_prefix}/bin"])
    variables = {} if image else {"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8"}
    if limits.image:  # programs see what Apptainer itself gets
        fixed[resource.RLIMIT_FSIZE] = limits.files_mib << 20
        names = [name for name in os.environ if name.startswith(("APPTAINER", "SINGULARITY"))]
        names += ["PATH", "HOME", "TMPDIR"]
        variables = {name: os.environ[name] for name in names if name in os.environ}
    else:
        fixed[resource.RLIMIT_NPROC] = limits.processes + _OF_BWRAP_PROCESSES * bool(image or os.geteuid())
        fixed[resource.RLIMIT_AS] = 4 * limits.memory_mib << 20

    def limit() -> None:
        lower_limits(fixed)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    streams: Any = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "bufsize": 0}
    streams |= {"pass_fds": others, "executable": shutil.which(line[0])}
    streams |= {"start_new_session": True, "process_group": None}
    return start_program(line, None, env=variables, preexec_fn=limit, **streams)


def _watch(process: subprocess.Popen[bytes], end: float, limits: SandboxLimits) -> tuple[bytes, str]:
    """Wait until a process has ended, or must be: what it has written, and why it must be ended."""
    assert process.stdout is not None
    read, ready = process.stdout.fileno(), os.pidfd_open(process.pid)
    os.set_blocking(read, False)
    memory = MemoryOfProcesses(() if limits.image else (_WORK,) if limits.root else (_WORK, _SCRATCH))
    look, kept, total, is_open, ended = 0.0, b"", 0, True, ""
    while not ended:
        # A program may close its output and go on: that would be ready to read again and again.
        pause = max(0.0, min(look, end) - time.monotonic())
        select.select([read, ready] if is_open else [ready], [], [], pause)
        has_exited = process.poll() is not None
        with suppress(BlockingIOError):
            while is_open and total <= 100 * limits.output:
                part = os.read(read, 65536)
                kept, total = kept + part[: limits.output - len(kept)], total + len(part)
                is_open = bool(part)
        if has_exited:
            break
        if total > 100 * limits.output:
            ended = "output"
        elif time.monotonic() > end:
            ended = "time"
        elif time.monotonic() >= look:
            ended, pause = _exceeded(limits, memory)
            look = time.monotonic() + pause
    os.close(ready)
    process.stdout.close()
    return kept, ended


@contextmanager
def _sealed(content: bytes) -> Iterator[int]:
    """A file in memory that nobody can change, since it is not counted."""
    with open(os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b") as file:
        file.write(content)
        file.seek(0)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield file.fileno()


def _exceeded(limits: SandboxLimits, memory: MemoryOfProcesses) -> tuple[str, float]:
    """The limit that the processes have exceeded, and seconds until the next look."""
    processes = descendants()
    if limits.image and len(processes) > limits.processes + _OF_APPTAINER_PROCESSES:
        return "processes", 0.0
    left = (limits.memory_mib + _OF_APPTAINER * bool(limits.image) << 20) - memory.look(processes)
    fastest = _FASTEST * min(limits.processes, os.cpu_count() or 1)
    return "memory" if left < 0 else "", max(_POLL, min(0.05, left / fastest))


def _write_file(work: str | ImageRoot, path: str, content: bytes) -> str:
    if isinstance(work, ImageRoot):
        work.write(path, content)
        return ""
    place = _inside(work, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.write_bytes(content)
    place.chmod(0o666)
    return ""


def _read_file(work: str | ImageRoot, path: str) -> str:
    if isinstance(work, ImageRoot):
        return base64.b64encode(work.read(path, _LARGEST)).decode()
    place = _inside(work, path)
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, f"{path} is no file")
    if place.stat().st_size > _LARGEST:
        raise OSError(errno.EFBIG, f"{path} has more than {_LARGEST >> 20} MiB")
    return base64.b64encode(place.read_bytes()).decode()


def _inside(work: str, path: str) -> Path:
    """The path of a file in /work. No program runs that could change it meanwhile."""
    try:
        place = Path(path)
        for _ in range(40):  # links may begin with /work, which is somewhere else here
            inside = place.relative_to("/work") if place.is_relative_to("/work") else place
            place = Path(work, inside).resolve()
            if place.is_relative_to(work) and place != Path(work):
                return place
            if not place.is_relative_to("/work"):
                break
    except (TypeError, ValueError, RuntimeError) as e:  # no text, NUL or half a character, a loop of links
        raise OSError(errno.EINVAL, f"{path!a} is no path: {e}") from None
    raise OSError(errno.EACCES, f"{path} is not in /work")


def main() -> None:
    """Try limits."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a fork server ignores it
    limits = SandboxLimits(**json.loads(sys.argv[1]))
    command = ["sh", "-c", "echo ok | cat"]
    try:
        with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
            if limits.root:
                if (child := os.fork()) == 0:  # which cannot remove the folder any more
                    print(image_root.find_layer_problem(folder), flush=True)
                    os._exit(0)
                os.waitpid(child, 0)
                return
            if not limits.image:
                _mount_folders(limits)
            set_child_subreaper()
            output, _, ended = _execute(command, "", 50.0, limits, folder if limits.image else _WORK)
            print(output or f"limit of {ended}: too low for any program" if ended else output)
    except OSError as e:
        print(e)


if __name__ == "__main__":
    main()
