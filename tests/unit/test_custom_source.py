"""Prompts from user code: the same rows as from a file, and one line for each mistake.

Why: if a source fails, or gives other rows after a resume, a run must not silently train on something else.
Not covered: the example of docs/extend.md (tests/distributed/test_extend), resuming a whole run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rpg_megatron.checkpoints.run_folder import RunState
from rpg_megatron.config import UserError, load_settings
from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.evaluation import EvaluationSettings
from rpg_megatron.data import custom_source, problems, streamed_prompts
from rpg_megatron.data.problems import read_problems, read_problems_with_counts
from rpg_megatron.data.prompt_stream import PromptStream
from rpg_megatron.data.prompts import fit_prompts
from rpg_megatron.data.stored_prompts import open_prompts
from rpg_megatron.launcher.input_checks import check_data
from rpg_megatron.launcher.reward_trial import try_reward
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

def dies_within_a_row():
    yield {"q": "1", "a": "1"}
    pipes = [n for n in range(3, 32) if os.path.exists(f"/proc/self/fd/{n}")]
    for n in pipes:
        if os.readlink(f"/proc/self/fd/{n}").startswith("pipe:"):
            os.write(n, b'{"row": {"q": "2')
    os._exit(0)

def leaves():
    yield {"q": "1", "a": "1"}
    exit(0)

def pairs():
    yield {("q", 1): "1", "a": "1"}

def warned():
    import signal, subprocess
    os.kill(os.getpid(), signal.SIGTERM)
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    yield {"q": "1", "a": program.wait()}
"""
KEYS = {"prompt_key": "q", "answer_key": "a"}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_source_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def data(name: str, settings: dict[str, Any] | None = None, **fields: Any) -> DataSettings:
    source = {"type": f"own_source_of_test:{name}", **(settings or {})}
    return DataSettings.model_validate({"source": source} | KEYS | fields)


def test_rows_are_treated_as_those_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"prompt": "m", "answer": "1"}\n')
    where = {"where": {"level": 1}}
    problems = read_problems(data("sums", **where, template="Q: {prompt}"), rows=True)
    assert [(p.id, p.answer, p.where) for p in problems] == [
        (i, str(i), f"own_source_of_test:sums: row {i + 1}") for i in (1, 3)
    ]
    row = problems[0].row
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
    resumed = stream()
    resumed.restore(state)
    assert [p.text for p in resumed.take(9)] == rest
    with pytest.raises(UserError, match="the training prompts have changed"):
        stream(seed=5).restore(state)


@pytest.mark.parametrize(
    ("settings", "message"),
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
        (data("dies_within_a_row"), "own_source_of_test:dies_within_a_row ended its process (exit code 0)"),
        (data("leaves"), "SystemExit: 0; fix it"),
        (data("pairs"), "own_source_of_test:pairs: row 1: it is no JSON object (keys must be str, int"),
    ],
)
def test_what_is_wrong_is_one_line(settings: DataSettings, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_problems(settings)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_signal_that_announces_the_end_of_a_job_does_not_end_a_source() -> None:
    """What it has started can be ended by the same signal."""
    assert [p.answer for p in read_problems(data("warned"))] == ["-15"]


def test_wrong_rows_can_be_left_out() -> None:
    problems, left_out = read_problems_with_counts(data("odd", malformed="skip"))
    assert ([p.answer for p in problems], left_out.counts) == (["1"], {"malformed": 2})


# -- a source that is asked during the run -------------------------------------------------------------------


ASKED = """
import itertools, time
from pathlib import Path

def count(*, first: int = 0, last: int | None = None, change: int = -1):
    for i in itertools.count(first):
        if i == last:
            return
        with Path("asked").open("a") as file:
            file.write("a")
        q = "x" * 60 if i % 5 == 4 else f"{i}?"
        yield {"q": q, "a": i, "level": i % 2, "other": i == change}

def sleeps():
    yield {"q": "1", "a": "1"}
    time.sleep(60)
    yield {"q": "2", "a": "2"}

def stops():
    yield {"q": "1", "a": "1"}
    raise RuntimeError("the server is gone")
"""


@pytest.fixture
def asked_module(tmp_path: Path) -> Path:
    """A file with a letter for each row that was requested from the source."""
    (tmp_path / "asked_source_of_test.py").write_text(ASKED)
    return tmp_path / "asked"


def streamed(name: str, settings: dict[str, Any] | None = None, *, rows: bool = False, **fields: Any) -> Any:
    source = {"type": f"asked_source_of_test:{name}", **(settings or {})}
    keys = {"source": source, "streaming": True, "shuffle": False, "max_prompt_tokens": 20} | KEYS | fields
    return open_prompts(DataSettings.model_validate(keys), ByteTokenizer(), rows=rows)


def test_a_streaming_source_is_asked_as_far_as_needed(asked_module: Path, caplog: Any) -> None:
    """Prompts that are too long, and rows that are filtered out, are left out as those of a file."""
    stream = streamed("count", where={"level": 1})
    block = 32  # of every second row
    assert asked_module.stat().st_size == 2 * block
    prompts = stream.take(3) + stream.take(2)
    assert [(p.id, p.answer, p.text) for p in prompts] == [(i, str(i), f"{i}?") for i in (1, 3, 5, 7, 11)]
    assert [p.id for p in stream.prompts.fetch([0, 1])] == [1, 3]
    assert asked_module.stat().st_size == 2 * block
    assert len(stream.take(60)) == 60
    assert asked_module.stat().st_size == 2 * (32 + 39 + 32)
    assert "prompts left out: 32 filtered (32 are used)" in caplog.text
    assert "left out 6 of 32 prompts, which are longer than 20 tokens" in caplog.text


def test_a_streaming_source_goes_on_where_it_was(asked_module: Path) -> None:
    first = streamed("count", rows=True)
    first.take(37)
    state = json.loads(json.dumps(first.sign(first.position())))
    whole_state = {"sampler": {"stream": state}, "summary": {}, "seconds": 1.0}
    # As the launcher checks it.
    RunState.model_validate(whole_state | {"format": 1, "step": 1, "metrics_bytes": 0})
    rest = [(p.id, p.text, p.context) for p in first.take(50)]
    first.restore(state)
    assert first.position() == state
    assert [(p.id, p.text, p.context) for p in first.take(50)] == rest
    later = streamed("count", {"change": 60}, rows=True)
    later.restore(state)
    for changed in ({"change": 30}, {"first": 1}, {"last": 40}):
        with pytest.raises(UserError, match="does not give the rows again that the run took"):
            streamed("count", changed, rows=True).restore(state)
    with pytest.raises(UserError, match=r"written with data\.streaming true"):
        PromptStream(list(first.prompts.fetch([0])), seed=1).restore(state)
    with pytest.raises(UserError, match=r"written with data\.streaming false"):
        first.restore({"prompts": "", "seed": 1, "taken": [3], "weights": [1.0]})


def test_what_ends_a_streaming_source_is_one_line(asked_module: Path, monkeypatch) -> None:
    stream = streamed("count", {"last": 40})
    assert len(stream.take(32)) == 32  # of all forty rows, eight are too long
    with pytest.raises(UserError, match=r"asked_source_of_test:count has ended after 40 rows, and the run"):
        stream.take(1)
    with pytest.raises(UserError, match=r"asked_source_of_test\.py:\d+: RuntimeError: the server is gone"):
        streamed("stops")
    source = ImportedSettings(type="asked_source_of_test:sleeps")
    rows = custom_source.custom_rows(source, None, "data.source", streaming=True)
    assert next(rows)[2] == {"q": "1", "a": "1"}
    monkeypatch.setattr(custom_source, "ROW_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"gives no row 2 within 0\.1 s; the run waits for it"):
        next(rows)
    monkeypatch.undo()
    monkeypatch.chdir(asked_module.parent)
    monkeypatch.setattr(problems, "MAX_UNUSED", 50)
    monkeypatch.setattr(streamed_prompts, "MAX_UNUSED", 50)
    with pytest.raises(UserError, match=r"row 51: none of the last 50 rows can be used; check data\.where"):
        streamed("count", where={"level": 7})
    with pytest.raises(UserError, match=r"are longer than 1 tokens; raise data\.max_prompt_tokens"):
        streamed("count", max_prompt_tokens=1)


def test_checks_ask_a_streaming_source_for_one_row(asked_module: Path, config_file: Path) -> None:
    """So do ``plan`` and ``doctor``, which call the same functions."""
    config_file.write_text(config_file.read_text() + "reward: {type: one_reward_of_test:one}\n")
    (asked_module.parent / "one_reward_of_test.py").write_text(
        "def one(response, row):\n    return row['a']\n"
    )
    source = "data={source: {type: 'asked_source_of_test:count'}, streaming: true, shuffle: false}"
    keys = ["data.prompt_key=q", "data.answer_key=a"]
    settings = load_settings(config_file, [source, *keys])
    assert check_data(settings) == []
    assert asked_module.read_text() == "a"
    assert try_reward(settings) == []
    assert asked_module.read_text() == "aa"
    with pytest.raises(UserError, match=r"data\.streaming: all rows are needed here"):
        read_problems(settings.data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shuffle": True}, "streaming keeps the order of the source; set shuffle to false"),
        ({"order_by": "level"}, "streaming keeps the order of the source"),
        ({"limit": 5}, "streaming asks for as many rows as the run needs; remove limit or streaming"),
        ({"deduplicate": True}, "do it in the source"),
        ({"preset": "gsm8k"}, "set prompt_key and answer_key"),
        ({"source": None, "path": "d.jsonl"}, "streaming is for your own code; set source"),
    ],
)
def test_streaming_excludes_what_needs_all_rows(change: dict[str, Any], message: str) -> None:
    data = {"source": {"type": "a:b"}, "streaming": True, "shuffle": False}
    with pytest.raises(ValidationError, match=message):
        DataSettings.model_validate(data | change)
    with pytest.raises(ValidationError, match="a mixture needs the number of its rows; remove streaming"):
        DataSettings.model_validate({"mixture": [{"source": {"type": "a:b"}, "streaming": True}]})
    with pytest.raises(
        ValidationError, match="heldout: an evaluation takes all problems of its set; set limit"
    ):
        EvaluationSettings.model_validate({"data": data})
