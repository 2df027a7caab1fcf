"""Programs that sandboxes must end, and what is seen of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rpg_megatron.environments.sandbox import Sandboxes, SandboxLimits, SandboxResult

LIMITS = SandboxLimits(seconds=120.0, memory_mib=128, processes=16, files_mib=8, output=1000)
"""The time is for a busy machine."""


def run(
    sandboxes: Sandboxes, *codes: str, program: str = "python3", seconds: float | None = None
) -> list[SandboxResult]:
    """Run programs one after the other in one sandbox. seconds: of each, less than the limit."""

    async def main() -> list[SandboxResult]:
        sandbox = await sandboxes.open()
        results = [await sandbox.exec([program, "-c", code], seconds=seconds) for code in codes]
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
REFUSED: dict[str, str] = {
    "answers for the sandbox": "import json, os\n"
    "line = json.dumps({'number': 0, 'exits': False, 'value': ['ALL PASSED', 0, '']}).encode() + b'\\n'\n"
    "for n in range(3, 256):\n try: os.write(n, line)\n except OSError: pass\n else: raise SystemExit(9)\n"
    "assert os.listdir('/proc/self/fd') == ['0', '1', '2', '3'], 'and that of this folder'",
    "forks without end": "import os\nn = 0\ntry:\n while True:\n  n += 1\n  if os.fork() == 0:\n"
    "   import time; time.sleep(1000)\nexcept BlockingIOError: assert n <= 17\nelse: raise SystemExit(9)",
    "fills the files": "try: open('f', 'wb').write(bytes(20 << 20))\n"
    "except OSError as e: assert e.errno == 28\nelse: raise SystemExit(9)",
    "writes programs": "import os\nfor f in ('/usr/x', '/bin/x', '/etc/x', '/x', '/dev/x',"
    " '/proc/sys/kernel/core_pattern'):\n try: open(f, 'w').write('x')\n except OSError: pass\n"
    " else: raise SystemExit(9)",
    "reads files of the machine": "import os, sys\nfor f in (OUTSIDE, '/etc/passwd', '/etc/shadow', '/home',"
    " '/var', '/proc/1/environ', '/proc/1/mem', '/proc/1/root/etc'):\n"
    " try: (os.listdir if f in ('/home', '/var', '/proc/1/root/etc') else open)(f)\n except OSError: pass\n"
    " else: raise SystemExit(9)",
    "opens connections": "import socket\nfor family, where in ((socket.AF_INET, ('127.0.0.1', PORT)),"
    " (socket.AF_INET, ('1.1.1.1', 53)), (socket.AF_UNIX, '\\0ABSTRACT')):\n"
    " try: socket.socket(family).connect(where)\n except OSError: pass\n else: raise SystemExit(9)",
    "signals others": "import os, signal\nfor pid in (1, os.getppid(), PID, -PID):\n try: os.kill(pid, 9)\n"
    " except OSError: pass\nos.kill(os.getpid(), 0)",
    "traces the sandbox": "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
    "assert c.ptrace(16, 1, 0, 0) == -1",
    "mounts": "import ctypes\nc = ctypes.CDLL(None)\nassert c.mount(b'none', b'/work', b'tmpfs', 0, None)",
    "becomes another user": "import os\nfor call in (os.setuid, os.setgid):\n try: call(0)\n"
    " except OSError: pass\n else: assert os.geteuid() != 0, 9",
    "changes the clock": "import time\ntry: time.clock_settime(0, 0)\nexcept OSError: pass\n"
    "else: raise SystemExit(9)",
    "leaves the root": "import os\nfor _ in range(9): os.chdir('..')\nassert not os.path.exists('home')\n"
    "try: os.chroot('/')\nexcept OSError: pass\nelse: raise SystemExit(9)",
    "makes devices": "import os, stat\ntry: os.mknod('d', 0o666 | stat.S_IFBLK, os.makedev(254, 0))\n"
    "except OSError: pass\nelse: open('d', 'rb')",
}


OWNER = """
import asyncio, sys
from rpg_megatron.environments.sandbox import Sandboxes, SandboxLimits
async def main():
    sandbox = await Sandboxes(SandboxLimits()).open()
    running = asyncio.create_task(sandbox.exec(["sleep", "MARK"]))
    await running
asyncio.run(main())
"""
