"""The main loops of a reward worker: functions that are called one at a time, and async ones.

The answer to a call (``system/fork_server.py``) has ``counts`` too.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

from rpg_megatron.system import fork_server
from rpg_megatron.system.fork_server import Serve, failure_of, must_exit, peak_memory, send_line
from rpg_megatron.system.import_path import load_function

type Call = Callable[[Any], Any]
"""Calls the function with the decoded arguments of one call."""


class NoReward(Exception):
    """There is no reward for a response, for the reason in the message."""

    def __init__(self, reason: str, counts: dict[str, float] | None = None):
        """counts: as a function returns them."""
        super().__init__(reason)
        self.counts = counts or {}


def serve(connection: socket.socket, call: Call, file: str = "") -> None:
    """Answer one call after another, until the other end is closed or this process should be replaced.

    A call is a list of its number and its arguments. file: the function's.
    """
    start = peak_memory()
    send_line(connection, os.getpid())
    for line in connection.makefile("rb"):
        number, arguments = json.loads(line)
        try:
            answer = read_result(call(arguments), _group_size(arguments))
        except BaseException as e:  # also SystemExit, and a panic of a library in Rust
            answer = _failure_of(e, file)
        exits = must_exit(answer, start)
        send_line(connection, answer | {"number": number, "exits": exits})
        if exits:
            return


def serve_async(connection: socket.socket, function: Call, deadline: float, file: str = "") -> None:
    """Run calls of an async function concurrently, until the other end is closed.

    deadline: seconds for each call. file: the function's.
    """
    import asyncio  # other workers do not need it

    async def run(call: fork_server.Call) -> dict[str, Any]:
        limit = asyncio.timeout(deadline)
        try:
            async with limit:
                return read_result(await function(call.value), _group_size(call.value))
        except BaseException as e:  # the function may cancel tasks itself
            expired = isinstance(e, TimeoutError) and limit.expired()  # else the function raised it
            timeout = {"failure": "timeout", "detail": f"ended after {deadline:g} s"}
            return timeout if expired else _failure_of(e, file)

    send_line(connection, os.getpid())
    asyncio.run(fork_server.serve_calls(connection, run))


def read_result(value: Any, count: int | None = None) -> dict[str, Any]:
    """The result of a call: ``value`` (None: no reward) and ``counts``, both of plain Python types.

    count: number of responses if the call was for a group, whose value is a list; else None.
    Raises NoReward for any other return value.
    """
    counts: dict[str, float] = {}
    value = _take_counts(value, counts)
    if count is None:
        return {"value": _plain(value), "counts": counts}
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise NoReward(f"it returned {_type_of(value)}, not a list with a reward of each response")
    values = [_plain(_take_counts(item, counts)) for item in value]
    if len(values) != count:
        raise NoReward(f"it returned {len(values)} rewards for {count} responses")
    return {"value": values, "counts": counts}


def _take_counts(value: Any, counts: dict[str, float]) -> Any:
    """The first of a pair of a value and a dict of counts, which are added to ``counts``; or the value."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, numbers = value
        for name, number in numbers.items():
            counts[str(name)] = counts.get(str(name), 0.0) + float(_plain(number) or 0)
    return value


def _plain(value: Any) -> bool | float | None:
    """The value as a Python bool or float, also from a library's type, such as NumPy's. Raises NoReward."""
    if value is None or isinstance(value, bool):
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise NoReward(f"it returned {_type_of(value)}, not a bool, a number or None") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise NoReward(f"it returned {number}, not a finite number")
    return bool(value) if type(value).__name__ == "bool_" else number


def _type_of(value: Any) -> str:
    return f"a value of type {type(value).__name__}"


def _group_size(arguments: Any) -> int | None:
    return len(arguments["responses"]) if isinstance(arguments, dict) and "responses" in arguments else None


def _failure_of(error: BaseException, file: str) -> dict[str, Any]:
    if isinstance(error, NoReward):
        return {"failure": "error", "detail": str(error)[:300], "counts": error.counts}
    return failure_of(error, file)


def load_function_server(path: str, deadline: float) -> tuple[Serve, dict[str, Any]]:
    """Loader (``system/forked_workers.py``) of a function with positional arguments."""
    function = load_function(path)
    description = {"deadline": deadline}
    return lambda connection: serve(connection, lambda arguments: function(*arguments)), description
