"""The command line: a user error is one line and exit code 2, a bug of ours keeps its traceback.

Why: the user needs the fix, and a bug report needs the traceback. Not covered: what the commands do
(test_launcher, tests/integration).
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import rpg_megatron
from rpg_megatron import cli
from rpg_megatron.commands import train

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rpg_megatron.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_help_and_version():
    process = run("--help")
    assert process.returncode == 0
    assert "train" in process.stdout
    assert run("--version").stdout == f"rpg-megatron {rpg_megatron.__version__}\n"


def test_the_shell_can_complete_commands_and_options():
    words = {
        "_RPG_MEGATRON_COMPLETE": "complete_bash",
        "COMP_WORDS": "rpg-megatron train --fr",
        "COMP_CWORD": "2",
    }
    code = "from rpg_megatron.cli import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True, check=False
    )
    assert process.stdout.split() == ["--fresh", "--from"], process.stderr


@pytest.mark.parametrize("arguments", [("config",), ("plan",)])
def test_output_that_finds_no_room_is_one_line(config_file: Path, arguments: tuple[str, ...]):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rpg_megatron.cli", *arguments, str(config_file)]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr == "error: standard output: No space left on device; free space there\n"


@pytest.mark.parametrize("streams", ["| true", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_readers_ends_quietly(config_file: Path, streams: str):
    command = f"{sys.executable} -m rpg_megatron.cli config {config_file} --explain {streams}"
    process = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("imported", ["typer", "pydantic"])
def test_ctrl_c_while_the_command_line_is_imported_is_one_line(config_file: Path, imported: str):
    code = f"""
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {imported!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from rpg_megatron.cli import main
main(["config", {str(config_file)!r}])
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "stopped: Ctrl-C\n")


COMMANDS = [
    ("train", "c.yaml"),
    ("sft", "c.yaml"),
    ("eval", "m"),
    ("env", "check", "f"),
    ("study", "s.yaml"),
    ("launch", "c.yaml"),
    ("audit", "r"),
    ("replay", "r", "--step=1"),
    ("config", "c.yaml"),
    ("init",),
    ("plan", "c.yaml"),
    ("doctor",),
    ("grade", "f.jsonl"),
    ("sample", "r"),
    ("report", "r"),
    ("convert", "hf-to-megatron", "--hf=m", "--out=o"),
    ("convert", "megatron-to-hf", "--megatron=m", "--out=o"),
    ("convert", "inspect", "m"),
]
"""Every command, with the arguments that it requires."""


def test_no_command_is_missing_here():
    def names(group: Any) -> list[list[str]]:
        return [
            [name, *rest]
            for name, command in group.commands.items()
            for rest in (names(command) if hasattr(command, "commands") else [[]])
        ]

    commands = names(typer.main.get_command(cli.app))
    assert sorted(commands) == sorted(
        [*words[: 2 if words[0] in ("convert", "env") else 1]] for words in COMMANDS
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_ctrl_c_while_a_command_is_imported_is_one_line(arguments: tuple[str, ...]):
    """Also if a package turns the interrupt into an error of its own, as pydantic does."""
    code = f"""
import signal, sys
from rpg_megatron.cli import main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("rpg_megatron."):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise RuntimeError("turned into another error") from None
sys.meta_path.insert(0, Finder())
main({list(arguments)!r})
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "stopped: Ctrl-C\n")


def test_ctrl_c_says_that_it_stopped(monkeypatch, capsys, config_file: Path):
    """Also where a command is still importing what it needs, before any handler of its own."""
    monkeypatch.setattr("rpg_megatron.config.load_settings", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["config", str(config_file)])
    assert (exit_info.value.code, capsys.readouterr().err) == (130, "stopped: Ctrl-C\n")


def test_config_prints_settings_that_can_be_used_again(config_file: Path):
    process = run("config", str(config_file), "optimizer.lr=2e-5", "objective.clip.high=0.3")
    assert (process.returncode, process.stderr) == (0, "")
    printed = yaml.safe_load(process.stdout)
    assert printed["optimizer"]["lr"] == 2e-5
    assert printed["objective"]["clip"]["high"] == 0.3
    assert printed["data"]["path"] == str(config_file.parent / "train.jsonl")


@pytest.mark.parametrize("arguments", [(), ("train",), ("tran", "x"), ("train", "--nope", "x")])
def test_wrong_usage_is_explained(arguments: tuple[str, ...]):
    process = run(*arguments)
    assert process.returncode == 2
    assert "Usage" in process.stdout + process.stderr
    assert "Traceback" not in process.stderr


def test_ctrl_c_before_a_command_begins_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys):
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as exit_info:
        cli.main([])
    assert exit_info.value.code == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("option", ["--resume", "--continue", "--resume-from-checkpoint"])
def test_resume_is_what_the_same_command_does(
    config_file: Path, capsys: pytest.CaptureFixture[str], command: str, option: str
):
    with pytest.raises(SystemExit):
        cli.main([command, str(config_file), option, "runs/tiny-001"])
    error = capsys.readouterr().err
    assert error.startswith(
        "error: --resume: leave it out; the same command resumes the newest unfinished run"
    )
    assert "--fresh" not in error


def test_a_bug_keeps_its_traceback(config_file: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **options: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(train, "train", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main(["train", str(config_file)])


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "c.yaml"),
        ("replay", "runs/x", "--step", "1"),
        ("grade", "x.jsonl"),
        ("sample", "runs/x"),
        ("report", "runs/x"),
    ],
)
def test_what_runs_on_one_node_is_done_once(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    for key, value in (step | {"SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "a,b"}).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*arguments])
    assert exit_info.value.code == 0
    assert capsys.readouterr().err == f"node 1 (b): {arguments[0]} runs on node 0 (a) only\n"
    monkeypatch.setenv("SLURM_NODEID", "0")
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*arguments])
    assert exit_info.value.code == 2  # it looked for what it was given


def test_options_have_a_short_spelling_too(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for tensor, pipeline in (("--tensor", "--pipeline"), ("--tp", "--pp")):
        with pytest.raises(SystemExit):
            cli.main(["eval", "no-model", tensor, "2", "--suite", "aime24"])
        with pytest.raises(SystemExit):
            cli.main(["convert", "hf-to-megatron", "--hf", "m", "--out", "o", pipeline, "2"])
        answers.append(capsys.readouterr().err)
    assert "no-model does not exist" in answers[0]
    assert "'--pipeline' is gone" in answers[0]
    assert answers[0] == answers[1]


def test_a_setting_written_as_an_option_is_explained(config_file: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["train", str(config_file), "--training.steps=5"])
    assert exit_info.value.code == 2
    assert "No such option: --training.steps; write training.steps=..." in capsys.readouterr().err
