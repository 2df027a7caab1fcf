"""Programs that sandboxes must end, and what is seen of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rpg_megatron.environments.sandbox import Sandboxes, SandboxLimits, SandboxResult

LIMITS = SandboxLimits(seconds=2.0, memory_mib=128, processes=16, files_mib=8, output=1000)


def run(sandboxes: Sandboxes, *codes: str, program: str = "python3") -> list[SandboxResult]:
    """Run programs one after the other in one sandbox."""

    async def main() -> list[SandboxResult]:
        sandbox = await sandboxes.open()
        results = [await sandbox.exec([program, "-c", code]) for code in codes]
        alive = await sandbox.exec(["echo", "alive"])
        assert alive == SandboxResult("alive\n", 0)
        sandbox.close()
        return results

    return asyncio.run(main())


def outside(mark: str) -> list[str]:
    """Processes of this machine with this text in their command line, besides the tests."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, NotADirectoryError):
            continue
        if entry.name.isdigit() and mark in line and "pytest" not in line:
            found.append(line)
    return found


ENDED: dict[str, tuple[str, str]] = {
    "loops": ("while True: pass", "time"),
    "sleeps": ("import time; time.sleep(1000)", "time"),
    "ignores signals": (
        "import signal, time\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\ntime.sleep(1000)",
        "time",
    ),
    "takes memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"),
    "takes memory in children": (
        "import os\nfor _ in range(8):\n if os.fork() == 0:\n  x = bytearray(os.urandom(1 << 20) * 30)\n"
        "  import time; time.sleep(1000)\nimport time; time.sleep(1000)",
        "memory",
    ),
    "closes its output": ("import os, time; os.close(1); os.close(2); time.sleep(1000)", "time"),
    "writes without end": ("while True: print('x' * 1000)", "output"),
}

OWNER = """
import asyncio, sys
from rpg_megatron.environments.sandbox import Sandboxes, SandboxLimits
async def main():
    sandbox = await Sandboxes(SandboxLimits()).open()
    running = asyncio.create_task(sandbox.exec(["sleep", "MARK"]))
    print(await asyncio.wait([running], timeout=1.0), flush=True)
    await running
asyncio.run(main())
"""
