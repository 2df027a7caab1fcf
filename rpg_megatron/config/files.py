"""Opens, copies, renames and removes files. No other module does (a test checks it).

Files may have been made by others (a model, a run under ``--from``), or be changed by others at any time (in
/dev/shm, in a shared folder). So what is opened is checked on the descriptor, never on the path, which may
lead elsewhere a moment later. Imports the standard library only: the reaper and login nodes use it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

_MAX_JSON_BYTES = 100_000_000
"""The limit of safetensors' headers; a model's largest JSON files, index and tokenizer, are smaller."""
_SAFELY = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Opening a FIFO does not block, and a terminal does not become ours."""


# -- reading -------------------------------------------------------------------------------------------------


def open_regular(file: Path, *inside: Path) -> BinaryIO:
    """Open a file for reading, in binary mode. Raises OSError, also for a FIFO, socket or device.

    Reading those may block forever or never end. Links are followed. inside: folders, absolute and without
    links (``Path.resolve``), in one of which the file must then lie: foreign names and links do not lead
    elsewhere. Hard links are files like others.
    """
    source = os.fdopen(_checked(os.open(file, os.O_RDONLY | _SAFELY), file), "rb")
    real = os.readlink(f"/proc/self/fd/{source.fileno()}") if inside else ""  # of the file that is open
    if inside and not any(Path(real).is_relative_to(folder) for folder in inside):
        source.close()
        raise OSError(errno.EXDEV, f"leads to {real}, outside {inside[0]}", str(file))
    return source


def real_path(path: Path) -> Path:
    """An absolute path without links. Loops of links stay; ``Path.resolve`` raises RuntimeError for them."""
    return Path(os.path.realpath(path))


def places_of(folder: Path) -> list[Path]:
    """Where the files of a model or checkpoint may lie, for ``inside``.

    That is its folder, and the blobs to which the Hugging Face cache links (``snapshots/REVISION``).
    """
    real = real_path(folder)
    return [real, *(p.parents[1] / "blobs" for p in (real, *real.parents) if p.parent.name == "snapshots")]


def read_text(file: Path, *inside: Path, limit: int = _MAX_JSON_BYTES) -> str:
    """The content of a UTF-8 file of at most ``limit`` bytes. inside: see ``open_regular``.

    Raises OSError, UnicodeDecodeError.
    """
    with open_regular(file, *inside) as f:
        content = f.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(file))
    return content.decode("utf-8")


def read_json(file: Path, *inside: Path) -> Any:
    """The value in a JSON file. Raises OSError if it cannot be read, ValueError if it is not valid."""
    return parse_json(read_text(file, *inside))


def folder_size(folder: Path) -> int:
    """Bytes of the regular files in a folder, at any depth. A file with several names (hard links) counts
    once, and what disappears meanwhile nothing.
    """
    size, linked = 0, set[tuple[int, int]]()
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                file = status.st_dev, status.st_ino
                size += status.st_size if stat.S_ISREG(status.st_mode) and file not in linked else 0
                if status.st_nlink > 1:
                    linked.add(file)
    return size


def parse_json(text: str | bytes, **options: Any) -> Any:
    """``json.loads`` that raises ValueError for every invalid text."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as e:
        if "integer string conversion" in str(e):  # Python's message is for programmers
            raise ValueError("a number has too many digits") from None
        raise


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested dicts, by their keys joined with dots."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


# -- our own files -------------------------------------------------------------------------------------------


def open_own(
    file: Path, mode: str = "rb", *, permissions: int = 0o666, dir_fd: int | None = None, **options: Any
) -> IO[Any]:
    """``open`` for a file of ours, in a folder where others may have put a link or a FIFO of its name.

    Raises OSError for all but regular files. permissions: of a new file, before the umask. dir_fd: the
    folder, if ``file`` is only a name.
    """

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | _SAFELY, permissions, dir_fd=dir_fd)
        except OSError as e:
            if e.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", name) from None
            raise
        return _checked(descriptor, file)

    return open(file, mode, opener=opener, **options)


@contextmanager
def atomic_write(file: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Give the block a new file beside ``file`` to write to, which replaces ``file`` at the end.

    If the block raises, ``file`` is unchanged and the new one, ``.NAME.*.part``, is removed; a process that
    is killed leaves it. private: mode 0600. Raises OSError, also if ``file`` is a folder or a device.
    """
    if file.exists() and not (file.is_file() or file.is_dir()):  # /dev/stdout, say, would be replaced
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    sink: IO[bytes] = open_own(part, "xb", permissions=0o600 if private else 0o666)
    try:
        with sink:
            yield sink
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def atomic_write_text(file: Path, text: str, *, private: bool = False) -> None:
    """Replace ``file`` by this text, as UTF-8, with ``atomic_write``."""
    with atomic_write(file, private=private) as sink:
        sink.write(text.encode("utf-8"))


def copy_file(
    source: BinaryIO, folder: Path, name: str, content: bytes | None = None, limit: int = _MAX_JSON_BYTES
) -> None:
    """Copy an open file to a new one in a folder of ours.

    The copy's mode follows the umask, but nobody may read it who may not read the source. name: without
    folders. content: to write instead, such as a changed configuration. Raises OSError, also if the name is
    taken or the source has more than ``limit`` bytes.
    """
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not the name of a file")
    was = os.fstat(source.fileno())
    if was.st_size > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(source.name))
    with open_own(folder / name, "xb", permissions=0o600 | was.st_mode & 0o066) as copy:
        if was.st_gid != os.fstat(copy.fileno()).st_gid and not was.st_mode & stat.S_IROTH:
            os.fchmod(copy.fileno(), 0o600)  # the copy has another group
        if content is not None:
            copy.write(content)
            return
        left = was.st_size  # it may grow meanwhile
        while left and (chunk := source.read(min(left, 1 << 20))):
            copy.write(chunk)
            left -= len(chunk)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder of ours, replacing a file or an empty folder. Raises OSError."""
    os.replace(source, target)


def remove(path: Path, *, inode: int | None = None, ignore_errors: bool = False) -> None:
    """Remove a file, a link, or a folder with all that is in it, if it exists. Links are never followed.

    Only if it belongs to this user, or to the owner of the folder that it is in: NFS may show what root has
    made as another user's. inode: only if it is a file that still has this inode. ignore_errors: remove what
    can be removed. Raises OSError.
    """
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if status.st_uid not in (os.geteuid(), os.fstat(folder).st_uid):
                raise PermissionError(errno.EPERM, f"belongs to another user (uid {status.st_uid})")
            if inode is not None and (status.st_ino != inode or not stat.S_ISREG(status.st_mode)):
                return  # another process has reused the name
            if stat.S_ISDIR(status.st_mode):
                # By descriptors: ``shutil.rmtree.avoids_symlink_attacks`` is True on Linux.
                shutil.rmtree(path.name, ignore_errors, dir_fd=folder)
            else:
                os.unlink(path.name, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as e:
        if not ignore_errors and not (isinstance(e, FileNotFoundError) and not os.path.lexists(path)):
            raise OSError(e.errno, e.strerror, str(path)) from None


# -- folders -------------------------------------------------------------------------------------------------


def open_private(folder: Path) -> int:
    """Descriptor of a folder that only this user can enter; the caller closes it.

    Raises PermissionError if it belongs to another user or its mode gives others access, and other OSErrors,
    also for a link.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        os.close(descriptor)
        why = f"must belong to this user with mode 0700 (now uid {status.st_uid}, mode {mode:04o})"
        raise PermissionError(errno.EPERM, why, str(folder))
    return descriptor


def make_private(folder: Path) -> None:
    """Create a folder with mode 0700, or keep one that is private (``open_private``). Raises OSError."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        os.close(open_private(folder))


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk; a power cut may undo renames before. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_ours(path: Path) -> bool:
    """Whether a file or folder belongs to this user: to the owner of what it creates there.

    NFS may show what root has made as another user's.
    """
    try:
        owner = path.stat().st_uid
        if owner == os.geteuid():
            return True
        with tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent) as new:
            return owner == os.fstat(new.fileno()).st_uid
    except OSError:
        return False


def _checked(descriptor: int, file: Path) -> int:
    """The descriptor of a regular file. Any other is closed, and raises OSError."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    raise OSError(errno.EINVAL, "not a regular file", str(file))
