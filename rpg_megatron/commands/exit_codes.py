"""Exit codes of commands that start processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from rpg_megatron.system.terminal import print_error, without_full_disk_errors

UNSAVED = 74
"""Exit code of a run that ended without a checkpoint of its last step; EX_IOERR of sysexits.h."""


@contextmanager
def exit_codes(*, failed: int = 1) -> Iterator[None]:
    """Turn a failure or a signal within the block into one message and an exit code.

    failed: exit code for RunFailed, a process that died. After a signal, it is ``Interrupted.exit_code``.
    Output that cannot be written does not end the block.
    """
    from rpg_megatron.launcher.stopping import Interrupted, RunFailed

    with without_full_disk_errors():  # printed output is also in files
        try:
            yield
        except RunFailed as e:
            print_error(f"error: {e}")
            if e.failure.error:
                print_error(f"first error: {e.failure.error}")
            if e.note:
                print_error(e.note)
            raise typer.Exit(failed) from None
        except Interrupted as e:
            print(f"stopped: {e}", file=sys.stderr)
            raise typer.Exit(e.exit_code) from None
