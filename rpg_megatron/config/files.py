"""Reads untrusted input files: regular files only, with limits on size and nesting."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

_MAX_JSON_BYTES = 100_000_000
"""The limit of safetensors' headers; a model's largest JSON files, index and tokenizer, are smaller."""
_MAX_YAML = 1_000_000
"""Maximum characters of a YAML file, and of its values after aliases are expanded."""
_MAX_DIGITS = 1000
"""Maximum digits of an integer in YAML."""


def open_regular(file: Path) -> BinaryIO:
    """Open a file for reading, in binary mode. Raises OSError, also for a FIFO, socket or device.

    Reading those may block forever or never end.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    raise OSError(errno.EINVAL, "not a regular file", str(file))


def read_text(file: Path, limit: int = _MAX_JSON_BYTES) -> str:
    """The content of a UTF-8 file of at most ``limit`` bytes. Raises OSError, UnicodeDecodeError."""
    with open_regular(file) as f:
        content = f.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(file))
    return content.decode("utf-8")


def read_json(file: Path) -> Any:
    """The value in a JSON file. Raises OSError if it cannot be read, ValueError if it is not valid."""
    return parse_json(read_text(file))


def parse_json(text: str | bytes, **options: Any) -> Any:
    """``json.loads`` that raises ValueError for every invalid text."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as e:
        if "integer string conversion" in str(e):  # Python's message is for programmers
            raise ValueError("a number has too many digits") from None
        raise


def read_yaml(file: Path) -> Any:
    """The value in a YAML file. Raises as ``parse_yaml``, and OSError or UnicodeDecodeError."""
    return parse_yaml(read_text(file, _MAX_YAML))


def parse_yaml(text: str) -> Any:
    """``yaml.safe_load`` for untrusted text. Raises yaml.YAMLError for every invalid text.

    Also refuses duplicate keys, of which PyYAML silently uses the last, and aliases that expand to more than
    a million characters.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as e:  # such as a date that does not exist
        raise yaml.YAMLError(f"a value cannot be read ({e})") from None


class _StrictLoader(yaml.SafeLoader):
    def construct_document(self, node: yaml.Node) -> Any:
        _measure(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused by the parent class
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} appears twice in one section", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        # Larger ones take long to parse, and Python refuses to print them.
        if len(node.value) > _MAX_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, "a number has too many digits", node.start_mark
            )
        return self.construct_yaml_int(node)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_integer)


def _measure(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Characters of a node with its aliases expanded. known: id of a node -> its size; None: in progress."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise yaml.constructor.ConstructorError(
                None, None, "an alias refers to a value that contains it", node.start_mark
            )
        return size
    known[id(node)] = None
    if isinstance(node, yaml.MappingNode):
        size = 1 + sum(_measure(part, known) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size = 1 + sum(_measure(part, known) for part in node.value)
    else:
        size = 1 + len(node.value)
    if size > _MAX_YAML:
        raise yaml.constructor.ConstructorError(
            None, None, "its values are too large after its aliases are expanded", node.start_mark
        )
    known[id(node)] = size
    return size
