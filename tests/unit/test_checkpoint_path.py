"""Which checkpoint a folder is, for convert, inspect, eval and ``train --from``.

Why: people name what they see, a run, a step, the ``model`` in it or the folder above; a command must find
the weights and their configuration in all of these, and say what to give instead for all others. The folder
may come from somebody else: no link of it may lead to a private file, and no code that it names may be
imported. Not covered: the conversion (integration/test_convert_tools), whole resumes (test_resume_rules).
"""

from pathlib import Path

import pytest

from rpg_megatron.checkpoints.checkpoint_path import find_model_files, kind_of, open_step
from rpg_megatron.checkpoints.run_folder import step_folder
from rpg_megatron.commands.convert.command import open_hf, open_megatron
from rpg_megatron.commands.convert.inspect import inspect_checkpoint
from rpg_megatron.commands.eval.settings import EvalRequest, find_model, make_request
from rpg_megatron.config import UserError
from tests.support.run_checkpoints import write_step
from tests.support.tiny_models import write_byte_model


@pytest.fixture
def run(tmp_path: Path, checkpoint: Path) -> Path:
    """A run with steps 2 and 4, and step 6 that was never completed."""
    run = tmp_path / "runs" / "r-001"
    for step in (2, 4, 6):
        write_step(run, step, checkpoint)
    (step_folder(run, 6) / "manifest.json").unlink()
    (run / "config.yaml").write_text("name: r\n")
    return run


def test_a_run_a_step_and_its_model_are_the_same_checkpoint(run: Path, checkpoint: Path) -> None:
    newest, older = step_folder(run, 4), step_folder(run, 2)
    for path, folder in ((run, newest), (newest, newest), (newest / "model", newest), (older, older)):
        source = open_megatron(path)
        assert (source.folder, source.whole, source.config) == (folder / "model", folder, checkpoint)
        assert set(source.files) == {"model/metadata.json"}, "what is not converted is not read"
        assert source.dtype == "float32"
        assert str(checkpoint) in str(source), "the user sees what is copied"
        report = inspect_checkpoint(path)  # no tensors, so damaged
        assert (report.folder, report.facts["dtype"]) == (str(folder), "float32")
        assert report.model is not None


def test_every_file_of_a_step_is_compared_with_its_manifest(run: Path) -> None:
    step = step_folder(run, 4)
    (step / "model" / "metadata.json").write_text("[]")
    (step / "rng.pt").write_bytes(b"x")
    problems = inspect_checkpoint(step).problems
    assert "model/metadata.json does not have the contents that were written" in problems
    assert "rng.pt has 1 bytes, not 0" in problems


def test_a_missing_model_is_taken_from_an_export_or_an_option(run: Path, checkpoint: Path) -> None:
    step = write_step(run, 8, run / "nowhere")
    with pytest.raises(
        UserError, match=r"model.path is .*nowhere, which has no config.json here; give the model's"
    ):
        open_megatron(step)
    assert open_megatron(step, config=checkpoint).config == checkpoint
    export = write_byte_model(run / "hf" / "step_000002")
    assert find_model_files(open_step(run, "DIR")) == (export, run)
    (step / "config.yaml").write_text("model: 7\n")
    with pytest.raises(UserError, match=r"config\.yaml: has no model\.path .*--config DIR"):
        find_model_files(open_step(step, "DIR"))


def test_what_is_evaluated(run: Path, checkpoint: Path) -> None:
    """The newest export or, without one, a checkpoint, which is converted."""
    model = find_model(run)
    assert (model.path, model.run, model.config) == (step_folder(run, 4), run, checkpoint)
    assert model.source is not None
    assert model.label == "r-001-step_000004"
    export = write_byte_model(run / "hf" / "step_000002")
    assert find_model(run).path == export
    for path, expected in ((step_folder(run, 2), export), (step_folder(run, 4), step_folder(run, 4))):
        assert (find_model(path).path, find_model(path).run) == (expected, run)
    copied = run.parents[1] / "copied" / "step_000004"
    copied.parent.mkdir()
    step_folder(run, 4).rename(copied)
    assert (find_model(copied).run, find_model(copied).config) == (None, checkpoint)
    settings, _ = make_request(EvalRequest(copied, files=[str(run / "x.jsonl")], overrides=["device=cpu"]))
    assert (settings.model.path, settings.reward.type) == (copied, "auto"), "its reward function is not used"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere does not exist; give the folder of a checkpoint or run, or the name"),
        ("runs/r-001/config.yaml", "is a file"),
        ("runs", "holds runs; give one of them, such as .*r-001"),
        ("runs/r-001/checkpoints", "holds the checkpoints of a run; give one of them, such as .*step_000006"),
        (
            "runs/r-001/checkpoints/step_000006",
            "not a complete checkpoint .*manifest.json is missing.*step_000004",
        ),
        ("above", "holds Hugging Face checkpoints; give one of them, such as .*above/model"),
        ("empty", "has no config.json, and is not a Megatron checkpoint, a run or a checkpoint of a run"),
        ("adapter", "is an adapter without its model; give a merged checkpoint"),
        ("new", r"the run .*new has no complete checkpoint in checkpoints/ yet"),
    ],
)
def test_each_other_folder_is_one_message_with_what_to_give(
    run: Path, tmp_path: Path, checkpoint: Path, name: str, message: str
) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above" / "model").symlink_to(checkpoint)
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    for option, command in (
        ("--megatron", open_megatron),
        ("MODEL", find_model),
        ("DIR", inspect_checkpoint),
    ):
        with pytest.raises(UserError, match=f"{option}: .*{message}") as error:
            command(tmp_path / name)
        assert "\n" not in str(error.value)


def test_the_other_format_is_named(run: Path, checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"--megatron: .* is a Hugging Face checkpoint already"):
        open_megatron(checkpoint)
    for path in (run, step_folder(run, 2)):
        with pytest.raises(UserError, match=r"--hf: .* Megatron checkpoint; convert it with megatron-to-hf"):
            open_hf(path)


@pytest.mark.parametrize(
    "name", ["model", "model/metadata.json", "model/more", "config.yaml", "manifest.json", "state.json"]
)
def test_no_link_of_a_step_leads_out_of_it(run: Path, tmp_path: Path, name: str) -> None:
    file = step_folder(run, 4) / name
    if not file.exists():
        file.touch()  # not in the manifest
    file.rename(tmp_path / "private")
    file.symlink_to(tmp_path / "private")
    for path in (run, step_folder(run, 4)):
        with pytest.raises(UserError, match=r"leads to .*private.*, outside "):
            open_megatron(path)


def test_no_link_of_a_run_leads_out_of_it(run: Path, tmp_path: Path, checkpoint: Path) -> None:
    step_folder(run, 4).rename(tmp_path / "private")
    step_folder(run, 4).symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match=r"leads to .*private.*, outside "):
        open_megatron(run)
    assert open_megatron(step_folder(run, 4)).files, "which the user has named"

    step = write_step(run, 8, run / "nowhere")
    (run / "hf").mkdir()
    (run / "hf" / "step_000002").symlink_to(checkpoint)
    with pytest.raises(UserError, match=r"leads to .*, outside .*r-001"):
        open_megatron(step)


def test_kinds(run: Path, tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "metadata.json").write_text("{}")
    paths = (checkpoint, tmp_path / "release", step_folder(run, 2) / "model", run)
    assert [kind_of(path, "DIR") for path in paths] == ["hf", "megatron", "step", "run"]
