"""HTTP server in a sampler worker at which any client samples the turns of a response.

``POST /v1/chat/completions`` is OpenAI's API, ``POST /inference/v1/generate`` vLLM's with token ids,
``GET /v1/models`` both. The bearer token says which response a request belongs to; or it is the first part of
that, and the header X-Session-ID the second. A client sees neither weight updates nor failed engines; what it
asks for cannot change how the policy is sampled. Messages are turned into tokens in ``chat.py``. The server
listens on this machine's loopback address.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.config.files import read_json
from rpg_megatron.data.chat_template import ChatRenderer
from rpg_megatron.data.prompts import TextCodec, load_tokenizer
from rpg_megatron.engine.tool_calls import ToolCallParser
from rpg_megatron.rollout.chat import Chat, ChatFormat, Message
from rpg_megatron.rollout.conversation import Conversation, RetokenizedError
from rpg_megatron.rollout.episode import TokenLimit, Turn
from rpg_megatron.rollout.gateway_connections import TIMES, Connections, is_reset, warn_once, write_out
from rpg_megatron.rollout.gateway_requests import (
    CHAT_FIELDS,
    PLAIN,
    SAMPLING_FIELDS,
    TOKEN_FIELDS,
    RefusedRequestError,
    TokenId,
    count_in,
    messages_in,
    object_in,
    refuse,
    tools_in,
)
from rpg_megatron.system.foreign_input import ForeignInputError

CHAT = "chat.json"
"""File in the work folder: source and variables of the model's chat template, and its source for tools."""
_LARGEST, _SPARE, _ESCAPED = 64 << 20, 1 << 20, 16
"""Most bytes of a request; and those that one may have beside this many times the bytes that its tokens can
stand for: a template leaves out a part of the messages, and JSON escapes characters."""


@dataclass(eq=False)
class _Session:
    conversation: Conversation
    chat: Chat | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A response has one turn at a time."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    answered: tuple[socket.socket, object, Chat | None] | None = None
    """Of the last turn that was written: the connection, the turn, and its chat."""

    def lose(self) -> None:
        """Remove the last turn, which has not reached its client."""
        self.conversation.discard()
        self.conversation.counts["undelivered"] = self.conversation.counts.get("undelivered", 0.0) + 1
        warn_once("an answer of the gateway did not reach its client; its turn is left out (env/undelivered)")

    def settle(self) -> None:
        """Remove the last turn if its connection was reset: its client has left without reading it."""
        if self.answered is None:
            return
        (connection, turn, chat), self.answered = self.answered, None
        with connection:
            if is_reset(connection) and turn is self.conversation.turn:
                self.conversation.reopen()
                self.lose()
                if chat:
                    chat.forget()


class Gateway:
    """The server, for one event loop."""

    def __init__(self, settings: Settings, codec: TextCodec, work: Path, stops: Sequence[int]):
        """work: folder with ``CHAT``. stops: tokens that end a turn."""
        self._settings, self._codec, self._work, self._stops = settings, codec, work, frozenset(stops)
        self._sessions: dict[str, _Session] = {}
        self._secret = secrets.token_urlsafe(24)
        """First part of all keys; the second part is a response's name, which is no secret."""
        self._form: ChatFormat | None = None
        self._connections: Connections | None = None
        self._starting = asyncio.Lock()
        self._longest = 1
        """Most bytes of a token."""
        self.base_url = ""
        """URL of the OpenAI API; valid after ``start``."""

    async def start(self) -> None:
        """Start to listen, if it does not yet."""
        async with self._starting:
            if self._connections is not None:
                return
            self._form = await asyncio.to_thread(self._load_format)
            application = web.Application(client_max_size=_LARGEST, middlewares=[_as_json])
            application.router.add_get("/v1/models", self._models)
            application.router.add_post("/v1/chat/completions", self._answer)
            application.router.add_post("/inference/v1/generate", self._answer)
            quiet = logging.getLogger(f"{__name__}.http")  # it has a record for each malformed request
            quiet.disabled = True
            runner = web.AppRunner(
                application, handler_cancellation=True, access_log=None, logger=quiet, **TIMES
            )
            await runner.setup()
            assert runner.server is not None
            self._connections = Connections(runner.server)
            self.base_url = f"http://{await self._connections.listen()}/v1"

    def close(self) -> None:
        """Stop to listen, and end all requests."""
        for key in [*self._sessions]:
            self.end(key)
        if self._connections is not None:
            self._connections.close()
        if self._form is not None:
            self._form.close()

    def open(self, conversation: Conversation) -> str:
        """The key with which clients sample turns of a response."""
        key = f"{self._secret}.{secrets.token_urlsafe(16)}"
        self._sessions[key] = _Session(conversation)
        return key

    def end(self, key: str, _: Any = None) -> None:
        """Refuse further requests with a key, and end those that wait."""
        if (session := self._sessions.pop(key, None)) is None:
            return
        session.settle()
        if session.requests and session.conversation.discard():
            session.lose()
        for request in session.requests:
            request.cancel()

    def _bytes_of(self, token: int) -> int:
        try:
            return len(self._codec.decode_all([token]).encode())
        except Exception:  # a slow tokenizer, of a token that only the model has
            return 0

    def _load_format(self) -> ChatFormat | None:
        """None: the model has no chat template."""
        vocab = read_model_shape(self._settings.model.path).vocab_size
        # A decoder may leave out a space at the beginning of a text.
        self._longest = 3 + max(map(self._bytes_of, range(vocab)))
        file = self._work / CHAT
        if not file.exists():
            return None
        name = self._settings.rollout.tool_call_parser
        parser = ToolCallParser(name, load_tokenizer(self._settings.model.path)) if name else None
        template, variables, for_tools = read_json(file)
        renderer = ChatRenderer(template, variables)
        tools_renderer = renderer if for_tools == template else ChatRenderer(for_tools, variables)
        thinks = "</think>" in template + for_tools
        reads = any(
            re.search(r"\btools\b", code) for code in re.findall(r"{[{%].*?[%}]}", for_tools, re.DOTALL)
        )
        return ChatFormat(renderer, tools_renderer, self._codec, self._stops, parser, thinks, reads)

    # -- requests --------------------------------------------------------------------------------------------

    def _session(self, request: web.Request) -> _Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if (
            key == self._secret
        ):  # of a client with one connection for many responses, which may add to the name
            key += "." + request.headers.get("X-Session-ID", "").partition(".")[0]
        session = self._sessions.get(key) if scheme == "Bearer" else None
        if session is None:
            message = "no response that is being sampled has this key; use api_key of the episode's task"
            raise RefusedRequestError(message, "invalid_api_key", 401)
        assert self._connections is not None
        self._connections.admit(request.protocol)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        try:
            limit = self._session(request).conversation.limit
        except RefusedRequestError as e:
            return _refusal(e)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rpg_megatron"}
        model["max_model_len"] = limit
        return web.json_response({"object": "list", "data": [model]})

    @property
    def _model(self) -> str:
        return self._settings.model.path.name

    async def _answer(self, request: web.Request) -> web.Response:
        """Both kinds of requests; an error is an object as OpenAI's API has it."""
        task = asyncio.current_task()
        assert task is not None
        try:
            session = self._session(request)
        except RefusedRequestError as e:
            return _refusal(e)
        counts = session.conversation.counts
        counts |= dict.fromkeys(("retokenized", "unparsed_calls", "undelivered"), 0.0) | counts
        session.requests.add(task)
        try:
            async with session.lock:  # before the body is read: a response has one in memory
                session.settle()
                return await self._turn(session, request)
        except RefusedRequestError as e:
            return _refusal(e)
        except RetokenizedError as e:
            counts["retokenized"] += 1
            return _refusal(RefusedRequestError(str(e), "retokenized", 409))
        except TokenLimit as e:
            return _refusal(RefusedRequestError(str(e), "context_length_exceeded"))
        except (ValueError, ForeignInputError, web.RequestPayloadError) as e:
            return _refusal(RefusedRequestError(str(e)))
        finally:
            session.requests.discard(task)

    async def _turn(self, session: _Session, request: web.Request) -> web.Response:
        """The answer, which is written: a turn whose answer was not written out is not in the response."""
        conversation, before = session.conversation, session.conversation.turn
        try:
            body = object_in(await self._read(request, conversation))
            chat = request.path.endswith("/completions")
            answer = await (self._chat if chat else self._tokens)(session, body)
            response = web.json_response(answer, dumps=lambda value: msgspec.json.encode(value).decode())
            connection = await write_out(request, response)
        except BaseException:
            if conversation.turn is not before:
                session.lose()
            raise
        conversation.confirm()
        if chat and session.chat:
            session.chat.confirm()
        if connection is not None:
            session.answered = connection, conversation.turn, session.chat if chat else None
        return response

    async def _read(self, request: web.Request, conversation: Conversation) -> bytes:
        """The body. Raises TokenLimit if it has far more bytes than the tokens of a response stand for."""
        most, body = min(_LARGEST, _SPARE + _ESCAPED * conversation.limit * self._longest), bytearray()
        async for part in request.content.iter_any():
            body += part
            if len(body) > most or (request.content_length or 0) > most:
                raise conversation.full(f"a request of more than {most} bytes")
        return bytes(body)

    async def _chat(self, session: _Session, body: Message) -> Message:
        self._check_fields(session, body, CHAT_FIELDS)
        if self._form is None:
            refuse("the model's tokenizer has no chat template; send token ids to /inference/v1/generate")
        conversation = session.conversation
        messages, tools = messages_in(body), tools_in(body)
        if len(messages) + len(tools) > conversation.limit:
            raise conversation.full(f"{len(messages)} messages and {len(tools)} tools")
        await self._form.check_tools(tools)
        chat = session.chat = session.chat or Chat(self._form)
        messages, text, before = await chat.prompt(messages, tools)
        if len(text.encode()) > conversation.limit * self._longest:
            raise conversation.full(f"a chat of {len(text)} characters")
        tokens = await chat.encode(text, before)
        name = next((n for n in ("max_completion_tokens", "max_tokens") if body.get(n) is not None), "")
        turn = await conversation.sample(tokens, count_in(body.get(name), name), branch=True)
        message, failed = chat.add(messages, tools, turn, text)
        conversation.counts["unparsed_calls"] += failed
        choice: Message = {"index": 0, "message": message, "finish_reason": turn.finish, "logprobs": None}
        if "tool_calls" in message and turn.finish == "stop":
            choice["finish_reason"] = "tool_calls"
        if body.get("logprobs"):
            texts = (self._codec.decode_all([token]) for token in turn.tokens)
            choice["logprobs"] = _logprobs(texts, turn)
        answer: Message = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "usage": _usage(turn),
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"], choice["token_ids"] = turn.before.tolist(), turn.sampled.tolist()
        return answer

    async def _tokens(self, session: _Session, body: Message) -> Message:
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            refuse("sampling_params: an object is needed")
        self._check_fields(session, body, TOKEN_FIELDS)
        self._check_fields(session, sampling, SAMPLING_FIELDS)
        stops = sampling.get("stop_token_ids") or []
        if not isinstance(stops, list):
            refuse("stop_token_ids: a list is needed")
        more = [token for token in stops if token not in [*self._stops]]
        if more:
            refuse(f"stop_token_ids: {more[0]} ends no turn of the run; add it to rollout.stop_token_ids")
        limit = count_in(sampling.get("max_tokens"), "max_tokens")
        try:
            tokens = np.array(msgspec.convert(body.get("token_ids"), list[TokenId]), np.int32)
        except msgspec.ValidationError:
            refuse("token_ids: a list of integers from 0 is needed")
        if len(tokens) > session.conversation.limit:
            raise session.conversation.full(f"{len(tokens)} tokens")
        session.conversation.check_tokens(tokens)
        turn = await session.conversation.sample(tokens, limit, branch=True)
        choice: Message = {"index": 0, "token_ids": turn.sampled.tolist(), "finish_reason": turn.finish}
        choice["logprobs"] = _logprobs((f"token_id:{token}" for token in turn.tokens), turn)
        return {"request_id": body.get("request_id") or secrets.token_hex(12), "choices": [choice]}

    def _check_fields(self, session: _Session, body: Message, fields: set[str]) -> None:
        """Raise RefusedRequestError for fields that would change how the policy is sampled."""
        task = session.conversation.task
        only = PLAIN | {"temperature": task.temperature, "top_p": task.top_p, "min_p": 0.0}
        only["top_k"] = task.top_k or -1
        for name, value in body.items():
            if value is None or name in fields:
                continue
            if name not in only:
                refuse(f"{name}: the gateway has no such field; leave it out")
            if value != only[name]:
                refuse(f"{name}: {value!r} is not possible; the run has {only[name]!r}; leave it out")


def _refusal(error: RefusedRequestError) -> web.Response:
    body = {"error": {"message": str(error), "type": "invalid_request_error", "code": error.code}}
    return web.json_response(body, status=error.status)


@web.middleware
async def _as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as e:  # such as of an unknown path
        return _refusal(RefusedRequestError(e.reason, status=e.status))
    except ConnectionError:  # the client has left
        raise
    except Exception as e:
        place = traceback.extract_tb(e.__traceback__)[-1]
        warn_once(f"the gateway failed: {type(e).__name__}: {e} at {place.filename}:{place.lineno}")
        return _refusal(RefusedRequestError(f"the gateway failed: {type(e).__name__}", "internal", 500))


def _logprobs(texts: Iterable[str], turn: Turn) -> Message | None:
    """None: an evaluation has none."""
    if not len(turn.logprobs):
        return None
    content = [
        {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
        for text, value in zip(texts, turn.logprobs.tolist(), strict=True)
    ]
    return {"content": content}


def _usage(turn: Turn) -> dict[str, int]:
    before, sampled = len(turn.before), len(turn.sampled)
    return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}
