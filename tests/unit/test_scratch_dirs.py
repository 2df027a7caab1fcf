"""Private folders of dead runs are removed, and nothing that other users make or list in such folders.

Why: /dev/shm and /tmp are open to every user of a node, and each start removes what dead runs left there. A
folder of another user that looked like one of ours, with a list of files to remove, made a run delete them.
Not covered: the processes that put files there (tests/integration/test_launcher).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rpg_megatron.launcher.scratch_dirs import SEGMENTS, create_workspace, remove_abandoned
from rpg_megatron.system import process_groups

DEAD = """
import sys
from pathlib import Path
from rpg_megatron.launcher.scratch_dirs import Workspace, _make
from rpg_megatron.system import process_groups
parent = process_groups.SHARED_MEMORY = Path(sys.argv[1])
folder = _make(parent)
for name in sys.argv[2:]:
    (parent / name).touch()
    Workspace(folder, folder).note_segments([parent / name, parent / "gone"])
print(folder)
"""


def leave_folder(parent: Path, *segments: str) -> Path:
    """The folder of a process that has died, with these files in shared memory."""
    process = subprocess.run(
        [sys.executable, "-c", DEAD, str(parent), *segments], check=True, capture_output=True, text=True
    )
    return Path(process.stdout.strip())


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(process_groups, "SHARED_MEMORY", folder)
    return folder


def test_folders_of_dead_runs_go_and_those_of_living_ones_stay(shared: Path) -> None:
    leave_folder(shared, "psm_engine", "psm_reused")
    (shared / "rpg-foreign").mkdir()
    (shared / "new").touch()
    (shared / "new").replace(shared / "psm_reused")  # another process's file of the same name
    workspace = create_workspace(shared)
    assert [folder.stat().st_mode & 0o777 for folder in (workspace.work, workspace.bridge)] == [0o700, 0o700]
    expected = ["rpg-foreign", workspace.bridge.name, "psm_reused"]
    assert sorted(p.name for p in shared.iterdir()) == sorted(expected)
    assert remove_abandoned(shared) == []
    workspace.remove()
    assert not workspace.work.exists()
    assert not workspace.bridge.exists()


def test_the_work_folder_is_in_tmpdir_if_socket_paths_fit(shared: Path, monkeypatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (long := Path(short, "long" * 12)).mkdir()
        for chosen, parent in ((Path(short), Path(short)), (long, Path("/tmp"))):
            monkeypatch.setattr(tempfile, "tempdir", str(chosen))
            workspace = create_workspace(shared)
            workspace.remove()
            assert (workspace.work.parent, workspace.work.name[:4]) == (parent, "rpg-")


def test_only_files_directly_in_shared_memory_are_removed(shared: Path) -> None:
    folder = leave_folder(shared)
    (shared / "folder").mkdir()
    victims = [shared.parent / "victim", shared / "folder" / "victim"]
    for victim in victims:
        victim.touch()
    (shared / "link").symlink_to(victims[0])
    paths = [*victims, shared / "link", shared / "folder" / ".." / ".." / "victim", shared / "folder"]
    (folder / SEGMENTS).write_text(json.dumps({str(file): file.stat().st_ino for file in paths}))
    assert remove_abandoned(shared) == [folder]
    assert all(victim.exists() for victim in victims)
    assert sorted(p.name for p in shared.iterdir()) == ["folder", "link"]


@pytest.mark.parametrize("kind", ["open to others", "link", "another user's"])
def test_a_folder_that_others_can_make_removes_nothing(shared: Path, kind: str) -> None:
    if kind == "another user's" and os.geteuid():
        pytest.skip("only root can make a folder of another user")
    folder = leave_folder(shared, "psm_victim")
    if kind == "open to others":
        folder.chmod(0o755)
    elif kind == "another user's":
        os.chown(folder, 12345, -1)
    else:
        folder.rename(shared.parent / "elsewhere")
        folder.symlink_to(shared.parent / "elsewhere")
    assert remove_abandoned(shared) == []
    assert (folder / SEGMENTS).exists()
    assert (shared / "psm_victim").exists()
