"""The gateway's connections: how many there may be, for how long, and whether an answer was written out."""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
from functools import lru_cache
from typing import Any

from aiohttp import web

logger = logging.getLogger("rpg_megatron.sampler")
TIMES: dict[str, Any] = {"keepalive_timeout": 300.0, "lingering_time": 1.0}
"""Seconds of aiohttp: a connection without a request, and reading what is left of a refused one."""
_SECONDS, _SPARE = 60.0, 256
"""How long a connection may exist that has shown no key, and the files of this process that are none."""
_GONE = select.POLLERR | select.POLLHUP

warn_once = lru_cache(100)(logger.warning)
"""Say a thing once."""


class Connections:
    """Listens at a port of the loopback address. For one event loop."""

    def __init__(self, http: web.Server):
        """http: makes what serves a connection."""
        self._http = http
        self._strangers: dict[Any, asyncio.TimerHandle] = {}
        self._most = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE, _SPARE)
        self._server: asyncio.Server | None = None

    async def listen(self) -> str:
        """Start; returns ``host:port``."""
        listening = socket.create_server(("127.0.0.1", 0))
        # backlog: without a free descriptor, asyncio logs each connection that it takes at a time.
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, sock=listening, backlog=1)
        listening.listen(1024)
        return "{}:{}".format(*listening.getsockname())

    def admit(self, protocol: Any) -> None:
        """A connection has shown a key."""
        if ending := self._strangers.pop(protocol, None):
            ending.cancel()

    def close(self) -> None:
        """Stop to listen."""
        if self._server is not None:
            self._server.close()
        for stranger in [*self._strangers]:
            self._end(stranger)

    def _connect(self) -> asyncio.Protocol:
        if len(self._http.connections) >= self._most:
            warn_once(f"the gateway has {self._most} connections, and needs more open files; raise ulimit -n")
            if not self._strangers:
                return _Refused()
            self._end(next(iter(self._strangers)))
        protocol = self._http()
        ending = asyncio.get_running_loop().call_later(_SECONDS, self._end, protocol)
        self._strangers[protocol] = ending
        return protocol

    def _end(self, stranger: Any) -> None:
        self._strangers.pop(stranger).cancel()
        stranger.force_close()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.abort()


def is_reset(connection: socket.socket) -> bool:
    """Whether the other end has left without reading all that was written."""
    return bool(_events(connection.fileno()) & _GONE)


async def write_out(request: web.Request, response: web.Response) -> socket.socket | None:
    """Write an answer out; returns the connection, if a file is left for it. Raises ConnectionError if its
    client has left.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    file = transport.get_extra_info("socket").fileno()
    transport.set_write_buffer_limits(0)  # so that the writing below waits until all is written
    if _events(file) & (_GONE | select.POLLRDHUP):
        raise ConnectionResetError("the client has left")
    await response.prepare(request)
    await response.write_eof()
    if transport.is_closing() or transport.get_write_buffer_size() or _events(file) & _GONE:
        raise ConnectionResetError("the client has left")
    try:
        return socket.socket(fileno=socket.dup(file))
    except OSError:
        return None


def _events(file: int) -> int:
    """What has become of a connection, also if the event loop has not seen it yet."""
    poll = select.poll()
    poll.register(file, select.POLLRDHUP)
    return sum(events for _, events in poll.poll(0))
