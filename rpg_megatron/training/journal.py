"""The rollouts of a step on disk: everything the trainer learnt from, readable again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import zstandard

from rpg_megatron.config import UserError
from rpg_megatron.data.trajectory import Trajectory

_ARRAYS = ("prompt", "response", "behaviour", "versions", "old", "anchor")
_SCORED = ("reward", "parts", "correct", "extracted", "reason", "advantage")
_PLAIN = ("prompt_id", "group", "sample", "finish", "text", "seed", *_SCORED)


def write_rollouts(file: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one JSON object a trajectory, zstd-compressed. The file appears under its name when it is whole.

    Floats are written in full, so reading gives back the same bits. Raises OSError, and leaves nothing then;
    the folder above the file's own must be there.
    """
    file.parent.mkdir(exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    try:
        with part.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as out:
            for t in trajectories:
                row = {name: getattr(t, name) for name in _PLAIN}
                row |= {name: getattr(t, name).tolist() for name in _ARRAYS}
                out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        os.replace(part, file)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def read_rollouts(file: Path) -> list[Trajectory]:
    """The trajectories of one step, as ``write_rollouts`` got them. Raises UserError if they are damaged."""
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        lines = stream.decompress(file.read_bytes()).decode().splitlines()
    except (zstandard.ZstdError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: damaged ({e}); take another step, or bring the file back") from None
    if not stream.eof:
        raise UserError(f"{file}: cut off; take another step, or bring the file back")
    types = {"prompt": np.int32, "response": np.int32, "versions": np.int32}
    found = []
    for line in lines:
        row = json.loads(line)
        arrays = {name: np.array(row.pop(name), types.get(name, np.float32)) for name in _ARRAYS}
        found.append(Trajectory(**row, **arrays))
    return found
