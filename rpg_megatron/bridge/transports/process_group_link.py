"""Transport ``process_group``: links between one trainer rank and one engine worker, and their rendezvous.

Each link is a process group of two, so an engine that dies or restarts breaks only its own links, and only
pairs that exchange data are connected. Torch's default group is not used: engines have their own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpg_megatron.bridge.transports.folder_store import FolderStore
from rpg_megatron.config.cluster import ADDRESS_VARIABLE
from rpg_megatron.config.errors import UserError, first_line

SENDER, RECEIVER = 0, 1
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_ENVIRONMENT = threading.Lock()
_UNLIMITED = timedelta(days=20)  # torch counts milliseconds in 32 bits


class Rendezvous:
    """A key-value store through which trainer ranks and engine workers connect.

    On one node it is a private folder, on several nodes a TCPStore of trainer rank 0. TCPStore has no
    authentication. So requests for weights are signed with a secret that is part of ``place``, which engines
    receive by authenticated HTTP. The links themselves are not authenticated, as in all of torch.distributed.
    """

    def __init__(self, place: dict[str, Any], store: dist.Store | FolderStore) -> None:
        self.place = place
        self._secret = str(place["secret"]).encode()
        self.store = (
            store
            if isinstance(store, FolderStore)
            else dist.PrefixStore(hashlib.sha256(self._secret).hexdigest()[:16], store)
        )

    @classmethod
    def host(cls, address: str, *, timeout: float, backend: str, private: Path | None = None) -> Rendezvous:
        """Start a store in the folder ``private``, or else one that listens only at ``address``.

        address: a host name or IP of this machine. private: a folder that only this user can access, if all
        ranks and workers are on this node. timeout: seconds for a single message between a rank and a worker.
        backend: gloo or nccl.
        Raises UserError if the address is not one of this machine.
        """
        place: dict[str, Any] = {
            "address": address,
            "secret": secrets.token_urlsafe(16),
            "timeout": timeout,
            "backend": backend,
        }
        if private is not None:
            folder = Path(tempfile.mkdtemp(prefix="rendezvous-", dir=private))  # mode 0700
            return cls(place | {"folder": str(folder)}, FolderStore(folder))
        try:
            listener = socket.create_server((address, 0), backlog=4096)  # all links are made at once
        except OSError as e:
            raise UserError(
                f"the weight sync cannot listen at {address!r} ({e}); set cluster.interface"
            ) from None
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return cls(place | {"port": port}, store)

    @classmethod
    def join(cls, place: dict[str, Any]) -> Rendezvous:
        """Connect to the store at ``place``. Raises OSError if there is none."""
        if "folder" in place:
            if not (folder := Path(place["folder"])).is_dir():
                raise OSError(f"no trainer has a rendezvous in {folder}")
            return cls(place, FolderStore(folder))
        address = str(place["address"]), int(place["port"])
        try:
            # Torch's store would retry until its timeout if nothing listens.
            socket.create_connection(address, timeout=10).close()
            store = dist.TCPStore(*address, None, False, timeout=timedelta(seconds=20))
        except (OSError, RuntimeError) as e:
            raise OSError(f"no trainer answers at {address[0]}:{address[1]} ({first_line(e)})") from None
        store.set_timeout(timedelta(seconds=float(place["timeout"])))
        return cls(place, store)

    def send_request(self, inbox: str, request: dict[str, Any]) -> None:
        """Queue a signed request. Raises RuntimeError if the store has closed."""
        body = json.dumps(request)
        self.store.queue_push(inbox, json.dumps([body, self._sign(inbox, body)]))

    def poll_request(self, inbox: str) -> dict[str, Any] | None:
        """The next request; None if there is none. Requests without a valid signature are dropped."""
        while self.store.queue_len(inbox):
            if (request := self._verified(inbox, self.store.queue_pop(inbox))) is not None:
                return request
        return None

    def wait_request(self, inbox: str) -> dict[str, Any]:
        """Wait for the next request, without a time limit; blocks this connection.

        Raises RuntimeError if the store has closed.
        """
        self.store.set_timeout(_UNLIMITED)
        while (request := self._verified(inbox, self.store.queue_pop(inbox))) is None:
            pass
        return request

    def _verified(self, inbox: str, message: bytes) -> dict[str, Any] | None:
        try:
            body, signature = json.loads(message)
            if hmac.compare_digest(str(signature), self._sign(inbox, str(body))):
                return dict(json.loads(body))
        except (ValueError, TypeError):
            pass
        return None

    def _sign(self, inbox: str, body: str) -> str:
        return hmac.new(self._secret, f"{inbox}|{body}".encode(), hashlib.sha256).hexdigest()

    def reconnect(self) -> Rendezvous:
        """A new connection to the same store, because a connection serves one thread at a time."""
        return Rendezvous.join(self.place)

    def link_store(self, name: str, timeout: timedelta) -> dist.Store:
        """The store through which the two ends of a link connect."""
        if isinstance(self.store, FolderStore):
            return self.store.link_store(name, timeout)
        return dist.PrefixStore(f"link/{name}", self.store)


class LinkError(Exception):
    """The other end of a link has closed, died or timed out."""


class Link:
    """A one-way connection: a trainer rank sends, an engine worker receives."""

    def __init__(self, rendezvous: Rendezvous, name: str, side: int, device: torch.device) -> None:
        """One end (SENDER or RECEIVER) of the named link; waits for the other end. Raises LinkError."""
        self._peer = 1 - side
        self._device, self._pinned = device, False
        timeout = timedelta(seconds=float(rendezvous.place["timeout"]))
        store = rendezvous.link_store(name, timeout)
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
            raise LinkError(f"no connection: {first_line(e)}") from None

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory for messages: uint8 on the device, with gloo in (pinned) host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)

    def send(self, message: torch.Tensor) -> Any:
        """Start sending a contiguous tensor; ``finish`` the returned work before changing it."""
        return self._begin(lambda: self._group.send([message], self._peer, 0))

    def receive(self, into: torch.Tensor) -> Any:
        """Start receiving ``into.nbytes`` bytes; ``finish`` the returned work before reading them."""
        return self._begin(lambda: self._group.recv([into], self._peer, 0))

    @staticmethod
    def finish(work: Any) -> None:
        """Wait until a message is transferred. Raises LinkError."""
        try:
            work.wait()
        except RuntimeError as e:
            raise LinkError(first_line(e)) from None

    def close(self) -> None:
        """Close the link; pending transfers fail on the other end."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _begin(self, call: Any) -> Any:
        if self._group is None:
            raise LinkError("the link is closed")
        try:
            return call()
        except RuntimeError as e:
            raise LinkError(first_line(e)) from None


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """Within the block, NCCL groups are created with a blocking ``wait`` that raises at the timeout.

    Otherwise NCCL's watchdog would end this process when the other end dies. Not yet run on a GPU.
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
    """The network device for gloo: this node's cluster address, else the store's if local, else by host name.

    Trainer and engine may be on different machines, so the store's address may belong to the other one.
    """
    address = os.environ.get(ADDRESS_VARIABLE, address)
    try:
        with socket.create_server((address, 0)):
            pass
    except OSError:
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(hostname=address)
