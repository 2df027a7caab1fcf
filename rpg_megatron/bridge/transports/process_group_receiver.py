"""Transport ``process_group``, engine side: one link, and the parts of the messages that arrive on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from rpg_megatron.bridge.transports.buckets import Bucket, BucketPart, largest, message_bytes
from rpg_megatron.bridge.transports.process_group_link import Link, LinkError


class Receiver:
    """The engine worker's end of one link, whose messages arrive one after the other in two buffers."""

    def __init__(self, link: Link, name: str) -> None:
        self.name = name
        self.buckets: list[Bucket] = []
        self.buffers: list[torch.Tensor] = []
        self._plans = 0
        self._link = link
        self._coming: tuple[Bucket, torch.Tensor, Any] | None = None
        self._next = 0
        self._parts: deque[tuple[BucketPart, torch.Tensor]] = deque()

    @property
    def on_gpu(self) -> bool:
        """Whether messages arrive in the memory of a GPU."""
        return any(buffer.device.type == "cuda" for buffer in self.buffers)

    @property
    def left(self) -> int:
        """Number of parts of the present message that have not been taken."""
        return len(self._parts)

    @property
    def position(self) -> tuple[str, int, int, int]:
        """Identifies what comes next."""
        return self.name, self._plans, self._next, self.left

    @property
    def busy(self) -> bool:
        """Whether messages are still expected."""
        return self._coming is not None

    def plan(self, buckets: list[Bucket]) -> None:
        """Set the buckets to receive from now on; allocates memory for two messages."""
        self.buckets = buckets
        size = largest(buckets)
        self._plans += 1
        self.buffers = [self._link.buffer(size) for _ in range(min(2, len(buckets)))]

    def finish_handshake(self, version: int) -> None:
        """Receive the version and size that the rank serves. Raises LinkError if they are not as expected."""
        message = self._link.buffer(16)
        self._link.finish(self._link.receive(message))
        served, total = message.view(torch.int64).tolist()
        expected = sum(p.nbytes for b in self.buckets for p in b)
        if (served, total) != (version, expected):
            raise LinkError(f"it serves {total} bytes of version {served}, expected {expected} of {version}")

    def begin(self) -> None:
        """Start receiving the first message."""
        self._next = 0
        self._parts.clear()
        self._post()

    def take(self, part: BucketPart) -> torch.Tensor:
        """The bytes of ``part``, which must be the next one. Raises LinkError."""
        if not self._parts:
            self.advance()
        expected, values = self._parts.popleft()
        if expected != part:
            raise LinkError(f"{expected.hf_name} {expected.box} is next, not {part.hf_name} {part.box}")
        return values

    def advance(self) -> None:
        """Go on to the next message. Raises LinkError."""
        if self._coming is None:
            raise LinkError("all messages were received, but another one is requested")
        bucket, message, work = self._coming
        self._link.finish(work)
        # The previous message has been consumed, so its memory can receive the next one. Not earlier: on
        # a GPU, a receive that waits for the previous one may block other links in the same hardware
        # queue, and with them the rank that this one waits for.
        self._post()
        self._parts = deque(_parts_of(bucket, message))

    def coming_parts(self) -> Iterator[tuple[BucketPart, torch.Tensor, int]]:
        """The parts to come, where each of them arrives, and how many are left then of its message."""
        messages = [list(self._parts)] if self._parts else []
        first = self._next - (self._coming is not None)
        for i in range(first, len(self.buckets)):
            messages.append(list(_parts_of(self.buckets[i], self.buffers[i % 2])))
        for message in messages:
            for i, (part, values) in enumerate(message):
                yield part, values, len(message) - i - 1

    def skip_to(self, left: int) -> None:
        """The parts of the present message were taken until so many are left."""
        while len(self._parts) > left:
            self._parts.popleft()

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def _post(self) -> None:
        """Start receiving the next message, if there is one."""
        self._coming = None
        if self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            message = self.buffers[self._next % 2][: message_bytes(bucket)]
            self._coming = bucket, message, self._link.receive(message)
            self._next += 1


def _parts_of(bucket: Bucket, message: torch.Tensor) -> Iterator[tuple[BucketPart, torch.Tensor]]:
    at = 0
    for part in bucket:
        yield part, message[at : at + part.nbytes]
        at += part.padded_nbytes
