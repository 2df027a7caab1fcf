"""Parses untrusted YAML, with limits on size and nesting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rpg_megatron.config.files import read_text

MAX_YAML = 250_000
"""Maximum characters of a YAML file, and of its values after aliases are expanded."""
_MAX_LEVELS = 100
"""Maximum nesting of YAML, with its aliases expanded; code that walks through the values is recursive."""
_MAX_DIGITS = 1000
"""Maximum digits of an integer in YAML."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""NUL, and half of a surrogate pair."""


def read_yaml(file: Path, *inside: Path) -> Any:
    """The value in a YAML file. Raises as ``parse_yaml``, and OSError or UnicodeDecodeError.

    inside: see ``open_regular``.
    """
    return parse_yaml(read_text(file, *inside, limit=MAX_YAML))


def parse_yaml(text: str) -> Any:
    """``yaml.safe_load`` for untrusted text. Raises yaml.YAMLError for every invalid text.

    Also refuses duplicate keys, of which PyYAML silently uses the last, and aliases that expand to more than
    ``MAX_YAML`` characters.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except (ValueError, OverflowError) as e:  # such as the escape of a character that does not exist
        raise yaml.YAMLError(f"a value cannot be read ({e})") from None


class _StrictLoader(yaml.SafeLoader):
    def construct_document(self, node: yaml.Node) -> Any:
        _measure(node, {})
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as e:
            # PyYAML's errors for text that does not fit its tag, such as a date that does not exist.
            raise yaml.constructor.ConstructorError(
                None, None, f"a value cannot be read ({type(e).__name__}: {e})", node.start_mark
            ) from None

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


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Characters and levels of a node with its aliases expanded.

    known: id of a node -> the same for it; None: in progress.
    """
    problem = None
    if id(node) in known:
        if (measured := known[id(node)]) is not None:
            return measured
        problem = "an alias refers to a value that contains it"
    elif isinstance(node, yaml.CollectionNode):
        known[id(node)] = None
        pairs = isinstance(node, yaml.MappingNode)
        inner = [_measure(n, known) for part in node.value for n in (part if pairs else (part,))]
        size, levels = 1 + sum(s for s, _ in inner), 1 + max((n for _, n in inner), default=0)
        if size > MAX_YAML:
            problem = "its values are too large after its aliases are expanded"
        elif levels > _MAX_LEVELS:
            problem = "nested too deeply"
    else:
        size, levels = 1 + len(node.value), 0
        if _NO_TEXT.search(node.value):
            problem = "a text contains a NUL or half of a surrogate pair"
    if problem is not None:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    known[id(node)] = size, levels
    return size, levels
