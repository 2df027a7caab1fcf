"""Prompts from code of the user: the same rows as from a file, and one line for what is wrong.

Why: a source that fails, or that gives other rows after a resume, must not train on something else unnoticed.
Not covered: the example of docs/extend.md (tests/distributed/test_extend), resuming a whole run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.settings import make_settings
from rpg_megatron.data.problems import read_problems, read_problems_with_counts
from rpg_megatron.data.prompt_stream import PromptStream
from rpg_megatron.data.prompts import fit_prompts
from tests.support.stand_in_engines import ByteTokenizer

MODULE = """
import os, random

print("no row")

def sums(*, count: int = 5, seed: int = 0):
    draw = random.Random(seed)
    for i in range(count):
        yield {"q": f"{i} + {draw.randrange(9)}", "a": i, "level": i % 2, "kind": {"name": "sum"}, "set": {1}}

class Endless:
    def __init__(self, first: int):
        self.first = first

    def __iter__(self):
        while True:
            self.first += 1
            yield {"q": f"{self.first}?", "a": "x"}

def broken():
    yield {"q": "1", "a": "1"}
    raise RuntimeError("no more")

def odd():
    yield {"q": "1", "a": "1"}
    yield "2"
    yield {"q": "3", "a": float("nan")}

def ends():
    os._exit(3)
    yield
"""
KEYS = {"prompt_key": "q", "answer_key": "a"}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_source_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def data(name: str, settings: dict[str, Any] | None = None, **more: Any) -> DataSettings:
    source = {"type": f"own_source_of_test:{name}", **(settings or {})}
    return DataSettings.model_validate({"source": source} | KEYS | more)


def test_rows_are_treated_as_those_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"prompt": "m", "answer": "1"}\n')
    where = {"where": {"level": 1}}
    problems = read_problems(data("sums", **where, template="Q: {prompt}"), rows=True)
    assert [(p.id, p.answer, p.where) for p in problems] == [
        (i, str(i), f"own_source_of_test:sums: row {i + 1}") for i in (1, 3)
    ]
    row = problems[0].row
    assert row is not None
    assert (row["kind"], row["set"]) == ({"name": "sum"}, "{1}")
    assert read_problems(data("sums"))[0].row is None
    assert len(read_problems(data("Endless", {"first": 6}, limit=7))) == 7
    both = [{"source": {"type": "own_source_of_test:sums"}, **KEYS}, {"path": tmp_path / "more.jsonl"}]
    assert len(read_problems(DataSettings.model_validate({"mixture": both}))) == 6
    prompts, _ = fit_prompts(problems, data("sums", template="Q: {prompt}"), ByteTokenizer())
    context = json.loads(prompts[0].context)
    messages = [{"role": "user", "content": prompts[0].text}]
    assert context == {"prompt": prompts[0].text, "messages": messages, "row": row}
    assert prompts[0].text.startswith("Q: 1 + ")


def test_a_resumed_run_has_the_same_prompts_or_is_refused() -> None:
    def stream(**settings: Any) -> PromptStream:
        prompts, _ = fit_prompts(read_problems(data("sums", settings)), data("sums"), ByteTokenizer())
        return PromptStream(prompts, seed=1)

    first = stream()
    first.take(3)
    state, rest = first.state(), [p.text for p in first.take(9)]
    again = stream()
    again.restore(state)
    assert [p.text for p in again.take(9)] == rest
    with pytest.raises(UserError, match="the training prompts have changed"):
        stream(seed=5).restore(state)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            data("sums", {"cout": 3}),
            "data.source.cout: own_source_of_test:sums has no setting 'cout'",
        ),
        (
            data("none"),
            "data.source.type: own_source_of_test:none: the module own_source",
        ),
        (data("Endless"), "data.source.first: own_source_of_test:Endless needs this setting; add it"),
        (data("broken"), "own_source_of_test.py:22: RuntimeError: no more; fix it"),
        (data("odd"), "own_source_of_test:odd: row 2: it is a str; yield a dict of columns"),
        (data("ends"), "data.source: own_source_of_test:ends ended its process (exit code 3); fix it"),
    ],
)
def test_what_is_wrong_is_one_line(settings: DataSettings, told: str) -> None:
    with pytest.raises(UserError) as error:
        read_problems(settings)
    assert told in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_wrong_rows_can_be_left_out() -> None:
    problems, left_out, _ = read_problems_with_counts(data("odd", malformed="skip"))
    assert ([p.answer for p in problems], left_out) == (["1"], {"malformed": 2})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"source": {"type": "a:b"}, "path": "d"}, "path and source exclude each other"),
        ({"source": {"type": "a:b"}, "split": "test"}, "subset and split have no effect on source"),
        ({"source": {"type": "a"}}, "data.source.type: must be an import path module:name"),
    ],
)
def test_settings_that_exclude_each_other(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        make_settings({"model": {"path": "m"}, "data": change}, None, "x")
