"""The rollouts of a step on disk: everything the trainer learnt from, readable again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import zstandard

from rpg_megatron.config import UserError
from rpg_megatron.data.trajectory import Trajectory, from_row, to_row
from rpg_megatron.system.files import atomic_write


def write_rollouts(file: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one JSON object a trajectory, zstd-compressed. The file appears under its name when it is whole.

    Floats are written in full, so reading gives back the same bits. Raises OSError, and leaves nothing then;
    the folder above the file's own must be there.
    """
    file.parent.mkdir(exist_ok=True)
    compressor = zstandard.ZstdCompressor()
    with atomic_write(file) as part, part.open("wb") as raw, compressor.stream_writer(raw) as out:
        for t in trajectories:
            out.write(json.dumps(to_row(t), ensure_ascii=False).encode() + b"\n")


def read_rollouts(file: Path) -> list[Trajectory]:
    """The trajectories of one step, as ``write_rollouts`` got them. Raises UserError if they are damaged."""
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        content = stream.decompress(file.read_bytes())
    except zstandard.ZstdError as e:
        raise UserError(f"{file}: damaged ({e}); take another step, or bring the file back") from None
    if not stream.eof:
        raise UserError(f"{file}: cut off; take another step, or bring the file back")
    # Not splitlines: a text may hold line separators of Unicode.
    return [from_row(json.loads(line)) for line in content.split(b"\n") if line]


def rollouts_file(run: Path, step: int) -> Path:
    """Where a run keeps the rollouts of a step."""
    return run / "rollouts" / f"step_{step:06d}.jsonl.zst"
