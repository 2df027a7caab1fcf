"""Connections between one trainer rank and one engine worker: a process group of two, and how they find it.

Groups of two, because an engine that dies, or comes back as another process, then breaks its own links and no
others; and because only those pairs are connected that have something to say to each other. Torch's default
group plays no part: engines have one of their own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rpg_megatron.config.cluster import ADDRESS_VARIABLE
from rpg_megatron.config.errors import UserError

SENDER, RECEIVER = 0, 1
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_ENVIRONMENT = threading.Lock()


class Rendezvous:
    """A key-value store on trainer rank 0, by which ranks and workers find each other.

    Torch's store knows no passwords. So requests for weights are signed with a secret that only those learn
    who are told the ``place``: engines, by authenticated requests. Links themselves are as open as all of
    torch.distributed is.
    """

    def __init__(self, place: dict[str, Any], store: dist.Store) -> None:
        self.place = place
        self._secret = str(place["secret"]).encode()
        self.store = dist.PrefixStore(hashlib.sha256(self._secret).hexdigest()[:16], store)

    @classmethod
    def host(cls, address: str, *, timeout: float, backend: str) -> Rendezvous:
        """Start a store that listens at ``address`` (a host name or IP of this machine) and nowhere else.

        timeout: seconds that a single message between a rank and a worker may take. backend: gloo or nccl.
        """
        try:
            listener = socket.create_server((address, 0), backlog=256)
        except OSError as e:
            raise UserError(f"bridge.address: {address!r} is no address of this machine ({e})") from None
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        place = {
            "address": address,
            "port": port,
            "secret": secrets.token_urlsafe(16),
            "timeout": timeout,
            "backend": backend,
        }
        return cls(place, store)

    @classmethod
    def join(cls, place: dict[str, Any]) -> Rendezvous:
        """Connect to the store of a place. Raises OSError if nobody listens there."""
        address = str(place["address"]), int(place["port"])
        try:
            # Torch's store would try again and again where nobody listens.
            socket.create_connection(address, timeout=10).close()
            store = dist.TCPStore(*address, None, False, timeout=timedelta(seconds=20))
        except (OSError, RuntimeError) as e:
            raise OSError(f"no trainer answers at {address[0]}:{address[1]} ({_first_line(e)})") from None
        store.set_timeout(timedelta(seconds=float(place["timeout"])))
        return cls(place, store)

    def ask(self, inbox: str, request: dict[str, Any]) -> None:
        """Leave a request. Raises RuntimeError if the store is gone."""
        body = json.dumps(request)
        self.store.queue_push(inbox, json.dumps([body, self._sign(inbox, body)]))

    def take(self, inbox: str) -> dict[str, Any] | None:
        """The next request, if there is one; those that are not signed are dropped."""
        while self.store.queue_len(inbox):
            try:
                body, signature = json.loads(self.store.queue_pop(inbox))
                if hmac.compare_digest(str(signature), self._sign(inbox, str(body))):
                    return dict(json.loads(body))
            except (ValueError, TypeError):
                continue
        return None

    def _sign(self, inbox: str, body: str) -> str:
        return hmac.new(self._secret, f"{inbox}|{body}".encode(), hashlib.sha256).hexdigest()

    def reconnect(self) -> Rendezvous:
        """Another connection to the same store: one serves one thread at a time."""
        return Rendezvous.join(self.place)

    def connect(self, name: str, side: int, device: torch.device) -> Link:
        """One end of the link of this name; waits for the other end. Raises LinkError."""
        return Link(self, name, side, device)


class LinkError(Exception):
    """The other end of a link is gone, or does not answer in time."""


class Link:
    """One direction of weights: the sender is a trainer rank, the receiver an engine worker."""

    def __init__(self, rendezvous: Rendezvous, name: str, side: int, device: torch.device) -> None:
        self._peer = 1 - side
        self._device, self._pinned = device, False
        timeout = timedelta(seconds=float(rendezvous.place["timeout"]))
        store = dist.PrefixStore(f"link/{name}", rendezvous.store)
        try:
            if rendezvous.place["backend"] == "gloo":
                self._device, self._pinned = torch.device("cpu"), device.type == "cuda"
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
                options._devices = [_gloo_device(str(rendezvous.place["address"]))]
                options._timeout = timeout
                self._group: Any = dist.ProcessGroupGloo(store, side, 2, options)
            else:
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timeout
                with _blocking_waits():
                    self._group = dist.ProcessGroupNCCL(store, side, 2, nccl)
        except RuntimeError as e:
            raise LinkError(f"no connection: {_first_line(e)}") from None

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory that messages can be sent from and received into: uint8, on the device or, over gloo, host
        memory.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)

    def send(self, message: torch.Tensor) -> Any:
        """Begin to send a contiguous tensor; ``finish`` the result before it is changed."""
        return self._begin(lambda: self._group.send([message], self._peer, 0))

    def receive(self, into: torch.Tensor) -> Any:
        """Begin to receive as many bytes as ``into`` has; ``finish`` the result before it is read."""
        return self._begin(lambda: self._group.recv([into], self._peer, 0))

    @staticmethod
    def finish(work: Any) -> None:
        """Wait until a message has come through. Raises LinkError."""
        try:
            work.wait()
        except RuntimeError as e:
            raise LinkError(_first_line(e)) from None

    def close(self) -> None:
        """Hang up; what is under way on the other end fails."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _begin(self, call: Any) -> Any:
        if self._group is None:
            raise LinkError("the link is closed")
        try:
            return call()
        except RuntimeError as e:
            raise LinkError(_first_line(e)) from None


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """Build NCCL groups whose ``wait`` waits and raises at the timeout.

    Else NCCL's watchdog would end this process when the other end dies. Not yet run on a GPU.
    """
    with _ENVIRONMENT:
        before = os.environ.get(_BLOCKING)
        os.environ[_BLOCKING] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_BLOCKING]
            else:
                os.environ[_BLOCKING] = before


def _gloo_device(address: str) -> Any:
    """Where gloo listens: at this node's address in the cluster, or at the store's if this machine has it,
    else as its host name says.

    Trainer and engine may sit on different machines, so the store's address is only one end's.
    """
    address = os.environ.get(ADDRESS_VARIABLE, address)
    try:
        with socket.create_server((address, 0)):
            pass
    except OSError:
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(hostname=address)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
