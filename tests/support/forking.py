"""Start the product's processes by fork from one that has imported their packages, for tests of whole runs.

Most of a short run's time is Python importing torch, Megatron and vLLM, again in each process. Inside
``forked_starts``, ``subprocess`` forks what it would start as ``python -m MODULE``, for ``MODULES``, from
``tools/``, or as ``driver.py``, a launcher with stand-ins: the commands that a test starts from a *template*
that has imported everything, and their own children from themselves. Parents, groups, signals, standard
streams, environment and command line, also those in /proc, are as after a real start. Differences: modules
that a process does not need are imported too, and hash seeds and the state of global random generators are
those of the template.

Tests of how processes start, what they import and how much memory they need do not use it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import process as multiprocessing_process
from pathlib import Path
from typing import Any, NoReturn

from rpg_megatron.system.parent_death import end_with_parent

ROOT = Path(__file__).parents[2]
MODULES = (
    "rpg_megatron.cli",
    "rpg_megatron.engine.server",
    "rpg_megatron.launcher.reaper",
    "rpg_megatron.rollout.sampler",
    "rpg_megatron.rollout.worker",
    "rpg_megatron.training.rank",
    "rpg_megatron.commands.eval.process",
    "rpg_megatron.commands.rank",
)
"""Modules that are forked; all others start normally, such as workers that run foreign code."""
_ENGINE_PACKAGES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
_PARENT_DEATH = "rpg_megatron.system.parent_death"
_PR_SET_MM, _PR_SET_MM_MAP, _PR_SET_CHILD_SUBREAPER = 35, 14, 36
_REQUEST_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_execute = subprocess.Popen._execute_child


# -- the test's side -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def forked_starts() -> Iterator[None]:
    """Within the block, ``subprocess`` starts ``MODULES`` by fork. For the main thread."""
    before = subprocess.Popen._execute_child
    _replace(_template().fork)
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before


@contextlib.contextmanager
def fresh_starts() -> Iterator[None]:
    """Within the block, which may be one of ``forked_starts``, processes start normally."""
    before = subprocess.Popen._execute_child
    subprocess.Popen._execute_child = _execute
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before


class _Template:
    """The process that has imported everything; it ends with this one."""

    def __init__(self) -> None:
        self._connection, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it is open as long as this process lives
        # Read when packages are imported: as the launcher sets them for an engine.
        variables = {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(remote.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[remote.fileno()],
                env=os.environ | variables,
            )

    def fork(self, start: dict[str, Any]) -> int:
        """Let it fork a child of this process; returns its pid."""
        streams = start.pop("streams")
        # The template's child is orphaned at once, and so becomes a child of this process.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            message = json.dumps(start | {"parent": os.getpid()}).encode()
            socket.send_fds(self._connection, [message], streams)
            answer = self._connection.recv(64)
        except OSError:
            answer = b""
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            self._log.seek(0)
            raise RuntimeError(f"the template has ended:\n{self._log.read().decode()[-5000:]}")
        return int(answer)


@functools.cache
def _template() -> _Template:
    return _Template()


def _replace(fork: Callable[[dict[str, Any]], int]) -> None:
    """Let ``subprocess`` call ``fork`` for what can be forked."""

    def execute_child(
        self: Any,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Any,
        *more: Any,
    ) -> None:
        (_info, _flags, shell, *pipes, _restore, gid, gids, uid, umask, session, group) = more
        start = None if shell or executable else _parse(args)
        if start is None or preexec_fn or pass_fds or {gid, gids, uid} != {None} or not close_fds:
            return _execute(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        start |= {
            "streams": [
                stream if stream != -1 else i for i, stream in enumerate((p2cread, c2pwrite, errwrite))
            ],
            "cwd": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "umask": umask if umask >= 0 else _own_umask(),
            "session": session,
            "group": group,
        }
        try:
            self.pid = fork(start)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = execute_child


def _own_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _parse(args: Any) -> dict[str, Any] | None:
    """What a command line starts: module, arguments, signal at its parent's end. None: it is not forked."""
    if isinstance(args, (str, bytes, os.PathLike)):
        return None
    words = line = [os.fspath(word) for word in args]
    number = None
    if words[1:4] == ["-P", "-m", _PARENT_DEATH]:
        number, words = int(words[5]), words[6:]
        line = words
    if Path(words[0]).name == "rpg-megatron" and Path(words[0]).is_relative_to(Path(sys.executable).parent):
        words = [sys.executable, "-P", "-m", "rpg_megatron.cli", *words[1:]]
    if words[0] != sys.executable or len(words) < 2:
        return None
    safe = words[1:2] == ["-P"]
    first, *rest = words[2 if safe else 1 :]
    if first == "-m" and rest and rest[0] in MODULES:
        module, *arguments = rest
    elif Path(first).parent == ROOT / "tools" or Path(first).name == "driver.py":
        module, arguments = first, rest
    else:
        return None
    return {"module": module, "arguments": arguments, "line": line, "safe": safe, "death": number}


# -- the child's side ----------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    """Be the template."""
    _import_packages()
    _guard_exit_functions()
    _show_titles()
    _fork_engine_cores()
    _replace(_fork)
    gc.collect()
    gc.freeze()
    while True:
        data, streams, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
        if not data:
            return
        start = json.loads(data)
        ready, done = os.pipe()
        first = os.fork()
        if first == 0:
            child = os.fork()
            if child == 0:
                connection.close()
                while os.getppid() != start["parent"]:
                    signal.sigtimedwait([], 0.001)
                _become(start | {"streams": streams}, done)
            os.write(done, struct.pack("i", child))
            os._exit(0)
        os.close(done)
        for stream in streams:
            os.close(stream)
        os.waitpid(first, 0)
        pid = os.read(ready, 4)
        if not os.read(ready, 1):
            pid = b""
        os.close(ready)
        connection.send(str(struct.unpack("i", pid)[0]).encode())


def _import_packages() -> None:
    for module in (*MODULES, "rpg_megatron.training.run"):
        importlib.import_module(module)
    import torch._dynamo

    torch._dynamo.config.disable = True  # as TORCH_COMPILE_DISABLE does, which only engines have
    for module in _ENGINE_PACKAGES:
        importlib.import_module(module)
    torch._dynamo.config.disable = False


def _fork(start: dict[str, Any]) -> int:
    """Fork a child of this process, which itself was forked; returns its pid."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
    ready, done = os.pipe()
    start["parent"] = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
        pid = os.fork()
    if pid == 0:
        _become(start, done)
    os.close(done)
    os.read(ready, 1)
    os.close(ready)
    return pid


def _become(start: dict[str, Any], done: int) -> NoReturn:
    """Be what ``python -m MODULE ARGUMENTS`` is; never returns."""
    code = 1
    try:
        _prepare(start, done)
        code = _run(start["module"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _prepare(start: dict[str, Any], done: int) -> None:
    """Set up everything that a new process does not share."""
    if start["session"]:
        os.setsid()
    if start["group"] is not None and start["group"] >= 0:
        os.setpgid(0, start["group"])
    os.umask(start["umask"])
    _take_streams(start["streams"], done)
    _reset_signals()
    os.chdir(start["cwd"])
    os.environ.clear()
    os.environ.update(start["environment"])
    _show_in_proc(start["line"], start["environment"])
    os.write(3, b"+")
    os.close(3)
    if start["death"] is not None:
        end_with_parent(start["parent"], start["death"])

    multiprocessing_process._children.clear()
    subprocess._active.clear()
    weakref.finalize._registry.clear()  # the starter's temporary folders are not this process's to remove
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    sys.argv = [start["module"], *start["arguments"]]
    is_file = start["module"].endswith(".py")
    places = [p for p in start["environment"].get("PYTHONPATH", "").split(os.pathsep) if p]
    if not start["safe"] and "PYTHONSAFEPATH" not in start["environment"]:
        places.insert(0, str(Path(start["cwd"], start["module"]).parent) if is_file else start["cwd"])
    sys.path[:] = [*places, *(p for p in sys.path if p not in places)]
    importlib.invalidate_caches()
    gc.freeze()  # a collection would look through, and copy, all that the parent has imported
    import torch._dynamo

    torch.set_num_threads(int(start["environment"].get("OMP_NUM_THREADS", "1")))
    torch._dynamo.config.disable = start["environment"].get("TORCH_COMPILE_DISABLE") == "1"


def _take_streams(streams: Sequence[int], done: int) -> None:
    """Make these descriptors 0 to 2 and ``done`` 3, and close the others."""
    copies = [os.dup(fd) for fd in (*streams, done)]
    moved = [os.dup2(copy, 100 + i) for i, copy in enumerate(copies)]
    for i, fd in enumerate(moved):
        os.dup2(fd, i)
    os.closerange(4, 1 << 16)
    _kept.append((sys.stdin, sys.stdout, sys.stderr))  # what they have buffered is the parent's
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(module: str) -> int:
    """Returns its exit code, or ends as by Ctrl-C."""
    sys.modules.pop(module, None)
    code = 0
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _guard_exit_functions() -> None:
    """Exit functions of a process do not run in processes forked from it."""
    register = atexit.register

    def guarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        owner = os.getpid()
        register(lambda: function(*args, **kwargs) if os.getpid() == owner else None)
        return function

    atexit.register = guarded


def _show_titles() -> None:
    """``setproctitle`` writes where /proc no longer looks."""
    import setproctitle

    setproctitle.setproctitle = lambda title: _show_in_proc([title], dict(os.environ))


def _fork_engine_cores() -> None:
    """On a CPU vLLM spawns its core and workers to bind their threads; ours are not bound."""
    from vllm.platforms.cpu import CpuPlatform

    plain = CpuPlatform.check_and_update_config.__func__

    def check(cls: type[Any], config: Any) -> None:
        plain(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check)


_kept: list[Any] = []
_shown: list[Any] = []


def _show_in_proc(line: Sequence[str], environment: dict[str, str]) -> None:
    """Make /proc/PID/cmdline and environ show these (prctl PR_SET_MM_MAP)."""
    texts = [
        b"".join(os.fsencode(word) + b"\0" for word in line),
        b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items()),
    ]
    buffers = [ctypes.create_string_buffer(text, len(text)) for text in texts]
    spans = [edge for b in buffers for edge in (ctypes.addressof(b), ctypes.addressof(b) + len(b))]
    # proc_pid_stat(5), counted from the third field on
    fields = [int(f) for f in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    start_code, end_code, start_stack = fields[22:25]
    start_data, end_data, start_brk = fields[41:44]
    _libc.sbrk.restype = ctypes.c_void_p
    brk = _libc.sbrk(0)
    places = (start_code, end_code, start_data, end_data, start_brk, brk, start_stack, *spans)
    block = struct.pack("<12QIi", *places, 0, 0, -1)
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(block), len(block), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP) failed")
    _shown[:] = buffers


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        from tests.support.forking import _serve as serve  # the module that children refer to

        del sys.path[0]  # this folder, in which they are not started
        serve(control)
