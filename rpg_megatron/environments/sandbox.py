"""Sandboxes: where the programs run that a model writes, and where their files are.

Each call is a command of bubblewrap (``bwrap``) with namespaces of its own: no network, no files of the
machine but its programs, read-only, and no other processes. With an image, it is one of Apptainer, and the
programs are those of the image. The folder ``/work`` stays between calls, and nothing else. Calls have limits
of time, memory, processes, files and output.

It does not protect from faults of the kernel, and not from use of the cores: a call may keep all of them busy
until its time ends.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec

from rpg_megatron.environments.sandbox_limits import SandboxLimits
from rpg_megatron.system.forked_workers import ForkServer, Loader, WorkerProcess

_GRACE = 10.0
"""Seconds after which a sandbox that does not answer is killed, in addition to the time of the call."""


class SandboxResult(NamedTuple):
    """How a call ended."""

    output: str
    """What it wrote to stdout and stderr."""
    code: int | None
    """Exit code, 128 and more for a signal; None if it was ended."""
    ended: str = ""
    """Why it was ended: "time", "memory", "output" or, with an image, "processes"; or "closed": the sandbox
    was."""


class Sandbox:
    """Files and programs of one episode. For one event loop."""

    def __init__(self, process: WorkerProcess, limits: SandboxLimits):
        self._process, self._limits = process, limits
        self._unfinished: dict[asyncio.Future[Any], float] = {}
        """Calls, which run one after the other, and the most seconds of each."""

    async def exec(
        self, command: Sequence[str], *, input: str = "", seconds: float | None = None
    ) -> SandboxResult:
        """Run a program in ``/work``. seconds: less than the limit. Never raises for what it does."""
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds is {seconds}; give a number above 0")
        limit = min(seconds or math.inf, self._limits.seconds)
        answer = await self._call({"exec": list(command), "input": input, "seconds": limit}, limit)
        closed = SandboxResult("", None, "closed")
        try:
            result = closed if answer is None else msgspec.convert(answer, SandboxResult)
        except msgspec.ValidationError:  # not of the sandbox
            result = closed
        if result.ended == "closed":
            self.close()
        return result

    async def write(self, path: str, content: bytes) -> None:
        """Write a file; its folders are made. Raises OSError."""
        await self.request({"write": path, "content": base64.b64encode(content).decode()})

    async def read(self, path: str) -> bytes:
        """Read a file of at most 8 MiB. Raises OSError."""
        return base64.b64decode(await self.request({"read": path}))

    def close(self) -> None:
        """End its programs and remove its files."""
        self._process.end()

    async def give(self, folders: Mapping[str, bytes], *, tests: Sequence[str] | None = None) -> None:
        """In an image: let programs read folders, each a tar file, at paths such as /tests.

        tests: end the policy's programs, and undo what they have changed of others but the paths named here
        (``image_root.py``). Programs are tests from here, which write to /logs. Raises OSError.
        """
        given = {place: base64.b64encode(tar).decode() for place, tar in folders.items()}
        await self.request({"give": given, "tests": tests if tests is None else list(tests)})

    async def request(self, arguments: dict[str, Any]) -> str:
        """Ask the sandbox's process for anything but a program. Raises OSError."""
        answer = await self._call(arguments, self._limits.seconds)
        if answer is None:
            raise OSError("the sandbox was closed")
        if isinstance(answer, list):
            raise OSError(*answer)
        return str(answer)

    async def _call(self, arguments: dict[str, Any], seconds: float) -> Any:
        _, outcome = self._process.call(arguments, on_request=lambda request: None)
        self._unfinished = {each: most for each, most in self._unfinished.items() if not each.done()}
        self._unfinished[outcome] = seconds + _GRACE
        done, _ = await asyncio.wait([outcome], timeout=sum(self._unfinished.values()))
        if not done:
            self.close()
        return (await outcome).value


class Sandboxes:
    """Starts sandboxes: each is a fork of a process that has imported what it needs."""

    def __init__(self, limits: SandboxLimits | None = None):
        """Raises UserError if this machine allows none."""
        self._limits = limits = limits or SandboxLimits()
        load = "rpg_megatron.environments.sandbox_process:load_server"
        # Its programs have limits, the sandbox itself has none.
        self._server = ForkServer(Loader(load, asdict(limits), "sandbox"))

    async def open(self, limits: SandboxLimits | None = None) -> Sandbox:
        """A new sandbox, without files. limits: its own, if it is one in an image. Raises OSError."""
        sandbox = Sandbox(await WorkerProcess.start(self._server), limits or self._limits)
        if limits is not None:
            try:
                await sandbox.request({"open": asdict(limits)})
            except BaseException:
                sandbox.close()
                raise
        return sandbox

    def close(self) -> None:
        """End all of them."""
        if self._server.kill():
            self._server.close()
