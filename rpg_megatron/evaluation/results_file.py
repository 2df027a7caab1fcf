"""Result files of an evaluation: one JSON line per problem, appended as it is graded, read to resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rpg_megatron.config import UserError
from rpg_megatron.config.files import open_own
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.evaluation.results import EvalResult

LISTS = ("responses", "correct", "extracted", "lengths", "finishes")


def results_file(folder: Path, name: str) -> Path:
    """Path of a set's results."""
    return folder / f"{name}.jsonl"


def append_result(file: Path, result: EvalResult) -> None:
    """Append one line with a single write. Raises UserError if it cannot be written."""
    line = (json.dumps(asdict(result), ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
    try:
        with open_own(file, "ab", buffering=0) as results:
            written = results.write(line)
    except OSError as e:
        raise UserError(f"{file}: cannot be written ({e.strerror}); fix that and start again") from None
    if written != len(line):
        raise UserError(f"{file}: only part of a line was written; free disk space and start again")


def read_results(file: Path, prompts: Sequence[Prompt], samples: int) -> list[EvalResult]:
    """The completed problems, in the order of ``prompts``; removes an incomplete last line.

    Raises UserError if a line is damaged, or if its problem has changed in the data.
    """
    try:
        with open_own(file) as results:
            data = results.read()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror}); fix that and start again") from None
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with open_own(file, "r+b") as results:
            results.truncate(end)
    by_id = {prompt.id: prompt for prompt in prompts}
    by_prompt: dict[int, EvalResult] = {}
    for number, line in enumerate(data[:end].splitlines(), 1):
        result = _parse(line, f"{file}:{number}", samples)
        prompt = by_id.get(result.prompt_id)
        if prompt is None or (prompt.text, prompt.answer) != (result.prompt, result.answer):
            raise UserError(
                f"{file}:{number}: the problem has changed in the data since (row {result.prompt_id + 1}); "
                "restore the old data, or choose another --out"
            )
        by_prompt[result.prompt_id] = result
    return [by_prompt[prompt.id] for prompt in prompts if prompt.id in by_prompt]


def _parse(line: bytes, where: str, samples: int) -> EvalResult:
    try:
        result = EvalResult(**json.loads(line.decode("utf-8", "surrogatepass")))
        counts = {len(getattr(result, name)) for name in LISTS} | {len(result.classes) or samples}
    except (ValueError, TypeError):
        counts = set()
    if counts != {samples}:
        raise UserError(
            f"{where}: is not a problem with {samples} responses; delete the line and start again"
        )
    return result
