"""The main loop of a reward worker: reads calls as JSON, and answers each with a JSON object.

An answer has ``value`` and ``counts``, or ``failure`` ("error", "memory" or "timeout"), ``detail`` and, for
an exception in the function's file, ``place``, ``file:line``. If ``exits`` is true, the worker must get no
more calls.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

_MAX_GROWTH = 256 * 1024
"""Growth of a worker's memory, in KiB, after which it is replaced."""
_MAX_DETAIL = 300
"""Characters of an exception's message that are kept."""

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
        except (Exception, SystemExit) as e:
            answer = failure_of(e, file)
        exits = must_exit(answer, start)
        send_line(connection, answer | {"number": number, "exits": exits})
        if exits:
            return


def serve_async(connection: socket.socket, call: Call, deadline: float, file: str = "") -> None:
    """Run calls of an async function concurrently, until the other end is closed.

    deadline: seconds for each call. file: the function's.
    """
    import asyncio  # other workers do not need it

    start = peak_memory()
    send_line(connection, os.getpid())

    async def one(number: int, arguments: Any) -> None:
        limit = asyncio.timeout(deadline)
        try:
            async with limit:
                answer = read_result(await call(arguments), _group_size(arguments))
        except (Exception, SystemExit, asyncio.CancelledError) as e:  # the function may cancel tasks itself
            expired = isinstance(e, TimeoutError) and limit.expired()  # else the function raised it
            timeout = {"failure": "timeout", "detail": f"ended after {deadline:g} s"}
            answer = timeout if expired else failure_of(e, file)
        exits = must_exit(answer, start)
        send_line(connection, answer | {"number": number, "exits": exits})

    async def main() -> None:
        calls: set[asyncio.Task[None]] = set()

        def begin(number: int, arguments: Any) -> None:
            task = asyncio.create_task(one(number, arguments))
            calls.add(task)
            task.add_done_callback(calls.discard)

        await read_lines(connection, begin)

    asyncio.run(main())


async def read_lines(connection: socket.socket, receive: Callable[[int, Any], None]) -> None:
    """Call ``receive`` with what the pool sends, in this event loop, until the other end is closed."""
    import asyncio

    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for line in connection.makefile("rb"):
            loop.call_soon_threadsafe(receive, *json.loads(line))
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


def must_exit(answer: dict[str, Any], start: int) -> bool:
    """Whether this process must get no more calls. start: ``peak_memory`` when it had begun."""
    return answer.get("failure") == "memory" or peak_memory() - start > _MAX_GROWTH


def send_line(connection: socket.socket, value: Any) -> None:
    """Send a value to the pool."""
    connection.sendall(json.dumps(value).encode() + b"\n")


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


def failure_of(error: BaseException, file: str) -> dict[str, Any]:
    """The answer to a call that raised. file: the function's."""
    if isinstance(error, MemoryError):
        return {"failure": "memory", "detail": "out of memory"}
    if isinstance(error, NoReward):
        return {"failure": "error", "detail": str(error)[:_MAX_DETAIL], "counts": error.counts}
    lines = [n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    place = {"place": f"{file}:{lines[-1]}"} if lines else {}
    message = str(error)[:_MAX_DETAIL].encode(errors="backslashreplace").decode()  # for logs and messages
    detail = ": ".join(filter(None, (type(error).__name__, " ".join(message.split()))))
    return {"failure": "error", "detail": detail} | place


def peak_memory() -> int:
    """Most memory that this process had, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
