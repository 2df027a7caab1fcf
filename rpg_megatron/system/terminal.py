"""Ctrl-C and the standard streams of a command.

A run that takes days must not end because the reader of its output did (``| head``, a closed terminal), and
Ctrl-C before any command runs needs no traceback.
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
    """A standard stream. What nobody can read any more is dropped; a full disk is an error all the same."""

    drops_on_full_disk = False

    def write(self, data: object) -> int:
        """Write bytes; see the class."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as e:
            if e.errno not in _FULL:  # a closed pipe or terminal: it stays closed
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            elif not _Stream.drops_on_full_disk:
                raise
            return memoryview(data).nbytes  # type: ignore[arg-type]


def protect_streams() -> None:
    """Make stdout and stderr outlive their readers; streams that are closed from the start go to /dev/null.

    Without effect on streams that something else has replaced.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the lowest free descriptor is the one that is missing
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
    """Within the block, output that a full disk cannot take is dropped too."""
    _Stream.drops_on_full_disk = True
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _Stream.drops_on_full_disk = False


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Within the block, Ctrl-C ends the process with a message and no traceback: for imports."""
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
