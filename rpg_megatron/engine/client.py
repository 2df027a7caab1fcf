"""HTTP client of one vLLM engine, by unix socket or URL: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rpg_megatron.bridge.vllm.liveness import CORE_HEALTH
from rpg_megatron.data.trajectory import Floats, Tokens
from rpg_megatron.engine.command import KEEP_ALIVE_SECONDS

_FINAL_ONLY = 2  # vLLM's RequestOutputKind: one answer at the end instead of one per token


class EngineError(RuntimeError):
    """A request to an engine failed; the message names the engine."""


class EngineGone(EngineError):
    """The engine is dead, hung or broken: retry after a restart, or on another engine."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One sampled response."""

    tokens: Tokens
    """Token ids, int32 [R], the end-of-sequence token included."""
    logprobs: Floats
    """Log-prob of each token under the sampling distribution, temperature included: float32 [R], nats. Empty
    if not requested.
    """
    finish: str
    """Finish reason: "stop" (end of sequence) or "length" (truncated at the limit)."""


class EngineClient:
    """Client of engine ``index``, for one event loop and any number of concurrent requests."""

    def __init__(self, index: int, address: Path | str, token: str, *, timeout: float):
        """address: a socket's path, or ``http://host:port``."""
        self.index = index
        self._timeout = timeout
        socket = str(address) if isinstance(address, Path) else None
        # Idle connections are closed here well before the server closes them (engine/command.py): otherwise a
        # request could be sent on a connection that the server is closing.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_SECONDS / 10
        )
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket, limits=limits),
            base_url="http://engine" if isinstance(address, Path) else address,
            headers={"Authorization": f"Bearer {token}"},
        )

    async def generate(
        self,
        prompt_tokens: Sequence[int] | Tokens,
        *,
        n: int = 1,
        max_tokens: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        logprobs: bool = True,
    ) -> list[Sample]:
        """Sample ``n`` responses to one prompt, without top-k; top_p 1 is the full distribution.

        Response i uses seed + i, so a group may be split over several requests. temperature 0 is greedy.
        Raises EngineGone if the engine fails, is gone, aborts the request, or exceeds the client's timeout,
        EngineError if it refuses the request or its answer is invalid.
        """
        sampling: dict[str, Any] = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "stop_token_ids": list(stop_token_ids),
            "detokenize": False,
            "output_kind": _FINAL_ONLY,
        }
        if logprobs:
            sampling["logprobs"] = 0  # of the sampled token only
        body = {"token_ids": [int(t) for t in prompt_tokens], "sampling_params": sampling}
        text = await self._ask("POST", "/inference/v1/generate", body, self._timeout)
        try:
            choices = json.loads(text)["choices"]
            samples = [self._sample(choice, logprobs) for choice in sorted(choices, key=lambda c: c["index"])]
        except (ValueError, KeyError, TypeError) as e:
            raise self._error(
                f"returned an answer that cannot be parsed ({type(e).__name__}: {e}): {text[:200]}"
            ) from None
        if len(samples) != n:
            raise self._error(f"returned {len(samples)} responses instead of {n}")
        return samples

    def _sample(self, choice: dict[str, Any], logprobs: bool) -> Sample:
        tokens = np.asarray(choice["token_ids"], np.int32)
        finish = choice["finish_reason"]
        if finish not in ("stop", "length"):
            raise EngineGone(
                f"engine {self.index} ended a response with {finish!r} after {len(tokens)} tokens"
            )
        if not logprobs:
            return Sample(tokens, np.zeros(0, np.float32), finish)
        content = choice["logprobs"]["content"]
        # Verify that each log-prob is of the sampled token: the engine names it "token_id:17".
        if [entry["token"] for entry in content] != [f"token_id:{t}" for t in choice["token_ids"]]:
            raise self._error("returned log-probs of other tokens than it sampled")
        values = np.asarray([entry["logprob"] for entry in content], np.float32)
        if not np.all(np.isfinite(values)) or np.any(values <= -9999.0):  # -9999: missing in vLLM
            raise self._error("returned a log-prob that is missing or not finite")
        return Sample(tokens, values, finish)

    async def post(self, path: str, json: Any | None = None, timeout: float | None = None) -> tuple[int, str]:
        """POST to any route; returns (status, text) for any status. Raises EngineGone without an answer."""
        return await self._send("POST", path, json, self._timeout if timeout is None else timeout)

    async def health(self, timeout: float = 5.0) -> bool:
        """Whether the server answers. A partly loaded engine answers too, and so does one that hangs."""
        return await self._is_well("/health", timeout)

    async def progresses(self, timeout: float) -> bool:
        """Whether the engine core answers within ``timeout`` seconds, or its workers make progress: with a
        weight update or, on a CPU, with a step. Also True for an engine that is asleep or paused.
        """
        return await self._is_well(CORE_HEALTH, timeout)

    async def wait_ready(self, timeout: float) -> None:
        """Wait until the engine answers. Raises EngineError after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while not await self.health():
            if time.monotonic() > end:
                raise self._error(f"did not answer within {timeout:.0f} s; see its log")
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Close the connections; pending requests fail."""
        await self._http.aclose()

    async def _is_well(self, path: str, timeout: float) -> bool:
        try:
            status, _ = await self._send("GET", path, None, timeout)
        except EngineError:
            return False
        return status == 200

    async def _ask(self, method: str, path: str, body: Any | None, timeout: float) -> str:
        status, text = await self._send(method, path, body, timeout)
        if status != 200:
            kind = EngineGone if status >= 500 else EngineError
            raise kind(f"engine {self.index} answered {path} with status {status}: {_message(text)}")
        return text

    async def _send(self, method: str, path: str, body: Any | None, timeout: float) -> tuple[int, str]:
        try:
            answer = await self._http.request(
                method, path, json=body, timeout=httpx.Timeout(timeout, connect=10.0)
            )
        except httpx.ConnectError:
            problem = "does not listen on its socket: it is gone or not started yet; see its log"
        except httpx.TimeoutException:
            problem = f"did not answer {path} within {timeout:.0f} s; see its log"
        except httpx.HTTPError as e:
            problem = f"aborted {path} ({type(e).__name__}: {e}); see its log"
        else:
            return answer.status_code, answer.text
        raise EngineGone(f"engine {self.index} {problem}")

    def _error(self, what: str) -> EngineError:
        return EngineError(f"engine {self.index} {what}")


def _message(text: str) -> str:
    """The message in vLLM's error object, else the start of the text."""
    try:
        return str(json.loads(text)["error"]["message"])[:1000]
    except (ValueError, KeyError, TypeError):
        return text[:1000]
