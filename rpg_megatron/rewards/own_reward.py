"""A reward function of the user in its process: what it asks for, by the names of its arguments, and its
settings. The sampler learns it from the fork server, and imports nothing of the user.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rpg_megatron.config.errors import UserError
from rpg_megatron.system.import_path import load_function
from rpg_megatron.system.own_code import Wanted, load_own

PROMPT = ("prompt", "messages", "row")
"""Arguments that come from the data; the sampler keeps them as one JSON object, the context."""
_RESPONSE = ("response", "responses")
_NAMES = (*_RESPONSE, "answer", *PROMPT, "token_ids", "finish_reason")
_POSITIONAL = ("response", "answer")


class OwnReward(NamedTuple):
    """A function with its settings bound."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    """What it asks for."""
    positional: bool
    """Whether response and answer are its first two arguments, whatever their names."""
    is_async: bool

    @property
    def asks(self) -> dict[str, Any]:
        """What the pool has to know, JSON-serialisable."""
        return {"names": self.names, "group": "responses" in self.names, "async": self.is_async}

    def call(self, given: dict[str, Any]) -> Any:
        """Call it with what it asks for; for an async function, the result is a coroutine."""
        if context := given.pop("context", ""):
            found = json.loads(context)
            given |= {name: found[name] for name in PROMPT if name in self.names}
        if not self.positional:
            return self.function(**given)
        first = [given.pop(name) for name in _POSITIONAL]
        return self.function(*first, **given)


def load_reward(where: str, path: str, settings: dict[str, Any], reserved: Sequence[str]) -> OwnReward:
    """Import a function, or a class, which is called with its settings once.

    A function with an argument ``response`` or ``responses`` gets its arguments by name; any other is called
    with the response and the answer, and gets by name what follows. The remaining arguments are settings.
    Raises UserError, a line for each problem.
    """
    try:
        found = load_function(path)
    except ValueError as e:
        raise UserError(f"{where}.type: {e}") from None
    made, function = isinstance(found, type), found
    if made:
        wanted = Wanted(where, path, settings, 0, makes=True, reserved=tuple(reserved))
        function = load_own(wanted)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C code
        parameters = []
    keywords = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = not any(name in keywords for name in _RESPONSE)
    rest = parameters[2:] if positional else parameters
    names = tuple(p.name for p in rest if p.name in keywords and p.name in _NAMES)
    _check(where, path, [p.name for p in parameters[:2]] if positional else [], names)
    if made:
        required = [p.name for p in rest if p.default is p.empty and p.name in keywords]
        if unknown := [name for name in required if name not in names]:
            raise UserError(
                f"{where}.type: {path} is called with an argument {unknown[0]!r}, which rewards do not have; "
                f"they have {', '.join(_NAMES)}; settings are arguments of the class"
            )
    else:
        given = len(_POSITIONAL) if positional else 0
        function = load_own(Wanted(where, path, settings, given, names=names, reserved=tuple(reserved)))
    called = found if not made else type(function).__call__
    is_async = inspect.iscoroutinefunction(called)
    return OwnReward(function, (*_POSITIONAL, *names) if positional else names, positional, is_async)


def _check(where: str, path: str, first: list[str], names: tuple[str, ...]) -> None:
    if wrong := [name for name in first if name in (*PROMPT, "token_ids", "finish_reason")]:
        raise UserError(
            f"{where}.type: {path} has an argument {wrong[0]!r}, but none named 'response'; name that one so"
        )
    if all(name in names for name in _RESPONSE):
        raise UserError(
            f"{where}.type: {path} asks for 'response' and 'responses': keep the first to be called for each "
            "response, or the second to be called once a group"
        )
