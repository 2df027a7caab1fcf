"""One real vLLM engine (CPU, an export of a tiny random Qwen3) behind our process, client and sampler.

Why: training is right only if the log-probs that come back are those of the sampled tokens, of every one of
them, at the sampling temperature, and if a seed gives the same responses again; and a broken engine must be
distinguished from a slow one, and leave nothing behind. The sampler's sync is run once; its failures are in
the bridge tests. Not covered: tensor parallelism, GPUs.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rpg_megatron.bridge.vllm.generate_route import GENERATE, SampledBytes
from rpg_megatron.bridge.vllm.peak_use import KV_PEAK
from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.config.rollout import RolloutSettings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineClient, EngineError, Sample
from rpg_megatron.engine.metrics import KV_USE, PREEMPTIONS, RUNNING, TOKENS, WAITING
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.rollout.sampler_client import SOCKET, RolloutBatch, SamplerClient, TrajectoryClient
from rpg_megatron.system.process_groups import members
from rpg_megatron.training.mismatch import find_gaps
from tests.support.bridge_trainers import alone_params, published
from tests.support.engine import Engine, running_engines
from tests.support.launcher import wait_for
from tests.support.runs import find_core

EOS = 256
PROMPTS = [[1 + i, 50, 60 + i, 70, 10] for i in range(4)]


def settings_in(folder: Path, model: Path) -> Settings:
    prompts = "".join(f'{{"prompt": "What is {i}+{i}?", "answer": {2 * i}}}\n' for i in range(6))
    (folder / "train.jsonl").write_text(prompts)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "device": "cpu",
                "model": {"path": str(model)},
                "precision": {"dtype": "float32"},
                "data": {"path": "train.jsonl", "max_prompt_tokens": 64},
                "training": {"minibatches": 2},
                "rollout": {"prompts_per_step": 4, "samples_per_prompt": 6, "max_response_tokens": 48},
                "engine": {
                    "max_sequences": 4,  # fewer than a group: a prompt takes two requests
                    "kv_cache_gib": 0.25,
                    "cpu_threads": 1,
                    "start_timeout": 400,
                    "request_timeout": 120,
                    "arguments": ["--enable-scale-out"],  # for vLLM's own route, to compare with
                },
                "evaluation": {"data": {"path": "train.jsonl", "max_prompt_tokens": 64}, "samples": 2},
            }
        )
    )
    return load_settings(folder / "config.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def exported(folder: Path, checkpoint: Path) -> Path:
    """The checkpoint as a run exports it: it is what vLLM loads."""
    layout = mapping_for(read_model_shape(checkpoint))
    export_hf(folder / "export", checkpoint, alone_params(checkpoint), layout, ONE_RANK, dtype=torch.float32)
    return folder / "export"


@pytest.fixture(scope="module")
def settings(folder: Path, exported: Path) -> Settings:
    return settings_in(folder, exported)


@pytest.fixture(scope="module")
def engine(folder: Path, settings: Settings) -> Iterator[Engine]:
    """Started as users start it, its processes spawned."""
    with running_engines(folder, [settings], weights="checkpoint", fresh=True) as (engine,):
        yield engine


class JSONClient(EngineClient):
    """Asks vLLM's own route instead of the plug-in's."""

    async def _ask(self, method: str, path: str, body: Any | None, timeout: float) -> bytes:
        if path != GENERATE:
            return await super()._ask(method, path, body, timeout)
        answer = json.loads(await super()._ask(method, path.removesuffix("/bytes"), body, timeout))
        samples = []
        for choice in answer["choices"]:
            entries = choice["logprobs"]["content"] if choice["logprobs"] else []
            assert [entry["token_id"] for entry in entries] == choice["token_ids"][: len(entries)]
            tokens = np.array(choice["token_ids"], np.int32)
            values = np.array([entry["logprob"] for entry in entries], np.float32)
            samples.append(
                SampledBytes(choice["index"], choice["finish_reason"], tokens.tobytes(), values.tobytes())
            )
        return msgspec.msgpack.encode(samples)


def ask(
    engine: Engine, *requests: dict, token: str | None = None, client_class: type = EngineClient
) -> list[list[Sample]]:
    """Send requests at the same time; with one connection pool, like the sampler."""

    async def run() -> list[list[Sample]]:
        client = client_class(0, engine.process.socket, token or engine.token, timeout=120)
        try:
            return await asyncio.gather(*[client.generate(**request) for request in requests])
        finally:
            await client.close()

    return asyncio.run(run())


def request(prompt: list[int], **changes: object) -> dict:
    base = {"n": 4, "max_tokens": 120, "temperature": 1.0, "seed": 11, "stop_token_ids": [EOS]}
    return {"prompt_tokens": prompt} | base | changes


def reference(
    model: torch.nn.Module, prompt: list[int], tokens: np.ndarray, temperature: float
) -> np.ndarray:
    ids = torch.tensor([prompt + tokens.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp.gather(1, torch.as_tensor(tokens, dtype=torch.long)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_tokens(
    engine: Engine, checkpoint: Path, temperature: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    answers = ask(
        engine, *[request(p, temperature=temperature, n=4, seed=1000 * i) for i, p in enumerate(PROMPTS)]
    )
    ends = []
    for prompt, samples in zip(PROMPTS, answers, strict=True):
        assert len(samples) == 4
        for sample in samples:
            assert len(sample.logprobs) == len(sample.tokens) >= 1
            assert (sample.finish == "stop") == (sample.tokens[-1] == EOS)
            assert EOS not in sample.tokens[:-1]
            expected = reference(model, prompt, sample.tokens, temperature)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4, rtol=0)
            ends.append(sample.finish)
    assert "stop" in ends, "no response ended: the log-prob of the end-of-sequence token went untested"


@pytest.mark.parametrize("restriction", [{"top_p": 0.9}, {"top_k": 3}])
def test_what_top_p_does_to_logprobs(engine: Engine, checkpoint: Path, restriction: dict[str, float]) -> None:
    """They are of the kept tokens alone, and differ from the trainer's by no more than the guard allows."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rollout = RolloutSettings(**restriction)
    for sample in ask(engine, request(PROMPTS[0], temperature=0.7, seed=5, **restriction))[0]:
        ids = torch.tensor([PROMPTS[0] + sample.tokens.tolist()])
        with torch.no_grad():
            logits = model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].double() / 0.7
        p = logits.softmax(-1)
        ranked, order = p.sort(descending=True)
        keep = torch.ones_like(ranked, dtype=torch.bool)
        if rollout.top_p < 1:
            keep = ranked.cumsum(-1) - ranked < rollout.top_p
        else:
            keep[:, rollout.top_k :] = False
        p = torch.zeros_like(p).scatter(1, order, ranked * keep)
        chosen = torch.as_tensor(sample.tokens, dtype=torch.long)[:, None]
        np.testing.assert_allclose(
            sample.logprobs, (p / p.sum(-1, keepdim=True)).gather(1, chosen)[:, 0].log(), atol=1e-4, rtol=0
        )
        old = reference(model, PROMPTS[0], sample.tokens, 0.7)
        assert (sample.logprobs - old).max() > 1e-2, "nothing was left out"
        gap, _ = find_gaps([trajectory_of(sample, old)], 0, rollout.log_prob_excess)
        assert gap.max() < 1e-4


def trajectory_of(sample: Sample, old: np.ndarray) -> Trajectory:
    versions = np.zeros(len(sample.tokens), np.int32)
    prompt = np.array(PROMPTS[0], np.int32)
    return Trajectory(
        0, 0, prompt, sample.tokens, sample.logprobs, versions, sample.finish, "", old=old.astype(np.float32)
    )


def test_a_text_ends_a_response_and_stays_in_it(engine: Engine, exported: Path) -> None:
    decode = AutoTokenizer.from_pretrained(exported).decode
    free = ask(engine, request(PROMPTS[0], n=1))[0][0]
    # Two tokens of one character each: other bytes are not text.
    texts = [decode(free.tokens[i : i + 2]) for i in range(len(free.tokens))]
    text = next(text for text in texts if len(text) == 2 and text.isascii() and text.isprintable())
    (stopped,) = ask(engine, request(PROMPTS[0], n=1, stop=[text]))[0]
    assert stopped.finish == "stop"
    assert text in decode(stopped.tokens)
    assert text not in decode(stopped.tokens[:-1])
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()
    np.testing.assert_allclose(stopped.logprobs, free.logprobs[: len(stopped.tokens)], atol=1e-5, rtol=0)


def test_a_seed_gives_the_same_responses_again(engine: Engine) -> None:
    prompt = PROMPTS[0]
    alone = ask(engine, request(prompt))[0]
    crowd = ask(engine, *[request(p, seed=77) for p in PROMPTS], request(prompt))[-1]
    first = ask(engine, request(prompt, n=1))[0]
    others = ask(engine, request(prompt, n=3, seed=12))[0]  # sample i is drawn with seed + i
    other_seed = ask(engine, request(prompt, seed=999))[0]
    tokens = [s.tokens.tolist() for s in alone]
    assert [s.tokens.tolist() for s in crowd] == tokens
    assert [s.tokens.tolist() for s in first + others] == tokens
    assert [s.tokens.tolist() for s in other_seed] != tokens
    assert len({tuple(t) for t in tokens}) == 4
    for a, b in zip(alone, crowd, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)


def test_bytes_are_what_json_says(engine: Engine) -> None:
    """Equal to the last bit for a single sample, with nothing that changes the engine's batches. The engine
    may split several samples of a request, which changes last bits.
    """
    for changes in ({}, {"temperature": 0.7, "top_p": 0.9}, {"logprobs": False}):
        for n, tolerance in ((1, 0.0), (4, 1e-5)):
            sampling = request(PROMPTS[0], n=n, max_tokens=24, **changes)
            ask(engine, sampling)  # the prompt is in the prefix cache for both that are compared
            (packed,), (plain,) = (ask(engine, sampling, client_class=c) for c in (EngineClient, JSONClient))
            for a, b in zip(packed, plain, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                assert a.finish == b.finish
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0)


def test_greedy_and_without_logprobs(engine: Engine) -> None:
    a, b = ask(engine, *[request(PROMPTS[0], temperature=0.0, n=1, seed=s, logprobs=False) for s in (1, 2)])
    assert a[0].tokens.tolist() == b[0].tokens.tolist()
    assert len(a[0].logprobs) == 0


def test_every_route_asks_for_the_token_and_errors_name_the_engine(engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"engine 0 answered /inference/v1/generate/bytes with status 401"):
        ask(engine, request(PROMPTS[0]), token="wrong")
    with pytest.raises(EngineError, match=r"engine 0 answered .* status 400"):
        ask(engine, request(PROMPTS[0], n=5))  # more than max_sequences
    with pytest.raises(EngineError, match=r"engine 0 answered .* status 4"):
        ask(engine, request([1] * 500))  # longer than the context
    assert oct(engine.process.socket.stat().st_mode & 0o777) == "0o700"
    addresses = engine.listens_at()  # gloo; vLLM's own store would listen everywhere
    assert addresses == ["127.0.0.1"], "docs/security.md says how many"


def test_its_metrics_say_how_busy_it_is(engine: Engine) -> None:
    async def scene() -> tuple[dict[str, float], dict[str, float]]:
        client = EngineClient(0, engine.process.socket, engine.token, timeout=120)
        try:
            before = await client.metrics(60.0)
            assert before.keys() == {KV_USE, KV_PEAK, RUNNING, WAITING, PREEMPTIONS, TOKENS}
            sampling = {"max_tokens": 5, "temperature": 0.0, "seed": 1, "logprobs": False}
            (sample,) = await client.generate([1, 2, 3], **sampling)
            after = await client.metrics(60.0)
            later = await client.metrics(60.0)
        finally:
            await client.close()
        assert after[TOKENS] - before[TOKENS] == len(sample.tokens)
        return after, later

    after, later = asyncio.run(scene())
    assert (after[RUNNING], after[WAITING], after[PREEMPTIONS]) == (0, 0, 0)
    assert 0 <= after[KV_USE] <= 1
    assert 0 < after[KV_PEAK] <= 1, "the largest use, although nothing runs any more"
    assert later[KV_PEAK] == 0, "nothing ran since the last reading"


def test_sampler_process(
    engine: Engine, folder: Path, settings: Settings, checkpoint: Path, tmp_path: Path
) -> None:
    other_model = tmp_path / "other"
    shutil.copytree(checkpoint, other_model)
    weights = load_file(checkpoint / "model.safetensors")
    save_file(
        {n: (1.1 * w.flip(0)).contiguous() for n, w in weights.items()},
        other_model / "model.safetensors",
        {"format": "pt"},
    )
    log = (folder / "sampler.log").open("wb")
    work, token = engine.process.socket.parent, engine.token
    command = [sys.executable, "-m", "rpg_megatron.rollout.sampler", str(folder), str(work)]
    process = subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: token}, stdout=log, stderr=log)
    try:
        with SamplerClient(work / SOCKET, token) as sampler:
            source = TrajectoryClient(sampler.addresses(), token)

            def rollout(step: int, version: int) -> tuple[RolloutBatch, list[Trajectory]]:
                result = sampler.rollout(step, version)
                assert isinstance(result, RolloutBatch)
                index = result.index
                trajectories = source.fetch(
                    index.worker.tolist(), index.ticket.tolist(), index.sample.tolist()
                )
                sampler.release()
                for t, group in zip(trajectories, index.group.tolist(), strict=True):
                    t.group = group
                return result, trajectories

            before = sampler.state()
            batch, sampled = rollout(step=1, version=3)
            sampler.restore(before)
            _, again = rollout(step=1, version=3)
            results = sampler.evaluate().results
            with pytest.raises(UserError, match="prompts have changed"):
                sampler.restore({"stream": before["stream"] | {"prompts": "other"}})
            process.send_signal(signal.SIGINT)
            assert sampler.state() != before
            with published(engine.bridge, other_model, alone_params(other_model), 7) as manifest:
                reports = sampler.sync(manifest, version=7).reports
            _, moved = rollout(step=2, version=7)
            source.close()
        with pytest.raises(RuntimeError, match="rejected the token"):
            SamplerClient(work / SOCKET, "wrong")
        second = SamplerClient(work / SOCKET, token)
        with second, pytest.raises(RuntimeError, match="unknown method 'nonsense'"):
            second._client.call("nonsense", None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        log.close()

    assert [(t.group, t.sample) for t in sampled] == [(g, s) for g in range(4) for s in range(6)]

    def check(trajectories: list[Trajectory], path: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for t in trajectories:
            expected = reference(model, t.prompt.tolist(), t.response, 1.0)
            np.testing.assert_allclose(t.behaviour, expected, atol=1e-4, rtol=0)

    check(sampled, checkpoint)
    check(moved, other_model)
    assert [r.version for r in reports] == [7]
    assert set(moved[0].versions.tolist()) == {7}
    for t, u in zip(sampled, again, strict=True):
        assert t.response.tolist() == u.response.tolist()
        assert t.versions.tolist() == [3] * len(t.response)
        assert (t.prompt.dtype, t.response.dtype, t.behaviour.dtype) == (np.int32, np.int32, np.float32)
        assert t.reward == -1.0
        assert not t.correct
    for group in range(4):
        members = [t for t in sampled if t.group == group]
        assert len({t.prompt_id for t in members}) == 1
        assert len({tuple(t.response.tolist()) for t in members}) == 6  # two requests, no seed twice
    assert batch.metrics["reward/mean"] == -1.0
    assert [r.prompt_id for r in results] == list(range(6))
    assert all(len(r.responses) == len(r.lengths) == len(r.finishes) == 2 for r in results)


@pytest.mark.long  # a whole start; test_bad_input has an engine that ends earlier, and units vLLM's traceback
def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, checkpoint: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    # The worker's own error, not what core and server make of it.
    says = r"^engine 0 ended while starting: \S*SafetensorError: .*; the end of "
    with (
        pytest.raises(UserError, match=says),
        running_engines(tmp_path, [settings_in(tmp_path, model)], weights="checkpoint", fresh=True),
    ):
        pass


def test_a_core_that_hangs_is_told_from_one_that_works(engine: Engine) -> None:
    """The server answers either way. While the core computes, a worker's marks show its progress."""
    leader = engine.process.pid
    assert leader is not None
    core = find_core(leader)

    async def probe(timeout: float) -> tuple[bool, bool]:
        client = EngineClient(0, engine.process.socket, engine.token, timeout=120)
        try:
            return await client.health(), await client.is_progressing(timeout)
        finally:
            await client.close()

    assert asyncio.run(probe(60)) == (True, True)
    for path in ("/pause?mode=keep", "/resume"):  # as in a sync
        assert engine.call("POST", path)[0] == 200
        assert asyncio.run(probe(60)) == (True, True)
    mark = engine.bridge / f"progress-{leader}"
    mark.unlink(missing_ok=True)
    time.sleep(1.0)  # one mark a second at most
    ask(engine, request(PROMPTS[0]))
    assert mark.exists()
    os.kill(core, signal.SIGSTOP)
    try:
        assert asyncio.run(probe(2.0)) == (True, False)
    finally:
        os.kill(core, signal.SIGCONT)
    assert asyncio.run(probe(60)) == (True, True)


def test_killed_engine_is_noticed_and_cleaned_up(engine: Engine) -> None:
    """The last test on this engine: it does not survive."""
    process = engine.process
    assert process.alive()
    assert process.healthy()
    leader = process.pid
    assert leader is not None
    assert len(members(leader)) >= 2  # server, core
    os.kill(leader, signal.SIGKILL)
    wait_for(lambda: not process.alive())
    assert not process.healthy()
    with pytest.raises(EngineError, match="engine 0 does not listen"):
        ask(engine, request(PROMPTS[0]))
    process.stop()
    assert not members(leader)
    assert not process.socket.exists()
