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


class Summary(NamedTuple):
    """The counts of a file."""

    graded: int
    correct: int
    unanswered: int
    """Responses without an answer in the given style; they count as wrong."""
    skipped: int
    """Malformed lines."""
    failed: dict[str, int]
    """Responses without a verdict or reward, by failure; they count as wrong."""
    seconds: float
    mean: float | None = None
    """With a reward function: mean reward of the responses that have one."""
    failures: Sequence[RewardFailure] = ()
    """The first of each kind; ``prompt_id`` is the row."""

    def __str__(self) -> str:
        share = f"{self.correct / self.graded:.1%}" if self.graded else "none"
        words = [f"{self.correct:,} of {self.graded:,} correct ({share})"]
        if self.mean is None:
            words.append(f"{self.unanswered:,} without answer")
        else:
            scored = self.graded > sum(self.failed.values())
            words.append(f"mean reward {self.mean:.4g}" if scored else "no reward")
        words += [f"{count:,} {failure}" for failure, count in self.failed.items() if count]
        if self.skipped:
            words.append(f"{self.skipped:,} malformed lines skipped")
        first = "".join(f"\n  row {f.prompt_id}: {f.term}: {f.reason}" for f in self.failures)
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
    limits = {"workers": workers, "deadline": deadline}
    scorer = Scorer(reward.model_copy(update=limits), 1)
    try:
        lines = _source(file, scorer, custom)
        total, skipped = _count(file, lines, stop=not skip_malformed)
        started = time.monotonic()
        seen: Counter[str] = Counter()
        rewards, failures = 0.0, list[RewardFailure]()
        with _open(out) as sink:
            for line, score in _progress(_scores(lines, scorer), total):
                seen["correct"] += score.correct
                seen["unanswered"] += score.extracted is None
                if score.failures:
                    seen[score.failures[0].kind] += 1
                    failures = first_of_each((*failures, *(f.at("", line.row, "") for f in score.failures)))
                else:
                    rewards += score.reward
                sink.write(json.dumps(_verdict(line, score, custom is not None), ensure_ascii=True) + "\n")
            sink.flush()
    finally:
        scorer.close()
    return Summary(
        graded=total,
        correct=seen["correct"],
        unanswered=seen["unanswered"],
        skipped=skipped,
        failed={failure: seen[failure] for failure in FAILURES},
        seconds=time.monotonic() - started,
        mean=None if custom is None else rewards / max(total - sum(seen[f] for f in FAILURES), 1),
        failures=failures if custom is not None else (),
    )


def _verdict(line: Line, score: Score, custom: bool) -> dict[str, Any]:
    verdict: dict[str, Any] = {"row": line.row, "correct": score.correct}
    if custom:
        failure = "; ".join(failure.reason for failure in score.failures) or None
        return verdict | {"reward": None if failure else score.reward, "failure": failure}
    return verdict | {"extracted": score.extracted, "reason": score.reason}


def _count(file: Path, lines: Callable[[], Iterator[Line | UserError]], *, stop: bool) -> tuple[int, int]:
    """Number of responses and of malformed lines. Raises UserError; ``stop``: for the first of the latter."""
    total, skipped, malformed = 0, 0, None
    for line in lines():
        if isinstance(line, UserError):
            if stop:
                raise line
            malformed = malformed or line
            skipped += 1
        else:
            total += 1
    if malformed is not None and not total:
        raise UserError(f"{malformed} (and no line of the file is well formed)")
    if not total:
        raise UserError(f"{file}: holds no responses; it needs one JSON object per line, such as {_EXAMPLE}")
    return total, skipped


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


def _scores(lines: Callable[[], Iterator[Line | UserError]], scorer: Scorer) -> Iterator[tuple[Line, Score]]:
    import asyncio

    from rpg_megatron.rewards.reward import Response

    async def score(groups: Sequence[list[Line]]) -> list[list[Score]]:
        responses = ([Response(*line.response) for line in group] for group in groups)
        tasks = (scorer.score(r, g[0].answer, g[0].context) for r, g in zip(responses, groups, strict=True))
        return await asyncio.gather(*tasks)

    good = (line for line in lines() if isinstance(line, Line))
    key: Callable[[Line], Any] = (lambda line: line.group) if scorer.reads_groups else (lambda line: line.row)
    groups = (list(group) for _, group in groupby(good, key))
    with asyncio.Runner() as runner:
        for chunk in batched(groups, _AHEAD):
            for group, scores in zip(chunk, runner.run(score(chunk)), strict=True):
                yield from zip(group, scores, strict=True)


def _progress[T](items: Iterator[T], total: int) -> Iterator[T]:
    """Print the progress to stderr every few seconds."""
    last = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            print(f"graded {done:,} of {total:,}", file=sys.stderr, flush=True)
        yield item


# -- sources of responses ------------------------------------------------------------------------------------


def _source(file: Path, scorer: Scorer, custom: Settings | None) -> Callable[[], Iterator[Line | UserError]]:
    """A function that yields the responses, and an error for each malformed line."""
    if custom is not None and _ROLLOUTS.fullmatch(file.name):
        contexts = _read_contexts(file) if scorer.reads_prompts else {}
        return lambda: _rollouts(file, contexts)
    if custom is not None:
        # Problems, and not responses, by the first line.
        table = file.suffix in (".parquet", ".arrow") or file.is_dir()
        _, _, first = (0, "", {}) if table else next(_rows(file), (0, "", UserError("")))
        if isinstance(first, dict) and "response" not in first:
            return lambda: _reference_answers(custom)
    return lambda: _lines(file)


def _reference_answers(settings: Settings) -> Iterator[Line]:
    for problem in read_problems(settings.prompts("grade"), rows=True):
        context = _context(settings.data.template.replace("{prompt}", problem.text), problem.row)
        response = (problem.answer, _NO_TOKENS, "stop")
        yield Line(problem.id + 1, response, problem.answer, problem.id, context)


def _rollouts(file: Path, contexts: dict[int, str]) -> Iterator[Line]:
    from rpg_megatron.data.foreign_rollouts import iter_foreign_rollouts

    row = 0
    for _, t in iter_foreign_rollouts([file], file.absolute().parents[1]):
        if isinstance(t, UserError):
            raise t
        if t is not None:
            row += 1
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
        try:
            yield row if isinstance(row, UserError) else _read(where, index + 1, row)
        except UserError as e:
            yield e


def _read(where: str, number: int, row: dict[str, Any]) -> Line:
    for key in ("response", "answer"):
        if key not in row:
            keys = ", ".join(map(repr, row)) or "none"
            raise UserError(f"{where}: the key {key!r} is missing (keys of this line: {keys}); add it")
    response, answer = row["response"], row["answer"]
    if not isinstance(response, str):
        raise UserError(f"{where}: 'response' is not text; put it in quotes")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(f"{where}: 'answer' is neither text nor a number; put it in quotes")
    if not str(answer).strip():
        raise UserError(f"{where}: 'answer' is empty; fill it in or remove the line")
    prompt = str(row.get("prompt", ""))
    begun = (response, _NO_TOKENS, "stop", None, opens_thoughts(prompt[-100:]))
    return Line(number, begun, str(answer), prompt or number, _context(prompt, row))
