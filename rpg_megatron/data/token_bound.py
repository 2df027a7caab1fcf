"""How many tokens a text has at most, without tokenizing it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_SPLITTERS = {"Split", "Digits", "ByteLevel"}
_NFC_GROWTH = 3
"""Unicode's normal form C makes a text at most three times as long, in UTF-8 (UAX 15)."""


class TokenBound(NamedTuple):
    """The maximum number of tokens of a text; it has at least one if it is not empty."""

    added: int
    """Special tokens of each text."""
    growth: int
    """Tokens a byte of a text that is not ASCII; of ASCII, one."""

    def of(self, text: str) -> int:
        """The maximum number of tokens of this text."""
        return self.added + (len(text) if text.isascii() else self.growth * len(text.encode()))


def token_bound(tokenizer: Any, *, special: bool) -> TokenBound | None:
    """The bound of a tokenizer; special: whether it adds special tokens.

    Byte-level BPE begins with one symbol a byte and only merges, so a text has at most as many tokens as
    bytes, besides special ones. None for other tokenizers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from transformers.tokenization_utils_tokenizers import TokenizersBackend  # slow to import

    if getattr(type(tokenizer), "_encode_plus", None) is not TokenizersBackend._encode_plus:
        return None
    described = json.loads(backend.to_str())
    if not _is_byte_level(described):
        return None
    normalizer = (described["normalizer"] or {}).get("type")
    if normalizer not in (None, "NFC"):
        return None
    added = len(tokenizer([""], add_special_tokens=special)["input_ids"][0])
    return TokenBound(added, _NFC_GROWTH if normalizer else 1)  # ASCII is its own normal form


def _is_byte_level(described: dict[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` is of a BPE that knows all bytes, and neither adds nor removes any."""
    from tokenizers import pre_tokenizers

    model, outer = described["model"], described["pre_tokenizer"] or {}
    parts = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    kinds = [part.get("type") for part in parts]
    return (
        model.get("type") == "BPE"
        and model.get("dropout") is None
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys()
        and kinds.count("ByteLevel") == 1
        and kinds[-1] == "ByteLevel"
        and set(kinds) <= _SPLITTERS
        and not any(part.get("add_prefix_space") or part.get("behavior") == "Removed" for part in parts)
    )
