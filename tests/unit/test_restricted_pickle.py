"""A Megatron checkpoint from someone else runs no code when it is listed, converted or loaded.

Why: torch reads a checkpoint's index and objects with Python's unpickler, which calls whatever they name.
Each payload here creates a file when it is read that way. Not covered: whole commands (tests/integration),
and what Transformer Engine itself does with extra states (GPUs).
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from rpg_megatron.checkpoints.megatron_folder import find_short_files, read_contents
from rpg_megatron.checkpoints.restricted_pickle import check_extra_states, read_index, restricted_loading
from rpg_megatron.config.errors import UserError
from rpg_megatron.policy.optimizer import OffloadingAdam


@dataclass
class Payload:
    """Creates a file when it is unpickled."""

    file: Path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    """A torch distributed checkpoint of a tensor and an object."""
    folder = tmp_path / "model"
    dcp.save({"weight": torch.ones(2, 3), "note": {"step": 3}}, checkpoint_id=str(folder), no_dist=True)
    return folder


def rewrite(folder: Path, change: Any) -> None:
    """Change the index's unpickled content and write it again."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(found)))


def load(folder: Path) -> dict[str, Any]:
    """Load by torch's own loader, restricted."""
    state = {"weight": torch.zeros(2, 3), "note": {"step": 0}}
    with restricted_loading(folder):
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def test_a_checkpoint_is_read_as_before(checkpoint_folder: Path) -> None:
    contents = read_contents(checkpoint_folder)
    assert contents.tensors["weight"].shape == (2, 3)
    assert find_short_files(checkpoint_folder, contents) == []
    state = load(checkpoint_folder)
    assert torch.equal(state["weight"], torch.ones(2, 3))
    assert state["note"] == {"step": 3}


def test_an_index_that_names_a_function_is_refused_and_runs_nothing(
    checkpoint_folder: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"

    def plant(found: Metadata) -> Metadata:
        found.planner_data = Payload(mark)
        return found

    rewrite(checkpoint_folder, plant)
    with pytest.raises(UserError, match=r"\.metadata: refers to posix\.system, which no checkpoint needs"):
        read_contents(checkpoint_folder)
    with pytest.raises(CheckpointException):  # torch hides the reason, so an index is read before a load
        load(checkpoint_folder)
    assert not mark.exists()
    pickle.loads((checkpoint_folder / ".metadata").read_bytes())
    assert mark.exists()  # the payload does what it should


def test_an_object_that_names_a_function_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "model"
    dcp.save(
        {"weight": torch.ones(2, 3), "note": {"step": Payload(mark)}}, checkpoint_id=str(folder), no_dist=True
    )
    assert read_contents(folder).objects == {"note.step"}
    with pytest.raises(UserError, match=r"model: refers to posix\.system, which no checkpoint needs"):
        load(folder)
    assert not mark.exists()


def test_an_extra_state_that_names_a_function_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    def as_bytes(content: bytes) -> dict[str, torch.Tensor]:
        return {"layer._extra_state": torch.frombuffer(bytearray(content), dtype=torch.uint8)}

    mark = tmp_path / "ran"
    scales = {"scale_fwd": torch.ones(3), "extra_fp8_variables": {"fp8_checkpoint": True}}
    nested = io.BytesIO()
    torch.save(Payload(mark), nested)

    class Tensor:
        """Torch's own way to pickle a storage: a function that reads another pickle."""

        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (nested.getvalue(),)

    with restricted_loading(tmp_path):
        check_extra_states(as_bytes(pickle.dumps(scales)) | {"weight": torch.ones(2)})
        check_extra_states({"layer._extra_state": torch.empty(0, dtype=torch.uint8)})
    for payload in (Payload(mark), Tensor()):
        with pytest.raises(UserError, match=r"refers to posix\.system"), restricted_loading(tmp_path):
            check_extra_states(as_bytes(pickle.dumps(payload)))
    assert not mark.exists()


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/__0_0.distcp"])
def test_an_index_names_only_files_of_its_folder(checkpoint_folder: Path, path: str) -> None:
    def move(found: Metadata) -> Metadata:
        found.storage_data = {MetadataIndex("weight"): _StorageInfo(path, 0, 4)}
        return found

    rewrite(checkpoint_folder, move)
    with pytest.raises(UserError, match=r"\.metadata: not readable .* is outside the checkpoint's folder"):
        read_contents(checkpoint_folder)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps({"tensors": 1}), pickle.dumps(Metadata({}))]
)
def test_what_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / ".metadata"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata: not readable .*; copy the checkpoint again"):
        read_index(file)


def test_restrictions_end_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    before = dcp.FileSystemReader.read_metadata
    with restricted_loading(tmp_path):
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
        assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
    assert dcp.FileSystemReader.read_metadata is before
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


def test_files_of_a_checkpoint_that_are_no_regular_files_are_damage(checkpoint_folder: Path) -> None:
    contents = read_contents(checkpoint_folder)
    (name,) = contents.ends
    (checkpoint_folder / name).unlink()
    os.mkfifo(checkpoint_folder / name)
    assert find_short_files(checkpoint_folder, contents) == [f"{name} cannot be read (not a regular file)"]


def test_a_conversion_knows_the_optimizers_that_a_checkpoint_names(tmp_path: Path) -> None:
    """An optimizer with state in host memory writes its classes. In a process that has imported no more."""
    torch.save({"gpu": OffloadingAdam, "cpu": torch.optim.AdamW}, tmp_path / "common.pt")
    code = f"""
import torch, rpg_megatron.commands.convert.convert
from pathlib import Path
from rpg_megatron.checkpoints.restricted_pickle import restricted_loading
with restricted_loading(Path(".")):
    print(*sorted(c.__name__ for c in torch.load({str(tmp_path / "common.pt")!r}).values()))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "AdamW OffloadingAdam\n", ran.stderr
