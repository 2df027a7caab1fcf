"""Finds secrets among settings, which are written to the run's folder, to trackers and into reports.

A value is judged by its key and by itself: ``answer_key: solution`` and ``pad_token: <pad>`` are no secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_SECRET = {"password", "passwd", "pwd", "passphrase", "apikey", "secret", "credential", "authorization"}
"""Last word of a key whose text is a secret."""
_DOUBTFUL = {"key", "token", "auth", "pass", "cookie", "signature", "sig", "bearer", "pat"}
"""Last word of a key whose text is a secret if it looks like one, or if a word of ``_OWNERS`` is before."""
_OWNERS = re.compile(
    "api|access|auth|private|secret|client|service|server|session|signing|encryption|account|subscription|"
    "master|admin|bearer|oauth|refresh|search|serp|serper|serpapi|tavily|bing|google|brave|exa|openai|"
    "anthropic|azure|aws|gcp|hf|hub|huggingface|github|gitlab|wandb|mlflow|judge|teacher|slack"
)
_NAMES = {"variable", "env", "file", "path", "user", "username", "name", "type", "url", "id", "scheme"}
"""Last word of a key whose text is about a secret, and none."""
_VARIABLE = re.compile(r"\$?[A-Za-z_]\w*")
_HARMLESS = re.compile(
    r"""(?:\w+\ )?\$\{?\w+\}?            # a variable
    | [A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+     # the name of one
    | (?i:empty|none|null|dummy|unused)
    | [\W_]*
    | <.*> | \[.*\] | .*\{\w*\}.*       # a special token, a placeholder
    | (?:~|\.\.?)?/\S+\.\w{2,5}         # a file
    """,
    re.VERBOSE,
)
_WORDS = re.compile(r"(?!(?:sk|pk|hf|ghp)[-_])\d{0,4}[A-Za-z]{0,24}\d{0,4}(?:[\W_][A-Za-z]{0,24}\d{0,4})*")
"""A name or a phrase: words, each with a short number."""
_KNOWN = re.compile(
    r"\b(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abps]-|tvly-|gsk_|AKIA|AIza|eyJ)[\w-]{0,40}?"
    r"(?=[A-Za-z]{0,15}\d)[A-Za-z0-9]{16}|\b(?:hf_[A-Za-z]{30}|A[KS]IA[0-9A-Z]{16}\b|AIza[\w-]{35}\b"
    r"|glpat-[\w-]{20}\b|(?:nvapi|xai|pplx)-\w{20})|-----BEGIN [A-Z ]*PRIVATE KEY"
)
"""Secrets of known services."""
_USER = re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://([^\s/@?#]{1,1000})@", re.IGNORECASE)
_PAIR = re.compile(r"(?:^|[\s?&;])([\w-]+)=([^\s&;#]+)")
_COLUMNS = {"where", "prompt_key", "answer_key"}
_LONGEST = 20_000
"""Characters of a text that are looked at; what follows belongs to a long prompt."""
_HEADER = re.compile(r"([\w-]+): +(\S+(?: \S+)?)")


def refuse_secrets(settings: Any) -> None:
    """Raise ValueError, without the secret, if plain values of settings hold one."""
    for key, what in _find(settings, "", ""):
        raise ValueError(
            f"{key} {what}, and settings are written to the run's folder and to trackers; keep it in an "
            "environment variable that your code reads; a setting may name it (key_variable: MY_KEY)"
        )


def looks_secret(name: str, value: Any) -> bool:
    """Whether the value of a key looks like a secret. name: the key, or the last part of it."""
    words = _words(name)
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    if last in _NAMES:
        return last == "variable" and isinstance(value, str) and not _VARIABLE.fullmatch(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (last in _SECRET and last != "secret") or (before, last) == ("api", "key")
    if not isinstance(value, str) or len(value) > _LONGEST or _HARMLESS.fullmatch(value):
        return False
    if last in _SECRET or (last in _DOUBTFUL and (_OWNERS.fullmatch(before) or name.lower() == "token")):
        return True
    return last in _DOUBTFUL and not _WORDS.fullmatch(value)


def _words(name: str) -> list[str]:
    """The words of a key such as apiKeys, X-Api-Key or api_keys; the last one in the singular."""
    words = re.findall("[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()) or [""]
    return words if words[-1] in _DOUBTFUL else [*words[:-1], words[-1].removesuffix("s")]


def _find(value: Any, key: str, name: str) -> Iterator[tuple[str, str]]:
    """Dotted key of each secret, and what it is. name: the key that decides."""
    if isinstance(value, dict):
        for part, inner in value.items():
            if part in _COLUMNS and key.startswith(("data", "sft.", "evaluation.")):
                continue  # names of columns
            # What a section such as ``secrets`` names by keys of its own, as in {search: x}.
            inside = _words(name)[-1] in _SECRET and _words(str(part))[-1] not in _NAMES
            yield from _find(inner, f"{key}.{part}".lstrip("."), f"{part}_{name}" if inside else str(part))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            option = value[i - 1] if i and isinstance(value[i - 1], str) else ""
            yield from _find(inner, f"{key}[{i}]", option if option.startswith("--") else name)
    elif looks_secret(name, value):
        yield key, "looks like a secret"
    elif isinstance(value, str):
        value = value[:_LONGEST]
        for user in _USER.findall(value):
            who, colon, word = user.partition(":")
            if (word and not _HARMLESS.fullmatch(word)) if colon else looks_secret("key", who):
                yield key, "must not hold a password"
        named = _HEADER.fullmatch(value)
        listed = "://" in value or all("=" in word for word in value.split())  # no prompt
        pairs = [named.groups()] if named else _PAIR.findall(value) if listed else []
        if _KNOWN.search(value) or any(looks_secret(*pair) for pair in pairs):
            yield key, "holds what looks like a secret"
