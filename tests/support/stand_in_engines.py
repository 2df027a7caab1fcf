"""Stand-ins for vLLM's servers, whose answers follow from the prompt and the seed, and for a tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rpg_megatron.bridge.vllm.generate_route import GENERATE, SampledBytes
from rpg_megatron.bridge.vllm.sync_route import SYNC, StepsDone, Totals


class ByteTokenizer:
    """A byte is a token; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        kept = [t for t in tokens if t] if skip_special_tokens else tokens
        return bytes(kept).decode(errors="replace")


def write_byte_codec(file: Path) -> None:
    """The same as a file for ``load_codec``."""
    characters = pre_tokenizers.ByteLevel.alphabet()
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in plain else next(others)): byte for byte in range(256)}
    assert set(vocab) == set(characters)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizer.id_to_token(0)])
    file.write_text(tokenizer.to_str())


class StandIns:
    """HTTP/1.1 on a unix socket each, in a thread."""

    def __init__(self) -> None:
        self.delay = 0.0
        """Seconds until an answer."""
        self.requests = 0
        """Requests for samples so far."""
        self.version: int | None = None
        """Version of the weights that were synced last."""

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                _, _, length = head.partition("content-length:")
                body = await reader.readexactly(int(length.split()[0])) if length else b""
                path = head.split()[1]
                answer = b"{}"
                if path == SYNC:
                    answer = self.sync(json.loads(body))
                elif path == GENERATE:
                    self.requests += 1
                    await self.wait()
                    answer = self.answer(json.loads(body))
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def wait(self) -> None:
        """Before a response."""
        await asyncio.sleep(self.delay)

    def sync(self, request: dict[str, Any]) -> bytes:
        """Each step succeeds; there are no tensors."""
        info, done = request["update_info"], StepsDone(dict.fromkeys(request["steps"], 0.0))
        for step in request["steps"]:
            if step in ("check", "apply"):
                ack = {"rank": 0, "ok": True, "mode": "slices", "bytes": 0, "summed": 1}
                ack |= {"session": info["session"], "phase": step}
                done.totals = Totals([ack], [], b"", b"")
            elif step == "finish":
                self.version = info["version"]
        return msgspec.json.encode(done)

    def answer(self, request: dict[str, Any]) -> bytes:
        sampling = request["sampling_params"]
        drawn = [
            self.sample(request["token_ids"], sampling["seed"] + i, sampling["max_tokens"])
            for i in range(sampling["n"])
        ]
        return msgspec.msgpack.encode(
            [
                SampledBytes(i, "stop", t.tobytes(), v.tobytes(), self.version)
                for i, (t, v) in enumerate(drawn)
            ]
        )

    def sample(self, prompt: list[int], seed: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids below 128 and their log-probs."""
        digest = hashlib.blake2b(f"{seed} {prompt}".encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        length = int(rng.integers(1, longest + 1))
        return rng.integers(0, 128, length, np.int32), -rng.exponential(1.0, length).astype(np.float32)


@contextmanager
def stand_in_engines(sockets: Sequence[Path]) -> Iterator[StandIns]:
    """One at each of the sockets."""
    stand_ins, loop = StandIns(), asyncio.new_event_loop()

    async def start() -> None:
        for socket in sockets:
            await asyncio.start_unix_server(stand_ins.connection, socket)

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield stand_ins
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
