"""A response as a chat: messages to tokens and sampled tokens to messages, with the model's chat template.

What was sampled is never encoded again. The prompt of a turn is the tokens of an earlier turn, what was
sampled in it, and the tokens of what the template adds; if the template writes the earlier turns in another
way, such as without their thinking, it is the tokens of the whole chat, and a row of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

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


@dataclass(frozen=True, eq=False)
class ChatFormat:
    """How a model writes chats."""

    renderer: ChatRenderer
    codec: TextCodec
    stops: frozenset[int]
    """Tokens that end a turn."""
    parser: ToolCallParser | None
    """None: tool calls are left in the text."""
    thinks: bool
    """Whether the template separates what is between ``<think>`` and ``</think>`` from the answer."""

    @cached_property
    def encode_whole(self) -> Callable[[str], Tokens]:
        """Token ids of a chat; the responses of a group begin with the same one."""
        return lru_cache(_WHOLE_CHATS)(lambda text: np.array(self.codec.encode(text), np.int32))

    async def render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = True) -> str:
        """The text of a chat. prompt: with the beginning of the next answer. Raises ForeignInputError."""
        plain = [_for_template(message) for message in messages]
        return await self.renderer.render(plain, tools=tools or None, add_generation_prompt=prompt)

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
    thinking: str


class Chat:
    """The turns of one response."""

    def __init__(self, form: ChatFormat):
        self._form = form
        self._turns: list[_SampledTurn] = []

    async def prompt(self, messages: Sequence[Message], tools: Tools) -> tuple[Tokens, str]:
        """Token ids and text of a chat's next turn. Raises ForeignInputError if the template refuses the
        messages.
        """
        text, encode = await self._form.render(messages, tools), self._form.codec.encode
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
        if sampled:
            turn = max(sampled, key=lambda turn: len(turn.text))
            rest = np.array(encode(text[len(turn.text) :]), np.int32)
            return np.concatenate([turn.context, rest]), text
        return self._form.encode_whole(text), text

    def add(self, messages: Sequence[Message], tools: Tools, turn: Turn, prompt: str) -> tuple[Message, bool]:
        """The message of a sampled turn, and whether it has a tool call that could not be parsed.

        prompt: the text of the turn's prompt.
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
        self._turns.append(_SampledTurn([*messages, message], tools, context, text, thinking.strip()))
        return message, parsed.failed

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
                kept = turn.thinking in whole[len(start) : place]
                return whole[place + len(mark) * ended :] if kept else None
        return None


def _for_template(message: Message) -> Message:
    """A message as templates expect it: a text as content, and the arguments of tool calls as objects."""
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
            return json.loads(arguments)
        except ValueError:
            return arguments
    return arguments


def _same(known: Sequence[Message], given: Sequence[Message]) -> bool:
    return [_essence(m) for m in known] == [_essence(m) for m in given]


def _essence(message: Message) -> tuple[Any, ...]:
    """What a client must return of a message: clients drop the other fields."""
    calls = [
        (c["function"]["name"], _object(c["function"]["arguments"])) for c in message.get("tool_calls") or ()
    ]
    return message["role"], _text(message), calls
