"""HTTP client of a server that the settings name, such as a judge or a teacher: JSON in, JSON out."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

_MAX_WAIT_SECONDS = 30.0
"""Longest wait before a retry."""
_RETRIED = (408, 409, 425, 429)
"""Status codes from 300 to 499 after which a request is retried."""


class ServerError(Exception):
    """A request without a usable answer. The message follows the server's name; it has no headers and neither
    the URL nor the server's text, which may hold secrets.
    """

    def __init__(self, problem: str, *, kind: str = "garbage", status: int = 0, wait: float = 0.0):
        """kind: "timeouts", "errors" (no connection, another status than 200) or "garbage" (another answer).
        status: of HTTP; 0: there is none. wait: seconds that the server asks to wait before a retry.
        """
        super().__init__(problem)
        self.kind, self.status, self.wait = kind, status, wait


class HttpClient:
    """Asks one server, with a key or none. For one event loop, and any number of requests at a time."""

    def __init__(self, key: str = ""):
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def request(self, url: str, body: Any = None, *, seconds: float, limit: int) -> Any:
        """The decoded answer to a POST of ``body`` as JSON or, if that is None, to a GET.

        seconds: time for the whole request. limit: bytes of the largest valid answer. Raises ServerError.
        """
        if self._session is None:  # created here, because it needs the event loop
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        method, timeout = "GET" if body is None else "POST", aiohttp.ClientTimeout(total=seconds)
        text = bytearray()
        try:
            # No redirects: the key must only be sent to the server that the settings name.
            async with self._session.request(
                method, url, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                status, after = answer.status, answer.headers.get("Retry-After", "")
                while len(text) <= limit and (part := await answer.content.read(limit + 1 - len(text))):
                    text += part
        except TimeoutError:
            raise ServerError(f"did not answer within {seconds:g} s", kind="timeouts") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise ServerError(f"cannot be reached: {_cause_of(e)}", kind="errors") from None
        if status != 200:
            wait = float(after) if after.isdecimal() else 0.0
            raise ServerError(f"answered with status {status}", kind="errors", status=status, wait=wait)
        if len(text) > limit:
            raise ServerError("gave a far too long answer", kind="errors", status=status)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ServerError("answered with something else than JSON", status=status) from None

    async def close(self) -> None:
        """Disconnect."""
        if self._session is not None:
            await self._session.close()


async def with_retries[T](ask: Callable[[], Awaitable[T]], retries: int, wait: float) -> T:
    """Ask again after a ServerError, at most ``retries`` times, unless the status says that this is in vain.

    wait: about the seconds before the first retry; they double before each further one.
    """
    while True:
        try:
            return await ask()
        except ServerError as e:
            retries -= 1
            if retries < 0 or (300 <= e.status < 500 and e.status not in _RETRIED):
                raise
            await asyncio.sleep(min(max(wait * random.uniform(0.5, 1.5), e.wait), _MAX_WAIT_SECONDS))
        wait *= 2


def _cause_of(error: Exception) -> str:
    """A connection's failure in a few words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the name of its host is unknown"
    code = getattr(getattr(error, "os_error", error), "errno", None)
    return os.strerror(code) if code else type(error).__name__
