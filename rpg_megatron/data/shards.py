"""The files of a folder that is one data set: shards of one kind and of one split, in natural order."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.system.terminal import one_line

_KINDS = {".parquet": "Parquet", ".arrow": "Arrow", ".jsonl": "JSON", ".json": "JSON", ".ndjson": "JSON"}
_ABOUT = re.compile(
    r"[._].*|(readme|licen[cs]e|notice|citation|changelog)\b(?!.*\.(parquet|arrow|jsonl?|ndjson)$).*|.*\.md"
    r"|(dataset_infos?|dataset_dict|state|metadata)\.json",
    re.IGNORECASE,
)
"""Names of files about the data, which are passed over; hidden ones and those of Spark (_SUCCESS) too."""
_SPLITS = {
    "train",
    "training",
    "test",
    "testing",
    "validation",
    "valid",
    "val",
    "dev",
    "eval",
    "heldout",
    "holdout",
    "evaluation",
}
_NUMBERED = re.compile(r"(.*?)([0-9]+)-of-([0-9]+)")


def list_shards(folder: Path, key: str) -> list[Path]:
    """The files, in natural order: part-2 before part-10. key: of the source in the settings, for messages.

    Raises UserError if there are none, if they are of several kinds or splits, if some are missing by their
    names (train-00000-of-00003), or if there is anything else, but for files about the data.
    """
    at = f"{key}.path: {folder}"
    try:
        entries = sorted((e for e in folder.iterdir() if not _ABOUT.fullmatch(e.name)), key=_natural)
    except OSError as e:
        raise UserError(f"{at} cannot be read ({e.strerror or e})") from None
    if inner := [entry for entry in entries if entry.is_dir()]:
        raise UserError(f"{at} has the folders {_some(inner)}; give one of them, such as {inner[0]}")
    if not entries:
        raise UserError(
            f"{at} is a directory without data; give a file, or a folder of .jsonl, .parquet or .arrow files"
        )
    if others := [entry for entry in entries if entry.suffix not in _KINDS or not entry.is_file()]:
        raise UserError(
            f"{at} holds {_some(others)}, which cannot be read; decompress or convert it to .jsonl, .parquet "
            "or .arrow, or move it to another folder"
        )
    if len(kinds := {_KINDS[entry.suffix] for entry in entries}) > 1:
        raise UserError(
            f"{at} holds files of several kinds ({', '.join(sorted(kinds))}): {_some(entries)}; move those "
            "of one kind to another folder"
        )
    words = {word for entry in entries for word in re.split("[^a-z]+", entry.stem.lower())}
    if len(splits := sorted(words & _SPLITS)) > 1:
        raise UserError(
            f"{at} holds several splits ({', '.join(splits)}): {_some(entries)}; give one file, or move "
            "those of one split to another folder"
        )
    numbers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for entry in entries:
        if match := _NUMBERED.fullmatch(entry.stem):
            numbers[match[1], int(match[3])].add(int(match[2]))
    for (name, total), found in numbers.items():
        if found not in ({*range(total)}, {*range(1, total + 1)}):
            raise UserError(f"{at} holds {len(found)} of the {total} files {name}*-of-*; copy the others too")
    if len(names := sorted(name for name, _ in numbers)) > len({*names}):
        raise UserError(f"{at} holds shards of several exports: {_some(entries)}; keep those of one")
    return entries


def _natural(file: Path) -> list[tuple[int, str]]:
    """A key that orders numbers within names by their values."""
    parts = re.split("([0-9]+)", file.name)
    return [(int(part) if i % 2 else 0, part) for i, part in enumerate(parts)]


def _some(files: list[Path]) -> str:
    rest = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return one_line(", ".join(shorten(file.name) for file in files[:5])) + rest
