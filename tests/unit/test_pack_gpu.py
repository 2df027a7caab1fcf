"""``tools/pack_gpu.py``: what it keeps of a library, which package is in which archive, what it refuses.

Why: a missing kernel is noticed only on the offline machine. The library is made here in its file format. Not
covered: real libraries (their cubins were compared once with what cuobjdump finds), and loading them.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from tools import pack_gpu
from tools.pack_gpu import CUBIN, FATBIN, PTX, archives, closure, keep_architecture, locked, pack


def image(kind, arch, content):
    return struct.pack("<HHIQIIHHI", kind, 1, 64, len(content), 0, 0, 0, 0, arch).ljust(64, b"\0") + content


def fatbin(*images):
    body = b"".join(images)
    return struct.pack("<IHHQ", FATBIN, 1, 16, len(body)) + body


def library(section, name=b".nv_fatbin"):
    names = b"\0" + name + b"\0.shstrtab\0"
    first, second = 64, 64 + len(section)
    table = second + len(names)
    sections = [(0, 0, 0), (1, first, len(section)), (2 + len(name), second, len(names))]
    header = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack(
        "<QIHHHHHH", table, 0, 64, 0, 0, 64, len(sections), 2
    )
    rows = [struct.pack("<IIQQQQ", n, 1, 0, 0, at, size).ljust(64, b"\0") for n, at, size in sections]
    return bytearray(header + section + names + b"".join(rows))


WANTED, SOURCE = image(CUBIN, 90, b"hopper" * 9), image(PTX, 89, b"newer" * 7)
SMALL, LARGE = image(CUBIN, 75, b"turing"), image(CUBIN, 120, b"blackwell" * 11)
OLD = image(PTX, 80, b"older" * 8)


@pytest.mark.parametrize("name", [b".nv_fatbin", b"__nv_relfatbin"])
@pytest.mark.parametrize(
    ("images", "kept"),
    [
        ([OLD, SMALL, WANTED, LARGE, WANTED], [WANTED, WANTED]),
        ([WANTED], [WANTED]),
        ([SMALL, OLD, SOURCE, LARGE], [SOURCE]),
        ([image(PTX, 100, b"too new"), OLD], [OLD]),
        ([LARGE, SMALL], [SMALL]),
        ([], []),
    ],
)
def test_what_an_architecture_loads_is_kept_in_its_place(images, kept, name):
    before, after = fatbin(LARGE, WANTED), fatbin(WANTED)
    content = library(before + bytes(8) + fatbin(*images) + before, name)
    freed = keep_architecture(content, 90)
    dropped = len(fatbin(*images)) - len(fatbin(*kept))
    expected = (
        after.ljust(len(before), b"\0")
        + bytes(8)
        + fatbin(*kept)
        + bytes(dropped)
        + after.ljust(len(before), b"\0")
    )
    assert content == library(expected, name)
    assert freed == dropped + 2 * len(LARGE)
    assert keep_architecture(content, 90) == 0


def test_other_files_stay_as_they_are():
    for data in (b"", b"#!/bin/sh\n", library(fatbin(LARGE, WANTED), b".rodata")):
        content = bytearray(data)
        assert keep_architecture(content, 90) == 0
        assert content == data


@pytest.mark.parametrize(
    "broken",
    [
        struct.pack("<IHHQ", FATBIN, 2, 16, 0),
        struct.pack("<IHHQ", FATBIN, 1, 16, 999),
        fatbin(WANTED[:-4]),
        fatbin(struct.pack("<HHIQIIHHI", CUBIN, 1, 0, 0, 0, 0, 0, 0, 90)),
    ],
)
def test_an_unknown_form_is_refused(broken):
    with pytest.raises(ValueError, match="has an unknown form"):
        keep_architecture(library(broken), 90)


def test_each_package_is_in_one_archive_and_none_that_is_there():
    versions = locked()
    installed = {"rich": versions["rich"], "httpx": "0.1"}
    by_archive = archives(installed)
    names = [name for packages in by_archive.values() for name in packages]
    assert len(names) == len(set(names))
    assert {"megatron-core", "pydantic"} <= set(by_archive["te"])
    assert {"math-verify", "datasets", "schedulefree"} <= set(by_archive["app"])
    assert not closure(["torch"]) & set(names)
    assert "rich" not in names
    assert "httpx" in names  # another version is there


def test_extras_bring_their_packages():
    assert "h2" not in closure(["httpx"])
    assert "torch" not in closure(["torch-is-not-a-package-of-this-name"])
    assert closure(["transformers"]) < closure(["transformers[torch]"])


def test_an_archive_holds_the_files_of_its_packages(tmp_path):
    size, raw = pack(tmp_path / "app.tar.xz", ["packaging"], 90)
    with tarfile.open(tmp_path / "app.tar.xz") as tar:
        tar.extractall(tmp_path / "site", filter="data")
    assert size == (tmp_path / "app.tar.xz").stat().st_size < raw
    files = [file for file in metadata.files("packaging") or [] if file.suffix != ".pyc"]
    assert files
    assert all((tmp_path / "site" / file).read_bytes() == file.read_binary() for file in files)


def command(*arguments):
    return subprocess.run(
        [sys.executable, pack_gpu.__file__, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def test_refusals(tmp_path: Path):
    torch = locked()["torch"]
    frozen = tmp_path / "frozen.txt"
    frozen.write_text("numpy==2.0\ntorch==2.11.0+cu130\n")
    for arguments, message in (
        (["--installed", frozen], f"the archives need torch {torch} there, it has 2.11.0"),
        (["--installed", tmp_path / "none"], f"{tmp_path / 'none'} cannot be read"),
        ([], "cuda-tile is missing"),
    ):
        process = command(tmp_path / "out", *arguments)
        assert (process.returncode, process.stdout) == (1, ""), process.stderr
        assert message in process.stderr
        assert process.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_failed_pack_names_the_library_and_keeps_old_files(tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("the fatbin at 16 has an unknown form")

    monkeypatch.setattr(pack_gpu, "keep_architecture", refuse)
    (tmp_path / "app.tar.xz").write_text("of an earlier call")
    with pytest.raises(ValueError, match=r"^packaging\S+: the fatbin at 16 has an unknown form"):
        pack(tmp_path / "app.tar.xz", ["packaging"], 90)
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("app.tar.xz", "of an earlier call")]
