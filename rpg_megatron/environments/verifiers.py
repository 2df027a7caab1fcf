"""Tasksets of the library verifiers: their tasks as a source of prompts, their episodes as the run's.

The library has a virtual environment of its own, since its requirements exclude vLLM's. A process there
(``verifiers_server.py``) runs the episodes, many at a time; it ends with the process that has started it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from rpg_megatron.config.errors import UserError
from rpg_megatron.rollout.episode import OWN_METRICS, Episode, EpisodeLost, EpisodeTask, Generate, ScoreText
from rpg_megatron.system.child import start_program
from rpg_megatron.system.fork_server import send_line
from rpg_megatron.system.forked_workers import ForkedWorker, Outcome, WorkerProcess

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
    environment = (environment or {}) | {"taskset": taskset}
    return _rows(_Server(venv, json.dumps(environment)))


async def play(task: EpisodeTask, generate: Generate, score: ScoreText, *, venv: str) -> Episode:
    """An episode of a task of ``problems``; the reward is the task's, and its metrics are in ``env/*``.

    venv: as in ``problems``. Raises RuntimeError if the episode has failed there.
    """
    row = task.row or {}
    if not {"environment", "task"} <= row.keys():
        raise RuntimeError(f"the prompt is no task of verifiers; set data.source.type to {_NAME}:problems")
    arguments = {"task": row["task"], "base_url": task.base_url, "api_key": task.api_key}
    outcome = await _server(venv, row["environment"]).call(arguments)
    if outcome.failure == "crash":
        raise EpisodeLost("the server of verifiers has ended")
    if outcome.failure:
        raise RuntimeError(outcome.detail)
    answer = outcome.value
    metrics = {re.sub(r"[^A-Za-z0-9_-]", "_", name): value for name, value in answer["metrics"].items()}
    taken = {name: value for name, value in metrics.items() if name[0].isalpha() and name not in OWN_METRICS}
    return Episode(answer["reward"], taken)


class _Server:
    """The process that runs episodes, for one event loop. It is started again if it has ended."""

    is_async, deadline = True, math.inf

    def __init__(self, venv: str, settings: str):
        self._venv, self.settings = venv, settings
        self._started: asyncio.Future[WorkerProcess] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def call(self, arguments: dict[str, Any]) -> Outcome:
        """Run an episode. Raises UserError if the process cannot be started."""
        start = self._started
        if start is None or (start.done() and (start.exception() or start.result().is_full)):
            start = self._started = asyncio.ensure_future(WorkerProcess.start(self))
        process = await asyncio.shield(start)  # another episode may wait for it, too
        number, outcome = process.call(arguments, on_request=lambda _: None)
        try:
            return await outcome
        except asyncio.CancelledError:
            process.send(number, {"cancel": True})
            raise

    def fork(self) -> ForkedWorker:
        """Start the process. Raises UserError."""
        python = Path(self._venv).expanduser() / "bin" / "python"
        if not python.exists():
            raise UserError(f"{_NAME}: {python} is missing; make that environment as in docs/environments.md")
        ours, theirs = socket.socketpair()
        # For the processes of tools, which start in other folders.
        modules = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
        programs = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = os.environ | {"PYTHONPATH": modules, "PATH": programs}
        command = [str(python), "-m", "rpg_megatron.cli", "env", "serve", str(theirs.fileno())]
        options: dict[str, Any] = {"pass_fds": [theirs.fileno()], "env": environment}
        with theirs:
            # In this process's group, which is killed as a whole.
            self._process = process = start_program(command, None, process_group=None, **options)
        worker = ForkedWorker(ours, process.pid, os.pidfd_open(process.pid))
        line = b""
        with suppress(ConnectionError), ours.makefile("rb") as lines:  # it may have ended
            ours.sendall(self.settings.encode() + b"\n")
            line = lines.readline(_LONGEST)
        answer = json.loads(line or _ENDED)
        if "failure" in answer:
            ours.close()
            self.remove(worker)
            taskset = json.loads(self.settings)["taskset"]["id"]
            raise UserError(f"{_NAME}: taskset {taskset!r} in {self._venv}: {answer['detail']}")
        return worker

    def remove(self, worker: ForkedWorker) -> None:
        """Wait for the end of the process, which has been told to or killed."""
        assert self._process is not None
        try:
            self._process.wait(10)  # it ends what the taskset has started
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(worker.handle)


def refuse(descriptor: int) -> None:
    """Answer, as the server, that the library is missing. Raises UserError if there is nobody to answer."""
    try:
        with socket.socket(fileno=descriptor) as connection:
            missing = "the library is not installed there; see docs/environments.md"
            send_line(connection, {"failure": "error", "detail": missing})
    except OSError as e:
        raise UserError(f"file descriptor {descriptor}: {e.strerror}; {_NAME} starts this command") from None


_server = lru_cache(_Server)
_ENDED = '{"failure": "crash", "detail": "it ended without an answer; see its messages in the log"}'


def _rows(server: _Server) -> Iterator[dict[str, Any]]:
    worker = server.fork()
    try:
        send_line(worker.connection, (0, {"tasks": True}))
        with worker.connection.makefile("rb") as lines:
            while "prompt" in (row := json.loads(lines.readline(_LONGEST) or _ENDED)):
                taken = {key: row[key] for key in ("prompt", "answer", "task")}
                yield taken | {"environment": server.settings}
    finally:
        worker.connection.close()
        server.remove(worker)
    if "failure" in row:
        raise UserError(f"{_NAME}: a task cannot be loaded: {row['detail']}")
