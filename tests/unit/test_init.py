"""``rpg-megatron init`` writes files that load, and overwrites nothing.

Why: the first file that a newcomer edits is this one. Not covered: training with it (docs/tutorial.md shows a
run).
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rpg_megatron.commands.init import command
from rpg_megatron.commands.init.command import write_files
from rpg_megatron.config import UserError, load_settings, read_model_shape
from rpg_megatron.data.problems import read_problems_with_counts


@pytest.mark.parametrize("task", ["math", "custom", "tools"])
def test_what_is_written_loads(tmp_path: Path, task: str) -> None:
    folder = tmp_path / "new" / "task"
    names = write_files(folder, task, None)
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    settings = load_settings(folder / "run.yaml")
    assert read_model_shape(settings.model.path).family == "qwen3"
    assert settings.device == "cpu"
    assert (settings.reward.type == "my_reward:digits") == (task == "custom")
    assert (settings.rollout.episode is not None) == (task == "tools")
    for data in (settings.data, settings.evaluation.heldout[0].data):
        problems, *_ = read_problems_with_counts(data)
        assert len(problems) >= 200


@pytest.mark.parametrize("model", [None, "Qwen/Qwen3-4B #1"])
def test_fine_tuning_loads_and_its_rows_can_be_trained(tmp_path: Path, model: str | None) -> None:
    names = write_files(tmp_path, "sft", model)
    assert names == ["run.yaml", "solutions.jsonl", "heldout.jsonl", *(["model"] if model is None else [])]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    text = (tmp_path / "run.yaml").read_text()
    assert text.startswith("# A run that works as it is")
    assert "quickstart" not in text
    settings = load_settings(tmp_path / "run.yaml")
    assert (settings.sft.data.path, settings.device) == (tmp_path / "solutions.jsonl", "cpu")
    assert settings.model.path == (tmp_path / "model" if model is None else Path(model).absolute())
    assert settings.evaluation.heldout[0].data.path == tmp_path / "heldout.jsonl"


def test_fine_tuning_passes_all_checks_of_a_run(tmp_path: Path) -> None:
    write_files(tmp_path, "sft", None)
    for name in ("sft", "train"):
        line = [sys.executable, "-m", "rpg_megatron.cli", name, "run.yaml", "--dry-run"]
        process = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert process.returncode == 0, process.stderr
    assert not (tmp_path / "runs").exists()


def test_the_reward_is_the_one_of_the_config(tmp_path: Path) -> None:
    write_files(tmp_path, "custom", None)
    spec = importlib.util.spec_from_file_location("my_reward", tmp_path / "my_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    first = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert module.digits(f"Answer: {first['answer']}", first["answer"]) == 1
    assert module.digits("no idea", first["answer"]) == -1
    assert module.digits("1880", "1888", partial=0.4) == pytest.approx(-1 + 0.4 * 3 / 4)
    assert module.digits("-12", "12") < 1


def test_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id stays one; a folder is named from the root, because the config lies elsewhere."""
    monkeypatch.chdir(tmp_path)
    assert "model" not in write_files(tmp_path / "a", "math", "Qwen/Qwen3-4B-Base")
    assert load_settings(tmp_path / "a" / "run.yaml").model.path == Path("Qwen/Qwen3-4B-Base")
    write_files(tmp_path / "b", "math", "my/model")  # no such folder: a hub id too
    for i, name in enumerate(("model", "model #1: new")):  # the second one needs quotes in YAML
        model = tmp_path / "here" / name
        model.mkdir(parents=True)
        write_files(tmp_path / f"c{i}", "math", f"here/{name}")
        assert load_settings(tmp_path / f"c{i}" / "run.yaml").model.path == model


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"already contains train.jsonl; give another folder$"):
        write_files(tmp_path, "math", None)
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose a folder that is writable"):
        write_files(tmp_path / "file" / "below", "math", None)


def test_without_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_QUICKSTART", tmp_path / "examples")
    with pytest.raises(UserError, match="from a clone with pip install -e"):
        write_files(tmp_path / "a", "math", None)
    assert not (tmp_path / "a").exists()


def test_the_command(tmp_path: Path) -> None:
    def init(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "rpg_megatron.cli", "init", *arguments]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    process = init("task one", "--task", "custom")
    assert process.returncode == 0
    assert process.stdout.splitlines()[1] == "next: cd 'task one' && rpg-megatron train run.yaml"
    refused = init("--task", "vision")
    assert refused.returncode == 2
    assert refused.stderr == "error: --task vision: must be one of math, custom, tools, sft\n"
