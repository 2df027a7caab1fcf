"""Conversations to train on have the tokens that engines would see, and the mask of the turns to train.

Why: a mask that includes the user's words, or leaves out the end of a turn, trains a model that never stops;
tokens that differ from those of a rollout train a text that the model never meets. Proved with tokenizers
that have merges and special tokens, and templates that write chats as Qwen2.5, Qwen3 (which leaves out
thoughts) and Llama 3 do, against transformers' own rendering: the text before each trained turn is the prompt
of its generation, the trained text is the turn with its end token, each turn is trained once. Also the three
forms of data, chosen turns, cuts, malformed rows, and rollouts of a run with its own tokens.
Not covered here: the gradients (tests/distributed/test_fine_tuning), runs (tests/integration).
"""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.conversations import Conversations, read_conversations, to_trajectory
from rpg_megatron.data.rollout_files import rollouts_file, write_rollouts
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.rollout.seeds import stop_tokens
from tests.support.chat_models import ENDS, write_chat_tokenizer
from tests.support.trajectories import make_trajectory

CHAT = [
    {"role": "system", "content": "numbers are names"},
    {"role": "user", "content": "is there more?"},
    {"role": "assistant", "content": "there are seven"},
    {"role": "user", "content": "is that the answer?"},
    {"role": "assistant", "content": "that is the answer: 7"},
    {"role": "user", "content": "more numbers"},
    {"role": "assistant", "content": "more"},
]


class Data:
    """A model's folder with a tokenizer, and files of conversations."""

    def __init__(self, folder: Path, family: str = "qwen2.5"):
        self.folder, self.model, self.family = folder, folder / "model", family
        write_chat_tokenizer(self.model, family)
        self.tokenizer = open_tokenizer(self.model, chat=True)
        assert self.tokenizer is not None
        self.end = self.tokenizer.eos_token_id
        self.oracle: Any = AutoTokenizer.from_pretrained(self.model)

    def settings(self, rows: list[dict[str, Any]], **more: Any) -> ConversationSettings:
        file = self.folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ConversationSettings(path=file, **more)

    def read(self, rows: list[dict[str, Any]], **more: Any) -> Conversations:
        return self.open(self.settings(rows, **more))

    def open(self, settings: ConversationSettings) -> Conversations:
        stops = stop_tokens(self.model, self.tokenizer)
        return read_conversations(settings, self.tokenizer, "sft.data", stops=stops, vocab=1000)

    def parts(self, conversations: Conversations) -> list[list[tuple[bool, list[int]]]]:
        """The rows, as runs of tokens with and without training."""
        found = []
        for row in conversations.fetch(range(len(conversations))):
            trained = row.tokens >= 0
            tokens = np.where(trained, row.tokens, ~row.tokens)
            runs = pairwise([0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)])
            found.append([(bool(trained[a]), tokens[a:b].tolist()) for a, b in runs])
        return found

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("family", ENDS)
def test_each_turn_follows_its_prompt_and_ends(tmp_path: Path, family: str) -> None:
    data = Data(tmp_path, family)
    rows = data.parts(data.read([{"messages": CHAT}], chat=True))
    assert len(rows) == (3 if family == "qwen3" else 1), "only Qwen3's template rewrites earlier turns"
    turns = []
    for row in rows:
        text = ""
        for trained, ids in row:
            if trained:
                turns.append((text, data.text(ids)))
                assert ids.count(data.end) == 1
                assert ids[-1] == data.end, "a turn ends with the token that ends it, and with nothing else"
            text += data.text(ids)
    places = [i for i, message in enumerate(CHAT) if message["role"] == "assistant"]
    assert len(turns) == len(places)
    for (before, turn), place in zip(turns, places, strict=True):
        prompt = data.oracle.apply_chat_template(CHAT[:place], tokenize=False, add_generation_prompt=True)
        assert before == prompt
        thoughts = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
        assert turn == thoughts + CHAT[place]["content"] + ENDS[family]


def test_a_prompt_is_tokenized_as_in_a_rollout(tmp_path: Path) -> None:
    data = Data(tmp_path)
    (((_, before), (_, _turn)),) = data.parts(data.read([{"messages": CHAT[:3]}], chat=True))
    prompt = data.oracle.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert before == data.oracle(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("columns", [("prompt", "completion"), ("prompt", "response"), ("q", "a")])
def test_prompts_and_responses(tmp_path: Path, columns: tuple[str, str]) -> None:
    data = Data(tmp_path)
    prompt, response = columns
    keys = {"prompt_key": "q", "answer_key": "a"} if prompt == "q" else {}
    rows = [{prompt: "is the answer", response: " seven \n"}]
    parts = data.parts(data.read(rows, template="Q: {prompt} A:", **keys))
    expected = [data.oracle(text)["input_ids"] for text in ("Q: is the answer A:", " seven \n")]
    assert parts == [[(False, expected[0]), (True, [*expected[1], data.end])]], "word for word, and the end"


def test_prompts_and_responses_as_messages(tmp_path: Path) -> None:
    data = Data(tmp_path)
    text = data.parts(data.read([{"prompt": "is it", "completion": "yes"}], chat=True, system="be brief"))
    both = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "is it"}]
    rows = [{"prompt": both, "completion": [{"role": "assistant", "content": "yes"}]}]
    assert data.parts(data.read(rows, chat=True)) == text
    # The assistant's turns in a prompt are not trained.
    rows = [{"prompt": CHAT[:4], "completion": "yes"}]
    ((before, after),) = data.parts(data.read(rows, chat=True))
    assert (before[0], after[0]) == (False, True)
    assert data.text(after[1]) == "yes<|im_end|>"


def test_chosen_turns(tmp_path: Path) -> None:
    data = Data(tmp_path)
    weighed = [*CHAT[:2], CHAT[2] | {"weight": 0}, *CHAT[3:4], CHAT[4] | {"weight": 1}, *CHAT[5:]]
    trained = {
        name: [
            data.text(ids)
            for on, ids in data.parts(data.read([{"messages": chat}], chat=True, **how))[0]
            if on
        ]
        for name, chat, how in (
            ("all", CHAT, {}),
            ("weighed", weighed, {}),
            ("last", CHAT, {"turns": "last"}),
            ("last but unanswered", CHAT[:6], {"turns": "last"}),
        )
    }
    texts = [f"{message['content']}<|im_end|>" for message in CHAT if message["role"] == "assistant"]
    assert trained == {
        "all": texts,
        "weighed": texts[1:],
        "last": texts[2:],
        "last but unanswered": texts[1:2],
    }


def test_long_conversations_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    data = Data(tmp_path)
    rows = [{"messages": CHAT[:3]}, {"messages": CHAT}]
    whole = data.parts(data.read(rows, chat=True))
    length = sum(len(ids) for _, ids in whole[0])
    dropped = data.read(rows, chat=True, max_tokens=length)
    assert data.parts(dropped) == whole[:1]
    assert dropped.left_out.counts == {"too long": 1}
    cut = data.read(rows, chat=True, max_tokens=length, too_long="cut")
    assert data.parts(cut) == [whole[0], whole[0]], "the second begins as the first"
    assert cut.left_out.counts == {"cut": 1}
    assert cut.trained == 2 * len(whole[0][1][1])
    shortest = len(whole[0][0][1]) + 1
    assert len(data.read(rows, chat=True, max_tokens=shortest, too_long="cut")) == 2
    with pytest.raises(UserError, match=r"sft\.data: no conversation is left .*2 too long.*max_tokens"):
        data.read(rows, chat=True, max_tokens=shortest - 1, too_long="cut")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": CHAT[:2]}, "row 2: the chat has no turn of the assistant to train on"),
        ({"messages": [*CHAT[:2], CHAT[2] | {"weight": 0}]}, "row 2: the chat has no turn"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "row 2: the chat begins with the assistant"),
        ({"messages": [{"role": "user"}]}, "row 2: 'messages' is a list, but not of chat messages"),
        ({"messages": "hello"}, r"row 2: has no response; name its column with sft\.data\.answer_key"),
        ({"other": 1}, "row 2: the key 'messages' is missing"),
    ],
)
def test_rows_without_a_turn_to_train(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    data = Data(tmp_path)
    rows = [{"messages": CHAT}, row, {"messages": CHAT[:3]}]
    with pytest.raises(UserError, match=message.replace("row 2", "(row|line) 2|:2")):
        data.read(rows, chat=True)


def test_malformed_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    data = Data(tmp_path)
    rows = [
        {"messages": CHAT},
        {"messages": CHAT[:2]},
        {"messages": [{"role": "user"}]},
        {"messages": CHAT[:3]},
    ]
    kept = data.read(rows, chat=True, malformed="skip")
    assert len(kept) == 2
    assert kept.left_out.counts == {"malformed": 2}
    assert kept.left_out.first.count("rows.jsonl:") == 2, "each kind has its first row"


def test_long_chats_are_rendered_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, rows = Data(tmp_path), [{"messages": CHAT[: 1 + 2 * turns]} for turns in (1, 2, 3, 1)]
    whole = data.parts(data.read(rows, chat=True))
    monkeypatch.setattr("rpg_megatron.data.conversation_encoder._CHARACTERS", 100)
    assert data.parts(data.read(rows, chat=True)) == whole


def test_a_chat_without_a_template(tmp_path: Path) -> None:
    data = Data(tmp_path)
    with pytest.raises(UserError, match=r"is a chat; set sft\.data\.chat to true"):
        data.read([{"messages": CHAT}])
    config = json.loads((data.model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (data.model / "tokenizer_config.json").write_text(json.dumps(config))
    data.tokenizer = open_tokenizer(data.model, chat=True)
    with pytest.raises(UserError, match=r"sft\.data\.chat: the model's tokenizer has no chat template"):
        data.read([{"messages": CHAT}], chat=True)


def test_a_template_that_writes_a_turn_otherwise_than_its_prompt(tmp_path: Path) -> None:
    """Trained on such tokens, the model would learn a text that its rollouts never begin."""
    data = Data(tmp_path)
    data.tokenizer.chat_template += "{%- if add_generation_prompt %}{{ '<think>\n' }}{%- endif %}"
    with pytest.raises(UserError, match=r"renders a turn of the assistant otherwise than after its"):
        data.read([{"messages": CHAT}], chat=True)
    data.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UserError, match="the chat template cannot render it"):
        data.read([{"messages": CHAT}], chat=True)


def test_trajectories_have_the_mask(tmp_path: Path) -> None:
    data = Data(tmp_path)
    found = data.read([{"messages": CHAT}, {"messages": CHAT[:3]}], chat=True)
    rows = data.parts(found)
    for row, prompt in zip(rows, found.fetch([0, 1]), strict=True):
        t = to_trajectory(prompt)
        assert t.prompt.tolist() == row[0][1]
        assert t.response.tolist() == [token for _, ids in row[1:] for token in ids]
        assert t.mask.tolist() == [on for on, ids in row[1:] for _ in ids]
        assert len(t.behaviour) == len(t.versions) == len(t.response)


def sampled(data: Data, text: str, reward: float, **more: Any) -> Trajectory:
    prompt, response = (data.oracle(part)["input_ids"] for part in ("is the answer", text))
    zeros = {name: np.zeros(len(response) + 1, np.float32) for name in ("old", "anchor")}
    fields = {"finish": "stop", "text": text, "correct": reward > 0, "reward": reward} | more
    return make_trajectory(prompt, [*response, data.end], **zeros, **fields)


def test_rollouts_are_filtered_and_keep_their_tokens(tmp_path: Path) -> None:
    data, run = Data(tmp_path), tmp_path / "run"
    run.mkdir()
    odd = sampled(data, "the answer", 1.0)
    odd.response = np.append(
        np.array([data.oracle.convert_tokens_to_ids(c) for c in "the"], np.int32), data.end
    )
    odd.text, count = "the", len(odd.response)
    odd.behaviour, odd.old, odd.anchor = (np.zeros(count, np.float32) for _ in range(3))
    odd.versions, odd.mask = np.zeros(count, np.int32), np.array([True, False, True, True])
    steps = [
        [sampled(data, "seven", 1.0), sampled(data, "more", 0.0), sampled(data, "is", 0.5, correct=False)],
        [odd, sampled(data, "seven", 1.0), sampled(data, "seven that", 1.0, finish="length")],
    ]
    for step, trajectories in enumerate(steps, 1):
        write_rollouts(rollouts_file(run, step), trajectories)
    found = data.open(ConversationSettings(rollouts=run))
    rows = data.parts(found)
    assert [[on for on, _ in row] for row in rows] == [
        [False, True],
        [False, True, False, True],
        [False, True],
    ]
    assert rows[1][1][1] + rows[1][2][1] + rows[1][3][1] == odd.response.tolist(), "not tokenized again"
    assert found.left_out.counts == {"not good enough": 2, "truncated": 1}
    assert len(data.open(ConversationSettings(rollouts=run, min_reward=0.5))) == 4
    assert len(data.open(ConversationSettings(rollouts=run, deduplicate=True))) == 2
    assert len(data.open(ConversationSettings(rollouts=run, limit=1))) == 1
    with pytest.raises(UserError, match=r"no conversation is left .*lower min_reward"):
        data.open(ConversationSettings(rollouts=run, min_reward=2))

    steps[0][0].text = "other words"
    write_rollouts(rollouts_file(run, 1), steps[0])
    with pytest.raises(UserError, match="its tokens are another text with the tokenizer"):
        data.open(ConversationSettings(rollouts=run))
    rollouts_file(run, 1).write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"step_000001\.parquet: damaged"):
        data.open(ConversationSettings(rollouts=run))
    with pytest.raises(UserError, match="has no saved rollouts"):
        data.open(ConversationSettings(rollouts=tmp_path / "model"))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(tmp_path)
    settings = data.settings([{"messages": CHAT}], chat=True)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
    with pytest.raises(UserError, match=f"cannot be kept in .*{os.strerror(28)}"):
        data.open(settings)


RUN = {"model": {"path": "m"}, "sft": {"data": {"path": "x"}}, "device": "cpu"}


def test_a_run_without_evaluation_has_no_engines() -> None:
    settings = Settings.model_validate(RUN | {"engine": {"replicas": 3, "colocated": True}})
    assert (settings.engine.replicas, settings.engine.colocated, settings.temperature) == (0, False, 1.0)
    settings = Settings.model_validate(RUN | {"evaluation": {"data": {"path": "y"}}})
    assert settings.engine.replicas == 1
    again = Settings.model_validate(settings.model_dump(mode="json"))
    assert again == settings
