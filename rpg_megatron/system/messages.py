"""Requests and answers between the processes of a run: msgpack over ZeroMQ, encrypted.

A server has a ROUTER socket, a client a DEALER socket. A request is (number, method, arguments), an answer
(number, kind, value) with kind "ok", "user_error" or "error". Both sides know the types of the values
(``encoding.py``) and reject others; nothing in a message is executed. The CURVE keys are derived from the
run's token: without it, a process can neither read messages nor send requests.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, get_type_hints

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from rpg_megatron.config.errors import UserError
from rpg_megatron.system.encoding import decode, encode
from rpg_megatron.system.socket_keys import derive_keys, secure

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_FAILURES = 5
"""Consecutive failed handshakes that mean another token; a server that is ending causes only one."""


class ExpectedError(RuntimeError):
    """An error whose message is sufficient: a client gets it without a traceback."""


# -- sockets -------------------------------------------------------------------------------------------------


def _client_socket(context: Any, token: str) -> Any:
    socket = context.socket(zmq.DEALER)
    secure(socket, token, server=False)
    socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 500
    return socket


# -- server --------------------------------------------------------------------------------------------------

Handler = Callable[..., Awaitable[Any]]
"""A coroutine function with annotated arguments."""


class Server:
    """Serves coroutines by name, several requests at a time. For one event loop."""

    def __init__(self, token: str, methods: Mapping[str, Handler]):
        """methods: coroutine functions by name; their annotations are the types of the arguments."""
        self._methods = {name: (method, _arguments_of(method)) for name, method in methods.items()}
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        own = derive_keys(token, "client").public
        check = SimpleNamespace(callback=lambda _domain, key: key == own)  # of each client that connects
        self._authenticator.configure_curve_callback("*", check)
        self._socket = self._context.socket(zmq.ROUTER)
        secure(self._socket, token, server=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, address: str) -> str:
        """Listen at ``ipc://PATH`` or ``tcp://HOST:PORT``; the port may be ``*``.

        Returns the address with the chosen port. Raises OSError if it cannot be used.
        """
        try:
            self._socket.bind(address)
        except zmq.ZMQError as e:
            raise OSError(e.errno, f"cannot listen at {address}: {e}") from None
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    async def serve(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                client, number, method, body = await self._socket.recv_multipart()
                task = asyncio.create_task(self._answer(client, number, method.decode(), body))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in self._tasks:
                task.cancel()
            self._authenticator.stop()
            self._context.destroy(linger=0)

    async def _answer(self, client: bytes, number: bytes, method: str, body: bytes) -> None:
        try:
            if method not in self._methods:
                raise RuntimeError(f"unknown method {method!r}; use one of {', '.join(self._methods)}")
            call, arguments = self._methods[method]
            kind, value = b"ok", encode(await call(*decode(body, arguments)))
        except UserError as e:
            kind, value = b"user_error", encode(str(e))
        except ExpectedError as e:
            kind, value = b"error", encode(str(e))
        except Exception as e:
            logger.exception("%s failed", method)
            kind, value = b"error", encode(f"{method} failed: {e!r}\n{traceback.format_exc()}")
        await self._socket.send_multipart([client, number, kind, value])


def _arguments_of(handler: Handler) -> Any:
    hints = get_type_hints(handler)
    return tuple.__class_getitem__(tuple(hints[name] for name in inspect.signature(handler).parameters))


# -- typed calls ---------------------------------------------------------------------------------------------


def methods_of(interface: type, instance: Any, **others: Handler) -> dict[str, Handler]:
    """The methods that an interface names, of an object that has them, for ``Server``.

    ``close`` is for the owner of the object, not for clients. others: more methods by name, and those that
    the object lacks.
    """
    methods = {name: others.get(name) or getattr(instance, name) for name in _signatures(interface)}
    return methods | others


def remote_calls(interface: type, call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The methods of an interface as calls of a server; the interface's annotations type the results.

    call: ``call`` of a client below, or a function with its arguments.
    """

    def bind(name: str, signature: inspect.Signature, returns: Any) -> Callable[..., Any]:
        def method(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(None, *arguments, **named)
            bound.apply_defaults()
            return call(name, returns, *list(bound.arguments.values())[1:])

        return method

    return {name: bind(name, *types) for name, types in _signatures(interface).items()}


def _signatures(interface: type) -> dict[str, tuple[inspect.Signature, Any]]:
    """Signature and type of the result of each public method but ``close``, by name."""
    return {
        name: (inspect.signature(method), get_type_hints(method)["return"])
        for name, method in vars(interface).items()
        if inspect.isfunction(method) and not name.startswith("_") and name != "close"
    }


# -- clients -------------------------------------------------------------------------------------------------


def _result(kind: bytes, value: bytes, returns: Any) -> Any:
    if kind == b"ok":
        return decode(value, returns)
    raise (UserError if kind == b"user_error" else ExpectedError)(decode(value, str))


class AsyncClient:
    """Client for one event loop; any number of requests at a time."""

    def __init__(self, address: str, token: str):
        """Connect as soon as the server listens; does not wait."""
        self._context = zmq.asyncio.Context()
        self._socket = _client_socket(self._context, token)
        self._socket.connect(address)
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[tuple[bytes, bytes]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, returns: Any, *arguments: Any) -> Any:
        """Call a method of the server; returns its result, of type ``returns``.

        Raises UserError and RuntimeError with the server's message, and the error that ``fail`` was called
        with.
        """
        number = next(self._numbers).to_bytes(8, "big")
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send_multipart([number, method.encode(), encode(arguments)])
            kind, value = await answer
        finally:
            self._waiting.pop(number, None)
        return _result(kind, value, returns)

    def fail(self, error: Exception) -> None:
        """Let all pending requests raise this exception; call it when the server has died."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    def close(self) -> None:
        """Disconnect."""
        self._reader.cancel()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            number, kind, value = await self._socket.recv_multipart()
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result((kind, value))


class Client:
    """Blocking client, one request at a time."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        name: str,
        timeout: float = 120.0,
        while_waiting: Callable[[], None] = lambda: None,
        reconnect: bool = False,
    ):
        """Connect; waits up to ``timeout`` seconds for the server to listen.

        name: of the server, for messages. while_waiting: called a few times a second during a request; if it
        raises, the request ends with that exception. reconnect: if the server dies, wait up to ``timeout``
        seconds for its successor, and resend the request.
        """
        self._name, self._address, self._timeout, self._reconnect = name, address, timeout, reconnect
        self._while_waiting = while_waiting
        self._context = zmq.Context()
        self._context.linger = 0
        self._socket = _client_socket(self._context, token)
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED
        )
        self._socket.connect(address)  # after the monitor, which would miss a connection made before it
        self._connected = False
        self._failures = self._number = self._losses = 0
        end = time.monotonic() + timeout
        try:
            while not self._connected:
                self._handle_events(min(_POLL_SECONDS, timeout))
                if not self._connected and time.monotonic() > end:
                    raise RuntimeError(f"no {name} answers at {address}; see its log")
        except RuntimeError:
            self.close()
            raise

    def call(self, method: str, returns: Any, *arguments: Any) -> Any:
        """Call a method of the server; returns its result, of type ``returns``.

        Raises UserError and RuntimeError with the server's message, RuntimeError also if it has died.
        """
        self._number += 1
        number = self._number.to_bytes(8, "big")
        request = [number, method.encode(), encode(arguments)]
        losses: int | None = None  # number of lost connections when the request was sent
        seen = time.monotonic()  # when it was connected last
        while True:
            self._handle_events(0)
            if self._connected:
                seen = time.monotonic()
                if losses not in (None, self._losses) and not self._reconnect:
                    break
                if losses != self._losses:
                    self._socket.send_multipart(request)
                    losses = self._losses
            elif not self._reconnect or time.monotonic() - seen > self._timeout:
                break
            if not self._socket.poll(1000 * _POLL_SECONDS):
                self._while_waiting()
            while self._socket.poll(0):
                reply_to, kind, value = self._socket.recv_multipart()
                if reply_to == number:
                    return _result(kind, value, returns)
        raise RuntimeError(f"the {self._name} has ended (while waiting for {method}); see its log")

    def close(self) -> None:
        """Disconnect."""
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def _handle_events(self, seconds: float) -> None:
        """Handle events of the connection. seconds: how long to wait for the first one."""
        while self._events.poll(1000 * seconds):
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._connected, self._losses = False, self._losses + 1
            if event & _FAILED:
                self._failures += 1
                if self._failures == _FAILURES:
                    raise RuntimeError(f"the {self._name} at {self._address} rejected the token (401)")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected, self._failures = True, 0
            seconds = 0
