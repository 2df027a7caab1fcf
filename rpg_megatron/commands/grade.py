"""``rpg-megatron grade``: runs a grader, or any reward function, on responses in a file.

The file has one JSON object with ``response`` and ``answer`` per line. With a reward function it may also be
a data set, whose reference answers are then the responses, or a step's rollouts of a run.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import batched, groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from rpg_megatron.config import Settings
from rpg_megatron.config.data import SourceSettings
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import atomic_write
from rpg_megatron.config.reward import RewardSettings
from rpg_megatron.config.settings import make_settings
from rpg_megatron.data.problems import read_problems
from rpg_megatron.data.rows import Row, read_rows
from rpg_megatron.launcher.run_dir import load_run_settings
from rpg_megatron.rewards.extraction import opens_thoughts
from rpg_megatron.rewards.failures import RewardFailure, first_of_each
from rpg_megatron.system.fork_server import FAILURES

if TYPE_CHECKING:  # it imports asyncio
    from rpg_megatron.rewards.reward import Score, Scorer

_AHEAD = 256
"""Groups being graded at once, which bounds memory."""
_EXAMPLE = '{"response": "... Answer: 5", "answer": "5"}'
_SECONDS = 2.0
"""Interval of progress lines."""
_ROLLOUTS = re.compile(r"step_\d{6}\.parquet")
_NO_TOKENS = (0,)
"""Of a response that is known as text only."""


class Line(NamedTuple):
    """One response of the input."""

    row: int
    """Number of its line or row, from 1."""
    response: tuple[Any, ...]
    """Arguments of ``rewards.reward.Response``."""
    answer: str
    group: Any
    """The same for consecutive responses of a group."""
    context: str = ""
    """``Prompt.context``."""


Lines = Callable[[], Iterator[Line | UserError]]
"""Reads a file: its responses, and an error for each malformed line."""


@dataclass
class Summary:
    """The counts of a file."""

    custom: bool
    """Whether a reward function graded it."""
    graded: int = 0
    skipped: int = 0
    """Malformed lines."""
    correct: int = 0
    unanswered: int = 0
    """Responses without an answer in the given style; they count as wrong."""
    failed: Counter[str] = field(default_factory=Counter)
    """Responses without a verdict or reward, by failure; they count as wrong."""
    rewards: float = 0.0
    """Sum over the other responses."""
    failures: list[RewardFailure] = field(default_factory=list)
    """The first of each kind; ``prompt_id`` is the row."""
    seconds: float = 0.0

    def add(self, row: int, score: Score) -> dict[str, Any]:
        """Count a response; returns its line of the output."""
        verdict: dict[str, Any] = {"row": row, "correct": score.correct}
        self.correct += score.correct
        self.unanswered += score.extracted is None
        if score.failures:
            self.failed[score.failures[0].kind] += 1
            self.failures = first_of_each((*self.failures, *(f.at("", row, "") for f in score.failures)))
        else:
            self.rewards += score.reward
        if not self.custom:
            return verdict | {"extracted": score.extracted, "reason": score.reason}
        failure = "; ".join(failure.reason for failure in score.failures) or None
        return verdict | {"reward": None if failure else score.reward, "failure": failure}

    def __str__(self) -> str:
        words = [f"{self.correct:,} of {self.graded:,} correct ({self.correct / self.graded:.1%})"]
        if self.custom:
            scored = self.graded - self.failed.total()
            words.append(f"mean reward {self.rewards / scored:.4g}" if scored else "no reward")
        else:
            words.append(f"{self.unanswered:,} without answer")
        words += [f"{self.failed[failure]:,} {failure}" for failure in FAILURES if self.failed[failure]]
        if self.skipped:
            words.append(f"{self.skipped:,} malformed lines skipped")
        shown = self.failures if self.custom else ()
        first = "".join(f"\n  row {f.prompt_id}: {f.term}: {f.reason}" for f in shown)
        return ", ".join(words) + f"; {self.seconds:.1f} s{first}"


def reward_settings(file: Path, reward: str, overrides: Sequence[str]) -> Settings:
    """Settings with a reward function (module:name) and a file as the data.

    overrides: ``reward.*`` and ``data.*``, KEY=VALUE. Raises UserError.
    """
    for item in overrides:
        if not item.startswith(("reward.", "data.")):
            raise UserError(f"{item!r}: has no effect on grading; KEY=VALUE may set reward.* and data.*")
    raw = {"model": {"path": "."}, "data": {"path": str(file.absolute())}, "reward": {"type": reward}}
    return make_settings(raw, list(overrides), "grade")


def grade_file(
    file: Path,
    *,
    style: str,
    out: Path | None,
    workers: int,
    deadline: float,
    skip_malformed: bool,
    custom: Settings | None = None,
) -> Summary:
    """Write one verdict per response, in the file's order, to ``out`` or standard output; progress to stderr.

    ``out`` is written atomically. custom: ``reward_settings``; None: the built-in grader of a style.
    Raises UserError with file, row and fix for malformed lines; with ``skip_malformed`` those of JSON lines
    are skipped and counted.
    """
    from rpg_megatron.rewards.reward import Scorer

    if out is not None and out.is_dir():
        raise UserError(f"--out: {out} is a directory; name a file")
    if out is not None and out.exists() and out.samefile(file):
        raise UserError(f"--out: {out} is the input file; choose another file")
    reward = RewardSettings(type=style) if custom is None else custom.reward
    if custom is not None:
        print(f"importing {reward.type}", file=sys.stderr, flush=True)  # which may take minutes
    scorer = Scorer(reward.model_copy(update={"workers": workers, "deadline": deadline}), 1)
    try:
        lines = _source(file, scorer, custom)
        summary = _count(file, lines, Summary(custom is not None), stop=not skip_malformed)
        started = told = time.monotonic()
        with _open(out) as sink:
            for done, (line, score) in enumerate(_scores(lines, scorer)):
                if time.monotonic() - told >= _SECONDS:
                    told = time.monotonic()
                    print(f"graded {done:,} of {summary.graded:,}", file=sys.stderr, flush=True)
                sink.write(json.dumps(summary.add(line.row, score)) + "\n")
            sink.flush()
    finally:
        scorer.close()
    summary.seconds = time.monotonic() - started
    return summary


def _count(file: Path, lines: Lines, summary: Summary, *, stop: bool) -> Summary:
    """Count the responses and the malformed lines. Raises UserError; ``stop``: for the first of those."""
    malformed = None
    for line in lines():
        if isinstance(line, Line):
            summary.graded += 1
        elif stop:
            raise line
        else:
            summary.skipped += 1
            malformed = malformed or line
    if summary.graded:
        return summary
    if malformed is not None:
        raise UserError(f"{malformed} (and no line of the file is well formed)")
    raise UserError(f"{file}: holds no responses; it needs one JSON object per line, such as {_EXAMPLE}")


@contextmanager
def _open(out: Path | None) -> Iterator[IO[str]]:
    """The output: a file, or standard output. Raises UserError if it cannot be written."""
    try:
        if out is None:
            yield sys.stdout
        else:
            with atomic_write(out) as file, io.TextIOWrapper(file, encoding="utf-8") as sink:
                yield sink
    except BrokenPipeError:
        raise
    except OSError as e:
        where = "standard output" if out is None else f"--out: {out}"
        raise UserError(f"{where} cannot be written ({e.strerror or e}); choose another file") from None


def _scores(lines: Lines, scorer: Scorer) -> Iterator[tuple[Line, Score]]:
    import asyncio

    from rpg_megatron.rewards.reward import Response

    async def score(groups: Sequence[list[Line]]) -> list[list[Score]]:
        return await asyncio.gather(
            *(scorer.score([Response(*m.response) for m in g], g[0].answer, g[0].context) for g in groups)
        )

    good = (line for line in lines() if isinstance(line, Line))
    grouped = groupby(good, lambda line: line.group if scorer.reads_groups else line.row)
    with asyncio.Runner() as runner:
        for chunk in batched((list(group) for _, group in grouped), _AHEAD):
            for group, scores in zip(chunk, runner.run(score(chunk)), strict=True):
                yield from zip(group, scores, strict=True)


# -- sources of responses ------------------------------------------------------------------------------------


def _source(file: Path, scorer: Scorer, custom: Settings | None) -> Lines:
    if custom is None:
        return lambda: _lines(file)
    if _ROLLOUTS.fullmatch(file.name):
        contexts = _read_contexts(file) if scorer.reads_prompts else {}
        return lambda: _rollouts(file, contexts)
    # Problems, and not responses, by the first line.
    table = file.suffix in (".parquet", ".arrow") or file.is_dir()
    _, _, first = (0, "", {}) if table else next(_rows(file), (0, "", None))
    problems = isinstance(first, dict) and "response" not in first
    return lambda: _reference_answers(custom) if problems else _lines(file)


def _reference_answers(settings: Settings) -> Iterator[Line]:
    for problem in read_problems(settings.prompts("grade"), rows=True):
        context = _context(settings.data.template.replace("{prompt}", problem.text), problem.row)
        response = (problem.answer, _NO_TOKENS, "stop")
        yield Line(problem.id + 1, response, problem.answer, problem.id, context)


def _rollouts(file: Path, contexts: dict[int, str]) -> Iterator[Line]:
    from rpg_megatron.data.foreign_rollouts import iter_foreign_step

    for row, t in enumerate(iter_foreign_step(file, file.absolute().parents[1]), 1):
        response = (t.text, t.response, t.finish, t.sampled)
        yield Line(row, response, t.answer, t.group, contexts.get(t.prompt_id, ""))


def _read_contexts(file: Path) -> dict[int, str]:
    """``Prompt.context`` of the run's prompts, by id. Raises UserError if the run or its data are missing."""
    from rpg_megatron.data.prompts import load_prompts, load_tokenizer, without_torch

    config = file.absolute().parents[1] / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"{file}: the function reads prompts, which rollouts do not hold; leave it in its run's folder"
        )
    settings = load_run_settings(config)
    with without_torch():
        prompts = load_prompts(settings.prompts("grade"), load_tokenizer(settings.model.path), rows=True)
    return {prompt.id: prompt.context for prompt in prompts}


def _context(prompt: str, row: dict[str, Any] | None) -> str:
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"prompt": prompt, "messages": messages, "row": row}, default=str)


def _rows(file: Path) -> Iterator[Row]:
    if not file.is_file():
        problem = "is a directory" if file.is_dir() else "no such file"
        raise UserError(f"{file}: {problem}; give a JSON lines file")
    return read_rows(SourceSettings(path=file), None, "grade")


def _lines(file: Path) -> Iterator[Line | UserError]:
    """The lines, or an error for each malformed one. Empty lines are skipped."""
    for index, where, row in _rows(file):
        yield row if isinstance(row, UserError) else _read(where, index + 1, row)


def _read(where: str, number: int, row: dict[str, Any]) -> Line | UserError:
    for key in ("response", "answer"):
        if key not in row:
            keys = ", ".join(map(repr, row)) or "none"
            return UserError(f"{where}: the key {key!r} is missing (it has {keys}); add it, or give --reward")
    response, answer = row["response"], row["answer"]
    if not isinstance(response, str):
        return UserError(f"{where}: 'response' is not text; put it in quotes")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return UserError(f"{where}: 'answer' is neither text nor a number; put it in quotes")
    if not str(answer).strip():
        return UserError(f"{where}: 'answer' is empty; fill it in or remove the line")
    prompt = str(row.get("prompt", ""))
    begun = (response, _NO_TOKENS, "stop", None, opens_thoughts(prompt[-100:]))
    return Line(number, begun, str(answer), prompt or number, _context(prompt, row))
