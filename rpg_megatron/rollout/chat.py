"""A response as a chat: messages to tokens and sampled tokens to messages, with the model's chat template.

What was sampled is never encoded again. The prompt of a turn is the tokens of an earlier turn, what was
sampled in it, and the tokens of what the template adds; if the template writes the earlier turns in another
way, such as without their thinking, it is the tokens of the whole chat, and a row of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

from rpg_megatron.data.chat_template import ChatRenderer
from rpg_megatron.data.prompts import TextCodec
from rpg_megatron.data.trajectory import Tokens
from rpg_megatron.engine.tool_calls import ParsedText, ToolCallParser
from rpg_megatron.rollout.episode import Turn

Message = dict[str, Any]
Tools = list[dict[str, Any]]
_THINK, _END_THINK = "<think>", "</think>"
_WHOLE_CHATS = 64
"""Chats whose token ids are kept."""
_SHORT = 2048
"""Characters of a text that is encoded at once; a longer one in a thread, while others are answered."""


@dataclass(frozen=True, eq=False)
class ChatFormat:
    """How a model writes chats."""

    renderer: ChatRenderer
    tools_renderer: ChatRenderer
    """For chats with tools; often the same."""
    codec: TextCodec
    stops: frozenset[int]
    """Tokens that end a turn."""
    parser: ToolCallParser | None
    """None: tool calls are left in the text."""
    thinks: bool
    """Whether the template separates what is between ``<think>`` and ``</think>`` from the answer."""
    reads_tools: bool
    """Whether the template reads ``tools``."""
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "chat encoding"))

    @cached_property
    def _encode_whole(self) -> Callable[[str], Tokens]:
        """The responses of a group begin with the same chat."""
        return lru_cache(_WHOLE_CHATS)(self._encode)

    def _encode(self, text: str) -> Tokens:
        return np.array(self.codec.encode(text), np.int32)

    async def encode(self, text: str, *, whole: bool = False) -> Tokens:
        """Token ids of a text. whole: it is a whole chat."""
        encode = self._encode_whole if whole else self._encode
        if len(text) <= _SHORT:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode, text)

    async def render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = True) -> str:
        """The text of a chat. prompt: with the beginning of the next answer. Raises ForeignInputError."""
        renderer = self.tools_renderer if tools else self.renderer
        plain = [_for_template(message) for message in messages]
        return await renderer.render(plain, tools=tools or None, add_generation_prompt=prompt)

    async def check_tools(self, tools: Tools) -> None:
        """Raise ValueError if the policy would not be told of the tools, or if they are not described as
        OpenAI's API has it.
        """
        if tools and not self.reads_tools:
            raise ValueError(
                "tools: the model's chat template does not read them, so the policy would not know of them; "
                "give the model a template with tools, or describe them in a message and send none"
            )
        if tools and self.parser:
            await asyncio.get_running_loop().run_in_executor(self._threads, self.parser.check, tools)

    def close(self) -> None:
        """End the processes and threads."""
        for renderer in {self.renderer, self.tools_renderer}:
            renderer.close()
        self._threads.shutdown(wait=False)

    def parse(self, tokens: Sequence[int], tools: Tools) -> tuple[str, ParsedText]:
        """The thinking of a turn, if it is complete, and the rest of it."""
        ids = list(tokens)
        if ids and ids[-1] in self.stops:
            ids.pop()
        parser = self.parser if tools else None
        text = self.codec.decode_all(ids) if parser else self.codec.decode(ids)
        thinking = ""
        if self.thinks and _END_THINK in text:
            thinking, _, text = text.partition(_END_THINK)
            thinking, text = thinking.replace(_THINK, "", 1).strip("\n"), text.lstrip("\n")
        return thinking, parser.parse(text, tools) if parser else ParsedText(text, [])


@dataclass(frozen=True, eq=False)
class _SampledTurn:
    messages: list[Message]
    """The chat up to the turn, whose message is the last one."""
    tools: Tools
    context: Tokens
    """Token ids up to the turn's end, int32 [N]."""
    text: str
    """Of ``context``: of the prompt as the template wrote it, then of what was sampled."""

    @cached_property
    def answer(self) -> tuple[Any, ...]:
        """What a client returns of the turn's message, without its thinking."""
        return _essence(self.messages[-1] | {"reasoning_content": None})


class Chat:
    """The turns of one response."""

    def __init__(self, form: ChatFormat):
        self._form = form
        self._turns: list[_SampledTurn] = []
        self._last: _SampledTurn | None = None
        """Which has not reached its client yet."""

    async def prompt(
        self, messages: Sequence[Message], tools: Tools
    ) -> tuple[list[Message], str, _SampledTurn | None]:
        """The messages and the text of a chat's next turn, and the turn that it continues; None: none.

        The messages have the thinking that was sampled where the client has left it out: it is for the
        template to leave it out of the text. Raises ForeignInputError if the template refuses the messages.
        """
        messages = self._with_thinking(messages)
        text = await self._form.render(messages, tools)
        for turn in sorted(self._turns, key=lambda turn: -len(turn.messages)):
            if text.startswith(turn.text):
                break
            count = len(turn.messages)
            if count < len(messages) and turn.tools == tools and _same(turn.messages, messages[:count]):
                # The template writes the turn in another way, such as with other spaces in a tool call.
                added = await self._added(turn, messages[count:])
                if added is not None:
                    text = turn.text + added
                    break
        sampled = [turn for turn in self._turns if text.startswith(turn.text)]
        return messages, text, max(sampled, key=lambda turn: len(turn.text), default=None)

    async def encode(self, text: str, turn: _SampledTurn | None) -> Tokens:
        """Token ids of what ``prompt`` has returned: those that were sampled, and of what follows them."""
        if turn is None:
            return await self._form.encode(text, whole=True)
        return np.concatenate([turn.context, await self._form.encode(text[len(turn.text) :])])

    def add(self, messages: Sequence[Message], tools: Tools, turn: Turn, prompt: str) -> tuple[Message, bool]:
        """The message of a sampled turn, and whether it has a tool call that could not be parsed.

        messages, prompt: what ``prompt`` has returned, messages and text.
        """
        thinking, parsed = self._form.parse(turn.tokens, tools)
        message: Message = {"role": "assistant", "content": parsed.content}
        if thinking:
            message["reasoning_content"] = thinking
        if parsed.calls:
            number = len(self._turns)
            message["tool_calls"] = [
                {"id": f"call_{number}_{i}", "type": "function", "function": call._asdict()}
                for i, call in enumerate(parsed.calls)
            ]
        text = prompt + self._form.codec.decode_all(list(turn.tokens))
        context = np.concatenate([turn.before, turn.sampled])
        self._last = _SampledTurn([*messages, message], tools, context, text)
        return message, parsed.failed

    def confirm(self) -> None:
        """The last turn has reached its client."""
        if self._last is not None:
            self._turns.append(self._last)

    def forget(self) -> None:
        """The last turn, which was confirmed, has not reached its client after all."""
        if self._last is not None and self._turns and self._turns[-1] is self._last:
            self._turns.pop()

    def _with_thinking(self, messages: Sequence[Message]) -> list[Message]:
        restored: list[Message] = []
        for message in messages:
            if message["role"] == "assistant" and not message.get("reasoning_content"):
                answer = _essence(message)
                sampled = [turn for turn in self._turns if turn.answer == answer]
                here = [turn for turn in sampled if _same(turn.messages[:-1], restored)]
                turns = here or sampled  # others: the history before it is no longer the same
                if turns and (thinking := turns[-1].messages[-1].get("reasoning_content")):
                    message = message | {"reasoning_content": thinking}
            restored.append(message)
        return restored

    async def _added(self, turn: _SampledTurn, more: Sequence[Message]) -> str | None:
        """What the template writes after a turn; None if it writes what led to it in another way."""
        form, tools, chat = self._form, turn.tools, turn.messages
        start = await form.render(chat[:-1], tools)
        end = (await form.render(chat, tools, prompt=False)).rstrip()
        whole = await form.render([*chat, *more], tools)
        for mark in map(form.codec.decode_all, ([stop] for stop in form.stops)):
            place = whole.find(mark, len(start))
            if mark and end.endswith(mark) and whole.startswith(start) and place >= 0:
                ended = int(turn.context[-1]) in form.stops
                if chat[-1].get("reasoning_content"):
                    bare = chat[-1] | {"reasoning_content": None}
                    if whole == await form.render([*chat[:-1], bare, *more], tools):
                        return None  # it leaves the thinking out
                return whole[place + len(mark) * ended :]
        return None


def _for_template(message: Message) -> Message:
    """A message as templates expect it: a text as content, and arguments of tool calls as objects, if those
    are plain values.
    """
    plain = {key: value for key, value in message.items() if value is not None} | {"content": _text(message)}
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
            for call in plain["tool_calls"]
        ]
    return plain


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
            msgspec.msgpack.encode(value)  # neither half a surrogate pair nor more than 64 bits
        except (ValueError, OverflowError, RecursionError):
            return arguments
        return value
    return arguments


def _same(known: Sequence[Message], given: Sequence[Message]) -> bool:
    return [_essence(m) for m in known] == [_essence(m) for m in given]


def _essence(message: Message) -> tuple[Any, ...]:
    """What is compared of messages: clients drop the other fields."""
    calls = [
        (c["function"]["name"], _object(c["function"]["arguments"])) for c in message.get("tool_calls") or ()
    ]
    return message["role"], _text(message), calls, (message.get("reasoning_content") or "").strip()
