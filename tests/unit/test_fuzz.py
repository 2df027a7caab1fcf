"""Mutated foreign files give a value or one message, never a changed class, another file or an ended process.

Why: what a file can do with a parser is found by trying, not by listing. The small counts run always, the
large ones with the long tests and ``make fuzz``; RPG_FUZZ_SEED chooses other mutations. Not covered: files
that a search guided by coverage would find.
"""

import builtins
import collections
import gc
import io
import os
import pathlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from rpg_megatron.checkpoints import foreign_reader, index, plain_loading
from rpg_megatron.checkpoints.hf_files import read_header
from rpg_megatron.config import UserError, load_settings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.problems import read_problems
from rpg_megatron.system.foreign_input import read_foreign
from tests.support.mutations import mutate_bytes, mutate_pickle, mutate_text

SEED = int(os.environ.get("RPG_FUZZ_SEED", "0"))
LARGE = pytest.mark.long
WATCHED = (builtins, collections, pathlib, metadata, filesystem, torch, foreign_reader, index)
_events: list[str] = []
_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event.partition(".")[0] in (
        *("open", "import", "exec", "compile", "os", "subprocess", "socket", "ctypes", "pickle", "shutil"),
    ):
        _events.append(f"{event} {arguments}"[:200])


sys.addaudithook(_audit)


@contextmanager
def nothing_is_touched() -> Iterator[None]:
    """Fails if the block opens a file, imports, runs code by name, or changes a class."""
    global _watching
    before = _classes()
    _events.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
    assert _events == []
    assert _classes() == before


def _classes() -> dict[str, dict[str, int]]:
    """Every class of the watched modules -> its attributes and their identities."""
    classes = {c for module in WATCHED for c in vars(module).values() if isinstance(c, type)}
    classes |= {
        c for c in gc.get_objects() if isinstance(c, type) and c.__module__ in ("pathlib", "collections")
    }
    return {f"{c.__module__}.{c.__qualname__}": {k: id(v) for k, v in vars(c).items()} for c in classes}


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several tensors and objects."""
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    state = {f"layers.{i}.weight": torch.ones(2, 3) * i for i in range(3)}
    dcp.save(state | {"note": {"step": 3}, "scale": torch.ones(1)}, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=LARGE)])
def test_indexes(genuine: Path, count: int) -> None:
    """Opcodes inserted, deleted, swapped, BUILD and REDUCE at random places."""
    chance, original = random.Random(SEED), (genuine / ".metadata").read_bytes()
    mutated = [mutate_pickle(original, chance) for _ in range(count)]
    accepted = 0
    foreign_reader.prepare()
    with nothing_is_touched():
        for data in mutated:
            with suppress(ValueError):
                (content,) = foreign_reader.read_index([io.BytesIO(data)], None)  # type: ignore[list-item]
                index._check(content)
                assert all(".." not in p.file and not p.file.startswith("/") for p in content.pieces)
                accepted += 1
    assert 0 < accepted < count  # some mutations do not matter, and some do
    # And in the process that reads them.
    answers = list(read_foreign("tests.support.foreign_readers:read_indexes", [], mutated))
    assert len(answers) == count
    assert answers.count("read") >= accepted
    assert set(answers) == {"read", "refused"}


def test_python_would_have_been_changed(genuine: Path) -> None:
    """The mutations reach what they are meant to reach: Python's own unpickler calls what they name."""
    chance, original = random.Random(SEED), (genuine / ".metadata").read_bytes()
    called: set[str] = set()

    class Watched(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in (("posix", "system"), ("builtins", "eval")):
                return lambda *_: called.add(name)
            return super().find_class(module, name)

    for _ in range(2000):
        with suppress(Exception):
            Watched(io.BytesIO(mutate_pickle(original, chance))).load()
    assert called


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=LARGE)])
def test_tensors(genuine: Path, tmp_path: Path, count: int) -> None:
    """The files of tensors: archives of torch.save."""
    chance, file = random.Random(SEED), tmp_path / "x.distcp"
    original = io.BytesIO()
    torch.save(torch.arange(64.0).reshape(8, 8), original)
    mutated = []
    for _ in range(count):
        data = mutate_bytes(original.getvalue(), chance)
        mutated.append((data, len(data)))
    file.write_bytes(b"".join(data for data, _ in mutated))
    begin, read = 0, 0
    foreign_reader.prepare()
    with file.open("rb") as opened, nothing_is_touched():
        for _, length in mutated:
            with suppress(ValueError):
                ((location,),) = foreign_reader.locate_tensors([opened], [(0, begin, length)])
                assert plain_loading._read_tensor(opened, location).numel() <= length
                read += 1
            begin += length
    assert 0 < read < count


def parquet(file: Path, table: pa.Table) -> None:
    pq.write_table(table, file, row_group_size=20)


def arrow(file: Path, table: pa.Table) -> None:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("count", [3, pytest.param(300, marks=LARGE)])
@pytest.mark.parametrize("write", [parquet, arrow])
def test_tables(tmp_path: Path, write: Callable[[Path, pa.Table], None], count: int) -> None:
    """Arrow and Parquet files, whose readers are C++."""
    chance, file = random.Random(SEED), tmp_path / f"d.{write.__name__}"
    prompts = [{"role": "user", "content": f"{i}+{i}"} for i in range(50)]
    write(file, pa.table({"prompt": [[p] for p in prompts], "answer": [str(2 * i) for i in range(50)]}))
    original = file.read_bytes()
    for _ in range(count):
        file.write_bytes(mutate_bytes(original, chance))
        with suppress(UserError):
            read_problems(DataSettings(path=file, malformed="skip"))


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=LARGE)])
def test_settings(config_file: Path, count: int) -> None:
    chance, original = random.Random(SEED), config_file.read_text()
    for _ in range(count):
        config_file.write_text(mutate_text(original, chance))
        with suppress(UserError):
            load_settings(config_file)


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=LARGE)])
def test_headers_of_weights(checkpoint: Path, tmp_path: Path, count: int) -> None:
    chance, file = random.Random(SEED), tmp_path / "model.safetensors"
    original = (checkpoint / "model.safetensors").read_bytes()[:20_000]
    for _ in range(count):
        file.write_bytes(mutate_bytes(original, chance))
        with suppress(UserError):
            read_header(file)
