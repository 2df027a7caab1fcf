"""What clients may send to the gateway: the forms of requests, checked before anything else is done."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, get_args

import msgspec

from rpg_megatron.rollout.chat import Message, Tools

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
CHAT_FIELDS = {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens"}
CHAT_FIELDS |= {"logprobs", "return_token_ids", "user", "metadata", "store", "seed"}
TOKEN_FIELDS = {"model", "token_ids", "sampling_params", "request_id"}
SAMPLING_FIELDS = {"max_tokens", "logprobs", "seed", "detokenize", "skip_special_tokens", "output_kind"}
SAMPLING_FIELDS |= {"stop_token_ids", "spaces_between_special_tokens"}
PLAIN = {"n": 1, "stream": False, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
PLAIN |= {"top_logprobs": 0, "parallel_tool_calls": True, "ignore_eos": False, "min_tokens": 0}
"""Fields that may only have these values."""


_Role = Literal["assistant", "developer", "system", "tool", "user"]


class RefusedRequestError(Exception):
    """A request that the gateway does not answer; the message says why."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


def refuse(message: str) -> NoReturn:
    """Raise RefusedRequestError."""
    raise RefusedRequestError(message)


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None


class _Call(msgspec.Struct):
    function: _Function


class _ToolFunction(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    function: _ToolFunction


def object_in(body: bytes) -> Message:
    """The JSON object of a request."""
    try:
        value = msgspec.json.decode(body)
        msgspec.msgpack.encode(value)  # as it is sent to the chat template
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        refuse(f"the request is not valid JSON ({e})")
    except OverflowError:
        refuse("the request has an integer of more than 64 bits")
    if not isinstance(value, dict):
        refuse("the request is no JSON object")
    return value


def messages_in(body: Message) -> list[Message]:
    """The messages of a chat."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages: a list of at least one message is needed")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not _is(message.get("role"), _Role):
            refuse(f"messages[{place}]: an object with a role of {', '.join(get_args(_Role))} is needed")
        if not _is(message.get("content"), str | list[_Part] | None):
            refuse(f"messages[{place}].content: only text is possible")
        if not _is(message.get("reasoning_content"), str | None):
            refuse(f"messages[{place}].reasoning_content: only text is possible")
        if not _is(message.get("tool_calls"), list[_Call] | None):
            refuse(f"messages[{place}].tool_calls: calls of functions with name and arguments are needed")
    return messages


def tools_in(body: Message) -> Tools:
    """The tools of a chat."""
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        refuse(f"tool_choice: {choice!r} is not possible; the policy chooses (auto), or has no tools (none)")
    if not _is(tools, list[_Tool]):
        refuse("tools: a list of functions with a name is needed")
    return [] if choice == "none" else tools


def count_in(value: Any, name: str) -> int | None:
    """A number of tokens."""
    if value is not None and (type(value) is not int or value < 1):
        refuse(f"{name}: {value!r} is no number of tokens")
    return value


def _is(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True
