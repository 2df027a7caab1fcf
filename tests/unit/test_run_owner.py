"""Commands that run what a run's settings name refuse a run that another user owns.

Why: ``sample --live RUN`` of a colleague's run executed ``data.source: {type: subprocess:run}`` as the one
who looked at it. Each command is started as a user starts it. Not covered: modes (a file that all may write),
and configs that the user names (they are the user's choice).
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rpg_megatron import cli
from rpg_megatron.config import UserError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")

OTHER = 65534
COMMANDS = (
    ("sample", "RUN", "--live"),
    ("eval", "RUN"),
    ("eval", "RUN/hf/step_000001"),
    ("audit", "RUN"),
    ("replay", "RUN", "--step", "1"),
    ("grade", "RUN/rollouts/step_000001.parquet", "--reward", "my_code:reward"),
)


@pytest.fixture
def run(config_file: Path, checkpoint: Path, tmp_path: Path) -> Path:
    """A run whose settings name code that leaves a file."""
    folder = tmp_path / "runs" / "tiny-001"
    shutil.copytree(checkpoint, folder / "hf" / "step_000001")
    (folder / "rollouts").mkdir()
    settings = yaml.safe_load(config_file.read_text())
    settings["model"]["path"] = str(folder / "hf" / "step_000001")
    settings["data"] = {"source": {"type": "subprocess:run", "args": ["touch", str(tmp_path / "ran")]}}
    settings.pop("evaluation", None)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def message_of(command: Sequence[str], run: Path) -> str:
    error = CliRunner().invoke(cli.app, [part.replace("RUN", str(run)) for part in command]).exception
    return str(error) if isinstance(error, UserError) else f"no refusal: {error!r}"


def chown_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, OTHER, OTHER)


@pytest.mark.parametrize("what", ["its folder", "its settings", "a link", "all, in a folder of theirs"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_code_of_another_users_run_is_not_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Sequence[str], what: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "my_code.py").write_text("def reward(response, answer, prompt):\n    return 1.0\n")
    given, named = run, "config.yaml"
    if what == "its folder":
        os.chown(run, OTHER, OTHER)
        named = run.name
    elif what == "its settings":
        os.chown(run / "config.yaml", OTHER, OTHER)
    elif what == "a link":
        (run / "config.yaml").rename(tmp_path / "theirs.yaml")
        (run / "config.yaml").symlink_to(tmp_path / "theirs.yaml")
        os.chown(tmp_path / "theirs.yaml", OTHER, OTHER)
    else:
        chown_all(run.parent)
        given, named = tmp_path / "mine" / "tiny-001", "tiny-001"
        given.parent.mkdir()
        given.symlink_to(run)
    (given / "rollouts" / "step_000001.parquet").touch()
    message = message_of(command, given)
    assert f"{named} belongs to another user (uid {OTHER}), and this command would run the code" in message
    assert "give a copy of the run" in message
    assert not (tmp_path / "ran").exists()


def test_settings_of_earlier_steps_count(run: Path) -> None:
    shutil.copyfile(run / "config.yaml", run / "config_until_000001.yaml")
    os.chown(run / "config_until_000001.yaml", OTHER, OTHER)
    (run / "metrics.jsonl").write_text('{"step": 1, "policy/skipped_updates": 0}\n')
    message = message_of(("replay", "RUN", "--step", "1"), run)
    assert "belongs to another user" in message or "rollouts of step" in message


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] in ("sample", "audit")], ids=" ".join)
def test_ones_own_copy_is_used(run: Path, tmp_path: Path, command: Sequence[str]) -> None:
    chown_all(run)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert "another user" not in message_of(command, copy)
