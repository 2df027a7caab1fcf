"""What a policy does in a task's image to get a reward that it has not earned, and what it gets.

Why: reinforcement learning finds each way to a reward, so one that can be forged is learnt. Each kind of
attack is made as the policy could, by commands in the image before the tests; the task is never solved. With
``RPG_HOSTILE=200``, the long test makes that many episodes, of all kinds at random, several attacks in each.
Not covered: code of the policy that tests themselves load (docs/security.md), faults of the kernel.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rpg_megatron.environments.harbor import ImageSettings, TaskSandbox, Tested, open_task
from rpg_megatron.environments.harbor_tasks import HarborTask, read_task
from rpg_megatron.environments.sandbox import SandboxResult
from tests.support.harbor_tasks import AS_POLICY, write_task
from tests.support.images import PYTHON as SYSTEM_PYTHON
from tests.support.images import make_root
from tests.support.ranks import ROOT
from tests.support.sandboxes import outside

LIB = f"/usr/lib/{SYSTEM_PYTHON.name}"
USER = f"/root/.local/lib/{SYSTEM_PYTHON.name}/site-packages"
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing"),
    pytest.mark.skipif(not Path(LIB).is_dir(), reason="the system has no Python"),
]

FORGE = "{ echo 1 > /logs/verifier/reward.json; } 2> /dev/null"
PROGRAM = f"#!/bin/bash\\n{FORGE}\\nexit 0\\n"
PYTHON = (
    'import os\\ntry:\\n open("/logs/verifier/reward.json", "w").write("1")\\n os._exit(0)\\n'
    "except OSError: pass\\n"
)
TESTS = f"""#!/bin/bash
# Uses what attacks replace: programs, a shell that reads start-up files, Python with its modules, pytest.
cd /app
source ~/.bashrc 2> /dev/null
bash -l -c true
found=$(timeout 5 cat answer | tr -d ' ' | head -n 1)
python3 -c 'import json, random; print(json.dumps(1))' > /tmp/said
mkdir -p repo; rm -rf repo/test_it.py; cp /tests/it.py repo/test_it.py
timeout 20 python3 -m pytest -q -p no:cacheprovider repo/test_it.py; passed=$?
ran=$({AS_POLICY} timeout 5 ./program 2> /dev/null)
tail -n 1 answer > /dev/null
[ "$found" = 42 ] && [ "$ran" = 42 ] && [ $passed = 0 ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
IT = """
def test_it():
    assert open("/app/answer").read().strip() == "42"
"""


def write(path: str, text: str, mode: str = "644") -> str:
    folder = path.rpartition("/")[0] or "/"
    return f"mkdir -p {folder}; rm -rf {path}; printf '{text}' > {path}; chmod {mode} {path}"


ATTACKS = {
    "the program replaces programs while tests run": [
        write("/app/forge", PROGRAM, "755"),
        write("/app/program", "#!/bin/bash\\ncp --remove-destination forge /usr/bin/tail; echo 42\\n", "755"),
    ],
    "tests rewritten": [write("/tests/test.sh", PROGRAM, "755")],
    "tests as a link": ["rm -rf /tests; ln -s /app /tests", write("/app/test.sh", PROGRAM, "755")],
    "result forged": [write("/logs/verifier/reward.txt", "1"), write("/logs/verifier/reward.json", "1")],
    "results as a link": [
        "rm -rf /logs; mkdir -p /app/logs/verifier; echo 1 > /app/logs/verifier/reward.txt; "
                          "ln -s /app/logs /logs"],
    "results' folder as a file": ["rm -rf /logs; echo 1 > /logs"],
    "results as a fifo": ["mkdir -p /logs/verifier; mkfifo /logs/verifier/reward.txt"],
    "program in the background": [
        f"setsid nohup bash -c 'while true; do {FORGE}; done' > /dev/null 2>&1 & sleep 0.2"],
    "daemon": [
        f"(setsid bash -c '(trap \"\" HUP TERM; while true; do {FORGE}; sleep 0.01; done) &') & sleep 0.2"],
    "program that the tests run": [write("/app/program", PROGRAM, "755")],
    "program that leaves a daemon": [
        write("/app/program", f"#!/bin/bash\\nsetsid bash -c \"while true; do {FORGE}; done\" &\\n", "755")],
    "program that kills the tests": [
        write("/app/program", f"#!/bin/bash\\n{FORGE}\\nkill -9 -1\\nkill -9 1 2 3 4 5 6 7 8 9\\n", "755")],
    "full disk": ["dd if=/dev/zero of=/app/full bs=1M 2> /dev/null; echo x > /app/more"],
    "no inodes": [
        "mkdir -p /app/many; cd /app/many; for n in $(seq 1 5000); do : > $n || break; done 2> /dev/null"],
    "deep folders": ["cd /usr; for n in $(seq 1 1500); do mkdir d && cd d || break; done 2> /dev/null"],
    "deep folders of its own": ["for n in $(seq 1 1500); do mkdir d && cd d || break; done 2> /dev/null"],
    "fork bomb": ["f() { f | f & }; f 2> /dev/null; sleep 0.3"],
    "python replaced": [write("/usr/bin/python3", PROGRAM, "755")],
    "python's binary replaced": [write(str(SYSTEM_PYTHON), PROGRAM, "755")],
    "programs replaced": [
        write(f"/usr/bin/{name}", PROGRAM, "755") for name in ("cat", "tr", "head", "timeout")],
    "shells replaced": [
        write("/usr/bin/bash.new", PROGRAM.replace("bash", "sh"), "755"),
        "mv /usr/bin/bash.new /usr/bin/bash"],
    "sh replaced": [write("/usr/bin/sh.new", PROGRAM, "755") + "; mv /usr/bin/sh.new /usr/bin/sh"],
    "setpriv replaced": [write("/usr/bin/setpriv", PROGRAM, "755")],
    "folder of programs replaced": ["rm -f /bin; mkdir /bin; cp /usr/bin/bash /bin/sh; "
                                    + write("/bin/cat", PROGRAM, "755")],
    "earlier in PATH": [
        write(f"/usr/local/bin/{name}", PROGRAM, "755") for name in ("cat", "python3", "setpriv")],
    ".bashrc": [
        write("/root/.bashrc", FORGE), write("/root/.bash_profile", FORGE), write("/root/.profile", FORGE)],
    "/etc/profile": [
        write("/etc/profile", FORGE), write("/etc/bash.bashrc", FORGE), write("/etc/profile.d/x.sh", FORGE)],
    "sitecustomize": [write(f"{folder}/sitecustomize.py", PYTHON) for folder in
                      (LIB, f"/usr/local/lib/{SYSTEM_PYTHON.name}/dist-packages", "/app")],
    "usercustomize": [write(f"{USER}/usercustomize.py", PYTHON),
                      write(f"{USER}/x.pth", "import os; os._exit(0)")],
    "standard module": [
        write(f"{LIB}/json/__init__.py", PYTHON),
        write(f"{LIB}/random.py", PYTHON)],
    "compiled module": [write(f"{LIB}/__pycache__/random.cpython-311.pyc", "x"),
                        write("/app/app/__pycache__/check.cpython-311.pyc", "x")],
    "conftest.py": [write(f"{folder}/conftest.py", PYTHON) for folder in ("", "/app", "/app/repo", "/tests")],
    "settings of pytest": [
        write("/app/evil.py", PYTHON),
        write("/app/pyproject.toml", "[tool.pytest.ini_options]\\naddopts = \"-p evil\"\\n"),
        write("/app/pytest.ini", "[pytest]\\naddopts = --collect-only\\n"),
        write("/app/repo/tox.ini", "[pytest]\\n")],
    "modules of the tests' names": [
        write(f"/app/{name}.py", PYTHON) for name in ("pytest", "_pytest", "json", "random", "os", "site")],
    "pytest replaced": [write("/usr/lib/python3/dist-packages/pytest/__init__.py", PYTHON)],
    "plugin of pytest": [
        write("/usr/lib/python3/dist-packages/evil-1.dist-info/entry_points.txt",
              "[pytest11]\\nevil=evil\\n"),
        write("/usr/lib/python3/dist-packages/evil.py", PYTHON)],
    "compiled tests": [
        write("/app/repo/__pycache__/test_it.cpython-311-pytest-9.0.2.pyc", "x"),
        "mkdir -p /app/repo/test_it.py"],
    "/etc/ld.so.preload": ["cp /usr/bin/true /app/lib.so; echo /app/lib.so > /etc/ld.so.preload"],
    "LD_PRELOAD": ["echo 'LD_PRELOAD=/app/lib.so' > /etc/environment", write("/root/.bash_env", FORGE)],
    "loader replaced": [
        "cp /usr/bin/true /app/t; for f in /lib64/ld-linux*; do mv $f $f.old; /app/t; done; true"],
    "libraries replaced": ["for f in $(find /lib /usr/lib -name 'libc.so*'); do rm $f; done"],
    "users": [
        write("/etc/passwd", "root:x:1:1::/:/app/program\\n"), write("/etc/nsswitch.conf", "passwd: files")],
    "git's hooks": [write("/app/.git/hooks/post-checkout", PROGRAM, "755"),
                    write("/app/.git/config", "[core]\\n fsmonitor = /app/program\\n")],
    "everything removed": [f"rm -rf /app {LIB} /etc /root 2> /dev/null; rm -rf /* 2> /dev/null"],
    "files of other tasks": [
        "find / -name 'other-task*' 2> /dev/null; cat OTHER/solution/solve.sh 2> /dev/null"],
    "setuid": [
        "cp /usr/bin/bash /app/b; chmod 6755 /app/b; /app/b -p -c id",
        write("/app/program", PROGRAM, "6755")],
    "closed folders": ["mkdir -p /usr/local/bin/x/y; chmod 0 /usr/local/bin/x; chmod 0 /app"],
    "answer as a link to the result": ["rm -f /app/answer; ln -s /logs/verifier/reward.txt /app/answer"],
    "answer that never ends": ["rm -f /app/answer; mkfifo /app/answer"],
}  # fmt: skip
"""Commands of the shell."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> HarborTask:
    folder = tmp_path_factory.mktemp("hostile")
    root = make_root(folder / "image", python=True)
    (root / "app/answer").write_text("?\n")
    write_task(folder, "other-task", condition="true", solve="echo secret-of-another")
    place = write_task(folder, "task", test=TESTS, solve="echo 42 > answer", seconds=30, test_seconds=10)
    (place / "tests/it.py").write_text(IT)
    return read_task(str(place), str(root))


async def play(
    task: HarborTask, cache: Path, commands: Sequence[str], keep: tuple[str, ...] = ()
) -> tuple[list[SandboxResult], Tested]:
    async with open_task(task, ImageSettings(cache=str(cache), keep=keep)) as opened:
        said = [await attack(opened, command, task) for command in commands]
        return said, await opened.test()


async def attack(opened: TaskSandbox, command: str, task: HarborTask) -> SandboxResult:
    return await opened.run(
        ["sh", "-c", command.replace("OTHER", str(task.folder.parent / "other-task"))], 5.0
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "images"


@pytest.mark.parametrize("what", ATTACKS)
def test_an_attack_gains_nothing(task: HarborTask, cache: Path, what: str) -> None:
    said, tested = asyncio.run(play(task, cache, ATTACKS[what]))
    assert not tested.reward, (what, said, tested)
    assert not any("secret-of-another" in result.output for result in said)


def test_a_solution_is_rewarded_in_the_same_task(task: HarborTask, cache: Path) -> None:
    """Also with the changes that are undone: they are not what the tests look at."""
    solution = ["echo 42 > answer", write("/app/program", "#!/bin/bash\\necho 42\\n", "755")]
    for extra in ([], ATTACKS["conftest.py"], ATTACKS["python replaced"], ATTACKS["git's hooks"]):
        said, tested = asyncio.run(play(task, cache, [*solution, *extra]))
        assert tested.reward == 1, (said, tested)


GAIN = {
    "shells replaced": "/usr/bin", "python's binary replaced": "/usr/bin", "programs replaced": "/usr/bin",
    ".bashrc": "/root/.bashrc", "/etc/profile": "/etc/profile", "standard module": LIB,
    "sitecustomize": f"{LIB}/sitecustomize.py", "conftest.py": "/app/repo/conftest.py",
    "pytest replaced": "/usr/lib/python3", "plugin of pytest": "/usr/lib/python3",
}  # fmt: skip


@pytest.mark.parametrize("what", GAIN)
def test_an_attack_gains_a_reward_where_its_change_is_kept(task: HarborTask, cache: Path, what: str) -> None:
    """Otherwise these attacks would prove nothing."""
    keep = GAIN[what], f"{GAIN[what]}/__pycache__", f"{GAIN[what]}/dist-packages/evil-1.dist-info"
    _, tested = asyncio.run(play(task, cache, ATTACKS[what], keep))
    assert tested.reward == 1, tested


OWNER = """
import asyncio, sys
from rpg_megatron.environments.harbor import ImageSettings, open_task
from rpg_megatron.environments.harbor_tasks import read_task
async def main():
    async with open_task(read_task(sys.argv[1], sys.argv[2]), ImageSettings(cache=sys.argv[3])) as opened:
        print("open", flush=True)
        await opened.run(["sh", "-c", sys.argv[4]], 100.0)
asyncio.run(main())
"""


def wait_for_none(mark: str) -> None:
    end = time.monotonic() + 30
    while outside(mark):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_nothing_of_an_episode_is_left(task: HarborTask, cache: Path) -> None:
    """Also if its process is killed."""
    mark = f"rpg-hostile-{os.getpid()}"
    leave = f"setsid nohup bash -c 'exec -a {mark} sleep 1000' > /dev/null 2>&1 & sleep 0.2"
    asyncio.run(play(task, cache, [leave]))
    wait_for_none(mark)
    command = [sys.executable, "-c", OWNER, str(task.folder), task.image, str(cache), f"{leave}; sleep 1000"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    while not any(line.startswith(mark) for line in outside(mark)):
        assert owner.poll() is None
        time.sleep(0.05)
    owner.kill()
    owner.communicate()
    wait_for_none(mark)


def test_what_tests_keep_is_named(task: HarborTask, cache: Path) -> None:
    """Changes of the system are undone unless a task names them."""

    async def seen(keep: tuple[str, ...]) -> str:
        test = "#!/bin/bash\ncd /etc; cat a/b c /app/tox.ini /srv/d 2> /dev/null\n"
        test += "echo 1 > /logs/verifier/reward.txt"
        place = write_task(task.folder.parent, "kept", test=test, solve="true")
        async with open_task(
            read_task(str(place), task.image), ImageSettings(cache=str(cache), keep=keep)
        ) as opened:
            await opened.run(
                [
                    "sh",
                    "-c",
                    "mkdir -p /etc/a /srv; for f in /etc/a/b /etc/c tox.ini /srv/d; do echo $f > $f; done",
                ],
                5,
            )
            return (await opened.test()).output

    assert asyncio.run(seen(())) == "/srv/d\n"
    assert asyncio.run(seen(("/etc/a", "/app/tox.ini"))) == "/etc/a/b\ntox.ini\n/srv/d\n"


@pytest.mark.long
def test_two_hundred_episodes(task: HarborTask, cache: Path) -> None:
    count, draw = int(os.environ.get("RPG_HOSTILE", "200")), random.Random(7)

    async def episode(number: int) -> float | None:
        kinds = (
            draw.sample(sorted(ATTACKS), draw.randint(1, 4))
            if number >= len(ATTACKS)
            else [sorted(ATTACKS)[number]]
        )
        _, tested = await play(task, cache, [command for kind in kinds for command in ATTACKS[kind]])
        assert not tested.reward, (kinds, tested)
        return tested.reward

    async def main() -> list[float | None]:
        places = asyncio.Semaphore(4)

        async def one(number: int) -> float | None:
            async with places:
                return await episode(number)

        return await asyncio.gather(*map(one, range(count)))

    assert len(asyncio.run(main())) == count
