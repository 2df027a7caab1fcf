"""The main loop of an environment worker: runs episodes, for which ``episode_pool`` samples and scores.

A call's value (``system/fork_server.py``) is an object: ``task`` begins an episode, ``cancel`` ends it,
``reply`` answers a request. A request has ``ask`` (its number), ``method`` and ``arguments``, or ``drop`` if
its answer is no longer needed, or ``read`` if the episode has got it.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rpg_megatron.config.rollout import EpisodeSettings
from rpg_megatron.data.prompts import TextCodec, load_codec
from rpg_megatron.rewards.reward import Score
from rpg_megatron.rollout.episode import (
    Episode,
    EpisodeFunction,
    EpisodeLost,
    EpisodeResult,
    EpisodeTask,
    TokenLimit,
    Turn,
    result_of,
    token_array,
)
from rpg_megatron.system.custom_code import CustomCode, load_custom
from rpg_megatron.system.fork_server import Call, Serve, send_line, serve_calls


def load_server(
    path: str, settings: dict[str, Any], deadline: float, codec: str, model: str
) -> tuple[Serve, dict[str, Any]]:
    """Loader (``system/forked_workers.py``) of an episode. codec, model: arguments of ``load_codec``. Others:
    as in ``CustomCode``. Raises UserError if the episode cannot be imported with these settings.
    """
    os.environ["TMPDIR"] = str(Path(codec).parent)  # the run's folder, which is removed when it ends
    reserved = tuple(EpisodeSettings.model_fields)
    code = CustomCode("rollout.episode", path, settings, 3, coroutine=True, reserved=reserved)
    episode, text_codec = load_custom(code), load_codec(Path(codec), Path(model))
    file = getattr(sys.modules.get(path.partition(":")[0]), "__file__", None) or ""
    description = {"async": True, "deadline": deadline}

    async def run(call: Call) -> dict[str, Any]:
        return {"value": await _Episode(call, text_codec).run(episode)}

    def serve(connection: socket.socket) -> None:
        send_line(connection, os.getpid())
        asyncio.run(serve_calls(connection, run, file))

    return serve, description


class _Episode:
    """An episode that runs."""

    def __init__(self, call: Call, codec: TextCodec):
        self._call, self._codec = call, codec
        call.receive = self._receive
        inputs = call.value["task"]
        self._task = EpisodeTask(
            **inputs | {"prompt": tuple(inputs["prompt"])},
            encode=lambda text: tuple(codec.encode(text)),
            decode=self._decode,
        )
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def run(self, function: EpisodeFunction) -> EpisodeResult:
        """Its result. Raises what the episode raises."""
        try:
            ended = await function(self._task, self._generate, self._score)
        except TokenLimit:
            ended = Episode()
        except EpisodeLost as e:
            return EpisodeResult(metrics={}, lost=str(e) or "what it needs has ended")
        return result_of(ended)

    def _receive(self, line: dict[str, Any]) -> None:
        if (future := self._waiting.get(line["reply"])) and not future.done():
            future.set_result(line)

    async def _generate(
        self, tokens: Sequence[int], max_tokens: int | None = None, *, branch: bool = False
    ) -> Turn:
        before = token_array(tokens)
        most = None if max_tokens is None else operator.index(max_tokens)
        answer = await self._ask("generate", before.tolist(), most, bool(branch))
        self._call.send(ask=0, read=True)
        sampled, finish, logprobs = answer["turn"]
        arrays = before.astype(np.int32), np.array(sampled, np.int32), np.array(logprobs, np.float32)
        return Turn(arrays[0], arrays[1], finish, arrays[2], self._decode)

    async def _score(self, text: str | None = None) -> Score:
        answer = await self._ask("score", text if text is None else str(text))
        return msgspec.convert(answer["score"], Score)

    async def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        ask = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[ask] = future
        self._call.send(ask=ask, method=method, arguments=arguments)
        try:
            answer = await future
        except asyncio.CancelledError:
            self._call.send(ask=ask, drop=True)
            raise
        finally:
            del self._waiting[ask]
        if "limit" in answer:
            raise TokenLimit(answer["limit"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._codec.decode(list(tokens))
