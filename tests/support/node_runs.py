"""A run on two nodes: two launchers on one machine."""

from __future__ import annotations

import signal
from pathlib import Path

from rpg_megatron.system import process_groups
from tests.support.commands import Command
from tests.support.runs import QUICKSTART, SETTINGS, Run


class Nodes(Run):
    """A run whose launchers are started one by one, each as a node."""

    def __init__(self, folder: Path, name: str, count: int, *more: str, config: Path = QUICKSTART):
        super().__init__(folder, name)
        places = [
            f"runs={folder}",
            f"name={name}",
            "cluster={interface: lo, join_timeout: 300, min_bandwidth: 0}",
        ]
        words = [str(config), *SETTINGS, *more, *places]
        options = [["--nodes", "2", "--node-rank", str(rank), "--job", name] for rank in range(2)]
        self.launchers = [
            Command(folder, "train", *words, *option) for option in (options if count == 2 else [[]])
        ]

    def end(self) -> Nodes:
        """Wait until it has ended successfully, with nothing left."""
        try:
            for launcher in self.launchers:
                code, err = launcher.finish(1800)
                assert (code, err) == (0, ""), launcher.out.read_text() + err
        finally:
            for launcher in self.launchers:
                if launcher.process.poll() is None:
                    process_groups.send(launcher.sessions if launcher.processes() else [], signal.SIGKILL)
                    launcher.process.wait()
        for launcher in self.launchers:
            launcher.assert_nothing_left(60)
        return self

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()
