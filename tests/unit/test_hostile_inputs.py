"""Settings, models and data sets from others end in one message: no hang, no traceback, no unbounded memory.

Why: people download models and data, and read configs that others wrote; errors in them must be reported
before a job holds GPUs. Not covered: pickles in checkpoints (test_plain_loading), and what vLLM and
transformers do with a model's other files.
"""

import json
import os
import shutil
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.checkpoints.hf_files import list_checkpoint, list_copied, read_header
from rpg_megatron.commands.convert.command import open_megatron
from rpg_megatron.commands.convert.staging import Staging
from rpg_megatron.commands.plan.command import run_plan
from rpg_megatron.commands.plan.plan import find_target
from rpg_megatron.config import UserError, load_settings, merging, read_model_shape
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.parsing import read_yaml
from rpg_megatron.data import chat_template, rows
from rpg_megatron.data.problems import read_problems
from rpg_megatron.data.prompts import fit_prompts, load_tokenizer
from rpg_megatron.data.stored_problems import Problem
from rpg_megatron.launcher.input_checks import list_custom_code
from rpg_megatron.launcher.nodes import find_nodes
from rpg_megatron.launcher.preflight import check_model
from rpg_megatron.launcher.stopping import StopSignals
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
    ("text", "message"),
    [
        (bomb(12), "too large after its aliases are expanded"),
        ("a: &a [*a]\n", "an alias refers to a value that contains it"),
        ("a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nseed: *b\n", "seed: "),
        ("a: " + "[" * DEEP, "nested too deeply"),
        ("seed: " + "9" * 5000, "a number has too many digits"),
        ("seed: 0x" + "f" * 50_000, "a number has too many digits"),
        ("seed: 2026-99-99", "a value cannot be read"),
        ("? [a]\n: b\n", "unhashable"),
        ("#" * 1_100_000, "larger than 250,000 bytes"),
        ("seed: " + ":".join(["59"] * 400) + ".5\n", "c.yaml:1: not valid YAML: a value cannot be read"),
        ("seed: !!bool maybe\n", "a value cannot be read"),
        ('name: "\\UFFFFFFFF"\n', "a value cannot be read"),
        ('model: {path: "a\\0b"}\n', "a NUL"),
        ('model: {path: "\\ud800"}\n', "half of a surrogate pair"),
        (
            "\n".join(f"a{i}: &a{i} {'[' * 50}{f'*a{i - 1}' if i else ''}{']' * 50}" for i in range(40)),
            "too deeply",
        ),
        ("k: 1\n" * 2, "appears twice"),
        ("".join(f"key_{i}: 1\n" for i in range(60_000)), "larger than 250,000 bytes"),
        ("".join(f"k{i}: 1\n" for i in range(2000)), "c.yaml: and 1,981 more problems"),
        ("seed: {" + ", ".join(f"k{i}: 1" for i in range(2000)) + "}\n", "seed: "),
        ("extends: {" + ", ".join(f"k{i}: 1" for i in range(2000)) + "}\n", "a file or a list of files"),
        ("? " + "k" * 100_000 + "\n: 1\n", "'kkk"),
        ("? '" + "k" * 100_000 + "'\n: 1\n? '" + "k" * 100_000 + "'\n: 1\n", "'kkk"),
        ("objective: {type: " + "k" * 100_000 + "}\n", "objective.type: 'kkk"),
    ],
)
def test_settings_that_no_reader_can_take(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load_settings(file)
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)
    assert len(str(error.value)) < 10_000


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *((f"engine.replicas=1{'0' * n}", "less than or equal to 10000") for n in (6, 9, 18)),
        *((f"parallel.context=1{'0' * n}", "at most 100,000 ranks") for n in (6, 9, 18)),
        ("parallel={tensor: 1000, data: 1000}", "tensor x pipeline x context x data is 1,000,000; at most"),
        *(
            (f"engine.kv_cache_gib={value}", "less than or equal to 1000000")
            for value in ("1.0e+308", ".inf")
        ),
        ("rollout.workers=1000000", "less than or equal to 10000"),
        (f"rollouts.keep={'9' * 400}GB", "rollouts.keep: must be a number of steps"),
    ],
)
def test_numbers_that_a_plan_would_never_end_with(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_settings(config_file, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key", ["training.steps", "rollout.prompts_per_step", "parallel.data", "engine.tensor"]
)
def test_other_large_numbers_are_planned_or_refused_at_once(config_file: Path, key: str) -> None:
    with suppress(UserError):
        settings = load_settings(config_file, [f"{key}=1{'0' * 18}"])
        run_plan(settings, find_target(settings, None), sweep=True, as_json=True)


def test_a_schedule_of_ones_own_is_tried_for_a_few_of_the_steps(config_file: Path) -> None:
    override = ["training.steps=1000000000", "optimizer.schedule={type: 'a:b'}"]
    (code,) = list_custom_code(load_settings(config_file, override))
    assert len(code.trial_calls) == 10_000
    assert code.trial_calls[0] == (1, 10**9)


def test_files_that_extend_each_other_many_times_are_refused(tmp_path: Path, monkeypatch) -> None:
    files_read: list[Path] = []
    monkeypatch.setattr(merging, "read_yaml", lambda file: files_read.append(file) or read_yaml(file))
    for i in range(14):
        (tmp_path / f"{i}.yaml").write_text(f"extends: [{i + 1}.yaml, {i + 1}.yaml]\n")
    (tmp_path / "14.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match="extends leads to more than 100 files or 250,000 bytes"):
        load_settings(tmp_path / "0.yaml")
    assert len(files_read) < 110
    files_read.clear()
    (tmp_path / "large.yaml").write_text("# " + "x" * 100_000)
    (tmp_path / "c.yaml").write_text("extends: [" + "large.yaml, " * 50 + "]\n")
    with pytest.raises(UserError, match="extends leads to more than"):
        load_settings(tmp_path / "c.yaml")
    assert len(files_read) < 6


def test_a_link_to_itself_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").symlink_to("c.yaml")
    with pytest.raises(UserError, match=r"c\.yaml: cannot be read"):
        load_settings(tmp_path / "c.yaml")


def test_a_section_in_two_places_is_two_sections(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "c.yaml").write_text(
        "model: {path: m}\ndata: &d {path: d, where: {a: &w [1, 2], b: *w}}\nevaluation: {data: *d}\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = load_settings(Path("conf/c.yaml"), ["data.limit=5"])
    assert (settings.data.path, settings.data.limit) == (Path("conf/d"), 5)
    assert settings.data.where == {"a": (1, 2), "b": (1, 2)}
    assert (settings.evaluation.data.path, settings.evaluation.data.limit) == (Path("conf/d"), None)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("x" * 100_000, "overrides have the form"),
        ("seed=[" + "x" * 100_000, "the value is not valid YAML"),
        ("seed.a." + "b" * 100_000 + "=1", "is a value, not a section"),
        ("reward." + "a." * 5000 + "a=1", "a key has at most 20 dots"),
        ("seed=" + "[" * DEEP, "the value is not valid YAML"),
        ("seed=" + "9" * 5000, "the value is not valid YAML"),
    ],
)
def test_of_a_long_override_the_beginning_is_shown(config_file: Path, item: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_settings(config_file, ["seed=1", item])
    assert str(error.value).startswith(repr(item)[:60])
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "name", ["..", ".", "...", "-rf", ".hid", "a/b", "", " a", "a ", "a\n", "a\0", "\x1b[2J", "n" * 129]
)
def test_a_name_is_no_hidden_folder_and_no_option(config_file: Path, name: str) -> None:
    values = {"name": name, "evaluation.sets": [{"path": "d", "name": name}], "evaluation.name": name}
    message = "must be 1 to 128 letters, digits, .* no dot or dash first|not valid YAML"
    for key, value in values.items():
        with pytest.raises(UserError, match=message):
            load_settings(config_file, [f"{key}={json.dumps(value)}"])
    with pytest.raises(UserError, match=r"--job .* no dot or dash first"):
        find_nodes(0, 2, name)


def test_a_name_is_short_enough_for_a_folder(config_file: Path) -> None:
    for name in ("n" * 128, "a..b", "7-B_x"):
        assert load_settings(config_file, [f"name={name}"]).name == name


@pytest.mark.parametrize("key", ["model.path", "data.path", "runs"])
def test_a_path_that_no_file_can_have(config_file: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"{key}: a part of this path is longer than 255 bytes") as error:
        load_settings(config_file, [f"{key}=a/{'b' * 254}é/c"])
    assert len(str(error.value)) < 400
    assert load_settings(config_file, [f"{key}=a/{'b' * 253}é/c"])


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
    ("header", "message"),
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
def test_headers_beyond_the_format_are_refused(tmp_path: Path, header: object, message: str) -> None:
    file = write_header(tmp_path / "model.safetensors", header, b"\0" * 4)
    began = time.monotonic()
    with pytest.raises(UserError, match=message) as error:
        read_header(file)
    assert str(error.value).startswith(str(file))
    assert time.monotonic() - began < 30


def test_a_pointer_of_git_lfs_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UserError, match="a pointer of Git LFS, not the weights; run git lfs pull"):
        read_header(tmp_path / "model.safetensors")


def test_tensors_in_any_order_and_without_elements_are_read(tmp_path: Path) -> None:
    header = {
        "b": entry([1], 4, 8),
        "none": entry([0, 5], 4, 4),
        "a": entry([1], 0, 4),
        "scalar": entry([], 8, 12),
    }
    tensors = read_header(write_header(tmp_path / "model.safetensors", header, b"\0" * 12))
    assert {name: t.shape for name, t in tensors.items()} == {
        "a": (1,),
        "b": (1,),
        "none": (0, 5),
        "scalar": (),
    }


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/model.safetensors", ".", "", 7])
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, name: object) -> None:
    for text, message in (
        (json.dumps({"weight_map": {"a": name}}), "truncated or corrupt: not a valid index"),
        ("[" * DEEP, ".*nested too deeply"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UserError, match=rf"index\.json: {message}"):
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
        with pytest.raises(UserError, match=r"notes\.txt: leads to .*secret, outside .*model"):
            attempt()
    assert not (tmp_path / "two").exists()


def test_the_folder_of_a_checkpoints_tokenizer_is_no_link(tmp_path: Path) -> None:
    layout = mapping_for(TINY)
    write_checkpoint(tmp_path / "private", TINY, random_state_dict(layout))
    folder = tmp_path / "checkpoint" / "release"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("release")
    (folder / "hf").symlink_to(tmp_path / "private")
    with pytest.raises(
        UserError, match=r"hf/config\.json: leads to .*private/config\.json, outside .*; copy"
    ):
        open_megatron(folder.parent)
    (tmp_path / "way").symlink_to(tmp_path / "private")
    assert (
        open_megatron(folder.parent, config=tmp_path / "way").root == tmp_path / "way"
    )  # the user's own link


def test_weights_may_be_links(tmp_path: Path, make_checkpoint) -> None:
    model = make_checkpoint(tmp_path / "model")
    (model / "model.safetensors").rename(tmp_path / "elsewhere")
    (model / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert list_checkpoint(model)
    check_model(model)


def test_the_folder_of_a_conversion_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Staging(tmp_path / "out", 0, StopSignals()) as place:
            assert place.work == tmp_path / ".out.incomplete"
            assert place.work.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert not place.work.exists()


@pytest.mark.parametrize("kind", ["link", "open to others"])
def test_a_conversion_takes_no_folder_that_others_have_made(tmp_path: Path, kind: str) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    (tmp_path / "victim" / "file").touch()
    work = tmp_path / ".out.incomplete"
    if kind == "link":
        work.symlink_to(tmp_path / "victim")
    else:
        work.mkdir()
        work.chmod(0o777)
        (work / "lock").symlink_to(tmp_path / "victim" / "file")
    with (
        pytest.raises(UserError, match=r"\.out\.incomplete: .*; choose a writable folder"),
        Staging(tmp_path / "out", 0, StopSignals()),
    ):
        pass
    assert (tmp_path / "victim" / "file").exists()
    assert work.exists()


def test_a_job_whose_model_links_elsewhere_is_refused(tmp_path: Path, make_checkpoint) -> None:
    model = make_checkpoint(tmp_path / "model")
    check_model(model)
    (tmp_path / "secret").write_text("mine")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"model\.path: .*notes\.txt: leads to"):
        check_model(model)


def test_the_cache_of_the_hub_is_all_links_and_is_accepted(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    revision = cache / "snapshots" / "0123"
    revision.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "abc").write_text("{}")
    (revision / "config.json").symlink_to("../../blobs/abc")
    (tmp_path / "model").symlink_to(revision)
    assert list_copied(tmp_path / "model") == ["config.json"]
    (cache / "token.txt").write_text("mine")
    (revision / "token.txt").symlink_to("../../token.txt")
    with pytest.raises(UserError, match=r"outside .*model"):
        list_copied(revision)


def test_a_tokenizer_with_code_of_its_own_asks_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["own.T", None]}})
    )
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *question: questions.append(str(question)) or "y")
    with pytest.raises(UserError, match=r"needs Python code of its own .* which is not run"):
        load_tokenizer(tmp_path)
    assert questions == []
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


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("form", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_files_of_all_kinds_are_read(tmp_path: Path, form, compression: str | None) -> None:
    table = pa.table({"prompt": [f"{i}+1" for i in range(40)], "answer": [str(i + 1) for i in range(40)]})
    file = tmp_path / "d.arrow"
    with form(str(file), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    assert [p.prompt for p in read_problems(DataSettings(path=file))] == table["prompt"].to_pylist()


def test_times_of_all_kinds_are_read_without_pandas(tmp_path: Path) -> None:
    file, day = tmp_path / "d.parquet", 86_400_000_000_000
    nested = pa.list_(pa.struct([("since", pa.duration("ns"))]))
    table = pa.table(
        {
            "prompt": ["1+1"],
            "answer": ["2"],
            "zone": pa.array([day + 1], pa.timestamp("ns", "Europe/Berlin")),
            "list": pa.array([[day]], pa.list_(pa.timestamp("ns"))),
            "struct": pa.array([[{"since": 1_000}]], nested),
            "time": pa.array([1_000], pa.time64("ns")),
        }
    )
    pq.write_table(table, file)
    ((_, _, row),) = rows.read_rows(DataSettings(path=file), None, "data")
    assert row["zone"] == "1970-01-02 00:00:00+00:00"
    assert row["list"] == ["1970-01-02 00:00:00"]
    assert row["struct"] == [{"since": "0:00:00.000001"}]
    assert row["time"] == "00:00:00.000001"


def test_a_flipped_bit_of_an_arrow_file_ends_no_process(tmp_path: Path) -> None:
    """Offsets of texts, which Arrow does not check unless it is asked to."""
    file = tmp_path / "d.arrow"
    table = pa.table({"prompt": [f"{i}+1" for i in range(8)], "answer": ["1"] * 8})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = bytearray(file.read_bytes())
    at = content.index(np.array(table["prompt"].chunk(0).buffers()[1], copy=False).tobytes()[:36]) + 16
    content[at + 3] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"d\.arrow: not a complete Arrow file"):
        read_problems(DataSettings(path=file))


def test_rows_without_text_count(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "_MIN_TEXT_LIMIT", 10_000)
    file = tmp_path / "d.arrow"
    table = pa.table({"prompt": pa.nulls(2000)})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match="holds more than"):
        read_problems(DataSettings(path=file, malformed="skip"))


def test_a_sparse_file_does_not_raise_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "d.parquet"
    file.write_bytes(b"x" * 5000)
    limit = rows._text_limit(file)
    os.truncate(file, 2**40)
    assert rows._text_limit(file) == limit
    with file.open("rb") as opened:
        assert rows._memory([opened]) < 3 << 30


def test_a_line_without_end_is_one_message(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "_LONGEST_LINE", 10_000)
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n')
    os.truncate(file, 2**33)
    with pytest.raises(UserError, match=r"d\.jsonl:2: longer than 10,000 bytes"):
        read_problems(DataSettings(path=file))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": []}),
        ("tokenizer.json", []),
    ],
    ids=str,
)
def test_a_tokenizer_of_another_form_is_one_message(checkpoint, tmp_path, file: str, content: object) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    (model / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"model\.path: no usable tokenizer in .*/model \("):
        load_tokenizer(model)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "not read after 2 s",
        ),
        ("{{ 'x' * 9000000000 }}", "more memory than allowed"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_a_chat_template_is_ended(monkeypatch, template: str, message: str) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 2.0 if "2 s" in message else 300.0)
    problem = Problem(0, "1+1", "2", 0, "d.jsonl:1")
    tokenizer = SimpleNamespace(chat_template=template)
    with pytest.raises(UserError, match=f"data.chat: the model's chat template cannot be used .*{message}"):
        fit_prompts([problem], DataSettings(path="d.jsonl", chat=True), tokenizer)
