"""Code that takes over the process that reads foreign input can reach nothing; how it ends is one message.

Why: parsers of foreign files have faults, and a file may use one to run code. Here that code is planted: it
tries some fifty ways to write, connect, signal and read. Not covered: faults of the kernel, aarch64's table
of system calls, and kernels that have only one of the two means (simulated).
"""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rpg_megatron.checkpoints import plain_loading
from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data import chat_template, foreign_rollouts, rows
from rpg_megatron.data.foreign_rollouts import iter_foreign_rollouts
from rpg_megatron.data.problems import read_problems
from rpg_megatron.system import foreign_input, sandbox
from rpg_megatron.system.foreign_input import ForeignInputError, plain_value, read_foreign

READERS = "tests.support.foreign_readers"


def read(reader: str, files: list[Any] | None = None, argument: Any = None, **options: Any) -> list[Any]:
    return list(read_foreign(f"{READERS}:{reader}", files or [], argument, **options))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file that an attacker would like to change."""
    file = tmp_path / "target"
    file.write_text("content")
    file.chmod(0o600)
    return file


def test_a_reader_gets_its_files_and_argument(target: Path) -> None:
    argument = {"a": [1, 2.5, None, "é", b"x"]}
    with target.open("rb") as file:
        assert read("echo", [file, file], argument) == [argument, b"content", b""]


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user's."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        yield process


def targets(target: Path, victim: int, **more: Any) -> dict[str, Any]:
    names = {"file": str(target), "folder": str(target.parent), "unix": "", "port": 1, "udp": 1}
    return names | {"parent": victim} | more


@pytest.mark.skipif("seccomp" not in sandbox.means(), reason="this kernel has no seccomp")
def test_planted_code_can_reach_nothing(target: Path, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    udp = socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    signals: list[int] = []
    before_handler = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    limits = (
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    before = sorted(tmp_path.iterdir()), target.stat()
    with socket.create_server(("127.0.0.1", 0)) as tcp, udp, listener, target.open("rb") as file:
        ports = {"port": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
        (reached,) = read("attack", [file], targets(target, os.getpid(), unix=str(tmp_path / "s"), **ports))
    signal.signal(signal.SIGUSR1, before_handler)
    assert reached == {}
    assert signals == []
    after = (
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    assert after == limits
    assert (sorted(tmp_path.iterdir()), target.stat()) == before
    assert target.read_text() == "content"


@pytest.mark.parametrize("only", ["seccomp", "Landlock"])
def test_each_means_alone_protects_files(
    target: Path, tmp_path: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, only: str
) -> None:
    if not any(only in means for means in sandbox.means()):
        pytest.skip(f"this kernel has no {only}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    disabled = "_landlock_version" if only == "seccomp" else "_filter_available"
    (tmp_path / "half_reader.py").write_text(
        "from rpg_megatron.system import sandbox\n"
        f"from {READERS} import attack\n"
        f"sandbox.{disabled} = lambda: 0\n"
    )
    with target.open("rb") as file:
        (reached,) = read_foreign("half_reader:attack", [file], targets(target, victim.pid))
    if only == "seccomp":
        assert reached == {}
    assert not reached.keys() & FILES
    assert "signal the parent" not in reached
    assert target.read_text() == "content"
    assert victim.poll() is None


FILES = {
    *(
        "read a file",
        "write a file",
        "append",
        "create",
        "create in /tmp",
        "create in shared memory",
        "truncate",
    ),
    *("truncate what is open", "write to what is open", "map and write", "open again to write", "remove"),
    *("rename", "link", "symlink", "mkdir", "list", "connect", "listen"),
}
"""Attempts that each of the two means stops."""


def test_the_attempts_succeed_without_a_sandbox(target: Path, victim: subprocess.Popen[bytes]) -> None:
    """Otherwise the tests above would prove nothing. Some need rights that a user may not have."""
    code = "import sys; from tests.support.foreign_readers import attack; "
    code += "print(*next(attack([open(sys.argv[1], 'rb')], eval(sys.argv[2]))), sep=',')"
    command = [sys.executable, "-c", code, str(target), repr(targets(target, victim.pid))]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    expected = {
        "read a file",
        "write a file",
        "append",
        "create",
        "create in /tmp",
        "create in shared memory",
    }
    expected |= {
        "truncate",
        "open again to write",
        "mkdir",
        "chmod",
        "fork",
        "thread",
        "execute",
        "listen",
        "list",
    }
    expected |= {"signal the parent", "memory file", "socket pair", "leave the limits"}
    assert expected <= set(process.stdout.strip().split(",")), process.stderr
    assert victim.wait(60) == -signal.SIGUSR1


@pytest.mark.skipif("seccomp" not in sandbox.means(), reason="this kernel has no seccomp")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_only_listed_system_calls_are_let_through() -> None:
    listed = [numbers[0] for numbers in sandbox._ALLOWED.values()]
    unfiltered = [335, 336]  # uretprobe and uprobe: kernels let them pass, and they only end the process
    assert read("call_all", argument=[*listed, *unfiltered]) == [[]]


@pytest.mark.parametrize(
    ("misbehaviour", "message"),
    [
        ("segfault", "its reader ended: SIGSEGV"),
        ("memory", "cannot be read .more memory than allowed"),
        ("hang", "not read after 1 s"),
        ("flood", "its values are larger than 64 MiB"),
        ("garbage", "its values have another form"),
        ("deep", "its values have another form"),
        ("no text", "its values have another form"),
        ("long text", "its values have another form"),
        ("close", "its reader ended: it closed its pipe"),
        ("exit", "its reader ended: exit code 3"),
        ("refuse", "^it is$"),
        ("fail", "cannot be read .KeyError: 'x'"),
    ],
)
def test_every_end_is_one_message(misbehaviour: str, message: str) -> None:
    seconds = 1.0 if misbehaviour == "hang" else 60.0
    with pytest.raises(ForeignInputError, match=message):
        read("misbehave", [], misbehaviour, seconds=seconds)


def test_an_argument_that_is_not_unicode_is_one_message() -> None:
    with pytest.raises(ForeignInputError, match="text that is not Unicode"):
        read("echo", [], "a template with \ud800")


def test_values_of_another_type_are_refused() -> None:
    with pytest.raises(ForeignInputError, match="its values have another form"):
        read("echo", [], {"a": 1}, kind=list[int])


def test_no_more_values_than_asked_for() -> None:
    with pytest.raises(ForeignInputError, match="more values than it should"):
        read("repeat", [], 1, values=3)


@pytest.mark.parametrize(
    "value", [{"a": [{(1, 2): 3}]}, {b"a": 1}, [{None: 1}], [msgspec.msgpack.Ext(9, b"x")]]
)
def test_keys_that_may_be_chosen_to_collide_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected|another type"):
        plain_value(msgspec.Raw(msgspec.msgpack.encode(value)))
    good = {"a": [{"b": None, "c": {3: 1.5}}, b"x" * 70_000, ["é"] * 20, -1, 2**63], "d": {}, "e": True}
    assert plain_value(msgspec.Raw(msgspec.msgpack.encode(good))) == good


def read_rows(folder: Path) -> None:
    file = folder / "d.parquet"
    file.write_bytes(b"x")
    read_problems(DataSettings(path=file, malformed="skip"))


def read_rollouts(folder: Path) -> None:
    for number in range(2):
        (folder / f"step_00000{number}.parquet").write_bytes(b"x")
    for _, rollout in iter_foreign_rollouts(sorted(folder.glob("step_*")), folder):
        if isinstance(rollout, UserError):
            raise rollout


def render(_: Path) -> None:
    list(chat_template.render_chats("", {}, [[{"role": "user", "content": "1+1"}]]))


def locate(folder: Path) -> None:
    (folder / "x").write_bytes(b"x")
    with (folder / "x").open("rb") as file:
        list(plain_loading._locate([file], [(0, 0, 1), (0, 0, 1)]))


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (read_rows, (0, 0, []), "a part without rows"),
        (read_rows, (0, 0, [{"prompt": {(1, 2): 3}}]), "got `array` - at `key`"),
        (read_rows, (0, 0, [""]), "holds more than"),
        (read_rollouts, (0, b"", None), "its steps are in another order"),
        (read_rollouts, (0, b"x", None), "its steps are in another order"),
        (read_rollouts, (1 << 40, b"", "why"), "its steps are in another order"),
        (render, [], "more values than it should"),
        (render, [("", "")] * 2, "not as many as the chats"),
        (locate, [], "more values than it should"),
    ],
)
def test_a_hijacked_process_cannot_keep_its_parent_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], None], value: Any, message: str
) -> None:
    """It sends the same value for ever."""

    def taken_over(
        _: str, files: list[Any], __: Any = None, kind: Any = Any, **options: Any
    ) -> Iterator[Any]:
        return read_foreign(f"{READERS}:repeat", files, value, kind, **options)

    for module in (foreign_input, chat_template, foreign_rollouts, plain_loading):
        monkeypatch.setattr(module, "read_foreign", taken_over)
    monkeypatch.setattr(rows, "_MIN_TEXT_LIMIT", 10_000)
    with pytest.raises((UserError, ValueError, ForeignInputError), match=message):
        read(tmp_path)


def test_a_reader_gets_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RPG_TOKEN", "0123abc")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "environment_reader.py").write_text(
        "import os\ndef read(files, argument):\n    yield list(os.environ.items())\n"
    )
    (variables,) = read_foreign("environment_reader:read", [])
    assert "0123abc" not in str(variables)
    assert {name for name, _ in variables} <= {
        *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_DEFAULT_MEMORY_POOL", "JE_ARROW_MALLOC_CONF"),
    }


def test_a_warning_to_all_processes_does_not_end_a_reader(target: Path, monkeypatch) -> None:
    """A scheduler sends it at any moment, also before the reader's first line has run."""
    start = subprocess.Popen

    def warned(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(process.pid, number)
        return process

    monkeypatch.setattr(subprocess, "Popen", warned)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with target.open("rb") as file:
        assert read("echo", [file], 1) == [1, b"content"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_reader_ends_with_the_generator() -> None:
    values = read_foreign(f"{READERS}:misbehave", [], "hang", seconds=60.0)
    values.close()  # not started: nothing runs
    before = _children()  # of other tests in this process
    values = read_foreign(f"{READERS}:echo", [], "x")
    assert next(values) == "x"
    (child,) = _children() - before
    values.close()  # returns when the child has been waited for
    assert child not in _children()


def test_a_reader_has_limits_for_as_long_as_it_lives() -> None:
    before = _children()
    values = read_foreign(f"{READERS}:stay", [], memory=1 << 30)
    assert next(values) == "ready"
    (child,) = _children() - before
    lines = Path(f"/proc/{child}/limits").read_text().splitlines()[1:]
    limits = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    values.close()
    assert limits["Max core file size"] == limits["Max file size"] == ["0", "0"]
    soft, hard = map(int, limits["Max address space"])
    assert 1 << 30 < soft == hard < 3 << 30


ORPHAN = f"""
import os, time
from rpg_megatron.system.foreign_input import read_foreign
values = read_foreign("{READERS}:stay", [])
next(values)
print(open(f"/proc/self/task/{{os.getpid()}}/children").read(), flush=True)
time.sleep(600)
"""


def test_a_reader_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    with open(child, "rb") as ended:
        assert select.select([ended], [], [], 60.0)[0], "it goes on reading"


def test_a_reader_whose_parent_has_already_ended_reads_nothing() -> None:
    command = [sys.executable, "-m", "rpg_megatron.system.foreign_input", f"{READERS}:echo"]
    for parent, code in ((os.getpid(), 0), (1, 1)):
        options = {"input": b"\xa1x", "capture_output": True, "timeout": 60}
        process = subprocess.run([*command, str(parent), str(1 << 30)], check=False, **options)
        assert (process.returncode, b"x" in process.stdout) == (code, code == 0), process.stderr


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
