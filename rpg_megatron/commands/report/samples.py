"""Selects responses for a report from a run's rollouts and evaluations, within a budget of bytes.

A step of a large run holds gigabytes, so a report reads the beginning of some steps, spread over the run. The
page says what was read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rpg_megatron.commands.report.run_files import RunFiles, note_skipped, reason, step_in_name
from rpg_megatron.config import UserError
from rpg_megatron.config.files import open_regular, real_path
from rpg_megatron.data.tokenizer_file import decode_foreign
from rpg_megatron.system.foreign_input import ForeignInputError
from rpg_megatron.system.metrics_file import Count

if TYPE_CHECKING:
    from rpg_megatron.data.trajectory import Trajectory

_STEPS = 12
"""Maximum steps that are read of each kind."""
_PROBLEMS = 20
"""Problems shown per kind of change."""
_RESPONSE = 100
"""Bytes of the budget that a response takes besides those of its row."""
_TURNS = 40
"""Turns of a conversation that are shown; those in the middle are left out."""

Item = dict[str, Any]
"""One response: set, id, step, text, right and, if known, tokens, finish, reward, advantage, name of the
held-out set and, if several versions of the weights sampled it, its segments (``versions``). ``branch``: the
number of the row, if not the first. A conversation may have ``turns`` (whether the policy sampled it, text)
instead of the text.
"""


@dataclass
class Samples:
    """The responses of one run on a page. ``prompts`` and ``verdicts`` have keys ``<set>/<id>``."""

    items: list[Item] = field(default_factory=list)
    prompts: dict[str, dict[str, str]] = field(default_factory=dict)
    """``text`` and reference ``answer`` of each problem, if known."""
    verdicts: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """(step, correct responses, responses) of a problem, for each step that was read."""
    changes: dict[str, str] = field(default_factory=dict)
    """``learnt``: fewer than half of the responses correct in the first step, at least half in the last;
    ``forgotten``: the reverse."""
    changed: dict[str, int] = field(default_factory=dict)
    """Number of held-out problems that changed in each direction, including those not shown."""
    read: list[str] = field(default_factory=list)
    """Descriptions of what was read."""
    problems: int | None = None
    """Number of held-out problems of all sets, if one evaluation was read completely."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The same for each held-out set, by name."""


def choose_samples(run: RunFiles, *, read: int, room: int) -> Samples:
    """Read about ``read`` decompressed bytes at most, and choose responses of at most ``room`` bytes."""
    samples = Samples()
    longest = max(3000, min(40_000, room // 100))
    candidates = []
    for name, find, read_items in (
        ("held-out", _list_evaluations, _evaluation_items),
        ("training", _list_rollouts, _rollout_items),
    ):
        try:
            files = _spread(find(run.folder))
        except OSError as e:  # such as a folder that nobody may open
            run.notes.append(f"{name} responses cannot be read ({reason(e)})")
            files = []
        by_step: dict[int, list[Item]] = defaultdict(list)
        for file, item in read_items(run, samples, files, read // 2 // max(1, len(files))):
            step = step_in_name(file) or 0
            by_step[step].append({"set": name} | item | {"step": step})
        chosen = _summarise(samples, name, by_step)
        _decode_turns(run, chosen)
        candidates.append([_shorten(item, longest) for item in chosen])
    tokens: dict[str, list[int]] = {}
    for item in _within(candidates, room, samples.prompts):
        key = f"{item['set']}/{item['id']}"
        ids = item.pop("prompt", None)
        if ids is not None and key not in samples.prompts:
            tokens.setdefault(key, ids)
        if item.get("answer"):
            samples.prompts.setdefault(key, {})["answer"] = _cut(str(item.pop("answer")), 1000)
        samples.items.append(item)
    for key, text in zip(tokens, decode_prompts(run, list(tokens.values())), strict=True):
        samples.prompts.setdefault(key, {})["text"] = _cut(text, longest)
    shown = {f"{item['set']}/{item['id']}" for item in samples.items}
    for part in (samples.prompts, samples.verdicts, samples.changes):
        for key in part.keys() - shown:
            del part[key]
    return samples


def _list_evaluations(run: Path) -> Iterable[Path]:
    return (run / "evaluation").glob("step_*.jsonl")


def _list_rollouts(run: Path) -> Iterable[Path]:
    from rpg_megatron.data.rollout_files import list_rollouts  # numpy and pyarrow

    return list_rollouts(run)


def _summarise(samples: Samples, name: str, by_step: dict[int, list[Item]]) -> list[Item]:
    """Describe what was read of one kind; returns the items to show, the most interesting first."""
    if not by_step:
        return []
    whole = all(item.get("whole", True) for items in by_step.values() for item in items)
    part = "" if whole else ", the beginning of each"
    count = sum(map(len, by_step.values()))
    steps = ", ".join(map(str, sorted(by_step)))
    samples.read.append(f"{name}: {count:,} responses of steps {steps}{part}")
    if name == "held-out" and whole:
        largest = max(({(i["set"], i["id"]): i for i in items} for items in by_step.values()), key=len)
        samples.problems = len(largest)
        samples.sizes = dict(Counter(item["heldout"] for item in largest.values()))
    return _choose(samples, name, by_step)


def _choose(samples: Samples, name: str, by_step: dict[int, list[Item]]) -> list[Item]:
    seen: dict[str, dict[int, list[Item]]] = defaultdict(dict)
    for step, items in sorted(by_step.items()):
        for item in items:
            seen[f"{item['set']}/{item['id']}"].setdefault(step, []).append(item)
    changed: dict[str, list[str]] = {"learnt": [], "forgotten": []}
    for key, steps in seen.items():
        marks = [(s, sum(bool(i["right"]) for i in items), len(items)) for s, items in steps.items()]
        samples.verdicts[key] = marks
        (_, right, count), (_, right_then, count_then) = marks[0], marks[-1]
        before, after = 2 * right >= count, 2 * right_then >= count_then
        if before != after:
            samples.changes[key] = "forgotten" if before else "learnt"
            changed[samples.changes[key]].append(key)
    if name == "held-out":
        samples.changed = {change: len(keys) for change, keys in changed.items()}
    chosen: list[Item] = []
    for keys in changed.values():
        keys.sort(key=lambda k: -abs(_share(samples.verdicts[k][-1]) - _share(samples.verdicts[k][0])))
    for pair in zip(*(_padded(keys) for keys in changed.values()), strict=True):
        for key in filter(None, pair):
            first, *_, last = seen[key].values()
            # A response that matches the verdict of its step: a wrong one if most were wrong.
            right_first = samples.changes[key] == "forgotten"
            chosen.append(min(first, key=lambda i: i["right"] != right_first))
            chosen.append(min(last, key=lambda i: i["right"] == right_first))
    for items in _ends_first([items for _, items in sorted(by_step.items()) if items]):
        ranked = sorted(items, key=lambda i: (i.get("reward", i["right"]), -i.get("tokens", 0)))
        longest = max(items, key=lambda i: i.get("tokens", 0))
        cut = next((i for i in items if i.get("finish") == "length"), longest)
        between = items[:: max(1, len(items) // 4)][:4]
        chosen += [ranked[-1], ranked[0], longest, cut, *between]
    unique = {id(item): item for item in chosen}
    return list(unique.values())


class _Problem(msgspec.Struct):
    """A row of an evaluation (``EvalResult``)."""

    prompt_id: Count
    answer: str
    responses: list[str]
    correct: list[bool]
    lengths: list[Count]
    finishes: list[str]
    prompt: str = ""
    set: str = ""

    def __post_init__(self) -> None:
        if {len(self.correct), len(self.lengths), len(self.finishes)} != {len(self.responses)}:
            raise ValueError("lists of different lengths")


_decoder = msgspec.json.Decoder(_Problem)

Items = Iterator[tuple[Path, Item]]


def _evaluation_items(run: RunFiles, samples: Samples, files: Sequence[Path], budget: int) -> Items:
    """The responses of evaluations, each within the budget; with several sets, ``set`` includes the name."""
    for file in files:
        try:
            rows, whole = read_problems(run, file, budget)
        except OSError as e:
            run.notes.append(f"{file.relative_to(run.folder)} cannot be read ({reason(e)})")
            continue
        several = len({row.set for row in rows}) > 1
        for row in rows:
            title = f"held-out {row.set}" if several else "held-out"
            key = f"{title}/{row.prompt_id}"
            samples.prompts.setdefault(key, {"text": _cut(row.prompt, 8000), "answer": row.answer})
            for number, text in enumerate(row.responses):
                item = {"id": row.prompt_id, "text": text, "right": row.correct[number]}
                item |= {"tokens": row.lengths[number], "finish": row.finishes[number]}
                item |= {"set": title, "heldout": row.set}
                yield file, item if whole else item | {"whole": False}


def read_problems(run: RunFiles, file: Path, budget: int) -> tuple[list[_Problem], bool]:
    """Rows within the budget, and whether these are all."""
    with open_regular(file, real_path(run.folder)) as raw:
        data = raw.read(budget)
    lines = _lines(data, cut := len(data) == budget)
    rows, broken = [], 0
    for line in lines:
        try:
            # Surrogates, which training writes, are shown as question marks.
            row = _decoder.decode(line.decode("utf-8", "surrogatepass").encode("utf-8", "replace"))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            broken += 1
            continue
        budget -= len(line) + _RESPONSE * len(row.responses)
        if budget < 0:
            cut = True
            break
        rows.append(row)
    note_skipped(run.notes, str(file.relative_to(run.folder)), broken, len(lines))
    return rows, not cut


def _rollout_items(run: RunFiles, samples: Samples, files: Sequence[Path], budget: int) -> Items:
    """The responses of training steps, each within the budget."""
    from rpg_megatron.data.foreign_rollouts import iter_foreign_rollouts

    by_file: dict[Path, list[Item]] = {file: [] for file in files}
    for file, t in iter_foreign_rollouts(files, run.folder, budget):
        if isinstance(t, UserError):
            run.notes.append(str(t).replace(f"{run.folder}/", ""))
        elif t is None:
            by_file[file] = [item | {"whole": False} for item in by_file[file]]
        else:
            item = {"id": t.prompt_id, "text": t.text, "right": t.correct, "tokens": t.sampled}
            item |= {"finish": t.finish, "reward": t.reward, "advantage": t.advantage}
            if len(segments := _segments(t.versions[t.mask])) > 1:
                item["versions"] = segments
            if not t.mask.all():
                item["turns"] = _turns(t)
            if t.branch:
                item["branch"] = t.branch
            by_file[file].append(item | {"prompt": t.prompt, "answer": t.answer})
    for file, items in by_file.items():
        yield from ((file, item) for item in items)


def _segments(versions: Any) -> list[tuple[int, int]]:
    """(version, tokens) of each segment of a response that was sampled by one version of the weights."""
    return [(int(version), len(list(tokens))) for version, tokens in groupby(versions.tolist())]


def _turns(t: Trajectory) -> list[tuple[bool, list[int]]]:
    """Parts of a response: whether the policy sampled it, and its token ids."""
    tokens = iter(t.response.tolist())
    return [(bool(mine), list(islice(tokens, len(list(part))))) for mine, part in groupby(t.mask.tolist())]


def _decode_turns(run: RunFiles, items: Sequence[Item]) -> None:
    """Make texts of the turns' token ids, or remove the turns, if the tokenizer is not known."""
    for item in items:
        if len(turns := item.get("turns", ())) > _TURNS:
            half, left_out = _TURNS // 2, len(turns) - _TURNS
            item["turns"] = [*turns[:half], (False, left_out), *turns[-half:]]
    ids = [part for item in items for _, part in item.get("turns", ()) if isinstance(part, list)]
    decoded = _decode(run, ids)
    texts = iter(decoded or ())
    for item in items:
        if (turns := item.pop("turns", None)) and decoded:
            item["turns"] = [
                (mine, next(texts) if isinstance(part, list) else f"[… {part:,} turns left out …]")
                for mine, part in turns
            ]
            del item["text"]


def _lines(data: bytes, cut: bool) -> list[bytes]:
    lines = data.split(b"\n")
    if cut:
        lines.pop()  # incomplete
    return [line for line in lines if line.strip()]


def _spread(files: Iterable[Path]) -> list[Path]:
    """Files of at most _STEPS steps in order, including the first and the last."""
    ordered = sorted(f for f in files if step_in_name(f) is not None)
    if len(ordered) <= _STEPS:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (_STEPS - 1))] for i in range(_STEPS)]


def _ends_first(items: list[Any]) -> list[Any]:
    """The first, the last, then the others, so that a size limit drops those in the middle."""
    return [*items[:1], *items[:0:-1]]


def _within(lists: list[list[Item]], room: int, prompts: dict[str, dict[str, str]]) -> Iterator[Item]:
    """Items of all lists in turn, up to ``room`` bytes."""
    used = 0
    known: set[str] = set()
    for pair in zip(*(_padded(items, most=max(map(len, lists))) for items in lists), strict=True):
        for item in filter(None, pair):
            key = f"{item['set']}/{item['id']}"
            size = len(_quoted(item)) + (0 if key in known else len(_quoted(prompts.get(key, ""))) + 500)
            known.add(key)
            if used + size > room:
                return
            used += size
            yield item


def _quoted(value: Any) -> str:
    """Approximate text on the page, with the escapes of characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text + "     " * text.count("<")


def _padded(items: list[Any], most: int = _PROBLEMS) -> list[Any]:
    return [*items[:most], *[None] * (most - len(items))]


def _shorten(item: Item, longest: int) -> Item:
    shown = {key: value for key, value in item.items() if key != "whole"}
    if "prompt" in shown:
        shown["prompt"] = shown["prompt"].tolist()
    if "turns" not in shown:
        return shown | {"text": _cut(str(item["text"]), longest)}
    turns = shown["turns"]
    if sum(len(text) for _, text in turns) > longest:
        longest = max(200, longest // len(turns))
    return shown | {"turns": [(mine, _cut(text, longest)) for mine, text in turns]}


def _cut(text: str, longest: int) -> str:
    """The text, or its beginning and its end, where the answer usually is."""
    if len(text) <= longest:
        return text
    tail = longest // 3
    left_out = len(text) - longest
    return f"{text[: longest - tail]}\n\n[… {left_out:,} characters left out …]\n\n{text[-tail:]}"


def _share(mark: tuple[int, int, int]) -> float:
    return mark[1] / mark[2]


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
    with contextlib.suppress(OSError):
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
