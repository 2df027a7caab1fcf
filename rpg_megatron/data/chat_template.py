"""Renders chats with a model's chat template, which is a program, in a process that can reach nothing.

Jinja's sandbox limits what a template may call, but neither its time nor its memory, and its guards have been
passed before. The environment is that of transformers (``render_jinja_template``), without torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import batched
from typing import Annotated, Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import msgspec

from rpg_megatron.system.foreign_input import ForeignInputError, read_foreign

_READER = "rpg_megatron.data.chat_template:render"
_KEPT_READER = "rpg_megatron.data.chat_template:render_each"
_STARTED = datetime.now()
"""The time that templates get, so that a process renders a chat to the same text each time."""
_AT_ONCE = 100
_SECONDS, _MEMORY = 60.0, 1 << 30
"""Limits: for a hundred chats, each of which takes less than a millisecond."""

_LONGEST, _EXPANSION = 1 << 16, 10
"""A template may add this many characters to a message, and repeat it so often."""
Rendered = tuple[str, Annotated[str, msgspec.Meta(max_length=1000)]]
"""A text, and empty; or empty, and why the template fails."""


def render_chats(
    template: str,
    variables: dict[str, Any],
    chats: Sequence[list[dict[str, Any]]],
    own: Sequence[dict[str, Any]] | None = None,
) -> Iterator[Rendered]:
    """Render each chat. variables: of the template, besides ``messages``; own: further ones of each chat.

    Raises ForeignInputError if the template is not valid, or takes too long or too much memory.
    """
    pairs = list(zip(chats, own or [{}] * len(chats), strict=True))
    argument = [template, variables, pairs, _STARTED.isoformat()]
    limit = sum(
        _LONGEST * len(chat) + _EXPANSION * len(msgspec.msgpack.encode([chat, v])) for chat, v in pairs
    )
    count, remaining = math.ceil(len(chats) / _AT_ONCE), len(chats)
    for chunk in read_foreign(
        _READER, [], argument, list[Rendered], memory=_MEMORY, seconds=_SECONDS, values=count
    ):
        limit -= sum(len(text) for text, _ in chunk)
        remaining -= len(chunk)
        if limit < 0:
            raise ForeignInputError("its texts are far longer than the messages")
        if remaining < 0:
            break
        yield from chunk
    if remaining:
        raise ForeignInputError("its texts are not as many as the chats")


class ChatRenderer:
    """Renders one chat after another in a child process that it keeps. For one event loop."""

    def __init__(self, template: str, variables: dict[str, Any]):
        """variables: of the template, besides ``messages``; a call may replace some."""
        self._template, self._variables = template, variables
        # One thread: it must live as long as the child, which renders one chat at a time.
        self._thread = ThreadPoolExecutor(1, "chat template")
        self._rendered: Iterator[Rendered] | None = None
        self._pipe = -1

    async def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """The text of a chat. Raises ForeignInputError, also if the template refuses the messages."""
        request = msgspec.msgpack.encode((variables, list(messages)))
        limit = _LONGEST + _EXPANSION * len(request)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, request, limit)

    def close(self) -> None:
        """End the child."""
        self._thread.submit(self._end)
        self._thread.shutdown()

    def _render(self, request: bytes, limit: int) -> str:
        try:
            if self._rendered is None:
                self._start()
            text, error = self._send(request)
        except BaseException:
            self._end()
            raise
        if error:
            raise ForeignInputError(error)
        if len(text) > limit:
            raise ForeignInputError("its text is far longer than the messages")
        return text

    def _send(self, request: bytes) -> Rendered:
        assert self._rendered is not None
        frame = memoryview(struct.pack(">I", len(request)) + request)
        try:
            while frame:
                frame = frame[os.write(self._pipe, frame) :]
            return next(self._rendered)
        except (BrokenPipeError, StopIteration):
            raise ForeignInputError("its process has ended") from None

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        with os.fdopen(reading, "rb") as requests:  # only the child has it then: its death is noticed
            argument = [self._template, self._variables, _STARTED.isoformat()]
            self._rendered = read_foreign(
                _KEPT_READER, [requests], argument, Rendered, memory=_MEMORY, seconds=_SECONDS
            )
            next(self._rendered)

    def _end(self) -> None:
        rendered, self._rendered = self._rendered, None
        if rendered is not None:
            with contextlib.suppress(OSError):
                os.close(self._pipe)
            rendered.close()  # type: ignore[attr-defined]  # a generator


# -- in the child process ------------------------------------------------------------------------------------


def prepare() -> None:
    """Load what rendering loads late."""
    source = "{{ strftime_now('%d %b') }}{{ messages | tojson }}{% generation %}{% endgeneration %}"
    now = _STARTED.isoformat()
    list(render([], (source, {}, [([], {})], now)))
    list(render([], ("{{ raise_exception('') }}", {}, [([], {})], now)))


def render(
    _files: Sequence[BinaryIO], argument: tuple[str, dict[str, Any], list[tuple[Any, dict[str, Any]]], str]
) -> Iterator[list[Rendered]]:
    """Reader of ``render_chats``: of each chat, messages and own variables."""
    source, variables, chats, now = argument
    template = _compile(source, now)
    for chunk in batched(chats, _AT_ONCE):
        yield [_render(template, messages, variables | own) for messages, own in chunk]


def render_each(files: Sequence[BinaryIO], argument: tuple[str, dict[str, Any], str]) -> Iterator[Rendered]:
    """Reader of ``ChatRenderer``: the file is a pipe, with variables and messages for each chat."""
    source, variables, now = argument
    (requests,) = files
    template = _compile(source, now)
    yield ("", "")
    while head := requests.read(4):
        own, messages = msgspec.msgpack.decode(requests.read(struct.unpack(">I", head)[0]))
        yield _render(template, messages, variables | own)


def _compile(source: str, now: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _fail, "strftime_now": datetime.fromisoformat(now).strftime}
    try:
        return environment.from_string(source)
    except Exception as e:  # a template may raise any exception
        raise ValueError(_describe(e)) from None


def _render(template: jinja2.Template, messages: Any, variables: dict[str, Any]) -> Rendered:
    try:
        return template.render(messages=messages, **variables), ""
    except MemoryError:
        raise
    except Exception as e:
        return "", _describe(e)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, by which templates mark the model's answers: its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  as in Jinja

    def parse(self, parser: Any) -> Any:
        """The nodes between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _fail(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500].encode("utf-8", "replace").decode()
