"""Real vLLM engines for tests: start them, send single requests, train ranks against one."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from rpg_megatron.bridge.controller import SyncReport, sync_engine
from rpg_megatron.bridge.manifest import Manifest, read_manifest
from rpg_megatron.config import Settings
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.engine.metrics import ROUTE, read_metrics
from rpg_megatron.engine.process import EngineProcess, engine_socket, note_segments
from rpg_megatron.launcher.reaper import Reaper
from rpg_megatron.launcher.run_dir import resolved_yaml
from rpg_megatron.rollout.sampler_client import SOCKET, SamplerClient
from rpg_megatron.system.child import tail_of
from rpg_megatron.system.process_groups import leftover_segments, members
from tests.support.forking import forked_starts
from tests.support.ranks import run_to_end


def install_plugin(folder: Path, name: str, code: str) -> Path:
    """Write a vLLM plug-in, whose ``register`` applies a test's changes; returns the new folder, for
    PYTHONPATH.
    """
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    return folder


@dataclass
class Engine:
    """A running engine and what it was started with."""

    process: EngineProcess
    tensor: int
    bridge: Path
    token: str

    def listens_at(self) -> list[str]:
        """The IP addresses at which its processes listen, one for each port."""
        return [c.laddr.ip for c in self._connections("inet") if c.status == psutil.CONN_LISTEN]

    def unix_sockets(self) -> set[str]:
        """Paths of its processes' unix sockets."""
        return {c.laddr for c in self._connections("unix") if c.laddr}

    def _connections(self, kind: str) -> Iterator[Any]:
        assert self.process.pid is not None
        for pid in members(self.process.pid):
            yield from psutil.Process(pid).net_connections(kind)

    def call(
        self, method: str, path: str, body: Any = None, timeout: float = 60.0, token: str | None = ""
    ) -> tuple[int, str]:
        """Status and text of an answer. token: "" for the engine's own, None for none."""
        token = self.token if token == "" else token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        transport = httpx.HTTPTransport(uds=str(self.process.socket))
        with httpx.Client(transport=transport, timeout=timeout, headers=headers) as client:
            answer = client.request(method, f"http://engine{path}", json=body)
            return answer.status_code, answer.text

    async def post(self, path: str, body: Any, timeout: float) -> tuple[int, str]:
        return await asyncio.to_thread(self.call, "POST", path, body, timeout)

    def rpc(self, method: str) -> list[Any]:
        """Each worker's answer to a method of the plug-in."""
        status, text = self.call("POST", "/collective_rpc", {"method": method})
        assert status == 200, text
        return list(json.loads(text)["results"])

    def versions(self) -> list[int | None]:
        return [answer["version"] for answer in self.rpc("rpg_version")]

    def sync(self, version: int, manifest: Manifest | None = None) -> SyncReport:
        manifest = manifest or read_manifest(self.bridge / "manifest.json")
        return asyncio.run(
            sync_engine(self.post, manifest, version=version, engine_tensor=self.tensor, timeout=60)
        )


async def sampled_tokens(engine: Engine) -> tuple[float, float]:
    """Number of tokens that the engine has sampled since its start, and of requests that it has."""
    status, text = await asyncio.to_thread(engine.call, "GET", ROUTE)
    assert status == 200
    metrics = read_metrics(text)
    return metrics["vllm:generation_tokens_total"], metrics["vllm:num_requests_running"]


@contextmanager
def running_engines(
    folder: Path,
    settings: Sequence[Settings],
    *,
    plugins: Sequence[str] = (),
    weights: Literal["dummy", "checkpoint"] = "dummy",
    fresh: bool = False,
) -> Iterator[list[Engine]]:
    """Engines that share a bridge folder and a token, started at the same time; they leave nothing behind.

    fresh: start them as the launcher does, not by fork (``tests/support/forking``).
    Logs go to ``folder``. Sockets, whose paths must be short, and weights, which are in memory, do not.
    """
    token = secrets.token_urlsafe(16)
    paths = [install_plugin(folder / f"plugin_{i}", f"plugin_{i}", code) for i, code in enumerate(plugins)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    with ExitStack() as stack:
        reaper = Reaper()  # tests may be killed too
        stack.callback(reaper.dismiss)
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpg-test-")))
        bridge = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpg-test-", dir="/dev/shm")))
        reaper.guard_path(work)
        reaper.guard_path(bridge)
        engines = []
        for index, engine_settings in enumerate(settings):
            process = EngineProcess(
                engine_settings,
                index,
                socket=engine_socket(work, index),
                log=folder / f"engine_{index}.log",
                bridge_dir=bridge,
                token=token,
                weights=weights,
                extra={"PYTHONPATH": os.pathsep.join(map(str, paths))},
            )
            with nullcontext() if fresh else forked_starts():
                process.start()
            assert process.pid is not None
            reaper.guard_group(process.pid)
            stack.callback(_end, process, process.pid)
            engines.append(Engine(process, engine_settings.engine.tensor, bridge, token))
        for engine in engines:
            wait_healthy(engine.process, settings[engine.process.index].engine.start_timeout)
            for segment in leftover_segments([engine.process.pid or 0]):
                reaper.guard_path(segment)
        yield engines


def wait_healthy(process: EngineProcess, seconds: float) -> None:
    """Wait until an engine answers; its log is the error if it ends or takes longer."""
    end = time.monotonic() + seconds
    while not process.healthy():
        assert process.alive(), tail_of(process.log)
        assert time.monotonic() < end, tail_of(process.log)
        note_segments([process])
        time.sleep(0.1)


def _end(process: EngineProcess, leader: int) -> None:
    segments = leftover_segments([leader])
    process.stop()
    assert [segment for segment in segments if segment.exists()] == []
    assert members(leader) == []
    assert process.pid is None
    assert not process.socket.exists()


@dataclass
class Service:
    """A running engine and sampler that trainer ranks can join."""

    folder: Path
    engine: Engine
    start: dict[str, Any]
    """The sampler's state before any rollout."""

    @property
    def work(self) -> Path:
        return self.engine.process.socket.parent

    def run_ranks(
        self, worker: str, settings: Settings, run: Path, *more: str
    ) -> tuple[list[int | None], str]:
        """Run trainer ranks RUN WORK BRIDGE MORE to their end; exit codes and the ends of their logs."""
        run.mkdir(exist_ok=True)
        (run / "config.yaml").write_text(resolved_yaml(settings))
        with SamplerClient(self.work / SOCKET, self.engine.token) as client:
            client.restore(self.start)
        arguments = [str(run), str(self.work), str(self.engine.bridge), *more]
        token = {TOKEN_VARIABLE: self.engine.token}
        return run_to_end(worker, settings.parallel.world, run, arguments, environment=token, timeout=400)


@contextmanager
def running_service(folder: Path, settings: Settings) -> Iterator[Service]:
    """An engine and a sampler of these settings, for as many runs of trainer ranks as one likes."""
    with running_engines(folder, [settings]) as (engine,):
        (folder / "config.yaml").write_text(resolved_yaml(settings))
        work = engine.process.socket.parent
        command = [sys.executable, "-m", "rpg_megatron.rollout.sampler", str(folder), str(work)]
        with (folder / "sampler.log").open("w") as log, forked_starts():
            sampler = subprocess.Popen(
                command,
                env=os.environ | {TOKEN_VARIABLE: engine.token},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            with SamplerClient(work / SOCKET, engine.token) as client:
                start = client.state()
            yield Service(folder, engine, start)
        finally:
            sampler.kill()
            sampler.wait()
