"""The files of a sandbox in an image: layers, users, and what is undone before the tests.

Why: the writable layer is the policy's, and tests run in it. Not covered: attacks by programs, which run in
test_hostile_episodes; kernels that lack something.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.commands.doctor.machine import probe_sandboxes
from rpg_megatron.config import UserError
from rpg_megatron.environments import sandbox_process
from rpg_megatron.environments.image_root import ImageRoot, restore
from rpg_megatron.environments.sandbox import Sandbox, Sandboxes, SandboxResult
from rpg_megatron.environments.sandbox_limits import SandboxLimits, find_problem
from tests.support.images import make_root
from tests.support.ranks import ROOT

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")
AS_OTHER = """
import ctypes, os, sys
from pathlib import Path
from rpg_megatron.environments import sandbox_process
from rpg_megatron.environments.image_root import ImageRoot
from rpg_megatron.environments.images import open_image
from rpg_megatron.environments.sandbox_limits import SandboxLimits
os.setresgid(65534, 65534, 65534)
os.setgroups([])
os.setresuid(65534, 65534, 65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a process that never was root: its /proc is its own
opened = open_image(sys.argv[1], Path(sys.argv[2]) / "cache")
image = opened.__enter__()
variables = tuple(image.variables.items())
limits = SandboxLimits(seconds=20, root=str(image.root), workdir="/app", variables=variables)
root = ImageRoot(limits)
sandbox_process.set_child_subreaper()
def run(code):
    print(sandbox_process._execute(["sh", "-c", code], "", 20.0, limits, root), flush=True)
run("id -u; echo x > /etc/x; echo y > y; ls -n y; rm -r /home; mkdir /home; echo $GREETING")
root.give("/tests", bytes(10240))
root.begin_tests([])
print(root.other_user)
run("id -u; cat y; ls /etc /home; ls -n y; echo 1 > /logs/verifier/reward.txt; echo z > y; touch /usr/z")
print(root.read("/logs/verifier/reward.txt", 10))
run("setpriv --reuid 1 --regid 1 --clear-groups sh -c 'id -u; echo 2 > /logs/verifier/reward.txt'")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@needs_bwrap
def test_another_user_has_the_same_images() -> None:
    """And, where newuidmap gives it a second user, tests that run as that."""
    with tempfile.TemporaryDirectory() as folder:  # that of pytest is root's only
        check_as_another_user(Path(folder))


def check_as_another_user(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    (tmp_path / "cache").mkdir()
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    command = [sys.executable, "-c", AS_OTHER, str(root), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.count("\n") == 5, done.stdout + done.stderr
    first, other_user, second, read, third = done.stdout.splitlines()
    assert first.startswith(r"('0\n-rw-r--r-- 1 0 0 2 ")
    assert "', 0, '')" in first
    names = Path("/etc/subuid").read_text() if Path("/etc/subuid").exists() else ""
    has_second = shutil.which("newuidmap") is not None and f"{pwd.getpwuid(65534).pw_name}:" in names
    assert other_user == str(has_second)
    assert second.startswith(r"('0\ny\n/etc:\n\n/home:\n-rw-r--r-- 1 " + ("2 2" if has_second else "0 0"))
    assert read == r"b'1\n'"
    if has_second:
        assert third.startswith(r"('1\n")
        assert "Permission denied" in third
    assert (root / "home").is_dir()
    assert not (root / "etc/x").exists()


IN_IMAGE = {
    "a link to a file of the machine": ("ln -s OUTSIDE link", "link", None),
    "a link of several steps": ("ln -s ../../../../../OUTSIDE a; ln -s a link", "link", None),
    "a folder as a link": ("ln -s $(dirname OUTSIDE) d", "d/secret", None),
    "a link to a file of the image": ("echo x > /etc/y; ln -s /etc/y link", "link", b"x\n"),
    "an open file of another process": ("ln -s /proc/1/root/etc/hostname link", "link", None),
    "a fifo": ("mkfifo link", "link", None),
    "a device": ("ln -s /dev/zero link", "link", None),
    "a folder": ("mkdir link", "link", None),
    "a loop": ("ln -s link link", "link", None),
    "a NUL": ("true", "a\0b", None),
    "half a character": ("true", "a\ud800", None),
}


def in_sandbox(root: Path, use: Callable[[Sandbox], Awaitable[object]]) -> object:
    async def main() -> object:
        sandboxes = Sandboxes(SandboxLimits(root="images"))
        limits = SandboxLimits(seconds=20, root=str(root), workdir="/app", variables=(("PATH", "/usr/bin"),))
        sandbox = await sandboxes.open(limits)
        try:
            return await use(sandbox)
        finally:
            sandbox.close()
            sandboxes.close()

    return asyncio.run(main())


@needs_bwrap
def test_files_are_read_and_written_as_programs_see_them(tmp_path: Path) -> None:
    root, secret = make_root(tmp_path / "root"), tmp_path / "secret"
    secret.write_text("secret")
    for path in root.rglob("*"):
        os.chown(path, 1_000_000_000, 1_000_000_000, follow_symlinks=False) if os.geteuid() == 0 else None
    os.chown(root, 1_000_000_000, 1_000_000_000) if os.geteuid() == 0 else None

    async def use(sandbox: Sandbox) -> None:
        for what, (code, path, content) in IN_IMAGE.items():
            await sandbox.exec(["sh", "-c", f"rm -rf /app/*; {code.replace('OUTSIDE', str(secret))}"])
            if content is None:
                with pytest.raises(OSError, match=r"."):
                    print(what, await sandbox.read(path))
                if what != "a folder":
                    with pytest.raises(OSError, match=r"."):
                        await sandbox.write(f"{path}/x", b"forged")
            else:
                assert await sandbox.read(path) == content, what
        await sandbox.exec(["sh", "-c", f"rm -rf /app/*; ln -s {secret.parent} d"])
        with pytest.raises(OSError, match=r"."):
            await sandbox.write("d/secret", b"forged")
        result = await sandbox.exec(["no-such-program"])
        assert result.code == 127
        await sandbox.exec(["rm", "-rf", "/app"])
        assert await sandbox.exec(["sh", "-c", "pwd"]) == SandboxResult("/\n", 0), "its folder is gone"

    in_sandbox(root, use)
    assert secret.read_text() == "secret"
    assert not (root / "etc/y").exists()


def test_variables_of_an_image_are_those_of_its_programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap's own loader would run what LD_PRELOAD names, outside of the sandbox."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(sandbox_process, "start_program", lambda *_, **more: given.update(more))
    variables = ("PATH", "/x"), ("LD_PRELOAD", "/sys/image/x.so"), ("", "nameless"), ("a=b", "")
    image = object.__new__(ImageRoot)
    image.limits, image.testing, image.other_user, image._given = (
        SandboxLimits(root="/", variables=variables),
        False,
        False,
        {},
    )
    sandbox_process._start(["sh"], 0, (), image.limits, image)
    assert given["env"] == {}
    options = image.options()
    told = [tuple(options[at + 1 : at + 3]) for at, option in enumerate(options) if option == "--setenv"]
    assert told == [("HOME", "/root"), ("LANG", "C.UTF-8"), *variables[:2]]


UNDONE = [
    "usr/bin/x",
    "usr/local/new/y",
    "etc/a/b",
    "root/.ssh/c",
    "opt/venv/lib/d",
    "tests/e",
    "logs/f",
    "tmp/conftest.py",
    "app/conftest.py",
    "app/a/b/pytest.ini",
    "app/x.pth",
    "app/__pycache__/y.pyc",
    "app/m.pyc",
    "app/.bashrc",
    "app/.git/config",
    "app/.git/hooks/h",
    "app/sub/.git",
    "app/venv/bin/python",
    "app/venv/new",
    "app/bin/tool",
    "app/sub/pyproject.toml",
    "app/sub/sitecustomize.py",
    "app/sub/sitecustomize/__init__.py",
    "app/.git/commondir",
    "app/x.egg-info/entry_points.txt",
    "home/py/lib/python3.12/os.py",
]
KEPT = [
    "app/a/b/code.py",
    "app/.git/HEAD",
    "app/.git/objects/config",
    "app/bin2/tool",
    "tmp/x",
    "srv/y",
    "home/z",
    "app/configuration",
    "app/usr/bin/x",
    "usr/share/kept/x",
    "root/project/y",
    "var/lib/z",
    "app/lib/code",
]


def test_what_is_undone(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for name in (*UNDONE, *KEPT, "usr/share/other/x", "app/tox.ini/x", "app/kept/conftest.py"):
        (upper / name).parent.mkdir(parents=True, exist_ok=True)
        (upper / name).touch()
    (lower / "app/venv").mkdir(parents=True)
    (lower / "app/venv/pyvenv.cfg").touch()
    (lower / "opt/venv/conda-meta").mkdir(parents=True)
    (upper / "app/link").symlink_to("/usr/bin")
    (upper / "bin").symlink_to("/app")
    (upper / "home/user").mkdir()
    (upper / "home/user/.local").symlink_to("/app/evil")  # above a folder of programs
    (lower / "srv/folder").mkdir(parents=True)
    (upper / "srv/folder").symlink_to("/app/evil")  # in place of one of the image
    keep = ["/app", "/usr/share/kept", "/root/project", "/app/kept/conftest.py", "/"]
    restore(str(upper), str(lower), keep, ["/usr/bin", "/app/bin/", "/home/user/.local/bin", "/home/py/bin"])
    left = {
        str(path.relative_to(upper)) for path in upper.rglob("*") if not path.is_dir() or path.is_symlink()
    }
    assert left == {*KEPT, "app/link", "app/kept/conftest.py"}


@needs_bwrap
def test_what_a_machine_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_problem(SandboxLimits(root="images")) is None
    [check] = probe_sandboxes(None)  # type: ignore[arg-type]
    assert "; tasks with images can; " in check.found
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install the package bubblewrap" in (find_problem(SandboxLimits(root="images")) or "")
    with pytest.raises(UserError, match="bubblewrap"):
        Sandboxes(SandboxLimits(root="images"))
