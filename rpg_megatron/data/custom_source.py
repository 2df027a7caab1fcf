"""Rows of a custom prompt source (``data.source``).

``python -m rpg_megatron.data.custom_source PARENT LIMIT``: the first line of stdin is [key in the settings,
module:name, settings] as JSON; each line of stdout is a row, or ``{"error": message}``, which is the last
line. With LIMIT 0 each further line of stdin asks for a row (``data.streaming``). It is a separate process,
because the module may import torch, and so that launcher and sampler get the same rows, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.system.child import module_command, start_program
from rpg_megatron.system.custom_code import CustomCode, describe_error, load_custom
from rpg_megatron.system.parent_death import end_with_parent
from rpg_megatron.system.process_groups import WARNINGS
from rpg_megatron.system.terminal import protect_streams

MAX_ROWS = 10_000_000
"""Maximum number of rows of a source without ``limit``; a source with more is assumed to be endless."""
_LONGEST = 256 << 20
"""Bytes of a row."""
ROW_SECONDS = 300
"""Time limit for each row of a source that is asked during the run; the first one includes its imports."""


def custom_rows(
    source: ImportedSettings, limit: int | None, key: str, *, streaming: bool = False
) -> Iterator[tuple[int, str, dict[str, Any] | UserError]]:
    """Index from 0, position for messages, and the row or its error; at most ``limit`` rows.

    key: key of ``source`` in the settings. streaming: ask for each row when it is needed, without a limit;
    call it in the main thread. Raises UserError if the custom code fails, or if an answer takes longer than
    ``ROW_SECONDS``.
    """
    name = f"{key}: {source.type}"
    count = 0 if streaming else limit or MAX_ROWS + 1
    command = module_command(__spec__.name, os.getpid(), count)
    with start_program(command, None, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, json.dumps([key, source.type, source.keywords]))
            for index in itertools.count():
                if streaming:
                    _send(process.stdin, "")
                    if not select.select([process.stdout], [], [], ROW_SECONDS)[0]:
                        raise UserError(
                            f"{name} gives no row {index + 1} within {ROW_SECONDS} s; the run waits for it, "
                            "so make it faster"
                        )
                line = process.stdout.readline(_LONGEST)
                if len(line) == _LONGEST and not line.endswith(b"\n"):
                    raise UserError(f"{name}: row {index + 1} has more than {_LONGEST:,} bytes")
                if not line.endswith(b"\n"):
                    break
                message = json.loads(line)
                if "error" in message:
                    raise UserError(message["error"])
                if index == MAX_ROWS and limit is None and not streaming:
                    raise UserError(f"{name} has more than {MAX_ROWS:,} rows; set data.limit")
                where = f"{source.type}: row {index + 1}"
                row = message.get("row")
                yield index, where, row if "row" in message else UserError(f"{where}: {message['bad']}")
            if process.wait() or line:  # which it did not end
                raise UserError(f"{name} ended its process (exit code {process.returncode}); fix it")
        finally:
            process.kill()


def _send(pipe: IO[bytes], line: str) -> None:
    """Send a line, unless the process has ended. Without a buffer, which closing would send again."""
    with suppress(BrokenPipeError):
        os.write(pipe.fileno(), line.encode() + b"\n")


def _lines(
    key: str, path: str, settings: dict[str, Any], requests: Iterable[object]
) -> Iterator[dict[str, Any]]:
    try:
        rows = load_custom(CustomCode(key, path, settings, 0))()
        for _, row in zip(requests, rows, strict=False):
            bad = None if isinstance(row, dict) else f"it is a {type(row).__name__}; yield a dict of columns"
            yield {"bad": bad} if bad else {"row": row}
    except UserError as e:
        yield {"error": str(e)}
    except (Exception, SystemExit) as e:
        yield {"error": f"{key}: {path} {describe_error(e, path)}"}


def main() -> None:
    """Print the rows."""
    protect_streams()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the module may print to stdout; that must not mix with the rows
    parent, limit = map(int, sys.argv[1:])
    end_with_parent(parent)
    for number in WARNINGS:
        signal.signal(number, lambda *_: None)  # no SIG_IGN, which what it starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    key, path, settings = json.loads(sys.stdin.readline())
    for line in _lines(key, path, settings, range(limit) if limit else sys.stdin):
        try:
            text = json.dumps(line, default=str, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as e:
            text = json.dumps({"bad": f"it is no JSON object ({e}); change it"})
        out.write(text + "\n")
        if not limit:
            out.flush()
    out.close()


if __name__ == "__main__":
    main()
