"""The rollouts of a step on disk: everything the trainer learnt from, readable again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import zstandard

from rpg_megatron.data.trajectory import Trajectory, from_row, to_row


def write_rollouts(file: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one JSON object a trajectory, zstd-compressed. The file appears under its name when it is whole.

    Floats are written in full, so reading gives back the same bits.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    with part.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as out:
        for t in trajectories:
            out.write(json.dumps(to_row(t), ensure_ascii=False).encode() + b"\n")
    os.replace(part, file)


def read_rollouts(file: Path) -> list[Trajectory]:
    """The trajectories of one step, as ``write_rollouts`` got them."""
    with file.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
        lines = stream.read().split(b"\n")  # not splitlines: a text may hold line separators of Unicode
    return [from_row(json.loads(line)) for line in lines if line]
