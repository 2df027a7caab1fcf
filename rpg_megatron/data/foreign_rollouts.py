"""Read rollouts of runs that others may have made, in a process that can reach nothing.

Decoders of Parquet and zstd trust much of what is in a file. A process reads several steps, because it takes
half a second to start; if a step ends it, another process reads the rest.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rpg_megatron.config import UserError
from rpg_megatron.config.files import open_regular, real_path
from rpg_megatron.data.rollout_files import damaged, files_of, iter_files, to_batch
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.encoding import decode, encode
from rpg_megatron.system.foreign_input import ForeignInputError, read_foreign

_READER = "rpg_megatron.data.foreign_rollouts:read_steps"
_LARGEST = 256 << 20
"""Maximum bytes of a trajectory; routes take most of it."""
_OPEN = 256
"""Files of a process, unless one step has more: most systems allow 1024."""

_EXPANSION, _LEAST = 100, 1 << 30
"""Without a limit, a step may hold 100 times its size on disk, or 1 GiB if that is more."""

Found = tuple[
    Annotated[int, msgspec.Meta(ge=0)], bytes, Annotated[str, msgspec.Meta(max_length=10_000)] | None
]
"""Index of a step, and a trajectory, encoded. Without one: the step begins (None), is cut at the limit (""),
or cannot be read (the message)."""


def iter_foreign_rollouts(
    files: Sequence[Path], run: Path, limit: int | None = None
) -> Iterator[tuple[Path, Trajectory | UserError | None]]:
    """Yield each step's file with its trajectories in batch order, with the same bits as written.

    A UserError ends a step that cannot be read. run: the folder of the run; files elsewhere, to which links
    lead, are refused. limit: bytes to read of each step; None follows if there are more. Lists of a response
    have its length. The calling thread must live as long as the iterator.
    """
    remaining = list(files)
    while remaining:
        with ExitStack() as stack:
            steps: list[tuple[Path, list[bytes], int]] = []
            opened: list[BinaryIO] = []
            while remaining and len(opened) < _OPEN:
                file = remaining.pop(0)
                try:
                    parts, inside = files_of(file), real_path(run)
                    with ExitStack() as of_step:  # if one cannot be opened, those before it are closed
                        added = [of_step.enter_context(open_regular(part, inside)) for part in parts]
                        stack.push(of_step.pop_all())
                    stored = [os.fstat(each.fileno()) for each in added]
                    size = sum(min(each.st_size, 512 * each.st_blocks) for each in stored)  # without holes
                    steps.append((file, list(map(os.fsencode, parts)), size))
                    opened += added
                except UserError as e:
                    yield file, e
                except OSError as e:
                    advice = "replace the link by a copy" if e.errno == errno.EXDEV else "restore the file"
                    yield file, UserError(f"{file}: cannot be read ({e.strerror}); {advice}")
            if not steps:
                continue
            current, ended, room = -1, True, 0
            argument = [[names for _, names, _ in steps], limit]
            try:
                for index, data, why in read_foreign(_READER, opened, argument, Found, largest=_LARGEST):
                    begins = not data and why is None
                    if index != current + begins or index >= len(steps) or (ended and not begins):
                        raise ForeignInputError("its steps are in another order")
                    current, ended = index, why is not None
                    file, _, size = steps[current]
                    if begins:
                        room = limit if limit is not None else max(_LEAST, _EXPANSION * size)
                    elif data:
                        room -= len(data)
                        if room < 0:
                            raise ForeignInputError("it holds far more than its size")
                        yield file, _checked(decode(data, Trajectory))
                    else:
                        yield file, UserError(why) if why else None
            except (ForeignInputError, msgspec.MsgspecError, ValueError) as e:
                current = max(current, 0)
                yield steps[current][0], damaged(steps[current][0], e)
                remaining = [file for file, _, _ in steps[current + 1 :]] + remaining


def iter_foreign_step(file: Path, run: Path) -> Iterator[Trajectory]:
    """The trajectories of one step, read likewise. Raises UserError if it cannot be read."""
    for _, t in iter_foreign_rollouts([file], run):
        if isinstance(t, UserError):
            raise t
        if t is not None:
            yield t


def _checked(t: Trajectory) -> Trajectory:
    """Raise ValueError if a list has another type than it should, or another length than the response."""
    tokens = t.response.size
    for name, kind, sizes in (
        ("prompt", np.int32, [t.prompt.size]),
        ("response", np.int32, [tokens]),
        ("versions", np.int32, [tokens]),
        ("behaviour", np.float32, [tokens]),
        ("old", np.float32, [0, tokens]),
        ("anchor", np.float32, [0, tokens]),
        ("mask", np.bool_, [tokens]),
    ):
        values = getattr(t, name)
        if values.dtype != kind or values.ndim != 1 or values.size not in sizes:
            raise ValueError(f"{name} of group {t.group} does not have the type or length that it should")
    rows = len(t.routes) if t.routes.ndim == 3 and t.routes.dtype in (np.uint8, np.int16) else -1
    if rows != (t.length - 1 if t.routes.size else 0):
        raise ValueError(f"routes of group {t.group} do not have the type or length that they should")
    return t


# -- in the process that can reach nothing -------------------------------------------------------------------


def prepare() -> None:
    """Load what is loaded late, such as by Arrow for its conversions."""
    none, buffer = np.zeros(0, np.int32), io.BytesIO()
    empty = Trajectory(0, 0, none, none, none.astype(np.float32), none, "", "", parts={"a": 0.0})
    pq.write_table(pa.Table.from_batches([to_batch([empty])]), buffer, compression="zstd")
    buffer.seek(0)
    list(read_steps([buffer], ([[b"a.parquet"]], None)))


def read_steps(files: Sequence[BinaryIO], argument: Any) -> Iterator[Found]:
    """Reader for ``system/foreign_input.py``. argument: names of the files of each step; limit."""
    steps, limit = argument
    rest = iter(files)
    for index, names in enumerate(steps):
        yield index, b"", None
        remaining = limit
        try:
            opened = list(islice(rest, len(names)))
            for trajectory in iter_files(opened, [Path(os.fsdecode(name)) for name in names], confined=True):
                data = encode(trajectory)
                remaining = None if remaining is None else remaining - len(data)
                if remaining is not None and remaining < 0:
                    yield index, b"", ""
                    break
                yield index, data, None
        except UserError as e:
            yield index, b"", str(e)
