"""A custom reward function: which inputs it takes, by the names of its arguments, and its settings.

It is imported in the fork server, which tells the sampler the inputs; the sampler imports no custom code.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rpg_megatron.config.errors import UserError
from rpg_megatron.rewards.foreign_functions import FORMS, adapt
from rpg_megatron.rewards.worker_process import serve, serve_async
from rpg_megatron.system.custom_code import CustomCode, load_custom
from rpg_megatron.system.fork_server import Serve
from rpg_megatron.system.import_path import load_function

PROMPT = ("prompt", "messages", "row")
"""Inputs that come from the data; the sampler keeps them as one JSON object, the context."""
RESPONSE = ("response", "responses")
INPUTS = (*RESPONSE, "answer", *PROMPT, "token_ids", "finish_reason")
_POSITIONAL = ("response", "answer")


class CustomReward(NamedTuple):
    """A function with its settings bound."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    """Names of the inputs that it takes."""
    positional: bool
    """Whether its first two arguments are response and answer, whatever their names."""
    is_async: bool
    file: str
    """File that defines it; empty for C code and for this package."""
    line: int
    """Its first line there."""

    @property
    def signature(self) -> dict[str, Any]:
        """What the pool needs to know, JSON-serialisable."""
        description = {"inputs": self.inputs, "group": "responses" in self.inputs, "async": self.is_async}
        return description | {"place": f"{self.file}:{self.line}" if self.file else ""}

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call it with its inputs; for an async function, the result is a coroutine."""
        if context := arguments.pop("context", ""):
            values = json.loads(context)
            arguments |= {name: values[name] for name in PROMPT if name in self.inputs}
        if not self.positional:
            return self.function(**arguments)
        first = [arguments.pop(name) for name in _POSITIONAL]
        return self.function(*first, **arguments)


def load_reward(where: str, path: str, settings: dict[str, Any], reserved: Sequence[str]) -> CustomReward:
    """Import a function, or a class, which is instantiated once with its settings.

    A function with an argument ``response`` or ``responses`` gets its inputs by name; one of verl's or TRL's
    form is called as it is there (``foreign_functions``). Any other is called with the response and the
    answer; further inputs are passed by name. The remaining arguments are settings.
    Raises UserError, one line for each problem.
    """
    try:
        target = load_function(path)
    except ValueError as e:
        raise UserError(f"{where}.type: {e}") from None
    is_class, function = isinstance(target, type), target
    if is_class:
        code = CustomCode(where, path, settings, 0, instantiate=True, reserved=tuple(reserved))
        function = load_custom(code)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C code
        parameters = []
    keywords = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    form = next((FORMS[name] for name in keywords if name in FORMS), None)
    positional = form is None and not any(name in keywords for name in RESPONSE)
    rest = parameters[2:] if positional else parameters
    inputs = tuple(p.name for p in rest if p.name in keywords and p.name in INPUTS)
    _check_inputs(where, path, [p.name for p in parameters[:2]] if positional else [], inputs)
    if form is not None:
        bound: dict[str, Any] = {} if is_class else settings
        if not is_class:
            taken = tuple(name for name in form.names or keywords if name not in settings)
            function = load_custom(
                CustomCode(where, path, settings, 0, keywords=taken, reserved=tuple(reserved))
            )
        more = any(p.kind is p.VAR_KEYWORD for p in parameters)
        accepted = None if more else keywords
        function, inputs = adapt(function, form, accepted, bound, alone=where == "reward"), form.inputs
    elif is_class:
        required = [p.name for p in rest if p.default is p.empty and p.name in keywords]
        if unknown := [name for name in required if name not in inputs]:
            raise UserError(
                f"{where}.type: {path} is called with an argument {unknown[0]!r}, which rewards do not have; "
                f"they have {', '.join(INPUTS)}; settings are arguments of the class"
            )
    else:
        count = len(_POSITIONAL) if positional else 0
        code = CustomCode(where, path, settings, count, keywords=inputs, reserved=tuple(reserved))
        function = load_custom(code)
    called = type(function).__call__ if is_class else target
    is_async = inspect.iscoroutinefunction(called)
    code_object = getattr(inspect.unwrap(called), "__code__", None)
    file, line = "", 0
    if code_object is not None and not path.startswith("rpg_megatron."):
        file, line = code_object.co_filename, code_object.co_firstlineno
    inputs = (*_POSITIONAL, *inputs) if positional else inputs
    return CustomReward(function, inputs, positional, is_async, file, line)


def load_server(
    where: str, path: str, settings: dict[str, Any], reserved: Sequence[str], deadlines: tuple[float, float]
) -> tuple[Serve, dict[str, Any]]:
    """Loader (``system/forked_workers.py``) of a custom reward. deadlines: of a function, of an async one."""
    reward = load_reward(where, path, settings, reserved)
    deadline = deadlines[reward.is_async]
    description = reward.signature | {"deadline": deadline}
    if reward.is_async:
        return lambda c: serve_async(c, reward.call, deadline, reward.file), description
    return lambda c: serve(c, reward.call, reward.file), description


def _check_inputs(where: str, path: str, first: list[str], inputs: tuple[str, ...]) -> None:
    if wrong := [name for name in first if name in (*PROMPT, "token_ids", "finish_reason")]:
        raise UserError(
            f"{where}.type: {path} has an argument {wrong[0]!r}, but none named 'response'; name that one so"
        )
    if all(name in inputs for name in RESPONSE):
        raise UserError(
            f"{where}.type: {path} asks for 'response' and 'responses': keep the first to be called for each "
            "response, or the second to be called once a group"
        )
