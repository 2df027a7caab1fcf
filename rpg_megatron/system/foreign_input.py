"""Reads foreign input in a process that can reach nothing, and returns it as plain values.

Files that others have made are parsed by large programs, whose faults a hostile file may use. So a function
that parses them (a *reader*) runs in a child process. The child imports what the reader needs, then gives up
every right (``sandbox.py``), then reads. It gets open files and an argument, and its answers are msgpack: the
worst that a hostile file can do is to give wrong values, which the caller checks as it would check a file's.

``python -m rpg_megatron.system.foreign_input MODULE:FUNCTION PARENT MEMORY FD...``: the child.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from sys import intern
from typing import Annotated, Any, BinaryIO

import msgspec

import rpg_megatron
from rpg_megatron.config.errors import first_line
from rpg_megatron.system import sandbox
from rpg_megatron.system.child import module_command, start_program
from rpg_megatron.system.parent_death import end_with_parent

_VALUE, _END = range(2)
"""An answer is one of these and a value, or why there are no more; the latter is empty at the end."""
_LARGEST = 64 << 20
"""Maximum bytes of one value; decoded, small ones take up to 70 times as much."""
_MESSAGE = msgspec.msgpack.Decoder(Annotated[str, msgspec.Meta(max_length=1000)])
_KEYS = msgspec.msgpack.Decoder(dict[str | int, msgspec.Raw])
_LIST = msgspec.msgpack.Decoder(list[msgspec.Raw])
_SIMPLE_LIST = msgspec.msgpack.Decoder(list[str | int | float | bool | None])
_EXTENSION = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_EXTENSIONS = (*range(0xC7, 0xCA), *range(0xD4, 0xD9))
"""First bytes of msgpack's extension types."""
_PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""Environment variables that a child gets: none with secrets."""


class ForeignInputError(Exception):
    """Foreign input cannot be read; the message says why, without naming the file."""


def read_foreign(
    reader: str,
    files: Sequence[BinaryIO],
    argument: Any = None,
    kind: Any = Any,
    *,
    memory: int = 4 << 30,
    seconds: float = 120.0,
    largest: int = _LARGEST,
    values: int | None = None,
) -> Iterator[Any]:
    """Yield the values of a reader, decoded as ``kind`` with msgspec.

    reader: ``module:function`` of this package, a generator function of (files, argument). Its module may
    have a function ``prepare``, which the child calls before it gives up its rights: what opens files, such
    as a late import, must happen there. A ValueError of the reader is a message about the file.
    files: open for reading. The child gets duplicates, and moves the position that they share.
    memory: bytes of address space for the reader. seconds, largest: limits of each value; largest in bytes.
    values: how many there may be; None: the caller counts what it gets, since a hostile file that has taken
    over the child may send values for ever. Of types that allow anything, use ``msgspec.Raw`` and
    ``plain_value``. The calling thread must live as long as the generator. Raises ForeignInputError.
    """
    numbers = [file.fileno() for file in files]
    try:
        sent = msgspec.msgpack.encode(argument)
    except UnicodeEncodeError as e:  # JSON's escapes can make half a surrogate pair
        raise ForeignInputError(f"it has text that is not Unicode ({e.reason})") from None
    process = start_program(
        module_command(__spec__.name, reader, os.getpid(), memory, *numbers),
        None,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=numbers,
        env=_environment(),
        cwd="/",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended; its exit code tells why
            process.stdin.write(sent)
            process.stdin.close()
        frames = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
        decoder = msgspec.msgpack.Decoder(kind)
        for count in itertools.count(1):
            try:
                number, raw = frames.decode(_receive(process, seconds, largest))
                value = (_MESSAGE if number else decoder).decode(raw)
            except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as e:
                raise ForeignInputError(f"its values have another form ({e})") from None
            if number and value:
                raise ForeignInputError(value)
            if number:
                return
            if values is not None and count > values:
                raise ForeignInputError("it has more values than it should")
            yield value
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def plain_value(
    raw: msgspec.Raw | memoryview, extension: Callable[[int, memoryview], Any] | None = None
) -> Any:
    """Decode a value of the types of JSON, bytes, and extensions, with text and numbers as keys.

    extension: called with code and content of each. Other keys are refused: lists of numbers with one hash
    can be chosen, and dictionaries of them take a time that is quadratic. Raises ValueError, RecursionError.
    """
    first = memoryview(raw)[0]
    if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
        # The same key is the same object, as in what was saved: it is then saved again as the same bytes.
        pairs = _KEYS.decode(raw).items()
        return {intern(k) if type(k) is str else k: plain_value(each, extension) for k, each in pairs}
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
        with contextlib.suppress(msgspec.MsgspecError):  # much faster for long lists of numbers
            return _SIMPLE_LIST.decode(raw)
        return [plain_value(each, extension) for each in _LIST.decode(raw)]
    if first not in _EXTENSIONS:
        return msgspec.msgpack.decode(raw)
    if extension is None:
        raise ValueError("a value of another type")
    decoded = _EXTENSION.decode(raw)
    return extension(decoded.code, memoryview(decoded.data))


def _environment() -> dict[str, str]:
    root = str(Path(rpg_megatron.__file__).parents[1])
    kept = {name: os.environ[name] for name in _PASSED if name in os.environ}
    path = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH")]))
    # One thread and one simple allocator: threads would escape Landlock, which holds for the caller's only.
    return {
        **kept,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }


def _receive(process: subprocess.Popen[bytes], seconds: float, largest: int) -> bytes:
    """One answer of the child, at most ``seconds`` from now."""
    assert process.stdout is not None
    end, pipe = time.monotonic() + seconds, process.stdout.fileno()
    readable = select.poll()  # any descriptor, unlike ``select``
    readable.register(pipe, select.POLLIN)

    def take(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not readable.poll(max(0.0, 1e3 * (end - time.monotonic()))):
                raise ForeignInputError(f"not read after {seconds:.0f} s")
            if not (chunk := os.read(pipe, min(count - len(data), 1 << 20))):
                raise ForeignInputError(f"its reader ended: {_reason(process)}")
            data += chunk
        return bytes(data)

    (length,) = struct.unpack(">I", take(4))
    if length > largest:
        raise ForeignInputError(f"its values are larger than {largest >> 20} MiB")
    return take(length)


def _reason(process: subprocess.Popen[bytes]) -> str:
    """Why a process ended that has closed its pipe."""
    try:
        code = process.wait(2.0)
    except subprocess.TimeoutExpired:
        return "it closed its pipe"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return "killed, possibly out of memory" if name == "SIGKILL" else name
    return f"exit code {code}"


# -- the child -----------------------------------------------------------------------------------------------


def main() -> None:
    """Run a reader: argv is its name, the limits and the numbers of the open files; stdin its argument."""
    name, parent, memory, *numbers = sys.argv[1:]
    end_with_parent(int(parent))
    answer = os.dup(1)
    os.dup2(2, 1)  # a library may print
    argument = msgspec.msgpack.decode(sys.stdin.buffer.read())
    files = [os.fdopen(int(number), "rb") for number in numbers]
    module, _, function = name.partition(":")
    loaded = importlib.import_module(module)
    read: Callable[..., Iterable[Any]] = getattr(loaded, function)
    getattr(loaded, "prepare", lambda: None)()
    sandbox.enter(int(memory))
    why = ""
    try:
        for value in read(files, argument):
            _send(answer, _VALUE, value)
    except ValueError as e:
        why = _text(e)
    except MemoryError:
        why = "cannot be read (more memory than allowed)"
    except Exception as e:
        why = f"cannot be read ({type(e).__name__}: {_text(e)})"
    _send(answer, _END, why)
    os._exit(0)


def _text(error: Exception) -> str:
    """Its first line, in UTF-8 and of a bounded length."""
    return first_line(error, 500).encode("utf-8", "replace").decode()


def _send(pipe: int, number: int, value: Any) -> None:
    data = msgspec.msgpack.encode((number, value))
    view = memoryview(struct.pack(">I", len(data)) + data)
    while view:
        view = view[os.write(pipe, view) :]


if __name__ == "__main__":
    main()
