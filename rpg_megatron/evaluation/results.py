"""Evaluation results: graded responses to held-out problems."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rpg_megatron.config.files import open_regular, real_path

_RESPONSE = 100
"""Bytes of the limit of a file that a response takes besides those of its row."""


@dataclass
class EvalResult:
    """One held-out problem with its k responses. All lists have length k, in the order of the responses."""

    prompt_id: int
    """Index of the problem in its data set, from 0."""
    answer: str
    """The reference answer."""
    prompt: str = ""
    """The rendered prompt."""
    responses: list[str] = field(default_factory=list)
    """The decoded responses."""
    correct: list[bool] = field(default_factory=list)
    """Whether the grader accepted each."""
    extracted: list[str | None] = field(default_factory=list)
    """The answer that the grader found in each."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each, end-of-sequence token included."""
    finishes: list[str] = field(default_factory=list)
    """Finish reason of each: "stop" or "length"."""
    set: str = ""
    """Name of the held-out set."""
    failed: int = 0
    """Number of responses for which the reward failed; they count as wrong."""
    classes: list[int | None] = field(default_factory=list)
    """Number of the class of equal answers of each (``classify_answers``); None: no answer. Empty in files of
    earlier versions."""


_decoder = msgspec.json.Decoder(EvalResult)


def read_results(file: Path, run: Path, limit: int) -> tuple[list[EvalResult], int, bool]:
    """Read the results of an evaluation, which others may have written.

    run: the folder of the run; files elsewhere, to which links lead, are refused. limit: bytes to read.
    Returns the rows, how many others do not have the form that training writes, and whether these are all.
    Raises OSError.
    """
    with open_regular(file, real_path(run)) as raw:
        data = raw.read(limit)
    whole = len(data) < limit
    rows: list[EvalResult] = []
    skipped = 0
    for line in data.split(b"\n")[: None if whole else -1]:  # the last one is incomplete
        try:
            # Surrogates, which training writes, are shown as question marks.
            row = _decoder.decode(line.decode("utf-8", "surrogatepass").encode("utf-8", "replace"))
            if {len(row.correct), len(row.lengths), len(row.finishes)} != {len(row.responses)}:
                raise ValueError("lists of different lengths")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            skipped += bool(line.strip())
            continue
        limit -= len(line) + _RESPONSE * len(row.responses)
        if limit < 0:
            return rows, skipped, False
        rows.append(row)
    return rows, skipped, whole
