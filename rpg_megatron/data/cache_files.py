"""Files that save reading and measuring large data again: in ``.rpg_cache`` beside the data.

Where that folder cannot be written, they are in the user's cache folder. Both are private to the user, and
what another user owns is not read. A file ends with its description (JSON), the length of that, a checksum
and a mark. A file that is damaged, of other data or not private is as if it were missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from rpg_megatron.config.files import atomic_write, make_private, open_own, open_private, open_regular, remove

logger = logging.getLogger(__name__)

_FOLDER = ".rpg_cache"
_END = struct.Struct("<QI8s")
"""Bytes of the description, checksum of all before, mark."""
_MARK = b"rpgcache"
_CHUNK = 1 << 20
_ABANDONED = 24 * 3600.0
"""Seconds after which an unfinished file counts as left by a process that was killed."""


class CachePlace(NamedTuple):
    """Where a file is, or would be."""

    folder: Path
    name: str
    """What the file holds, and the digest of the settings that it depends on."""
    content: str
    """``content_digest`` of the data."""


def cache_folders(data: Path) -> list[Path]:
    """Folders for files about ``data``, in the order in which they are tried."""
    folders = [data.absolute().parent / _FOLDER]
    with suppress(RuntimeError):  # no home
        user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folders.append(user / "rpg_megatron" / "prompts")
    return folders


def digest_of(*parts: Any) -> str:
    """Digest of values of JSON's types, and of others by their text."""
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=16).hexdigest()


def content_digest(paths: Sequence[Path]) -> str:
    """Digest of files, and of the files in folders. Raises OSError."""
    parts = []
    for file in _files(paths):
        with open_regular(file) as opened:
            parts.append(hashlib.file_digest(cast(Any, opened), "sha256").hexdigest())
    return digest_of(parts)


def file_marks(paths: Sequence[Path]) -> list[list[int]] | None:
    """What changes when files are written to or replaced; nobody can set the time of the change.

    None: there is a file that cannot be read, which its reader reports.
    """
    try:
        stats = [os.stat(file) for file in _files(paths)]
    except OSError:
        return None
    return [[each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns] for each in stats]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]


# -- reading -------------------------------------------------------------------------------------------------


def find_cached(
    folders: Sequence[Path], name: str, content: Callable[[], str], marks: list[list[int]] | None = None
) -> tuple[BinaryIO, dict[str, Any], CachePlace] | None:
    """The open file, its description and its place; None if no folder has a file that can be used.

    content: gives the digest of the data. It is called only if there is a file, which does not have the same
    ``marks`` (``file_marks``) of the data.
    """
    for folder in folders:
        try:
            file = _open(folder, name)
        except OSError:
            continue
        try:
            described = _description(file)
            if (marks and described.get("marks") == marks) or described.get("content") == content():
                return file, described, CachePlace(folder, name, described["content"])
            logger.info("%s: of other data, is made again", folder / name)
        except (OSError, ValueError, RecursionError) as e:
            logger.info("%s: not used (%s)", folder / name, e)
        file.close()
    return None


def _open(folder: Path, name: str) -> BinaryIO:
    descriptor = open_private(folder)
    try:
        file = cast(BinaryIO, open_own(Path(name), dir_fd=descriptor))
    finally:
        os.close(descriptor)
    if os.fstat(file.fileno()).st_uid != os.geteuid():
        file.close()
        raise PermissionError("belongs to another user")
    return file


def _description(file: BinaryIO) -> dict[str, Any]:
    """The description; raises ValueError if the file is not whole."""
    rest = os.fstat(file.fileno()).st_size - _END.size
    if rest < 0:
        raise ValueError("too short")
    length, expected, mark = _END.unpack(os.pread(file.fileno(), _END.size, rest))
    checksum, remaining = 0, rest
    while remaining and (chunk := file.read(min(remaining, _CHUNK))):
        checksum, remaining = zlib.crc32(chunk, checksum), remaining - len(chunk)
    if mark != _MARK or remaining or checksum != expected or length > rest:
        raise ValueError("damaged")
    described = json.loads(os.pread(file.fileno(), length, rest - length))
    if not isinstance(described, dict):
        raise ValueError("damaged")
    return described


# -- writing -------------------------------------------------------------------------------------------------


class CacheWriter:
    """Writes a file's content, then its end."""

    def __init__(self, sink: IO[bytes]):
        self._sink, self._sum = sink, 0
        self.position = 0
        """Bytes written."""

    def write(self, data: bytes) -> None:
        """Append bytes. Raises OSError."""
        self._sink.write(data)
        self._sum = zlib.crc32(data, self._sum)
        self.position += len(data)

    def finish(self, description: dict[str, Any]) -> None:
        """Write the end. Raises OSError."""
        text = json.dumps(description).encode()
        self.write(text)
        self._sink.write(_END.pack(len(text), self._sum, _MARK))
        self._sink.flush()


@contextmanager
def new_cached(folder: Path, name: str) -> Iterator[CacheWriter]:
    """Give the block a writer; the file appears at the end of the block. Raises OSError."""
    if folder.name != _FOLDER:  # the data's folder exists
        folder.parent.mkdir(parents=True, exist_ok=True)
    make_private(folder)
    os.close(open_private(folder))  # a new one may look like another user's, on NFS
    for part in folder.glob(f".{name}.*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED:
                remove(part)
    with atomic_write(folder / name, private=True) as sink:
        yield CacheWriter(sink)
