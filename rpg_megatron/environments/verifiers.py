"""Tasksets of the library verifiers: their tasks as a source of prompts, their episodes as the run's.

The library has a virtual environment of its own, since its requirements exclude vLLM's. A process there
(``verifiers_server.py``) runs the episodes, many at a time; it ends with the process that has started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rpg_megatron.config.errors import UserError
from rpg_megatron.rollout.episode import OWN_METRICS, Episode, EpisodeLost, EpisodeTask, Generate, ScoreText
from rpg_megatron.system.fork_server import send_line
from rpg_megatron.system.forked_workers import ForkServer, Loader, Outcome, WorkerProcess

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
    return _rows(_fork_server(venv, settings), settings)


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

    def __init__(self, venv: str, settings: str):
        self.forks = _fork_server(venv, json.loads(settings), lazy=True)
        self.started: asyncio.Future[WorkerProcess] | None = None

    async def call(self, arguments: dict[str, Any]) -> Outcome:
        """Run an episode. Raises UserError if the process cannot be started."""
        start = self.started
        if start is None or (start.done() and (start.exception() or start.result().is_full)):
            start = self.started = asyncio.ensure_future(WorkerProcess.start(self.forks))
        process = await asyncio.shield(start)  # another episode may wait for it, too
        number, outcome = process.call(arguments, on_request=lambda _: None)
        try:
            return await outcome
        except asyncio.CancelledError:
            process.send(number, {"cancel": True})
            raise


_server = lru_cache(_Server)


def _fork_server(venv: str, settings: dict[str, Any], *, lazy: bool = False) -> ForkServer:
    """It has imported the library, in its own environment. lazy: see there. Raises UserError."""
    python = Path(venv).expanduser() / "bin" / "python"
    if not python.exists():
        raise UserError(f"{_NAME}: {python} is missing; make that environment as in docs/environments.md")
    # For the processes of tools, which start in other folders.
    modules = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    programs = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = os.environ | {"PYTHONPATH": modules, "PATH": programs}
    load = f"{_NAME}_server:load_server"
    # No limit of memory: the programs of tools would inherit it.
    loader = Loader(load, {"settings": settings}, load, python=str(python), environment=environment)
    try:
        return ForkServer(loader, lazy=lazy)
    except UserError as e:
        raise UserError(f"{_NAME}: {venv}: {e}; see docs/environments.md") from None


def _rows(server: ForkServer, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    worker = server.fork()
    try:
        worker.connection.settimeout(None)
        send_line(worker.connection, (0, {"tasks": True}))
        with worker.connection.makefile("rb") as lines:
            while "prompt" in (row := json.loads(lines.readline(_LONGEST) or _ENDED)):
                taken = {key: row[key] for key in ("prompt", "answer", "task")}
                yield taken | {"environment": json.dumps(settings)}
    finally:
        worker.connection.close()
        if not wait([worker.handle], 30):  # it ends what the taskset has started
            worker.kill()
        server.remove(worker)
        server.kill()
        server.close()
    if "failure" in row:
        raise UserError(f"{_NAME}: {row['detail']}")


_ENDED = '{"failure": "crash", "detail": "it ended without an answer; see its messages in the log"}'
