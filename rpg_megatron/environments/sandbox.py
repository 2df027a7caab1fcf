"""Sandboxes: where the programs run that a model writes, and where their files are.

Each is a process in namespaces of its own (``system/namespaces.py``): no network, no files of the machine but
its programs, read-only, and no other processes. With an image, Apptainer makes these, and the programs are
those of the image. After each call, all processes that it has started are killed. Calls have limits of time,
memory, processes, files and output.

It does not protect from faults of the kernel, and not from use of the cores: a call may keep all of them busy
until its time ends. Memory is looked at every 50 ms; what a program takes in between is limited for each of
its processes only.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rpg_megatron.config.errors import UserError
from rpg_megatron.system.fork_server import Serve, send_line
from rpg_megatron.system.forked_workers import ForkServer, Loader, WorkerProcess
from rpg_megatron.system.namespaces import (
    enter_namespaces,
    find_problem,
    forbid_new_privileges,
    python_folders,
)
from rpg_megatron.system.parent_death import set_child_subreaper, set_parent_death_signal

_POLL = 0.05
"""Seconds between two looks at the memory of a call."""
_LARGEST = 8 << 20
"""Bytes of a file that can be read: it is one line of the connection."""
_NO_LIMIT = 1 << 40
"""Address space of the sandbox itself, bytes; its programs have ``SandboxLimits``."""
_FIRST_USER = 1_000_000_000
"""As root, the user of a sandbox's programs is this plus its pid: nobody else's."""
_OF_APPTAINER, _OF_APPTAINER_PROCESSES = 128, 8
"""MiB and processes of Apptainer itself, which are not counted."""
_GRACE = 10.0
"""Seconds after which a sandbox that does not answer is killed, in addition to the time of the call."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a sandbox."""

    seconds: float = 30.0
    """Time for a call."""
    memory_mib: int = 512
    """Of all processes of a call together; the address space of each is limited to four times as much."""
    processes: int = 32
    files_mib: int = 64
    """Files in total; they are in memory."""
    output: int = 65536
    """Bytes of a call's output that are kept; if it writes more than 100 times as much, it is ended."""
    folders: tuple[str, ...] = ()
    """Folders of the machine that programs can read, such as a virtual environment."""
    image: str = ""
    """File or folder of an Apptainer image, in which programs run; empty: no Apptainer. ``files_mib`` is then
    the limit of each file, on the disk of $TMPDIR."""


class SandboxResult(NamedTuple):
    """How a call ended."""

    output: str
    """What it wrote to stdout and stderr."""
    code: int | None
    """Exit code, negative for a signal; None if it was ended."""
    ended: str = ""
    """Why it was ended: "time", "memory", "output" or, with an image, "processes"; or "closed": the sandbox
    was."""


class Sandbox:
    """Files and programs of one episode. For one event loop."""

    def __init__(self, process: WorkerProcess, limits: SandboxLimits):
        self._process, self._limits = process, limits

    async def exec(
        self, command: Sequence[str], *, input: str = "", seconds: float | None = None
    ) -> SandboxResult:
        """Run a program in ``/work``. seconds: less than the limit. Never raises for what it does."""
        limit = min(seconds or self._limits.seconds, self._limits.seconds)
        arguments = {"exec": list(command), "input": input, "seconds": limit}
        answer = await self._call(arguments, limit)
        try:
            return (
                SandboxResult("", None, "closed")
                if answer is None
                else msgspec.convert(answer, SandboxResult)
            )
        except msgspec.ValidationError:  # not of the sandbox
            self.close()
            return SandboxResult("", None, "closed")

    async def write(self, path: str, content: bytes) -> None:
        """Write a file; its folders are made. Raises OSError."""
        await self._file({"write": path, "content": base64.b64encode(content).decode()})

    async def read(self, path: str) -> bytes:
        """Read a file of at most 8 MiB. Raises OSError."""
        return base64.b64decode(await self._file({"read": path}))

    def close(self) -> None:
        """End its programs and remove its files."""
        self._process.end()

    async def _file(self, arguments: dict[str, str]) -> str:
        answer = await self._call(arguments, self._limits.seconds)
        if answer is None:
            raise OSError("the sandbox was closed")
        if isinstance(answer, list):
            raise OSError(*answer)
        return str(answer)

    async def _call(self, arguments: dict[str, Any], seconds: float) -> Any:
        _, outcome = self._process.call(arguments, on_request=lambda request: None)
        done, _ = await asyncio.wait([outcome], timeout=seconds + _GRACE)
        if not done:
            self.close()
        return (await outcome).value


class Sandboxes:
    """Starts sandboxes: each is a fork of a process that has imported what it needs."""

    def __init__(self, limits: SandboxLimits = SandboxLimits()):
        """Raises UserError if this machine's kernel allows none."""
        self._limits = limits
        load = "rpg_megatron.environments.sandbox:load_server"
        loader = Loader(load, asdict(limits), _NO_LIMIT, "sandbox")
        self._server = ForkServer(loader)

    async def open(self) -> Sandbox:
        """A new sandbox, without files."""
        return Sandbox(await WorkerProcess.start(self._server), self._limits)

    def close(self) -> None:
        """End all of them."""
        if self._server.kill():
            self._server.close()


# -- in the sandbox ------------------------------------------------------------------------------------------


def load_server(**limits: Any) -> tuple[Serve, dict[str, Any]]:
    """Loader (``system/forked_workers.py``). Raises UserError if no sandbox can be made."""
    checked = SandboxLimits(**limits | {"folders": tuple(limits["folders"])})
    if problem := image_problem(checked.image) if checked.image else find_problem():
        raise UserError(problem)
    description = {"async": True, "deadline": checked.seconds}
    return lambda connection: _serve(connection, checked), description


def image_problem(image: str) -> str | None:
    """Why Apptainer cannot run programs of an image; None if it can."""
    program = shutil.which("apptainer")
    if program is None:
        return "apptainer is not on the PATH; install it or load its module, or use sandboxes without image"
    if "://" in image or not os.path.exists(image):
        return f"{image} is no image on this machine; make one with: apptainer pull FILE.sif docker://NAME"
    command = _in_image(["echo", "ok"], SandboxLimits(image=image), "/tmp")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        return f"apptainer has not run {image} within a minute"
    # Its exit code is not known in the fork server, whose children the kernel reaps.
    return None if done.stdout == "ok\n" else f"apptainer cannot run {image}: {done.stderr.strip()[-300:]}"


def _in_image(command: Sequence[str], limits: SandboxLimits, work: str) -> list[str]:
    """A command line that runs a program in the image, with the folder ``work`` as /work."""
    options = ["--containall", "--no-privs", "--net", "--network=none", "--pwd=/work", "--env=HOME=/work"]
    options += [f"--bind={work}:/work", *(f"--bind={folder}:{folder}:ro" for folder in limits.folders)]
    # In the image: Apptainer itself needs more address space.
    limit = ["sh", "-c", f'ulimit -v {4 * limits.memory_mib << 10} && exec "$@"', "sh"]
    return ["apptainer", "--silent", "exec", *options, limits.image, *limit, *command]


def _serve(connection: socket.socket, limits: SandboxLimits) -> None:
    outside, work, user = os.getpid(), "/work", None
    if limits.image:
        work = tempfile.mkdtemp(prefix="sandbox-")
        child = _fork_under_guardian(work)
    else:
        child = enter_namespaces(limits.files_mib << 20, [*python_folders(), *limits.folders])
        user = None if os.geteuid() else _FIRST_USER + outside
    if child:
        send_line(connection, outside)
        connection.close()
        os.waitpid(child, 0)
        return
    # Its parent has pid 0 in the namespace, so whether that has ended is seen from the connection.
    set_parent_death_signal(signal.SIGKILL)
    os.umask(0)
    _answer_calls(connection, limits, user, work)


def _fork_under_guardian(work: str) -> int:
    """Fork. The parent of the child, a process between the two, ends what the child has started, and removes
    the folder, when one of them has ended, even by kill -9: Apptainer's processes outlive their parent.

    Returns 0 in the child, else the pid of the process between.
    """
    read, write = os.pipe()
    if guardian := os.fork():
        os.close(read)  # the other end is closed with this process
        return guardian
    os.setsid()
    set_child_subreaper()
    if (child := os.fork()) == 0:
        os.close(read)
        os.close(write)
        set_child_subreaper()
        return 0
    try:
        os.closerange(0, read)
        os.closerange(read + 1, 4096)
        select.select([read, os.pidfd_open(child)], [], [])
        _kill_all(_descendants)
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os._exit(0)


def _answer_calls(connection: socket.socket, limits: SandboxLimits, user: int | None, work: str) -> None:
    for line in connection.makefile("rb"):
        number, arguments = json.loads(line)
        try:
            if "exec" in arguments:
                value: Any = _execute(
                    arguments["exec"], arguments["input"], arguments["seconds"], limits, user, work
                )
            elif "write" in arguments:
                value = _write_file(work, arguments["write"], base64.b64decode(arguments["content"]))
            else:
                value = _read_file(work, arguments["read"])
        except OSError as e:
            value = [e.errno, e.strerror or str(e)]
        send_line(connection, {"number": number, "exits": False, "value": value})


def _execute(
    command: list[str], text: str, seconds: float, limits: SandboxLimits, user: int | None, work: str
) -> tuple[str, int | None, str]:
    """Run a program and end all that it has started; the fields of ``SandboxResult``."""
    end = time.monotonic() + seconds
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(text.encode(errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    read, write = os.pipe()
    os.set_blocking(read, False)
    pid = os.fork()
    if pid == 0:
        in_image = _in_image(command, limits, work) if limits.image else command
        _become(in_image, stdin, write, limits, user)
    os.close(stdin)
    os.close(write)
    kept, total, is_open, code, ended = b"", 0, True, None, ""
    try:
        while code is None and not ended:
            # A program may close its output and go on: that would be ready to read again and again.
            select.select([read] if is_open else [], [], [], min(_POLL, max(0.0, end - time.monotonic())))
            kept, total, is_open = _take_output(read, kept, total, limits.output)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            elif total > 100 * limits.output:
                ended = "output"
            elif time.monotonic() > end:
                ended = "time"
            else:
                ended = _exceeded(limits)
    finally:
        _kill_all(_processes_of(limits))
    kept, *_ = _take_output(read, kept, total, limits.output)
    os.close(read)
    return kept.decode(errors="replace"), code, ended


def _become(command: list[str], stdin: int, out: int, limits: SandboxLimits, user: int | None) -> None:
    """Become the program, with its limits; never returns."""
    try:
        os.setsid()
        set_parent_death_signal(signal.SIGKILL)
        for target, descriptor in enumerate((stdin, out, out)):
            os.dup2(descriptor, target)
        os.closerange(3, 1 << 20)  # such as the sandbox's own connection
        space = 4 * limits.memory_mib << 20
        fixed = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 256}
        if limits.image:
            fixed[resource.RLIMIT_FSIZE] = limits.files_mib << 20
        else:
            fixed |= {resource.RLIMIT_AS: space, resource.RLIMIT_NPROC: limits.processes}
        for kind, limit in fixed.items():
            resource.setrlimit(kind, (limit, limit))
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        if not limits.image:  # Apptainer may be set-user-id
            forbid_new_privileges()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        path = os.pathsep.join(["/usr/local/bin", "/usr/bin", "/bin", f"{sys.base_prefix}/bin"])
        variables = {"PATH": path, "HOME": "/work", "LANG": "C.UTF-8"}
        if limits.image:  # programs see what Apptainer itself gets
            named = ("PATH", "HOME", "TMPDIR")
            variables = {
                k: v
                for k, v in os.environ.items()
                if k in named or k.startswith(("APPTAINER", "SINGULARITY"))
            }
        os.execvpe(command[0], command, variables)
    except OSError as e:
        os.write(2, f"{command[0]}: {e.strerror}\n".encode())
    finally:
        os._exit(127)


def _take_output(read: int, kept: bytes, total: int, most: int) -> tuple[bytes, int, bool]:
    """The first ``most`` bytes so far, the number of bytes in total, and whether more can come."""
    with suppress(BlockingIOError):
        while total <= 100 * most:
            if not (part := os.read(read, 65536)):
                return kept, total, False
            kept, total = kept + part[: most - len(kept)], total + len(part)
    return kept, total, True


def _others() -> list[int]:
    """All processes of this namespace but this one, which is its first."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _descendants() -> list[int]:
    """All processes below this one, which is the parent of orphans."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = children.get(os.getpid(), [])
    for pid in found:  # grows
        found += children.get(pid, [])
    return found


def _exceeded(limits: SandboxLimits) -> str:
    """The limit that the processes have exceeded."""
    pages, processes = 0, _processes_of(limits)()
    for pid in processes:
        with suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
            pages += int(file.read().split()[1])
    if pages * resource.getpagesize() > limits.memory_mib + _OF_APPTAINER * bool(limits.image) << 20:
        return "memory"
    return "processes" if limits.image and len(processes) > limits.processes + _OF_APPTAINER_PROCESSES else ""


def _kill_all(processes: Callable[[], list[int]]) -> None:
    while found := processes():
        for pid in [-1] if processes is _others else found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _processes_of(limits: SandboxLimits) -> Callable[[], list[int]]:
    return _descendants if limits.image else _others


def _write_file(work: str, path: str, content: bytes) -> str:
    place = _inside(work, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.write_bytes(content)
    place.chmod(0o666)
    return ""


def _read_file(work: str, path: str) -> str:
    place = _inside(work, path)
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, f"{path} is no file")
    if place.stat().st_size > _LARGEST:
        raise OSError(errno.EFBIG, f"{path} has more than {_LARGEST >> 20} MiB")
    return base64.b64encode(place.read_bytes()).decode()


def _inside(work: str, path: str) -> Path:
    """The path of a file in /work. No program runs that could change it meanwhile."""
    place = Path(work, Path(path).relative_to("/work") if path.startswith("/work/") else path).resolve()
    if not place.is_relative_to(work) or place == Path(work):
        raise OSError(errno.EACCES, f"{path} is not in /work")
    return place
