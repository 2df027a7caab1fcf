"""``rpg-megatron grade``: verdicts in the file's order, one summary, one message for a malformed line.

Why: people grade files of other systems with it, and those hold anything. Not covered: hostile answers
(test_reward_pool_hostile), the verdicts themselves (test_math_grader).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron import cli
from rpg_megatron.commands.grade import grade_file
from rpg_megatron.config import UserError
from rpg_megatron.data.rollout_files import read_rollouts
from tests.support.commands import read_stats
from tests.support.launcher import wait_for
from tests.support.report_runs import make_run

pytestmark = pytest.mark.usefixtures("forked_starts")

GOOD = [
    {"response": "Answer: 18", "answer": "18"},
    {"response": "\\boxed{\\sqrt{8}}", "answer": "2\\sqrt{2}"},
    {"response": "I do not know.\nSorry", "answer": 5},
    {"response": "#### 1,000\u2028", "answer": 1000.0},
    {"response": "\\boxed{x^2}", "answer": "x^3"},
]


def write(path: Path, *lines: bytes) -> Path:
    file = path / "responses.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    return file


def good(*which: int) -> list[bytes]:
    return [json.dumps(GOOD[i], ensure_ascii=False).encode() for i in which or range(len(GOOD))]


def run(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rpg_megatron.cli", "grade", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_verdicts_and_summary(tmp_path: Path) -> None:
    file = write(tmp_path, b"", *good())
    done = run(file)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [v["row"] for v in verdicts] == [2, 3, 4, 5, 6]
    assert [v["correct"] for v in verdicts] == [True, True, False, True, False]
    assert verdicts[0] == {"row": 2, "correct": True, "extracted": "18", "reason": "same number or text"}
    assert verdicts[2]["extracted"] is None
    last = done.stderr.splitlines()[-1]  # before it, on a busy machine, lines of progress
    assert last.startswith(f"{file}: 3 of 5 correct (60.0%), 1 without answer; ")


def test_thoughts_do_not_answer_unless_they_may(tmp_path: Path) -> None:
    """A prompt of a line says whether the response begins in thoughts."""
    box = "\\boxed{5}"
    lines = [
        {"response": f"<think>{box}", "answer": "5"},
        {"prompt": "2+3?<think>\n", "response": box, "answer": "5"},
        {"prompt": "2+3?<think>\n", "response": f"</think>{box}", "answer": "5"},
        {"prompt": "2+3?<think>\n\n</think>\n\n", "response": box, "answer": "5"},
    ]
    file = write(tmp_path, *(json.dumps(line).encode() for line in lines))
    done = run(file)
    assert [json.loads(line)["correct"] for line in done.stdout.splitlines()] == [False, False, True, True]
    done = run(file, "--reward", "boxed", "reward.answer_in_thoughts=true")
    assert [json.loads(line)["correct"] for line in done.stdout.splitlines()] == [True] * 4


def test_out_is_whole_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path, *good(0, 0, 2)), tmp_path / "out.jsonl"
    summary = grade_file(file, style="boxed", out=out, workers=1, deadline=20.0, skip_malformed=False)
    assert (summary.graded, summary.correct, summary.unanswered) == (3, 0, 3)
    assert len(out.read_text().splitlines()) == 3
    assert capsys.readouterr().out == ""
    assert {p.name for p in tmp_path.iterdir()} == {"responses.jsonl", "out.jsonl"}
    with pytest.raises(UserError, match=r"--out: .*nowhere.* cannot be written"):
        grade_file(
            file, style="auto", out=tmp_path / "nowhere" / "x", workers=1, deadline=20.0, skip_malformed=False
        )


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"{broken", "not valid JSON"),
        (b'{"response": "\xff", "answer": "2"}', "not UTF-8 (byte 15 of the line)"),
        (b"[1]", "not an object"),
        (b'{"answer": "2"}', "the key 'response' is missing (it has 'answer'); add it"),
        (b'{"response": "2"}', "the key 'answer' is missing"),
        (b'{"response": null, "answer": "2"}', "'response' is not text"),
        (b'{"response": "2", "answer": [2]}', "'answer' is neither text nor a number"),
        (b'{"response": "2", "answer": " "}', "'answer' is empty"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_line_is_named_before_anything_is_graded(
    tmp_path: Path, bad: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, *good(0), bad, *good(0))
    with pytest.raises(SystemExit) as end:
        cli.main(["grade", str(file), "--out", str(tmp_path / "out")])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    assert captured.err.startswith(f"error: {file}:2: ")
    assert says in captured.err
    assert not (tmp_path / "out").exists()
    summary = grade_file(file, style="auto", out=None, workers=1, deadline=20.0, skip_malformed=True)
    assert (summary.graded, summary.skipped) == (2, 1)
    assert "1 malformed lines skipped" in str(summary)


def test_no_file_no_lines_no_such_style(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        ([str(tmp_path / "no.jsonl")], "no such file"),
        ([str(tmp_path)], "is a directory"),
        ([str(write(tmp_path, b""))], "holds no responses"),
        ([str(tmp_path), "--style", "bxoed"], "'bxoed' is not known; use one of auto"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["grade", *arguments])
        assert end.value.code == 2
        assert says in capsys.readouterr().err


def test_out_is_never_the_file_that_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, *good(0))
    before, link = file.read_bytes(), tmp_path / "link.jsonl"
    link.symlink_to(file)
    for out, says in (
        (file, "is the input file"),
        (link, "is the input file"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(UserError, match=says):
            grade_file(file, style="auto", out=out, workers=1, deadline=20.0, skip_malformed=False)
    assert file.read_bytes() == before


def test_a_file_of_malformed_lines_alone_says_what_is_wrong(tmp_path: Path) -> None:
    file = write(tmp_path, b'{"answer": "2"}', b"{broken")
    with pytest.raises(UserError, match=r":1: the key 'response' is missing .* no line of the file"):
        grade_file(file, style="auto", out=None, workers=1, deadline=20.0, skip_malformed=True)


REWARDS = """
def length(response, answer, row, *, target: int = 4):
    if response == "bad": raise KeyError("why")
    return len(response) / target + row["level"]
def group(responses): return [float(len(responses)) for _ in responses]
"""


def test_any_reward_runs_on_responses_data_and_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "graded_rewards_of_test.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)

    def ended(file: Path, function: str, *overrides: str) -> tuple[list[dict[str, Any]], str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["grade", str(file), "--reward", f"graded_rewards_of_test:{function}", *overrides])
        out, err = capsys.readouterr()
        assert end.value.code == 0, err
        assert err.startswith(f"importing graded_rewards_of_test:{function}\n"), "which may hang"
        return [json.loads(line) for line in out.splitlines()], err

    rows = [{"response": text, "answer": "5", "prompt": "P", "level": 1} for text in ("ab", "bad", "abcd")]
    file = write(tmp_path, *(json.dumps(row).encode() for row in rows))
    verdicts, summary = ended(file, "length", "reward.target=2")
    assert [row["reward"] for row in verdicts] == [2.0, None, 3.0]
    where = f"{tmp_path / 'graded_rewards_of_test.py'}:3"
    assert verdicts[1]["failure"] == f"error: KeyError: 'why' at {where}"
    assert "2 of 3 correct (66.7%), mean reward 2.5, 1 error; " in summary
    assert summary.endswith(
        f"\n  row 2: reward.type graded_rewards_of_test:length: error: KeyError: 'why' at {where}\n"
    )
    assert [row["reward"] for row in ended(file, "group")[0]] == [3.0] * 3, "lines with the same prompt"
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "Q", "answer": 12345, "level": 0}\n')
    assert ended(data, "length", "data.prompt_key=question")[0][0]["reward"] == 1.25
    rollouts = make_run(tmp_path / "run", steps=1, rollouts_every=1) / "rollouts" / "step_000001.parquet"
    assert [row["reward"] for row in ended(rollouts, "group")[0]] == [4.0] * 16
    graded, _ = ended(rollouts, "group", "reward.overlong.buffer=1000")
    lengths = [t.sampled for t in read_rollouts(rollouts)]
    assert [1000 * (4 - row["reward"]) - 999 for row in graded] == pytest.approx(lengths)
    for arguments, says in (
        ([str(file), "steps=3"], "has no effect without --reward"),
        ([str(file), "--reward", "a:b", "training.steps=3"], "KEY=VALUE may set reward"),
        ([str(file), "--reward", "nowhere:b"], "there is no module 'nowhere'"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["grade", *arguments])
        assert end.value.code == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_command_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    bombs = [
        json.dumps({"response": f"\\boxed{{9^{{9^{{9^{{{i}}}}}}}}}", "answer": "x+1"}) for i in range(20, 60)
    ]
    file, out = write(tmp_path, *(b.encode() for b in bombs)), tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "rpg_megatron.cli",
        "grade",
        str(file),
        "--deadline",
        "600",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)

    def session() -> list[int]:
        return [pid for pid, stat in read_stats().items() if int(stat[3]) == process.pid]

    wait_for(lambda: len(session()) >= 4)  # itself, the fork server, two workers
    process.send_signal(number)
    assert process.wait(timeout=120) == (130 if number == signal.SIGINT else -9)
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    if number == signal.SIGINT:
        assert err == "stopped: Ctrl-C; nothing was written\n"
        assert [p.name for p in tmp_path.iterdir()] == [file.name]
    wait_for(lambda: not session())
    assert not out.exists()
