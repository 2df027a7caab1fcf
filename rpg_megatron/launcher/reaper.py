"""``python -m rpg_megatron.launcher.reaper``: cleans up after a launcher that was killed.

It reads lines from the launcher that say what to clean up: ``group PID``, ``drop PID``, ``path PATH``. If the
pipe closes without ``done`` (kill -9, out of memory), it kills the groups and removes the paths. The parent
death signal (``system/parent_death.py``) only covers the launcher's direct children, and no files.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rpg_megatron.config.files import remove
from rpg_megatron.system import process_groups
from rpg_megatron.system.child import module_command


class Reaper:
    """The launcher's end of the pipe. Create it before any process or file that must not outlive the
    launcher.
    """

    def __init__(self) -> None:
        with process_groups.holding_warnings():
            self._process = subprocess.Popen(
                module_command("rpg_megatron.launcher.reaper"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # not ended by Ctrl-C on the terminal
                text=True,
            )

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed; the launcher itself still cleans up
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def guard_group(self, leader: int) -> None:
        """Kill this process group if the launcher dies."""
        self._send(f"group {leader}")

    def drop_group(self, leader: int) -> None:
        """Forget a group that has ended; its pid may be reused."""
        self._send(f"drop {leader}")

    def guard_path(self, path: Path) -> None:
        """Remove this file or folder if the launcher dies."""
        self._send(f"path {path}")

    def dismiss(self) -> None:
        """End the reaper: the launcher has cleaned up."""
        self._send("done")
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Read requests until the launcher has cleaned up or died."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    paths: set[Path] = set()
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "group":
            groups.add(int(rest))
        elif word == "drop":
            groups.discard(int(rest))
        elif word == "path":
            paths.add(Path(rest))
        elif word == "done":
            return
    paths |= process_groups.leftover_segments(groups)
    process_groups.end_groups(groups)
    for path in paths:
        remove(path, ignore_errors=True)


if __name__ == "__main__":
    main()
