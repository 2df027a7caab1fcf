"""Images of tasks: what is unpacked, once, and what is removed from the cache.

Why: thousands of tasks have an image each, on nodes whose disks are smaller than all of them together; two
workers that unpack one at once, or one that another removes, would spoil a run. Real .sif files by
squashfs-tools, real OCI layouts, real processes. Not covered: images of others than these tools.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.config import UserError
from rpg_megatron.config.files import folder_size, remove
from rpg_megatron.environments import images
from rpg_megatron.environments.images import open_image
from tests.support.images import VARIABLES, make_layout, make_root, make_sif, make_squashfs
from tests.support.launcher import wait_for
from tests.support.ranks import ROOT
from tests.support.sandboxes import outside

needs_squashfs = pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="squashfs-tools is missing")


def small(folder: Path, text: str = "text", size: int = 0) -> Path:
    (folder / "usr/share").mkdir(parents=True)
    (folder / "usr/share/file").write_text(text)
    (folder / "usr/share/large").write_bytes(bytes(size))
    return folder


@needs_squashfs
@pytest.mark.parametrize("make", [make_sif, make_squashfs])
def test_a_sif_file(tmp_path: Path, make: Callable[[Path, Path], Path]) -> None:
    root = make_root(tmp_path / "root", ["sh", "cat"])
    (root / "etc/closed").write_text("x")
    (root / "etc/closed").chmod(0)
    (root / "usr/share").mkdir()
    (root / "usr/share").chmod(0o555)
    file = make(root, tmp_path / "image.sif")
    with open_image(str(file), tmp_path / "cache") as image:
        assert (image.root / "bin/cat").read_bytes() == Path("/bin/cat").read_bytes()
        assert (image.root / "etc/closed").stat().st_mode & 0o400, "root reads it in a container"
        assert (image.root / "usr/share").stat().st_mode & 0o200
        expected = VARIABLES if make is make_sif else {"PATH": image.variables["PATH"]}
        assert (image.variables, image.workdir) == (expected, "")
        if os.geteuid() == 0:
            assert (image.root / "bin/cat").stat().st_uid not in (0, os.getuid())
    before = image.root.stat().st_ino
    with open_image(str(file), tmp_path / "cache") as again:
        assert again.root.stat().st_ino == before, "not unpacked again"
    time.sleep(0.01)
    (root / "new").touch()
    make(root, file)
    with open_image(str(file), tmp_path / "cache") as changed:
        assert (changed.root / "new").exists()


def add(name: str, content: bytes = b"", **fields: object) -> Callable[[tarfile.TarFile], None]:
    def to(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        for key, value in fields.items():
            setattr(member, key, value)
        tar.addfile(member, io.BytesIO(content))

    return to


def layer(*members: Callable[[tarfile.TarFile], None]) -> Callable[[tarfile.TarFile], None]:
    return lambda tar: [each(tar) for each in members] and None


def test_a_layout_of_several_layers(tmp_path: Path) -> None:
    link, hard, device = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE
    source = make_layout(
        tmp_path / "layout",
        layer(add("usr/a", b"1"), add("usr/b", b"1"), add("d/x", b"1"), add("d/y", b"1"), add("e/x", b"1")),
        layer(add("usr/.wh.a"), add("usr/b", b"2"), add("d/.wh..wh..opq"), add("d/z", b"2"), add(".wh.e")),
        layer(
            add("bin", type=link, linkname="usr"),
            add("hard", type=hard, linkname="/usr/b"),
            add("null", type=device),
        ),
        layer(add("bin/c", b"3"), add("out", type=link, linkname="/etc"), add("usr/b", b"4")),
    )
    with open_image(str(source), tmp_path / "cache") as image:
        found = {str(path.relative_to(image.root)) for path in image.root.rglob("*")}
        assert found == {"usr", "usr/b", "usr/c", "d", "d/z", "bin", "hard", "out"}
        assert ((image.root / "usr/b").read_text(), (image.root / "hard").read_text()) == ("4", "2")
        assert (image.variables, image.workdir) == (VARIABLES, "/app")


def test_folders_keep_their_modes(tmp_path: Path) -> None:
    """In /tmp everybody may write, and remove only own files."""
    folder, link = {"type": tarfile.DIRTYPE}, {"type": tarfile.SYMTYPE, "linkname": "tmp"}
    members = [add("tmp", mode=0o1777, **folder), add("closed", mode=0o500, **folder)]
    members += [add("closed/x"), add("was", mode=0o777, **folder), add("set", mode=0o6755, **folder)]
    source = make_layout(tmp_path / "layout", layer(add("usr/a"), *members), layer(add("was", **link)))
    with open_image(str(source), tmp_path / "cache") as image:
        modes = {p.name: p.stat().st_mode & 0o7777 for p in image.root.iterdir() if not p.is_symlink()}
        assert (modes["tmp"], modes["closed"], modes["set"]) == (0o1777, 0o700, 0o755)
        assert (image.root / "was").is_symlink()


NULL = {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}
SYM, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}
UNCOUNTED = {
    "a negative size": [add("d", type=tarfile.DIRTYPE, pax_headers={"size": "-1000000000000000"})],
    "a negative size of a sparse file": [
        add("d", type=tarfile.DIRTYPE, pax_headers={"GNU.sparse.realsize": "-1000000000000000"})
    ],
    "a link to a device": [add("null", **NULL), add("a", linkname="null", **HARD)],
    "copies in place of links": [
        add("f", bytes(9000)), add("l", linkname=".", **SYM), add("l/f", linkname="nowhere", **SYM),
        *[add(f"copy-{n}", linkname="f", **HARD) for n in range(20)],
    ],
}  # fmt: skip
"""Layers that would write what was not counted, or what the filter leaves out."""


@pytest.mark.parametrize("what", UNCOUNTED)
def test_layers_write_what_was_counted(tmp_path: Path, what: str) -> None:
    source = make_layout(
        tmp_path / "layout", layer(add("usr/a"), *UNCOUNTED[what], add("last", bytes(30_000)))
    )
    cache = tmp_path / "cache"
    if what == "copies in place of links":
        with open_image(str(source), cache) as image:
            assert os.readlink(image.root / "copy-19") == "nowhere"
            assert folder_size(image.root) < 40_000
        return
    with pytest.raises(UserError, match=r"sparse file d|link a to null"), open_image(str(source), cache):
        pass
    assert [path.suffix for path in cache.iterdir()] == [".lock"], "nothing is left"


def bomb_of_zeros(tmp_path: Path) -> Path:
    """Less than a MiB, which becomes 200."""
    return make_layout(tmp_path / "bomb", layer(add("usr/a"), add("large", bytes(200 << 20))))


def bomb_of_layers(tmp_path: Path) -> Path:
    """Each fits."""
    return make_layout(tmp_path / "bomb", *[layer(add(f"usr/{n}", bytes(7 << 20))) for n in range(4)])


def bomb_of_names(tmp_path: Path) -> Path:
    return make_layout(tmp_path / "bomb", layer(*[add(f"usr/{n}") for n in range(50_000)]))


def bomb_of_squashfs(tmp_path: Path) -> Path:
    root = small(tmp_path / "root")
    os.truncate(root / "usr/share/large", 200 << 20)  # a hole
    return make_sif(root, tmp_path / "bomb")


def bomb_of_folder(tmp_path: Path) -> Path:
    return small(tmp_path / "bomb", size=21 << 20)


@pytest.mark.parametrize("make", [
    bomb_of_zeros, bomb_of_layers, bomb_of_names, pytest.param(bomb_of_squashfs, marks=needs_squashfs),
    pytest.param(bomb_of_folder, marks=pytest.mark.skipif(os.geteuid() != 0, reason="used where it is")),
])  # fmt: skip
def test_an_image_larger_than_the_limit_is_refused_before_it_is_written(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest file that is ever there is smaller than the limit."""
    bomb, cache, seen = make(tmp_path), tmp_path / "cache", [0]

    def look_before(path: Path, **options: Any) -> None:
        seen.append(folder_size(cache))
        remove(path, **options)

    monkeypatch.setattr(images, "remove", look_before)
    refused = pytest.raises(UserError, match=r"the cache a limit of 0\.02 GiB; raise that \(cache_gib\)")
    with refused, open_image(str(bomb), cache, 0.02):
        pass
    assert max(seen) < 0.02 * 2**30
    assert [path.suffix for path in cache.iterdir()] == [".lock"], "nothing is left"


@pytest.mark.parametrize(
    "make", [pytest.param(make_squashfs, marks=needs_squashfs), pytest.param(None, id="layout")]
)
def test_more_files_than_memory_has_room_for_are_refused(
    tmp_path: Path, make: Callable[[Path, Path], Path] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing of a squashfs is read as it comes, and ended."""
    if make:
        root = small(tmp_path / "root")
        for n in range(3000):
            (root / f"{n}-{'x' * 200}").touch()
        source = make(root, tmp_path / "image")
    else:
        source = make_layout(tmp_path / "image", layer(*[add(f"usr/{n}") for n in range(3000)]))
    for most, refused in ((4000, False), (2500, True)):
        monkeypatch.setattr(images, "_MOST", most)
        expected = (
            pytest.raises(UserError, match=r"it has more than 2,500 files") if refused else nullcontext()
        )
        with expected, open_image(str(source), tmp_path / f"cache-{most}"):
            pass


HOSTILE = {
    "climbs": [add("../../outside", b"x")],
    "goes through a link": [add("out", type=tarfile.SYMTYPE, linkname="/tmp"), add("out/rpg-outside", b"x")],
    "removes through a link": [add("out", type=tarfile.SYMTYPE, linkname="/tmp"), add("out/.wh.kept")],
    "links a file through a link": [
        add("f", type=tarfile.SYMTYPE, linkname="/etc"),
        add("g", type=tarfile.LNKTYPE, linkname="f/passwd"),
    ],
    "links a file outside": [add("f", type=tarfile.LNKTYPE, linkname="../../../../etc/passwd")],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_layers_that_lead_outside_are_refused(tmp_path: Path, what: str) -> None:
    apart = what == "removes through a link"  # of a layer below
    hostile = map(layer, HOSTILE[what]) if apart else [layer(*HOSTILE[what])]
    source = make_layout(tmp_path / "layout", layer(add("usr/a")), *hostile)
    with pytest.raises(UserError, match="outside"), open_image(str(source), tmp_path / "cache"):
        pass
    assert not Path("/tmp/rpg-outside").exists()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"], "nothing is left"


def test_links_do_not_lead_to_attributes_of_files_outside(tmp_path: Path) -> None:
    """A hard link to a link, and a folder in whose place a link comes later."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    before = victim.stat()
    link, hard, folder = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
    other = {"mode": 0o755, "uid": 4242, "gid": 4242, "mtime": 1}
    source = make_layout(
        tmp_path / "layout",
        layer(
            add("usr/a"),
            add("a", type=link, linkname=str(victim)),
            add("b", type=hard, linkname="a", **other),
            add("d", type=folder, **other),
            add("d", type=link, linkname=str(victim)),
        ),
    )
    with open_image(str(source), tmp_path / "cache") as image:
        assert (image.root / "d").is_symlink()
    after = victim.stat()
    assert [getattr(after, f"st_{name}") for name in ("mode", "uid", "gid", "mtime_ns")] == [
        getattr(before, f"st_{name}") for name in ("mode", "uid", "gid", "mtime_ns")
    ]


def test_a_part_that_an_eviction_leaves_is_not_taken_for_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (str(make_layout(tmp_path / name, layer(add("usr/a", b"1" * 4000)))) for name in "ab")

    def is_killed(path: Path, **_: object) -> None:
        if path.is_dir():
            shutil.rmtree(path / "root/usr")
            raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with open_image(first, cache):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(images, "remove", is_killed)
        with pytest.raises(KeyboardInterrupt), open_image(second, cache, 6000 / 2**30):
            pass
    with open_image(first, cache) as image:
        assert (image.root / "usr/a").exists()


def test_a_whiteout_hides_no_file_of_its_own_layer(tmp_path: Path) -> None:
    lower = layer(add("usr/a"), add("d/old"), add("e", b"old"))
    upper = layer(add("d/new"), add("d/.wh..wh..opq"), add("e", b"new"), add(".wh.e"))
    with open_image(str(make_layout(tmp_path / "layout", lower, upper)), tmp_path / "cache") as image:
        assert [path.name for path in (image.root / "d").iterdir()] == ["new"]
        assert (image.root / "e").read_text() == "new"


def test_a_link_in_a_layer_to_a_file_of_the_machine_links_one_of_the_image(tmp_path: Path) -> None:
    members = [add("etc/passwd", b"of the image"), add("f", type=tarfile.LNKTYPE, linkname="/etc/passwd")]
    source = make_layout(tmp_path / "layout", layer(add("usr/a"), *members))
    with open_image(str(source), tmp_path / "cache") as image:
        assert (image.root / "f").read_text() == "of the image"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p, "No such file"),
        (lambda p: p.write_bytes(b"ELF" * 100), "neither a .sif nor a squashfs"),
        (lambda p: p.write_bytes(b"x" * 32 + b"SIF_MAGIC\0" + bytes(9000)), "no squashfs"),
        (lambda p: p.write_bytes(b"hsqs" + bytes(9000)), "unsquashfs (fails|is not on the PATH)"),
        (lambda p: p.mkdir(), "neither bin nor usr"),
        (lambda p: p.mkdir() or (p / "oci-layout").touch(), "No such file"),
        (lambda p: make_layout(p, layer(add("usr/a"))) and (p / "index.json").write_text("{}"), "manifests"),
        (lambda p: make_layout(p, layer(add("usr/a"))) and (p / "index.json").write_text("[]"), "list"),
    ],
)
def test_what_is_no_image_is_told(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "image")
    with pytest.raises(UserError, match=message), open_image(str(tmp_path / "image"), tmp_path / "cache"):
        pass


def test_a_damaged_layer_is_told(tmp_path: Path) -> None:
    source = make_layout(tmp_path / "layout", layer(add("usr/a", b"1")))
    for blob in (source / "blobs/sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.write_bytes(blob.read_bytes() + b"x")
    with (
        pytest.raises(UserError, match=r"the content of sha256:\w+ is another"),
        open_image(str(source), tmp_path / "cache"),
    ):
        pass


UNPACK = """
import sys, time
from pathlib import Path
from rpg_megatron.environments import images
original = images._unpack
def counted(*arguments):
    with open(sys.argv[3], "a") as log:
        log.write("unpacked\\n")
    half = arguments[2].with_suffix(".part") / "root/half"
    half.mkdir(parents=True)
    time.sleep(0.5)
    original(*arguments)
images._unpack = counted
with images.open_image(sys.argv[1], Path(sys.argv[2])) as image:
    print((image.root / "usr/share/file").read_text(), flush=True)
    sys.stdin.read()
"""


def workers(count: int, *arguments: Path) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", UNPACK, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    return [subprocess.Popen(command, **pipes) for _ in range(count)]  # type: ignore[call-overload]


def test_a_killed_process_leaves_no_program_that_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write where the next process does. One of the programs is held by another of its name."""
    mark, programs = f"1000.{os.getpid()}", tmp_path / "programs"
    programs.mkdir()
    source = make_layout(tmp_path / "image", layer(add("usr/share/file", b"image")))
    with monkeypatch.context() as patch:
        (programs / "chmod").write_text(f"#!/bin/sh\nexec sleep {mark}\n")
        (programs / "chmod").chmod(0o755)
        patch.setenv("PATH", str(programs), prepend=os.pathsep)
        [owner] = workers(1, source, tmp_path / "cache", tmp_path / "log")
        wait_for(lambda: [line for line in outside(mark) if line.startswith("sleep")])
        owner.kill()
        owner.communicate()
    wait_for(lambda: not outside(mark))
    [owner] = workers(1, source, tmp_path / "cache", tmp_path / "log")
    assert owner.communicate("")[0] == "image\n"


def image_of(tmp_path: Path, name: str, size: int = 0) -> Path:
    return make_layout(
        tmp_path / name, layer(add("usr/share/file", name.encode()), add("usr/large", bytes(size)))
    )


def test_workers_at_once_unpack_an_image_once(tmp_path: Path) -> None:
    started = workers(4, image_of(tmp_path, "one"), tmp_path / "cache", tmp_path / "log")
    said = [process.communicate("")[0] for process in started]
    assert said == ["one\n"] * 4
    assert (tmp_path / "log").read_text() == "unpacked\n"


def test_a_worker_killed_while_it_unpacks_leaves_nothing_that_is_taken_for_an_image(tmp_path: Path) -> None:
    source = image_of(tmp_path, "one")
    (killed,) = workers(1, source, tmp_path / "cache", tmp_path / "log")
    while not (tmp_path / "log").exists():
        time.sleep(0.01)
    while not [*(tmp_path / "cache").glob("*.part/root/half")]:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    with open_image(str(source), tmp_path / "cache") as image:
        assert {path.name for path in image.root.iterdir()} == {"usr"}


def test_the_image_used_longest_ago_is_removed_and_never_one_in_use(tmp_path: Path) -> None:
    cache, mib = tmp_path / "cache", 1 << 20
    sources = {name: image_of(tmp_path, name, 10 * mib) for name in ("a", "b", "c", "d")}
    limit = 25 / 1024  # two of them
    (in_use,) = workers(1, sources["a"], cache, tmp_path / "log")
    assert in_use.stdout is not None
    assert in_use.stdout.readline() == "a\n"

    def kept() -> set[str]:
        return {path.read_text() for path in cache.glob("*/root/usr/share/file")}

    for name, expected in (("b", {"a", "b"}), ("c", {"a", "c"}), ("c", {"a", "c"}), ("d", {"a", "d"})):
        with open_image(str(sources[name]), cache, limit):
            assert kept() == expected
        time.sleep(0.01)
    in_use.communicate("")
    with open_image(str(sources["b"]), cache, limit):
        assert kept() == {"b", "d"}, "a was used before d"
    refused = pytest.raises(UserError, match=r"and the cache a limit of 0\.001 GiB")
    with refused, open_image(str(sources["c"]), cache, 0.001):
        pass
    assert "c" not in kept()


def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    refused = pytest.raises(UserError, match="must belong to this user with mode 0700")
    with refused, open_image(str(image_of(tmp_path, "one")), tmp_path / "cache"):
        pass


def test_a_folder_is_used_where_it_is_unless_root_needs_files_of_another_user(tmp_path: Path) -> None:
    root = small(tmp_path / "root")
    with open_image(str(root), tmp_path / "cache") as image:
        assert (image.root == root) is (os.geteuid() != 0)
        assert (image.root / "usr/share/file").read_text() == "text"


def test_an_error_inside_is_not_taken_for_one_of_the_image(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="mine"),
        open_image(str(image_of(tmp_path, "one")), tmp_path / "cache"),
    ):
        raise ValueError("mine")
