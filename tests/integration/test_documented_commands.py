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

import pytest
import typer
import yaml

from rpg_megatron.cli import app
from rpg_megatron.config import UserError, load_settings
from tests.support.ranks import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md", "slurm/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "settings.md")
PROGRAMS = "rpg-megatron make python python3.12 pip sbatch srun git hf curl vllm docker enroot apptainer"
PROGRAMS += " export cd source bash"
STARTS = re.compile(
    rf"(until |\w+=\$\()?([A-Z_]+=\S+ )*([\w.-]+/)*({'|'.join(map(re.escape, PROGRAMS.split()))})( |$)"
)
TEXT = (ROOT / "tests/data/documented_commands.yaml").read_text()
TABLE: dict[str, str] = yaml.safe_load(TEXT)
SCRIPTS = {
    "eval": ["eval"],
    "convert": ["convert"],
    "hf_to_megatron": ["convert", "hf-to-megatron"],
    "megatron_to_hf": ["convert", "megatron-to-hf"],
    "inspect_checkpoint": ["convert", "inspect"],
}
"""What a script in slurm/ or tools/ calls with its arguments; others train."""


def commands_of(page: str) -> Iterator[str]:
    """Command lines in the blocks of a page that are not of another language, without comments."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S):
        if language not in ("", "bash"):
            continue
        for line in re.sub(r"\\\n\s*", "", body).splitlines():
            command = re.sub(r"\s+# .*", "", line).strip()
            command = re.sub(r"\s+", " ", command.removeprefix("$ "))
            if STARTS.match(command):
                yield command


DOCUMENTED = {page: list(commands_of(page)) for page in PAGES}


def test_each_command_is_in_the_table() -> None:
    found = {command for commands in DOCUMENTED.values() for command in commands}
    missing = "\n".join(f"{command!r}: run" for command in sorted(found - TABLE.keys()))
    assert not missing, f"add to tests/data/documented_commands.yaml, with how it is tried:\n{missing}"
    assert not TABLE.keys() - found, "no page prints these any more"
    assert len(re.findall("""^["']""", TEXT, re.M)) == len(TABLE), "a command is in the table twice"


def arguments_of(command: str) -> list[str] | None:
    """Arguments of ``rpg-megatron`` in a command line, or of what a script calls with them; None: neither."""
    words = shlex.split(re.split(r"; | [|>&]", re.sub(r"^\w+=\$\((.*)\)$", r"\1", command))[0])
    if words[0] == "docker":  # its image has our name
        return None
    for n, word in enumerate(words):
        if re.match(r"[A-Z_]+=", word):
            continue
        if Path(word).name == "rpg-megatron":
            return words[n + 1 :]
        if word.endswith(".sbatch") or word.startswith("tools/"):
            assert (ROOT / word).is_file(), word
            return [*SCRIPTS.get(Path(word).stem, ["train"]), *words[n + 1 :]]
    return None


OURS = {command: words for command in TABLE if (words := arguments_of(command))}


def check(command: str) -> None:
    words = [
        word for word in arguments_of(command) or [] if not re.fullmatch(r"\[?(KEY=VALUE|[.]{3})\]?", word)
    ]
    words = [re.sub("^X$", "1", word.strip("[]")) for word in words if word != "[RUN"]
    group: Any = typer.main.get_command(app)
    while commands := getattr(group, "commands", None):  # not by its class: typer has a copy of click
        assert set(words[:1]) & commands.keys(), f"no command {words[:1]}"
        group, words = commands[words[0]], words[1:]
    with group.make_context(command, words) as context:
        config, overrides = context.params.get("config"), context.params.get("overrides") or []
    keys, example = [each for each in overrides if "=" in each], "examples/quickstart.yaml"
    if TABLE.get(command) in ("the user's reward", "a mistake on purpose"):  # settings of a reward of theirs
        keys = [each for each in keys if not each.startswith("reward.")]
    if config and str(config).startswith("examples/"):
        example = str(config)
    said = ""
    try:
        load_settings(ROOT / example, keys)
    except UserError as e:  # the quickstart is not the configuration that is meant
        said = str(e)
    assert "unknown key" not in said, said
    assert example != str(config) or not said


@pytest.mark.parametrize("command", OURS)
def test_its_options_and_settings_exist(command: str) -> None:
    check(command)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rpg-megatron trian examples/quickstart.yaml", "no command"),
        ("rpg-megatron plan examples/quickstart.yaml --sweeep", "No such option"),
        ("python tools/hf_to_megatron.py --hff DIR --out DIR", "No such option"),
        ("sbatch --nodes=2 slurm/eval.sbatch mine --suit aime24", "No such option"),
        ("sbatch slurm/train_single_node.sbatch config.yaml optimizer.lrr=1", "unknown key 'optimizer.lrr'"),
        ("rpg-megatron train examples/quickstart.yaml objective.type=x", "objective.type"),
    ],
)
def test_a_mistake_is_found(command: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        check(command)


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
    command = command.replace(" /tmp/", f" {place}/")  # an output that exists is refused the second time
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
