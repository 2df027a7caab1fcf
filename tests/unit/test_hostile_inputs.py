"""Settings, models and data sets from others end in one message: no hang, no traceback, no unbounded memory.

Why: people download models and data, and read configs that others wrote; what is wrong with them must be said
before a job holds GPUs. Not covered: pickles in checkpoints (test_restricted_pickle), and what vLLM and
transformers do with a model's other files.
"""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.checkpoints.hf_files import list_checkpoint, list_copied, read_header
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data import prompts, rows
from rpg_megatron.data.problems import Problem, read_problems
from rpg_megatron.data.prompts import fit_prompts, load_tokenizer
from rpg_megatron.launcher.preflight import check_model
from rpg_megatron.models.registry import mapping_for
from tests.support.megatron_shards import grid, stage_values
from tests.support.tiny_models import TINY, random_state_dict, write_checkpoint

DEEP = 100_000
"""Levels of nesting: more than any parser's stack holds."""


# -- settings ------------------------------------------------------------------------------------------------


def bomb(levels: int) -> str:
    """A list of nine lists of nine lists ..., by aliases: 9 to the power of ``levels`` values."""
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels))]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (bomb(12), "too large after its aliases are expanded"),
        ("a: &a [*a]\n", "an alias refers to a value that contains it"),
        ("a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nseed: *b\n", "seed: "),
        ("a: " + "[" * DEEP, "nested too deeply"),
        ("seed: " + "9" * 5000, "a number has too many digits"),
        ("seed: 0x" + "f" * 50_000, "a number has too many digits"),
        ("seed: 2026-99-99", "a value cannot be read"),
        ("? [a]\n: b\n", "unhashable"),
        ("#" * 1_100_000, "larger than 1,000,000 bytes"),
    ],
)
def test_settings_that_no_reader_can_take(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load_settings(file)
    assert str(error.value).startswith(str(file))
    assert told in str(error.value)
    assert len(str(error.value)) < 2000


def test_aliases_of_a_usual_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {path: m}\ndata: &d {path: d, where: {a: &w [1, 2], b: *w}}\nevaluation: {data: *d}\n"
    )
    settings = load_settings(file, ["optimizer.lr=1e-4"])
    assert settings.data.where == {"a": (1, 2), "b": (1, 2)}


def test_overrides_that_no_reader_can_take(config_file: Path) -> None:
    for value in ("[" * DEEP, "9" * 5000):
        with pytest.raises(UserError, match="the value is not valid YAML"):
            load_settings(config_file, [f"seed={value}"])


def test_a_name_is_short_enough_for_a_folder() -> None:
    plain = {"model": {"path": "m"}, "data": {"path": "d"}}
    assert Settings.model_validate(plain | {"name": "n" * 128}).name == "n" * 128
    with pytest.raises(ValidationError, match="at most 128 characters"):
        Settings.model_validate(plain | {"name": "n" * 129})


# -- files that are no files ---------------------------------------------------------------------------------


def read_set(path: Path) -> object:
    return read_problems(DataSettings(path=path))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("c.yaml", load_settings),
        ("config.json", lambda file: read_model_shape(file.parent)),
        ("model.safetensors", lambda file: list_checkpoint(file.parent)),
        ("model.safetensors.index.json", lambda file: list_checkpoint(file.parent)),
        ("tokenizer.json", lambda file: list_copied(file.parent)),
        ("d.jsonl", read_set),
        ("d.parquet", read_set),
        ("d.arrow", read_set),
    ],
)
def test_a_fifo_and_a_device_are_refused_at_once(tmp_path: Path, name: str, read) -> None:
    file = tmp_path / name
    os.mkfifo(file)
    with pytest.raises(UserError, match=f"{name}"):
        read(file)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name}"):
        read(file)


# -- models --------------------------------------------------------------------------------------------------


def write_header(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"a": entry([1] * 200_000, 0, 4)}, "a has 200,000 dimensions, more than 64"),
        (
            {f"t{i}": entry([1], 0, 4) for i in range(1000)},
            r"bytes 0 to 4, but the previous tensor ends at 4",
        ),
        (
            {"a": entry([1], 0, 4), "b": entry([1], 2, 6)},
            "b is at bytes 2 to 6, but the previous tensor ends at 4",
        ),
        ({"a": entry([1], 4, 8)}, "a is at bytes 4 to 8, but the previous tensor ends at 0"),
        ({"a": entry([-1], 0, -4)}, "an invalid shape"),
        ({"a": entry([1.0], 0, 4)}, "an invalid shape"),
        ({"a": entry([2**63, 2**63], 0, 4)}, "an invalid shape"),
        ({"a": entry([1], 0, 4.0)}, "a is at bytes"),
        ({"a": entry([1], "0", 4)}, "a is at bytes"),
        ({"a": entry("11", 0, 4)}, "an invalid shape"),
        (b"[" * DEEP, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_headers_beyond_the_format_are_refused(tmp_path: Path, header: object, told: str) -> None:
    file = write_header(tmp_path / "model.safetensors", header, b"\0" * 4)
    began = time.monotonic()
    with pytest.raises(UserError, match=told) as error:
        read_header(file)
    assert str(error.value).startswith(str(file))
    assert time.monotonic() - began < 30


def test_tensors_in_any_order_and_without_elements_are_read(tmp_path: Path) -> None:
    header = {
        "b": entry([1], 4, 8),
        "none": entry([0, 5], 4, 4),
        "a": entry([1], 0, 4),
        "scalar": entry([], 8, 12),
    }
    found = read_header(write_header(tmp_path / "model.safetensors", header, b"\0" * 12))
    assert {name: t.shape for name, t in found.items()} == {
        "a": (1,),
        "b": (1,),
        "none": (0, 5),
        "scalar": (),
    }


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/model.safetensors", ".", "", 7])
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"index\.json: truncated or corrupt: not a valid index"):
        list_checkpoint(tmp_path)


def test_a_deep_index_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * DEEP)
    with pytest.raises(UserError, match=r"index\.json: .*nested too deeply"):
        list_checkpoint(tmp_path)


def test_only_files_of_the_model_are_copied_into_exports(tmp_path: Path) -> None:
    model, secret = tmp_path / "model", tmp_path / "secret"
    layout = mapping_for(TINY)
    state = random_state_dict(layout)
    write_checkpoint(model, TINY, state)
    secret.write_text("mine")
    secret.chmod(0o600)
    (model / "vocab.txt").write_text("a")
    (model / "words.txt").symlink_to("vocab.txt")  # within the folder
    place = grid(TINY, 1, 1)[0]

    def export(name: str) -> Path:
        out = tmp_path / name
        params = stage_values(layout, place, 1, state)
        export_hf(out, model, params, layout, place, dtype=torch.float32)
        return out

    assert {"vocab.txt", "words.txt"} <= {file.name for file in export("one").iterdir()}
    (model / "notes.txt").symlink_to(secret)
    for attempt in (lambda: export("two"), lambda: list_copied(model)):
        with pytest.raises(UserError, match=r"notes\.txt: links to .*secret, outside the model's folder"):
            attempt()
    assert not (tmp_path / "two").exists()


def test_a_job_is_refused_before_it_starts_if_its_model_links_elsewhere(
    tmp_path: Path, make_checkpoint
) -> None:
    model = make_checkpoint(tmp_path / "model")
    check_model(model)
    (tmp_path / "secret").write_text("mine")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"model\.path: .*notes\.txt: links to"):
        check_model(model)


def test_the_cache_of_the_hub_is_all_links_and_is_accepted(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    revision = cache / "snapshots" / "0123"
    revision.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "abc").write_text("{}")
    (revision / "config.json").symlink_to("../../blobs/abc")
    (tmp_path / "model").symlink_to(revision)
    assert [file.name for file in list_copied(tmp_path / "model")] == ["config.json"]
    (cache / "token.txt").write_text("mine")
    (revision / "token.txt").symlink_to("../../token.txt")
    with pytest.raises(UserError, match="outside the model's folder"):
        list_copied(revision)


def test_a_tokenizer_with_code_of_its_own_asks_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["own.T", None]}})
    )
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(str(question)) or "y")
    with pytest.raises(UserError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
    assert asked == []
    assert not (tmp_path / "ran").exists()
    assert "y/N" not in capsys.readouterr().out


# -- data ----------------------------------------------------------------------------------------------------


def test_a_small_file_that_stands_for_gigabytes_is_refused(tmp_path: Path, monkeypatch) -> None:
    """A limit of 4 MB stands for that of 256 MB, and a file of 100 MB for one of GBs."""
    monkeypatch.setattr(rows, "_MIN_TEXT_LIMIT", 4_000_000)
    table = pa.table({"prompt": ["x" * 100_000] * 1000, "answer": ["1"] * 1000})
    file = tmp_path / "d.parquet"
    pq.write_table(table, file, compression="zstd")
    assert file.stat().st_size < 20_000
    del table
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(UserError, match=r"d\.parquet: holds more than 4 MB of text"):
        read_problems(DataSettings(path=file))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    assert pa.total_allocated_bytes() - before < 20_000_000
    tracemalloc.stop()
    assert len(read_problems(DataSettings(path=file, limit=20))) == 20  # what is not read takes nothing


class SlowTokenizer:
    """Its template counts for as long as it is let."""

    chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    def apply_chat_template(self, messages: object, **options: object) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        return ImmutableSandboxedEnvironment().from_string(self.chat_template).render(messages=messages)


def test_a_chat_template_that_does_not_end_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(prompts, "_RENDER_SECONDS", 0.3)
    problem = Problem(0, "1+1", "2", 0, "d.jsonl:1")
    with pytest.raises(UserError, match=r"d\.jsonl:1: the chat template cannot render it .*TimeoutError"):
        fit_prompts([problem], DataSettings(path="d.jsonl", chat=True), SlowTokenizer())
    assert prompts.signal.getitimer(prompts.signal.ITIMER_REAL) == (0.0, 0.0)
