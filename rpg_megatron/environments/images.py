"""Images of tasks: ``.sif`` files, OCI layouts and folders, each unpacked once on a node.

``open_image`` gives a folder with an image's files. It is in a cache that all processes of a node share: one
of them unpacks an image, with a lock, while others that want it wait. When the cache is larger than its
limit, the images that were used longest ago are removed, and never one that a process has open. What an image
would take is counted before it is written. Nothing is downloaded. Formats: github.com/sylabs/sif
(``pkg/sif/sif.go``), squashfs by ``unsquashfs``, and github.com/opencontainers/image-spec
(``image-layout.md``, ``layer.md``).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import (
    atomic_write_text,
    folder_size,
    open_own,
    open_private,
    open_regular,
    read_json,
    read_text,
    real_path,
    remove,
    rename,
)
from rpg_megatron.environments.sandbox_limits import own_user
from rpg_megatron.system.child import start_program

_DAMAGED = (
    OSError,
    EOFError,
    zlib.error,
    tarfile.TarError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SIF_HEADER, _SIF_ENTRY = struct.Struct("<32s10s3s3s16s8q"), struct.Struct("<iBIIIqq8x32x128s2i")
_SIF_ENTRY_SIZE, _SIF_SYSTEM = 585, (0x4004, 1, 2)
"""Bytes of an entry; type, file system and kind of that with the files: partition, squashfs, primary."""
_LISTED = re.compile(rb"[-bcpdls][-rwxsStT]{9} \d+/\d+ +(\d+)[, ]")
"""A line of ``unsquashfs -lln``; group 1: bytes."""
_ENTRY = 512
"""Bytes that each file, folder or link counts besides its content."""
_MOST = 2_000_000
"""Files, folders and links of a layer or squashfs: the memory of those that list them."""
_VARIABLE = re.compile(r'^export ([A-Z_a-z][A-Z_a-z0-9]*)="?(?:\$\{\1:-"?)?([^"$`]*)"?\}?"?;?$', re.MULTILINE)
"""A line of a script in ``.singularity.d/env``, as Apptainer writes it for an image of Docker's."""


class Image(NamedTuple):
    """An image on this node."""

    root: Path
    """Folder with its files."""
    variables: dict[str, str]
    workdir: str
    """Where its programs start; empty if it does not say, or says "/", as builders do by themselves."""


def cache_folder(cache: str = "") -> Path:
    """Where images are unpacked: ``cache``, or a folder of this user in $TMPDIR."""
    return Path(cache or Path(tempfile.gettempdir(), f"rpg-images-{os.geteuid()}")).absolute()


@contextmanager
def open_image(path: str, cache: Path, limit_gib: float = 100.0) -> Iterator[Image]:
    """The image at a path; while it is open, it stays in the cache. Blocks while another process unpacks it.

    Raises UserError: no image, a damaged one, a missing program, a full disk, too large for the limit.
    """
    source = real_path(Path(path))
    try:
        kind, identity = _kind_of(source)
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise UserError(
            f"image {path}: {e}; give a .sif file, an OCI layout or a folder with files"
        ) from None
    if kind == "folder" and os.geteuid():
        yield _image_of(source, source)
        return
    with ExitStack() as stack:
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(open_private(cache))
            place = cache / hashlib.sha256(f"{source}\0{identity}".encode()).hexdigest()[:32]
            lock = stack.enter_context(_locked(place, fcntl.LOCK_SH))
            while not place.exists():
                stack.close()
                with _locked(place, fcntl.LOCK_EX):
                    if not place.exists():  # another process may have unpacked it
                        _unpack(source, kind, place, limit_gib)
                        _evict(place, limit_gib)
                lock = stack.enter_context(_locked(place, fcntl.LOCK_SH))
            os.utime(lock)
            image = _image_of(place / "root", source)
        except _DAMAGED as e:
            raise UserError(f"image {path}: {e}; see that {cache} has space and the image is whole") from None
        yield image


def _kind_of(source: Path) -> tuple[str, str]:
    """What an image is, and what changes when its files do."""
    if (source / "oci-layout").is_file():
        return "oci", str(_manifest(source)["digest"])
    if source.is_dir():
        if not any((source / name).is_dir() for name in ("bin", "usr")):
            raise ValueError("this folder has neither bin nor usr")
        return "folder", str(source.stat().st_mtime_ns)
    status = source.stat()
    return "squashfs", f"{_squashfs_offset(source)} {status.st_size} {status.st_mtime_ns}"


def _squashfs_offset(source: Path) -> int:
    """Where the squashfs begins in a .sif file, or in a file that is one."""
    with open_regular(source) as file:
        head = file.read(_SIF_HEADER.size)
        if head[:4] == b"hsqs":
            return 0
        _, magic, *_, entries, _, _, _ = _SIF_HEADER.unpack(head.ljust(_SIF_HEADER.size, b"\0"))
        if magic != b"SIF_MAGIC\0":
            raise ValueError("this file is neither a .sif nor a squashfs")
        file.seek(entries)
        for _ in range(4096):
            entry = file.read(_SIF_ENTRY_SIZE).ljust(_SIF_ENTRY_SIZE, b"\0")
            kind, used, _, _, _, offset, _, _, system, part = _SIF_ENTRY.unpack_from(entry)
            if used and (kind, system, part) == _SIF_SYSTEM:
                return int(offset)
            if not any(entry):
                break
    raise ValueError("this .sif has no squashfs; others, such as encrypted ones, cannot be read")


def _manifest(source: Path) -> dict[str, Any]:
    manifests = read_json(source / "index.json")["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"this layout has {len(manifests)} images; make one with a single image")
    return dict(manifests[0])


def _unpack(source: Path, kind: str, place: Path, limit_gib: float) -> None:
    """Unpack an image, with its size. What a killed process left is removed.

    Raises ValueError before it writes more than the limit.
    """
    part = place.with_suffix(".part")
    remove(part)
    try:
        part.mkdir()
        root = str(part / "root")
        if kind == "squashfs":
            offset = str(_squashfs_offset(source))
            with closing(_listed_sizes(offset, str(source))) as sizes:
                _check_size(sizes, limit_gib)
            # Extended attributes and devices need rights.
            _run("unsquashfs", "-no-progress", "-no-xattrs", "-excludes", "-offset", offset, "-dest", root,
                 str(source), "dev/*")  # fmt: skip
        elif kind == "oci":
            _unpack_layers(source, part / "root", limit_gib)
        else:
            _check_size([folder_size(source)], limit_gib)
            _run("cp", "-a", str(source), root)
        _run("chmod", "-R", "u+rwX", root)  # as root has it in a container
        if os.geteuid() == 0:
            _run("chown", "-hR", f"{own_user(0)}:{own_user(0)}", root)
        atomic_write_text(part / "size", str(folder_size(part)))
        rename(part, place)
    except BaseException:
        remove(part, ignore_errors=True)
        raise


def _check_size(sizes: Iterable[int], limit_gib: float, before: int = 0) -> int:
    """The sum of bytes with those before. Raises ValueError, as soon as it is known, if it is too large."""
    for number, size in enumerate(sizes):
        if number == _MOST:
            raise ValueError(f"it has more than {_MOST:,} files, folders and links; make one with fewer")
        before += size + _ENTRY
        if before > limit_gib * 2**30:
            said = f"it has {before / 2**30:.2g} GiB or more, and the cache a limit of {limit_gib:g} GiB"
            raise ValueError(f"{said}; raise that (cache_gib)")
    return before


def _listed_sizes(offset: str, source: str) -> Generator[int]:
    """Bytes of each file of a squashfs, as they are listed: a whole listing may be larger than memory."""
    command = [_found("unsquashfs"), "-lln", "-offset", offset, source]
    with start_program(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as listing:
        assert listing.stdout is not None
        try:
            yield from (int(said[1]) for line in listing.stdout if (said := _LISTED.match(line)))
            if listing.wait():
                raise ValueError("unsquashfs fails: it cannot list the files")
        finally:
            listing.kill()  # it may have more to say


def _found(program: str) -> str:
    if shutil.which(program) is None:
        raise UserError(
            f"{program} is not on the PATH; install squashfs-tools on each node, or unpack the image"
        )
    return program


def _run(program: str, *arguments: str) -> None:
    _found(program)
    # It ends with this process: the next one that wants the image begins anew in the same place.
    with start_program([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            stdout, stderr = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        said = (stderr or stdout).decode(errors="replace").strip().splitlines() or ["no message"]
        raise ValueError(f"{program} fails: {said[-1]}")


def _unpack_layers(source: Path, part: Path, limit_gib: float) -> None:
    """The layers of an OCI image, one over the other. A whiteout removes what is below it."""
    part.mkdir()
    total, modes = 0, dict[Path, int]()
    manifest = read_json(_blob(source, _manifest(source)["digest"]))
    if "layers" not in manifest:
        raise ValueError("this layout has an index of several images; copy one of them with skopeo")
    for layer in manifest["layers"]:
        if "zstd" in layer["mediaType"]:
            raise ValueError(f"a layer is compressed by zstd ({layer['digest']}); make the image with gzip")
        with tarfile.open(_blob(source, layer["digest"])) as tar:
            total = _check_size(_sizes(tar), limit_gib, total)
            members, keep = tar.getmembers(), _safe_layer(part, modes)
            hidden = [m for m in members if PurePosixPath(m.name).name.startswith(".wh.")]
            tar.extractall(part, hidden, filter=keep)  # they hide files of layers below, not of this one
            tar.extractall(part, [m for m in members if m not in hidden], filter=keep)
    for place, mode in modes.items():
        if place.is_dir() and real_path(place) == place:  # no link has come in its place
            place.chmod(mode)


def _sizes(tar: tarfile.TarFile) -> Iterator[int]:
    """Bytes of each member, which are what will be written."""
    for member in tar:
        if member.size < 0 or member.sparse is not None:
            raise ValueError(f"a layer has the sparse file {member.name}; make the image without such")
        yield member.size


def _blob(source: Path, digest: str) -> Path:
    """The file with this digest, which is checked."""
    algorithm, _, name = digest.partition(":")
    if algorithm != "sha256" or not re.fullmatch("[0-9a-f]{64}", name):
        raise ValueError(f"{digest} is no SHA-256")
    with open_regular(source / "blobs" / algorithm / name) as file:
        if hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest() != name:
            raise ValueError(f"the content of {digest} is another; copy the image again")
    return source / "blobs" / algorithm / name


def _safe_layer(
    root: Path, modes: dict[Path, int]
) -> Callable[[tarfile.TarInfo, str], tarfile.TarInfo | None]:
    """A filter that keeps files inside the folder, applies whiteouts and leaves devices out.

    modes: gets those of folders, such as that of /tmp, in which everybody may write.
    """
    real = real_path(root)

    def inside(name: str) -> Path:
        """The place of a file, which may itself be a link."""
        path = root / name.lstrip("/")
        place = real_path(path.parent) / path.name
        if not place.is_relative_to(real) or path.name == "..":
            raise ValueError(f"a layer has the file {name}, which leads outside")
        return place

    def keep(member: tarfile.TarInfo, _: str) -> tarfile.TarInfo | None:
        place = inside(member.name)
        if place.name == ".wh..wh..opq":
            for each in place.parent.iterdir() if place.parent.is_dir() else ():
                remove(each)
            return None
        if place.name.startswith(".wh."):
            remove(hidden := place.with_name(place.name.removeprefix(".wh.")))
            modes.pop(hidden, None)
            return None
        if member.isdev():
            return None
        if place.is_symlink() or (place.exists() and not (place.is_dir() and member.isdir())):
            remove(place)  # also a folder that a file replaces
        if member.islnk():
            target = inside(member.linkname)
            member = member.replace(linkname=member.linkname.lstrip("/"), deep=False)
            if target.is_symlink():
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(target)
            elif not target.is_file():  # tarfile would unpack the member of that name again, unfiltered
                raise ValueError(f"a layer has the link {member.name} to {member.linkname}, which is no file")
        kept: Any = tarfile.tar_filter(member, str(root))
        kept = kept.replace(uid=None, gid=None, uname=None, gname=None, deep=False)
        if member.isdir():
            modes[place] = member.mode & 0o1777 | 0o700
        if member.islnk() or member.isdir():  # set by path, at the end, which may lead elsewhere by then
            kept = kept.replace(mode=None, mtime=None, deep=False)
        return cast(tarfile.TarInfo, kept)

    return keep


def _image_of(root: Path, source: Path) -> Image:
    """An unpacked image with what it says of its programs."""
    variables, workdir = {"PATH": _PATH}, ""
    if (source / "oci-layout").is_file():
        manifest = read_json(_blob(source, _manifest(source)["digest"]))
        config = read_json(_blob(source, manifest["config"]["digest"])).get("config") or {}
        variables |= dict(each.partition("=")[::2] for each in config.get("Env") or ())
        workdir = str(config.get("WorkingDir") or "")
    else:
        for script in sorted((root / ".singularity.d" / "env").glob("*.sh")):
            with suppress(OSError, ValueError):
                variables |= _VARIABLE.findall(read_text(script, real_path(root)))
    workdir = str(PurePosixPath("/", workdir))
    return Image(root, variables, workdir if workdir != "/" else "")


@contextmanager
def _locked(place: Path, how: int) -> Iterator[int]:
    """The lock of an image, a file beside it that stays; its time is that of the image's last use."""
    with open_own(place.with_suffix(".lock"), "ab", permissions=0o600) as lock:
        fcntl.flock(lock, how)
        yield lock.fileno()


def _discard(place: Path) -> None:
    """Remove an image, whose lock this process has. A part that is left is not taken for an image."""
    remove(place.with_suffix(".part"))
    rename(place, place.with_suffix(".part"))
    remove(place.with_suffix(".part"))


def _evict(own: Path, limit_gib: float) -> None:
    """Remove images until the cache has its size, those that were used longest ago first."""
    kept: dict[Path, tuple[float, int]] = {}
    for file in own.parent.glob("*/size"):
        with suppress(OSError, ValueError):
            used = file.parent.with_suffix(".lock").stat().st_mtime
            kept[file.parent] = used, int(read_text(file))
    total, limit = sum(size for _, size in kept.values()), limit_gib * 2**30
    for place, (_, size) in sorted(kept.items(), key=lambda item: item[1]):
        if total > limit and place != own:
            with suppress(BlockingIOError), _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB):
                _discard(place)
                total -= size
