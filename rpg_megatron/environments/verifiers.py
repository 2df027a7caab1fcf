"""Tasksets of the library verifiers: their tasks as a source of prompts, their episodes as the run's.

The library has a virtual environment of its own, since its requirements exclude vLLM's. A process there
(``verifiers_server.py``) runs the episodes, many at a time; it ends with the process that has started it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from rpg_megatron.config.errors import UserError
from rpg_megatron.rollout.episode import OWN_METRICS, Episode, EpisodeLost, EpisodeTask, Generate, ScoreText
from rpg_megatron.system.fork_server import send_line

_NAME = "rpg_megatron.environments.verifiers"
_LONGEST = 64 << 20
"""Bytes of an answer."""


def problems(
    *, venv: str, taskset: dict[str, Any], environment: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The tasks of a taskset: a source of prompts.

    venv: folder of the virtual environment with verifiers and the taskset's package. taskset: its ``id`` and
    settings. environment: other settings of verifiers' ``EnvConfig``, as ``{"agent": {"max_turns": 8}}``.
    Raises UserError if there is no such taskset, or if its tasks cannot be loaded.
    """
    if "id" not in taskset:
        raise UserError(f"{_NAME}: taskset has no id; set it to the name of the taskset's package")
    settings = (environment or {}) | {"taskset": taskset}
    process, connection = _start(venv)
    lines = connection.makefile("rb")
    send_line(connection, settings)
    if error := _read(lines).get("error"):
        process.wait()
        raise UserError(f"{_NAME}: taskset {taskset['id']!r} in {venv}: {error}")
    send_line(connection, (0, {"tasks": True}))
    return _rows(process, connection, lines, json.dumps(settings))


async def play(task: EpisodeTask, generate: Generate, score: ScoreText, *, venv: str) -> Episode:
    """An episode of a task of ``problems``; the reward is the task's, and its metrics are in ``env/*``.

    venv: as in ``problems``. Raises RuntimeError if the episode has failed there.
    """
    row = task.row or {}
    if not {"environment", "task"} <= row.keys():
        raise RuntimeError(f"the prompt is no task of verifiers; set data.source.type to {_NAME}:problems")
    server = _server(venv, row["environment"])
    answer = await server.call({"task": row["task"], "base_url": task.base_url, "api_key": task.api_key})
    if "error" in answer:
        raise RuntimeError(answer["error"])
    metrics = {re.sub(r"[^A-Za-z0-9_-]", "_", name): value for name, value in answer["metrics"].items()}
    taken = {name: value for name, value in metrics.items() if name[0].isalpha() and name not in OWN_METRICS}
    return Episode(answer["reward"], taken)


class _Server:
    """The process that runs episodes, for one event loop. It is started again if it has ended."""

    def __init__(self, venv: str, environment: str):
        self._venv, self._environment = venv, environment
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._starting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The answer to a call. Raises EpisodeLost if the process ends before, and RuntimeError if it cannot
        be started.
        """
        async with self._starting:
            if self._writer is None:
                await self._start()
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]]
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(number, arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(number, {"cancel": True})
            raise
        finally:
            del self._calls[number]

    async def _start(self) -> None:
        process, connection = _start(self._venv)
        reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST)
        try:
            writer.write(self._environment.encode() + b"\n")
            answer = json.loads(await reader.readline() or _ENDED)
            if error := answer.get("error"):
                raise RuntimeError(error)
        except BaseException:  # also the cancellation of the episode that has started it
            writer.close()
            process.kill()
            process.wait()
            raise
        self._writer = writer
        self._reading = asyncio.create_task(self._read(process, reader))

    async def _read(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader) -> None:
        with suppress(OSError, ValueError, LookupError, TypeError):  # also of a line that is too long
            while line := await reader.readline():
                answer = json.loads(line)
                if (call := self._calls.get(answer["number"])) and not call.done():
                    call.set_result(answer)
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        process.kill()
        process.wait()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EpisodeLost("the server of verifiers has ended"))

    def _send(self, number: int, value: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps((number, value)).encode() + b"\n")


def refuse(descriptor: int) -> None:
    """Answer, as the server, that the library is missing. Raises UserError if there is nobody to answer."""
    try:
        with socket.socket(fileno=descriptor) as connection:
            send_line(connection, {"error": "the library is not installed there; see docs/environments.md"})
    except OSError as e:
        raise UserError(f"file descriptor {descriptor}: {e.strerror}; {_NAME} starts this command") from None


_server = lru_cache(_Server)
_ENDED = '{"error": "it ended without an answer; see its messages in the log"}'


def _start(venv: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a server; it, and our end of its connection. Raises UserError."""
    python = Path(venv).expanduser() / "bin" / "python"
    if not python.exists():
        raise UserError(f"{_NAME}: {python} is missing; make that environment as in docs/environments.md")
    ours, theirs = socket.socketpair()
    # For the processes of tools, which start in other folders.
    modules = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    programs = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = os.environ | {"PYTHONPATH": modules, "PATH": programs}
    command = [str(python), "-m", "rpg_megatron.cli", "env", "serve", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    return process, ours


def _read(lines: IO[bytes]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(lines.readline(_LONGEST) or _ENDED)
    return answer


def _rows(
    process: subprocess.Popen[bytes], connection: socket.socket, lines: IO[bytes], environment: str
) -> Iterator[dict[str, Any]]:
    try:
        while "prompt" in (row := _read(lines)):
            yield {key: row[key] for key in ("prompt", "answer", "task")} | {"environment": environment}
    finally:
        lines.close()
        connection.close()
        try:
            process.wait(10)  # it ends what the taskset has started
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if error := row.get("error"):
        raise UserError(f"{_NAME}: a task cannot be loaded: {error}")
