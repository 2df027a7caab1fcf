"""Ctrl-C and the standard streams of a command.

A run that takes days must not end because the reader of its output has ended (``| head``, a closed terminal).
Ctrl-C before a command has started should not print a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Stream(io.FileIO):
    """A standard stream that drops output if its reader has ended; a full disk is still an error."""

    drops_on_full_disk = False

    def write(self, data: object) -> int:
        """Write bytes; returns their number, also if they were dropped. Raises OSError on a full disk."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as e:
            if e.errno not in _FULL:  # a closed pipe or terminal, which stays closed
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            elif not _Stream.drops_on_full_disk:
                raise
            return memoryview(data).nbytes  # type: ignore[arg-type]


def protect_streams() -> None:
    """Let stdout and stderr ignore that their readers have ended; open closed standard streams on /dev/null.

    Streams that other code has replaced are left alone.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: ``os.open`` returns its descriptor, the lowest free one
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))
        elif name != "stdin" and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            protected = io.TextIOWrapper(
                io.BufferedWriter(_Stream(stream.fileno(), "w", closefd=False)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, protected)


@contextmanager
def without_full_disk_errors() -> Iterator[None]:
    """Within the block, output is also dropped if the disk is full."""
    _Stream.drops_on_full_disk = True
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _Stream.drops_on_full_disk = False


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Within the block, Ctrl-C ends the process with a message and no traceback.

    Use it around imports: some packages, such as pydantic, turn a KeyboardInterrupt into another error.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(_number: int, _frame: object) -> None:
    try:
        os.write(2, b"stopped: Ctrl-C\n")
    finally:
        os._exit(130)
