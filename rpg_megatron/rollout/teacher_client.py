"""Log-probs of sampled tokens by a teacher behind a vLLM server, queried with token ids."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpg_megatron.config import UserError
from rpg_megatron.config.teacher import TeacherSettings
from rpg_megatron.data.trajectory import Floats, Trajectory
from rpg_megatron.system.http_client import HttpClient, ServerError, with_retries

_BYTES_PER_TOKEN, _MOST_BYTES = 4096, 1 << 20
"""Largest valid answer: for each token, and besides."""
_LEAST = float(np.finfo(np.float32).min)
_CONCURRENCY, _REQUEST_SECONDS = 64, 600.0
"""Requests at the same time of each data-parallel replica, and the time limit of one."""
_RETRIES, _WAIT_SECONDS = 2, 1.0
"""Retries for a trajectory, and the time before the first one."""
_CHECK_SECONDS = 30.0


class TeacherClient:
    """Asks the server of a teacher. For one event loop."""

    def __init__(self, settings: TeacherSettings, share: int = 1, vocab: int = 2**31):
        """share: number of clients that divide the requests at the same time. vocab: number of the
        model's tokens. Raises UserError.
        """
        assert settings.url is not None
        self._vocab = vocab
        self._url, self._settings = settings.url.rstrip("/"), settings
        self._model = settings.model
        self._running = asyncio.Semaphore(max(1, _CONCURRENCY // share))
        key, name = "", settings.api_key_variable
        if name is not None and not (key := os.environ.get(name, "")):
            raise UserError(f"teacher.api_key_variable: the variable {name} is not set; export it")
        self._http = HttpClient(key)

    async def score(self, t: Trajectory) -> None:
        """Set ``anchor`` of a trajectory, and with ``top_k`` its likeliest tokens.

        Raises ServerError, after retries, if the server gives none.
        """
        tokens = [*t.prompt.tolist(), *t.response.tolist()]

        async def ask() -> tuple[Floats, NDArray[np.int32], NDArray[np.float32]]:
            async with self._running:
                return await self._ask(tokens)

        values, top_ids, top_logps = await with_retries(ask, _RETRIES, _WAIT_SECONDS)
        start = len(t.prompt) - 1
        t.anchor, t.top_ids, t.top_logps = values[start:], top_ids[start:], top_logps[start:]

    async def check(self) -> str | None:
        """Ask for a few tokens; returns why the server cannot be used, None if it can."""
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await self._ask([1, 2, 3])
        except TimeoutError:
            return f"does not answer within {_CHECK_SECONDS:g} s"
        except ServerError as e:
            return str(e)
        return None

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's token ids of a text, without special ones; None if it has no such route."""
        body = {"model": await self._name(), "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._request(self._url.removesuffix("/v1") + "/tokenize", body, _MOST_BYTES)
        except ServerError:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) and all(isinstance(x, int) for x in tokens) else None

    async def close(self) -> None:
        """Disconnect."""
        await self._http.close()

    async def _ask(self, tokens: list[int]) -> tuple[Floats, NDArray[np.int32], NDArray[np.float32]]:
        """Log-prob of each token but the first, given those before it: float32 [len(tokens) - 1].

        And the likeliest tokens at each place, with their log-probs: [len(tokens) - 1, top_k]; [0, 0] if they
        are not asked for.
        """
        k = self._settings.top_k or 0
        body = {
            "model": await self._name(),
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
        }
        limit = _MOST_BYTES + _BYTES_PER_TOKEN * len(tokens) * (1 + k)
        answer = await self._request(f"{self._url}/completions", body, limit)
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            if rows is None:
                raise ServerError("gives no prompt_logprobs; use a vLLM server")
            if len(rows) != len(tokens):
                raise ServerError(f"gave log-probs of {len(rows)} tokens, not {len(tokens)}")
            values = [_log_prob(row[str(token)]) for row, token in zip(rows[1:], tokens[1:], strict=True)]
            ids, logps = _likeliest(rows[1:], k)
        except (LookupError, TypeError, ValueError, OverflowError):
            raise ServerError("answered with something else than log-probs of the tokens") from None
        if ids.max(initial=0) >= self._vocab:
            raise ServerError(f"gave token {ids.max()}, and the model has {self._vocab} tokens")
        return np.array(values, np.float32), ids, logps

    async def _name(self) -> str:
        if self._model is None:
            answer = await self._request(f"{self._url}/models", None, _MOST_BYTES)
            try:
                self._model = str(answer["data"][0]["id"])
            except (LookupError, TypeError):
                raise ServerError("lists no model; set teacher.model") from None
        return self._model

    async def _request(self, url: str, body: Any, limit: int) -> Any:
        return await self._http.request(url, body, seconds=_REQUEST_SECONDS, limit=limit)


def _likeliest(rows: list[dict[str, Any]], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k likeliest tokens of each place, by rank, and their log-probs. Raises as reading JSON does."""
    if not k:
        return np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    ids, logps = np.zeros((len(rows), k), np.int32), np.zeros((len(rows), k), np.float32)
    for place, row in enumerate(rows):
        best = sorted((entry["rank"], _token(text), _log_prob(entry)) for text, entry in row.items())
        if any(type(rank) is not int or rank < 1 for rank, *_ in best):
            raise TypeError
        if len(best) < k or best[k - 1][0] > k:
            raise ServerError(f"gave fewer than {k} of the likeliest tokens (teacher.top_k)")
        ids[place] = [token for _, token, _ in best[:k]]
        logps[place] = [logp for *_, logp in best[:k]]
    return ids, logps


def _token(text: str) -> int:
    if str(int(text)) != text or text[0] == "-":  # two texts of one number would be one token twice
        raise ValueError
    return int(text)


def _log_prob(entry: dict[str, Any]) -> float:
    value = entry["logprob"]
    if type(value) not in (int, float):  # no text, no bool
        raise TypeError
    if not _LEAST <= (number := float(value)) <= 0:
        raise ServerError("gave a log-prob that is above 0 or not finite")
    return number
