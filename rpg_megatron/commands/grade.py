"""``rpg-megatron grade``: grades responses in a JSON lines file against reference answers."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from rpg_megatron.config.errors import UserError
from rpg_megatron.rewards.extraction import Style
from rpg_megatron.rewards.grader import Grader, Verdict
from rpg_megatron.rewards.pool import FAILURES
from rpg_megatron.system.files import atomic_write

_AHEAD = 256
"""Lines being graded at once, which bounds memory."""
_EXAMPLE = '{"response": "... Answer: 5", "answer": "5"}'
_SECONDS = 2.0
"""Interval of progress lines."""


class Line(NamedTuple):
    """One line of the input."""

    row: int
    """Line number, from 1."""
    response: str
    answer: str


class Summary(NamedTuple):
    """The counts of a file."""

    graded: int
    correct: int
    unanswered: int
    """Responses without an answer in the given style; they count as wrong."""
    skipped: int
    """Malformed lines."""
    failed: dict[str, int]
    """Answers whose verification failed, by failure; they count as wrong."""
    seconds: float

    def __str__(self) -> str:
        share = f"{self.correct / self.graded:.1%}" if self.graded else "none"
        words = [
            f"{self.correct:,} of {self.graded:,} correct ({share})",
            f"{self.unanswered:,} without answer",
        ]
        words += [f"{count:,} {failure}" for failure, count in self.failed.items() if count]
        if self.skipped:
            words.append(f"{self.skipped:,} malformed lines skipped")
        return ", ".join(words) + f"; {self.seconds:.1f} s"


def grade_file(
    file: Path, *, style: Style, out: Path | None, workers: int, deadline: float, skip_malformed: bool
) -> Summary:
    """Write one verdict per line, in the file's order, to ``out`` or standard output; progress to stderr.

    ``out`` is written atomically. Raises UserError with file, row and fix for lines that are not JSON objects
    with the strings "response" and "answer"; with ``skip_malformed`` such lines are skipped and counted.
    """
    total, skipped, malformed = 0, 0, None
    for line in _lines(file, stop=not skip_malformed):
        if isinstance(line, UserError):
            malformed = malformed or line
            skipped += 1
        else:
            total += 1
    if malformed is not None and not total:
        raise UserError(f"{malformed} (and no line of the file is well formed)")
    if not total:
        raise UserError(f"{file}: holds no responses; it needs one JSON object per line, such as {_EXAMPLE}")
    if out is not None and out.is_dir():
        raise UserError(f"--out: {out} is a directory; name a file")
    if out is not None and out.exists() and out.samefile(file):
        raise UserError(f"--out: {out} is the input file; choose another file")
    started = time.monotonic()
    seen: Counter[str] = Counter()
    with Grader(workers=workers, deadline=deadline) as grader:
        with _open(out) as sink:
            for line, verdict in _progress(_verdicts(file, grader, style), total):
                seen["correct"] += verdict.correct
                seen["unanswered"] += verdict.extracted is None
                sink.write(json.dumps({"row": line.row} | verdict._asdict(), ensure_ascii=True) + "\n")
            sink.flush()
        counts = grader.pop_counts()
    return Summary(
        total,
        seen["correct"],
        seen["unanswered"],
        skipped,
        {failure: counts[failure] for failure in FAILURES},
        time.monotonic() - started,
    )


@contextmanager
def _open(out: Path | None) -> Iterator[IO[str]]:
    """The output: a file, or standard output. Raises UserError if it cannot be written."""
    try:
        if out is None:
            yield sys.stdout
        else:
            with atomic_write(out) as part, part.open("w", encoding="utf-8") as sink:
                yield sink
    except BrokenPipeError:
        raise
    except OSError as e:
        where = "standard output" if out is None else f"--out: {out}"
        raise UserError(f"{where} cannot be written ({e.strerror or e}); choose another file") from None


def _verdicts(file: Path, grader: Grader, style: Style) -> Iterator[tuple[Line, Verdict]]:
    waiting: deque[tuple[Line, Future[Verdict]]] = deque()
    for line in _lines(file, stop=False):
        if isinstance(line, UserError):
            continue
        future = grader.submit(line.response, line.answer, style)
        waiting.append((line._replace(response=""), future))
        if len(waiting) >= _AHEAD:
            first, future = waiting.popleft()
            yield first, future.result()
    for line, future in waiting:
        yield line, future.result()


def _progress[T](items: Iterator[T], total: int) -> Iterator[T]:
    """Print the progress to stderr every few seconds."""
    last = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            print(f"graded {done:,} of {total:,}", file=sys.stderr, flush=True)
        yield item


def _lines(file: Path, *, stop: bool) -> Iterator[Line | UserError]:
    """The lines, or an error for each malformed one; ``stop`` raises it. Empty lines are skipped."""
    try:
        with file.open("rb") as source:
            for row, raw in enumerate(source, 1):
                if not raw.strip():
                    continue
                try:
                    yield _parse(f"{file}:{row}", row, raw)
                except UserError as e:
                    if stop:
                        raise
                    yield e
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; give a JSON lines file") from None
    except IsADirectoryError:
        raise UserError(f"{file}: is a directory; give a JSON lines file") from None
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror or e})") from None


def _parse(where: str, row: int, raw: bytes) -> Line:
    try:
        found = json.loads(raw.decode("utf-8-sig" if row == 1 else "utf-8"))
    except UnicodeDecodeError as e:
        raise UserError(
            f"{where}: not UTF-8 (byte {e.start + 1} of the line); save the file as UTF-8"
        ) from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: not valid JSON ({e}); write one object per line: {_EXAMPLE}") from None
    if not isinstance(found, dict):
        raise UserError(f"{where}: not an object; write one per line: {_EXAMPLE}")
    for key in ("response", "answer"):
        if key not in found:
            keys = ", ".join(map(repr, found)) or "none"
            raise UserError(f"{where}: the key {key!r} is missing (keys of this line: {keys}); add it")
    response, answer = found["response"], _as_text(found["answer"])
    if not isinstance(response, str):
        raise UserError(f"{where}: 'response' is not text; put it in quotes")
    if answer is None:
        raise UserError(f"{where}: 'answer' is neither text nor a number; put it in quotes")
    if not answer.strip():
        raise UserError(f"{where}: 'answer' is empty; fill it in or remove the line")
    return Line(row, response, answer)


def _as_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if isinstance(value, bool) or not isinstance(value, int | float) else str(value)
