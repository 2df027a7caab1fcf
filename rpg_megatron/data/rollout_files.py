"""Read and write the rollout files of a run (``rollouts/step_N.jsonl.zst``): all trajectories of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import zstandard

from rpg_megatron.config import UserError
from rpg_megatron.data.trajectory import Trajectory, from_row, to_row
from rpg_megatron.system.files import atomic_write


def write_rollouts(file: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one JSON object per trajectory, zstd-compressed, atomically.

    Floats are written in full, so reading returns the same bits. Raises OSError, and leaves no file then; the
    parent of the file's folder must exist.
    """
    file.parent.mkdir(exist_ok=True)
    compressor = zstandard.ZstdCompressor()
    with atomic_write(file) as part, part.open("wb") as raw, compressor.stream_writer(raw) as out:
        for t in trajectories:
            out.write(json.dumps(to_row(t), ensure_ascii=False).encode() + b"\n")


def read_rollouts(file: Path) -> list[Trajectory]:
    """Inverse of ``write_rollouts``, bit for bit. Raises UserError if the file is damaged."""
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        content = stream.decompress(file.read_bytes())
    except zstandard.ZstdError as e:
        raise UserError(f"{file}: damaged ({e}); choose another step, or restore the file") from None
    if not stream.eof:
        raise UserError(f"{file}: truncated; choose another step, or restore the file")
    # Not splitlines: texts may contain Unicode line separators.
    return [from_row(json.loads(line)) for line in content.split(b"\n") if line]


def rollouts_file(run: Path, step: int) -> Path:
    """Path of a step's rollouts in a run's folder."""
    return run / "rollouts" / f"step_{step:06d}.jsonl.zst"
