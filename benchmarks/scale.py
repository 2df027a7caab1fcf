"""CPU time of a step's singleton processes at cluster size, with stand-in engines (docs/evidence/scale.md).

The stand-ins are unix sockets of one other process, which answer like vLLM's server with our plug-in. CPU
seconds depend little on the machine's other load.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.setup import ROOT, Table, benchmark, main, process_tree, python_path, seconds
from rpg_megatron.bridge.manifest import Layout, Manifest, PublishedBox, PublishedTensor, Shard
from rpg_megatron.bridge.vllm.sync_route import StepsDone, sum_acks
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.config.rollout import EngineSettings
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file, write_rollouts
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.engine.process import engine_socket
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.placement import RankShards, assign_owners
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.sampler_client import SOCKET, RolloutBatch, SamplerClient, TrajectoryClient
from tests.support import plain_packing
from tests.support.stand_in_engines import StandIns
from tests.support.tiny_models import TINY

VOCABULARY = 151_936
SAMPLES = 16
TOKEN = "a token"
DELAY = 10.0
"""Seconds within which the stand-ins answer."""
TARGET = 8192
"""Trajectories of a step of 512 prompts."""


@contextmanager
def serving(kind: type[StandIns], folder: Path, engines: int, *arguments: Any) -> Iterator[None]:
    """Serve ``kind(*arguments)`` at the sockets of all engines, in another process."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_serve, args=(kind, folder, engines, arguments, ready), daemon=True)
    process.start()
    try:
        while not ready.wait(0.1):
            if process.exitcode is not None:
                raise SystemExit("the stand-in engines ended")
        yield
    finally:
        process.kill()
        process.join()


def _serve(kind: type[StandIns], folder: Path, engines: int, arguments: tuple[Any, ...], ready: Any) -> None:
    stand_ins = kind(*arguments)

    async def serve() -> None:
        sockets = [engine_socket(folder, i) for i in range(engines)]
        servers = [await asyncio.start_unix_server(stand_ins.connection, socket) for socket in sockets]
        ready.set()
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(serve())


# -- sampler -------------------------------------------------------------------------------------------------


class LongResponses(StandIns):
    """Each response is a part of this folder's source code with an answer, determined by prompt and seed."""

    def __init__(self, folder: Path, tokens: int, burst: bool):
        from tokenizers import Tokenizer

        super().__init__()
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        source = "".join(f.read_text() for f in sorted((ROOT / "rpg_megatron/rollout").glob("*.py")))
        text = np.array(tokenizer.encode(source).ids, np.int32)
        self._text = np.tile(text, -(-2 * tokens // len(text)))
        self._end = np.array(tokenizer.encode("\nAnswer: 12").ids, np.int32)
        self._tokens, self._burst = tokens, burst

    async def wait(self) -> None:
        """Before a response."""
        await asyncio.sleep(0.0 if self._burst else random.random() * DELAY)

    def sample(self, prompt: list[int], seed: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and log-probs."""
        digest = hashlib.blake2b(f"{seed} {prompt}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        begin = number % (len(self._text) - self._tokens)
        body = self._text[begin : begin + self._tokens - len(self._end)]
        scores = -np.random.default_rng(number).exponential(0.3, self._tokens).astype(np.float32)
        return np.concatenate([body, self._end]), scores


@benchmark(engines=4, tokens=256, groups=4, burst=True)
def sampler(
    engines: int = 64, tokens: int = 8192, groups: int = 64, workers: int = 1, burst: bool = False
) -> None:
    """Sampler, its workers, the leaders' fetch, and the journal: CPU time of a step.

    They are the product's, in their own processes. The tokenizer has 151,936 tokens. groups: of 16 responses
    with ``tokens`` tokens. workers: rollout.workers. The stand-ins answer within 10 s, or with ``--burst`` at
    once. Their answers are determined by prompt and seed, so the hash of the batch must not depend on these
    options. Each response is graded by rules, as most are: no reward workers run. Tail: of 8,192
    trajectories that end together, with 8 workers: the serial part and an eighth of the rest.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_inputs(folder, engines, tokens, groups, workers)
        command = [sys.executable, "-m", "rpg_megatron.rollout.sampler", name, name]
        environment = os.environ | python_path() | {TOKEN_VARIABLE: TOKEN}
        with serving(LongResponses, folder, engines, folder, tokens, burst):
            process = subprocess.Popen(command, env=environment)
            try:
                cpu_used, grown, fetched, trajectories = _one_step(folder, process.pid, workers)
            finally:
                process.terminate()
                process.wait()
        count, total = len(trajectories), sum(len(t.response) for t in trajectories)
        digest = hashlib.sha256(b"".join(t.response.tobytes() + t.behaviour.tobytes() for t in trajectories))
        print(f"{count} responses, {total:,} tokens, sha256 {digest.hexdigest()[:12]}")
        serial = cpu_used[0] / count if workers > 1 else 0.0
        parallel = sum(cpu_used) / count - serial
        tail = TARGET * (serial + parallel / 8) if workers > 1 else None
        columns = ("engines", "workers", "sampler, ms of CPU a trajectory|.3f", "workers, ms|.3f")
        table = Table(*columns, "fetch, ms|.3f", "tail, s|.1f", "MiB more")
        sizes = ", ".join(f"{size / 2**20:,.0f}" for size in grown)
        table.row(engines, workers, 1e3 * serial or None, 1e3 * parallel, 1e3 * fetched / count, tail, sizes)

        rng = np.random.default_rng(0)
        for t in trajectories:
            t.old = t.anchor = t.behaviour + rng.normal(0, 1e-6, len(t.behaviour)).astype(np.float32)
        file = rollouts_file(folder, 1)
        write_rollouts(file, trajectories[:1])  # the first in a process imports pandas: 0.25 s
        written = seconds(lambda: write_rollouts(file, trajectories), clock=time.process_time)
        read = seconds(lambda: read_rollouts(file), clock=time.process_time)
        table = Table("journal", "written, µs of CPU a token|.3f", "bytes a token|.1f", "read, µs|.3f")
        table.row("rollouts/", 1e6 * written / total, file.stat().st_size / total, 1e6 * read / total)


def _one_step(folder: Path, pid: int, workers: int) -> tuple[list[float], list[int], float, list[Any]]:
    """CPU seconds and growth in bytes of the sampler and its workers, CPU seconds of the fetch, and the
    trajectories.
    """
    with SamplerClient(folder / SOCKET, TOKEN) as client:
        source = TrajectoryClient(client.addresses(), TOKEN)
        tree = process_tree(pid)
        tree[1:] = [p for p in tree[1:] if workers > 1 and "rollout.worker" in str(p.cmdline())]

        def used() -> np.ndarray:
            return np.array([[sum(p.cpu_times()[:2]), _peak(p.pid)] for p in tree])

        before = used()
        batch = client.rollout(1, 0)
        assert isinstance(batch, RolloutBatch)
        index, start = batch.index, time.process_time()
        trajectories = source.fetch(index.worker.tolist(), index.ticket.tolist(), index.sample.tolist())
        fetched = time.process_time() - start
        cpu_used, grown = (used() - before).T.tolist()
        source.close()
    return cpu_used, grown, fetched, trajectories


def _peak(pid: int) -> int:
    """The largest resident size of a process so far, in bytes."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])


def _write_inputs(folder: Path, engines: int, tokens: int, groups: int, workers: int) -> None:
    """A config, prompts, and a tokenizer trained on the package's own source, filled up to its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=20_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(f) for f in sorted((ROOT / "rpg_megatron").rglob("*.py"))], trainer)
    trained = json.loads(tokenizer.to_str())
    vocabulary = trained["model"]["vocab"]
    vocabulary |= {f"<unused {i}>": i for i in range(len(vocabulary), VOCABULARY - 1)}
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    model = folder / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(model)
    Qwen3Config(vocab_size=VOCABULARY, architectures=["Qwen3ForCausalLM"]).save_pretrained(model)
    rows = [json.dumps({"prompt": f"What is {i} + {i}?", "answer": str(2 * i)}) for i in range(groups)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    rollout = {"prompts_per_step": groups, "samples_per_prompt": SAMPLES, "max_response_tokens": tokens}
    config = {
        "device": "cpu",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl"},
        "reward": {"type": "answer_line"},
        "rollout": rollout | {"workers": workers},
        "training": {"minibatches": 1},
        "engine": {"replicas": engines, "max_sequences": 128},
    }
    (folder / "config.yaml").write_text(json.dumps(config))


# -- weight sync ---------------------------------------------------------------------------------------------

QWEN3_32B = replace(
    TINY, num_layers=64, hidden_size=5120, ffn_hidden_size=25600, num_heads=64, num_kv_heads=8, head_dim=128,
    vocab_size=VOCABULARY, dtype="bfloat16",
)  # fmt: skip
TENSOR, PIPELINE = 8, 8


class Acknowledging(StandIns):
    """Answers at once, like engines whose workers have read all weights."""

    def __init__(self, workers: int):
        super().__init__()
        self._workers = workers
        numbers = random.Random(1)
        self._sums: list[dict[str, tuple[int, int]]] = [{} for _ in range(workers)]
        manifest = make_manifest()
        for name, tensor in manifest.tensors.items():
            size, remainder = 2 * math.prod(tensor.shape), manifest.checksum(name)
            for rank, sums in enumerate(self._sums):
                if len(tensor.shape) == 1:  # each worker reads all of it
                    sums[name] = manifest.checksum(name), size
                    continue
                part = remainder if rank == workers - 1 else numbers.getrandbits(64)
                remainder = (remainder - part) % 2**64
                sums[name] = part, size // workers + (size % workers if rank == 0 else 0)
        self._answers: dict[str, bytes] = {}

    def sync(self, request: dict[str, Any]) -> bytes:
        """Prepared once for each kind of request."""
        steps = request["steps"]
        if str(steps) not in self._answers:
            self._answers[str(steps)] = self._make_answer(steps)
        session = request["update_info"].get("session", "")
        return self._answers[str(steps)].replace(b"SESSION", session.encode())

    def _make_answer(self, steps: list[str]) -> bytes:
        ranks, phase = range(self._workers), steps[0]
        answer = StepsDone(dict.fromkeys(steps, 0.1), [{"rank": rank, "unsettled": False} for rank in ranks])
        if phase in ("check", "apply"):
            ack = {"ok": True, "pid": 12345, "version": 1, "phase": phase, "transport": "process_group"}
            ack |= {"session": "SESSION", "mode": "slices", "reason": "", "seconds": 0.123, "bytes": 1 << 33}
            sums = self._sums if phase == "apply" else [{}] * self._workers
            acks = [{"rank": rank, **ack, "sums": sums[rank]} for rank in ranks]
            answer = StepsDone({phase: 0.1}, totals=sum_acks(acks))
        return msgspec.json.encode(answer)


def make_manifest() -> Manifest:
    """The manifest that the ranks publish; the checksums are random, and the same in both processes."""
    mapping, numbers = mapping_for(QWEN3_32B), random.Random(0)
    layers = QWEN3_32B.num_layers // PIPELINE
    ranks = []
    for rank in range(TENSOR * PIPELINE):
        stage, tensor_rank = divmod(rank, TENSOR)
        place = RankCoordinates(rank, TENSOR, tensor_rank, stage, 0, 0, 128)
        layers_here = range(stage * layers, (stage + 1) * layers)
        first, last = stage == 0, stage == PIPELINE - 1
        params = mapping.stage_params(place, layers=layers_here, first=first, last=last)
        ranks.append(RankShards(place, tuple(params.items())))
    tensors = {}
    for name, owners in assign_owners(mapping, ranks).items():
        pieces = [(s.rank, s.piece) for s in owners]
        boxes = (PublishedBox(rank, 0, p.hf.extent, p.local, p.hf) for rank, p in pieces)
        tensors[name] = PublishedTensor("bfloat16", mapping.hf_tensors()[name], tuple(boxes))
    place = {"address": "10.0.0.1", "port": 29500, "secret": "s" * 22, "timeout": 120.0, "backend": "nccl"}
    shards = tuple(Shard(rank, 1 << 30) for rank in range(len(ranks)))
    layout = Layout(shards, tensors)
    sums = tuple(numbers.getrandbits(64) for _ in range(layout.boxes[-1]))
    return Manifest("process_group", place, 0, layout.to_json(), sums)


@benchmark(engines=4, repeat=1)
def sync(engines: int = 256, workers: int = 8, repeat: int = 5) -> None:
    """The sampler's calls of a weight sync to all engines, and the comparison of checksums. No weights are
    moved.

    The engine pool, the controller and the HTTP client are the product's; the manifest is that of a model of
    Qwen3-32B's shape (707 tensors), published by TP8 x PP8. workers: of each engine. CPU seconds are of this
    process.
    """

    async def measure(folder: Path) -> None:
        manifest = make_manifest()
        clients = [EngineClient(i, engine_socket(folder, i), "token", timeout=600) for i in range(engines)]
        pool = EnginePool(EngineSettings(replicas=engines, tensor=workers), clients, folder)
        cpu = []
        for version in range(repeat + 1):
            cpu.append(-time.process_time())
            result = await pool.sync(manifest, version, resync=False)
            cpu[-1] += time.process_time()
            assert len(result.reports) == engines, result.refused
            assert all(len(r.bytes_per_worker) == workers for r in result.reports)
        for client in clients:
            await client.close()
        title = f"{engines} engines of {workers} workers, {len(manifest.tensors)} tensors"
        table = Table("sync", "CPU seconds|.3f", "ms an engine|.1f", ratio="CPU seconds", title=title)
        for name, spent in (("the first, which connects", cpu[0]), ("later", statistics.median(cpu[1:]))):
            table.row(name, spent, 1e3 * spent / engines)

    with tempfile.TemporaryDirectory() as name, serving(Acknowledging, Path(name), engines, workers):
        asyncio.run(measure(Path(name)))


# -- planning of batches -------------------------------------------------------------------------------------


@benchmark(trajectories=(512,), plain=512)
def packing(trajectories: tuple[int, ...] = (8192, 81920), plain: int = 8192) -> None:
    """Time to plan a step's batch on rank 0, against the plain rule that the plans are equal to.

    CPU seconds; the other ranks wait meanwhile. Lengths are log-normal with a median of 3,000 tokens, cut at
    9,216. The plain rule (``tests/support/plain_packing.py``) is run up to ``plain`` trajectories.
    """
    table = Table("trajectories|,", "DP", "mini-batches", "CPU seconds|.3f", "plain|.3f", "ratio|.1f")
    for count in trajectories:
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(math.log(3000), 0.8, count), 2, 9216).astype(int).tolist()
        for data, minibatches in ((8, 2), (64, 2), (64, 16), (512, 16)):
            shape = {"minibatches": minibatches, "data": data, "budget": 18432, "attention_length": 30000}
            fast, plan = _plan(plan_batches, lengths, shape)
            slow = None
            if count <= plain:
                slow, expected = _plan(plain_packing.plan_batches, lengths, shape)
                assert plan == expected
            table.row(count, data, minibatches, fast, slow, slow and slow / fast)


def _plan(planner: Callable[..., Any], lengths: list[int], shape: dict[str, int]) -> tuple[float, Any]:
    """CPU seconds of a plan, and the plan."""
    start = time.process_time()
    plan = planner(lengths, **shape)
    return time.process_time() - start, plan


if __name__ == "__main__":
    main(__doc__, sampler, sync, packing)
