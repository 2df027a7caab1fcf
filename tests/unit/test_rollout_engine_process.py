"""The engine's command line, environment and life, with a stand-in for vLLM's server.

Why: an engine that is gone, stuck, deaf to SIGTERM or orphaned must neither hang a run nor outlive it, and
its token must not show on a command line. Not covered: vLLM itself (the integration test).
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.engine import process as module
from rpg_megatron.engine.command import context_length, engine_command, engine_environment
from rpg_megatron.engine.process import EngineProcess, engine_socket, first_error, tail_of
from rpg_megatron.launcher.nodes import share_of

SERVER = """
import http.server, os, socketserver, subprocess, sys, time, signal
mode, path = sys.argv[1:]
print("starting in mode", mode, flush=True)
if mode == "broken":
    print("RuntimeError: no such weights", flush=True)
    sys.exit(0)  # as vLLM does
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if mode == "stuck":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer " + os.environ["RPG_ENGINE_TOKEN"]
        self.send_response(200 if right else 401)
        self.end_headers()
    def address_string(self):
        return "unix"
socketserver.UnixStreamServer(path, Handler).serve_forever()
"""


@pytest.fixture
def settings(config_file: Path) -> Settings:
    return load_settings(config_file, ["engine.start_timeout=20"])


def make(settings: Settings, folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> EngineProcess:
    path = engine_socket(folder, 2)
    command = [sys.executable, "-c", SERVER, mode, str(path)]
    monkeypatch.setattr(module, "engine_command", lambda *_, **__: command)
    return EngineProcess(settings, 2, socket=path, log=folder / "e.log", bridge_dir=folder, token="secret")


def members(group: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(int(entry))
    return found


def wait_for(condition, seconds: float = 10.0) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


# -- command line and environment ----------------------------------------------------------------------------


def test_command_line(config_file: Path, tmp_path: Path) -> None:
    settings = load_settings(
        config_file, ["engine.tensor=2", 'engine.arguments=["--swap-space", "0"]', "seed=7"]
    )
    command = engine_command(settings, 1, tmp_path / "e.sock")
    flags = dict(zip(command[3::2], command[4::2], strict=False))
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert flags["--model"] == str(settings.model.path)
    assert flags["--dtype"] == "float32"
    assert flags["--load-format"] == "dummy"
    assert flags["--tensor-parallel-size"] == "2"
    assert flags["--max-model-len"] == str(128 + 16)
    assert flags["--max-num-seqs"] == "16"
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--generation-config"] == "vllm"
    assert flags["--seed"] == "8"
    assert "--enforce-eager" in command
    assert "--distributed-executor-backend" not in command
    one = engine_command(load_settings(config_file), 0, tmp_path / "e.sock")
    assert "UniProcExecutor" in one[one.index("--distributed-executor-backend") + 1]
    assert str(2**28) in command
    assert command[-2:] == ["--swap-space", "0"]
    loaded = engine_command(settings, 1, tmp_path / "e.sock", weights="checkpoint")
    assert loaded[loaded.index("--load-format") + 1] == "auto"
    on_gpu = engine_command(settings.model_copy(update={"device": "cuda"}), 0, tmp_path / "e.sock")
    assert "--enforce-eager" not in on_gpu
    assert "--distributed-executor-backend" not in on_gpu
    assert "--kv-cache-memory-bytes" not in on_gpu


def test_environment(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "other")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    environment = engine_environment(settings, 0, tmp_path, "secret")
    assert environment["RPG_ENGINE_TOKEN"] == "secret"
    assert environment["RPG_BRIDGE_DIR"] == str(tmp_path)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert not {"VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"} & set(environment)
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["OMP_NUM_THREADS"] == "12"
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert "secret" not in " ".join(engine_command(settings, 0, tmp_path / "e.sock"))
    more = settings.model_copy(
        update={"engine": settings.engine.model_copy(update={"replicas": 2, "tensor": 2})}
    )
    assert engine_environment(more, 0, tmp_path, "secret")["OMP_NUM_THREADS"] == "3"
    fixed = settings.model_copy(update={"engine": settings.engine.model_copy(update={"cpu_threads": 5})})
    assert engine_environment(fixed, 0, tmp_path, "secret")["OMP_NUM_THREADS"] == "5"
    gpu = engine_environment(settings.model_copy(update={"device": "cuda"}), 0, tmp_path, "secret")
    assert gpu["OMP_NUM_THREADS"] == "64"
    assert gpu["TRITON_F32_DEFAULT"] == "ieee"  # or attention would be in TF32, and the guard stop the run
    assert "TRITON_F32_DEFAULT" not in environment
    assert "TORCH_COMPILE_DISABLE" not in gpu


def test_engines_have_the_gpus_behind_the_ranks(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(
        update={
            "device": "cuda",
            "parallel": settings.parallel.model_copy(update={"tensor": 2}),
            "engine": settings.engine.model_copy(update={"replicas": 2, "tensor": 2}),
        }
    )

    def gpus(index: int) -> str:
        seen = share_of(settings, 0, 1).gpus(settings, index)
        return engine_environment(settings, index, tmp_path, "secret", seen)["CUDA_VISIBLE_DEVICES"]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpus(0), gpus(1)] == ["2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 6,5,4,3,2")
    assert [gpus(0), gpus(1)] == ["5,4", "3,2"]
    # To read the trainers' memory on their GPUs, an engine must see those too, behind its own.
    settings = settings.model_copy(
        update={"bridge": settings.bridge.model_copy(update={"transport": "cuda_ipc"})}
    )
    assert [gpus(0), gpus(1)] == ["5,4,7,6", "3,2,7,6"]


def test_colocated_engines_have_the_ranks_gpus_and_can_sleep(config_file: Path, tmp_path: Path) -> None:
    overrides = ["engine.colocated=true", "parallel.tensor=2", "parallel.data=2", "engine.kv_cache_gib=2"]
    gpu = [*overrides, "engine.replicas=2", "device=cuda", "bridge.transport=cuda_ipc"]
    settings = load_settings(config_file, gpu)
    assert [share_of(settings, 0, 1).gpus(settings, i) for i in (0, 1)] == [[0, 1, 2, 3], [1, 0, 2, 3]]
    command = engine_command(settings, 0, tmp_path / "e.sock")
    assert "--enable-sleep-mode" in command
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(2 * 1024**3)
    on_cpu = engine_command(load_settings(config_file, overrides), 0, tmp_path / "e.sock")
    assert "--enable-sleep-mode" not in on_cpu  # vLLM refuses it there
    with pytest.raises(UserError, match=r"6 engine workers .* share the GPUs of 4 trainer ranks"):
        load_settings(config_file, [*gpu, "engine.replicas=3", "engine.tensor=2"])


def test_context_is_capped_by_the_model(config_file: Path) -> None:
    def length(*overrides: str) -> int:
        return context_length(load_settings(config_file, list(overrides)))

    assert length() == 144
    assert length("rollout.max_response_tokens=1000") == 512
    data = config_file.parent / "train.jsonl"
    assert length(f"evaluation={{data: {{path: {data}, max_prompt_tokens: 200}}}}") == 216
    with pytest.raises(UserError, match=r"^evaluation.data.max_prompt_tokens: .* 512 positions"):
        length(f"evaluation={{data: {{path: {data}, max_prompt_tokens: 512}}}}")


# -- life ----------------------------------------------------------------------------------------------------


def test_starts_answers_and_stops(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "good", monkeypatch)
    assert not engine.alive()
    assert engine.pid is None
    engine.stop()  # nothing to do
    for _ in range(2):  # and once more after a stop
        engine.start()
        assert engine.wait_healthy() < 20
        assert engine.alive()
        assert engine.healthy()
        group = engine.pid
        assert group is not None
        assert len(members(group)) == 2
        assert os.getsid(group) == group != os.getsid(0)
        with pytest.raises(RuntimeError, match="runs already"):
            engine.start()
        engine.stop()
        assert not members(group)
        assert not engine.socket.exists()
        assert not engine.alive()
        assert not engine.healthy()


def test_broken_and_stuck_engines_say_why(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "broken", monkeypatch)
    engine.start()
    with pytest.raises(
        UserError, match=r"ended while starting: RuntimeError: no such weights; the end of .*e\.log"
    ) as error:
        engine.wait_healthy()
    assert str(error.value).startswith("engine 2 ")
    assert "starting in mode broken" in str(error.value)

    engine = make(settings, tmp_path, "stuck", monkeypatch)
    engine.start()
    group = engine.pid
    assert group is not None
    assert wait_for(lambda: len(members(group)) == 2)
    with pytest.raises(UserError, match="did not answer within 1 s") as error:
        engine.wait_healthy(timeout=1.0)
    assert "starting in mode stuck" in str(error.value)
    assert not members(group)


def test_wrong_token_is_a_bug_of_ours(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "good", monkeypatch)
    engine.start()
    try:
        engine.wait_healthy()
        engine._token = "wrong"
        with pytest.raises(RuntimeError, match="refuses our token"):
            engine.healthy()
    finally:
        engine.stop()


@pytest.mark.parametrize("mode", ["good", "deaf"])
def test_no_process_survives_a_stop_or_a_kill(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    engine = make(settings, tmp_path, mode, monkeypatch)
    engine.start()
    engine.wait_healthy()
    group = engine.pid
    assert group is not None
    if mode == "good":
        os.kill(group, signal.SIGKILL)
        assert wait_for(lambda: not engine.alive())
        assert members(group)  # its child is still there
    engine.stop(grace=0.3)
    assert wait_for(lambda: not members(group), 2.0)
    assert not engine.socket.exists()


def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path, config_file: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from rpg_megatron.config import load_settings
from rpg_megatron.engine import process as module
module.engine_command = lambda *_, **__: [sys.executable, "-c", "import time; time.sleep(600)"]
settings = load_settings(Path({str(config_file)!r}))
folder = Path({str(tmp_path)!r})
places = {{"socket": folder / "e.sock", "log": folder / "e.log", "bridge_dir": folder}}
engine = module.EngineProcess(settings, 0, token="t", **places)
engine.start()
print(engine.pid, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        group = int(launcher.stdout.readline())
        assert wait_for(
            lambda: any(b"sleep" in Path(f"/proc/{p}/cmdline").read_bytes() for p in members(group))
        )
        time.sleep(0.3)
    finally:
        launcher.kill()
        launcher.wait()
    assert wait_for(lambda: not members(group))


def test_socket_paths_that_cannot_be_used(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings, tmp_path, "good", monkeypatch)
    engine.socket.write_text("")
    with pytest.raises(UserError, match="is no socket; move it"):
        engine.start()
    engine.socket.unlink()
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(engine.socket))
    with pytest.raises(UserError, match="left by a dead process; delete it"):
        engine.start()
    other.listen()
    with pytest.raises(UserError, match="another process listens on"):
        engine.start()
    other.close()
    engine.socket = tmp_path / ("x" * 120)
    with pytest.raises(UserError, match="longer than 107 bytes"):
        engine.start()
    assert engine.pid is None


def test_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "no log" in tail_of(log)
    log.write_bytes(b"")
    assert tail_of(log) == "(the log is empty)"
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(100_000)))
    assert tail_of(log, lines=2) == "line 99998\nline 99999"


def test_the_first_error_of_a_log_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert first_error(log) is None
    lines = [
        "(Worker pid=1) WARNING 11-21 06:03:56 [a.py:299] failed with error current limit exceeds",
        "(Worker pid=1) ERROR 11-21 06:04:45 [m.py:901] Traceback (most recent call last):",
        "(Worker pid=1) ERROR 11-21 06:04:45 [m.py:901] rust.SafetensorError: incomplete: 3",
        "(EngineCore pid=2) Exception: WorkerProc initialization failed",
        "ValueError: later",
    ]
    log.write_text("\n".join(lines))
    assert first_error(log) == "rust.SafetensorError: incomplete: 3"
    assert first_error(log, start=log.read_text().index("ValueError")) == "ValueError: later"
    log.write_text(lines[0])
    assert first_error(log) is None
