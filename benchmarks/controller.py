"""The controller's processes against stand-in engines: CPU time of sampler, workers, fetch and journal.

    python -m benchmarks.controller [--engines 64] [--tokens 8192] [--groups 16] [--workers 8] [--burst]

Sampler, workers and the leaders' fetch are the product's, in their own processes. The tokenizer has 151,936
tokens. The stand-ins are sockets of one other process; each answers like vLLM's server with our plug-in
(``--json``: like one without it) after a delay of up to 10 s, or at once (``--burst``). What they answer
follows from the prompt and the seed: the hash of the batch must not depend on ``--workers``, ``--burst`` and
``--json``. Each response ends with an answer that is graded by rules, as most are: reward workers do not run.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rpg_megatron.bridge.vllm.generate_route import GENERATE, SampledBytes
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file, write_rollouts
from rpg_megatron.engine.process import engine_socket
from rpg_megatron.rollout.sampler_client import SOCKET, RolloutBatch, SamplerClient, TrajectoryClient

VOCABULARY = 151_936
SAMPLES = 16
DELAY = 10.0
"""Seconds within which the stand-ins answer."""
TARGET = 8192
"""Trajectories of a step of 512 prompts."""


def main() -> None:
    """Run a step against the stand-ins, write and read the journal; print CPU time and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="of each response")
    parser.add_argument("--groups", type=int, default=64, help=f"of {SAMPLES} responses")
    parser.add_argument("--workers", type=int, default=1, help="rollout.workers")
    parser.add_argument("--burst", action="store_true", help="all engines answer at the same time")
    parser.add_argument("--reward", default="answer_line", help="reward.type; operator:ne: a function")
    parser.add_argument("--json", action="store_true", help="engines without the plug-in's route")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.serve:
        asyncio.run(serve(a.serve, a.engines, a.tokens, 0.0 if a.burst else DELAY, not a.json))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, a)
        command = [sys.executable, "-m", "benchmarks.controller", *sys.argv[1:], "--serve", str(folder)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        token = secrets.token_urlsafe()
        module = [
            sys.executable,
            "-m",
            "rpg_megatron.rollout.sampler",
        ]
        sampler = subprocess.Popen(
            [*module, *[str(folder)] * 3],
            env=os.environ | {TOKEN_VARIABLE: token},
            stderr=(folder / "log").open("w"),
        )
        try:
            assert server.stdout is not None
            server.stdout.readline()
            measure(folder, a, sampler.pid, token)
        finally:
            for process in (sampler, server):
                process.terminate()
                process.wait()


def make_inputs(folder: Path, a: argparse.Namespace) -> None:
    """A config, prompts, and a tokenizer trained on the package's own source, filled up to its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=20_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(f) for f in Path(__file__).parents[1].rglob("rpg_megatron/**/*.py")], trainer)
    trained = json.loads(tokenizer.to_str())
    vocabulary = trained["model"]["vocab"]
    vocabulary |= {f"<unused {i}>": i for i in range(len(vocabulary), VOCABULARY - 1)}
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    model = folder / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(model)
    Qwen3Config(vocab_size=VOCABULARY, architectures=["Qwen3ForCausalLM"]).save_pretrained(model)
    rows = [json.dumps({"prompt": f"What is {i} + {i}?", "answer": str(2 * i)}) for i in range(a.groups)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    config = {
        "name": "controller",
        "device": "cpu",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl"},
        "reward": {"type": a.reward},
        "rollout": {
            "prompts_per_step": a.groups,
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": a.tokens,
            "workers": a.workers,
        },
        "training": {"minibatches": 1},
        "engine": {"replicas": a.engines, "max_sequences": 128},
    }
    (folder / "config.yaml").write_text(json.dumps(config))


def measure(folder: Path, a: argparse.Namespace, sampler: int, token: str) -> None:
    """One rollout; its trajectories as the leaders get them; then the journal of the batch."""
    with SamplerClient(folder / SOCKET, token) as client:
        source = TrajectoryClient(client.addresses(), token)
        workers = children(sampler) if a.workers > 1 else []
        before = {pid: (cpu_seconds(pid), peak_bytes(pid)) for pid in (sampler, *workers)}
        wall = time.monotonic()
        batch = client.rollout(1, 0)
        assert isinstance(batch, RolloutBatch)
        wall = time.monotonic() - wall
        index, start = batch.index, time.process_time()
        trajectories = source.fetch(index.worker.tolist(), index.ticket.tolist(), index.sample.tolist())
        fetched = time.process_time() - start
        used = {pid: cpu_seconds(pid) - seconds for pid, (seconds, _) in before.items()}
        grown = {pid: peak_bytes(pid) - size for pid, (_, size) in before.items()}
        source.close()

    count = len(trajectories)
    tokens = sum(len(t.response) for t in trajectories)
    digest = hashlib.sha256(b"".join(t.response.tobytes() + t.behaviour.tobytes() for t in trajectories))
    print(
        f"{a.engines} engines, {a.workers} workers, {count} responses, {tokens:,} tokens, "
        f"{'JSON' if a.json else 'bytes'}, sha256 {digest.hexdigest()[:12]}, {wall:.1f} s"
    )
    serial = used[sampler] / count if workers else 0.0
    rest = sum(used.values()) / count - serial
    print("ms of CPU a trajectory:")
    if workers:
        print(f"  {1e3 * serial:6.3f}  sampler, one process")
    print(f"  {1e3 * rest:6.3f}  workers" if workers else f"  {1e3 * rest:6.3f}  sampler with its one worker")
    print(f"  {1e3 * fetched / count:6.3f}  leaders, to fetch")
    if workers:
        tail = TARGET * (serial + rest / 8)
        print(f"{TARGET:,} trajectories at once, 8 workers: {tail:.1f} s (serial, and an eighth of the rest)")
    print(
        f"memory: {', '.join(f'{size / 2**20:,.0f}' for size in grown.values())} MiB more, in the same order"
    )

    rng = np.random.default_rng(0)
    for t in trajectories:
        t.old = t.anchor = t.behaviour + rng.normal(0, 1e-6, len(t.behaviour)).astype(np.float32)
    file = rollouts_file(folder, 1)
    write_rollouts(file, trajectories[:1])  # the first in a process imports pandas: 0.25 s
    start = time.process_time()
    write_rollouts(file, trajectories)
    written = time.process_time() - start
    start = time.process_time()
    assert len(read_rollouts(file)) == count
    read = time.process_time() - start
    size = file.stat().st_size / tokens
    print(
        f"journal: {1e6 * written / tokens:.3f} µs and {size:.1f} B a token written, "
        f"{1e6 * read / tokens:.3f} µs read"
    )


def children(parent: int) -> list[int]:
    """The sampler's workers."""
    found = subprocess.run(
        ["pgrep", "-P", str(parent), "-f", "rollout.worker"], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """Largest resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


async def serve(folder: Path, engines: int, tokens: int, delay: float, as_bytes: bool) -> None:
    """The stand-ins: HTTP/1.1 on a unix socket each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    source = "".join(f.read_text() for f in sorted(Path(__file__).parent.glob("*.py")))
    text = np.array(tokenizer.encode(source).ids, np.int32)
    end = np.array(tokenizer.encode("\nAnswer: 12").ids, np.int32)
    text = np.tile(text, -(-2 * tokens // len(text)))

    @lru_cache(maxsize=1024)
    def sample(seed: int, prompt: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        digest = hashlib.blake2b(f"{seed} {prompt}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        start = number % (len(text) - tokens)
        scores = -np.random.default_rng(number).exponential(0.3, tokens).astype(np.float32)
        return np.concatenate([text[start : start + tokens - len(end)], end]), scores

    def answer(path: str, body: bytes) -> bytes | None:
        if path == GENERATE and not as_bytes:
            return None
        if not path.startswith("/inference"):
            return b"{}"
        asked = json.loads(body)
        sampling, prompt = asked["sampling_params"], tuple(asked["token_ids"])
        drawn = [sample(sampling["seed"] + i, prompt) for i in range(sampling["n"])]
        if path == GENERATE:
            packed = [
                SampledBytes(i, "stop", ids.tobytes(), values.tobytes())
                for i, (ids, values) in enumerate(drawn)
            ]
            return msgspec.msgpack.encode(packed)
        return json.dumps({"choices": [choice(i, *d) for i, d in enumerate(drawn)]}).encode()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                _, _, length = head.partition("content-length:")
                body = await reader.readexactly(int(length.split()[0])) if length else b""
                out = answer(head.split()[1], body)
                if out is None:
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                await asyncio.sleep(random.random() * delay)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(out) + out)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    servers = [await asyncio.start_unix_server(connection, engine_socket(folder, i)) for i in range(engines)]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def choice(index: int, ids: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """A response in the form of vLLM's own route."""
    content = []
    for token, value in zip(ids.tolist(), values.tolist(), strict=True):
        entry = {"token": f"token_id:{token}", "logprob": value, "bytes": None}
        content.append({**entry, "top_logprobs": [entry]})
    return {
        "index": index,
        "token_ids": ids.tolist(),
        "finish_reason": "stop",
        "logprobs": {"content": content},
    }


if __name__ == "__main__":
    main()
