"""Files that others may have made, or may change meanwhile, are read, copied and removed safely.

Why: a link in a downloaded folder, or planted in a folder that others can write to, otherwise makes us copy,
overwrite or remove a file of ours that its author may not touch. Not covered: who uses which function
(test_file_operations, and the tests of each command).
"""

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.config import files
from rpg_megatron.config.files import (
    atomic_write,
    atomic_write_text,
    copy_file,
    folder_size,
    is_ours,
    make_private,
    open_own,
    open_private,
    open_regular,
    read_json,
    remove,
)

OTHER = 12345
"""User and group of others."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("mine")
    file.chmod(0o600)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that others have made."""
    path = tmp_path / "folder"
    (path / "sub").mkdir(parents=True)
    (path / "file").write_text("x")
    return path


@pytest.fixture(autouse=True)
def _umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


# -- reading -------------------------------------------------------------------------------------------------


def test_the_size_of_a_folder_that_changes_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub" / "other").write_text("four")
    (folder / "link").symlink_to("file")
    assert folder_size(folder) == 5
    lstat = os.lstat

    def remove_first(path: str) -> os.stat_result:
        (folder / "file").unlink(missing_ok=True)  # another process ends its work just now
        return lstat(path)

    monkeypatch.setattr(os, "lstat", remove_first)
    assert folder_size(folder) == 4
    assert not (folder / "file").exists()
    assert folder_size(folder / "missing") == 0


def test_a_file_of_two_names_counts_once(folder: Path) -> None:
    before = folder_size(folder)
    (folder / "a").write_text("four")
    os.link(folder / "a", folder / "sub" / "b")
    assert folder_size(folder) == before + 4


def test_what_lies_in_the_folder_is_read(tmp_path: Path, folder: Path) -> None:
    (folder / "sub" / "link").symlink_to("../file")
    os.link(folder / "file", folder / "hard")
    (tmp_path / "way").symlink_to(folder)
    for name in ("file", "sub/link", "hard", "sub/../file"):
        for root in (folder, tmp_path / "way"):  # the folder may be reached through links
            with open_regular(root / name, root.resolve()) as f:
                assert f.read() == b"x"


@pytest.mark.parametrize("name", ["link", "way/secret", "../secret", "absolute", "sibling"])
def test_what_lies_elsewhere_is_refused(tmp_path: Path, folder: Path, secret: Path, name: str) -> None:
    (folder / "link").symlink_to(secret)
    (folder / "way").symlink_to(tmp_path)
    (tmp_path / "folder2").mkdir()  # its name begins with the folder's
    (tmp_path / "folder2" / "file").touch()
    (folder / "sibling").symlink_to(tmp_path / "folder2" / "file")
    file = folder / (str(secret) if name == "absolute" else name)
    with pytest.raises(OSError, match=r"leads to .*, outside .*folder"):
        open_regular(file, folder.resolve())


def test_a_link_planted_at_the_last_moment_is_refused(folder: Path, secret: Path, monkeypatch) -> None:
    def swap(path: Path, *arguments: object, **options: object) -> int:
        if path == folder / "file":
            path.unlink()
            path.symlink_to(secret)
        return real(path, *arguments, **options)

    real = os.open
    monkeypatch.setattr(files.os, "open", swap)
    with pytest.raises(OSError, match="leads to"):
        open_regular(folder / "file", folder.resolve())


def test_a_link_planted_later_is_not_copied(tmp_path: Path, folder: Path, secret: Path) -> None:
    with open_regular(folder / "file", folder.resolve()) as source:
        (folder / "file").unlink()
        (folder / "file").symlink_to(secret)
        copy_file(source, tmp_path, "copy")
    assert (tmp_path / "copy").read_text() == "x"


def test_json_files_have_a_limit(folder: Path) -> None:
    with (folder / "file").open("wb") as f:
        f.truncate(100_000_001)  # sparse
    with pytest.raises(OSError, match="larger than 100,000,000 bytes"):
        read_json(folder / "file")


# -- our own files -------------------------------------------------------------------------------------------


def plant_link(file: Path, secret: Path) -> None:
    file.symlink_to(secret)


def plant_fifo(file: Path, secret: Path) -> None:
    os.mkfifo(file)


@pytest.mark.parametrize("mode", ["rb", "r+b", "ab", "w", "x"])
@pytest.mark.parametrize("plant", [plant_link, plant_fifo])
def test_a_file_of_ours_is_no_planted_link_or_fifo(
    folder: Path, secret: Path, mode: str, plant: Callable[[Path, Path], None]
) -> None:
    plant(folder / "log", secret)
    with pytest.raises(OSError, match=r"symbolic link|not a regular file|No such device|File exists|Illegal"):
        open_own(folder / "log", mode).close()
    assert secret.read_text() == "mine"


def test_a_planted_part_is_not_written_through(folder: Path, secret: Path) -> None:
    (folder / ".report.html.part").symlink_to(secret)  # the name that was used before
    with atomic_write(folder / "report.html") as first, atomic_write(folder / "report.html") as second:
        parts = [p.name for p in folder.glob(".report.html.*.part")]
        first.write(b"1")
        second.write(b"2")
    assert len(set(parts)) == 2
    assert ".report.html.part" not in parts
    assert (folder / "report.html").read_text() == "1"  # whole, whichever is last
    assert secret.read_text() == "mine"


def test_a_file_is_replaced_whole_or_not_at_all(folder: Path, secret: Path) -> None:
    (folder / "link").symlink_to(secret)
    atomic_write_text(folder / "link", "ours")
    assert (secret.read_text(), (folder / "link").read_text()) == ("mine", "ours")
    with pytest.raises(TypeError), atomic_write(folder / "file") as f:
        f.write(b"half" + "")  # type: ignore[operator]
    assert (folder / "file").read_text() == "x"
    os.mkfifo(folder / "fifo")  # as /dev/stdout: a rename would replace it
    with pytest.raises(OSError, match="not a regular file"):
        atomic_write_text(folder / "fifo", "")
    assert sorted(p.name for p in folder.iterdir()) == ["fifo", "file", "link", "sub"]
    atomic_write_text(folder / "token", "", private=True)
    assert (folder / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("mode", "copied"), [(0o600, 0o600), (0o644, 0o644), (0o640, 0o640), (0o666, 0o644)])
def test_a_copy_has_no_more_readers_than_its_source(tmp_path, folder: Path, mode: int, copied: int) -> None:
    (folder / "file").chmod(mode)
    for name, content in (("plain", None), ("changed", b"y")):
        with open_regular(folder / "file") as source:
            copy_file(source, tmp_path, name, content)
        assert (tmp_path / name).stat().st_mode & 0o777 == copied
        assert (tmp_path / name).read_bytes() == (content or b"x")


def test_a_copy_of_a_file_that_grows_ends(folder: Path, tmp_path, monkeypatch) -> None:
    with open_regular(folder / "file") as source:

        def grow(*arguments: Any, **options: Any) -> Any:
            with (folder / "file").open("a") as file:
                file.write("y" * 1000)  # another process writes just now
            return open_own(*arguments, **options)

        monkeypatch.setattr(files, "open_own", grow)
        copy_file(source, tmp_path, "copy", limit=10)
    assert (tmp_path / "copy").read_text() == "x"


@as_root
def test_a_copy_is_not_read_by_another_group(tmp_path: Path, folder: Path) -> None:
    os.chown(folder / "file", OTHER, OTHER)
    (folder / "file").chmod(0o640)
    with open_regular(folder / "file") as source:  # of another user, as models in a container are
        copy_file(source, tmp_path, "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["../out", "sub/out", "/out", "", ".", ".."])
def test_a_copy_has_the_name_of_a_file(folder: Path, name: str) -> None:
    with open_regular(folder / "file") as source, pytest.raises(ValueError, match="not the name of a file"):
        copy_file(source, folder, name)


def test_a_copy_replaces_nothing(folder: Path, secret: Path) -> None:
    (folder / "taken").symlink_to(secret)
    (folder / "dangling").symlink_to(secret.parent / "new")
    for name in ("taken", "dangling", "file"):
        with open_regular(folder / "file") as source, pytest.raises(FileExistsError):
            copy_file(source, folder, name)
    assert secret.read_text() == "mine"
    assert not (secret.parent / "new").exists()


# -- removal -------------------------------------------------------------------------------------------------


def test_links_are_removed_and_not_followed(folder: Path, secret: Path) -> None:
    place = secret.parent / "place"
    place.mkdir()
    (place / "file").touch()
    (folder / "sub" / "deep").symlink_to(place)
    (folder / "link").symlink_to(place)
    for name in ("link", "sub", "file", "gone", "gone/too"):
        remove(folder / name)
    assert list(folder.iterdir()) == []
    assert [f.name for f in place.iterdir()] == ["file"]


def test_a_file_of_a_reused_name_is_kept(folder: Path) -> None:
    inode = (folder / "file").stat().st_ino
    remove(folder / "file", inode=inode + 1)
    remove(folder / "sub", inode=(folder / "sub").stat().st_ino)
    assert sorted(p.name for p in folder.iterdir()) == ["file", "sub"]
    remove(folder / "file", inode=inode)
    assert not (folder / "file").exists()


@as_root
def test_what_belongs_to_others_is_not_removed(folder: Path) -> None:
    os.chown(folder / "sub", OTHER, OTHER)
    with pytest.raises(PermissionError, match=r"belongs to another user \(uid 12345\)"):
        remove(folder / "sub")
    remove(folder / "sub", ignore_errors=True)
    assert (folder / "sub").is_dir()
    os.chown(folder, OTHER, OTHER)  # as NFS shows root what it has made there itself
    remove(folder / "sub")
    assert not (folder / "sub").exists()


@as_root
def test_what_this_user_creates_is_ours() -> None:
    """Also where NFS gives to another user what root creates; not all that lies in another user's folder."""
    with tempfile.TemporaryDirectory() as place:  # whose parents that user can enter
        _look_at_owners(Path(place))


def _look_at_owners(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "file").touch()
    assert is_ours(folder / "sub")
    for path in (folder / "file", folder / "sub", folder):
        os.chown(path, OTHER, OTHER)
        assert not is_ours(path)
    assert not is_ours(folder / "missing")
    set_owner_of_new_files = ctypes.CDLL(None).setfsuid
    set_owner_of_new_files(OTHER)
    try:
        assert is_ours(folder / "file")
        assert is_ours(folder)
    finally:
        set_owner_of_new_files(0)


# -- folders -------------------------------------------------------------------------------------------------


def test_a_private_folder_is_made_or_kept(tmp_path: Path) -> None:
    for _ in range(2):
        make_private(tmp_path / "p")
        assert (tmp_path / "p").stat().st_mode & 0o777 == 0o700
    (tmp_path / "p").chmod(0o750)
    with pytest.raises(PermissionError, match="must belong to this user with mode 0700"):
        make_private(tmp_path / "p")
    (tmp_path / "q").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "q")
    with pytest.raises(NotADirectoryError):
        make_private(tmp_path / "link")


@as_root
def test_a_folder_of_another_user_is_not_private(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir(mode=0o700)
    os.chown(tmp_path / "p", OTHER, OTHER)
    with pytest.raises(PermissionError, match="now uid 12345"):
        open_private(tmp_path / "p")
