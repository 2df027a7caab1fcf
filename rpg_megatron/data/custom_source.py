"""Rows of a custom prompt source (``data.source``).

``python -m rpg_megatron.data.custom_source LIMIT``: stdin is [key in the settings, module:name, settings] as
JSON; each line of stdout is a row, or ``{"error": message}``, which is the last line. It is a separate
process, because the module may import torch, and so that launcher and sampler get the same rows, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.system.custom_code import CustomCode, describe_error, load_custom
from rpg_megatron.system.terminal import protect_streams

MAX_ROWS = 10_000_000
"""Maximum number of rows of a source without ``limit``; a source with more is assumed to be endless."""


def custom_rows(
    source: ImportedSettings, limit: int | None, key: str
) -> Iterator[tuple[int, str, dict[str, Any] | UserError]]:
    """Index from 0, position for messages, and the row or its error; at most ``limit`` rows.

    key: key of ``source`` in the settings. Raises UserError if the custom code fails.
    """
    command = [sys.executable, "-P", "-m", "rpg_megatron.data.custom_source", str(limit or MAX_ROWS + 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([key, source.type, source.keywords]).encode())
            process.stdin.close()
            for index, line in enumerate(process.stdout):
                found = json.loads(line)
                if "error" in found:
                    raise UserError(found["error"])
                if index == MAX_ROWS and limit is None:
                    raise UserError(f"{key}: {source.type} has more than {MAX_ROWS:,} rows; set data.limit")
                where = f"{source.type}: row {index + 1}"
                row = found.get("row")
                yield index, where, row if "row" in found else UserError(f"{where}: {found['bad']}")
            if process.wait():
                raise UserError(
                    f"{key}: {source.type} ended its process (exit code {process.returncode}); fix it"
                )
        finally:
            process.kill()


def _lines(key: str, path: str, settings: dict[str, Any], limit: int) -> Iterator[dict[str, Any]]:
    try:
        rows = load_custom(CustomCode(key, path, settings, 0))()
    except UserError as e:
        yield {"error": str(e)}
        return
    except Exception as e:
        yield {"error": f"{key}: {path} {describe_error(e, path)}"}
        return
    try:
        for row in itertools.islice(rows, limit):
            bad = None if isinstance(row, dict) else f"it is a {type(row).__name__}; yield a dict of columns"
            yield {"bad": bad} if bad else {"row": row}
    except Exception as e:
        yield {"error": f"{key}: {path} {describe_error(e, path)}"}


def main() -> None:
    """Print the rows."""
    protect_streams()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the module may print to stdout; that must not mix with the rows
    key, path, settings = json.load(sys.stdin)
    for line in _lines(key, path, settings, int(sys.argv[1])):
        try:
            text = json.dumps(line, default=str, allow_nan=False)
        except ValueError as e:
            text = json.dumps({"bad": f"it is no JSON object ({e}); change it"})
        out.write(text + "\n")
    out.close()


if __name__ == "__main__":
    main()
