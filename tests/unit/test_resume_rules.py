"""Which run a command resumes, which settings may have changed by then, and which checkpoints are kept.

Why: continuing the wrong run, or with another learning rate, wastes days of work without a sign. Folders are
made by hand here; their contents are real in tests/integration and tests/distributed.
"""

import errno
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.checkpoints.megatron_folder import CheckpointMetadata, write_manifest
from rpg_megatron.checkpoints.run_folder import (
    FORMAT,
    list_steps,
    part_folder,
    publish,
    remove_old,
    remove_parts,
    step_folder,
)
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.data.rollout_files import write_rollouts
from rpg_megatron.launcher import resume
from rpg_megatron.launcher.progress import append_to_log
from rpg_megatron.launcher.resume import OpenRun, open_run
from rpg_megatron.launcher.run_dir import CONFIG, LOCK, hold_folder, settings_file


def make_settings(folder: Path, **sections: dict) -> Settings:
    plain = {"name": "r", "runs": folder, "model": {"path": "/m"}, "data": {"path": "/d"}}
    return Settings.model_validate(plain | sections)


def add_checkpoint(run: OpenRun, step: int, metrics_bytes: int = 0, **fields: Any) -> Path:
    folder = step_folder(run.folder, step)
    part = part_folder(folder)
    part.mkdir(parents=True)
    stream = {"seed": 0, "taken": [step], "weights": [1.0], "prompts": ""}
    state = {"format": FORMAT, "step": step, "metrics_bytes": metrics_bytes, "summary": {}, "seconds": 1.0}
    state |= fields | {"sampler": {"stream": stream} | fields.get("sampler", {})}
    (part / "state.json").write_text(json.dumps(state))
    (part / "model").mkdir()
    for name in ("rng.pt", "model/metadata.json"):
        (part / name).write_text("{}")
    (part / CONFIG).write_text((run.folder / CONFIG).read_text())
    write_manifest(part, CheckpointMetadata("0.0", "float32", 1, 1))
    publish(part, folder, step)
    return folder


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that was killed in step 5, with checkpoints of steps 2 and 4."""
    run = open_run(make_settings(tmp_path))
    add_checkpoint(run, 2, 11)
    add_checkpoint(run, 4, 22)
    (run.folder / "metrics.jsonl").write_text('{"step":2}\n{"step":4}\n{"step":5')
    for part in ("rollouts", "evaluation"):
        (run.folder / part).mkdir()
        for step in (4, 5):
            (run.folder / part / f"step_{step:06d}.jsonl").write_text("x")
    for step in (4, 5):  # written by several leaders
        (folder := run.folder / "rollouts" / f"step_{step:06d}.parquet").mkdir()
        (folder / "part_00001_of_00002.parquet").write_text("x")
    run.close()
    return run.folder


def test_only_the_owner_can_lock_a_run(tmp_path: Path) -> None:
    run = open_run(make_settings(tmp_path))
    lock = run.folder / LOCK
    assert lock.stat().st_mode & 0o777 == 0o600
    run.close()
    lock.chmod(0o644)  # by an earlier version
    handle = hold_folder(run.folder)
    handle.close()
    assert lock.stat().st_mode & 0o777 == 0o600


def test_the_rest_of_a_run_follows_the_umask_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    before = os.umask(0o027)
    try:
        run = open_run(make_settings(tmp_path / "runs"))
        folder = add_checkpoint(run, 2)
        write_rollouts(run.folder / "rollouts" / "step_000002.parquet", [])
        append_to_log(run.folder / "logs" / "launcher.log", "started")
    finally:
        os.umask(before)
    assert folder.is_relative_to(tmp_path / "runs")
    modes = {file: file.stat().st_mode & 0o777 for file in (tmp_path / "disk").rglob("*")}
    assert modes.pop(tmp_path / "disk" / "r-001" / LOCK) == 0o600
    assert len(modes) > 10
    assert {file for file, mode in modes.items() if mode != (0o750 if file.is_dir() else 0o640)} == set()


def test_the_newest_whole_checkpoint_is_continued(tmp_path: Path, killed: Path) -> None:
    run = open_run(make_settings(tmp_path))
    assert (run.folder, run.checkpoint, run.is_new) == (killed, step_folder(killed, 4), False)
    assert "resuming" in run.notes[0]
    assert "from step 4" in run.notes[0]
    # Only the output of the steps that run again is removed.
    assert (killed / "metrics.jsonl").read_text() == '{"step":2}\n{"step":4}\n'
    assert [f.name for f in (killed / "evaluation").iterdir()] == ["step_000004.jsonl"]
    rollouts = sorted(f.name for f in (killed / "rollouts").rglob("*"))
    assert rollouts == ["part_00001_of_00002.parquet", "step_000004.jsonl", "step_000004.parquet"]


def test_a_run_that_is_at_work_is_not_started_twice(tmp_path, killed: Path, monkeypatch) -> None:
    monkeypatch.setattr(resume, "_CHECK_SECONDS", 0.1)
    run = open_run(make_settings(tmp_path))
    assert run.folder == killed
    message = rf"r-001 is running \(process {os.getpid()} on {socket.gethostname()}\); wait until it ends, or"
    for settings in (make_settings(tmp_path), make_settings(tmp_path, parallel={"data": 2})):
        with pytest.raises(UserError, match=message):
            open_run(settings)
    # Runs of one name with different settings may run side by side, as in a learning-rate sweep.
    other_run = open_run(make_settings(tmp_path, optimizer={"lr": 1.0}))
    assert (other_run.folder.name, other_run.checkpoint, other_run.is_new) == ("r-002", None, True)
    assert other_run.notes[0].endswith("r-001 is running with other settings")
    assert open_run(make_settings(tmp_path), fresh=True).folder.name == "r-003"


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, killed: Path) -> None:
    state = step_folder(killed, 4) / "state.json"
    state.write_text(state.read_text().replace("22", "23"))
    run = open_run(make_settings(tmp_path))
    assert run.checkpoint == step_folder(killed, 2)
    assert "damaged" in run.notes[0]
    assert "state.json does not have the contents that were written" in run.notes[0]
    assert list(list_steps(killed)) == [2]  # or retention would keep the damaged one as the newest


def test_a_new_run_where_nothing_is_to_be_continued(tmp_path: Path, killed: Path) -> None:
    settings = make_settings(tmp_path)
    assert open_run(settings, fresh=True).folder.name == "r-002"
    assert open_run(make_settings(tmp_path, name="other")).folder.name == "other-001"
    (tmp_path / "r-002" / "summary.json").write_text("{}")  # finished: the older one was left on purpose
    run = open_run(settings)
    assert (run.folder.name, run.checkpoint) == ("r-003", None)


def test_a_finished_run_is_lengthened_by_its_own_command(tmp_path: Path, killed: Path) -> None:
    (killed / "summary.json").write_text('{"steps": 4}')
    repeated = open_run(make_settings(tmp_path, training={"steps": 4}))
    assert repeated.folder.name == "r-002"  # the same command again is another run
    repeated.close()
    shutil.rmtree(repeated.folder)
    changed = open_run(make_settings(tmp_path, training={"steps": 9}, optimizer={"lr": 1.0}))
    assert changed.folder.name == "r-002"
    notes = "\n".join(changed.notes)
    assert "optimizer.lr: 1e-06 -> 1.0" in notes
    assert "is finished and cannot be continued; starting a new run" in notes
    changed.close()
    shutil.rmtree(changed.folder)
    longer = open_run(make_settings(tmp_path, training={"steps": 9}))
    assert (longer.folder, longer.checkpoint, longer.is_new) == (killed, step_folder(killed, 4), False)
    assert "resuming" in longer.notes[0]
    assert not (killed / "summary.json").exists()  # it is not finished any more


def test_from_a_checkpoint_of_another_run(tmp_path: Path, killed: Path) -> None:
    run = open_run(make_settings(tmp_path, name="fork"), source=step_folder(killed, 2))
    assert (run.folder.name, run.checkpoint, run.is_new) == ("fork-001", step_folder(killed, 2), True)
    assert (run.folder / "metrics.jsonl").read_text() == '{"step":2}\n'
    assert step_folder(killed, 4).exists()
    assert open_run(make_settings(tmp_path, name="fork"), source=killed).checkpoint == step_folder(killed, 4)
    part = step_folder(killed, 2) / "model"
    assert open_run(make_settings(tmp_path, name="fork"), source=part).checkpoint == step_folder(killed, 2)
    with pytest.raises(UserError, match=r"--from: .* holds runs; give one of them, such as .*/r-001"):
        open_run(make_settings(tmp_path), source=tmp_path)
    with pytest.raises(UserError, match=r"--from: .*nowhere does not exist; give the folder of a checkpoint"):
        open_run(make_settings(tmp_path), source=tmp_path / "nowhere")


def test_from_a_fine_tuning_names_its_export(tmp_path: Path) -> None:
    plain = {"runs": tmp_path, "model": {"path": "/m"}, "sft": {"data": {"path": "/d"}}}
    tuned, again = (Settings.model_validate(plain | {"name": name}) for name in ("tuned", "more"))
    run = open_run(tuned)
    add_checkpoint(run, 3)
    run.close()
    for source in (run.folder, step_folder(run.folder, 3)):
        with pytest.raises(UserError) as error:
            open_run(make_settings(tmp_path, name="rl"), source=source)
        assert str(error.value) == (
            f"--from {source}: is a run of fine-tuning, and these settings are not; its export is the model: "
            "leave out --from, and set model.path=DIR of rpg-megatron convert megatron-to-hf"
        )
    for step in (2, 3):
        (run.folder / "hf" / f"step_{step:06d}").mkdir(parents=True)
        (run.folder / "hf" / f"step_{step:06d}" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"leave out --from, and set model\.path=.*/hf/step_000003$"):
        open_run(make_settings(tmp_path, name="rl"), source=run.folder)
    assert open_run(again, source=run.folder).checkpoint == step_folder(run.folder, 3)
    rl = open_run(make_settings(tmp_path, name="rl"))
    add_checkpoint(rl, 1)
    with pytest.raises(UserError, match="is a run of RL, and these settings are not"):
        open_run(again, source=rl.folder)


def test_changes_of_the_maths_are_refused_and_listed(tmp_path: Path, killed: Path) -> None:
    before = (killed / "metrics.jsonl").read_text()
    changed = make_settings(tmp_path, optimizer={"lr": 1.0, "beta1": 0.5}, parallel={"data": 2})
    with pytest.raises(UserError) as e:
        open_run(changed)
    assert "optimizer.beta1: 0.9 -> 0.5\n  optimizer.lr: 1e-06 -> 1.0\n" in str(e.value)
    assert "parallel" not in str(e.value)
    assert "--fresh" in str(e.value)
    assert (killed / "metrics.jsonl").read_text() == before
    with pytest.raises(UserError, match=r"is at step 4, beyond training\.steps \(3\)"):
        open_run(make_settings(tmp_path, training={"steps": 3}))


def test_layout_and_length_may_change(tmp_path: Path, killed: Path) -> None:
    run = open_run(make_settings(tmp_path, parallel={"data": 2}, training={"steps": 9}))
    assert run.checkpoint == step_folder(killed, 4)
    assert "parallel.data: 1 -> 2, training.steps: 400 -> 9" in run.notes[0]
    assert "data: 2" in (killed / CONFIG).read_text()


def test_retention(tmp_path: Path) -> None:
    run = open_run(make_settings(tmp_path))
    for step in (10, 15, 20, 25, 30):
        add_checkpoint(run, step)
    remove_old(run.folder, keep=2, milestone=20)
    assert list(list_steps(run.folder)) == [30, 25, 20]
    remove_old(run.folder, keep=1, milestone=None)
    assert list(list_steps(run.folder)) == [30]
    assert json.loads((run.folder / "checkpoints" / "latest.json").read_text())["step"] == 30


@pytest.mark.parametrize(
    "state",
    [
        "[]",
        "null",
        '{"step": 2}',
        '{"format": 1}',
        '{"format": "1", "step": 2}',
        '{"format": 1, "step": 2}',
        "{",
        "[" * 100_000,
        '{"format": 1, "step": ' + "9" * 5000 + "}",
        b"\xff",
        {"step": -1},
        {"step": "2"},
        {"step": 1e999},
        {"step": 10**30},
        {"metrics_bytes": None},
        {"row": [1]},
        {"row": {"loss": [[1]]}},
        {"seconds": "x"},
        {"summary": []},
        {"summary": {"rates": {}}},
        {"summary": {"accuracy_before": 1}},
        {"anchor": {"kl": 1.0}},
        {"sampler": []},
        {"sampler": {"stream": None}},
        {"sampler": {"stream": {"seed": 1}}},
        {"sampler": {"stream": {"streaming": True, "drawn": -1, "digest": ""}}},
        {"sampler": {"stream": {"streaming": False, "drawn": 1, "digest": ""}}},
        {"sampler": {"stream": {"streaming": True, "drawn": 1}}},
    ],
    ids=lambda state: str(state)[:60],
)
def test_a_state_of_another_form_is_one_message(tmp_path: Path, state: Any) -> None:
    first = open_run(make_settings(tmp_path))
    checkpoint = add_checkpoint(first, 2)
    file = checkpoint / "state.json"
    if isinstance(state, dict):
        full_state = json.loads(file.read_text())
        sampler = full_state["sampler"]
        full_state |= state
        if isinstance(full_state["sampler"], dict):
            full_state["sampler"] = sampler | full_state["sampler"]
        state = json.dumps(full_state)
    file.write_bytes(state if isinstance(state, bytes) else state.encode())
    (checkpoint / "manifest.json").unlink()  # the hashes are right
    write_manifest(checkpoint, CheckpointMetadata("0.0", "float32", 1, 1))
    first.close()
    for source in (checkpoint, None):  # --from, and a resume
        with pytest.raises(UserError, match=r"state\.json: not the state of a run \(") as error:
            open_run(make_settings(tmp_path), source=source)
        assert len(str(error.value)) < 1000
    assert [f.name for f in tmp_path.iterdir()] == ["r-001"]


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", "checkpoints", "checkpoints/step_000002", "checkpoints/step_000002/model"),
        "checkpoints/step_000002/model/__0_0.distcp",  # which the manifest does not list
        *(f"checkpoints/step_000002/{f}" for f in ("state.json", "config.yaml", "rng.pt", "manifest.json")),
    ],
)
def test_nothing_is_read_through_links_out_of_a_run(tmp_path: Path, name: str) -> None:
    """A copy of a private file would have more readers than the file."""
    first = open_run(make_settings(tmp_path))
    checkpoint = add_checkpoint(first, 2)
    (first.folder / "metrics.jsonl").write_text("{}")
    (checkpoint / "model" / "__0_0.distcp").touch()
    first.close()
    (first.folder / name).rename(tmp_path / "private")
    (first.folder / name).symlink_to(tmp_path / "private")
    sources = [first.folder]
    if name not in ("checkpoints", "checkpoints/step_000002"):  # then the user has given the link
        sources.append(checkpoint)
    for source in sources:
        with pytest.raises(UserError, match=r"leads to .*private.*, outside ") as error:
            open_run(make_settings(tmp_path, name="other"), source=source)
        assert len(str(error.value)) < 1500
    assert not list(tmp_path.glob("other*"))


def test_a_run_can_be_started_from_through_a_link(tmp_path: Path) -> None:
    first = open_run(make_settings(tmp_path))
    add_checkpoint(first, 2)
    (first.folder / "metrics.jsonl").write_text('{"step":2}\n')
    (first.folder / "metrics.jsonl").chmod(0o600)
    os.link(first.folder / "metrics.jsonl", tmp_path / "metrics.jsonl")  # hard links are files
    first.close()
    (tmp_path / "scratch").symlink_to(first.folder)
    before = os.umask(0o022)
    try:
        run = open_run(make_settings(tmp_path, name="other"), source=tmp_path / "scratch")
    finally:
        os.umask(before)
    copied = run.folder / "metrics.jsonl"
    assert copied.stat().st_mode & 0o777 == 0o600
    assert copied.read_text() == '{"step":2}\n'


def test_checkpoints_of_a_run_may_be_on_another_disk(tmp_path: Path, killed: Path) -> None:
    (killed / "checkpoints").rename(tmp_path / "disk")
    (killed / "checkpoints").symlink_to(tmp_path / "disk")
    run = open_run(make_settings(tmp_path))
    assert run.checkpoint == step_folder(killed, 4)


def test_settings_of_another_run_name_no_other_file(tmp_path: Path) -> None:
    """Their values would be shown among the changes."""
    first = open_run(make_settings(tmp_path))
    checkpoint = add_checkpoint(first, 2)
    secret = tmp_path / "secret.yaml"
    secret.write_text("name: 0123abc\n")
    (checkpoint / "config.yaml").write_text(f"extends: {secret}\n")
    (checkpoint / "manifest.json").unlink()  # the hashes are right
    write_manifest(checkpoint, CheckpointMetadata("0.0", "float32", 1, 1))
    first.close()
    with pytest.raises(UserError, match="which extend no other file") as error:
        open_run(make_settings(tmp_path), source=checkpoint)
    assert "0123abc" not in str(error.value)


@pytest.mark.parametrize("name", [LOCK, ".origin"])
def test_a_planted_link_in_a_run_is_an_error(tmp_path: Path, name: str) -> None:
    run = open_run(make_settings(tmp_path), fresh=True)
    run.close()
    (tmp_path / "secret").write_text("mine")
    (run.folder / name).unlink()
    (run.folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"symbolic link|leads to .*secret, outside"):
        open_run(make_settings(tmp_path))
    assert (tmp_path / "secret").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_run_of_another_user_is_not_resumed(tmp_path: Path, killed: Path) -> None:
    """In a shared folder of runs it would be the newest one."""
    os.chown(killed, 12345, -1)
    run = open_run(make_settings(tmp_path))
    assert run.folder != killed
    assert run.notes[0].endswith("r-001 belongs to another user: not resumed")
    assert (killed / "rollouts" / "step_000005.jsonl").exists(), "it was rewound"


@pytest.mark.parametrize("option", ["fresh", "from"])
def test_a_fresh_or_forked_run_hides_older_runs_at_once(tmp_path: Path, killed: Path, option: str) -> None:
    source = killed if option == "from" else None
    first = open_run(make_settings(tmp_path), fresh=option == "fresh", source=source)
    first.close()
    assert first.folder != killed
    rerun = open_run(make_settings(tmp_path))
    assert rerun.folder not in (killed, first.folder)
    assert rerun.checkpoint == (step_folder(killed, 4) if option == "from" else None)
    assert (killed / "rollouts" / "step_000005.jsonl").exists(), "the older run was rewound"


def test_damage_is_told_even_if_nothing_can_be_continued(tmp_path: Path, killed: Path) -> None:
    for step in (2, 4):
        (step_folder(killed, step) / "state.json").write_text("{}")
    run = open_run(make_settings(tmp_path))
    assert run.folder != killed
    assert sum("damaged" in note for note in run.notes) == 2


def test_each_step_keeps_the_settings_that_it_was_made_with(tmp_path: Path, killed: Path) -> None:
    def layout(step: int) -> int:
        return load_settings(settings_file(killed, step)).parallel.tensor

    open_run(make_settings(tmp_path, parallel={"tensor": 2})).close()
    assert [layout(step) for step in (1, 4, 5, 9)] == [1, 1, 2, 2]
    open_run(make_settings(tmp_path, parallel={"tensor": 3})).close()  # steps 5 and on were not reached
    assert [layout(step) for step in (4, 5)] == [1, 3]
    (step_folder(killed, 4) / "state.json").write_text("damaged")
    open_run(make_settings(tmp_path, parallel={"tensor": 4})).close()  # from step 2
    assert [layout(step) for step in (2, 3, 4, 9)] == [1, 4, 4, 4]
    assert sorted(p.name for p in killed.glob("config*")) == [CONFIG, "config_until_000002.yaml"]


@pytest.mark.parametrize(
    ("rows", "kept", "message"),
    [
        ('{"step":2}\n{"st', '{"step":2}\n', "steps 3 to 4 are lost"),
        ("", "", "steps 0 to 4 are lost"),
        (None, None, "steps 0 to 4 are lost"),
        ('{"step":2}\n{"step":6}\n{"step":7}\n', '{"step":2}\n', "steps 3 to 4 are lost"),
        ('{"step":2}\n{"step":4, "loss": 0.1}\n{"step":5}\n', '{"step":2}\n{"step":4, "loss": 0.1}\n', None),
    ],
)
def test_mismatched_metrics_lose_only_the_reported_steps(
    tmp_path: Path, killed: Path, rows: str | None, kept: str | None, message: str | None
) -> None:
    file = killed / "metrics.jsonl"
    file.unlink() if rows is None else file.write_text(rows)
    run = open_run(make_settings(tmp_path))
    assert run.checkpoint == step_folder(killed, 4)
    assert (file.read_text() if file.exists() else None) == kept
    warnings = [note for note in run.notes if "metrics.jsonl was shortened" in note]
    assert [message is None or message in note for note in warnings] == [True] * (message is not None)


def test_a_row_that_is_written_again_is_removed(tmp_path: Path, killed: Path) -> None:
    """A signal came between step 6's updates and its row; the row was written, then the run was killed."""
    run = open_run(make_settings(tmp_path))
    folder = add_checkpoint(run, 6, 22, row={"loss": 1})
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step":6}\n')
    run.close()
    assert open_run(make_settings(tmp_path)).checkpoint == folder
    assert (killed / "metrics.jsonl").read_text() == '{"step":2}\n{"step":4}\n'


@pytest.mark.parametrize("harm", ["no manifest", "no files", "not all files"])
def test_a_newer_checkpoint_that_is_not_whole_is_named_and_kept(tmp_path, killed: Path, harm: str) -> None:
    manifest = step_folder(killed, 4) / "manifest.json"
    listed = json.loads(manifest.read_text())
    manifest.unlink()
    if harm != "no manifest":
        del listed["files"]["model/metadata.json"]
        listed["files"] = {} if harm == "no files" else listed["files"]
        manifest.write_text(json.dumps(listed))
    run = open_run(make_settings(tmp_path))
    assert run.checkpoint == step_folder(killed, 2)
    assert "step_000004 is damaged and not used" in run.notes[0]
    assert "damaged_step_000004" in run.notes[1]
    assert (killed / "checkpoints" / "damaged_step_000004" / "state.json").exists()
    run.close()
    assert open_run(make_settings(tmp_path)).checkpoint == step_folder(killed, 2)
    assert (killed / "checkpoints" / "damaged_step_000004").exists()


def test_a_run_that_begins_anew_says_why(tmp_path: Path) -> None:
    open_run(make_settings(tmp_path)).close()
    run = open_run(make_settings(tmp_path))
    assert run.folder.name == "r-002"
    assert run.notes[0].endswith("r-001 is unfinished, without a complete checkpoint: not resumed")
    assert run.notes[1].endswith("r-002, from step 0")


def test_a_run_without_its_last_checkpoint_is_resumed(tmp_path: Path, killed: Path) -> None:
    (killed / "summary.json").write_text('{"unsaved": "the disk is full"}')
    assert open_run(make_settings(tmp_path)).checkpoint == step_folder(killed, 4)
    assert not (killed / "summary.json").exists()


def test_settings_and_logs_that_were_removed_are_made_again(tmp_path: Path, killed: Path) -> None:
    (killed / CONFIG).unlink()
    shutil.rmtree(killed / "logs")
    assert open_run(make_settings(tmp_path)).checkpoint == step_folder(killed, 4)
    assert load_settings(killed / CONFIG).name == "r"
    assert (killed / "logs").is_dir()


def test_what_does_not_affect_the_training_may_change(tmp_path: Path, killed: Path) -> None:
    more = {"reward": {"workers": 7, "concurrency": 8}, "rollout": {"workers": 3}}
    more |= {"training": {"share_prompts": True}}
    run = open_run(make_settings(tmp_path, profile={"steps": [5]}, **more))
    assert run.checkpoint == step_folder(killed, 4)


def test_the_rest_of_a_killed_removal_is_removed_later(tmp_path, killed: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **options: None)  # killed before it
        remove_old(killed, keep=1, milestone=None)
    assert list(list_steps(killed)) == [4]
    assert not step_folder(killed, 2).exists()
    remove_parts(killed)  # as every save does, and every resume
    assert sorted(f.name for f in (killed / "checkpoints").iterdir()) == ["latest.json", "step_000004"]


def test_a_read_only_folder_is_one_message(tmp_path, killed: Path, monkeypatch) -> None:
    def fail(folder: Path, seconds: float = 0.0) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder / ".lock"))

    monkeypatch.setattr(resume, "hold_folder", fail)
    with pytest.raises(UserError, match=r"\.lock: Read-only file system; make the run's folder writable"):
        open_run(make_settings(tmp_path))
