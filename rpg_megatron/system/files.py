"""Atomic file writes: write to a temporary file, then rename."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(file: Path, *, private: bool = False, suffix: str = "") -> Iterator[Path]:
    """Give the block a temporary path beside ``file`` to write to; the result then replaces ``file``.

    If the block raises, ``file`` is unchanged and the temporary file is removed. private: mode 0600 from the
    start, with an unpredictable name. suffix: end of the temporary name, for writers that choose their format
    by it. Raises OSError.
    """
    if private:
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=suffix, dir=file.parent)
        os.close(descriptor)
        part = Path(name)
    else:
        part = file.with_name(f".{file.name}.part{suffix}")
    try:
        yield part
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def atomic_write_text(file: Path, text: str, *, private: bool = False) -> None:
    """Replace ``file`` by this text, as UTF-8, with ``atomic_write``."""
    with atomic_write(file, private=private) as part:
        part.write_text(text, encoding="utf-8")
