"""A tool that finds documents: ``search:search: {database: FILE}`` in ``rollout.episode.tools``.

``python search.py DOCUMENTS.jsonl DATABASE`` makes the database, with this folder on PYTHONPATH at the run.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from rpg_megatron.config.files import open_regular, remove
from rpg_megatron.environments.tools import ToolError

_WORDS = 32
"""Words of a query."""


class search:
    """Finds documents in a database made by this module's program."""

    def __init__(self, database: str, results: int = 3, characters: int = 1000):
        """results: most documents of an answer. characters: of each that are shown.

        Raises ValueError if the file is no such database.
        """
        self._path, self._results, self._characters = database, results, characters
        try:
            self._find('"a"')
        except sqlite3.Error as e:
            made = f"python {__file__} DOCUMENTS.jsonl DATABASE"
            raise ValueError(f"{database}: {e}; make it with {made}") from None

    def __call__(self, query: str) -> str:
        """Find the documents that best match some words."""
        words = re.findall(r"\w+", query)[:_WORDS]
        if not words:
            raise ToolError("the query has no words")
        found = self._find(" OR ".join(f'"{word}"' for word in words))
        return "\n\n".join(f"{title}\n{text[: self._characters]}" for title, text in found) or "nothing found"

    def _find(self, query: str) -> list[tuple[str, str]]:
        # A connection for each call: calls run in threads.
        with closing(
            sqlite3.connect(f"{Path(self._path).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        ) as database:
            rows = database.execute(
                "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?",
                (query, self._results),
            )
            return [(str(title), str(text)) for title, text in rows]


def make_database(documents: Path, database: Path) -> int:
    """Make the database of ``search``, from lines of JSON with ``title`` and ``text``.

    Returns the number of documents.
    """
    with open_regular(documents) as lines, closing(sqlite3.connect(database)) as made, made:
        made.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')")
        rows = (json.loads(line) for line in lines if line.strip())
        return made.executemany(
            "INSERT INTO documents VALUES (?, ?)", ((row.get("title", ""), row["text"]) for row in rows)
        ).rowcount


def main() -> None:
    """Make a database."""
    if len(sys.argv) != 3:
        sys.exit("usage: python search.py DOCUMENTS.jsonl DATABASE")
    documents, database = map(Path, sys.argv[1:])
    if database.exists():
        sys.exit(f"{database} exists; remove it, or name another file")
    try:
        print(f"{database}: {make_database(documents, database)} documents")
    except (OSError, ValueError, KeyError, AttributeError) as e:
        remove(database, ignore_errors=True)
        sys.exit(f'{documents}: {type(e).__name__}: {e}; each line must be {{"title": ..., "text": ...}}')


if __name__ == "__main__":
    main()
