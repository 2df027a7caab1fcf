"""vLLM's scheduler for GPUs, on a CPU: what an engine does while steps still run on the GPU.

With async scheduling an engine queues the next step before it knows the tokens of the last one. So a request
is interrupted, or a weight update begins, while two steps are on the device. Here the server, EngineCore,
scheduler, output processing, weights, our plug-in and client are the real ones; the GPU is a thread that
hashes (``toy_engine``). Each answer is compared with what the seed, the prompt and one version of the weights
give: token by token, with log-probs and routes.

Not covered: streams and graphs of a real GPU, workers of tensor parallel engines.
"""

import asyncio
import random
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from rpg_megatron.bridge.controller import sync_engine
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config import Settings
from rpg_megatron.config.model_config import read_model_shape
from rpg_megatron.data.prompts import codec_of
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.seeds import segment_seed
from rpg_megatron.rollout.worker import Worker
from tests.support import toy_engine
from tests.support.bridge_rig import Rig, make_model, running_rig, settings_for
from tests.support.bridge_trainers import state_dict
from tests.support.engine import running_engines
from tests.support.stand_in_engines import ByteTokenizer
from tests.support.toy_engine import (
    VOCAB,
    Hold,
    engine_arguments,
    respond,
    routes_of,
    stored_entries,
    weights_hash,
)

BLOCKS, BATCH = 40, 96
STOP = 5


@pytest.fixture(
    scope="module", params=["1", pytest.param("0", marks=pytest.mark.long)], ids=["runner V2", "runner V1"]
)
def rig(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    make_model("qwen3-moe", folder / "model")
    settings = settings_for(folder / "model", 1)
    settings["training"] = {"router_replay": "rollout"}
    settings["engine"] |= {"arguments": engine_arguments(BLOCKS, BATCH)}
    code = Path(toy_engine.__file__).read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
        valid = Settings.model_validate(settings)
        with (
            running_engines(folder, [valid], plugins=[code]) as (engine,),
            running_rig(folder, engine) as rig,
        ):
            yield rig


@dataclass
class Request:
    """One prompt and its sampling parameters."""

    prompt: list[int]
    seed: int
    length: int
    n: int = 1
    stop: tuple[int, ...] = ()

    @classmethod
    def draw(cls, rng: random.Random, length: int, prompt: list[int] | None = None) -> "Request":
        prompt = prompt or [rng.randrange(VOCAB) for _ in range(rng.randint(1, 260))]
        stop = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 2])))
        return cls(prompt, rng.randrange(2**31), rng.randint(1, length), rng.choice([1, 1, 3]), stop)


class CheckedEngine:
    """Sends requests to an engine and checks the answers."""

    def __init__(self, rig: Rig):
        self.rig = rig
        shape = read_model_shape(rig.model)
        socket, token = rig.engine.process.socket, rig.engine.token
        self.client = EngineClient(0, socket, token, timeout=120, experts=shape.experts)
        self.weights: dict[int, int] = {}

    def publish(self, version: int) -> Manifest:
        self.weights[version] = weights_hash(state_dict(self.rig.model, version))
        return self.rig.publish(seed=version, version=version)

    async def sync(self, manifest: Manifest, *, interrupt: bool = False) -> None:
        await sync_engine(
            self.rig.engine.post,
            manifest,
            version=manifest.version,
            engine_tensor=1,
            timeout=60,
            interrupt=interrupt,
        )

    async def ask(self, request: Request) -> list:
        return await self.client.generate(
            request.prompt,
            n=request.n,
            max_tokens=request.length,
            temperature=1.0,
            seed=request.seed,
            stop_token_ids=request.stop,
            interruptible=True,
        )

    def check(self, request: Request, samples: list, versions: set[int]) -> int:
        """Each sample is of one of these versions, complete or a prefix of the complete response; returns the
        number of tokens.
        """
        total = 0
        for i, sample in enumerate(samples):
            tokens = sample.tokens.tolist()
            total += len(tokens)
            if not tokens:
                assert sample.finish == "abort"
                assert sample.version is None
                continue
            assert sample.version in versions
            weights = self.weights[sample.version]
            expected, logprobs = respond(
                request.prompt, request.seed + i, weights, request.length, request.stop
            )
            assert tokens == expected[: len(tokens)]
            assert sample.logprobs.tolist() == logprobs[: len(tokens)]
            if sample.finish == "abort":
                assert len(tokens) <= len(expected)
            else:
                assert len(tokens) == len(expected)
                assert (sample.finish == "stop") == (tokens[-1] in request.stop)
            routes = routes_of(stored_entries([*request.prompt, *tokens[:-1]], weights))
            np.testing.assert_array_equal(sample.routes, routes)
        return total


def test_answers_under_load(rig):
    """Long prompts are split, prompts share blocks, requests are preempted for lack of blocks."""
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB) for _ in range(200)]
    requests = [Request.draw(rng, 150, [*shared, i] if i % 3 == 0 else None) for i in range(40)]

    async def go():
        engine = CheckedEngine(rig)
        await engine.sync(engine.publish(1))
        answers = await asyncio.gather(*map(engine.ask, requests))
        for request, samples in zip(requests, answers, strict=True):
            engine.check(request, samples, {1})
            assert all(sample.finish != "abort" for sample in samples)
        await engine.client.close()

    asyncio.run(go())
    counts = rig.engine.rpc("toy_counts")[0]
    print(counts)
    assert counts.pop("deepest") == 2
    assert all(counts.values()), counts


def test_interrupted_with_two_steps_on_the_device(rig):
    rng = random.Random(2)
    requests = [Request(r.prompt, r.seed, 400) for r in (Request.draw(rng, 1) for _ in range(6))]

    async def go():
        engine = CheckedEngine(rig)
        await engine.sync(engine.publish(2))
        manifest = engine.publish(3)
        with Hold(rig.engine.bridge, steps=60) as hold:
            running = [asyncio.create_task(engine.ask(request)) for request in requests]
            await asyncio.to_thread(hold.wait)
            sync = asyncio.create_task(engine.sync(manifest, interrupt=True))
            late = asyncio.create_task(engine.ask(requests[0]))
            await asyncio.sleep(0.5)
            assert not sync.done(), "the weights must not change under a running step"
        await sync
        answers = await asyncio.gather(*running)
        totals = [engine.check(r, s, {2}) for r, s in zip(requests, answers, strict=True)]
        assert [s.finish for (s,) in answers] == ["abort"] * len(requests)
        assert max(totals) > 0
        engine.check(requests[0], await late, {2, 3})
        # What was stored before is not used again: the prefix cache was emptied.
        again = await asyncio.gather(*map(engine.ask, requests))
        for request, samples in zip(requests, again, strict=True):
            assert engine.check(request, samples, {3}) == 400
        await engine.client.close()
        return totals

    print(asyncio.run(go()))


def test_a_step_that_outlives_its_request(rig):
    """The engine learns of a stop token only when the next step is queued: the request has been answered, and
    a sync begins, while that step is on the device.
    """
    rng = random.Random(3)
    prompt = [rng.randrange(VOCAB) for _ in range(BATCH + 4)]

    async def go():
        engine = CheckedEngine(rig)
        await engine.sync(engine.publish(4))
        tokens, _ = respond(prompt, 7, engine.weights[4], 50)
        stop = next(i for i in range(20, 50) if tokens[i] not in tokens[:i])
        request = Request(prompt, 7, 50, stop=(tokens[stop],))
        manifest = engine.publish(5)
        with Hold(rig.engine.bridge, steps=2 + stop) as hold:  # the prompt takes two, each later token one
            engine.check(request, await engine.ask(request), {4})
            await asyncio.to_thread(hold.wait)
            sync = asyncio.create_task(engine.sync(manifest))
            await asyncio.sleep(0.5)
            assert not sync.done()
            assert rig.engine.process.alive()
        await sync
        engine.check(request, await engine.ask(request), {5})
        await engine.client.close()

    asyncio.run(go())


@pytest.mark.parametrize("syncs", [6, pytest.param(60, marks=pytest.mark.long)])
def test_groups_over_many_syncs(rig, syncs, tmp_path):
    """Responses in segments: each is continued with new weights, which recompute prompt and response."""
    rng = random.Random(4)
    first = 10

    async def go():
        engine = CheckedEngine(rig)
        settings = Settings.model_validate(settings_for(rig.model, 1))
        worker = Worker(settings, codec_of(ByteTokenizer()), [engine.client], tmp_path, [STOP])
        serving, over = asyncio.Event(), False

        async def sample(ticket: int) -> GroupTask:
            prompt = np.array([rng.randrange(VOCAB) for _ in range(rng.randint(1, 200))], np.int32)
            length = rng.randint(1, 400)
            task = GroupTask(
                ticket, 0, prompt, "", 4, 1000 * ticket, length, first, interruptible=True, graded=False
            )
            while not (await worker.generate(task, 0, 0)).complete:
                await serving.wait()
            return task

        async def keep_sampling(slot: int) -> list[GroupTask]:
            tasks = []
            while not over:
                tasks.append(await sample(100 * len(tasks) + slot))
            return tasks

        await engine.sync(engine.publish(first))
        serving.set()
        running = [asyncio.create_task(keep_sampling(slot)) for slot in range(5)]
        for version in range(first + 1, first + 1 + syncs):
            manifest = engine.publish(version)
            await asyncio.sleep(rng.random() * 0.5)
            serving.clear()
            await engine.sync(manifest, interrupt=True)
            serving.set()
        over = True
        segments = 0
        for task in chain.from_iterable(await asyncio.gather(*running)):
            for t in await worker.fetch([task.ticket] * 4, list(range(4))):
                segments += check_segments(engine.weights, t)
        worker.close()
        await engine.client.close()
        return segments

    segments = asyncio.run(go())
    print(f"{segments} segments")
    assert segments > 4 * syncs


def check_segments(weights: dict[int, int], t: Trajectory) -> int:
    """Each segment is what its version of the weights gives for prompt and response so far."""
    prompt, response = t.prompt.tolist(), t.response.tolist()
    starts = [i for i in range(len(response)) if i == 0 or t.versions[i] != t.versions[i - 1]]
    covered = 0
    for start, end in zip(starts, [*starts[1:], len(response)], strict=True):
        version = int(t.versions[start])
        seed = segment_seed(t.seed, start)
        so_far = [*prompt, *response[:start]]
        expected, logprobs = respond(so_far, seed, weights[version], end - start, (STOP,))
        assert response[start:end] == expected
        assert t.behaviour[start:end].tolist() == logprobs
        routes = routes_of(stored_entries([*prompt, *response[: end - 1]], weights[version]))
        np.testing.assert_array_equal(t.routes[covered : len(prompt) + end - 1], routes[covered:])
        covered = len(prompt) + end - 1
    assert len(t.routes) == covered
    return len(starts)
