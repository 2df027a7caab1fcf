"""HTTP server in a sampler worker at which any client samples the turns of a response.

``POST /v1/chat/completions`` is OpenAI's API, ``POST /inference/v1/generate`` vLLM's with token ids,
``GET /v1/models`` both. The bearer token says which response a request belongs to; or it is the first part of
that, and the header X-Session-ID the second. A client sees neither weight updates nor failed engines; what it
asks for cannot change how the policy is sampled. Messages are turned into tokens in ``chat.py``. The server
listens on this machine's loopback address.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
from aiohttp import web

from rpg_megatron.config import Settings
from rpg_megatron.config.files import read_json
from rpg_megatron.data.chat_template import ChatRenderer
from rpg_megatron.data.prompts import TextCodec, load_tokenizer
from rpg_megatron.engine.tool_calls import ToolCallParser
from rpg_megatron.rollout.chat import Chat, ChatFormat, Message, Tools
from rpg_megatron.rollout.conversation import Conversation, RetokenizedError
from rpg_megatron.rollout.episode import TokenLimit, Turn
from rpg_megatron.system.foreign_input import ForeignInputError

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
CHAT = "chat.json"
"""File in the work folder: source and variables of the model's chat template."""
_LARGEST = 64 << 20
"""Maximum bytes of a request."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_CHAT_FIELDS = {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens"}
_CHAT_FIELDS |= {"logprobs", "return_token_ids", "user", "metadata", "store", "seed"}
_TOKEN_FIELDS = {"model", "token_ids", "sampling_params", "request_id"}
_SAMPLING_FIELDS = {"max_tokens", "logprobs", "seed", "detokenize", "skip_special_tokens", "output_kind"}
_SAMPLING_FIELDS |= {"stop_token_ids", "spaces_between_special_tokens"}
_PLAIN = {"n": 1, "stream": False, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
_PLAIN |= {"top_logprobs": 0, "parallel_tool_calls": True, "ignore_eos": False, "min_tokens": 0}
"""Fields that may only have these values."""


class RefusedRequestError(Exception):
    """A request that the gateway does not answer; the message says why."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(eq=False)
class _Session:
    conversation: Conversation
    chat: Chat | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A response has one turn at a time."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)


class Gateway:
    """The server, for one event loop."""

    def __init__(self, settings: Settings, codec: TextCodec, work: Path, stops: Sequence[int]):
        """work: folder with ``CHAT``. stops: tokens that end a turn."""
        self._settings, self._codec, self._work, self._stops = settings, codec, work, frozenset(stops)
        self._sessions: dict[str, _Session] = {}
        self._secret = secrets.token_urlsafe(24)
        """First part of all keys; the second part is a response's name, which is no secret."""
        self._form: ChatFormat | None = None
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self.base_url = ""
        """URL of the OpenAI API; valid after ``start``."""

    async def start(self) -> None:
        """Start to listen, if it does not yet."""
        async with self._starting:
            if self._server is not None:
                return
            self._form = await asyncio.to_thread(self._load_format)
            application = web.Application(client_max_size=_LARGEST)
            application.router.add_get("/v1/models", self._models)
            application.router.add_post("/v1/chat/completions", self._answer)
            application.router.add_post("/inference/v1/generate", self._answer)
            runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
            await runner.setup()
            assert runner.server is not None
            self._server = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", 0)
            host, port = self._server.sockets[0].getsockname()
            self.base_url = f"http://{host}:{port}/v1"

    def close(self) -> None:
        """Stop to listen, and end all requests."""
        for key in [*self._sessions]:
            self.end(key)
        if self._server is not None:
            self._server.close()
        if self._form is not None:
            self._form.renderer.close()

    def open(self, conversation: Conversation) -> str:
        """The key with which clients sample turns of a response."""
        key = f"{self._secret}.{secrets.token_urlsafe(16)}"
        self._sessions[key] = _Session(conversation)
        return key

    def end(self, key: str, _: Any = None) -> None:
        """Refuse further requests with a key, and end those that wait."""
        session = self._sessions.pop(key, None)
        for request in session.requests if session else ():
            request.cancel()

    def _load_format(self) -> ChatFormat | None:
        """None: the model has no chat template."""
        file = self._work / CHAT
        if not file.exists():
            return None
        name = self._settings.rollout.tool_call_parser
        parser = ToolCallParser(name, load_tokenizer(self._settings.model.path)) if name else None
        template, variables = read_json(file)
        renderer = ChatRenderer(template, variables)
        return ChatFormat(renderer, self._codec, self._stops, parser, "</think>" in template)

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
        return session

    async def _models(self, request: web.Request) -> web.Response:
        try:
            task = self._session(request).conversation.task
        except RefusedRequestError as e:
            return _refusal(e)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rpg_megatron"}
        model["max_model_len"] = len(task.prompt) + task.max_tokens
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
            counts = session.conversation.counts
            counts |= {"retokenized": 0.0, "unparsed_calls": 0.0} | counts
            session.requests.add(task)
            try:
                body = _object_in(await request.read())
                async with session.lock:
                    chat = request.path.endswith("/completions")
                    answer = await (self._chat if chat else self._tokens)(session, body)
            finally:
                session.requests.discard(task)
        except RefusedRequestError as e:
            return _refusal(e)
        except RetokenizedError as e:
            counts["retokenized"] += 1
            return _refusal(RefusedRequestError(str(e), "retokenized", 409))
        except TokenLimit as e:
            return _refusal(RefusedRequestError(str(e), "context_length_exceeded"))
        except (ValueError, ForeignInputError) as e:
            return _refusal(RefusedRequestError(str(e)))
        return web.json_response(answer, dumps=lambda value: msgspec.json.encode(value).decode())

    async def _chat(self, session: _Session, body: Message) -> Message:
        self._check_fields(session, body, _CHAT_FIELDS)
        if self._form is None:
            _refuse("the model's tokenizer has no chat template; send token ids to /inference/v1/generate")
        messages, tools = _messages_in(body), _tools_in(body)
        if self._form.parser and tools:
            self._form.parser.check(tools)
        chat = session.chat = session.chat or Chat(self._form)
        tokens, text = await chat.prompt(messages, tools)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        turn = await session.conversation.generate(tokens, _count(limit, "max_tokens"), branch=True)
        message, failed = chat.add(messages, tools, turn, text)
        session.conversation.counts["unparsed_calls"] += failed
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
            _refuse("sampling_params: an object is needed")
        self._check_fields(session, body, _TOKEN_FIELDS)
        self._check_fields(session, sampling, _SAMPLING_FIELDS)
        stops = sampling.get("stop_token_ids") or []
        if not isinstance(stops, list):
            _refuse("stop_token_ids: a list is needed")
        more = [token for token in stops if token not in [*self._stops]]
        if more:
            _refuse(f"stop_token_ids: {more[0]} ends no turn of the run; add it to rollout.stop_token_ids")
        limit = _count(sampling.get("max_tokens"), "max_tokens")
        try:
            tokens = np.array(msgspec.convert(body.get("token_ids"), list[TokenId]), np.int32)
        except msgspec.ValidationError:
            _refuse("token_ids: a list of integers from 0 is needed")
        session.conversation.check_tokens(tokens)
        turn = await session.conversation.generate(tokens, limit, branch=True)
        choice: Message = {"index": 0, "token_ids": turn.sampled.tolist(), "finish_reason": turn.finish}
        choice["logprobs"] = _logprobs((f"token_id:{token}" for token in turn.tokens), turn)
        return {"request_id": body.get("request_id") or secrets.token_hex(12), "choices": [choice]}

    def _check_fields(self, session: _Session, body: Message, fields: set[str]) -> None:
        """Raise RefusedRequestError for fields that would change how the policy is sampled."""
        task = session.conversation.task
        only = _PLAIN | {"temperature": task.temperature, "top_p": task.top_p, "min_p": task.min_p}
        only["top_k"] = task.top_k or -1
        for name, value in body.items():
            if value is None or name in fields:
                continue
            if name not in only:
                _refuse(f"{name}: the gateway has no such field; leave it out")
            if value != only[name]:
                _refuse(f"{name}: {value!r} is not possible; the run has {only[name]!r}; leave it out")


def _refuse(message: str) -> NoReturn:
    raise RefusedRequestError(message)


def _refusal(error: RefusedRequestError) -> web.Response:
    body = {"error": {"message": str(error), "type": "invalid_request_error", "code": error.code}}
    return web.json_response(body, status=error.status)


def _object_in(body: bytes) -> Message:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as e:
        _refuse(f"the request is not valid JSON ({e})")
    if not isinstance(value, dict):
        _refuse("the request is no JSON object")
    return value


def _messages_in(body: Message) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        _refuse("messages: a list of at least one message is needed")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            _refuse(f"messages[{place}]: an object with a role of {', '.join(sorted(_ROLES))} is needed")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not (content is None or isinstance(content, str | list)) or not all(map(_is_text, parts)):
            _refuse(f"messages[{place}].content: only text is possible")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            _refuse(f"messages[{place}].tool_calls: calls of functions with name and arguments are needed")
    return messages


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and {"name", "arguments"} <= function.keys()


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _tools_in(body: Message) -> Tools:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        _refuse(f"tool_choice: {choice!r} is not possible; the policy chooses (auto), or has no tools (none)")
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        _refuse("tools: a list of functions with a name is needed")
    return [] if choice == "none" else tools


def _count(value: Any, name: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        _refuse(f"{name}: {value!r} is no number of tokens")
    return value


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
