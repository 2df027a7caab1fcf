"""Reward functions that were written for verl or TRL, recognised by an argument, called as they are there."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple

from rpg_megatron.rewards.worker_process import NoReward


class ForeignForm(NamedTuple):
    """How another project calls its reward functions."""

    inputs: tuple[str, ...]
    """Our inputs that the arguments are made of."""
    arguments: Callable[[dict[str, Any]], dict[str, Any]]
    """Our inputs -> keyword arguments."""
    names: tuple[str, ...] = ()
    """Names of all its arguments that are no settings; empty: also those of the row's columns."""


def adapt(
    function: Callable[..., Any],
    form: ForeignForm,
    accepted: Collection[str] | None,
    settings: Collection[str],
    *,
    alone: bool,
) -> Callable[..., Any]:
    """The function with our inputs as keywords, and with a result of ours; of an async one, a coroutine.

    accepted: names of its arguments; None: any. settings: names of those that are bound. alone: it is the
    only term; else a None in a list is 0 as in TRL, and counted as ``none``. A call raises NoReward if the
    row lacks a column.
    """
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    required = [p.name for p in needed if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def call(**inputs: Any) -> Any:
        given = {name: value for name, value in form.arguments(inputs).items() if name not in settings}
        if missing := [name for name in required if name not in given]:
            columns = ", ".join(inputs["row"])
            raise NoReward(f"its argument {missing[0]!r} is no column of the row ({columns}) and no setting")
        result = function(**{n: v for n, v in given.items() if accepted is None or n in accepted})
        return _read_later(result, alone) if inspect.isawaitable(result) else _read(result, alone)

    return call


def _read(result: Any, alone: bool = True) -> Any:
    """A number, as a list for a group: there True is 1. The other numbers of a dict are counts."""
    if isinstance(result, list | tuple):
        return [(0.0, {"none": 1.0}) if each is None and not alone else _read(each) for each in result]
    if isinstance(result, dict):
        counts = {k: v for k, v in result.items() if k != "score" and isinstance(v, int | float)}
        return _read(result["score"]), counts
    return float(result) if isinstance(result, bool) or type(result).__name__ == "bool_" else result


async def _read_later(result: Awaitable[Any], alone: bool) -> Any:
    return _read(await result, alone)


_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


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
    return {f"{name}s": [arguments[name] for arguments in each] for name in _VERL}


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
    "solution_str": ForeignForm(("response", "answer", "row"), _verl, _VERL),
    "solution_strs": ForeignForm(
        ("responses", "answer", "row"), _verl_batch, tuple(f"{name}s" for name in _VERL)
    ),
    "completions": ForeignForm(("responses", "answer", "prompt", "messages", "row", "token_ids"), _trl),
}
"""The argument by which a function is recognised -> its form: verl's for a response or a batch, and TRL's."""
