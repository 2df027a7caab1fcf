"""HTTP client of one vLLM engine, by unix socket or URL: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rpg_megatron.bridge.vllm.generate_route import GENERATE, SampledBytes
from rpg_megatron.bridge.vllm.liveness import CORE_HEALTH
from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.data.trajectory import NO_ROUTES, Floats, Routes, Tokens
from rpg_megatron.engine.command import KEEP_ALIVE_SECONDS
from rpg_megatron.engine.metrics import ROUTE, read_metrics
from rpg_megatron.engine.routes import check_routes, unpack_routes
from rpg_megatron.system.messages import ExpectedError

_CONNECT_SECONDS = 10.0
_FINAL_ONLY = 2  # vLLM's RequestOutputKind: one answer at the end instead of one per token


class EngineError(ExpectedError):
    """A request to an engine failed; the message names the engine."""


class EngineUnavailable(EngineError):
    """The engine is dead, hung or broken: retry after a restart, or on another engine."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One sampled response."""

    tokens: Tokens
    """Token ids, int32 [R], the end-of-sequence token included."""
    logprobs: Floats
    """Log-prob of each token under the distribution that it was sampled from, after temperature, top-p, top-k
    and min-p: float32 [R], nats. Empty if not requested.
    """
    finish: str
    """Finish reason: "stop" (end of sequence), "length" (truncated at the limit), or "abort" (interrupted by
    a weight update)."""
    version: int | None = None
    """Version of the weights that sampled the tokens, if the engine reports it."""
    routes: Routes = field(default_factory=lambda: NO_ROUTES)
    """The experts chosen for each token but the last, from ``routes_from`` on: uint8 or int16 [tokens, layers
    with experts, experts per token]. Empty if not requested.
    """


_DECODER = msgspec.msgpack.Decoder(list[SampledBytes])


class EngineClient:
    """Client of engine ``index``, for one event loop and any number of concurrent requests."""

    def __init__(
        self,
        index: int,
        address: Path | str,
        token: str,
        *,
        timeout: float,
        experts: ExpertShape | None = None,
    ):
        """address: path of a unix socket, or ``http://host:port``. timeout: seconds for a request. experts:
        of the model, if the engine returns the chosen experts; samples with log-probs then have ``routes``.
        """
        self.index, self._experts = index, experts
        self._timeout, self._address = timeout, address
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None

    async def generate(
        self,
        prompt_tokens: Sequence[int] | Tokens,
        *,
        n: int = 1,
        max_tokens: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
        top_k: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: bool = True,
        interruptible: bool = False,
        routes_from: int = 0,
    ) -> list[Sample]:
        """Sample ``n`` responses to one prompt; by default from the full distribution.

        Log-probs are those of the distribution after top_k and top_p. stop: texts that end a response;
        its tokens include them. Response i uses seed + i, so a group may be split over several requests.
        temperature 0 is greedy. interruptible: a weight update may end responses early; their finish reason
        is then "abort". routes_from: number of prompt tokens whose routes are not returned. Raises
        EngineUnavailable if the engine fails, has died, aborts the request, or exceeds the client's timeout;
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
            if self._experts is not None:
                sampling["routed_experts_prompt_start"] = routes_from
        if top_k is not None:
            sampling["top_k"] = top_k
        if stop:  # the engine searches the text, so it must detokenise
            sampling |= {"stop": list(stop), "include_stop_str_in_output": True, "detokenize": True}
        body = {"token_ids": [int(t) for t in prompt_tokens], "sampling_params": sampling}
        answer = await self._ask("POST", GENERATE, body, self._timeout)
        try:
            before = len(prompt_tokens) - routes_from if logprobs and self._experts is not None else None
            samples = self._samples(answer, logprobs, interruptible, before)
        except (msgspec.DecodeError, ValueError) as e:
            raise self._error(
                f"returned an answer that cannot be parsed ({type(e).__name__}: {e}): {answer[:200]!r}"
            ) from None
        if len(samples) != n:
            raise self._error(f"returned {len(samples)} responses instead of {n}")
        return samples

    def _samples(
        self, answer: bytes, logprobs: bool, interruptible: bool, before: int | None
    ) -> list[Sample]:
        """The responses of an answer, in the order of their index.

        logprobs: whether they were requested. before: number of prompt tokens with routes; None: routes were
        not requested.
        """
        samples = []
        for response in sorted(_DECODER.decode(answer), key=lambda response: response.index):
            tokens, values = _array(response.tokens, np.int32), _array(response.logprobs, np.float32)
            routes = None if before is None else unpack_routes(response.routes, response.routes_shape)
            if len(values) != (len(tokens) if logprobs else 0):
                raise self._error(f"returned {len(values)} log-probs of {len(tokens)} tokens")
            self._check_finish_reason(response.finish, len(tokens), interruptible)
            if not np.isfinite(values).all():
                raise self._error("returned a log-prob that is missing or not finite")
            sample = Sample(tokens, values, response.finish, response.version)
            if self._experts is not None and before is not None and routes is not None and len(tokens):
                try:
                    checked = check_routes(routes, before + len(tokens) - 1, self._experts)
                except ValueError as e:
                    raise self._error(f"returned {e}; set training.router_replay to off") from None
                sample = replace(sample, routes=checked)
            samples.append(sample)
        return samples

    def _check_finish_reason(self, finish: str, tokens: int, interruptible: bool) -> None:
        if finish not in ("stop", "length") and not (interruptible and finish == "abort"):
            raise EngineUnavailable(
                f"engine {self.index} ended a response with {finish!r} after {tokens} tokens"
            )

    async def post(self, path: str, json: Any | None = None, timeout: float | None = None) -> tuple[int, str]:
        """POST to any route; returns (status, text). Raises EngineUnavailable if there is no answer."""
        status, answer = await self._send("POST", path, json, self._timeout if timeout is None else timeout)
        return status, answer.decode(errors="replace")

    async def health(self, timeout: float = 5.0) -> bool:
        """Whether the server answers. Partly loaded engines answer too, and so do engines that hang."""
        return await self._is_ok("/health", timeout)

    async def is_progressing(self, timeout: float) -> bool:
        """Whether the engine core answers within ``timeout`` seconds, or its workers make progress in a
        weight update or, on a CPU, in a step. Also True for an engine that is asleep or paused.
        """
        return await self._is_ok(CORE_HEALTH, timeout)

    async def metrics(self, timeout: float) -> dict[str, float]:
        """The metrics of ``engine/metrics.py`` by name. Raises EngineError if the engine does not answer."""
        return read_metrics((await self._ask("GET", ROUTE, None, timeout)).decode())

    async def wait_ready(self, timeout: float) -> None:
        """Wait until the engine answers. Raises EngineError after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while not await self.health():
            if time.monotonic() > end:
                raise self._error(f"did not answer within {timeout:.0f} s; see its log")
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Close the connections; pending requests fail."""
        if self._http is not None:
            await self._http.close()

    async def _is_ok(self, path: str, timeout: float) -> bool:
        try:
            status, _ = await self._send("GET", path, None, timeout)
        except EngineError:
            return False
        return status == 200

    async def _ask(self, method: str, path: str, body: Any | None, timeout: float) -> bytes:
        status, answer = await self._send(method, path, body, timeout)
        if status != 200:
            kind = EngineUnavailable if status >= 500 else EngineError
            raise kind(f"engine {self.index} answered {path} with status {status}: {_message(answer)}")
        return answer

    async def _send(self, method: str, path: str, body: Any | None, timeout: float) -> tuple[int, bytes]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if data is not None else None
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session().request(
                method, path, data=data, headers=headers, timeout=limit
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            problem = "does not listen on its socket: it has ended or not started yet; see its log"
        except TimeoutError:
            problem = f"did not answer {path} within {timeout:.0f} s; see its log"
        except aiohttp.ClientError as e:
            problem = f"aborted {path} ({type(e).__name__}: {e}); see its log"
        raise EngineUnavailable(f"engine {self.index} {problem}")

    def _session(self) -> aiohttp.ClientSession:
        """The HTTP session, created with the first request because it needs the event loop."""
        if self._http is None:
            # Close idle connections well before the server does (engine/command.py): otherwise a request
            # could be sent on a connection that the server is closing.
            keep: dict[str, Any] = {"limit": 0, "keepalive_timeout": KEEP_ALIVE_SECONDS / 10}
            unix = isinstance(self._address, Path)
            connector: aiohttp.BaseConnector = (
                aiohttp.UnixConnector(str(self._address), **keep) if unix else aiohttp.TCPConnector(**keep)
            )
            base = "http://engine" if unix else str(self._address)
            self._http = aiohttp.ClientSession(base, connector=connector, headers=self._headers)
        return self._http

    def _error(self, problem: str) -> EngineError:
        return EngineError(f"engine {self.index} {problem}")


def _array(values: bytes, dtype: type[Any]) -> Any:
    """The values as an array: a copy, since a view is read-only and would keep the whole answer in memory."""
    return np.frombuffer(values, dtype).copy()


def _message(answer: bytes) -> str:
    """The message in vLLM's error object; otherwise the start of the text."""
    try:
        return str(json.loads(answer)["error"]["message"])[:1000]
    except (ValueError, KeyError, TypeError):
        return answer[:1000].decode(errors="replace")
