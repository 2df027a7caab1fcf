"""Sources of prompts: Parquet and Arrow files, folders, the hub, mixtures, known data sets; malformed rows.

Why: a run must not start on half a file, or learn from rows that are not what they seem, and the message
must name file, row and fix. Not covered: JSON lines row by row (test_prompts); downloads, since there is no
network: the hub's loader gets a local folder instead.
"""

import gzip
import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import ValidationError

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.chat_messages import Message
from rpg_megatron.data.presets import PRESETS, find_preset
from rpg_megatron.data.problems import read_problems, read_problems_with_counts
from rpg_megatron.launcher.run_dir import resolved_yaml

ROWS = [{"prompt": f"{i}+{i}", "answer": str(2 * i), "level": i % 3} for i in range(10)]


def parquet(path: Path, rows: list[dict[str, object]], **options: object) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def write_arrow(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def pairs(settings: DataSettings) -> list[tuple[object, str]]:
    return [(p.prompt, p.answer) for p in read_problems(settings)]


def test_parquet_arrow_folder_and_hub_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    file = parquet(tmp_path / "d.parquet", ROWS)
    saved, hub = tmp_path / "saved", tmp_path / "hub"
    datasets.Dataset.from_list(ROWS).save_to_disk(saved)
    hub.mkdir()
    parquet(hub / "test.parquet", ROWS)
    expected = [(row["prompt"], row["answer"]) for row in ROWS]
    assert pairs(DataSettings(path=file)) == expected
    assert pairs(DataSettings(path=saved)) == expected
    assert pairs(DataSettings(path=saved / "data-00000-of-00001.arrow", limit=4)) == expected[:4]
    assert pairs(DataSettings(hub=str(hub), split="test")) == expected
    with pytest.raises(UserError, match=r"data\.hub: .*split train cannot be loaded .*set data\.path to"):
        read_problems(DataSettings(hub=str(hub)))


def write_lines(rows: list[dict[str, object]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


WRITERS: dict[str, Callable[[list[dict[str, object]], Path], object]] = {
    "parquet": lambda rows, path: parquet(path, rows),
    "arrow": lambda rows, path: write_arrow(pa.Table.from_pylist(rows), path),
    "jsonl": write_lines,
    "json": write_lines,
}


@pytest.mark.parametrize("end", WRITERS)
@pytest.mark.parametrize("name", ["train-{:05d}-of-00003", "train-{}-of-3", "part-{}", "c{}.snappy"])
@pytest.mark.parametrize("kind", [DataSettings, ConversationSettings])
def test_a_folder_is_its_shards(tmp_path, name: str, end: str, kind: type[DataSettings], caplog) -> None:
    numbers = (0, 1, 2) if "of" in name else (2, 9, 10)
    parts = (ROWS[:4], ROWS[4:5], ROWS[5:])
    folder = tmp_path / "data.parquet"  # Spark writes a folder of such a name
    folder.mkdir()
    for number, rows in sorted(zip(numbers, parts, strict=True), reverse=True):
        WRITERS[end](rows, folder / f"{name.format(number)}.{end}")
    for about in ("README.md", "LICENSE", ".gitattributes", "_SUCCESS", "dataset_infos.json", "notes.md"):
        (folder / about).write_text("no data")
    (folder / ".cache").mkdir()
    columns = {"prompt_key": "prompt", "answer_key": "answer"}
    problems = read_problems(kind(path=folder, **columns), rows=True)
    assert [p.row for p in problems] == ROWS
    assert [p.id for p in problems] == list(range(10))
    last = folder / f"{name.format(numbers[2])}.{end}"
    assert problems[9].where == (f"{last}:5" if "json" in end else f"{last}: row 5")
    assert [p.row for p in read_problems(kind(path=folder, limit=5, **columns), rows=True)] == ROWS[:5]
    WRITERS[end](
        [*ROWS[:4], {"prompt": "", "answer": "1", "level": 0}], folder / f"{name.format(numbers[0])}.{end}"
    )
    with pytest.raises(
        UserError, match=re.escape(f"{name.format(numbers[0])}.{end}") + r":( row )?5: 'prompt' is empty"
    ):
        read_problems(kind(path=folder, **columns))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "is a directory without data; give a file, or a folder of .jsonl, .parquet or .arrow files"),
        (["README.md", ".hidden.jsonl"], "is a directory without data"),
        (["a.jsonl", "b.parquet"], r"several kinds \(JSON, Parquet\): a.jsonl, b.parquet; move"),
        (["a.jsonl", "b.csv"], "holds b.csv, which cannot be read"),
        (["a.jsonl", "b.jsonl.gz"], "holds b.jsonl.gz, which cannot be read; decompress"),
        (["data/"], r"has the folders data; give one of them, such as .*/data$"),
        (["test/", "train/", "dataset_dict.json"], "has the folders test, train; give one of them"),
        (["a.jsonl", "more/"], "has the folders more"),
        (["a.jsonl", "readme-questions.parquet"], r"several kinds \(JSON, Parquet\)"),
        (["gsm8k-train.jsonl", "gsm8k-heldout.jsonl"], r"several splits \(heldout, train\)"),
        (["x-0-of-2.jsonl", "x-2-of-2.jsonl"], r"2 of the 2 files x-\*-of-\*"),
        (["x-0-of-1.jsonl", "x-0-of-2.jsonl", "x-1-of-2.jsonl"], "shards of several exports"),
        (["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"], r"several splits \(test, train\)"),
        (["train.jsonl", "validation.jsonl"], r"several splits \(train, validation\)"),
        (
            ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"],
            r"2 of the 3 files train-\*-of-\*",
        ),
    ],
)
def test_a_folder_that_is_not_one_data_set_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("")
    for key, read in (("data", read_problems), ("sft.data", partial(read_problems, key="sft.data"))):
        with pytest.raises(UserError, match=message) as error:
            read(DataSettings(path=folder))
        assert str(error.value).startswith(f"{key}.path: {folder} ")


def test_filters_and_duplicates_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = parquet(tmp_path / "d.parquet", [*ROWS, {"prompt": " 0+0\n", "answer": "0", "level": 0}])
    settings = DataSettings(path=file, where={"level": (0, 1)}, deduplicate=True)
    problems, left_out = read_problems_with_counts(settings)
    assert [p.id for p in problems] == [0, 1, 3, 4, 6, 7, 9]
    assert left_out.counts == {"filtered": 3, "duplicate": 1}
    read_problems(settings)
    assert "3 filtered, 1 duplicate (7 are used)" in caplog.text
    with pytest.raises(UserError, match=r"none of its 11 rows can be used; check data\.where"):
        read_problems(DataSettings(path=file, where={"level": 7}))


def test_a_mixture_numbers_rows_through(tmp_path: Path) -> None:
    one = parquet(tmp_path / "one.parquet", ROWS)
    two = tmp_path / "two.jsonl"
    two.write_text('{"q": {"text": "3*3"}, "a": 9}\n')
    two_fields = {"path": two, "prompt_key": "q.text", "answer_key": "a", "weight": 3.0}
    settings = DataSettings(mixture=[{"path": one}, two_fields])
    last = read_problems(settings)[-1]
    assert last[:4] == (10, "3*3", "9", 1)
    assert last.where == f"{two}:1"
    assert settings.weights == (1.0, 3.0)


def test_mixtures_in_yaml_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        yaml.safe_dump({"model": {"path": "m"}, "data": {"mixture": [{"path": "a"}, {"path": "b"}]}})
    )
    settings = load_settings(file)
    assert [s.path for s in settings.data.sources] == [tmp_path / "a", tmp_path / "b"]
    file.write_text(resolved_yaml(settings))
    assert load_settings(file).model_copy(update={"runs": settings.runs}) == settings
    for override, message in (
        ("data={mixture: [{pth: a}]}", "did you mean 'data.mixture[0].path'"),
        ("data={mixture: [{weight: 2}]}", "needs path, hub, source or preset"),
        ("data={}", "has no prompts"),
        ("data={path: a, preset: gsm8k, mixture: [{path: a}]}", "mixture replaces path"),
        ("data={path: a, hub: b/c}", "exclude each other"),
        ("data={path: a, split: b}", "no effect on a file"),
        ("data={path: a, system: b}", "no effect unless chat is on"),
    ):
        with pytest.raises(UserError) as error:
            load_settings(file, [override])
        assert message in str(error.value)


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "answer"),
    [
        (pa.float32(), 0.1, "0.1"),
        (pa.float32(), -2.7, "-2.7"),
        (pa.float32(), 1 / 3, "0.33333334"),
        (pa.float32(), 5.0, "5.0"),
        (pa.float32(), 16777216.0, "16777216.0"),
        (pa.float32(), -0.0, "-0.0"),
        (pa.float32(), 3.4028235e38, "3.4028235e+38"),  # its largest number
        (pa.float32(), 1e-45, "1e-45"),  # its smallest
        (pa.float16(), 0.1, "0.1"),
        (pa.float16(), 65504.0, "65500.0"),  # its largest: no shorter decimal is it
        (pa.float64(), 0.1, "0.1"),
        (pa.float64(), 0.10000000149011612, "0.10000000149011612"),
        (pa.int64(), 5, "5"),
        (pa.decimal128(10, 2), Decimal("0.10"), "0.10"),
        (pa.decimal128(5, -2), Decimal("1E+2"), "100"),
        (pa.decimal128(9, 9), Decimal("1E-7"), "0.000000100"),
    ],
)
@pytest.mark.parametrize("write", [pq.write_table, write_arrow])
def test_an_answer_is_the_shortest_decimal_of_its_own_type(
    tmp_path: Path, write: Callable[[pa.Table, Path], None], kind: pa.DataType, value: object, answer: str
) -> None:
    if kind == pa.decimal128(5, -2) and write is pq.write_table:
        return  # Parquet has no negative scale
    file = tmp_path / ("d.arrow" if write is write_arrow else "d.parquet")
    write(pa.table({"prompt": ["?"], "answer": pa.array([value], kind)}), file)
    (problem,) = read_problems(DataSettings(path=file), rows=True)
    assert problem.answer == answer
    assert str(problem.row["answer"]) == answer  # for reward functions


@pytest.mark.parametrize("short", [pa.float16(), pa.float32()])
def test_numbers_within_others_are_the_shortest_too(tmp_path: Path, short: pa.DataType) -> None:
    struct = pa.struct({"truth": short, "parts": pa.list_(pa.struct({"x": short}))})
    columns = {
        "list": pa.array([[0.1, None, 0.7]], pa.list_(short)),
        "large": pa.array([[0.1]], pa.large_list(short)),
        "fixed": pa.array([[0.1, 0.7]], pa.list_(short, 2)),
        "map": pa.array([[("k", 0.1)]], pa.map_(pa.string(), short)),
        "reward": pa.array([{"truth": 0.3, "parts": [{"x": 0.1}, None]}], struct),
        "times": pa.array(
            [[{"at": 0, "x": 0.1}]], pa.list_(pa.struct({"at": pa.timestamp("ns"), "x": short}))
        ),
    }
    if short == pa.float32():
        columns["repeated"] = pa.array([0.1], short).dictionary_encode()
    file = tmp_path / "d.arrow"
    write_arrow(pa.table({"prompt": ["?"], **columns}), file)
    (problem,) = read_problems(DataSettings(path=file, answer_key="reward.truth"), rows=True)
    assert problem.answer == "0.3"
    assert {key: problem.row[key] for key in columns} == {
        "list": [0.1, None, 0.7],
        "large": [0.1],
        "fixed": [0.1, 0.7],
        "map": [["k", 0.1]],
        "reward": {"truth": 0.3, "parts": [{"x": 0.1}, None]},
        "times": [{"at": "1970-01-01 00:00:00", "x": 0.1}],
        **({"repeated": 0.1} if "repeated" in columns else {}),
    }


# -- malformed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1"}, "'answer' is a null"),
        ({"prompt": "1+1", "answer": ""}, "'answer' is empty"),
        ({"prompt": "  ", "answer": "2"}, "'prompt' is empty"),
        ({"answer": "2"}, "'prompt' is a null"),
    ],
)
def test_a_malformed_row_of_a_parquet_file_is_named_or_skipped(
    tmp_path: Path, row: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = parquet(tmp_path / "d.parquet", [*ROWS[:4], row, *ROWS[5:]])
    with pytest.raises(UserError) as error:
        read_problems(DataSettings(path=file))
    assert str(error.value).startswith(f"{file}: row 5: ")
    assert message in str(error.value)
    assert len(read_problems(DataSettings(path=file, malformed="skip"))) == 9
    assert f"1 malformed (9 are used); malformed: {file}: row 5: " in caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "1+1", "answer": "2"}],
            "'prompt' is missing (keys of this line: 'question', 'answer')",
        ),
        ([{"prompt": 3, "answer": "2"}], "'prompt' is a number, not text"),
        ([{"prompt": "1+1", "answer": ["2", "3"]}], "'answer' is a list"),
        ([{"prompt": "1+1", "answer": float("nan")}], "'answer' is nan"),
        ([{"prompt": ["1+1"], "answer": "2"}], "not of chat messages"),
        ([{"prompt": [{"role": "user", "content": ""}], "answer": "2"}], "has no text in any message"),
    ],
)
def test_wrong_columns_and_types(tmp_path: Path, rows: list[dict[str, object]], message: str) -> None:
    file = parquet(tmp_path / "d.parquet", rows)
    with pytest.raises(UserError) as error:
        read_problems(DataSettings(path=file))
    assert str(error.value).startswith(f"{file}: row 1: ")
    assert message in str(error.value)
    with pytest.raises(UserError, match="none of its 1 rows can be used") as error:
        read_problems(DataSettings(path=file, malformed="skip"))
    assert message in str(error.value)


def test_text_in_parquet_that_is_not_utf_8(tmp_path: Path) -> None:
    offsets, letters = b"\0\0\0\0\3\0\0\0\6\0\0\0", b"1+1\xff+2"
    prompts = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(letters)])
    file = tmp_path / "d.parquet"
    pq.write_table(pa.table({"prompt": prompts, "answer": ["2", "4"]}), file)
    with pytest.raises(UserError, match=r"d\.parquet: row 2: 'prompt' is not UTF-8 \(byte 1\)"):
        read_problems(DataSettings(path=file))
    assert pairs(DataSettings(path=file, malformed="skip")) == [("1+1", "2")]


def test_compressed_lines_are_named_as_such(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "1+1", "answer": "2"}\n'))
    with pytest.raises(UserError, match=r"d\.jsonl\.gz: compressed; decompress it"):
        read_problems(DataSettings(path=file))


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    file = parquet(tmp_path / "d.parquet", ROWS * 10, row_group_size=20)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"d\.parquet: not a complete Parquet file.*download it again"):
        read_problems(DataSettings(path=file, malformed="skip"))
    start = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(2).column(0).file_offset
    first = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(2).column(0).dictionary_page_offset
    position = first or start
    file.write_bytes(content[:position] + b"\xff" * 60 + content[position + 60 :])
    with pytest.raises(UserError, match=r"d\.parquet: rows 41 to 60: damaged"):
        read_problems(DataSettings(path=file))
    assert len(read_problems(DataSettings(path=file, malformed="skip"))) == 80
    for suffix in ("parquet", "arrow"):
        path = tmp_path / f"e.{suffix}"
        with pytest.raises(UserError, match="does not exist"):
            read_problems(DataSettings(path=path))
        path.write_bytes(b"garbage" * 100)
        with pytest.raises(UserError, match=r"e\.\w+: not a complete"):
            read_problems(DataSettings(path=path))


def test_malformed_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    good = json.dumps(ROWS[1]).encode()
    file.write_bytes(b"\n".join([good, b"{broken", b'{"prompt": "\xff"}', b"[]", b'{"prompt": "1"}', good]))
    problems, left_out = read_problems_with_counts(DataSettings(path=file, malformed="skip"))
    assert [p.id for p in problems] == [0, 5]
    assert left_out.counts == {"malformed": 4}
    kinds = left_out.first.split("; ")
    assert f"{file}:2: not valid JSON" in left_out.first, "each kind with its first row"
    assert [f"{file}:{n}: " in left_out.first for n in (2, 3, 4, 5)] == [True] * 4, kinds


# -- known data sets -----------------------------------------------------------------------------------------


def test_presets_know_the_common_formats(tmp_path: Path) -> None:
    def read(preset: str, *rows: dict[str, object]) -> list[tuple[object, str]]:
        file = tmp_path / f"{preset}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return pairs(DataSettings(path=file, preset=preset))

    chat = [{"role": "user", "content": "P"}]
    verl = {"prompt": chat, "reward_model": {"ground_truth": "34", "style": "rule"}}
    assert read("gsm8k", {"question": "P", "answer": "so\n#### 5"}) == [("P", "5")]
    assert read("aime24", {"problem": "P", "answer": "025"}) == [("P", "025")]
    assert read("aime25", verl, verl) == [((Message("user", "P"),), "34")]  # copies of one problem: once
    assert read("amc23", {"question": "P", "problem": "P", "answer": 27.0}) == [("P", "27.0")]
    assert read("math", {"problem": "P", "solution": "so $\\boxed{\\frac{1}{2}}$"}) == [("P", "\\frac{1}{2}")]
    assert read("math-500", {"problem": "P", "solution": "no", "answer": "3"}) == [("P", "3")]
    assert read("minerva", {"question": "P", "answer": "3"}) == [("P", "3")]
    olympiad = [
        {"question": "P", "final_answer": ["2"], "is_multiple_answer": False},
        {"question": "Q", "final_answer": ["2", "3"], "is_multiple_answer": True},
    ]
    assert read("olympiadbench", *olympiad) == [("P", "2")]
    chinese = {"prompt": "\u6c42 x", "solution": "1"}
    assert read("dapo-math-17k", {"prompt": "P", "solution": "34"}, chinese) == [("P", "34")]


def test_presets_can_be_overridden_and_name_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "P", "answer": "5"}\n')
    with pytest.raises(UserError, match=r"d\.jsonl:1: the key 'question' is missing"):
        read_problems(DataSettings(path=file, preset="gsm8k"))
    settings = DataSettings(path=file, preset="gsm8k", prompt_key="text", answer_key="answer")
    assert pairs(settings) == [("P", "5")]
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        read_problems(DataSettings(preset="gsmk"))
    with pytest.raises(ValidationError, match="exclude each other"):
        DataSettings(path=file, answer_after="#", answer_boxed=True)
    with pytest.raises(ValueError, match="at least 1 character"):
        DataSettings(path=file, answer_after="")
    assert all(find_preset(name) is preset for name, preset in PRESETS.items())
