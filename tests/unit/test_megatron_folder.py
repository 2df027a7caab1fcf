"""A Megatron checkpoint's folder is found where Megatron-LM puts it, and all damage to it is listed.

Why: what is found wrong here stops a conversion or a resume before anything is loaded, on a machine that need
not have torch. Not covered: what the files mean to Megatron (tests/integration/test_convert_tools).
"""

import json
from pathlib import Path

import pytest

from rpg_megatron.checkpoints.index import Index, StoredPart
from rpg_megatron.checkpoints.megatron_folder import (
    LATEST,
    MANIFEST,
    CheckpointMetadata,
    find_checkpoint,
    find_damage,
    find_short_files,
    hash_files,
    is_megatron,
    read_manifest,
    write_manifest,
)
from rpg_megatron.commands.convert.inspect import inspect_checkpoint
from rpg_megatron.config.errors import UserError
from rpg_megatron.system.terminal import one_line

FACTS = CheckpointMetadata("0.19.2", "bfloat16", 2, 3)


def write(folder: Path) -> Path:
    (folder / "hf").mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "hf/config.json"):
        (folder / name).write_bytes(name.encode() * 50)
    write_manifest(folder, FACTS)
    return folder


@pytest.mark.parametrize(
    ("latest", "name"), [("release", "release"), ("release\n", "release"), ("120", "iter_0000120")]
)
def test_the_tracker_file_names_the_checkpoint(tmp_path: Path, latest: str, name: str) -> None:
    folder = write(tmp_path / name)
    (tmp_path / LATEST).write_text(latest)
    assert find_checkpoint(tmp_path) == find_checkpoint(folder) == folder
    assert is_megatron(tmp_path)
    (folder / "hf").mkdir(exist_ok=True)
    assert find_checkpoint(folder / "hf") == folder, "which is its model's folder"
    (folder / "hf" / "model.safetensors").touch()
    assert not is_megatron(folder / "hf"), "an HF checkpoint beside some metadata.json"


def test_what_is_no_checkpoint_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none is not a directory"):
        find_checkpoint(tmp_path / "none")
    with pytest.raises(UserError, match=r"holds neither metadata.json nor latest_checkpointed_iteration.txt"):
        find_checkpoint(tmp_path)
    (tmp_path / LATEST).write_text("7")
    with pytest.raises(UserError, match=r"iter_0000007/metadata.json is missing"):
        find_checkpoint(tmp_path)
    (tmp_path / LATEST).write_text("latest")
    with pytest.raises(UserError, match=r"contains neither a number nor release"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_is_no_link_out_of_the_given_folder(tmp_path: Path) -> None:
    """Its weights may be private, and the conversion's result has more readers."""
    (tmp_path / "model").mkdir()
    private = write(tmp_path / "private")
    (tmp_path / "model" / LATEST).write_text("release")
    (tmp_path / "model" / "release").symlink_to(private)
    with pytest.raises(UserError, match=r"release: leads to .*private, outside .*; give that folder itself"):
        find_checkpoint(tmp_path / "model")
    (tmp_path / "way").symlink_to(private)
    assert find_checkpoint(tmp_path / "way") == tmp_path / "way"


def test_no_content_of_other_files_is_shown(tmp_path: Path) -> None:
    """A link instead of a small file of a checkpoint, whose content would be in the message."""
    folder, secret = write(tmp_path / "model" / "release"), tmp_path / "secret"
    secret.write_text("0123abc\n")
    (tmp_path / "model" / LATEST).symlink_to(secret)
    with pytest.raises(UserError, match="holds neither") as error:
        find_checkpoint(tmp_path / "model")
    assert "0123abc" not in str(error.value)
    (folder / MANIFEST).unlink()
    secret.write_text(json.dumps({"format": "0123abc"}))
    (folder / MANIFEST).symlink_to(secret)
    report = inspect_checkpoint(folder)
    assert "0123abc" not in report.table()
    assert "leads to" in report.table()


def test_names_draw_no_lines(tmp_path: Path) -> None:
    folder = write(tmp_path / "release")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["a\nwhole: every file has the SHA-256 of the manifest"] = {"bytes": 1, "sha256": ""}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "\nwhole:" not in inspect_checkpoint(folder).table()


def test_a_dtype_of_no_weights_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "release")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"dtype": "evil"}))
    with pytest.raises(UserError, match=r"manifest\.json: not readable .*dtype evil"):
        read_manifest(folder)


def test_a_manifest_returns_its_facts_and_finds_all_damage(tmp_path: Path) -> None:
    folder = write(tmp_path / "release")
    manifest = read_manifest(folder)
    assert manifest is not None
    facts, files = manifest
    assert facts == FACTS
    assert set(files) == {".metadata", "__0_0.distcp", "__1_0.distcp", "hf/config.json", "metadata.json"}
    progress: list[int] = []
    assert find_damage(folder, files, progress.append) == []
    assert sum(progress) == sum(f["bytes"] for f in files.values())

    (folder / "__0_0.distcp").unlink()
    (folder / "__1_0.distcp").write_bytes(b"short")
    content = bytearray((folder / ".metadata").read_bytes())
    content[17] ^= 1
    (folder / ".metadata").write_bytes(content)
    assert sorted(find_damage(folder, files)) == [
        ".metadata does not have the contents that were written",
        "__0_0.distcp is missing",
        "__1_0.distcp has 5 bytes, not 600",
    ]


def test_a_manifest_takes_over_what_writers_say_of_their_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "release")
    hashes = hash_files(folder, ["__0_0.distcp", "__1_0.distcp"])
    before = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).unlink()
    progress: list[int] = []
    write_manifest(folder, FACTS, progress.append, hashes)
    assert (folder / MANIFEST).read_bytes() == before
    rest = [f for f in folder.rglob("*") if f.is_file() and f.name not in (*hashes, MANIFEST)]
    assert sum(progress) == sum(f.stat().st_size for f in rest)
    (folder / "__1_0.distcp").write_bytes(b"cut")  # as the disk shows it to another node
    with pytest.raises(OSError, match=r"__1_0.distcp has 3 bytes here, and 600 where it was written"):
        write_manifest(folder, FACTS, known=hashes)
    (folder / "__1_0.distcp").unlink()  # each node has a disk of its own
    with pytest.raises(FileNotFoundError):
        write_manifest(folder, FACTS, known=hashes)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "files": {"a": 3}}'])
def test_a_broken_manifest_is_an_error_and_a_missing_one_is_not(tmp_path: Path, text: str) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=r"manifest.json: not readable"):
        read_manifest(tmp_path)


def test_a_newer_manifest_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "release")
    raw = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(raw | {"format": 2}))
    with pytest.raises(UserError, match=r"format 2, this version reads 1"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": "2"},
        {"pipeline": None},
        {"dtype": ["x" * 10_000]},
        {"megatron_core": 1},
        {"files": {"a": {"bytes": float("inf"), "sha256": ""}}},
    ],
    ids=str,
)
def test_a_manifest_of_other_types_is_refused_in_few_words(tmp_path: Path, change: dict) -> None:
    folder = write(tmp_path / "release")
    raw = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(raw | change))
    with pytest.raises(UserError, match=r"manifest.json: not readable") as error:
        read_manifest(folder)
    assert len(str(error.value)) < len(str(folder)) + 200


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a" * 300])
def test_a_name_that_no_file_can_have_is_damage(tmp_path: Path, name: str) -> None:
    entry = {"bytes": 1, "sha256": ""}
    assert [p.partition(" cannot be read (")[0] for p in find_damage(tmp_path, {name: entry})] == [
        one_line(name)
    ]
    assert len(find_short_files(tmp_path, Index({}, [], [StoredPart("weight", (), None, name, 0, 1)]))) == 1
