"""Exit codes of commands that start processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def exit_codes(*, failed: int = 1) -> Iterator[None]:
    """Turn a failure or a signal within the block into one message and an exit code.

    failed: the code of RunFailed, a process that died. After a signal the code is ``Interrupted.exit_code``.
    """
    from rpg_megatron.launcher.supervisor import Interrupted, RunFailed

    try:
        yield
    except RunFailed as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(failed) from None
    except Interrupted as e:
        print(f"stopped: {e}", file=sys.stderr)
        raise typer.Exit(e.exit_code) from None
