"""Sandboxes: what a model's programs cannot do, whatever they try.

Why: an environment runs programs that a policy wrote, which learns to do whatever pays. Real programs try it
here, each in a real sandbox of this machine's kernel. What may reach the next call, memory and other users:
test_sandbox_attacks. Not covered: faults of the kernel.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rpg_megatron.environments.sandbox import Sandboxes, SandboxResult
from tests.support.launcher import wait_for
from tests.support.ranks import ROOT
from tests.support.sandboxes import ENDED, LIMITS, OWNER, REFUSED, outside, run

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    started = Sandboxes(LIMITS)
    yield started
    started.close()


@pytest.mark.parametrize("what", ENDED)
def test_a_program_that_goes_on_is_ended(sandboxes: Sandboxes, what: str) -> None:
    code, why = ENDED[what]
    (result,) = run(sandboxes, code, seconds=2.0 if why == "time" else None)
    assert (result.code, result.ended) == (None, why), result
    assert len(result.output) <= LIMITS.output


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_program_cannot_do(sandboxes: Sandboxes, tmp_path: Path, what: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    abstract = f"rpg-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        code = REFUSED[what].replace("OUTSIDE", repr(str(secret))).replace("PID", str(os.getpid()))
        code = code.replace("PORT", str(server.getsockname()[1])).replace("ABSTRACT", abstract)
        (result,) = run(sandboxes, code)
    assert (result.code, result.ended) == (0, ""), result


def test_nothing_is_left_of_a_call(sandboxes: Sandboxes) -> None:
    """Also not of processes that left their session and their parent; files stay."""
    mark = f"rpg-left-{os.getpid()}"
    daemon = (
        "import os\nopen('kept', 'w').write('x')\nr, w = os.pipe()\nfor _ in range(3):\n"
        " if os.fork() == 0:\n  os.setsid()\n"
        f"  if os.fork() == 0: os.execvp('sleep', ['{mark}', '1000'])\n  os._exit(0)\n"
        "os.close(w); os.read(r, 1)"  # until all of them are other programs, which have no pipe
    )
    seen = (
        "import os; print(sorted(n for n in os.listdir('/proc') if n.isdigit())); print(os.listdir('/work'))"
    )
    left, after = run(sandboxes, daemon, seen)
    assert left.code == 0
    processes, files = after.output.splitlines()
    assert len(eval(processes)) == 2, "bwrap and the program"
    assert files == "['kept']"
    assert outside(mark) == []


@pytest.mark.parametrize(
    "line",
    [b"5\n", b"[]\n", b"{}\n", b'{"number": []}\n', b"[" * 100_000 + b"\n", b"no JSON\n",
     b'{"number": 0, "exits": false, "value": 7}\n',
     b'{"number": 0, "exits": false, "value": ["a", "b", []]}\n',
     b'{"number": 0, "exits": "a", "value": null}\n', b"x" * 300_000],
)  # fmt: skip
def test_answers_that_are_none_end_a_sandbox(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    """Whatever comes over its connection: ``exec`` raises nothing, and a line has a bound."""
    monkeypatch.setattr("rpg_megatron.system.forked_workers._LONGEST", 200_000)

    async def main() -> None:
        sandbox = await sandboxes.open()
        running = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
        await asyncio.sleep(0)
        for start in range(0, len(line), 65536):
            sandbox._process.data_received(line[start : start + 65536])
        assert await running == SandboxResult("", None, "closed")

    asyncio.run(main())


def test_sandboxes_do_not_see_each_other_and_end_with_their_owner(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        first, second = await sandboxes.open(), await sandboxes.open()
        await first.write("a/b", b"\0\xff")
        assert await first.read("a/b") == b"\0\xff"
        for path in ("a/b", "a", "../work/../etc/hosts", "/proc/1/environ", "."):
            with pytest.raises(OSError, match=r"."):
                await second.read(path)
        with pytest.raises(OSError, match="not in /work"):
            await first.write("../tmp/x", b"")
        assert (await first.exec(["sh", "-c", "ln -s /proc/self/environ a/link; mkfifo a/pipe"])).code == 0
        for path in ("a/link", "a/pipe"):
            with pytest.raises(OSError, match=r"."):
                await first.read(path)
        assert (await first.exec(["sh", "-c", "head -c 8000000 /dev/zero > a/large"])).code == 0
        assert len(await first.read("a/large")) == 8_000_000
        assert (await first.exec(["truncate", "-s", "9M", "a/large"])).code == 0
        with pytest.raises(OSError, match="more than 8 MiB"):
            await first.read("a/large")
        await first.write("a/pipe", b"replaced")
        assert await first.read("a/pipe") == b"replaced"
        sleeping = asyncio.create_task(first.exec(["sleep", mark := f"1000.{os.getpid()}"]))
        while not outside(f"sleep {mark}"):
            await asyncio.sleep(0.01)
        first.close()
        assert await sleeping == SandboxResult("", None, "closed")
        assert await first.exec(["echo"]) == SandboxResult("", None, "closed")
        with pytest.raises(OSError, match="closed"):
            await first.write("x", b"")
        assert (await second.exec(["cat"], input="x" * 100)).output == "x" * 100
        missing = await second.exec(["no-such-program"])
        assert missing.code == 127
        assert "no-such-program: No such file or directory" in missing.output

    asyncio.run(main())


def test_the_example_of_the_documentation() -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    code = page.partition("```python\nfrom rpg_megatron.environments.sandbox")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec("from rpg_megatron.environments.sandbox" + code, names)
    said = ["Let me see. <python>print(6 * 7)</python>", "<python>1 / 0</python>", "It is 42."]
    given: list[str] = []

    async def generate(context: str) -> Any:
        given.append(context)
        return SimpleNamespace(text=said[len(given) - 1], context=context + said[len(given) - 1])

    async def score(text: str) -> str:
        return f"score of {text}"

    task = SimpleNamespace(prompt="What is 6 * 7? ", encode=lambda text: text)
    try:
        episode = asyncio.run(names["with_python"](task, generate, score))
    finally:
        names["sandboxes"].close()
    assert (episode.reward, episode.metrics) == ("score of It is 42.", {"failed_calls": 1})
    assert given[1].endswith("</python>\n42\n\n")
    assert "ZeroDivisionError: division by zero" in given[2]


def test_a_killed_owner_leaves_no_sandbox() -> None:
    mark = f"1000.{os.getpid()}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-c",
        OWNER.replace("MARK", mark),
    ]
    with subprocess.Popen(command, env=environment) as owner:
        wait_for(lambda: [line for line in outside(mark) if line.startswith("sleep")])
        owner.kill()
    wait_for(lambda: not outside(mark) and not outside(f"1099511627776 {owner.pid}"))
