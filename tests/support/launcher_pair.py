"""Two or more whole launchers, as on as many nodes, with stand-ins for engines, sampler and ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rpg_megatron.system import process_groups
from tests.support.commands import without_notice
from tests.support.launcher import LIMIT, WAITS, wait_for

# Every stand-in has a child that ignores SIGTERM, as a worker in the middle of a step does.
STAND_IN = (
    WAITS
    + """
def act(name):
    (here / f"pid_{name}").write_text(str(os.getpid()))
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    pids = [os.getpid(), subprocess.Popen([sys.executable, "-I", "-S", "-c", code]).pid]
    with open(here / "pids", "a") as f:
        f.write(" ".join(map(str, pids)) + "\\n")
    with open(here / "acted", "a") as f:
        f.write(name + "\\n")
    plan = json.loads((here / "plan.json").read_text()).get(name, "")
    until((here / "go").exists)
    exec(plan)
    time.sleep(600)
"""
)


ENGINE = """
import http.server, os, socket, socketserver, sys, threading
import stand_in
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer " + os.environ["RPG_ENGINE_TOKEN"]
        self.send_response(200 if right else 401)
        self.end_headers()
    def do_POST(self):
        with open(stand_in.here / "acted", "a") as f:
            f.write(f"{self.path.split('?')[0][1:]}_{sys.argv[1]}\\n")
        self.send_response(500 if (stand_in.here / "refuses").exists() else 200)
        self.end_headers()
    def address_string(self):
        return "somebody"
span = sys.argv.index("--nnodes") if "--nnodes" in sys.argv else None
where = sys.argv[2:span]
if span:
    with open(stand_in.here / "spans", "a") as f:
        print(*sys.argv[span:], file=f)
if "--headless" in sys.argv:
    stand_in.act("engine_" + sys.argv[1] + "_part_" + sys.argv[sys.argv.index("--node-rank") + 1])
if len(where) == 1:
    server = socketserver.UnixStreamServer(where[0], Handler)
else:
    socketserver.TCPServer.allow_reuse_address = True
    server = socketserver.TCPServer((where[0], int(where[1])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
stand_in.act("engine_" + sys.argv[1])
"""


DRIVER = """
import os, sys
from rpg_megatron import cli
from rpg_megatron.launcher import node_agent as follower
from rpg_megatron.launcher import rank_env, run as launcher
from rpg_megatron.engine import process as engine

def command(settings, index, socket, *, weights="dummy", listen=None):
    where = [listen[0], str(listen[1])] if listen else [str(socket)]
    return [sys.executable, os.path.join(os.path.dirname(__file__), "stand_in_engine.py"), str(index), *where]

engine.engine_command = command
rank_env.SAMPLER, launcher.RANK, follower.RANK = "stand_in_sampler", "stand_in_rank", "stand_in_rank"
launcher.GRACE = follower.GRACE = 0.3
cli.main()
"""


OVERRIDES = [
    "parallel.data=2",
    "engine.replicas=2",
    "bridge.transport=process_group",
    "cluster={interface: lo, join_timeout: 300, min_bandwidth: 0}",
]

WELL = "import sys; open(sys.argv[1] + '/summary.json', 'w').write('{}'); os._exit(0)"
"""Plan of a rank whose run has ended well."""


class Pair:
    """Two launchers or more, and stand-ins that follow a plan after ``go``."""

    count = 2

    def __init__(self, folder: Path, config: Path, **plan: str):
        self.folder, self.config = folder, config
        (folder / "stand_in.py").write_text(STAND_IN)
        (folder / "stand_in_engine.py").write_text(ENGINE)
        (folder / "stand_in_sampler.py").write_text("import stand_in; stand_in.act('sampler')")
        (folder / "stand_in_rank.py").write_text(
            "import os, stand_in; stand_in.act('rank_' + os.environ['RANK'])"
        )
        (folder / "driver.py").write_text(DRIVER)
        (folder / "plan.json").write_text(json.dumps(plan))
        self.launchers: list[subprocess.Popen[str]] = []

    def start(self, rank: int, *overrides: str) -> subprocess.Popen[str]:
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        place = ["--nodes", str(self.count), "--node-rank", str(rank), "--job", "x"]
        command = [sys.executable, str(self.folder / "driver.py"), "train", str(self.config)]
        self.launchers.append(
            subprocess.Popen(
                [*command, *OVERRIDES, *overrides, *place],
                stdout=(self.folder / f"out-{rank}").open("w"),
                stderr=(self.folder / f"err-{rank}").open("w"),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": "/tmp"},
                text=True,
                cwd=self.folder,
            )
        )
        return self.launchers[-1]

    def begin(self, *overrides: str, acts: int = 5) -> None:
        """Start all and wait until ``acts`` stand-ins run."""
        for rank in range(self.count):
            self.start(rank, *overrides)
        wait_for(lambda: len(self.acted()) == acts, message=self.logs)

    def go(self) -> None:
        (self.folder / "go").touch()

    def acted(self) -> list[str]:
        """Names of the stand-ins that started, in order of time."""
        file = self.folder / "acted"
        return file.read_text().split() if file.exists() else []

    def living(self) -> list[int]:
        file = self.folder / "pids"
        pids = [int(pid) for pid in file.read_text().split()] if file.exists() else []
        return [pid for pid in pids if process_groups.start_time(pid) is not None]

    def out(self, rank: int) -> str:
        return (self.folder / f"out-{rank}").read_text()

    def err(self, rank: int) -> str:
        return without_notice((self.folder / f"err-{rank}").read_text())

    def logs(self) -> str:
        logs = self.folder.glob("runs/*/logs/*")
        texts = [self.out(0), self.err(0), self.out(1), self.err(1), *(log.read_text() for log in logs)]
        return "\n---\n".join(texts)

    def folders(self) -> list[Path]:
        """Private folders of these launchers."""
        pids = {launcher.pid for launcher in self.launchers}
        owners = [*Path("/tmp").glob("rpg-*/owner.json"), *Path("/dev/shm").glob("rpg-*/owner.json")]
        return [owner.parent for owner in owners if json.loads(owner.read_text())["pid"] in pids]

    def finish(self) -> list[int]:
        """Exit codes, by rank; nothing must be left."""
        codes = [launcher.wait(LIMIT) for launcher in self.launchers]
        wait_for(lambda: not self.living() and not self.folders(), message=self.logs)
        assert list(self.folder.glob("runs/.meeting*")) == []
        return codes
