"""Reward functions that were written for verl or TRL, recognised by an argument, called as they are there."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple


class ForeignForm(NamedTuple):
    """How another project calls its reward functions."""

    inputs: tuple[str, ...]
    """Our inputs that the arguments are made of."""
    arguments: Callable[[dict[str, Any]], dict[str, Any]]
    """Our inputs -> keyword arguments."""


def adapt(
    function: Callable[..., Any],
    form: ForeignForm,
    accepted: Collection[str] | None,
    settings: Collection[str],
) -> Callable[..., Any]:
    """The function with our inputs as keywords, and with a result of ours; of an async one, a coroutine.

    accepted: names of its arguments; None: any. settings: names of those that are bound.
    """

    def call(**inputs: Any) -> Any:
        given = {name: value for name, value in form.arguments(inputs).items() if name not in settings}
        result = function(**{n: v for n, v in given.items() if accepted is None or n in accepted})
        return _read_later(result) if inspect.isawaitable(result) else _read(result)

    return call


def _read(result: Any) -> Any:
    """A number, as a list for a group: there True is 1. The other numbers of a dict are counts."""
    if isinstance(result, list | tuple):
        return [_read(each) for each in result]
    if isinstance(result, dict):
        counts = {k: v for k, v in result.items() if k != "score" and isinstance(v, int | float)}
        return _read(result["score"]), counts
    return float(result) if isinstance(result, bool) or type(result).__name__ == "bool_" else result


async def _read_later(result: Awaitable[Any]) -> Any:
    return _read(await result)


def _verl(inputs: dict[str, Any]) -> dict[str, Any]:
    row = inputs["row"]
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": inputs["response"],
        "ground_truth": inputs["answer"] if truth is None else truth,
        "extra_info": row.get("extra_info") or {},
    }


def _verl_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    each = [_verl(inputs | {"response": response}) for response in inputs["responses"]]
    plural = {name: f"{name}s" for name in ("data_source", "solution_str", "ground_truth", "extra_info")}
    return {many: [arguments[one] for arguments in each] for one, many in plural.items()}


def _trl(inputs: dict[str, Any]) -> dict[str, Any]:
    texts, messages, prompt = inputs["responses"], inputs["messages"], inputs["prompt"]
    chat = [m["content"] for m in messages] != [prompt]  # rendered with a template
    columns = {"answer": inputs["answer"]} | inputs["row"]
    return {name: [value] * len(texts) for name, value in columns.items()} | {
        "prompts": [messages if chat else prompt] * len(texts),
        "completions": [[{"role": "assistant", "content": text}] if chat else text for text in texts],
        "completion_ids": inputs["token_ids"],
    }


FORMS = {
    "solution_str": ForeignForm(("response", "answer", "row"), _verl),
    "solution_strs": ForeignForm(("responses", "answer", "row"), _verl_batch),
    "completions": ForeignForm(("responses", "answer", "prompt", "messages", "row", "token_ids"), _trl),
}
"""The argument by which a function is recognised -> its form: verl's for a response or a batch, and TRL's."""
