"""A vLLM server as a child process: start, health checks, stop. ``engine_command`` makes its command line."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket as sockets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Literal
from urllib.parse import urlsplit

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import atomic_write_text, read_json, remove
from rpg_megatron.engine.command import RUNNER_VARIABLE, engine_command, engine_environment, span_arguments
from rpg_megatron.system import process_groups
from rpg_megatron.system.child import Child, ProcessStatus, open_log, start_child, tail_of
from rpg_megatron.system.limits import explain_limits

_ADDRESSES = "engines.json"
_HTTP_ERRORS = (OSError, http.client.HTTPException)
_SOCKET_LIMIT = 107  # bytes of a unix socket's path, without the final zero
_REFUSED = re.compile(r"^api_server\.py: error: (.+)$", re.MULTILINE)
"""What vLLM's parser says of its arguments, after a page of usage."""
# (Worker pid=12) ERROR 01-02 03:04:05 [file.py:6] module.SomeError: what happened
_ERROR_LINE = re.compile(
    r"^(?:\([^()]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE
)
# Pydantic says what is wrong below the line of its exception.
_DETAIL = re.compile(r"validation errors? for \w+\n((?:.*\n)??.*) \[type=")
_WORKER_DIED = " died unexpectedly (exit code: "
_PREFIX = re.compile(r"^(?:\([^()]*\) )?\s*", re.MULTILINE)


def engine_socket(work: Path, index: int) -> Path:
    """Unix socket of engine ``index``, in the run's private work folder."""
    return work / f"engine-{index}.sock"


def write_addresses(work: Path, addresses: Mapping[int, str]) -> None:
    """Write addresses of engines on other nodes, index -> ``http://host:port``, for ``engine_address``."""
    atomic_write_text(work / _ADDRESSES, json.dumps(addresses))


def engine_address(work: Path, index: int) -> Path | str:
    """Address of engine ``index`` as seen from the first node: its unix socket or its URL."""
    try:
        addresses = read_json(work / _ADDRESSES)
    except FileNotFoundError:
        addresses = {}
    return str(addresses[str(index)]) if str(index) in addresses else engine_socket(work, index)


def health(address: Path | str, token: str, timeout: float) -> int | None:
    """HTTP status of ``/health`` of the engine at a socket or URL; None if it does not answer.

    Raises RuntimeError if the engine refuses the token.
    """
    try:
        status, _ = _ask(address, token, "GET", "/health", timeout)
    except _HTTP_ERRORS:
        return None
    if status == 401:
        raise RuntimeError(f"the engine at {address} rejected the token (401)")
    return status


def put_to_sleep(address: Path | str, token: str, timeout: float = 120.0) -> None:
    """Let an engine without requests free its weights and KV cache until the next sync (sleep level 2).

    Raises RuntimeError if it fails.
    """
    try:
        status, text = _ask(address, token, "POST", "/sleep?level=2&mode=abort", timeout)
    except _HTTP_ERRORS as e:
        raise RuntimeError(f"did not go to sleep ({type(e).__name__}: {e})") from None
    if status != 200:
        raise RuntimeError(f"did not go to sleep: /sleep answered {status}: {text[:300]}")


class _Connection(http.client.HTTPConnection):
    """Plain HTTP without httpx, which would double the launcher's memory and time to start."""

    def __init__(self, address: Path | str, timeout: float):
        super().__init__("engine" if isinstance(address, Path) else urlsplit(address).netloc, timeout=timeout)
        self._address = address

    def connect(self) -> None:
        if not isinstance(self._address, Path):
            super().connect()
            return
        self.sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._address))


def _ask(address: Path | str, token: str, method: str, path: str, timeout: float) -> tuple[int, str]:
    """Status and text of an answer. timeout: of each operation on the connection, in seconds."""
    with contextlib.closing(_Connection(address, timeout)) as connection:
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def call_all[E, R](engines: Sequence[E], call: Callable[[E], R]) -> list[R]:
    """Results of ``call`` on each engine, in order; all calls run at the same time, each in a thread."""
    with ThreadPoolExecutor(max_workers=max(1, len(engines))) as pool:
        return list(pool.map(call, engines))


def first_error(log: Path, start: int = 0, opened: IO[bytes] | None = None) -> str | None:
    """The first exception in a vLLM log, from byte ``start`` on; None if there is none.

    A failure propagates from worker to core to server, each with its own traceback: the first is the cause.
    opened: see ``system.child.tail_of``.
    """
    text = _read_from(log, start, opened)
    match = _ERROR_LINE.search(text)
    if match is None:
        return None
    cause = match[1].strip()
    if "validation error" in cause and (detail := _DETAIL.search(text, match.start(1))):
        cause += f": {' '.join(_PREFIX.sub('', detail[1]).splitlines())}"
    return cause


def _read_from(log: Path, start: int, opened: IO[bytes] | None) -> str:
    """At most 4 MiB of a log from byte ``start`` on; empty if it cannot be read."""
    try:
        with open_log(log, opened) as file:
            file.seek(start)
            return file.read(4 * 1024**2).decode("utf-8", errors="replace")
    except OSError:
        return ""


def tells_of_killed_worker(engine: ProcessStatus) -> bool:
    """Whether its log says that a worker of its own died. Workers on other nodes fail then too, by errors."""
    return _WORKER_DIED in _read_from(engine.log, engine.log_start, engine.opened)


def cause_of_death(engine: ProcessStatus) -> str | None:
    """``first_error`` of an engine that died; None if its log does not tell why, as when it was killed."""
    cause = first_error(engine.log, engine.log_start, engine.opened)
    # What the server says when its core is gone, whatever the reason.
    return None if cause is None or cause.partition(":")[0].endswith("EngineDeadError") else cause


def start_error(name: str, problem: str, engine: ProcessStatus) -> UserError:
    """Why an engine did not start, with the end of its log. name: of the engine, for the message."""
    if refused := refused_arguments(engine):  # after a page of usage
        return UserError(f"{name}: vLLM refuses engine.arguments: {refused}; correct them")
    cause = first_error(engine.log, engine.log_start, engine.opened)
    cause = f": {cause}" if cause else ""
    tail = tail_of(engine.log, opened=engine.opened)
    limits = explain_limits(cause + tail)
    return UserError(f"{name} {problem}{cause}; the end of {engine.log}:\n{tail}{limits}")


def refused_arguments(engine: ProcessStatus) -> str | None:
    """What vLLM's parser says of the arguments that it refused; None if it took them."""
    refused = _REFUSED.search(tail_of(engine.log, opened=engine.opened))
    return refused[1] if refused else None


class EngineProcess:
    """Starts, watches and stops one engine. Used by the launcher.

    Call ``start`` from a thread that outlives the engine: the kernel ends the engine with the thread that
    started it, so that a killed launcher leaves no engine behind.
    """

    def __init__(
        self,
        settings: Settings,
        index: int,
        *,
        socket: Path,
        log: Path,
        bridge_dir: Path,
        token: str,
        weights: Literal["dummy", "checkpoint"] = "dummy",
        listen: tuple[str, int] | None = None,
        gpus: Sequence[int] = (0,),
        extra: Mapping[str, str] | None = None,
    ):
        """listen: address and port for an engine that other nodes use; replaces the socket, but the socket's
        folder is still needed. gpus: see ``engine_environment``. extra: more environment variables.
        """
        self.index = index
        self.socket = socket
        self.address: Path | str = f"http://{listen[0]}:{listen[1]}" if listen else socket
        self.log = log
        self.opened: IO[bytes] | None = None
        """Its log file, which can be read here also after it was deleted."""
        self._token = token
        self._command = engine_command(settings, index, socket, weights=weights, listen=listen)
        self._environment = engine_environment(settings, index, bridge_dir, token, gpus) | dict(extra or {})
        if len(str(socket.parent)) + 48 <= _SOCKET_LIMIT:  # vLLM's internal sockets: the folder and a UUID
            self._environment["VLLM_RPC_BASE_PATH"] = str(socket.parent)
        self._child: Child | None = None
        self.log_start = 0
        """Bytes that its log had before its start."""
        self._answered = False
        self.segments: set[Path] = set()
        """Its files in shared memory, as far as they are noted."""

    def span(self, parts: int, part: int, master: tuple[str, int]) -> None:
        """Make it part of an engine on several nodes; see ``span_arguments``."""
        self._command += span_arguments(parts, part, master)

    def use_runner_v1(self) -> None:
        """From its next start on, it uses vLLM's model runner V1."""
        self._environment[RUNNER_VARIABLE] = "0"

    @property
    def pid(self) -> int | None:
        """Process id, also its process group's; None before ``start``."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the engine without waiting for it. Raises UserError if the socket's path cannot be used."""
        if self.alive():
            raise RuntimeError(f"engine {self.index} runs already (pid {self.pid})")
        if len(os.fsencode(self.socket)) > _SOCKET_LIMIT:
            raise UserError(
                f"engine {self.index}: the socket path {self.socket} is longer than {_SOCKET_LIMIT} bytes; "
                "set TMPDIR to a shorter one"
            )
        self._answered = False
        self.segments.clear()
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        name, how = f"engine {self.index}", signal.SIGTERM  # the server ends its workers in order
        # Private, because the socket's mode follows the umask.
        self._child = start_child(
            name, self._command, self._environment, self.log, at_parent_death=how, private=True
        )
        self.opened = self._child.opened

    def alive(self) -> bool:
        """Whether the engine's main process runs. The exit code is no help: a failed engine exits with 0."""
        return self._child is not None and self._child.exit_code() is None

    def healthy(self, timeout: float = 5.0) -> bool:
        """Whether the engine answers."""
        well = health(self.address, self._token, timeout) == 200
        if well:
            self.note_answer()
        return well

    def note_answer(self) -> None:
        """Let ``stop`` give it time: it may have requests.

        A part without a server has none, and vLLM would wait 9 s for workers that do not hear it.
        """
        self._answered = "--headless" not in self._command

    def stop(self, grace: float = 20.0) -> None:
        """End the engine and all its processes and remove its socket and shared memory. Safe to call at any
        time.
        """
        stop_engines([self], grace)

    def _clean_up(self) -> None:
        """Forget its processes, which have ended, and remove its socket and shared memory."""
        assert self._child is not None
        self._child.reap()
        self._child = None
        for path in (self.socket, *self.segments):
            remove(path)
        self.segments.clear()


def note_segments(engines: Iterable[EngineProcess]) -> None:
    """Note the shared memory of starting engines, to remove it also if they fail before ``stop``."""
    leaders = {engine.pid: engine for engine in engines if engine.pid is not None}
    for leader, segments in process_groups.segments_of(leaders).items():
        leaders[leader].segments |= segments


def stop_engines(engines: Iterable[EngineProcess], grace: float) -> None:
    """End engines and all their processes at the same time; remove their sockets and shared memory.

    grace: seconds from SIGTERM to SIGKILL.
    """
    running = {engine.pid: engine for engine in engines if engine.pid is not None}
    note_segments(running.values())
    for pid, engine in running.items():
        if engine.alive():
            os.kill(pid, signal.SIGTERM)  # to the server only, which stops its workers in order
    # While starting, vLLM ignores SIGTERM and has no requests to finish.
    began = time.monotonic()
    limits = {pid: began + (grace if e._answered else min(grace, 1.0)) for pid, e in running.items()}
    while any(time.monotonic() < limits[pid] and e.alive() for pid, e in running.items()):
        time.sleep(0.05)
    # A leader is reaped last: until then the id of its process group cannot be reused.
    groups = [pid for pid, e in running.items() if e._child is not None and not e._child.is_reaped]
    process_groups.send(groups, signal.SIGSTOP, trackers=False)  # stopped processes create no more of it
    note_segments(running.values())
    process_groups.end_groups(groups)
    for engine in running.values():
        engine._clean_up()
