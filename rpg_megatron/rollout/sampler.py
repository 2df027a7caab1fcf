"""The sampler process: gives prompts to the engines in a fixed order, and collects the responses' scores.

``python -m rpg_megatron.rollout.sampler RUN_DIR WORK_DIR``: settings from RUN_DIR/config.yaml,
sockets in WORK_DIR, the run's token in the environment. Sampler workers (``worker.py``, as many as
``rollout.workers``) send requests to the engines and keep the trajectories; this process keeps lengths and
rewards. It ends on SIGTERM or when the launcher has died; the launcher handles Ctrl-C. At SIGTERM it writes
the graded groups that are in no batch into the run's folder, for the run to use when it resumes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.cluster import ADDRESS_VARIABLE, TOKEN_VARIABLE
from rpg_megatron.config.files import remove
from rpg_megatron.data.prompts import codec_of, load_prompts
from rpg_megatron.data.stored_prompts import open_prompts
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.rollout.batch_metrics import batch_metrics, index_of_groups
from rpg_megatron.rollout.dispatcher import OVERSUBSCRIPTION, OVERSUBSCRIPTION_AHEAD, Dispatcher
from rpg_megatron.rollout.engine_load import ENGINES
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.fine_tuning import RecordedBatches
from rpg_megatron.rollout.heldout import HeldOut
from rpg_megatron.rollout.kept_groups import UNFINISHED, may_keep, part_of, read_kept
from rpg_megatron.rollout.probes import Probes
from rpg_megatron.rollout.producer import RolloutProducer
from rpg_megatron.rollout.remote_worker import RemoteWorker
from rpg_megatron.rollout.sampler_client import (
    SOCKET,
    EvaluatedSets,
    ResyncRequired,
    RolloutBatch,
    SamplerRequests,
    SyncResult,
)
from rpg_megatron.rollout.task_stream import TaskStream
from rpg_megatron.rollout.worker import Worker, engine_clients
from rpg_megatron.rollout.worker_files import prepare_workers
from rpg_megatron.system.events import EVENTS, EventSender
from rpg_megatron.system.messages import Handler, Server, methods_of

logger = logging.getLogger("rpg_megatron.sampler")


class Sampler:
    """Rollouts and evaluation, without the socket; for one event loop.

    With ``sft`` evaluation alone: ``RecordedBatches`` has the rest.
    """

    def __init__(
        self,
        settings: Settings,
        tokenizer: Any,
        pool: EnginePool,
        workers: Sequence[Worker],
        events: EventSender,
        work: Path,
        run: Path | None = None,
    ):
        """work: the work folder, for copies of graded groups; it is removed when the run ends. run: the run's
        folder, for those that are kept when it is stopped; None: none are.
        """
        self._settings, self._pool, self._events = settings, pool, events
        self._kept_folder = run / UNFINISHED if run is not None and may_keep(settings) else None
        self._reusing = False
        """Whether groups that were kept are used, so that their folder is to be removed after that."""
        self._request: asyncio.Task[Any] | None = None
        """The rollout or evaluation in progress."""
        self._probes: Probes | None = None
        ahead = settings.rollout.ahead > 0
        self.dispatcher = Dispatcher(
            pool,
            workers,
            settings.engine.most_sequences,
            backup_dir=work if len(workers) > 1 else None,
            oversubscription=OVERSUBSCRIPTION_AHEAD if ahead else OVERSUBSCRIPTION,
            backup_all=ahead,
        )
        self._used: list[int] = []
        """Tickets of the last step's groups, until the leaders have fetched the trajectories."""
        vocab = read_model_shape(settings.model.path).vocab_size
        self._heldout: HeldOut | None = None
        if settings.evaluation is not None:
            load = partial(load_prompts, rows=settings.needs_rows, vocab=vocab)
            heldout = {
                part.name: load(part.data, tokenizer, part.where) for part in settings.evaluation.heldout
            }
            self._heldout = HeldOut(settings, self.dispatcher, heldout)
        self._drain_seconds = 0.0
        """How long the last sync waited for groups in flight."""
        if settings.sft is not None:
            return
        prompts = open_prompts(settings.data, tokenizer, rows=settings.needs_rows, vocab=vocab)
        self._stream = TaskStream(settings, prompts)
        self._producer = RolloutProducer(settings, self.dispatcher, self._stream)
        if settings.rollout.probed and settings.guards.mismatch != "off":
            self._probes = Probes(settings, self.dispatcher, self._stream.prompts)
            pool.on_synced = self._probes.begin
        self._position: dict[str, Any] = self._stream.position()
        """Position of the stream after the last batch."""

    # -- requests --------------------------------------------------------------------------------------------

    async def rollout(self, step: int, version: int) -> RolloutBatch | ResyncRequired:
        """Sample and score the next ``prompts_per_step`` prompts with weights ``version``.

        Responses depend on the seed, the group's ticket and the weights, not on the engine that generated
        them. A prompt that the stream returns twice in a step has two groups.
        """
        self._pool.require_version(version)
        self.dispatcher.drop_newer(version)
        batch: RolloutBatch | ResyncRequired = await self._start(self._rollout(step, version))
        return batch

    async def held_out(self) -> RolloutBatch:
        """The held-out conversations. Raises UserError if there are none."""
        raise UserError("only a fine-tuning run has held-out conversations (sft.heldout)")

    async def evaluate(self) -> EvaluatedSets | ResyncRequired:
        """Sample and grade the held-out sets.

        The seeds are the same in each evaluation, so that evaluations differ only by the weights.
        """
        self._pool.require_version(None)
        results: EvaluatedSets | ResyncRequired = await self._start(self._evaluate())
        return results

    async def resume_request(self) -> RolloutBatch | EvaluatedSets | ResyncRequired:
        """Wait for the current request; returns its result, or ResyncRequired if an engine needs weights."""
        task = self._request
        if task is None:
            raise RuntimeError("no rollout or evaluation is in progress; call rollout or evaluate first")
        while not task.done():
            if unsynced := [r.index for r in self._pool.engines if r.needs_weights]:
                return ResyncRequired(tuple(unsynced))
            self._pool.restarted.clear()
            returned = asyncio.create_task(self._pool.restarted.wait())
            await asyncio.wait([task, returned], return_when=asyncio.FIRST_COMPLETED)
            returned.cancel()
        self._request = None
        result: RolloutBatch | EvaluatedSets = task.result()
        return result

    async def probe(self, version: int) -> RolloutBatch | ResyncRequired:
        """Answers of all engines to probes, sampled with the weights ``version``; no groups."""
        self._pool.require_version(version)
        batch: RolloutBatch | ResyncRequired = await self._start(self._probe(version))
        return batch

    async def _probe(self, version: int) -> RolloutBatch:
        await self.release()
        probes = self._probes or Probes(self._settings, self.dispatcher, self._stream.prompts)
        if self._probes is None:
            self._pool.on_synced = probes.begin  # of an engine that restarts meanwhile
            for engine in self._pool.engines:
                if engine.serving.is_set():
                    probes.begin(engine, version)
        try:
            groups, index = await probes.collect()
        finally:
            if self._probes is None:
                self._pool.on_synced = lambda engine, version: None
                probes.drop()
        self._used = [group.task.ticket for group in groups]
        return RolloutBatch(index_of_groups([], self.dispatcher.worker_of), {}, 0.0, {}, index)

    async def sync(self, manifest: Manifest, version: int, resync: bool, trial: bool = False) -> SyncResult:
        """Load the published weights into the engines; see ``EnginePool.sync``."""
        if trial and not resync:
            self._pool.begin(version)
            resync = True
        if self._settings.rollout.ahead and not resync:
            if self._settings.rollout.inflight == "drain":
                began = time.monotonic()
                await self._producer.drain(self._pool.is_serving)
                self._drain_seconds = time.monotonic() - began
            self._pool.begin(version)
            self.dispatcher.drop_newer(version)
            self._producer.admit(version)
            resync = True
        return await self._pool.sync(manifest, version, resync=resync)

    async def sleep(self, level: int) -> None:
        """Put the engines to sleep; see ``EnginePool.sleep``."""
        if self._probes is not None:
            await self._probes.finished()
        await self._pool.sleep(level)

    async def wake(self) -> None:
        """Wake engines that sleep at level 1."""
        await self._pool.wake()

    async def counts(self) -> dict[str, float]:
        """``engine/*`` metrics since the last call."""
        return self._pool.pop_counts()

    async def release(self) -> None:
        """Let the workers discard the last step's trajectories: the leaders have fetched them."""
        used, self._used = self._used, []
        await self.dispatcher.forget(used)
        if self._reusing and self._kept_folder is not None and not self.dispatcher.reuses:
            remove(self._kept_folder, ignore_errors=True)
            self._reusing = False

    async def state(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-serialisable: position in the data.

        Groups that are sampled ahead come after the position, so a resumed run samples them again.
        """
        await self._stream.ready()
        return self._stream.sign(self._position)

    async def keep_groups(self) -> None:
        """Write the graded groups that are in no batch. The sampler must end then. Raises OSError, and errors
        of the workers.
        """
        if self._request is not None:  # a batch that is complete meanwhile would drop groups
            self._request.cancel()
            await asyncio.wait([self._request])
        groups = self._producer.graded() if self._kept_folder is not None else []
        if self._kept_folder is not None and groups:
            await self.dispatcher.keep(groups, self._kept_folder)
            self._events.send({"kind": "status", "text": f"kept {len(groups)} groups of the unfinished step"})

    async def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state()`` returned. Raises UserError if the data has changed."""
        await self._stream.ready()
        self._stream.restore(state)
        used, self._used = self._used, []
        await self.dispatcher.forget(used)
        self._position = self._stream.position()
        await self.dispatcher.forget(self._producer.reset())
        if self._kept_folder is not None:
            remove(part_of(self._kept_folder), ignore_errors=True)
            self.dispatcher.reuse(read_kept(self._kept_folder), self._kept_folder)
            self._reusing = self._kept_folder.exists()

    async def _start(self, request: Coroutine[Any, Any, Any]) -> Any:
        if self._request is not None:  # started by a client that has disconnected
            self._request.cancel()
        self._request = asyncio.create_task(request)
        return await self.resume_request()

    # -- sampling --------------------------------------------------------------------------------------------

    async def _rollout(self, step: int, version: int) -> RolloutBatch:
        now = asyncio.get_running_loop().time
        started = now()
        await self.release()
        batch = await self._producer.next_batch(
            step, version, lambda done, total: self._events.phase("rollout", done, total)
        )
        ended = now()
        probed, probes = await self._probes.collect() if self._probes is not None else ([], None)
        self._used = [g.task.ticket for g in (*batch.groups, *probed)]
        self._position = batch.position
        seconds = now() - started
        graded = ended - max(batch.generated, started)
        metrics = batch_metrics(batch.groups) | batch.metrics | await self.dispatcher.counts()
        metrics |= {"time/rollout": seconds - graded, "time/reward": graded}
        metrics["reward/failed_frac"] = batch.failures.share
        if self._settings.rollout.ahead:
            metrics["async/trainer_waited"] = seconds + self._drain_seconds
            self._drain_seconds = 0.0
        index = index_of_groups(batch.groups, self.dispatcher.worker_of)
        return RolloutBatch(index, metrics, seconds, await self.state(), probes, batch.failures)

    async def _evaluate(self) -> EvaluatedSets:
        if self._heldout is None:
            raise UserError("there is no held-out set to evaluate on; set evaluation.data.path")
        total = self._heldout.problems
        done = 0
        self._events.phase("evaluation", 0, total)

        def count(_: EvalResult) -> None:
            nonlocal done
            done += 1
            self._events.phase("evaluation", done, total)

        results = await self._heldout.evaluate(count)
        return EvaluatedSets(results, list(self._heldout.failures.values()))


# -- the process ---------------------------------------------------------------------------------------------


async def _run(settings: Settings, run: Path, work: Path, token: str) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    for number in (signal.SIGTERM, signal.SIGUSR1):  # SIGUSR1: schedulers signal all processes of a job
        loop.add_signal_handler(number, end, 0)

    def on_end(code: int, message: str) -> None:
        if code != 2:  # a user error is already in the log
            logger.error("%s; see the messages above", message)
        end(code if code == 2 else 1)

    tokenizer, stops = prepare_workers(settings, work)
    host = os.environ.get(ADDRESS_VARIABLE, "")
    count = settings.rollout.workers

    def on_restart(number: int) -> None:
        sampler.dispatcher.restore_worker(number)

    remote = [
        RemoteWorker(i, run, work, token, host, stops, on_restart, on_end)
        for i in range(count if count > 1 else 0)
    ]
    starting = [asyncio.create_task(worker.start()) for worker in remote]
    clients = engine_clients(settings, work, token)
    local = None if remote else Worker(settings, codec_of(tokenizer), clients, work, stops)
    workers: list[Worker] = [local] if local else [worker.calls for worker in remote]
    events = EventSender(work / EVENTS)
    pool = EnginePool(settings.engine, clients, work, run / ENGINES, interrupt=settings.rollout.interrupted)
    sampler = Sampler(settings, tokenizer, pool, workers, events, work, run)
    recorded = None if settings.sft is None else RecordedBatches(settings, tokenizer)

    def on_lost(error: Exception) -> None:
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        on_end(2 if isinstance(error, UserError) else 1, str(error))

    sampler.dispatcher.on_lost = on_lost
    gc.freeze()  # what exists now lives as long as the process; a collection would look at all of it

    async def addresses() -> list[str]:
        await asyncio.gather(*starting)
        return [worker.address for worker in remote if recorded is None] or [listening]

    others: dict[str, Handler] = {"fetch": local.fetch} if local else {}
    if recorded is not None:
        others = methods_of(RecordedBatches, recorded)
    server = Server(token, methods_of(SamplerRequests, sampler, addresses=addresses, **others))
    listening = server.listen(f"ipc://{work / SOCKET}")
    if others and host:
        listening = server.listen(f"tcp://{host}:*")
    serving = asyncio.create_task(server.serve())
    code = await ended
    serving.cancel()
    if not code:
        try:
            await sampler.keep_groups()
        except Exception as e:
            events.send(
                {"kind": "status", "text": f"warning: groups of the unfinished step are not kept: {e}"}
            )
    sampler.dispatcher.close()
    for worker in remote:
        await worker.close()
    if local:
        local.close()
    for client in clients:
        await client.close()
    events.close()
    return code


def main() -> int:
    """Run the process; returns its exit code: 2 after a UserError, whose message is the log's last line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        run, work = map(Path, sys.argv[1:])
        return asyncio.run(_run(load_settings(run / "config.yaml"), run, work, os.environ[TOKEN_VARIABLE]))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
