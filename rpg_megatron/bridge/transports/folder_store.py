"""A key-value store with queues in a private folder, for processes of one user on one node.

It has the methods of torch's TCPStore that links need. TCPStore has no authentication: every user of the node
can read and change it. Torch's FileStore is no replacement, because its file only grows: it would keep the
manifest of every sync. A server of ``system/messages.py`` is none either: it needs an event loop, and ranks
block in collectives.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from rpg_megatron.config.files import atomic_write_text, open_own, remove

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.002, 0.05
"""Shortest and longest interval at which a reader polls an empty queue."""


class FolderStore:
    """The store in ``folder``, which exists and is accessible to its owner only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Set a key. Raises RuntimeError, as torch's stores do, if the folder was removed."""
        try:
            atomic_write_text(self._path(key), value)
        except OSError as e:
            raise RuntimeError(f"{self._folder}: {e.strerror or e}") from None

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key. Raises RuntimeError if it is not set."""
        try:
            with open_own(self._path(key)) as file:
                return bytes(file.read())
        except OSError as e:
            raise RuntimeError(f"{self._folder}: {e.strerror or e}") from None

    def queue_push(self, key: str, value: str) -> None:
        """Append to a queue; safe with several writers. Raises RuntimeError if the folder was removed."""
        queue = self._path(key)
        name = f"{time.monotonic_ns():020d}-{secrets.token_hex(4)}"  # in the order of this writer's messages
        try:
            while True:
                # Not exist_ok, which checks the folder again: the reader may have removed it by then.
                with suppress(FileExistsError):
                    queue.mkdir()
                with suppress(FileNotFoundError):  # the reader has just removed the empty queue
                    return atomic_write_text(queue / name, value)
        except OSError as e:
            raise RuntimeError(f"{self._folder}: {e.strerror or e}") from None

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing: ``queue_pop`` waits without limit."""

    def queue_len(self, key: str) -> int:
        """Number of messages in a queue."""
        return len(self._messages(key))

    def queue_pop(self, key: str) -> bytes:
        """Remove and return the first message of a queue; waits for one. For one reader.

        Raises RuntimeError if the folder was removed.
        """
        began = time.monotonic()
        while not (messages := self._messages(key)):
            if not self._folder.is_dir():
                raise RuntimeError(f"{self._folder}: no such folder")
            # Wait a tenth of the time so far: an idle reader needs little CPU, and messages wait briefly.
            time.sleep(min(max((time.monotonic() - began) / 10, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS))
        first = messages[0]
        with open_own(first) as file:
            value = bytes(file.read())
        remove(first)
        with suppress(OSError):  # not empty
            first.parent.rmdir()
        return value

    def link_store(self, name: str, timeout: timedelta) -> dist.Store:
        """A torch store for the two processes of a link."""
        store = dist.FileStore(str(self._path(f"link/{name}")))
        store.set_timeout(timeout)
        return store

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def _messages(self, key: str) -> list[Path]:
        try:
            return sorted(file for file in self._path(key).iterdir() if not file.name.startswith("."))
        except FileNotFoundError:
            return []
