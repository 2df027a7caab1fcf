"""Selects responses for a report from a run's rollouts and evaluations, within a budget of bytes.

A step of a large run holds gigabytes, so a report reads the beginning of some steps, spread over the run. The
page says what was read.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpg_megatron.commands.report.run_files import RunFiles, note_skipped, reason, step_in_name
from rpg_megatron.config import UserError
from rpg_megatron.config.files import open_regular, real_path
from rpg_megatron.data.tokenizer_file import decode_foreign
from rpg_megatron.evaluation.results import EvalResult, read_results
from rpg_megatron.system.foreign_input import ForeignInputError

if TYPE_CHECKING:
    from rpg_megatron.data.trajectory import Trajectory

_STEPS = 6  # maximum that are read of each kind: the first, the last and four between them
_PROBLEMS = 20  # shown per kind of change
_TURNS = 40  # of a conversation that are shown; those in the middle are left out

Item = dict[str, Any]
"""One response: set, id, step, text, right and, if known, tokens, finish, reward, advantage, name of the
held-out set and, if several versions of the weights sampled it, its segments (``versions``). ``branch``: the
number of the row, if not the first. ``change``: of a response that shows that its problem was ``learnt`` or
``forgotten``. A conversation may have ``turns`` (whether the policy sampled it, text) instead of the text.
"""
Steps = dict[int, list[Item]]


@dataclass
class Samples:
    """The responses of one run on a page. ``prompts`` and ``verdicts`` have keys ``<set>/<id>``."""

    items: list[Item] = field(default_factory=list)
    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``text`` and reference ``answer`` of each problem."""
    verdicts: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """(step, correct responses, responses) of a problem, for each step that was read."""
    changed: dict[str, int] = field(default_factory=dict)
    """Number of held-out problems that were ``learnt`` (fewer than half of the responses correct in the first
    step, at least half in the last) and ``forgotten`` (the reverse), including those not shown."""
    read: list[str] = field(default_factory=list)
    """Descriptions of what was read."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Number of problems of each held-out set by name, if the evaluations were read completely."""


def choose_samples(run: RunFiles, *, read: int, room: int) -> Samples:
    """Read about ``read`` decompressed bytes at most, and choose responses of at most ``room`` bytes."""
    samples = Samples()
    longest = max(3000, min(40_000, room // 100))
    candidates: list[list[Item]] = []
    for name, read_steps in (("held-out", _read_evaluations), ("training", _read_rollouts)):
        try:
            steps, whole = read_steps(run, read // 2)
        except OSError as e:  # such as a folder that nobody may open
            run.notes.append(f"{name} responses cannot be read ({reason(e)})")
            continue
        candidates.append(_choose(samples, name, steps, whole))
        _shorten(run, candidates[-1], longest)
    used = 0
    for item in filter(None, chain.from_iterable(zip_longest(*candidates))):
        key, prompt, answer = _problem(item), item.pop("prompt"), item.pop("answer")
        known = key in samples.prompts
        used += len(_quoted(item)) + (0 if known else len(_quoted([prompt, answer])) + 500)
        if used > room:
            break
        samples.items.append(item)
        if not known:
            samples.prompts[key] = {"text": prompt, "answer": _cut(answer, 1000)}
    tokens = [prompt for prompt in samples.prompts.values() if isinstance(prompt["text"], list)]
    for prompt, text in zip(tokens, decode_prompts(run, [prompt["text"] for prompt in tokens]), strict=True):
        prompt["text"] = _cut(text, longest)
    samples.verdicts = {key: samples.verdicts[key] for key in samples.prompts}
    return samples


def _problem(item: Item) -> str:
    return f"{item['set']}/{item['id']}"


def _spread(files: Iterable[Path], budget: int) -> tuple[list[Path], int]:
    """Files of at most _STEPS steps in order, with the first and the last, and the bytes to read of each."""
    ordered = sorted(f for f in files if step_in_name(f) is not None)
    number = min(len(ordered), _STEPS)
    chosen = [ordered[round(i * (len(ordered) - 1) / max(1, number - 1))] for i in range(number)]
    return chosen, budget // max(1, number)


def _choose(samples: Samples, name: str, steps: Steps, whole: bool) -> list[Item]:
    """Describe what was read of one kind; returns the items to show, the most interesting first."""
    if not steps:
        return []
    part = "" if whole else ", the beginning of each"
    numbers = ", ".join(map(str, steps))
    samples.read.append(f"{name}: {sum(map(len, steps.values())):,} responses of steps {numbers}{part}")
    seen: dict[str, Steps] = defaultdict(dict)
    for step, items in steps.items():
        for item in items:
            seen[_problem(item)].setdefault(step, []).append(item)
    for key, of_problem in seen.items():
        samples.verdicts[key] = [(s, sum(i["right"] for i in of), len(of)) for s, of in of_problem.items()]
    chosen: list[Item] = []
    if name == "held-out":
        if whole:
            largest = max(({_problem(i): i["heldout"] for i in items} for items in steps.values()), key=len)
            samples.sizes = dict(Counter(largest.values()))
        chosen += _changed(samples, seen)
    first, *others = steps.values()
    for items in (first, *others[::-1]):  # a limit of size drops those in the middle
        ranked = sorted(items, key=lambda i: (i.get("reward", i["right"]), -i["tokens"]))
        longest = max(items, key=lambda i: i["tokens"])
        cut = next((i for i in items if i["finish"] == "length"), longest)
        chosen += [ranked[-1], ranked[0], longest, cut]
    return list({id(item): item for item in chosen}.values())


def _changed(samples: Samples, seen: dict[str, Steps]) -> Iterator[Item]:
    """Of each problem that was learnt or forgotten, a response of the first step and one of the last."""
    changed: dict[str, list[tuple[float, str]]] = {"learnt": [], "forgotten": []}
    for key in seen:
        before, *_, after = [right / count for _, right, count in samples.verdicts[key] * 2]
        if (before < 0.5) != (after < 0.5):
            changed["learnt" if after > before else "forgotten"].append((-abs(after - before), key))
    samples.changed = {change: len(keys) for change, keys in changed.items()}
    for change, keys in changed.items():
        for _, key in sorted(keys)[:_PROBLEMS]:
            first, *_, last = seen[key].values()
            for items, right in ((first, change == "forgotten"), (last, change == "learnt")):
                item = next(i for i in items if i["right"] == right)  # as at least half of its step are
                item["change"] = change
                yield item


def _read_evaluations(run: RunFiles, budget: int) -> tuple[Steps, bool]:
    """Responses by step, within the budget, and whether these are all."""
    steps: Steps = {}
    all_whole = True
    files, budget = _spread((run.folder / "evaluation").glob("step_*.jsonl"), budget)
    for file in files:
        try:
            rows, whole = read_problems(run, file, budget)
        except OSError as e:
            run.notes.append(f"{file.relative_to(run.folder)} cannot be read ({reason(e)})")
            continue
        all_whole &= whole
        step, several = step_in_name(file) or 0, len({row.set for row in rows}) > 1
        for row in rows:
            same: Item = {"set": f"held-out {row.set}" if several else "held-out", "heldout": row.set}
            same |= {"id": row.prompt_id, "step": step}
            same |= {"prompt": _cut(row.prompt, 8000), "answer": row.answer}
            lists = row.responses, row.correct, row.lengths, row.finishes
            for values in zip(*lists, strict=True):
                response = dict(zip(("text", "right", "tokens", "finish"), values, strict=True))
                steps.setdefault(step, []).append(same | response)
    return steps, all_whole


def read_problems(run: RunFiles, file: Path, budget: int) -> tuple[list[EvalResult], bool]:
    """Rows within the budget, and whether these are all."""
    rows, skipped, whole = read_results(file, run.folder, budget)
    note_skipped(run.notes, str(file.relative_to(run.folder)), skipped, len(rows) + skipped)
    return rows, whole


def _read_rollouts(run: RunFiles, budget: int) -> tuple[Steps, bool]:
    """As ``_read_evaluations``, of training steps."""
    from rpg_megatron.data.foreign_rollouts import iter_foreign_rollouts  # numpy and pyarrow
    from rpg_megatron.data.rollout_files import list_rollouts

    steps: Steps = {}
    whole = True
    files, budget = _spread(list_rollouts(run.folder), budget)
    for file, t in iter_foreign_rollouts(files, run.folder, budget):
        if isinstance(t, UserError):
            run.notes.append(str(t).replace(f"{run.folder}/", ""))
        elif t is None:
            whole = False
        else:
            step = step_in_name(file) or 0
            item = {"set": "training", "id": t.prompt_id, "step": step, "text": t.text, "right": t.correct}
            item |= {"tokens": t.sampled, "finish": t.finish, "reward": t.reward, "advantage": t.advantage}
            item |= {"prompt": t.prompt.tolist(), "answer": t.answer}
            versions = [(int(v), len(list(of))) for v, of in groupby(t.versions[t.mask].tolist())]
            turns = None if t.mask.all() else _turns(t)
            more = {"versions": versions if len(versions) > 1 else None, "turns": turns, "branch": t.branch}
            steps.setdefault(step, []).append(item | {key: value for key, value in more.items() if value})
    return steps, whole


def _turns(t: Trajectory) -> list[tuple[bool, list[int] | str]]:
    """Parts of a response: whether the policy sampled it, and its token ids, or a text in place of some."""
    tokens = iter(t.response.tolist())
    turns: list[tuple[bool, list[int] | str]]
    turns = [(bool(mine), list(islice(tokens, len(list(part))))) for mine, part in groupby(t.mask.tolist())]
    if (left_out := len(turns) - _TURNS) > 0:
        turns[_TURNS // 2 : -_TURNS // 2] = [(False, f"[… {left_out:,} turns left out …]")]
    return turns


def _shorten(run: RunFiles, items: Sequence[Item], longest: int) -> None:
    """Cut texts to this length; those of turns, which take the place of the text, if they can be decoded."""
    ids = [part for item in items for _, part in item.get("turns", ()) if isinstance(part, list)]
    decoded = _decode(run, ids)
    texts = iter(decoded or ())
    for item in items:
        if (turns := item.pop("turns", None)) and decoded:
            del item["text"]
            known = [(mine, part if isinstance(part, str) else next(texts)) for mine, part in turns]
            item["turns"] = [(mine, _cut(text, max(200, longest // len(turns)))) for mine, text in known]
        else:
            item["text"] = _cut(item["text"], longest)


def _quoted(value: Any) -> str:
    """Approximate text on the page, with the escapes of characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text + "     " * text.count("<")


def _cut(text: str, longest: int) -> str:
    """The text, or its beginning and its end, where the answer usually is."""
    if len(text) <= longest:
        return text
    tail = longest // 3
    left_out = len(text) - longest
    return f"{text[: longest - tail]}\n\n[… {left_out:,} characters left out …]\n\n{text[-tail:]}"


def decode_prompts(run: RunFiles, prompts: Sequence[list[int]]) -> list[str]:
    """Texts of prompts, or how long they are."""
    unknown = [f"({len(ids)} tokens; no tokenizer.json was found to show them as text)" for ids in prompts]
    return _decode(run, prompts) or unknown


def _decode(run: RunFiles, texts: Sequence[list[int]]) -> list[str] | None:
    """Texts of token ids, by the tokenizer of the export or, for a run of this user, of the initial model;
    None without one.
    """
    folder, model = run.folder, run.config.get("model.path")
    files: list[tuple[Path, ...]] = []
    with suppress(OSError):
        newest = sorted((folder / "hf").glob("step_*/tokenizer.json"))[-1:]
        files += [(file, real_path(folder)) for file in newest]
    if isinstance(model, str) and folder.stat().st_uid == os.geteuid():  # others' could name any folder
        files.append((Path(model) / "tokenizer.json",))
    for file, *inside in files if texts else ():
        try:
            with open_regular(file, *inside) as opened:
                return decode_foreign(opened, texts)
        except OSError:
            continue
        except ForeignInputError as e:
            note = f"{file.name}: prompts cannot be shown as text ({e})"
            run.notes += [note] * (note not in run.notes)
    return None
