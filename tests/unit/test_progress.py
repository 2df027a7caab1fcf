"""What a run shows: progress on terminals of any width and in files, and its summary.

Why: users watch the line of a step for days; it must not be cut off, wrong or shown twice. Not
covered: a launcher that shows it (tests/integration/test_launcher.py).
"""

import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from rpg_megatron.config import UserError
from rpg_megatron.launcher.progress import Progress, clock
from rpg_megatron.launcher.summary import summarise
from rpg_megatron.system.events import EVENTS, EventSender
from rpg_megatron.system.metrics_file import METRICS


def write_rows(run: Path, *rows: dict[str, object]) -> None:
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_plain_progress_is_one_line_a_step_despite_broken_events(tmp_path: Path):
    file = tmp_path / "out"
    with file.open("w") as out:
        progress = Progress(
            tmp_path, steps=4, metrics=tmp_path / METRICS, console=Console(file=out, width=40)
        )
        sender = EventSender(tmp_path / EVENTS)
        sender.send({"kind": "phase", "name": "loading", "done": 0, "total": 1})
        sender.send({"kind": "phase", "name": "no numbers"})
        sender.send({"kind": "nonsense"})
        row = {
            "step": 1,
            "reward/mean": -0.5,
            "reward/accuracy": 0.25,
            "groups/equal_rewards": 0.5,
            "policy/entropy": 1.0,
            "time/step": 30.0,
        }
        row |= {"mismatch/logp_max": 1e-5, "throughput/tokens_per_second": 8000.0}
        write_rows(tmp_path, {"step": 0, "eval/heldout/avg@1": 0.25}, {"no": "step"}, row)
        progress.pump(0.5)
        progress.close()
    lines = file.read_text().splitlines()
    assert lines[:2] == ["loading", "step 0/4  evaluation: heldout/avg@1 25.0%"]
    assert lines[2:] == [
        "step 1/4  reward -0.500  accuracy 25.0%  entropy 1.000  no signal 50%  mismatch 1.0e-05  "
        "tokens/s 8,000  left 1:30"
    ]
    assert progress.started_training


@pytest.mark.parametrize(("width", "last"), [(80, "tokens/s"), (40, "entropy"), (20, "reward")])
def test_a_narrow_terminal_shows_fewer_numbers_and_those_whole(tmp_path: Path, width: int, last: str):
    with (tmp_path / "out").open("w") as out:
        console = Console(file=out, width=width, force_terminal=True, color_system=None)
        progress = Progress(tmp_path, steps=10, metrics=tmp_path / METRICS, console=console)
        row = {"reward/mean": -0.281, "reward/accuracy": 0.359, "policy/entropy": 0.151}
        row |= {"groups/equal_rewards": 0.25}
        row |= {"step": 9, "mismatch/logp_max": 5.0e-6, "throughput/tokens_per_second": 1837.0}
        write_rows(tmp_path, row)
        progress.pump(0.5)
        progress.close()
    *_, head, numbers = (tmp_path / "out").read_text().splitlines()
    values = ["9/10", "-0.281", "35.9%", "0.151", "25%", "5.0e-06", "1,837"]
    names = re.split(r"  +", head.strip())
    assert names[-1] == last
    assert numbers.split() == values[: len(names)]


def test_a_long_phase_says_how_far_it_is_where_that_is_asked(tmp_path: Path):
    with (tmp_path / "out").open("w") as out:
        progress = Progress(tmp_path, steps=0, console=Console(file=out, width=40), line_seconds=0.0)
        sender = EventSender(tmp_path / EVENTS)
        for done in (0, 2, 4):
            sender.send({"kind": "phase", "name": "evaluation", "done": done, "total": 4})
        progress.pump(0.5)
        progress.close()
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["evaluation", "evaluation 2/4  left 0:00", "evaluation 4/4  left 0:00"]


def test_phases_of_a_command_without_events(tmp_path: Path):
    with (tmp_path / "out").open("w") as out:
        progress = Progress(None, steps=0, console=Console(file=out, width=40), line_seconds=0.0)
        for name, done, total in (("reading", 0, 100), ("reading", 50, 100), ("checking", 0, 0)):
            progress.show_phase(name, done, total)
            progress.show_phase(name, done, total)
            progress.pump(0)
        progress.close()
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[:2] == ["reading", "reading 0/100  left 0:00"]
    assert lines[-1] == "checking", "nothing is known of how far it is"
    assert "reading 50/100  left 0:00" in lines


def test_the_summary_tells_of_each_held_out_set(tmp_path: Path):
    facts = {
        "accuracy_before": {"aime24": 0.1, "amc23": 0.5},
        "accuracy_after": {"aime24": 0.2, "amc23": 0.4},
    }
    (tmp_path / "summary.json").write_text(json.dumps(facts))
    lines = [line.split(maxsplit=2) for line in summarise(tmp_path).splitlines() if "before" in line]
    assert lines == [
        ["accuracy,", "aime24", "10.0% before, 20.0% after (+10.0 points)"],
        ["accuracy,", "amc23", "50.0% before, 40.0% after (-10.0 points)"],
    ]


CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
ANSWER = {"role": "assistant", "content": "SECRET"}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"messages": [*CHAT, ANSWER, CHAT[1], ANSWER]}, CHAT),
        ({"prompt": "Hi", "completion": "SECRET"}, "Hi"),
        ({"prompt": CHAT, "completion": [ANSWER]}, CHAT),
        ({"messages": [ANSWER]}, "1 + 1 ="),
    ],
)
@pytest.mark.parametrize("heldout", [True, False])
def test_a_fine_tuning_ends_with_a_held_out_prompt_without_its_answer(
    tmp_path: Path, row: dict, asked: object, heldout: bool
):
    other = {"messages": [{"role": "user", "content": "TRAINED"}, ANSWER]}
    (tmp_path / "a.jsonl").write_text(json.dumps(other if heldout else row))
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    settings = {"model": {"path": "m"}, "sft": {"data": {"path": str(tmp_path / "a.jsonl")}}}
    if heldout:
        settings["sft"]["heldout"] = {"path": str(tmp_path / "b.jsonl")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "summary.json").write_text(json.dumps({"export": str(tmp_path / "hf")}))
    command = summarise(tmp_path).splitlines()[-1]
    assert f")({asked!r})[0]" in command
    assert "SECRET" not in command


def test_rows_of_a_resumed_run_are_shown_once_and_whole(tmp_path: Path):
    metrics, file = tmp_path / METRICS, tmp_path / "out"
    write_rows(tmp_path, {"step": 0}, {"step": 1, "reward/mean": 0.5})
    with file.open("w") as out:
        progress = Progress(tmp_path, steps=4, metrics=metrics, console=Console(file=out, width=40))
        assert (progress.step, progress.started_training) == (1, False)
        with metrics.open("a") as more:
            more.write('{"step": 1, "reward/mean": 0.25}\n{"step": 2, "rew')
        progress.pump(0.1)
        with metrics.open("a") as more:
            more.write('ard/mean": -1}\n')
        progress.pump(0.1)
        progress.close()
    assert [line[:25] for line in file.read_text().splitlines()] == ["step 2/4  reward -1.000  "]


def test_live_progress_draws_and_leaves_the_rows(tmp_path: Path):
    file = tmp_path / "out"
    with file.open("w") as out:
        console = Console(file=out, width=100, force_terminal=True)
        progress = Progress(tmp_path, steps=4, metrics=tmp_path / METRICS, console=console)
        sender = EventSender(tmp_path / EVENTS)
        sender.send({"kind": "phase", "name": "rollout", "done": 3, "total": 8})
        progress.pump(0.3)
        write_rows(tmp_path, {"step": 1, "reward/mean": 0.5})
        progress.pump(0.3)
        progress.close()
    text = file.read_text()
    assert "3/8" in text
    assert "+0.500" in text.rpartition("reward")[2]


def test_an_event_socket_that_is_taken_is_one_message(tmp_path: Path):
    (tmp_path / EVENTS).write_text("")
    with pytest.raises(UserError, match=EVENTS):
        Progress(tmp_path, steps=1)


def test_summary_without_facts_still_says_where_things_are(tmp_path: Path):
    assert str(tmp_path / "metrics.jsonl") in summarise(tmp_path)


def test_clock():
    assert [clock(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
