"""Chats of every kind: what is trained and sampled is what the template writes, or is refused.

Why: a field that is dropped on the way (thoughts, calls, tools, a mask) trains another model than the data
say, without a word. Generated chats (roles, nulls, tools, calls, thoughts, weights, prefills, unknown fields)
are read as training rows and as prompts, with twelve templates and three kinds of tokenizer files. The oracle
is transformers' ``apply_chat_template`` with the fields as they are, except that arguments of calls given as
JSON text are objects. A trained text is the assistant's content and the end of the turn by a rule of this
test: the turn as the template writes it after the prompt, up to its first end, with all that the message
says. A row may be refused if the message names it, one in five at most; all are counted. Default: 1,440;
long: 10,080. The same chats are sent through the gateway's form of a chat. Not covered here: HTTP, turns that
were sampled (tests/unit/test_gateway), runs.
"""

import asyncio
import copy
import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.chat_rendering import template_variables
from rpg_megatron.data.chat_template import ChatRenderer
from rpg_megatron.data.conversations import read_conversations
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.data.prompts import codec_of, fit_prompts, load_tokenizer
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.rollout.chat import Chat, ChatFormat
from rpg_megatron.rollout.seeds import stop_tokens
from rpg_megatron.system.foreign_input import ForeignInputError
from tests.support.chat_templates import KINDS, STYLES, Style, write_model

WORDS = [
    "is",
    "the answer",
    "seven",
    "there are more",
    "é",
    "数",
    "\U0001f642",
    "a <b>",
    '"quoted"',
    "\\frac{1}{2}",
    "x\ny",
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("search", "add")
]
TAG = re.compile(r"#(\d+)#")
"""The number of a chat, in its text."""
MOST_REFUSED = 0.2
"""Rows that a template which can write all fields may refuse."""


def words(rng: random.Random) -> str:
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))
    return rng.choice(["", "", "", " ", "\n"]) + text + rng.choice(["", "", "", " ", "\n\n"])


def call(rng: random.Random, number: int) -> dict[str, Any]:
    arguments: Any = {"q": words(rng), "n": rng.randint(-5, 10**6), "deep": [{"x": None}]}
    if rng.random() < 0.5:
        arguments = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
    function = {"name": rng.choice(["search", "add"]), "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def chat(rng: random.Random, style: Style, tag: int) -> dict[str, Any]:
    """A row whose fields are mostly those that the template writes; some are not."""
    odd = rng.random() < 0.07
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3 and (style.system or odd):
        messages.append({"role": "system", "content": rng.choice(["", words(rng), words(rng)])})
    has_tools = rng.random() < 0.4 and (style.calls or odd)
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": f"#{tag}# {words(rng)}"})
        if has_tools and rng.random() < 0.7:
            calls = [call(rng, len(messages)) for _ in range(rng.randint(1, style.calls or 1))]
            for place, each in enumerate(calls):
                each["id"] += f"_{place}"
            turn: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
            if rng.random() < 0.8:
                turn["content"] = rng.choice([None, "", words(rng) if style.beside or odd else ""])
            messages.append(turn)
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": words(rng)} for c in calls]
        turn = {"role": "assistant", "content": words(rng)}
        if rng.random() < 0.3 and (style.thinks or odd):
            turn["reasoning_content"] = words(rng)
        if rng.random() < 0.2:
            turn["weight"] = rng.choice([0, 1, None])
        if rng.random() < 0.3:
            turn["refusal"] = None
        messages.append(turn)
    row: dict[str, Any] = {"messages": messages}
    if has_tools:
        row["tools"] = json.dumps(TOOLS) if rng.random() < 0.5 else TOOLS
    elif rng.random() < 0.2:
        row["tools"] = rng.choice([None, []])
    if odd:
        spoil(rng, row)
    return row


def spoil(rng: random.Random, row: dict[str, Any]) -> None:
    """Something that most templates do not write, or that has no meaning."""
    message = rng.choice(row["messages"])
    kind = rng.randrange(8)
    if kind == 0:
        message["mood"] = "glad"
    elif kind == 1:
        message["content"] = None
    elif kind == 2:
        message["content"] = [{"type": "text", "text": "parts"}]
    elif kind == 3:
        row["messages"][-1]["weight"] = "x"
    elif kind == 4:
        row["messages"][-1]["prefix"] = True
    elif kind == 5:
        row["messages"].append({"role": "user", "content": words(rng)})
    elif kind == 6:
        row["loss_mask"] = [1, 0]
    else:
        message["content"] = "half \ud83d"


def as_transformers(row: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Messages and tools for ``apply_chat_template``."""
    messages = copy.deepcopy(row["messages"])
    for message in messages:
        message.pop("weight", None)
        for each in message.get("tool_calls") or []:
            if isinstance(each["function"]["arguments"], str):
                each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    tools = row.get("tools") or None
    return messages, json.loads(tools) if isinstance(tools, str) else tools


class Model:
    """A tokenizer in a folder, by our readers and by transformers."""

    def __init__(self, folder: Path, name: str, kind: str):
        self.folder, self.style = folder, STYLES[name]
        write_model(folder, self.style, kind)
        self.ours = open_tokenizer(folder, chat=True)
        self.sampling = codec_of(load_tokenizer(folder))
        self.oracle: Any = AutoTokenizer.from_pretrained(folder)
        self.stops = stop_tokens(folder, self.ours, chats=True)
        self.end = self.oracle.convert_tokens_to_ids(self.style.end or self.style.eos)

    def text(self, row: dict[str, Any], count: int | None = None, *, prompt: bool) -> str:
        messages, tools = as_transformers(row)
        written: str = self.oracle.apply_chat_template(
            messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return written

    def trained(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        """What precedes each trained turn, and the turn with its end, by the oracle."""
        found = []
        for place, message in enumerate(row["messages"]):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            before, after = self.text(row, place, prompt=True), self.text(row, place + 1, prompt=False)
            assert after.startswith(before), "such a row is refused"
            turn = after[len(before) :]
            assert self.style.end in turn
            turn = turn[: turn.index(self.style.end) + len(self.style.end)] if self.style.end else turn
            assert_whole(message, turn)
            found.append((before, turn if self.style.end else turn + self.style.eos))
        return found


def assert_whole(message: dict[str, Any], turn: str) -> None:
    """The turn has what the message says; spaces at the borders may differ."""
    assert (message.get("content") or "").strip() in turn
    assert (message.get("reasoning_content") or "").strip() in turn
    for each in message.get("tool_calls") or []:
        assert each["function"]["name"] in turn
    assert "None" not in turn.replace("deep", "")


def check_training(model: Model, file: Path, rows: list[dict[str, Any]]) -> Counter[str]:
    """Compare all rows that are read; returns the number of refused ones by reason."""
    settings = ConversationSettings(path=file, chat=True, malformed="skip")
    end = None if model.style.end else model.end
    read = read_conversations(settings, model.ours, "sft.data", stops=model.stops, end=end)
    found: dict[int, list[tuple[str, str]]] = {}
    for prompt in read.fetch(range(len(read))):
        mask, text = prompt.tokens >= 0, ""
        tokens = np.where(mask, prompt.tokens, ~prompt.tokens)
        borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
        turns = []
        for start, stop in pairwise(borders):
            piece = model.oracle.decode(tokens[start:stop].tolist())
            if mask[start]:
                turns.append((text, piece))
            text += piece
        first = tokens[: borders[1]].tolist()
        assert first == model.oracle(model.oracle.decode(first), add_special_tokens=False)["input_ids"]
        tag = TAG.search(text)
        assert tag
        found.setdefault(int(tag[1]), []).extend(turns)
    for number, turns in found.items():
        assert sorted(turns) == sorted(model.trained(rows[number])), rows[number]
    assert len(found) + read.left_out.counts["malformed"] == len(rows), "each is trained or counted"
    assert len(read.left_out.malformed) == read.left_out.first.count(f"{file}"), (
        "each kind names its first row"
    )
    return Counter({first.partition(": ")[2]: n for n, first in read.left_out.malformed.values()})


def check_prompts(model: Model, file: Path, rows: list[dict[str, Any]]) -> Counter[str]:
    """The prompts of the last turns, as they are sampled from and as a worker encodes their text."""
    settings = DataSettings(path=file, prompt_key="messages", chat=True, malformed="skip")
    problems, refused = read_problems_with_counts(settings)
    prompts, too_long = fit_prompts(problems, settings, model.ours, refused=refused)
    assert too_long == 0
    for prompt in prompts:
        messages, tools = as_transformers(rows[prompt.id])
        expected = model.oracle.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert prompt.tokens.tolist() == expected
        assert model.sampling.encode(prompt.text) == expected
    assert len(prompts) + refused.counts["malformed"] == len(rows)
    return Counter({first.partition(": ")[2]: n for n, first in refused.malformed.values()})


def check_gateway(model: Model, rows: list[dict[str, Any]]) -> int:
    """What the gateway sends for the chats that clients may send; returns their number."""
    variables = template_variables(model.ours, DataSettings(path=model.folder, chat=True))
    renderer = ChatRenderer(model.style.source, variables)
    form = ChatFormat(renderer, renderer, model.sampling, frozenset(model.stops), None, False, True)
    compared = 0

    async def compare() -> None:
        nonlocal compared
        for row in rows:
            messages, tools = as_transformers(row)
            sent = [
                {k: v for k, v in m.items() if v is not None} | {"content": m.get("content") or ""}
                for m in messages
            ]
            if any(not isinstance(m["content"], str) or "\ud83d" in m["content"] for m in sent):
                continue
            try:
                expected = model.oracle.apply_chat_template(
                    sent, tools=tools, add_generation_prompt=True, return_dict=False
                )
            except Exception:  # of the template, of any type
                with pytest.raises(ForeignInputError):
                    await form.render(row["messages"], tools or [])
                continue
            _, text, turn = await Chat(form).prompt(row["messages"], tools or [])
            assert (await Chat(form).encode(text, turn)).tolist() == expected
            compared += 1
        form.close()

    asyncio.run(compare())
    return compared


def run(folder: Path, name: str, count: int, seed: int) -> None:
    for number, kind in enumerate(KINDS):
        rng, model = random.Random(f"{seed} {name} {kind}"), Model(folder / str(number), name, kind)
        rows = [chat(rng, model.style, tag) for tag in range(count)]
        file = model.folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        refused = check_training(model, file, rows)
        prompts = [row | {"messages": row["messages"][:-1], "answer": "1"} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        more = check_prompts(model, file, prompts)
        print(name, kind, refused, more)
        assert check_gateway(model, prompts) >= (1 - MOST_REFUSED) * count
        for each in (refused, more):
            assert each.total() <= MOST_REFUSED * count, each


@pytest.mark.parametrize("name", STYLES)
def test_chats(tmp_path: Path, name: str) -> None:
    run(tmp_path, name, 40, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("name", STYLES)
def test_ten_thousand_chats(tmp_path: Path, name: str) -> None:
    run(tmp_path, name, 280, seed=2)
