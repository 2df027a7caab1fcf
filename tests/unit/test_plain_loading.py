"""A Megatron checkpoint from someone else runs no code and changes no class when it is listed or loaded.

Why: torch reads a checkpoint's index, objects and tensors with Python's unpickler, which calls the functions
that they name and sets attributes. Not covered: whole commands (tests/integration), ten thousand mutated
indexes (test_fuzz), and what Transformer Engine itself does with extra states (GPUs).
"""

import argparse
import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PosixPath, PurePath
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import serialization
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from rpg_megatron.checkpoints import foreign_reader
from rpg_megatron.checkpoints import plain_loading as plain_loading_module
from rpg_megatron.checkpoints.foreign_reader import Location
from rpg_megatron.checkpoints.index import PLAIN_INDEX, from_torch, read_index, stored_part, write_plain_index
from rpg_megatron.checkpoints.megatron import load_weights
from rpg_megatron.checkpoints.megatron_folder import find_short_files
from rpg_megatron.checkpoints.pickle_values import Name, Pairs, Record, load_values
from rpg_megatron.checkpoints.plain_loading import (
    _read_tensor,
    drop_pickled_states,
    load_object,
    plain_loading,
)
from rpg_megatron.commands.convert.command import open_megatron
from rpg_megatron.config.errors import UserError
from rpg_megatron.policy.optimizer import OffloadingAdam
from rpg_megatron.system.foreign_input import ForeignInputError
from rpg_megatron.training.run import RankRun


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
    index = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(index)))


def load(folder: Path, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Load by torch's own loader, within plain_loading."""
    state = state or {"weight": torch.zeros(2, 3), "note": {"step": 0}}
    with plain_loading(folder):
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def test_a_checkpoint_is_read_as_before(checkpoint_folder: Path) -> None:
    contents = read_index(checkpoint_folder)
    assert contents.tensors["weight"].shape == (2, 3)
    assert contents.tensors["weight"].dtype == "float32"
    assert find_short_files(checkpoint_folder, contents) == []
    state = load(checkpoint_folder)
    assert torch.equal(state["weight"], torch.ones(2, 3))
    assert state["note"] == {"step": 3}


def test_tensors_of_all_kinds_are_read(tmp_path: Path) -> None:
    big = torch.arange(24.0).reshape(4, 6)
    saved = {
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "int64": torch.arange(5),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 7),
        "view": big[1:3, ::2],
        "transposed": big.T,
        "parameter": torch.nn.Parameter(big.double()),
    }
    dcp.save(saved, checkpoint_id=str(tmp_path), no_dist=True)
    state = {name: torch.zeros_like(value) for name, value in saved.items()}
    load(tmp_path, state)
    for name, value in saved.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name].double(), value.detach().double()), name


def test_objects_are_plain_values(tmp_path: Path) -> None:
    """Those of Megatron's optimizers and FP8 layers; others, such as its arguments, load as None."""
    saved = {
        "betas": (0.9, (1, 2)),
        "scale": torch.ones(3),
        "bytes": io.BytesIO(b"abc"),
        "class": OffloadingAdam,
        "ordered": OrderedDict(a=1),
        "arguments": argparse.Namespace(a=1),
        1: {"group": [True, None, 2**40, "text", b"bytes"]},
    }
    torch.save(saved, tmp_path / "common.pt")
    with plain_loading(tmp_path):
        loaded = serialization.load_common(str(tmp_path))
    assert torch.equal(loaded.pop("scale"), torch.ones(3))
    expected = {k: v for k, v in saved.items() if k != "scale"}
    # So does a file in memory: torch and Megatron would load its content.
    assert loaded == expected | {"arguments": None, "bytes": None}


def test_only_the_span_of_a_tensor_is_read_from_its_storage(tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    file.write_bytes(b"x")
    os.truncate(file, 2**40)  # larger than any memory
    with file.open("rb") as opened:
        location = Location("float32", (2, 3), (4, 1), 2**37, 0, 2**40)
        assert _read_tensor(opened, location).untyped_storage().nbytes() == 7 * 4
        with pytest.raises(ValueError, match="a tensor of 6 numbers is spread over"):
            _read_tensor(opened, location._replace(stride=(2**36, 1)))
        for shape, stride in (((2**62, 2**62), (3, 1)), ((2**40, 2**20), (0, 0))):
            with pytest.raises(ValueError, match="larger than its storage"):
                _read_tensor(opened, location._replace(shape=shape, stride=stride))
        with pytest.raises(ValueError, match="an object with more than 1,000 tensors, or 1,024 MiB"):
            _read_tensor(opened, location._replace(shape=(2**30,), stride=(1,)), {})


def test_what_was_loaded_is_saved_as_the_same_bytes(tmp_path: Path) -> None:
    """What an optimizer's groups share stays shared: a resumed run saves as if never stopped."""
    betas, sizes = (0.9, 0.999), ([1, 2], 3)
    groups = [{"weight_decay": decay, "betas": betas, "lr": 1e-4, "step": 3} for decay in (0.1, 0.0)]
    torch.save(
        [{"optimizer": groups, "shape": sizes, "other": (1, True, 1.0), "more": (1, 1, 1)}], tmp_path / "a.pt"
    )
    loaded = load_object(tmp_path, "a.pt")
    assert loaded[0]["more"] == (1, 1, 1)
    assert [type(value) for value in loaded[0]["other"]] == [int, bool, float]
    torch.save(loaded, tmp_path / "b.pt")
    a, b = (torch.load(tmp_path / name, weights_only=False) for name in ("a.pt", "b.pt"))
    assert a == b
    assert pickle.dumps(a) == pickle.dumps(b)


def test_tensors_of_an_object_share_what_is_read(tmp_path: Path) -> None:
    """A list of a million uses of one tensor is small in a file."""
    tensor = torch.ones(1000)
    torch.save([tensor] * 50 + [tensor[:10]] * 50, tmp_path / "common.pt")
    tensors = load_object(tmp_path, "common.pt")
    assert [len(each) for each in tensors] == [1000] * 50 + [10] * 50
    assert len({each.data_ptr() for each in tensors}) == 2


def test_a_chunk_whose_shape_differs_from_the_index_is_refused(checkpoint_folder: Path) -> None:
    def enlarge(index: Metadata) -> Metadata:
        weight = index.state_dict_metadata["weight"]
        weight.size, weight.chunks[0].sizes = torch.Size([4, 3]), torch.Size([4, 3])
        return index

    rewrite(checkpoint_folder, enlarge)
    with pytest.raises(UserError, match=r"weight has the shape \[2, 3\]"):
        load(checkpoint_folder, {"weight": torch.zeros(4, 3)})


@pytest.mark.parametrize("place", ["index", "object", "tensor"])
def test_what_a_checkpoint_names_is_not_run(tmp_path: Path, place: str) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "model"
    note = Payload(mark) if place == "object" else 3
    weight = torch.ones(2, 3)
    dcp.save({"weight": weight, "note": {"step": note}}, checkpoint_id=str(folder), no_dist=True)
    if place == "index":
        rewrite(folder, lambda index: replace(index, planner_data=Payload(mark)))
    elif place == "tensor":
        replace_slice(folder, "weight", Payload(mark))
    state = {"weight": torch.zeros(2, 3), "note": {"step": 0}}
    with pytest.raises(UserError, match="not a tensor") if place == "tensor" else nullcontext():
        load(folder, state)
        assert state["note"] == {"step": None if place == "object" else 3}
    assert not mark.exists()
    if place == "index":
        pickle.loads((folder / ".metadata").read_bytes())
        assert mark.exists()  # the payload does what it should


def replace_slice(folder: Path, name: str, value: Any) -> None:
    """Append a file of torch.save to the checkpoint's file, and let the index refer to it."""
    file = folder / "__0_0.distcp"
    begin = file.stat().st_size
    content = io.BytesIO()
    torch.save(value, content)
    with file.open("ab") as f:
        f.write(content.getvalue())

    def move(index: Metadata) -> Metadata:
        for key in list(index.storage_data):
            if key.fqn == name:
                index.storage_data[key] = _StorageInfo(file.name, begin, len(content.getvalue()))
        return index

    rewrite(folder, move)


class Claim:
    """A tensor in a file of torch.save that claims what its storage, of six float32, does not hold."""

    def __init__(self, shape: Any = (2, 3), stride: Any = (3, 1), offset: int = 0, dtype: Any = None) -> None:
        self._arguments = torch.ones(6)._typed_storage(), offset, shape, stride, False, OrderedDict()
        self._dtype = dtype

    def __reduce__(self) -> Any:
        if self._dtype is None:
            return torch._utils._rebuild_tensor_v2, self._arguments
        return torch._utils._rebuild_tensor_v3, (*self._arguments, self._dtype)


CLAIMS = [
    (Claim((-2, 3)), "Expected `int` >= 0"),
    (Claim((2**63, 1)), "Expected `int` <= 4611686018427387904"),
    (Claim(stride=(-3, 1)), "Expected `int` >= 0"),
    (Claim("23"), "Expected `array`, got `str`"),
    (Claim((1,) * 65, (1,) * 65), "of length <= 64"),
    (Claim((2**62, 2**62)), "weight has the shape"),
    (Claim((2**40, 2**20), (0, 0)), "weight has the shape"),
    (Claim(stride=(2**61, 1)), "larger than its storage"),
    (Claim(offset=1), "larger than its storage"),
    (Claim(stride=(3,)), "is shorter than"),
    (Claim((3, 2), (2, 1)), r"weight has the shape \["),
    (Claim((), ()), r"weight has the shape \[\]"),
    (Claim((0, 2**61), (2**61, 2**61), 2**61), r"weight has the shape \[0"),
    (Claim(dtype=torch.float64), "larger than its storage"),
    (Claim(dtype=torch.quint8), "a tensor of dtype quint8"),
    (Claim(dtype=torch.uint1), "not implemented"),
    (Claim(dtype=os.system), "'system' is not a dtype of torch"),
]


def test_a_tensor_that_claims_what_it_is_not_is_one_message(checkpoint_folder: Path, monkeypatch) -> None:
    def locate_in_process(reader: str, files: Any, argument: Any, kind: Any, **_: Any) -> Iterator[Any]:
        """The reader without its process, whose start takes a quarter of a second."""
        assert reader == f"{foreign_reader.__name__}:locate_tensors"
        try:
            for value in foreign_reader.locate_tensors(files, argument):
                yield msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
        except (ValueError, msgspec.MsgspecError) as e:
            raise ForeignInputError(str(e)) from None

    monkeypatch.setattr(plain_loading_module, "read_foreign", locate_in_process)
    monkeypatch.setattr(plain_loading_module, "read_index", unchecked_index)
    for claim, message in CLAIMS:
        replace_slice(checkpoint_folder, "weight", claim)
        with pytest.raises(UserError, match=f"{checkpoint_folder}: .*{message}"):
            load(checkpoint_folder, {"weight": torch.zeros(2, 3)})
    replace_slice(checkpoint_folder, "weight", Claim())
    assert torch.equal(load(checkpoint_folder, {"weight": torch.zeros(2, 3)})["weight"], torch.ones(2, 3))


def unchecked_index(folder: Path) -> Any:
    index = pickle.loads((folder / ".metadata").read_bytes())
    return from_torch(index, [stored_part(*entry) for entry in index.storage_data.items()])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": torch.Size([-2, 3])}, "Expected `int` >= 0"),
        ({"size": torch.Size([1, 3])}, "a part of 'weight' is outside it"),
        ({"dtype": os.system}, "a tensor without dtype"),
        ({"chunks": []}, "a part of 'weight' is stored, but not described"),
        ({"begin": 2**61}, "a file is truncated"),
        ({"length": 4}, "not a file of torch.save"),
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_its_files_is_one_message(
    checkpoint_folder: Path, change: dict[str, Any], message: str
) -> None:
    ((name, value),) = change.items()

    def claim(index: Metadata) -> Metadata:
        tensor = index.state_dict_metadata["weight"]
        if name in ("begin", "length"):
            key = next(key for key in index.storage_data if key.fqn == "weight")
            index.storage_data[key] = replace(
                index.storage_data[key], **{"offset" if name == "begin" else name: value}
            )
        elif name == "dtype":
            tensor.properties = Properties(value)
        else:
            setattr(tensor, name, value)
        return index

    rewrite(checkpoint_folder, claim)
    with pytest.raises(UserError, match=f"{checkpoint_folder}.*{message}"):
        read_then_load(checkpoint_folder)


def read_then_load(folder: Path) -> None:
    read_index(folder)  # as ``load_weights`` does first
    load(folder, {"weight": torch.zeros(2, 3)})


class Properties:
    """``TensorProperties`` whose state names something else as the dtype."""

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def __reduce__(self) -> Any:
        return object, (), (self._dtype, None, False, None, False)


@pytest.mark.parametrize(
    ("name", "read"),
    [("metadata.json", lambda folder: load_weights(folder, [], 0)), ("manifest.json", open_megatron)],
)
def test_a_checkpoints_small_files_are_no_links_out_of_it(
    checkpoint_folder: Path, tmp_path: Path, name: str, read: Any
) -> None:
    (tmp_path / "secret").write_text('{"sharded_backend": "0123abc"}')
    (checkpoint_folder / "metadata.json").write_text("{}")
    (checkpoint_folder / name).unlink(missing_ok=True)
    (checkpoint_folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=rf"{name}: .*leads to {tmp_path}/secret, outside") as error:
        read(checkpoint_folder)
    assert "0123abc" not in str(error.value)


def test_an_index_changes_no_class(checkpoint_folder: Path, tmp_path: Path) -> None:
    """BUILD with a slot state on a class that Python's unpickler allows: it sets attributes of the class."""
    name = str(tmp_path / "stolen")
    poison = b"cpathlib\nPosixPath\nN}X\x04\x00\x00\x00nameX" + struct.pack("<I", len(name)) + name.encode()
    poison += b"s\x86b0"  # name = ..., as the slot state of the class itself
    file = checkpoint_folder / ".metadata"
    genuine = file.read_bytes()
    file.write_bytes(genuine[:2] + poison + genuine[2:])
    before = vars(PurePath)["name"], dict(vars(PosixPath))
    with pytest.raises(
        UserError, match=r"\.metadata: not readable \(damaged pickle \(state of no object\)\)"
    ):
        read_index(checkpoint_folder)
    assert (vars(PurePath)["name"], dict(vars(PosixPath))) == before
    poison_file = tmp_path / "poison"  # without torch's classes, which take long to import
    poison_file.write_bytes(genuine[:2] + poison + b"N.")
    code = (
        "import pickle, sys, pathlib; pickle.load(open(sys.argv[1], 'rb')); print(pathlib.Path('a/b').name)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, poison_file], capture_output=True, text=True, timeout=300
    )
    assert process.stdout == f"{name}\n", process.stderr  # the poison does what it should


def test_an_index_reads_no_file_outside(checkpoint_folder: Path) -> None:
    """A dictionary whose ``values`` is another, so that a check of the values would see other ones."""

    class Hidden(OrderedDict[Any, Any]):
        def __reduce__(self) -> Any:
            items = [(MetadataIndex("weight"), _StorageInfo("/etc/passwd", 0, 4))]
            return OrderedDict, (), {"values": dict}, None, iter(items)

    def hide(index: Metadata) -> Metadata:
        return replace(index, storage_data=Hidden())

    rewrite(checkpoint_folder, hide)
    with pytest.raises(UserError, match="/etc/passwd' is outside the checkpoint's folder"):
        read_index(checkpoint_folder)


def test_no_nesting_ends_the_process(checkpoint_folder: Path) -> None:
    deep = b"\x80\x04}" + b")" + b"\x85" * 300_000 + b"Ns."  # nested tuples as a key: hashing would recurse
    (checkpoint_folder / ".metadata").write_bytes(deep)
    with pytest.raises(UserError, match=r"\.metadata: not readable"):
        read_index(checkpoint_folder)


def test_an_index_may_name_what_it_does_not_need(checkpoint_folder: Path) -> None:
    """As torch 2.13 does, whose second save in a process puts a plan into the index."""
    rewrite(checkpoint_folder, lambda found: replace(found, planner_data=SavePlan([], Payload(Path("x")))))
    assert read_index(checkpoint_folder).tensors["weight"].shape == (2, 3)


def test_values_of_a_pickle_are_inert() -> None:
    values = load_values(pickle.dumps({"a": Payload(Path("x")), "b": [1, (2.5, b"c")]}, protocol=5))
    assert isinstance(values, Pairs)
    assert values.get("b") == [1, (2.5, b"c")]
    payload = values.get("a")
    assert isinstance(payload, Record)
    assert payload.maker == Name("posix", "system")
    assert payload.arguments == ("touch x",)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_of_all_protocols(protocol: int) -> None:
    value = [None, True, -5, 2**70, -(2**70), 1.5, "t\u00e9xt\n'", (1, (2,)), [[]], 300, 70_000, ()]
    assert load_values(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize(
    "data", [b"", b".", b"(.", b"\x80", b"X\xff\xff\xff\xff", b"K\x01K\x02.", b"h\x05.", b"\x82\x01."]
)
def test_damaged_pickles_are_one_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="damaged pickle"):
        load_values(data)


def test_pickles_for_other_libraries_are_left_out() -> None:
    """Transformer Engine unpickles its FP8 states; Megatron's SafeUnpickler does not stop a hostile one."""
    plain = {"scale": torch.ones(3)}
    state = {
        "a._extra_state": torch.tensor(list(pickle.dumps(1)), dtype=torch.uint8),
        "b._extra_state": io.BytesIO(pickle.dumps(1)),
        "c._extra_state": None,
        "d.fp8._extra_state": plain,
        "weight": torch.ones(2),
    }
    drop_pickled_states(state)
    assert list(state) == ["c._extra_state", "d.fp8._extra_state", "weight"]
    assert state["d.fp8._extra_state"] is plain


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [("run/checkpoints/step_000002", True), ("other/step_000002", False), ("run/link/step_000002", False)],
)
def test_a_run_trusts_pickles_only_in_its_own_folder(tmp_path: Path, checkpoint: str, expected: bool) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "other")
    loaded: list[bool] = []

    def load(folder: Path, *, trusted: bool) -> dict[str, Any]:
        loaded.append(trusted)
        return {"step": 2, "sampler": {}, "summary": {}, "seconds": 1.0}

    run: Any = SimpleNamespace(_checkpoint=tmp_path / checkpoint, _run_dir=tmp_path / "run", _started=0.0)
    run.events = SimpleNamespace(phase=lambda name: None)
    run.weight_sync = SimpleNamespace(restore=lambda state: None)
    run.trainer = SimpleNamespace(load=load)
    assert RankRun.resume(run) == 2
    assert loaded == [expected]


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/__0_0.distcp"])
def test_an_index_names_only_files_of_its_folder(checkpoint_folder: Path, path: str) -> None:
    def move(index: Metadata) -> Metadata:
        return replace(index, storage_data={MetadataIndex("weight"): _StorageInfo(path, 0, 4)})

    rewrite(checkpoint_folder, move)
    with pytest.raises(UserError, match=r"\.metadata: not readable .* is outside the checkpoint's folder"):
        read_index(checkpoint_folder)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps({"tensors": 1}), pickle.dumps(Metadata({}))]
)
def test_what_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata: not readable .*; copy the checkpoint again"):
        read_index(tmp_path)


def test_our_own_index_needs_no_pickle(checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_index(checkpoint_folder)
    write_plain_index(checkpoint_folder, unchecked_index(checkpoint_folder))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle is read")

    monkeypatch.setattr("rpg_megatron.checkpoints.index.read_foreign", refuse)
    assert read_index(checkpoint_folder) == expected
    with (checkpoint_folder / ".metadata").open("ab") as f:  # another tool has changed it
        f.write(b"x")
    with pytest.raises(AssertionError, match="a pickle is read"):
        read_index(checkpoint_folder)


@pytest.mark.parametrize(
    "change",
    [
        {"begin": -1},
        {"file": "../x"},
        {"name": "other"},
        {"length": 2**63},
        {"offset": [1]},
        {"begin": "0"},
    ],
)
def test_a_plain_index_is_checked_too(checkpoint_folder: Path, change: dict[str, Any]) -> None:
    write_plain_index(checkpoint_folder, unchecked_index(checkpoint_folder))
    file = checkpoint_folder / PLAIN_INDEX
    content = json.loads(file.read_text())
    names = ["name", "offset", "number", "file", "begin", "length"]
    for name, value in change.items():
        content["index"]["pieces"][0][names.index(name)] = value
    file.write_text(json.dumps(content))
    if change.keys() & {"file", "name", "offset"}:
        with pytest.raises(UserError, match="not readable"):
            read_index(checkpoint_folder)
    else:  # not valid: the pickled index is read instead
        assert read_index(checkpoint_folder).pieces


def test_offsets_chosen_to_have_one_hash_are_refused(checkpoint_folder: Path) -> None:
    """Dictionaries of a million such keys would take days. Python hashes tuples of numbers by xxHash."""
    prime1, prime2, prime5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    size = 2**64

    def mix(state: int, number: int) -> int:
        state = (state + number * prime2) % size
        return ((state << 31 | state >> 33) % size) * prime1 % size

    offsets: list[list[int]] = []
    number = 0
    while len(offsets) < 100:
        number += 1
        partner = (mix(prime5, 7) - mix(prime5, number)) * pow(prime2, -1, size) % size
        if partner < 2**61 - 1:
            offsets.append([number, partner])
    assert len({hash(tuple(offset)) for offset in offsets}) == 1
    tensor = {"dtype": "uint8", "shape": [2**62, 2**62, 0], "chunks": [([*o, 0], [0] * 3) for o in offsets]}
    digest = hashlib.sha256((checkpoint_folder / ".metadata").read_bytes()).hexdigest()
    content = {"sha256": digest, "index": {"tensors": {"w": tensor}, "objects": [], "pieces": []}}
    (checkpoint_folder / PLAIN_INDEX).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"not readable \(the parts of 'w' are chosen to take long\)"):
        read_index(checkpoint_folder)


def test_a_tensor_larger_than_any_file_is_refused(checkpoint_folder: Path) -> None:
    def enlarge(index: Metadata) -> Metadata:
        index.state_dict_metadata["weight"].size = torch.Size([2**40] * 8)
        return index

    rewrite(checkpoint_folder, enlarge)
    with pytest.raises(UserError, match="'weight' is larger than any file"):
        read_index(checkpoint_folder)


def test_patches_end_with_the_block(tmp_path: Path) -> None:
    before = dcp.FileSystemReader.read_metadata, dcp.FileSystemReader.read_data, serialization.load_common
    with suppress(RuntimeError), plain_loading(tmp_path):
        assert dcp.FileSystemReader.read_data is not before[1]
        raise RuntimeError
    after = dcp.FileSystemReader.read_metadata, dcp.FileSystemReader.read_data, serialization.load_common
    assert after == before


def test_errors_of_libraries_are_one_message(tmp_path: Path) -> None:
    message = r"cannot be loaded as a checkpoint of this model \(KeyError: 'x'\)"
    with pytest.raises(UserError, match=message), plain_loading(tmp_path):
        raise KeyError("x")


def test_a_file_that_is_too_short_is_one_message(checkpoint_folder: Path) -> None:
    file = checkpoint_folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(UserError, match=f"{checkpoint_folder}: not readable"):
        load(checkpoint_folder)


def test_irregular_files_of_a_checkpoint_are_reported_as_damage(checkpoint_folder: Path) -> None:
    contents = read_index(checkpoint_folder)
    (name,) = contents.ends
    (checkpoint_folder / name).unlink()
    os.mkfifo(checkpoint_folder / name)
    assert find_short_files(checkpoint_folder, contents) == [f"{name} cannot be read (not a regular file)"]
