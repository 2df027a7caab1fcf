"""Send progress events to the launcher's display over a unix socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

EVENTS = "events.sock"
"""File name of the progress display's socket in the work folder."""


class EventSender:
    """Sends small JSON objects as datagrams to a unix socket. Never blocks and never raises.

    Events are dropped if no process listens or the queue is full, so only the display may depend on them.
    """

    def __init__(self, path: Path):
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def send(self, event: dict[str, Any]) -> None:
        """Send one object, for example ``{"kind": "phase", "name": "rollout", "done": 3, "total": 64}``."""
        try:
            self._socket.sendto(json.dumps(event, default=str).encode(), self._path)
        except (OSError, ValueError, TypeError):  # no listener, queue full, message too long, not JSON
            return

    def phase(self, name: str, done: int, total: int) -> None:
        """Progress of a phase of the step."""
        self.send({"kind": "phase", "name": name, "done": done, "total": total})

    def close(self) -> None:
        """Close the socket; further events are dropped."""
        self._socket.close()
