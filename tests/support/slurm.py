"""A real Slurm on this machine, all on loopback and in one folder, and jobs of the scripts in slurm/."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from rpg_megatron.config.cluster import TOKEN_VARIABLE

ROOT = Path(__file__).parents[2]
SECRET = "wandb-5ecret-0123456789abcdef0123456789abcdef"
"""Planted as the W&B key of every job."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])

CONFIG = """
ClusterName=rpg
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
ReturnToService=2
JobRequeue=1
KillWait=60
SlurmdTimeout=20
InactiveLimit=0
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO GraceTime=60
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: slurm-wlm, munge)"
    if os.getuid() != 0:
        return "slurmd and munged of a test run as root"
    return ""


class Slurm:
    """The daemons, started by the constructor, and the commands that speak to them."""

    def __init__(self, folder: Path, nodes: int = 2, more: str = ""):
        """folder: with a short path, since it has sockets; owned by this user. more: lines of slurm.conf."""
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, nodes + 1)]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))
        }
        self.environment |= {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir(mode=0o700)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        ports = [_free_port() for _ in range(1 + nodes)]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        host = socket.gethostname()
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={os.cpu_count()} "
            "RealMemory=1000 Gres=gpu:8"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        facts = {"folder": folder, "ports": ports, "user": user, "host": host, "nodes": "\n".join(lines)}
        (folder / "slurm.conf").write_text(CONFIG.format(**facts) + more)
        for number in range(8):
            (folder / f"gpu{number}").touch()  # Slurm assigns names of devices; no process opens them
        (folder / "gres.conf").write_text(f"NodeName=n[1-{nodes}] Name=gpu File={folder}/gpu[0-7]\n")
        try:
            self._start("munged", "--foreground", "--force", f"--key-file={key}", *self._munge_files())
            self.wait((folder / "munge.sock").exists, 30)
            self._start("slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            self.wait(lambda: self.states() == {"idle"}, 60)
        except BaseException as e:
            e.add_note(self.logs())
            self.close()
            raise

    def _munge_files(self) -> list[str]:
        names = {"socket": "sock", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        return [f"--{option}={self.folder}/munge.{end}" for option, end in names.items()]

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        with (self.folder / f"{name or program}.out").open("ab") as out:
            self.daemons[name or program] = subprocess.Popen(
                [program, *arguments],
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                executable=shutil.which(program, path=_PATH),
            )

    def start_node(self, node: str) -> None:
        """Start one of the nodes."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def fail_node(self, node: str) -> None:
        """Like a power failure: slurmd and everything that it started end at once."""
        tasks = [p for p in self.processes() if p.info["environ"].get("SLURMD_NODENAME") == node]
        steps = [p for task in tasks for p in task.parents() if p.name() == "slurmstepd"]
        # A dead machine loses what it had in memory; here the guardian removes it.
        victims = [p for p in tasks if "rpg_megatron.launcher.reaper" not in p.info["cmdline"]]
        for process in [psutil.Process(self.daemons[node].pid), *steps, *victims]:
            _kill(process)
        self.daemons.pop(node).wait()

    def processes(self) -> list[psutil.Process]:
        """Live processes of this Slurm's jobs, with ``info["environ"]`` and ``info["cmdline"]``.

        psutil gives None where a process ends meanwhile.
        """
        daemons = {daemon.pid for daemon in self.daemons.values()}
        config = str(self.folder / "slurm.conf")
        return [
            process
            for process in psutil.process_iter(["environ", "cmdline"])
            if (process.info["environ"] or {}).get("SLURM_CONF") == config
            and process.info["environ"].get("SLURM_JOB_ID")
            and process.info["cmdline"] is not None
            and process.pid not in daemons
        ]

    def sockets_open_to_others(self) -> list[tuple[str, str]]:
        """Sockets that jobs listen on outside of loopback: (address, command line), without Slurm's own."""
        listeners = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                for connection in process.net_connections("inet"):
                    place = connection.laddr
                    if connection.status == psutil.CONN_LISTEN and not place.ip.startswith("127."):
                        listeners.append((f"{place.ip}:{place.port}", " ".join(process.info["cmdline"])))
        return [(address, line) for address, line in listeners if not line.startswith("srun ")]

    def run(self, *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(
            [str(word) for word in command],
            env=env or self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return str(done.stdout)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        files = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)

    def states(self) -> set[str]:
        """The states that nodes are in; {"unreachable"} while the controller does not answer."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return set(done.stdout.split()) if done.returncode == 0 else {"unreachable"}

    def job(self, number: str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        words = self.run("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @staticmethod
    def wait(condition: Callable[[], bool], seconds: float) -> None:
        """Until the condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.2)

    def close(self) -> None:
        """End the jobs and the daemons, and remove what is left of them."""
        if "slurmctld" in self.daemons:
            subprocess.run(["scancel", "--user=root"], env=self.environment, check=False, timeout=60)
            end = time.monotonic() + 60
            while self.processes() and time.monotonic() < end:
                time.sleep(0.2)
        for name in reversed(list(self.daemons)):
            daemon = self.daemons.pop(name)
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            _kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def start_slurm(nodes: int = 2, more: str = "") -> Iterator[Slurm]:
    """For fixtures: a Slurm that leaves nothing behind. more: lines of slurm.conf."""
    cluster = Slurm(Path(tempfile.mkdtemp(prefix="rpgs-", dir="/tmp")), nodes, more)
    try:
        yield cluster
    finally:
        cluster.close()
    assert cluster.processes() == []


class Job:
    """A job of one of the scripts, submitted from a folder with a space in its name."""

    def __init__(
        self,
        slurm: Slurm,
        folder: Path,
        script: str,
        *words: str,
        launcher: Path | None = None,
        options: tuple[str, ...] = (),
        **variables: str,
    ):
        """launcher: the command, if not rpg-megatron. variables: of the environment."""
        self.slurm, self.folder = slurm, folder / "a job"
        self.folder.mkdir()
        (folder / "the repo").symlink_to(ROOT)
        (folder / "the bin").symlink_to(Path(sys.executable).parent)
        planted = {
            "WANDB_API_KEY": SECRET,
            "RPG_MEGATRON": str(launcher or folder / "the bin" / "rpg-megatron"),
            **variables,
        }
        self.command_lines: set[str] = set()
        self.tokens: set[str] = set()
        command = [
            "sbatch",
            "--parsable",
            *options,
            folder / "the repo" / "slurm" / f"{script}.sbatch",
            *words,
        ]
        self.number = slurm.run(*command, cwd=self.folder, env=slurm.environment | planted).strip()

    @property
    def log(self) -> Path:
        return next(iter(self.folder.glob(f"*-{self.number}.log")), self.folder / "none")

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def look(self) -> None:
        """Record the command lines of the job's processes, which others can see, and the tokens."""
        for process in self.slurm.processes():
            self.command_lines.add(" ".join(process.info["cmdline"]))
            self.tokens.add(process.info["environ"].get(TOKEN_VARIABLE, ""))

    def state(self) -> str:
        self.look()
        return self.slurm.job(self.number)["JobState"]

    def wait_for(self, text: str, seconds: float = 900) -> None:
        def appeared() -> bool:
            state = self.state()  # read before the output, which may end in that state
            matched = text in self.output
            assert matched or state in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"), (
                f"{state}\n{self.logs()}"
            )
            return matched

        self.slurm.wait(appeared, seconds)

    def wait_for_restart(self) -> None:
        """Slurm lets a requeued job wait for two minutes."""

        def again() -> bool:
            facts = self.slurm.job(self.number)
            return facts["Restarts"] == "1" and facts["JobState"] in ("RUNNING", "COMPLETED")

        self.slurm.wait(again, 400)

    def start_now(self) -> None:
        """Do not wait for the time that Slurm, or the script, holds a requeued job."""
        self.slurm.wait(lambda: self.slurm.job(self.number)["JobState"] == "PENDING", 200)
        self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def wait_for_end(self, seconds: float = 900) -> dict[str, str]:
        """Wait until no process of it is left; returns Slurm's record of it."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.slurm.wait(lambda: self.state() in over, seconds)
        self.slurm.wait(lambda: not self.slurm.processes(), 60)
        return self.slurm.job(self.number)

    def logs(self) -> str:
        logs = sorted(self.folder.glob("runs/*/logs/*.log"))
        return self.output + "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def rows(self) -> list[dict]:
        return [json.loads(row) for row in (self.run / "metrics.jsonl").read_text().splitlines()]

    @property
    def run(self) -> Path:
        (run,) = (self.folder / "runs").iterdir()
        return run

    def assert_no_secret_shows(self, starts: int = 1) -> None:
        """In logs, command lines, the run's folder, the job's script and record."""
        tokens = self.tokens - {""}
        assert len(tokens) == starts, tokens  # one for all processes of all nodes
        script = self.slurm.run("scontrol", "write", "batch_script", self.number, "-")
        record = self.slurm.run("scontrol", "show", "job", "-d", self.number)
        texts = {"command lines": "\n".join(self.command_lines), "script": script, "record": record}
        texts |= {
            str(file): file.read_bytes().decode(errors="replace")
            for file in self.folder.rglob("*")
            if file.is_file()
        }
        assert any(name.endswith("engine_0.log") for name in texts)
        for secret in (*tokens, SECRET):
            assert [name for name, text in texts.items() if secret in text] == []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


SMALL = [
    "training.steps=2",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "training.minibatches=2",
    "engine.max_sequences=8",
    "engine.kv_cache_gib=0.25",
    "evaluation=null",
    "export.enabled=false",
]


TWO = ["parallel.tensor=1", "parallel.data=2", "engine.replicas=2"]
