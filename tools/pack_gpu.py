"""Packs the GPU packages into four archives, for a Hopper machine that has torch and no network.

    python tools/pack_gpu.py OUT [--installed FILE]

Run it with the Python of an environment made from requirements/gpu.txt and requirements/te-torch.txt, as
slurm/Dockerfile makes it; no GPU is needed. ``tools/gpu_check.sh`` unpacks the archives:

    te.tar.xz    Transformer Engine, Megatron-Core and what they import
    app.tar.xz   what the project itself imports beside these
    vllm.tar.xz  vLLM
    deps.tar.xz  what vLLM imports beside all of these

The other machine must have torch of exactly the locked version, for the same Python and CUDA, with all
packages that torch asks for. FILE is the output of ``pip freeze`` there: packages that it has in the locked
version are left out. Kernels are kept for one architecture (``--arch 90``: Hopper).
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import io
import re
import struct
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TRANSFORMER_ENGINE = [
    "transformer-engine[core-cu13]",
    "transformer-engine-torch",
    "megatron-core",
    "pydantic",
]
NOT_LOADED = (
    *("cuda-*", "nccl*", "nvidia-cuda-*", "nvidia-cudnn-frontend", "nvidia-nvvm", "nvidia-cutlass-*"),
    *("flashinfer-*", "humming-*", "llvmlite", "numba", "quack-*", "tilelang", "tokenspeed-*", "z3-solver"),
    *("opencv-*", "pynvvideocodec", "torchaudio", "torchcodec", "torchvision"),
    *("fastsafetensors", "instanttensor"),
)
"""2.1 GiB that vLLM asks for and our engines go without: libraries, compilers and kernels of other back ends;
images, audio and video; other ways to load checkpoints.
"""
FILES_NOT_LOADED = ("vllm/vllm_flash_attn/_vllm_fa2_C.*",)
"""FlashAttention 2: on Hopper version 3 serves, and vLLM goes without the file."""
FATBIN, PTX, CUBIN = 0xBA55ED50, 1, 2
_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
"""CUDA's fatbin: magic, version, size of this header, bytes after it; then one header before each image:
kind, version, size of the header, bytes after it, compressed size, unknown, minor and major version,
architecture.
"""


def keep_architecture(library: bytearray, arch: int) -> int:
    """Reduce a shared library's fatbins, in place, to what ``arch`` loads; returns the bytes that this frees.

    That is the cubins for ``arch``, else the newest PTX that it can compile; of a fatbin with neither, which
    fails there anyway, the smallest image stays. Fatbins keep their place, so nothing that points to them
    changes; freed bytes are zero. Raises ValueError if a fatbin cannot be read.
    """
    freed = 0
    for begin, end in _fatbin_sections(library):
        at = begin
        while (at := library.find(FATBIN.to_bytes(4, "little"), at, end)) >= 0:
            _, version, header, size = _HEADER.unpack_from(library, at)
            last = at + header + size
            if version != 1 or header != _HEADER.size or last > end:
                raise ValueError(f"the fatbin at {at} has an unknown form")
            found = b"".join(_loaded(list(_images(library, at + header, last)), arch))
            library[at + header : last] = found.ljust(size, b"\0")
            _HEADER.pack_into(library, at, FATBIN, version, header, len(found))
            freed += size - len(found)
            at = last
    return freed


def _loaded(images: list[tuple[int, int, bytes]], arch: int) -> list[bytes]:
    cubins = [image for kind, of, image in images if kind == CUBIN and of == arch]
    sources = [(of, image) for kind, of, image in images if kind == PTX and of <= arch]
    if cubins or not images:
        return cubins
    return [max(sources)[1] if sources else min((image for *_, image in images), key=len)]


def _images(library: bytearray, at: int, end: int) -> Iterator[tuple[int, int, bytes]]:
    """(kind, architecture, header and contents) of each image of a fatbin."""
    while at < end:
        kind, _, header, size, *_, arch = _ENTRY.unpack_from(library, at)
        if header < _ENTRY.size or at + header + size > end:
            raise ValueError(f"the image at {at} has an unknown form")
        yield kind, arch, bytes(library[at : at + header + size])
        at += header + size


def _fatbin_sections(library: bytearray) -> list[tuple[int, int]]:
    """(begin, end) of the sections of a 64-bit ELF file that hold fatbins; none for other files."""
    if library[:5] != b"\x7fELF\x02":
        return []
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, names = struct.unpack_from("<HHH", library, 58)
    sections = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    found = []
    for name, *_, offset, length in sections:
        start = sections[names][4] + name
        if library[start : library.index(0, start)] in (b".nv_fatbin", b"__nv_relfatbin"):
            found.append((offset, offset + length))
    return found


def closure(wanted: Iterable[str]) -> set[str]:
    """Normalised names of these requirements and of all that they ask for, as far as it is installed."""
    found: set[str] = set()
    open_ = [Requirement(line) for line in wanted]
    seen: set[tuple[str, str]] = set()
    while open_:
        requirement = open_.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                asked = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            found.add(name)
            for line in asked:
                further = Requirement(line)
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    open_.append(further)
    return found


def locked() -> dict[str, str]:
    """Normalised name -> version of the locks."""
    lines = [line for name in ("gpu.txt", "te-torch.txt") for line in (ROOT / "requirements" / name).open()]
    return pinned(lines)


def pinned(lines: Iterable[str]) -> dict[str, str]:
    """Normalised name -> version of the lines ``name==version``."""
    found = (re.match(r"([\w.-]+)==([^\s;]+)", line) for line in lines)
    return {canonicalize_name(m[1]): m[2] for m in found if m}


def archives(there: dict[str, str]) -> dict[str, list[str]]:
    """Archive -> its packages. there: name -> version of the other machine's packages, without torch's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    versions = locked()
    taken = closure(["torch"]) | {name for name, version in there.items() if versions.get(name) == version}
    taken |= {name for name in versions if any(fnmatch(name, pattern) for pattern in NOT_LOADED)}
    found = {}
    for archive, wanted in (
        ("te", TRANSFORMER_ENGINE),
        ("app", project),
        ("vllm", ["vllm"]),
        ("deps", ["vllm"]),
    ):
        names = {"vllm"} if archive == "vllm" else closure(wanted) - {"vllm"}
        found[archive] = sorted(names - taken)
        taken |= names
    return found


def pack(file: Path, names: Iterable[str], arch: int) -> tuple[int, int]:
    """Write an archive of these packages; returns its size and that of the packages, in bytes."""
    raw = 0
    with tarfile.open(file, "w:xz", preset=9) as tar:
        for name in names:
            for path in sorted(metadata.files(name) or [], key=str):
                source = Path(str(path.locate()))
                skip = any(path.match(pattern) for pattern in FILES_NOT_LOADED) or path.suffix == ".pyc"
                if skip or ".." in path.parts or not source.is_file():
                    continue
                data = bytearray(source.read_bytes())
                raw += len(data)
                keep_architecture(data, arch)
                entry = tarfile.TarInfo(str(path))
                entry.size, entry.mode = len(data), source.stat().st_mode & 0o755
                tar.addfile(entry, io.BytesIO(data))
    return file.stat().st_size, raw


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the archives")
    parser.add_argument(
        "--installed", type=Path, metavar="FILE", help="output of `pip freeze` on the other machine"
    )
    parser.add_argument("--arch", type=int, default=90, help="architecture of its GPUs (default: 90, Hopper)")
    given = parser.parse_args()
    versions = locked()
    there = {}
    if given.installed is not None:
        try:
            there = pinned(given.installed.read_text().splitlines())
        except (OSError, UnicodeDecodeError) as e:
            sys.exit(f"error: --installed: {given.installed} cannot be read: {e}")
        torch = there.get("torch", "").partition("+")[0]
        if torch != versions["torch"]:
            sys.exit(
                f"error: --installed: the archives need torch {versions['torch']} there, "
                f"it has {torch or 'none'}"
            )
    here = {name: _version(name) for name in versions}
    if wrong := [f"{n} {here[n] or 'is missing'} (locked: {v})" for n, v in versions.items() if here[n] != v]:
        more = f"; and {len(wrong) - 5} more" if wrong[5:] else ""
        sys.exit(
            "error: this environment differs from requirements/gpu.txt and te-torch.txt; make it anew as "
            f"slurm/Dockerfile does: {'; '.join(wrong[:5])}{more}"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    for archive, names in archives(there).items():
        began = time.monotonic()
        print(f"{archive}.tar.xz: {len(names)} packages ...", end=" ", flush=True)
        packed, raw = pack(given.out / f"{archive}.tar.xz", names, given.arch)
        print(f"{packed / 2**20:.1f} of {raw / 2**20:.1f} MiB, {time.monotonic() - began:.0f} s")
    print(f"for Python {sys.version_info[0]}.{sys.version_info[1]} with torch {metadata.version('torch')}")


def _version(name: str) -> str:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
