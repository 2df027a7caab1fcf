"""Worker pool with a deadline and a memory limit per input: runs one function in killable processes.

An input is retried once if its worker died, and not after other failures. A worker runs one call at a time;
those of an async function run together in one worker, which ends each at the deadline
(``system/forked_workers.py``).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rpg_megatron.system.fork_server import FAILURES
from rpg_megatron.system.forked_workers import ForkServer, Loader, Outcome, WorkerProcess

if TYPE_CHECKING:
    from rpg_megatron.config.reward import RewardSettings, RewardTerm

MEMORY = 2 * 1024**3
"""Address space of a worker beyond what its imports take, in bytes."""
_CLOSED = Outcome(None, "crash", "the pool was closed")


class WorkerPool:
    """Workers for one function. Its arguments are JSON-serialisable, its result is as in ``Outcome``.

    An event loop in a thread of its own calls them.
    """

    def __init__(self, server: ForkServer, size: int):
        """size: number of workers or, for an async function, of running calls, in one worker; a call that
        waits for its turn uses up no time.
        """
        self._server = server
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._processes: list[WorkerProcess] = []
        self._turns, self._choosing = asyncio.Semaphore(size), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, arguments: Any) -> Future[Outcome]:
        """Queue one input. The future gets an Outcome whatever happens to the worker."""
        future: Future[Outcome] = Future()
        if self._server.closed:
            future.set_result(_CLOSED)
        else:
            self._loop.call_soon_threadsafe(self._begin, arguments, future)
        return future

    def pop_counts(self) -> dict[str, int]:
        """Number of failed inputs by kind of failure, since the last call."""
        with self._lock:
            counts: dict[str, int] = {failure: self._counts[failure] for failure in FAILURES}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Kill the workers; wait for thread and fork server to end. Unfinished inputs count as crashed."""
        if self._server.kill():
            asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._server.close()

    # -- in the thread ---------------------------------------------------------------------------------------

    def _begin(self, arguments: Any, future: Future[Outcome]) -> None:
        task = self._loop.create_task(self._run(arguments, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, arguments: Any, future: Future[Outcome]) -> None:
        async with self._turns:
            if not future.set_running_or_notify_cancel():
                return
            outcome = _CLOSED
            try:
                for again in (False, True):  # a worker may be killed for reasons unrelated to its input
                    if outcome.failure == "crash" and not self._server.closed:
                        outcome = await (await self._start(arguments, again=again))
            except Exception as e:
                future.set_exception(e)
                return
        if outcome.failure:
            with self._lock:
                self._counts[outcome.failure] += 1
        future.set_result(outcome)

    async def _start(self, arguments: Any, *, again: bool) -> asyncio.Future[Outcome]:
        """Give a call to a worker. again: the worker of the first attempt has died.

        Such a call of an async function gets a worker of its own, since it may crash that again.
        """
        alone = again and self._server.is_async
        async with self._choosing:
            self._processes = [process for process in self._processes if not process.is_full]
            process = next((p for p in self._processes if p.takes_calls), None)
            if process is None or alone:
                process = await WorkerProcess.start(self._server)
                self._processes.append(process)
                process.is_full |= alone
            return process.call(arguments)[1]

    async def _finish(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        for process in self._processes:
            process.end()


def start_function(path: str, deadline: float, memory: int = MEMORY, *, lazy: bool = False) -> ForkServer:
    """Import a function, which takes positional arguments, in a fork server.

    path: ``module:name``. deadline: seconds for a call. memory: see ``Loader``. lazy:
    import it with the first call. Raises UserError if that fails.
    """
    loader = "rpg_megatron.rewards.worker_process:load_function_server"
    arguments = {"path": path, "deadline": deadline}
    return ForkServer(Loader(loader, arguments, f"reward.type: {path}", memory), lazy=lazy)


def start_custom_reward(settings: RewardSettings, term: RewardTerm) -> ForkServer:
    """Import a custom reward in a fork server. Raises UserError if that fails."""
    loader = "rpg_megatron.rewards.custom_reward:load_server"
    arguments = {
        "where": term.where,
        "path": term.type,
        "settings": term.settings,
        "reserved": term.reserved,
        "deadlines": [settings.deadline, settings.async_deadline],
    }
    return ForkServer(Loader(loader, arguments, f"{term.where}.type: {term.type}", MEMORY))
