"""Tool calls in sampled text, found by vLLM's parsers: those of its option ``--tool-call-parser``."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object."""


class ParsedText(NamedTuple):
    """A sampled text without its tool calls."""

    content: str
    calls: list[ToolCall]
    failed: bool = False
    """Whether it begins a tool call, but none could be parsed: it is all in ``content``."""


class ToolCallParser:
    """A parser of vLLM, by name. Importing vLLM takes seconds and some 500 MB."""

    def __init__(self, name: str, tokenizer: Any):
        """tokenizer: of Hugging Face. Raises KeyError if vLLM has no such parser, which is checked before."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        # It logs each call that cannot be parsed, with a traceback; here they are counted.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._tokenizer = tokenizer
        self._request = lru_cache(64)(
            lambda tools: ChatCompletionRequest(messages=[], tools=json.loads(tools))
        )
        self._parser: Any = ToolParserManager.get_tool_parser(name)

    def check(self, tools: list[dict[str, Any]]) -> None:
        """Raise ValueError if tools are not described as OpenAI's API has it."""
        self._request(json.dumps(tools))

    def parse(self, text: str, tools: list[dict[str, Any]]) -> ParsedText:
        """The content of a text, and its calls of tools. text: with special tokens."""
        request = self._request(json.dumps(tools))
        parser = self._parser(self._tokenizer, request.tools)
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception as e:  # of what the policy wrote
            logger.debug("parser of tool calls: %s: %s", type(e).__name__, e)
            return ParsedText(text, [], failed=True)
        if not found.tools_called:
            mark = getattr(parser, "tool_call_start_token", None)
            return ParsedText(text, [], mark in text if mark else text.lstrip().startswith("{"))
        calls = [ToolCall(call.function.name, call.function.arguments) for call in found.tool_calls]
        if not all(map(_is_plain, calls)):
            return ParsedText(text, [], failed=True)
        return ParsedText(found.content or "", calls)


def _is_plain(call: ToolCall) -> bool:
    """Whether clients can read a call: it has no half of a surrogate pair, which is no character."""
    try:
        read = json.loads(call.arguments)
    except ValueError:  # for the tool to say
        read = None
    except RecursionError:
        return False
    try:
        json.dumps([*call, read], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
