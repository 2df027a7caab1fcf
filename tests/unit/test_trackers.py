"""A tracker gets settings, metrics and responses, under one id for all starts of a run; whatever it does, the
run continues.

Why: a tracker is the one part of a run that depends on an external server. Proved with user-defined trackers,
through the interface of the built-in ones, each in its thread: one that works, one that raises, one that
never answers and one that cannot be made, side by side; and with the real packages where they are installed
(else skipped): offline stores, and a server that accepts and never answers.
Not covered: a training run with them (docs/trackers.md).
"""

import importlib.util
import json
import multiprocessing
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.launcher.input_checks import check_custom_code, check_trackers
from rpg_megatron.launcher.run_dir import create_run
from rpg_megatron.training import metrics
from rpg_megatron.training.metrics import MetricsWriter, open_metrics
from rpg_megatron.training.trackers import client
from rpg_megatron.training.trackers.client import Trackers, exit_past_trackers
from tests.support.checks import doctor_rows
from tests.support.launcher import wait_for

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "trackers.md"

MODULE = """
import asyncio, json, os, time

class Works:
    def __init__(self, run, *, file: str = "works.jsonl"):
        self.file = run.folder / "trackers" / file
        if run.known_id() is None:
            run.keep_id(f"id-{os.getpid()}")
        self.write("start", run.name, run.known_id(), run.config["optimizer"]["lr"])

    def write(self, *what):
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\\n")

    def log(self, step, metrics, responses):
        self.write(step, metrics, responses)

    def close(self):
        self.write("close")

class Raises(Works):
    def __init__(self, run):
        super().__init__(run, file="raises.jsonl")

    def log(self, step, metrics, responses):
        if step == 1:
            raise ConnectionError("no route to host")
        self.write(step)

class Blocks:
    def __init__(self, run): ...

    def log(self, step, metrics, responses):
        time.sleep(1000)

class Fails:
    def __init__(self, run):
        raise PermissionError("no key")

class Cancelled(Works):
    def __init__(self, run):
        super().__init__(run, file="cancelled.jsonl")

    def log(self, step, metrics, responses):
        if step == 1:
            raise asyncio.CancelledError("the server has closed the stream")
        self.write(step)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    (tmp_path / "my_trackers.py").write_text(MODULE)
    (example,) = re.findall(r"```python\n# my_trackers.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "documented.py").write_text(example)
    monkeypatch.chdir(tmp_path)  # where modules are found
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    for name in ("my_trackers", "documented"):  # of an earlier test
        monkeypatch.delitem(sys.modules, name, raising=False)
    for key in client._DEFAULTS:
        monkeypatch.setenv(key, client._DEFAULTS[key])

    def settings(trackers: str, *more: str) -> Settings:
        return load_settings(QUICKSTART, [f"trackers={trackers}", f"runs={tmp_path / 'runs'}", *more])

    return settings


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_WAITS", (0.0, 0.0))
    monkeypatch.setattr(client, "_START_WAITS", (0.05,))
    monkeypatch.setattr(client, "_QUEUED", 6)
    monkeypatch.setattr(metrics, "_TRACKER_SECONDS", 300.0)  # on a busy machine


def trajectories(count: int) -> list[Trajectory]:
    prompt, tokens = np.array([36, 37], np.int32), np.arange(3, dtype=np.int32)
    numbers, mask = np.zeros(3, np.float32), np.array([True, False, True])
    rest = {"reward": 0.5, "correct": True, "answer": "2", "mask": mask}
    return [
        Trajectory(i, 0, prompt, tokens, numbers, tokens, "stop", f"1 + {i} \udcff", **rest)
        for i in range(count)
    ]


def read(folder: Path, name: str) -> list[Any]:
    file = folder / "trackers" / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


wait_until = partial(wait_for, seconds=300)


def log(trackers: Trackers, step: int) -> None:
    if step:
        trackers.add_responses(trajectories(40))
    trackers.put({"step": step, "reward/mean": step / 2, "eval/heldout/avg@2": 0.25})


def test_each_tracker_gets_its_rows_and_none_stops_another(
    make: Callable[..., Settings],
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    names = ["Works", "Raises", "Blocks", "Fails"]
    settings = make("[tensorboard, " + ", ".join(f"'my_trackers:{name}'" for name in names) + "]")
    folder = create_run(settings)
    warnings: list[str] = []
    trackers = Trackers(settings, folder, warnings.append)
    blocks = trackers._clients[2]
    for step in range(8):  # one that blocks holds one row and queues six
        log(trackers, step)
        wait_until(lambda s=step: len(read(folder, "works.jsonl")) == s + 2)
        wait_until(lambda s=step: len(read(folder, "raises.jsonl")) >= s + 1 + (s == 0))
        wait_until(lambda: blocks._given - len(blocks._waiting) >= 1)
    wait_until(lambda: len(warnings) == 2)
    monkeypatch.setattr(client, "_SILENT", 0.0)
    blocks.put({})
    dropped = trackers.metrics()["trackers/dropped"]
    assert trackers.metrics()["trackers/dropped"] == 0
    for tracker_client in trackers._clients:
        tracker_client.begin_to_close()
    for file in ("works.jsonl", "raises.jsonl"):
        wait_until(lambda file=file: read(folder, file)[-1] == ["close"])
    trackers.close(0.5)

    start, *rows, end = read(folder, "works.jsonl")
    assert start[:2] == ["start", folder.name]
    assert start[3] == settings.optimizer.lr
    assert [row[0] for row in rows] == list(range(8))
    assert rows[3][1] == {"reward/mean": 1.5, "eval/heldout/avg@2": 0.25}
    assert rows[0][2] == []
    table = rows[3][2]
    assert len(table) == 16
    assert [row["prompt_id"] for row in table] == [i * 40 // 16 for i in range(16)]
    assert (table[1]["prompt"], table[1]["response"]) == ("CD", "1 + 2 ?")
    assert end == ["close"]
    assert [row[0] for row in read(folder, "raises.jsonl")[1:-1]] == [0, *range(2, 8)]
    # Raises: step 1. Blocks: of 9 rows one was under way, six queued. Fails: two beyond its queue.
    assert dropped == 1 + 2 + 2
    by_tracker = {name: [w for w in warnings if f":{name}" in w] for name in names}
    assert by_tracker["Works"] == []
    assert "ConnectionError: no route to host; fix my_trackers:Raises" in by_tracker["Raises"][0]
    assert "no response for 0 seconds; fix my_trackers:Blocks" in by_tracker["Blocks"][0]
    assert "PermissionError: no key" in by_tracker["Fails"][0]
    assert "1 of 8 rows were not delivered" in by_tracker["Raises"][1]
    assert "9 of 9 rows were not delivered" in by_tracker["Blocks"][1]
    assert "8 of 8 rows were not delivered" in by_tracker["Fails"][1]
    assert len(warnings) == 6
    traces = capfd.readouterr().err
    assert traces.count("Traceback") == 2  # of the first problem of each
    assert "PermissionError: no key" in traces


def test_a_tracker_outlives_exceptions_that_are_no_errors(
    make: Callable[..., Settings], impatient: None
) -> None:
    settings = make("['my_trackers:Cancelled']")
    folder, warnings = create_run(settings), list[str]()
    trackers = Trackers(settings, folder, warnings.append)
    for step in range(3):
        log(trackers, step)
    wait_until(lambda: [2] in read(folder, "cancelled.jsonl"))
    assert trackers.metrics()["trackers/dropped"] == 1
    trackers.close(300.0)
    assert read(folder, "cancelled.jsonl")[1:] == [[0], [2], ["close"]]
    assert "CancelledError: the server has closed the stream" in warnings[0]
    assert "1 of 3 rows were not delivered" in warnings[1]


@pytest.mark.parametrize(
    ("kind", "seconds", "end", "code"),
    [
        ("Blocks", 0.1, "", 0),
        ("Blocks", 0.1, "sys.exit(75)", 75),
        ("Blocks", 0.1, "raise ValueError('a fault')", 1),
        ("Works", 90, "", 0),
    ],
    ids=str,
)
def test_the_exit_of_a_process_does_not_wait_for_a_tracker(
    make: Callable[..., Settings], kind: str, seconds: float, end: str, code: int
) -> None:
    """Exit handlers of its package may, though it was closed: this one waits for longer than the test."""
    folder = create_run(make(f"['my_trackers:{kind}']"))
    script = f"""
import atexit, sys, time
from pathlib import Path
from rpg_megatron.config import load_settings
from rpg_megatron.training.trackers.client import Trackers, exit_past_trackers
atexit.register(time.sleep, 1000)
folder = Path({str(folder)!r})
try:
    trackers = Trackers(load_settings(folder / "config.yaml"), folder, print)
    trackers.put({{"step": 0}})
    trackers.close({seconds})
    {end}
finally:
    exit_past_trackers()
"""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | path, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == code
    assert ("ValueError: a fault" in ended.stderr) == (code == 1)
    assert ("1 of 1 rows were not delivered" in ended.stdout) == (kind == "Blocks")


def test_a_resumed_run_has_the_same_id_and_writes_the_count(
    make: Callable[..., Settings], impatient: None
) -> None:
    """The second tracker is that of docs/trackers.md."""
    settings = make("['my_trackers:Works', {type: 'documented:Jsonl', file: jsonl}]")
    folder = create_run(settings)
    for start in range(2):
        writer = MetricsWriter(folder, board=False, trackers=Trackers(settings, folder, print))
        writer.write({"step": start, "reward/mean": 0.5})
        writer.close()
    rows = read(folder, "works.jsonl")
    first, second = (row for row in rows if row[0] == "start")
    assert first[2] == second[2] is not None
    assert [row[0] for row in rows] == ["start", 0, "close", "start", 1, "close"]
    assert read(folder, "jsonl") == [{"step": step, "reward": 0.5, "first": []} for step in (0, 1)]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 0, "reward/mean": 0.5, "trackers/dropped": 0.0}
    assert not (folder / "tensorboard").exists()


def test_tensorboard_has_a_few_responses_as_text(make: Callable[..., Settings]) -> None:
    """Read back from its files. Hostile text stays in blocks of code; long text is shortened."""
    settings = make("[tensorboard]")
    folder = create_run(settings)
    writer = open_metrics(settings, folder, None, print)
    long = replace(trajectories(1)[0], text=f"a{'x' * 9999}b", correct=False, extracted="5", finish="length")
    hostile = replace(trajectories(1)[0], text="<b>\n# one\r---\x1b[2J", prompt_id=7)
    for step, responses in enumerate([[], trajectories(40), [long, hostile]]):
        if responses:
            writer.add_responses(responses)
        writer.write({"step": step, "reward/mean": 0.5})
    writer.write({"step": 3, "reward/mean": 0.5})
    writer.close()
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in board.Tensors("responses/text_summary")}
    assert list(texts) == [1, 2]
    first, *others = texts[1].split("\n\n---\n\n")
    assert first == (
        "**reward 0.5**, correct, 2 tokens, prompt 0, sample 0\n\n"
        "prompt:\n\n    CD\n\nresponse:\n\n    1 + 0 ?\n\nanswer:\n\n    2"
    )
    assert [re.findall(r"prompt (\d+),", other) for other in others] == [["10"], ["20"], ["30"]]
    long_text, hostile_text = texts[2].split("\n\n---\n\n")
    assert "wrong, 2 tokens, truncated, " in long_text
    assert f"    a{'x' * 999} ... {'x' * 999}b\n" in long_text
    assert long_text.endswith("extracted:\n\n    5")
    assert "    <b>\n    # one\\r---\\x1b[2J\n" in hostile_text


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ("[wand]", "trackers[0].type: 'wand' is unknown; use one of tensorboard, wandb, mlflow, module:name"),
        ("[{type: wandb, projct: x}]", "unknown key 'trackers[0].projct'; did you mean"),
        ("[wandb, {type: wandb}]", "trackers has wandb twice"),
        ("[3]", "trackers[0]: must be a name such as wandb"),
        ("[{type: mlflow, uri: 'http://me:hidden@host'}]", "trackers[0].uri must not hold a password"),
        ("[{type: 'a:B', api_key: hidden}]", "trackers[0].api_key looks like a secret"),
    ],
)
def test_wrong_settings_are_one_line_and_show_no_secret(
    make: Callable[..., Settings], trackers: str, message: str
) -> None:
    with pytest.raises(UserError) as error:
        make(trackers)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "hidden" not in str(error.value)


def test_a_tracker_of_the_user_is_checked_before_the_start(make: Callable[..., Settings]) -> None:
    check_custom_code(make("['my_trackers:Works', {type: 'my_trackers:Raises'}]"))
    with pytest.raises(UserError, match=r"trackers\[0\].fil: my_trackers:Works has no setting 'fil'"):
        check_custom_code(make("[{type: 'my_trackers:Works', fil: x}]"))


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line_before_the_start(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    settings = make(f"[tensorboard, {package}]")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"trackers\[1\]: the python package {package} is not installed; "):
        check_trackers(settings, {})
    (check,) = doctor_rows(settings, "trackers")
    assert f"pip install {package}" in str(check)


def test_a_missing_key_is_told_before_the_start(make: Callable[..., Settings], monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / "netrc").chmod(0o600)
    none = {"NETRC": str(tmp_path / "missing")}
    (warning,) = check_trackers(make("[wandb]"), none)
    assert "WANDB_API_KEY" in warning
    for variables in ({"WANDB_API_KEY": "x"}, {"NETRC": str(tmp_path / "netrc")}, {"WANDB_MODE": "offline"}):
        assert check_trackers(make("[wandb]"), none | variables) == []


# -- the real packages ---------------------------------------------------------------------------------------


def log_three(folder: Path, delivered: Any) -> None:
    trackers = Trackers(load_settings(folder / "config.yaml"), folder, print)
    for step in range(3):
        log(trackers, step)
    wait_until(lambda: trackers._clients[0]._delivered == 3)
    time.sleep(3)  # wandb writes to its file once a second
    delivered.set()
    time.sleep(1000)


def run_offline(settings: Settings) -> Path:
    """Three steps; killed; a second start repeats the last one."""
    folder = create_run(settings)
    context = multiprocessing.get_context("spawn")
    delivered = context.Event()
    process = context.Process(target=log_three, args=(folder, delivered))
    process.start()
    assert delivered.wait(300)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "processes are left behind"
    warnings: list[str] = []
    second = Trackers(settings, folder, warnings.append)
    for step in (2, 3):
        log(second, step)
    second.close(120)
    assert warnings == []
    return folder


def test_wandb_offline(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    settings = make("[{type: wandb, project: math, responses: 3}]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = run_offline(settings)
    files = sorted(folder.glob("trackers/wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    number = json.loads((folder / "trackers" / "wandb.json").read_text())[""]
    steps: list[tuple[int, int | None]] = []

    def read_steps() -> int:
        steps.clear()
        for file in files:
            records = list(wandb_records(file))
            (run, *_) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
            assert (run.run_id, run.project, run.display_name) == (number, "math", folder.name)
            config = {item.key: item.value_json for item in run.config.update}
            assert json.loads(config["optimizer"])["lr"] == settings.optimizer.lr
            for record in records:
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                    assert row["reward/mean"] == row["step"] / 2
                    steps.append((row["step"], row.get("responses.nrows")))
        return len(steps)

    wait_until(lambda: read_steps() == 5)  # the package's process writes on after its end of the run
    assert steps == [(0, None), (1, 3), (2, 3), (2, 3), (3, 3)]
    tables = list(folder.glob("trackers/wandb/offline-run-*/files/media/table/responses_*.json"))
    assert json.loads(tables[0].read_text())["data"][1][:2] == ["CD", "1 + 13 ?"]


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format after seven bytes, and the package's messages."""
    from wandb.proto import wandb_internal_pb2

    data, position, message = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        message += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def test_mlflow_offline(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = make("[{type: mlflow, experiment: math, responses: 3}]")
    folder = run_offline(settings)
    store = mlflow.MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    (run,) = store.search_runs([store.get_experiment_by_name("math").experiment_id])
    assert list(json.loads((folder / "trackers" / "mlflow.json").read_text()).values()) == [run.info.run_id]
    assert run.info.run_name == folder.name
    assert run.info.status == "FINISHED"
    assert float(run.data.params["optimizer.lr"]) == settings.optimizer.lr
    history = store.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [
        *((0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5))
    ]
    assert store.get_metric_history(run.info.run_id, "eval/heldout/avg_at_2")[0].value == 0.25
    names = [item.path for item in store.list_artifacts(run.info.run_id, "responses")]
    assert names == [f"responses/step_{step:06d}.json" for step in (1, 2, 3)]
    table = json.loads(Path(store.download_artifacts(run.info.run_id, names[0])).read_text())
    assert table["data"][1][:2] == ["CD", "1 + 13 ?"]


def log_in_vain(folder: Path, told: Any) -> None:
    warnings: list[str] = []
    trackers = Trackers(load_settings(folder / "config.yaml"), folder, warnings.append)
    for step in range(3):
        log(trackers, step)
    wait_until(lambda: bool(warnings))
    trackers.close(1.0)
    told.put((warnings, [process.pid for process in psutil.Process().children(recursive=True)]))
    exit_past_trackers()


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_server_that_never_answers(make: Callable[..., Settings], monkeypatch, package: str) -> None:
    pytest.importorskip(package, reason=f"the package {package} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for key, value in {
            "WANDB_BASE_URL": address,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_INIT_TIMEOUT": "3",
            "MLFLOW_TRACKING_URI": address,
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        }.items():
            monkeypatch.setenv(key, value)
        settings = make(f"[{package}]")
        folder = create_run(settings)
        context = multiprocessing.get_context("spawn")
        told = context.SimpleQueue()
        process = context.Process(target=log_in_vain, args=(folder, told))
        process.start()
        warnings, family = told.get()
        process.join(60)
        assert process.exitcode == 0
    assert len(warnings) == 2
    assert warnings[0].startswith(f"trackers: {package}: ")
    assert "Training continues" in warnings[0]
    assert "3 of 3 rows were not delivered" in warnings[1]
    wait_until(lambda: not any(map(psutil.pid_exists, family)))
    assert "0" * 40 not in "".join(f.read_text() for f in folder.rglob("*") if f.suffix in (".log", ".yaml"))
