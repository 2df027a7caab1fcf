"""An interpreter of pickles that can only make plain values: numbers, text, bytes, lists and records of them.

Python's unpickler imports what a pickle names, calls it and sets attributes of it. Here, a name stays a
``Name``, and a call of it becomes a ``Record`` with the arguments and the state that the pickle gives. No
class, function or attribute of this process is ever touched, so no pickle can change one. Dictionaries are
lists of pairs: nothing is hashed or compared. Nothing here recurses, so no nesting can exhaust the stack.
Opcodes: Lib/pickletools.py of Python.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

MAX_OPERATIONS = 100_000_000
"""Opcodes of one pickle; an index of a million pieces has 30 million."""


class Name(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        """As in Python, with dots."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """What a pickle would create by calling ``maker``."""

    maker: Any
    """A Name, unless the pickle is damaged."""
    arguments: Any = ()
    state: Any = None
    """Argument of its ``__setstate__``: mostly ``Pairs``, of its attributes."""
    items: list[Any] = field(default_factory=list)
    """What is added to it: values, or of a dictionary (key, value)."""

    def __str__(self) -> str:
        """For messages."""
        return f"{self.maker if isinstance(self.maker, Name) else 'an object'}(...)"


@dataclass(eq=False, slots=True)
class Pairs:
    """A dictionary."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """The last value of a key of type str; None if it is missing."""
        return next((v for k, v in reversed(self.items) if type(k) is str and k == key), None)


@dataclass(eq=False, slots=True)
class Reference:
    """What a pickle refers to outside itself (a persistent id): in torch's files, a tensor's storage."""

    key: Any


class _Mark:
    """Position on the stack."""


_MARK = _Mark()


def load_values(data: bytes) -> Any:
    """The value of a pickle.

    Raises ValueError if it is damaged or has more than ``MAX_OPERATIONS`` opcodes.
    """
    try:
        return _Interpreter(data).run()
    except (IndexError, struct.error, TypeError, OverflowError, AttributeError) as e:
        raise ValueError(f"damaged pickle ({type(e).__name__})") from None


def _fail(why: str) -> NoReturn:
    raise ValueError(f"damaged pickle ({why})")


class _Interpreter:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, actions, stack = self._data, _ACTIONS, self._stack
        for _ in range(MAX_OPERATIONS):
            opcode = data[self._at]
            self._at += 1
            if opcode == 0x2E:  # STOP
                if len(stack) != 1:
                    _fail("several values")
                return self._pop()
            action = actions.get(opcode)
            if action is None:
                _fail(f"opcode {opcode:#04x}")
            action(self)
        _fail("too many operations")

    # -- reading -------------------------------------------------------------------------------------------

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            _fail("truncated")
        data = self._data[self._at : end]
        self._at = end
        return data

    def _number(self, form: str) -> int:
        number: int = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return number

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            _fail("truncated")
        return self._bytes(end + 1 - self._at)[:-1]

    # -- the stack -----------------------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            _fail("a mark is no value")
        return value

    def _top(self) -> Any:
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        stack = self._stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                values = stack[index + 1 :]
                del stack[index:]
                return values
        _fail("no mark")

    # -- opcodes -------------------------------------------------------------------------------------------

    def _append(self, values: list[Any]) -> None:
        top = self._top()
        items = top.items if type(top) is Record else top
        if type(items) is not list:
            _fail("items of no list")
        items.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        top = self._top()
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if type(top) not in (Record, Pairs):
            _fail("items of no dictionary")
        top.items.extend(pairs)

    def _dictionary(self) -> None:
        values = self._pop_to_mark()
        self._push(Pairs(list(zip(values[::2], values[1::2], strict=True))))

    def _reduce(self) -> None:
        arguments = self._pop()
        self._push(Record(self._pop(), arguments))

    def _reduce_with_keywords(self) -> None:
        keywords, arguments = self._pop(), self._pop()
        self._push(Record(self._pop(), arguments, keywords))

    def _build(self) -> None:
        state = self._pop()
        top = self._top()
        if type(top) is not Record:
            _fail("state of no object")
        top.state = state

    def _instance(self) -> None:
        module, name = self._line().decode(), self._line().decode()
        self._push(Record(Name(module, name), self._pop_to_mark()))

    def _object(self) -> None:
        maker, *arguments = self._pop_to_mark()
        self._push(Record(maker, arguments))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            _fail("a name is no text")
        self._push(Name(module, name))

    def _pop_one(self) -> None:
        self._stack.pop()

    def _memoize(self, index: int) -> None:
        self._memo[index] = value = self._top()
        if value is _MARK:
            _fail("a mark is no value")

    def _recall(self, index: int) -> None:
        if index not in self._memo:
            _fail("an unknown reference")
        self._push(self._memo[index])

    def _literal_integer(self) -> None:
        text = self._line()
        self._push({b"00": False, b"01": True}[text] if text in (b"00", b"01") else int(text.rstrip(b"L")))

    def _long(self, size: int) -> None:
        self._push(int.from_bytes(self._bytes(size), "little", signed=True))

    def _text(self, size: int) -> None:
        self._push(self._bytes(size).decode("utf-8", "surrogatepass"))


def _tuple(count: int) -> Any:
    def action(vm: _Interpreter) -> None:
        values = [vm._pop() for _ in range(count)]
        vm._push(tuple(reversed(values)))

    return action


def _constant(value: Any) -> Any:
    return lambda vm: vm._push(value)


_ACTIONS: dict[int, Any] = {
    ord(key): action
    for key, action in {
        "(": lambda vm: vm._push(_MARK),
        "0": lambda vm: vm._pop_one(),
        "1": lambda vm: vm._pop_to_mark(),
        "2": lambda vm: vm._push(vm._top()),
        "F": lambda vm: vm._push(float(vm._line())),
        "G": lambda vm: vm._push(struct.unpack(">d", vm._bytes(8))[0]),
        "I": lambda vm: vm._literal_integer(),
        "L": lambda vm: vm._literal_integer(),
        "J": lambda vm: vm._push(vm._number("<i")),
        "K": lambda vm: vm._push(vm._number("<B")),
        "M": lambda vm: vm._push(vm._number("<H")),
        "N": _constant(None),
        "P": lambda vm: vm._push(Reference(vm._line().decode())),
        "Q": lambda vm: vm._push(Reference(vm._pop())),
        "R": lambda vm: vm._reduce(),
        "S": lambda vm: vm._push(vm._line().strip(b"'\"").decode("latin-1")),
        "T": lambda vm: vm._push(vm._bytes(vm._number("<I")).decode("latin-1")),
        "U": lambda vm: vm._push(vm._bytes(vm._number("<B")).decode("latin-1")),
        "V": lambda vm: vm._push(vm._line().decode("raw-unicode-escape")),
        "X": lambda vm: vm._text(vm._number("<I")),
        "B": lambda vm: vm._push(vm._bytes(vm._number("<I"))),
        "C": lambda vm: vm._push(vm._bytes(vm._number("<B"))),
        "a": lambda vm: vm._append([vm._pop()]),
        "e": lambda vm: vm._append(vm._pop_to_mark()),
        "b": lambda vm: vm._build(),
        "c": lambda vm: vm._push(Name(vm._line().decode(), vm._line().decode())),
        "d": lambda vm: vm._dictionary(),
        "}": lambda vm: vm._push(Pairs()),
        "s": lambda vm: vm._set_items([vm._pop(), vm._pop()][::-1]),
        "u": lambda vm: vm._set_items(vm._pop_to_mark()),
        "g": lambda vm: vm._recall(int(vm._line())),
        "h": lambda vm: vm._recall(vm._number("<B")),
        "j": lambda vm: vm._recall(vm._number("<I")),
        "p": lambda vm: vm._memoize(int(vm._line())),
        "q": lambda vm: vm._memoize(vm._number("<B")),
        "r": lambda vm: vm._memoize(vm._number("<I")),
        "i": lambda vm: vm._instance(),
        "o": lambda vm: vm._object(),
        "l": lambda vm: vm._push(vm._pop_to_mark()),
        "]": lambda vm: vm._push([]),
        "t": lambda vm: vm._push(tuple(vm._pop_to_mark())),
        ")": _constant(()),
        "\x80": lambda vm: vm._bytes(1),  # PROTO
        "\x81": lambda vm: vm._reduce(),  # NEWOBJ: class and arguments, as for REDUCE
        "\x85": _tuple(1),
        "\x86": _tuple(2),
        "\x87": _tuple(3),
        "\x88": _constant(True),
        "\x89": _constant(False),
        "\x8a": lambda vm: vm._long(vm._number("<B")),
        "\x8b": lambda vm: vm._long(vm._number("<i")),
        "\x8c": lambda vm: vm._text(vm._number("<B")),
        "\x8d": lambda vm: vm._text(vm._number("<Q")),
        "\x8e": lambda vm: vm._push(vm._bytes(vm._number("<Q"))),
        "\x8f": lambda vm: vm._push([]),  # EMPTY_SET
        "\x90": lambda vm: vm._append(vm._pop_to_mark()),  # ADDITEMS
        "\x91": lambda vm: vm._push(vm._pop_to_mark()),  # FROZENSET
        "\x92": lambda vm: vm._reduce_with_keywords(),  # NEWOBJ_EX
        "\x93": lambda vm: vm._stack_global(),
        "\x94": lambda vm: vm._memoize(len(vm._memo)),
        "\x95": lambda vm: vm._bytes(8),  # FRAME
        "\x96": lambda vm: vm._push(vm._bytes(vm._number("<Q"))),  # BYTEARRAY8
    }.items()
}
"""Opcode -> action. Left out: extension codes (EXT1, EXT2, EXT4) and buffers outside the pickle."""
