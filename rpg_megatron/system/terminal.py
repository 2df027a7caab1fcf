"""Ctrl-C and the standard streams of a command.

A run that takes days must not end because the reader of its output has ended (``| head``, a closed terminal).
Ctrl-C before a command has started should not print a traceback. Names and texts from models, data sets and
libraries must not control the terminal.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators, and what changes the direction of text
    "\ud800-\udfff]"  # bytes of file names that are not UTF-8, which a stream may not encode
)
_PROGRESS_BAR = re.compile(r"\r|(?:\x1b\[A)+\Z")
"""Start of a line that tqdm draws again, and the whole of what it writes to move up."""
_LONGEST_ERROR = 16_000


def printable(text: str) -> str:
    """A text with its control characters as Python's escapes; newlines and tabs stay."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """A text as ``printable`` shows it, in one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def ranges(numbers: Sequence[int], separator: str = ", ") -> str:
    """Ascending numbers as ranges: 0-3, 7."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return separator.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def print_error(text: str) -> None:
    """Print an error message, without its middle if it is very long."""
    if (more := len(text) - _LONGEST_ERROR) > 0:
        half = _LONGEST_ERROR // 2
        text = f"{text[:half]}\n... {more:,} characters are left out ...\n{text[-half:]}"
    print(text, file=sys.stderr)


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


class _Text(io.TextIOWrapper):
    """Text of a standard stream, without control characters."""

    unfiltered: io.TextIOWrapper
    """The same stream for a writer that removes foreign control characters itself, such as a console."""

    def write(self, text: str) -> int:
        """Write a text as ``printable`` shows it."""
        bar = _PROGRESS_BAR.match(text)
        end = bar.end() if bar else 0
        super().write(text[:end] + printable(text[end:]))
        return len(text)


def protect_streams() -> None:
    """Let stdout and stderr escape control characters, and ignore that their readers have ended; open closed
    standard streams on /dev/null.

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
            buffer = io.BufferedWriter(_Stream(stream.fileno(), "w", closefd=False))
            options: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors}
            options["write_through"] = True  # both pass on at once what they get, in order
            options["line_buffering"] = stream.line_buffering or stream.write_through
            protected = _Text(buffer, **options)
            protected.unfiltered = io.TextIOWrapper(buffer, **options)
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
