"""The controller's single processes against stand-in engines: CPU time of the sampler, and of the journal.

    python -m benchmarks.controller [--engines 64] [--tokens 8192] [--groups 16] [--burst] [--json]

The sampler is the product's: HTTP, decoding, detokenising, trajectories. Its tokenizer has 151,936 tokens.
The stand-ins are sockets of one other process; each answers like vLLM's server with our plug-in (``--json``:
like vLLM's own route) after a delay of up to 10 s, or all at the same time (``--burst``). What they answer
follows from the prompt and the seed. The reward costs nothing: workers compute it
(``benchmarks.grading``). CPU seconds are of the sampler's process, and do not depend much on what else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import resource
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
from rpg_megatron.config import load_settings
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file, write_rollouts
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.engine.process import engine_socket
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.sampler import Sampler
from rpg_megatron.system.events import EventSender

VOCABULARY = 151_936
SAMPLES = 16
DELAY = 10.0
"""Seconds within which the stand-ins answer."""


def main() -> None:
    """Run the sampler against the stand-ins, write and read the journal; print CPU time and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="of each response")
    parser.add_argument("--groups", type=int, default=16, help=f"of {SAMPLES} responses")
    parser.add_argument("--burst", action="store_true", help="all engines answer at the same time")
    parser.add_argument("--json", action="store_true", help="by vLLM's own route")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.serve:
        asyncio.run(serve(a.serve, a.engines, a.tokens, 0.0 if a.burst else DELAY))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, a)
        command = [sys.executable, "-m", "benchmarks.controller", *sys.argv[1:], "--serve", str(folder)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            server.stdout.readline()
            asyncio.run(measure(folder, a))
        finally:
            server.kill()
            server.wait()


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
        "reward": {"type": "operator:ne"},
        "rollout": {
            "prompts_per_step": a.groups,
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": a.tokens,
        },
        "training": {"minibatches": 1},
        "engine": {"replicas": a.engines, "max_sequences": 128},
    }
    (folder / "config.yaml").write_text(json.dumps(config))


async def measure(folder: Path, a: argparse.Namespace) -> None:
    """One rollout; then the journal of its batch."""
    from transformers import AutoTokenizer

    settings = load_settings(folder / "config.yaml")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    clients = [
        EngineClient(i, engine_socket(folder, i), "token", timeout=1800, as_bytes=not a.json)
        for i in range(a.engines)
    ]
    sampler = Sampler(
        settings, tokenizer, EnginePool(settings.engine, clients, folder), EventSender(folder / "events")
    )
    before, start, wall = resident(), time.process_time(), time.monotonic()
    batch: Any = await sampler.rollout(1, 0)
    cpu, wall = time.process_time() - start, time.monotonic() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sampler.close()
    for client in clients:
        await client.close()

    trajectories = batch.trajectories
    tokens = sum(len(t.response) for t in trajectories)
    digest = hashlib.sha256(b"".join(t.response.tobytes() + t.behaviour.tobytes() for t in trajectories))
    print(
        f"{a.engines} engines, {len(trajectories)} responses, {tokens:,} tokens, "
        f"{'JSON' if a.json else 'bytes'}, sha256 {digest.hexdigest()[:12]}"
    )
    print(f"sampler: {1e3 * cpu / len(trajectories):.2f} ms of CPU a trajectory, {wall:.1f} s")
    print(f"sampler: at most {(peak - before) / 2**20:,.0f} MiB besides {before / 2**20:,.0f} at the start")

    for t in trajectories:
        t.old = t.anchor = t.behaviour + np.float32(1e-5)
    file = rollouts_file(folder, 1)
    write_rollouts(file, trajectories[:1])  # the first in a process imports pandas: 0.25 s
    start = time.process_time()
    write_rollouts(file, trajectories)
    written = time.process_time() - start
    start = time.process_time()
    assert len(read_rollouts(file)) == len(trajectories)
    read = time.process_time() - start
    size = file.stat().st_size / tokens
    print(
        f"journal: {1e6 * written / tokens:.3f} µs and {size:.1f} B a token written, "
        f"{1e6 * read / tokens:.3f} µs read"
    )


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def serve(folder: Path, engines: int, tokens: int, delay: float) -> None:
    """The stand-ins: HTTP/1.1 on a unix socket each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    source = "".join(f.read_text() for f in sorted(Path(__file__).parent.glob("*.py")))
    text = np.array(tokenizer.encode(source).ids, np.int32)
    text = np.tile(text, -(-2 * tokens // len(text)))
    rng = np.random.default_rng(0)
    scores = -rng.exponential(0.3, len(text)).astype(np.float32)

    @lru_cache(maxsize=1024)
    def sample(seed: int, prompt: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        digest = hashlib.blake2b(f"{seed} {prompt}".encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "big") % (len(text) - tokens)
        return text[start : start + tokens], scores[start : start + tokens]

    def answer(path: str, body: bytes) -> bytes:
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
