"""Keys of ZeroMQ sockets, derived from a run's token: without it, a process can neither read nor send."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85


class Keys(NamedTuple):
    """A pair of CURVE keys, in ZeroMQ's text form."""

    public: bytes
    secret: bytes


def derive_keys(token: str, owner: str) -> Keys:
    """Keys of an end of a connection. owner: "server" or "client"."""
    secret = z85.encode(hashlib.blake2b(f"{owner} {token}".encode(), digest_size=32).digest())
    return Keys(zmq.curve_public(secret), secret)


def secure(socket: Any, token: str, *, server: bool) -> None:
    """Encrypt a socket's connections, and set no limit to queued messages; those unsent at its end are lost.

    A client must know the server's public key, which is never sent: only who has the token can derive it.
    """
    keys = derive_keys(token, "server" if server else "client")
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    if server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = derive_keys(token, "server").public
    socket.linger, socket.sndhwm, socket.rcvhwm = 0, 0, 0
