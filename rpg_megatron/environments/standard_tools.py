"""The tool that is named without a module: ``python``."""

from __future__ import annotations

from functools import lru_cache

from rpg_megatron.environments.sandbox import Sandbox, Sandboxes
from rpg_megatron.environments.sandbox_limits import SandboxLimits, find_problem
from rpg_megatron.environments.tools import ToolError


class python:
    """Runs programs in a sandbox; the files of an episode's calls stay until it ends."""

    def __init__(
        self,
        seconds: float = 10.0,
        memory_mib: int = 256,
        files_mib: int = 64,
        processes: int = 32,
        image: str = "",
    ):
        """See ``SandboxLimits``. Raises OSError if this machine allows no such sandboxes."""
        self._limits = SandboxLimits(seconds, memory_mib, processes, files_mib, image=image)
        if problem := _problem(self._limits):
            raise OSError(problem)
        self._sandbox: Sandbox | None = None

    async def __call__(self, code: str) -> str:
        """Run a Python program and return what it prints."""
        if self._sandbox is None:
            self._sandbox = await _sandboxes(self._limits).open()
        result = await self._sandbox.exec(["python3", "-"], input=code)
        if result.code != 0:
            reason = f"ended: limit of {result.ended}" if result.ended else f"exit code {result.code}"
            raise ToolError(f"{reason}\n{result.output}")
        return result.output

    def close(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()


_problem = lru_cache(find_problem)
_sandboxes = lru_cache(Sandboxes)
"""One for all episodes of the process with the same limits."""
