"""A sampler worker in a process of its own, which is restarted when it dies."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rpg_megatron.config.files import remove
from rpg_megatron.rollout.worker import Worker, worker_socket
from rpg_megatron.system.child import module_command
from rpg_megatron.system.messages import AsyncClient, remote_calls
from rpg_megatron.system.parent_death import with_parent_death_signal

logger = logging.getLogger("rpg_megatron.sampler")

_DEATHS = 3
"""A worker that dies this often without finishing a group ends the run."""


class WorkerDied(RuntimeError):
    """The worker died during a call; it is restarted, without its groups."""


class RemoteWorker:
    """The process of a worker. For one event loop."""

    def __init__(
        self,
        number: int,
        run: Path,
        work: Path,
        token: str,
        host: str,
        stop_token_ids: Sequence[int],
        on_restart: Callable[[int], None],
        on_end: Callable[[int, str], None],
    ):
        """run, work: folders of the run. host: address at which other nodes reach the worker; empty: a unix
        socket only. on_restart: called with ``number`` after a restart. on_end: called with exit code and
        message if the worker cannot run.
        """
        self.number, self._run, self._work, self._token = number, run, work, token
        self._stops = stop_token_ids
        self.address = f"tcp://{host}:*" if host else ""
        """Address from which the leaders fetch trajectories; valid after ``start``."""
        self._on_restart, self._on_end = on_restart, on_end
        self.calls = cast(Worker, SimpleNamespace(**remote_calls(Worker, self._call)))
        """The worker. Calls wait until it runs, and raise WorkerDied."""
        self._socket = worker_socket(work, number)
        self._client: AsyncClient | None = None
        self._up = asyncio.Event()
        self._deaths = 0
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and wait until it answers."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep_running())
        await self._up.wait()

    async def close(self) -> None:
        """End the process."""
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGHUP)  # it ignores warnings, which may come from a scheduler
            try:
                await asyncio.wait_for(self._process.wait(), 5.0)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._client is not None:
            self._client.close()

    async def _call(self, method: str, returns: Any, *arguments: Any) -> Any:
        await self._up.wait()
        assert self._client is not None
        answer = await self._client.call(method, returns, *arguments)
        if method == "score":
            self._deaths = 0
        return answer

    async def _keep_running(self) -> None:
        first = True
        while True:
            remove(self._socket)
            arguments = self._run, self._work, self.number, self.address, *self._stops
            command = module_command("rpg_megatron.rollout.worker", *arguments)
            # Not ``start_program``: asyncio tells when this one ends.
            self._process = await asyncio.create_subprocess_exec(
                *with_parent_death_signal(command, signal.SIGKILL)
            )
            self._client = AsyncClient(f"ipc://{self._socket}", self._token)
            hello = asyncio.create_task(self._client.call("where", str))
            ended = asyncio.create_task(self._process.wait())
            await asyncio.wait([hello, ended], return_when=asyncio.FIRST_COMPLETED)
            if hello.done():
                where = hello.result()
                self.address = where if self.address else f"ipc://{self._socket}"
                self._up.set()
                if not first:
                    self._on_restart(self.number)
                first = False
            code = await ended
            hello.cancel()
            self._up.clear()
            self._client.fail(WorkerDied(f"sampler worker {self.number} died"))
            self._client.close()
            self._deaths += 1
            logger.warning("sampler worker %d ended with code %d; restarting it", self.number, code)
            if code == 2 or self._deaths == _DEATHS:
                self._on_end(
                    code, f"sampler worker {self.number} ended {self._deaths} times, with code {code}"
                )
                return
