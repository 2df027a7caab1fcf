"""Sandboxes in images: Apptainer's command line, and what is left of its processes.

Why: Apptainer makes the sandbox, but the limits, the end of a call and its files are ours. A stand-in program
takes the command line and runs the program on this machine, in a session of its own, as Apptainer's outlive
their parent. With ``RPG_APPTAINER_IMAGE=FILE.sif``, an image with python3, the long tests use the real one:
Apptainer 1.4.5 of Debian has passed them. Not covered: images that users may run without root.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rpg_megatron.config import UserError
from rpg_megatron.environments.sandbox import Sandboxes, SandboxLimits, SandboxResult
from tests.support.launcher import wait_for
from tests.support.ranks import ROOT
from tests.support.sandboxes import ENDED, LIMITS, OWNER, outside, run

IMAGE = os.environ.get("RPG_APPTAINER_IMAGE", "")
STAND_IN = """#!{python}
import json, os, sys
given = sys.argv[1:]
place = next(i for i, part in enumerate(given) if part.endswith(".sif"))
with open({log!r}, "a") as log:
    log.write(json.dumps(given) + chr(10))
if "broken" in given[place]:
    sys.exit("FATAL: no such thing")
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
os.setsid()
binds = [part.removeprefix("--bind=").split(":") for part in given[:place] if part.startswith("--bind=")]
os.chdir(binds[0][0])
os.execvp(given[place + 1], given[place + 1 :])
"""
REFUSED = {
    "reads files of the machine": "import os\nfor f in (OUTSIDE, '/proc/1/environ', '/etc/shadow'):\n"
    " try: text = open(f).read()\n except OSError: continue\n assert 'terces'[::-1] not in text, f",
    "opens connections": "import socket\nfor where in (('127.0.0.1', PORT), ('1.1.1.1', 53)):\n"
    " try: socket.create_connection(where, 1)\n except OSError: pass\n else: raise SystemExit(9)",
    "signals others": "import os\nfor pid in (PID, -PID):\n try: os.kill(pid, 9)\n except OSError: pass\n"
    " else: raise SystemExit(9)",
    "becomes another user": "import os\ntry: os.chroot('/')\nexcept OSError: pass\nelse: raise SystemExit(9)",
    "fills the files": "try: open('f', 'wb').write(bytes(20 << 20))\n"
    "except OSError as e: assert e.errno == 27\nelse: raise SystemExit(9)",
}


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An image, and apptainer on the PATH."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if request.param == "real":
        if not IMAGE:
            pytest.skip("set RPG_APPTAINER_IMAGE to an image with python3")
        return IMAGE
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "log")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    (tmp_path / "image.sif").touch()
    return str(tmp_path / "image.sif")


@pytest.fixture
def sandboxes(image: str) -> Iterator[Sandboxes]:
    started = Sandboxes(replace(LIMITS, image=image))
    yield started
    started.close()


BOTH = pytest.mark.parametrize(
    "image", ["stand-in", pytest.param("real", marks=pytest.mark.long)], indirect=True
)
REAL = pytest.mark.parametrize("image", [pytest.param("real", marks=pytest.mark.long)], indirect=True)


def wait_for_nothing(folder: Path, mark: str = "no process has this") -> None:
    def remains() -> list[object]:
        return [*folder.glob("sandbox-*"), *outside(mark)]

    wait_for(lambda: not remains(), message=lambda: str(remains()))


@BOTH
def test_programs_and_files(sandboxes: Sandboxes, tmp_path: Path) -> None:
    async def main() -> None:
        sandbox = await sandboxes.open()
        await sandbox.write("a/b", b"6*7")
        code = "print(eval(open('a/b').read())); open('c', 'w').write(input())"
        assert await sandbox.exec(["python3", "-c", code], input="x") == SandboxResult("42\n", 0)
        assert await sandbox.read("c") == await sandbox.read("/work/c") == b"x"
        assert (await sandbox.exec(["false"])).code == 1
        missing = await sandbox.exec(["no-such-program"])
        assert missing.code == 127
        assert "no-such-program: not found" in missing.output
        assert (await sandbox.exec(["ln", "-s", "/etc/shadow", "link"])).code == 0
        for path in ("link", "../x", "/etc/hosts", "."):
            with pytest.raises(OSError, match="not in /work"):
                await sandbox.read(path)
        sandbox.close()

    asyncio.run(main())
    wait_for_nothing(tmp_path)


@pytest.mark.parametrize("image", ["stand-in"], indirect=True)
def test_the_command_line(sandboxes: Sandboxes, tmp_path: Path, image: str) -> None:
    run(sandboxes, "print(1)")
    first, second, *_ = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert first[-1] == "echo ok | cat", "it is tried first"
    (bind,) = [part for part in second if part.startswith("--bind=")]
    place = second.index(image)
    options = [
        "--containall",
        "--no-privs",
        "--net",
        "--network=none",
        "--pwd=/work",
        "--env=HOME=/tmp",
        bind,
    ]
    assert second[:place] == ["--silent", "exec", *options]
    assert bind.endswith(":/work")
    assert second[place + 1 : place + 5] == ["sh", "-c", 'ulimit -v 524288 && exec "$@"', "sh"]
    assert second[place + 5 :] == ["python3", "-c", "print(1)"]


@BOTH
@pytest.mark.parametrize("what", ["loops", "takes memory", "forks", "writes without end"])
def test_a_program_that_goes_on_is_ended(sandboxes: Sandboxes, tmp_path: Path, what: str) -> None:
    mark = f"1000.{os.getpid()}"
    forks = (
        f"import os, time\nfor _ in range(60):\n if os.fork() == 0: os.execvp('sleep', ['sleep', '{mark}'])"
    )
    code, why = ENDED.get(what, (f"{forks}\ntime.sleep(1000)", "processes"))
    (result,) = run(sandboxes, code, seconds=2.0 if why == "time" else None)
    assert result.code is None
    assert result.ended == why or (why != "time" and result.ended == "memory"), result
    wait_for_nothing(tmp_path, f"sleep {mark}")


@REAL
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_program_cannot_do(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("RPG_TEST_SECRET", "secret")
    (tmp_path / "outside").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = REFUSED[what].replace("OUTSIDE", repr(str(tmp_path / "outside")))
        code = code.replace("PID", str(os.getpid())).replace("PORT", str(server.getsockname()[1]))
        sandboxes = Sandboxes(replace(LIMITS, image=image))
        (result,) = run(sandboxes, code)
        sandboxes.close()
    assert (result.code, result.ended) == (0, ""), result


@BOTH
def test_a_killed_owner_leaves_nothing(image: str, tmp_path: Path) -> None:
    mark = f"1000.{os.getpid()}"
    code = OWNER.replace("MARK", mark).replace("SandboxLimits()", f"SandboxLimits(image={image!r})")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as owner:
        wait_for(lambda: outside(f"sleep {mark}"))
        assert [*tmp_path.glob("sandbox-*")]
        owner.kill()
    wait_for_nothing(tmp_path, mark)


@pytest.mark.parametrize("image", ["stand-in"], indirect=True)
def test_what_stops_it_is_told(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(image: str) -> str:
        with pytest.raises(UserError) as e:
            Sandboxes(SandboxLimits(image=image))
        return str(e.value)

    assert "docker://python is no image on this machine; make one with: apptainer pull" in problem(
        "docker://python"
    )
    (tmp_path / "broken.sif").touch()
    assert "apptainer cannot run" in problem(str(tmp_path / "broken.sif"))
    assert "FATAL: no such thing" in problem(str(tmp_path / "broken.sif"))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert "apptainer is not on the PATH" in problem(image)
