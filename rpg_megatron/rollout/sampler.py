"""The sampler process: sends prompts to the engines, scores the responses, returns batches to trainer rank 0.

``python -m rpg_megatron.rollout.sampler RUN_DIR WORK_DIR BRIDGE_DIR``: settings from RUN_DIR/config.yaml,
sockets in WORK_DIR, the run's token in the environment. An asyncio loop does the work; a thread serves rank
0, one request at a time. The process ends on SIGTERM or when the launcher is gone; the launcher handles
Ctrl-C.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Coroutine
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.data.prompts import Prompt, PromptStream, load_prompts, load_tokenizer
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineClient, EngineError, Sample
from rpg_megatron.engine.command import TOKEN_VARIABLE, context_length
from rpg_megatron.engine.process import engine_address
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.rewards.reward import Scorer
from rpg_megatron.rollout.dynamic_sampling import DynamicSampler, groups_from_rows, groups_to_rows
from rpg_megatron.rollout.engine_load import ENGINES
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.generation import GenerationRequest, generate_all, seed_of, stop_tokens
from rpg_megatron.rollout.heldout import HeldOut
from rpg_megatron.rollout.sampler_client import (
    EVENTS,
    SOCKET,
    ResyncRequired,
    RolloutBatch,
    SamplerClient,
    SyncResult,
)
from rpg_megatron.system.events import EventSender

__all__ = ["RolloutBatch", "Sampler", "SamplerClient"]

logger = logging.getLogger("rpg_megatron.sampler")


class Sampler:
    """Rollouts and evaluation, without the socket. Call its coroutines from one event loop."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Any,
        pool: EnginePool,
        events: EventSender,
    ):
        self._settings = settings
        self._tokenizer = tokenizer
        self._pool = pool
        self._events = events
        self._request: asyncio.Task[Any] | None = None
        """The rollout or evaluation in progress."""
        self._context = context_length(settings)
        self._stops = stop_tokens(settings.model.path, tokenizer)
        self._stream = PromptStream(
            load_prompts(settings.data, tokenizer), settings.seed, settings.data.weights
        )
        self._surplus: list[list[Trajectory]] = []
        """Surplus groups of dynamic sampling in the last step."""
        self._scorer = Scorer(settings.reward, settings.rollout.max_response_tokens)
        self._heldout: HeldOut | None = None
        if settings.evaluation is not None:
            prompts = {
                part.name: load_prompts(part.data, tokenizer, part.where)
                for part in settings.evaluation.heldout
            }
            self._heldout = HeldOut(settings, tokenizer, pool, self._scorer, prompts)

    # -- requests --------------------------------------------------------------------------------------------

    async def rollout(self, step: int, version: int) -> RolloutBatch | ResyncRequired:
        """Sample and score the next ``prompts_per_step`` prompts with weights ``version``.

        The responses depend on seed, step, index in the batch and weights, not on timing or on the engine
        that generated them. A prompt that the stream returns twice in a step makes two groups.
        """
        self._pool.expect(version)
        batch: RolloutBatch | ResyncRequired = await self._start(self._rollout(step, version))
        return batch

    async def evaluate(self) -> list[EvalResult] | ResyncRequired:
        """Sample and grade the held-out sets; results in their order.

        The seeds are the same at each evaluation, so that two evaluations differ by the weights only.
        """
        self._pool.expect(None)
        results: list[EvalResult] | ResyncRequired = await self._start(self._evaluate())
        return results

    async def resume_request(self) -> Any:
        """Wait for the current request; returns its result, or ResyncRequired if an engine needs weights."""
        task = self._request
        if task is None:
            raise RuntimeError("no rollout or evaluation is in progress; call rollout or evaluate first")
        while not task.done():
            if unsynced := [r.index for r in self._pool.replicas if r.needs_weights]:
                return ResyncRequired(tuple(unsynced))
            self._pool.returned.clear()
            returned = asyncio.create_task(self._pool.returned.wait())
            await asyncio.wait([task, returned], return_when=asyncio.FIRST_COMPLETED)
            returned.cancel()
        self._request = None
        return task.result()

    async def sync(self, manifest: Manifest, version: int, again: bool) -> SyncResult:
        """Load the published weights into the engines; see ``EnginePool.sync``."""
        return await self._pool.sync(manifest, version, again=again)

    async def sleep(self, level: int) -> None:
        """Put the engines to sleep; see ``EnginePool.sleep``."""
        await self._pool.sleep(level)

    async def wake(self) -> None:
        """Wake engines that sleep at level 1."""
        await self._pool.wake()

    async def counts(self) -> dict[str, float]:
        """``engine/*`` metrics since the last call."""
        return self._pool.pop_counts()

    async def state(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-serialisable: position in the data, and surplus groups."""
        return {"stream": self._stream.state(), "surplus": groups_to_rows(self._surplus)}

    async def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state()`` returned."""
        self._stream.restore(state["stream"])
        self._surplus = groups_from_rows(state["surplus"])

    def close(self) -> None:
        """End the grading workers."""
        self._scorer.close()

    async def _start(self, request: Coroutine[Any, Any, Any]) -> Any:
        if self._request is not None:  # of a client that disconnected
            self._request.cancel()
        self._request = asyncio.create_task(request)
        return await self.resume_request()

    # -- sampling --------------------------------------------------------------------------------------------

    async def _rollout(self, step: int, version: int) -> RolloutBatch:
        started, reward_seconds, start = time.monotonic(), 0.0, 0
        dynamic = DynamicSampler(self._settings.rollout, self._surplus)
        while count := dynamic.prompts_needed(step):
            prompts = self._stream.take(count)
            groups, seconds = await self._sample_groups(prompts, start, step, version)
            dynamic.add(groups)
            reward_seconds += seconds
            start += count
        trajectories, self._surplus = dynamic.result()
        seconds = time.monotonic() - started
        metrics = batch_metrics(trajectories) | dynamic.metrics() | self._scorer.pop_counts()
        metrics |= {"time/rollout": seconds - reward_seconds, "time/reward": reward_seconds}
        return RolloutBatch(trajectories, metrics, seconds)

    async def _sample_groups(
        self, prompts: list[Prompt], start: int, step: int, version: int
    ) -> tuple[list[list[Trajectory]], float]:
        """Scored groups in the order of the prompts, and seconds from the last response to the last score.

        start: index of the first prompt in the step; the seeds depend on it.
        """
        requests = [self._request_of(prompt, start + i, step) for i, prompt in enumerate(prompts)]
        scoring: dict[int, list[asyncio.Task[Trajectory]]] = {}  # runs while the engines generate
        self._events.phase("rollout", 0, len(requests))

        def on_complete(index: int) -> None:
            request = requests[index]
            scoring[index] = [
                asyncio.create_task(
                    self._trajectory(request, sample, group=index, number=number, version=version)
                )
                for number, sample in enumerate(request.responses)
            ]
            self._events.phase("rollout", len(scoring), len(requests))

        await generate_all(
            self._pool,
            requests,
            on_complete,
            max_sequences=self._settings.engine.max_sequences,
            temperature=self._settings.rollout.temperature,
            stop_token_ids=self._stops,
            logprobs=True,
        )
        generated = time.monotonic()
        groups = [await asyncio.gather(*scoring[index]) for index in range(len(prompts))]
        return groups, time.monotonic() - generated

    async def _evaluate(self) -> list[EvalResult]:
        if self._heldout is None:
            raise UserError("there is no held-out set to evaluate on; set evaluation.data.path")
        total = self._heldout.problems
        done = 0
        self._events.phase("evaluation", 0, total)

        def count(_: EvalResult) -> None:
            nonlocal done
            done += 1
            self._events.phase("evaluation", done, total)

        return await self._heldout.evaluate(count)

    def _request_of(self, prompt: Prompt, index: int, step: int) -> GenerationRequest:
        return GenerationRequest(
            prompt,
            self._settings.rollout.samples_per_prompt,
            seed_of(self._settings.seed, "rollout", step, index, prompt.id),
            min(self._settings.rollout.max_response_tokens, self._context - len(prompt.tokens)),
        )

    async def _trajectory(
        self, request: GenerationRequest, sample: Sample, *, group: int, number: int, version: int
    ) -> Trajectory:
        prompt = request.prompt
        text = self._tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
        score = await asyncio.wrap_future(self._scorer.submit(text, prompt.answer, len(sample.tokens)))
        return Trajectory(
            prompt_id=prompt.id,
            sample=number,
            group=group,
            prompt=prompt.tokens,
            response=sample.tokens,
            behaviour=sample.logprobs,
            versions=np.full(len(sample.tokens), version, np.int32),
            finish=sample.finish,
            text=text,
            reward=score.reward,
            correct=score.correct,
            parts=score.parts,
            answer=prompt.answer,
            extracted=score.extracted,
            reason=score.reason,
            seed=request.seed + number,
        )


def batch_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Metrics ``reward/*``, ``groups/*`` and ``response/*`` of a batch.

    ``groups/*`` are shares of the batch's groups, after dynamic sampling: all responses right, all wrong
    (``Trajectory.correct``: for a reward function that returns a number, above 0), and all rewards equal,
    whatever they are. The last are those without a learning signal, also under dense rewards.
    """
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        groups[t.group].append(t)
    right = [sum(t.correct for t in group) / len(group) for group in groups.values()]
    equal = [len({t.reward for t in group}) == 1 for group in groups.values()]
    rewards = np.array([t.reward for t in trajectories], np.float64)
    lengths = np.array([len(t.response) for t in trajectories], np.float64)
    parts = {
        f"reward/{name}": float(np.mean([t.parts[name] for t in trajectories]))
        for name in trajectories[0].parts
    }
    return parts | {
        "reward/mean": float(rewards.mean()),
        "reward/accuracy": float(np.mean([t.correct for t in trajectories])),
        "reward/std": float(rewards.std()),
        "groups/all_right": float(np.mean([share == 1 for share in right])),
        "groups/all_wrong": float(np.mean([share == 0 for share in right])),
        "groups/equal_rewards": float(np.mean(equal)),
        "response/length_mean": float(lengths.mean()),
        "response/length_p50": float(np.quantile(lengths, 0.5)),
        "response/length_p95": float(np.quantile(lengths, 0.95)),
        "response/length_max": float(lengths.max()),
        "response/truncated_frac": float(np.mean([t.finish == "length" for t in trajectories])),
    }


# -- the process ---------------------------------------------------------------------------------------------

_METHODS = ("rollout", "sync", "sleep", "wake", "evaluate", "resume_request", "counts", "state", "restore")


def serve(listener: Listener, sampler: Sampler, loop: asyncio.AbstractEventLoop) -> None:
    """Serve clients, one at a time, until the listener is closed. Runs in a thread, the work in ``loop``."""
    while True:
        try:
            connection = listener.accept()
        except (AuthenticationError, EOFError, ConnectionError) as e:
            logger.warning("rejected a client: %s", e)
            continue
        except OSError:  # the listener is closed
            return
        with connection:
            _serve_client(connection, sampler, loop)


def _serve_client(connection: Connection, sampler: Sampler, loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if method not in _METHODS:
                raise RuntimeError(f"unknown method {method!r}; use one of {', '.join(_METHODS)}")
            answer = (
                "ok",
                asyncio.run_coroutine_threadsafe(getattr(sampler, method)(**arguments), loop).result(),
            )
        except UserError as e:
            answer = "user_error", str(e)
        except EngineError as e:
            answer = "error", f"{method}: {e}"
        except Exception as e:
            logger.exception("%s failed", method)
            answer = "error", f"{method} failed in the sampler: {e!r}\n{traceback.format_exc()}"
        try:
            connection.send(answer)
        except OSError:
            return


async def _run(settings: Settings, run: Path, work: Path, token: str) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # SIGUSR1: schedulers signal all processes of a job
        loop.add_signal_handler(number, stop.set)
    tokenizer = load_tokenizer(settings.model.path)
    engines = [
        EngineClient(i, engine_address(work, i), token, timeout=settings.engine.request_timeout)
        for i in range(settings.engine.replicas)
    ]
    events = EventSender(work / EVENTS)
    sampler = Sampler(settings, tokenizer, EnginePool(settings.engine, engines, work, run / ENGINES), events)
    with Listener(str(work / SOCKET), family="AF_UNIX", authkey=token.encode()) as listener:
        threading.Thread(target=serve, args=(listener, sampler, loop), daemon=True, name="serve").start()
        await stop.wait()
    sampler.close()
    for engine in engines:
        await engine.close()
    events.close()


def main() -> int:
    """Run the process; returns its exit code: 2 after a UserError, whose message is the log's last line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        if len(sys.argv) != 4:
            raise UserError("usage: python -m rpg_megatron.rollout.sampler RUN_DIR WORK_DIR BRIDGE_DIR")
        run, work = Path(sys.argv[1]), Path(sys.argv[2])
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise UserError(f"the sampler needs the run's token in {TOKEN_VARIABLE}; the launcher sets it")
        asyncio.run(_run(load_settings(run / "config.yaml"), run, work, token))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
