"""Responses as trackers show them: prompts as text, long texts shortened."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpg_megatron.data.tokenizer_file import FileTokenizer, open_tokenizer
from rpg_megatron.system.terminal import one_line, printable


class ResponseTexts:
    """Decodes prompts, shortens texts and makes them valid UTF-8."""

    def __init__(self, model: Path, longest: int) -> None:
        """model: folder of the checkpoint. longest: characters of a text; longer ones lose their middle."""
        self._tokenizer: FileTokenizer | None = open_tokenizer(model, chat=False)
        self._longest = longest

    def readable(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the table of responses, its prompt as text instead of token ids."""
        prompt = self._tokenizer.decode(row["prompt"]) if self._tokenizer else str(row["prompt"])
        row = row | {"prompt": prompt}
        return {key: self._short(value) if isinstance(value, str) else value for key, value in row.items()}

    def _short(self, text: str) -> str:
        if len(text) > self._longest:
            half = self._longest // 2
            text = f"{text[:half]} ... {text[-half:]}"
        return text.encode("utf-8", "replace").decode("utf-8")


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Readable rows of the table of responses as Markdown, their texts as code, which is shown as it is."""
    return "\n\n---\n\n".join(_row_to_markdown(row) for row in rows)


def _row_to_markdown(row: dict[str, Any]) -> str:
    verdict = "correct" if row["correct"] else "wrong"
    cut = ", truncated" if row["finish"] == "length" else ""
    lines = [
        f"**reward {row['reward']:g}**, {verdict}, {row['tokens']} tokens{cut}, "
        f"prompt {row['prompt_id']}, sample {row['sample']}"
    ]
    for name in ("prompt", "response"):
        lines += ["", f"{name}:", "", textwrap.indent(printable(row[name]), "    ", lambda _: True)]
    for name in ("answer", "extracted"):
        if row[name]:
            lines += ["", f"{name}:", "", f"    {one_line(row[name])}"]
    return "\n".join(lines)
