"""Text of chats by a tokenizer's chat template, and the token that ends a turn in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.chat_messages import (
    Message,
    find_unread,
    find_unwritten,
    find_unwritten_tool,
    read_variables,
)
from rpg_megatron.data.chat_template import Rendered, render_chats
from rpg_megatron.data.stored_problems import Problem
from rpg_megatron.system.foreign_input import ForeignInputError

_ANSWER = "Answer"
"""A turn of the assistant, to see what a template writes after it."""


def chat_template(tokenizer: Any, *, tools: bool = False) -> str:
    """The source of the tokenizer's chat template. tools: that for chats with tools, if there are several.

    Raises UserError if none of several is the default one.
    """
    template = tokenizer.chat_template
    if not isinstance(template, dict):
        return str(template)
    name = "tool_use" if tools and "tool_use" in template else "default"
    if name not in template:
        raise UserError(
            f"model.path: the tokenizer has chat templates named {', '.join(sorted(template))}, and none "
            "named default; give the one to use that name"
        )
    return str(template[name])


def template_variables(tokenizer: Any, settings: DataSettings) -> dict[str, Any]:
    """Variables of the chat template besides ``messages``, as transformers sets them."""
    variables = {**getattr(tokenizer, "special_tokens_map", {}), "add_generation_prompt": True}
    variables |= {"tools": None, "documents": None}
    if settings.thinking is not None:
        variables["enable_thinking"] = settings.thinking
    return variables


def render_messages(
    chats: Sequence[Sequence[Message]],
    rows: Sequence[Problem],
    settings: DataSettings,
    tokenizer: Any,
    key: str,
    *,
    prompt: bool = True,
    whole: bool = True,
) -> list[Rendered]:
    """The text of each chat by the chat template, or why it cannot be used: also, if something is left out.

    rows: the problem of each chat, for its tools. prompt: with the beginning of the assistant's answer.
    whole: check that the text has the content of each message. Raises UserError if the template is not valid,
    or takes too long.
    """
    found: list[Rendered] = [("", "")] * len(chats)
    by_template: dict[str, list[tuple[int, list[dict[str, Any]], dict[str, Any]]]] = {}
    for number, (chat, row) in enumerate(zip(chats, rows, strict=True)):
        messages = [message.plain for message in chat]
        try:
            variables = read_variables(row.variables)
        except ValueError as e:
            found[number] = ("", str(e))
            continue
        template = chat_template(tokenizer, tools="tools" in variables)
        if unread := find_unread(template, messages, variables):
            found[number] = ("", f"it does not read {unread}; use a template that does, or remove that")
            continue
        by_template.setdefault(template, []).append((number, messages, variables))
    general = template_variables(tokenizer, settings) | {"add_generation_prompt": prompt}
    for template, entries in by_template.items():
        nulls = [entry for entry in entries if any(message["content"] is None for message in entry[1])]
        filled = [[m | {"content": m["content"] or ""} for m in messages] for _, messages, _ in nulls]
        own = [variables for *_, variables in [*entries, *nulls]]
        try:
            rendered = list(render_chats(template, general, [m for _, m, _ in entries] + filled, own))
        except ForeignInputError as e:
            raise UserError(
                f"{key}.chat: the model's chat template cannot be used ({e}); correct it, or set {key}.chat "
                "to false"
            ) from None
        empty = {entry[0]: each for entry, each in zip(nulls, rendered[len(entries) :], strict=True)}
        for (number, messages, variables), (text, error) in zip(
            entries, rendered[: len(entries)], strict=True
        ):
            if empty.get(number, (text, error)) != (text, error):
                error = (
                    'it writes a content of null otherwise than an empty one; give the message the content ""'
                )
            elif not error and (unknown := find_unwritten_tool(variables.get("tools"), text)):
                error = f"it does not write the tool {unknown!r}"
            elif whole and not error and (unwritten := find_unwritten(messages, text)):
                error = f"it does not write {unwritten}"
            found[number] = ("", error) if error else (text, "")
    return found


def turn_end(tokenizer: Any) -> int | None:
    """The added token that the chat template writes at the end of the assistant's turns; None without one.

    Raises UserError if the template cannot be used.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER}]
    variables = {**getattr(tokenizer, "special_tokens_map", {}), "tools": None, "documents": None}
    chats = [chat, [{"role": "system", "content": "System"}, *chat]]
    try:
        rendered = list(
            render_chats(chat_template(tokenizer), variables | {"add_generation_prompt": False}, chats)
        )
    except ForeignInputError:  # rendering a prompt reports it
        return None
    text = next((text for text, error in rendered if not error), "")
    tail = text.rpartition(_ANSWER)[2]
    ids: list[int] = tokenizer([tail], add_special_tokens=False)["input_ids"][0] if tail else []
    added = tokenizer.added_tokens_decoder
    first = next(
        (token for token in ids if tokenizer.decode([token], skip_special_tokens=False).strip()), None
    )
    return first if first in added else None
