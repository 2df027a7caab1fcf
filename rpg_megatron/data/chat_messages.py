"""Chats in rows: the messages and their fields, and what a chat template leaves out of them.

Nothing of a row is left out in silence: a field goes to the template, or the row is refused with its name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

_NOT_FIELDS = {"role", "content", "weight"}
_LINKS = {"tool_call_id", "name"}
"""Fields of a tool's message that many templates need not write: they say which call it answers."""
_CALL, _FUNCTION = {"id", "type", "index", "function"}, {"name", "arguments"}
_VARIABLES = ("tools", "chat_template_kwargs")
"""Columns of a row that are variables of its chat template."""
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_SPACE = re.compile(r"\s+")


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str | None
    """None: null in the data, which only messages with other fields may have."""
    trained: bool = True
    """Fine-tuning: whether a turn of the assistant is trained (``weight`` in OpenAI's format)."""
    fields: dict[str, Any] | None = None
    """What else it has, such as ``tool_calls``, whose arguments are objects."""

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates and rewards read it."""
        return {"role": self.role, "content": self.content} | (self.fields or {})

    @property
    def text(self) -> str:
        """Its content; empty without one."""
        return self.content or ""


def read_chat(value: list[Any]) -> tuple[Message, ...]:
    """The messages of a row. Raises ValueError for what they cannot mean."""
    chat: list[Message] = []
    called: list[Any] = []
    for number, turn in enumerate(value, 1):
        role = turn.get("role") if isinstance(turn, dict) else None
        known = isinstance(turn, dict) and any(
            turn.get(key) is not None for key in {"content", *turn} - {"role"}
        )
        if not isinstance(role, str) or not known:
            raise ValueError(
                "is a list, but not of chat messages; give each item a role and a content, both text"
            )
        try:
            message = _message(role, turn)
            answered = (message.fields or {}).get("tool_call_id")
            if answered is not None and called and answered not in called:
                raise ValueError(f"its tool_call_id {answered!r} is of no call before it")
        except ValueError as e:
            raise ValueError(f"message {number} ({role}): {e}; correct or remove it") from None
        called += [call["id"] for call in (message.fields or {}).get("tool_calls", ()) if "id" in call]
        chat.append(message)
    if not any(message.text.strip() or message.fields for message in chat):
        raise ValueError("has no text in any message; fill it in or remove the row")
    return tuple(chat)


def _message(role: str, turn: dict[str, Any]) -> Message:
    content, weight = turn.get("content"), turn.get("weight")
    if content is not None and not isinstance(content, str):
        raise ValueError(f"its content is a {type(content).__name__}; only text is possible")
    if weight is not None and (isinstance(weight, str) or weight not in (0, 1)):
        raise ValueError(f"its weight is {weight!r}; it can be 0 (not trained) or 1")
    if weight and role != "assistant":
        raise ValueError("it has a weight, but only turns of the assistant are trained")
    fields = {
        key: v for key, v in turn.items() if key not in _NOT_FIELDS and v is not None and v not in ([], {})
    }
    for key in (*_THOUGHTS, *_LINKS):
        if not isinstance(fields.get(key, ""), str):
            raise ValueError(f"its {key} is a {type(fields[key]).__name__}, not text")
    if "tool_calls" in fields:
        if role != "assistant" or not isinstance(fields["tool_calls"], list):
            raise ValueError("its tool_calls are not a list, or not of the assistant")
        fields["tool_calls"] = [_call(call) for call in fields["tool_calls"]]
    check_plain(fields)
    return Message(role, content, weight is None or bool(weight), fields or None)


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs a function with name and arguments")
    if more := {key for key, value in call.items() if value is not None} - _CALL | {*function} - _FUNCTION:
        raise ValueError(f"a tool call has the field {min(more)!r}, which is not known")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        json.dumps(arguments, allow_nan=False, default=str)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the call of {function['name']!r} are not a JSON object")
    return {key: v for key, v in call.items() if v is not None} | {
        "function": function | {"arguments": arguments}
    }


def template_variables_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a row gives its chat template besides the messages, not yet checked."""
    return {key: row[key] for key in _VARIABLES if row.get(key) not in (None, "", [], {})}


def read_variables(given: dict[str, Any]) -> dict[str, Any]:
    """The variables of ``template_variables_of`` as the template gets them. Raises ValueError."""
    tools, more = given.get("tools"), given.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"its tools are not valid JSON ({str(e)[:100]})") from None
    if tools and not (isinstance(tools, list) and all(map(_is_tool, tools))):
        raise ValueError("its tools are not a list of functions with a name")
    if not isinstance(more, dict) or _RESERVED & more.keys():
        raise ValueError("its chat_template_kwargs are no object, or set messages or tools")
    variables = more | ({"tools": tools} if tools else {})
    check_plain(variables)
    return variables


def without_nulls(value: Any) -> Any:
    """A value without the null values of the objects within it."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def check_plain(value: Any) -> None:
    """Raise ValueError for values that cannot be sent to the process of the template."""
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate (\\ud800 to \\udfff), which is no character") from None
    except (OverflowError, RecursionError, TypeError) as e:
        raise ValueError(f"contains a value that no template can write ({e})") from None


def find_unread(template: str, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    """What of a chat the source of a template does not mention, for a message; None if there is nothing."""
    for message in messages:
        links = _LINKS if message["role"] == "tool" else set()
        for key, value in message.items():
            if key not in {"role", "content"} | links and value != "" and not _mentions(template, key):
                return f"the field {key!r} of a message ({message['role']})"
    return next((f"the variable {key!r}" for key in variables if not _mentions(template, key)), None)


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def find_unwritten(messages: Sequence[dict[str, Any]], text: str, turn: str | None = None) -> str | None:
    """What a template has not written, for a message; None if all is there. Spaces are not compared.

    text: of the chat, which has all that the messages say but thoughts, since templates leave out those of
    earlier turns. turn: text of the last message, if that is a turn to train, which has its thoughts too.
    """
    whole = _SPACE.sub("", text)
    contents = [_SPACE.sub("", message["content"] or "") for message in messages]
    written = "\0".join(content for content in contents if content in whole)
    for number, (message, content) in enumerate(zip(messages, contents, strict=True), 1):
        where = f"message {number} ({message['role']})"
        is_assistant = message["role"] == "assistant"
        known = {
            "role",
            "content",
            *(_LINKS if message["role"] == "tool" else _THOUGHTS if is_assistant else ()),
        }
        for key in sorted(message.keys() - known):
            if isinstance(value := message[key], str) and not _is_in(value, whole):
                return f"the {key} of {where}"
        if not (is_assistant and "</think>" in content) and not _is_in(message["content"] or "", whole):
            return f"the content of {where}"
        # A short text may stand within another one, too.
        if not is_assistant and content and sum(map(whole.count, _forms(content))) < written.count(content):
            return f"the content of {where}"
        if lost := _lost_call(message, whole):
            return f"{lost} in {where}"
    if turn is None:
        return None
    last, ended = messages[-1], _SPACE.sub("", turn)
    for key in ("content", *_THOUGHTS):
        if not _is_in(last.get(key) or "", ended):
            return f"the {key} of a turn of the assistant"
    return _lost_call(last, ended)


def find_unwritten_tool(tools: list[dict[str, Any]] | None, text: str) -> str | None:
    """The name of a tool that a template has not written; None if all are there."""
    names = (str(tool.get("function", tool)["name"]) for tool in tools or ())
    return next((name for name in names if name not in text), None)


def _lost_call(message: dict[str, Any], text: str) -> str | None:
    """The name or argument of a tool call that a text without its spaces does not have."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    for name, count in Counter(call["name"] for call in calls).items():
        if text.count(_SPACE.sub("", name)) < count:
            return f"a call of {name!r}"
    for call in calls:
        if lost := [leaf for leaf in _leaves(call["arguments"]) if not _is_in(leaf, text)]:
            return f"the argument {lost[0][:50]!r} of a call of {call['name']!r}"
    return None


def _is_in(value: str, text: str) -> bool:
    """Whether a text without its spaces has the value, as it is or as in JSON."""
    return any(_SPACE.sub("", form) in text for form in _forms(value))


def _forms(value: str) -> set[str]:
    return {value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]}


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)
