"""Each command line that README and users' pages print exists, and those that this machine can run do run.

Why: a user copies them first. tests/data/documented_commands.yaml says of each how it is tried: "run" as
printed, in a copy of the repository in which the quickstart has been trained, or why not. A new or changed
command fails here until it is in the table. Not covered: what commands print, and pages of evidence.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from rpg_megatron.cli import app
from rpg_megatron.config import UserError, load_settings
from tests.support.ranks import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md", "slurm/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "settings.md")
PROGRAMS = r"(?:rpg-megatron|make|python3?|pip|sbatch|srun|git|vllm|docker|apptainer|export|cd|source|bash)"
TABLE: dict[str, str] = yaml.safe_load((ROOT / "tests/data/documented_commands.yaml").read_text())
SCRIPTS = {"eval": ["eval"], "convert": ["convert"]}
"""What a script in slurm/ calls with its arguments; others train."""


def commands_of(page: str) -> Iterator[str]:
    """Command lines in the blocks of a page that are not of another language, without comments."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S):
        if language not in ("", "bash"):
            continue
        for line in re.sub(r"\\\n\s*", "", body).splitlines():
            command = re.sub(r"\s+# .*", "", line).strip()
            if re.match(rf"(?:[$] )?(?:[A-Z_]+=\S+ )*{PROGRAMS}(?: |$)", command):
                yield re.sub(r"\s+", " ", command.removeprefix("$ "))


DOCUMENTED = {page: list(commands_of(page)) for page in PAGES}


def test_each_command_is_in_the_table() -> None:
    found = {command for commands in DOCUMENTED.values() for command in commands}
    missing = "\n".join(f"{command!r}: run" for command in sorted(found - TABLE.keys()))
    assert not missing, f"add to tests/data/documented_commands.yaml, with how it is tried:\n{missing}"
    assert not TABLE.keys() - found, "no page prints these any more"


def arguments_of(command: str) -> list[str] | None:
    """Arguments of ``rpg-megatron`` in a command line, or of what a script calls with them; None: neither."""
    words = shlex.split(re.split(r" [|>&]", command)[0])
    for n, word in enumerate(words):
        if Path(word).name == "rpg-megatron":
            return words[n + 1 :]
        if word.endswith(".sbatch"):
            assert (ROOT / word).is_file(), word
            return [*SCRIPTS.get(Path(word).stem, ["train"]), *words[n + 1 :]]
    return None


OURS = {command: words for command in TABLE if (words := arguments_of(command))}


@pytest.mark.parametrize("command", OURS)
def test_its_options_and_settings_exist(command: str) -> None:
    words = [word for word in OURS[command] if not re.fullmatch(r"\[?(KEY=VALUE|[.]{3})\]?", word)]
    words = [word.strip("[]") for word in words if word != "[RUN"]
    group: Any = typer.main.get_command(app)
    while isinstance(group, click.Group) and words[0] in group.commands:
        group, words = group.commands[words[0]], words[1:]
    with group.make_context(command, words) as context:
        config, overrides = context.params.get("config"), context.params.get("overrides") or []
    keys, example = [each for each in overrides if "=" in each], "examples/quickstart.yaml"
    if config and str(config).startswith("examples/"):
        example = str(config)
    said = ""
    try:
        load_settings(ROOT / example, keys)
    except UserError as e:  # the quickstart is not the configuration that is meant
        said = str(e)
    assert "unknown key" not in said, said
    assert example != str(config) or not said


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a user has cloned, in which the quickstart has been trained."""
    place = tmp_path_factory.mktemp("workplace")
    for name in ("examples", "tools", "slurm", "benchmarks"):
        shutil.copytree(ROOT / name, place / name)
    run(place, "rpg-megatron train examples/quickstart.yaml")
    return place


def run(place: Path, command: str) -> None:
    """Run it by the shell, with this environment's programs in front."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(TABLE.get(c) == "run" for c in DOCUMENTED[page])]
)
def test_they_run_as_printed(page: str, workplace: Path) -> None:
    """In the order of the page; ``cd`` holds for the commands after it."""
    place = workplace
    for command in DOCUMENTED[page]:
        if TABLE[command] != "run":
            continue
        if command.startswith("cd "):
            place /= command[3:]
        else:
            run(place, command)
