# ruff: noqa: E501  the table of rows is easier to read so
"""Fields of chats, ends of turns and files of tokenizers that people have, one by one.

Why: each of these was dropped or misread without a word, and trained or sampled another text than the data.
Proved on the inputs themselves, with the value that is right. Generated chats of all kinds are in
test_chat_properties, runs with an engine in tests/integration/test_turn_ends.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.sft import ConversationSettings
from rpg_megatron.data.conversations import Conversations, read_conversations
from rpg_megatron.data.problems import read_problems, read_problems_with_counts
from rpg_megatron.data.prompts import codec_of, fit_prompts, load_codec, load_tokenizer, save_codec
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.rollout.seeds import stop_tokens
from tests.support.chat_templates import KINDS, STYLES, write_model

LONG = "is the answer seven? " * 20


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(folder: Path, rows: list[dict[str, Any]], style: str = "chatml", **more: Any) -> Conversations:
    model = folder / "model"
    write_model(model, STYLES[style], KINDS[0])
    settings = ConversationSettings(path=write_rows(folder, rows), **({"chat": True} | more))
    tokenizer = open_tokenizer(model, chat=True)
    stops = stop_tokens(model, tokenizer, chats=settings.chat)
    return read_conversations(settings, tokenizer, "sft.data", stops=stops)


def trained(folder: Path, found: Conversations) -> list[str]:
    """The trained text of each row, with special tokens."""
    decode = Tokenizer.from_file(str(folder / "model" / "tokenizer.json")).decode
    rows = found.fetch(range(len(found)))
    return [decode(row.tokens[row.tokens >= 0].tolist(), skip_special_tokens=False) for row in rows]


def user(text: str = "the answer?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None = "seven", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(arguments: Any = "{}", name: str = "add") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


# -- tokenizer files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_all_who_encode_get_all_tokens_of_a_text_and_no_others(tmp_path: Path, kind: str) -> None:
    for each in (KINDS[0], kind):
        write_model(tmp_path / each, STYLES["chatml"], each)
    expected = Tokenizer.from_file(str(tmp_path / KINDS[0] / "tokenizer.json")).encode(LONG).ids
    model = tmp_path / kind
    tokenizer = load_tokenizer(model)
    save_codec(tokenizer, tmp_path / "codec.json")
    for codec in (codec_of(tokenizer), load_codec(tmp_path / "codec.json", model)):
        assert codec.encode(LONG) == expected
        assert codec.encode("a") == expected[:0] + codec_of(load_tokenizer(tmp_path / KINDS[0])).encode("a")
    ours = open_tokenizer(model, chat=False)
    assert ours is not None
    assert ours([LONG], add_special_tokens=False)["input_ids"] == [expected]


def test_a_prompt_does_not_end_with_the_end_that_a_tokenizer_adds(tmp_path: Path) -> None:
    """After EOS a policy begins another text."""
    write_model(tmp_path / "model", STYLES["chatml"], KINDS[2])
    file = write_rows(tmp_path, [{"prompt": "the answer", "answer": "7"}])
    settings = DataSettings(path=file)
    for tokenizer in (open_tokenizer(tmp_path / "model", chat=False), load_tokenizer(tmp_path / "model")):
        [prompt], _ = fit_prompts(read_problems(settings), settings, tokenizer)
        text = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).decode(
            prompt.tokens.tolist(), skip_special_tokens=False
        )
        assert text == "<|begin_of_text|>the answer"


# -- fields --------------------------------------------------------------------------------------------------


def test_thoughts_calls_and_tools_are_trained(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    chat = [
        {"role": "system", "content": ""},
        user(),
        answer(None, tool_calls=[call('{"a": 1, "b": "x"}')], refusal=None),
        {"role": "tool", "tool_call_id": "c1", "content": "8"},
        answer("eight", reasoning_content="it said so"),
    ]
    for given in (tools, json.dumps(tools)):
        found = read(tmp_path, [{"messages": chat, "tools": given}], "thinking")
        [text] = trained(tmp_path, found)
        assert text == (
            '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n'
            "</tool_call><|im_end|><think>\nit said so\n</think>\n\neight<|im_end|>"
        )
        [row] = found.fetch([0])
        whole = [token if token >= 0 else ~token for token in row.tokens.tolist()]
        decode = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).decode
        assert json.dumps(tools[0]) in decode(whole), "the prompt has the tools"


def test_a_completion_keeps_its_fields(tmp_path: Path) -> None:
    rows = [{"prompt": [user()], "completion": [answer("eight", reasoning_content="so")]}]
    assert trained(tmp_path, read(tmp_path, rows, "thinking")) == ["<think>\nso\n</think>\n\neight<|im_end|>"]
    tool = {"role": "tool", "content": "8", "tool_call_id": "c1"}
    with pytest.raises(UserError, match="has no turn of the assistant to train on"):
        read(tmp_path, [{"prompt": [user()], "completion": [answer(weight=0)]}])
    rows = [{"prompt": "the answer?", "completion": [answer(None, tool_calls=[call()]), tool, answer()]}]
    assert trained(tmp_path, read(tmp_path, rows, "chatml with tools")) == [
        '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>seven<|im_end|>'
    ]


def test_filled_columns_of_parquet(tmp_path: Path) -> None:
    """Each call has the arguments of all calls there, with null as value: they are not arguments."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    calls = [call({"a": 1}), call({"b": "x"}, "see") | {"id": "c2"}]
    row = {"messages": [user(), answer("", tool_calls=calls)]}
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), file)
    model = tmp_path / "model"
    write_model(model, STYLES["chatml with tools"], KINDS[0])
    tokenizer = open_tokenizer(model, chat=True)
    stops = stop_tokens(model, tokenizer, chats=True)
    found = read_conversations(ConversationSettings(path=file, chat=True), tokenizer, "sft.data", stops=stops)
    [text] = trained(tmp_path, found)
    assert '"arguments": {"a": 1}' in text
    assert '"arguments": {"b": "x"}' in text
    assert "null" not in text


@pytest.mark.parametrize(
    ("style", "row", "message"),
    [
        ("chatml", {"messages": [user(), answer(reasoning_content="so")]}, "does not read the field 'reasoning"),
        ("chatml", {"messages": [user(), answer(mood="glad")]}, "does not read the field 'mood'"),
        ("chatml", {"messages": [user(), answer(None, tool_calls=[call()])]}, "the field 'tool_calls'"),
        ("chatml", {"messages": [user(), answer()], "tools": [{"name": "add"}]}, "the variable 'tools'"),
        ("header", {"messages": [user(), answer("I add", tool_calls=[call()])]}, "the content of message 2 (assistant)"),
        ("zephyr", {"messages": [user(), answer(None, name="x")]}, "the field 'name'"),
        ("sentences", {"messages": [user("I guess 8"), {"role": "tool", "content": "8"}, answer("8")]}, "of message 2 (tool)"),
        ("chatml with tools", {"messages": [user(), answer("", tool_calls=[call('{"a": NaN}')])]}, "not a JSON object"),
        ("thinking", {"messages": [user(), answer(reasoning_content=["a"])]}, "its reasoning_content is a list, not text"),
        ("chatml", {"messages": [user(), answer("the <|im_end|> mark")]}, "has a token that ends a turn, as text"),
        ("header", {"messages": [user() | {"name": "Zoe"}, answer()]}, "the name of message 1 (user)"),
        ("sentences", {"messages": [user(), answer("<think>a</think>b")]}, "write the content of a turn"),
        ("sentences", {"messages": [user(), {"role": "tool", "content": "8"}, answer()]}, "of message 2 (tool)"),
        ("turns", {"messages": [{"role": "system", "content": "s"}, user(), answer()]}, "no system message"),
        ("chatml", {"messages": [user(), answer(weight="x")]}, "its weight is 'x'; it can be 0"),
        ("chatml", {"messages": [user(), answer(weight=0.5)]}, "its weight is 0.5; it can be 0"),
        ("chatml", {"messages": [user() | {"weight": 1}, answer()]}, "only turns of the assistant are trained"),
        ("chatml", {"messages": [user(), answer([{"type": "text"}])]}, "its content is a list"),  # type: ignore[arg-type]
        ("chatml", {"messages": [user(), answer("")]}, "message 2 (assistant) is empty"),
        ("chatml", {"messages": [user(), answer()], "loss_mask": [1]}, "the column 'loss_mask' is not read"),
        ("chatml", {"messages": [user(), answer()], "system": "be brief"}, "the column 'system' is not read"),
        ("chatml with tools", {"messages": [user(), answer("", tool_calls=[call("{")])]}, "not a JSON object"),
        (
            "chatml with tools",
            {
                "messages": [
                    user(),
                    answer("", tool_calls=[call()]),
                    {"role": "tool", "tool_call_id": "c2", "content": "8"},
                    answer(),
                ]
            },
            "its tool_call_id 'c2' is of no call before it",
        ),
        ("chatml with tools", {"messages": [user(), answer()], "tools": "[{"}, "its tools are not valid JSON"),
        ("chatml", {"messages": [user(), answer(n=2**70)]}, "contains a value that no template can write"),
        ("no end", {"messages": [user(), answer()]}, "writes no token at the end of the turn"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused_by_name(
    tmp_path: Path, style: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, [{"messages": [user(), answer("more")]}, row], style)
    assert message in str(error.value)
    assert f"{tmp_path / 'rows.jsonl'}:2" in str(error.value) or style == "no end"


def test_a_null_that_a_template_writes_as_text_is_refused(tmp_path: Path) -> None:
    chat = [user(), answer(None, tool_calls=[call()]), {"role": "tool", "content": "8"}, answer()]
    model = tmp_path / "model"
    row = {"messages": chat}
    assert len(read(tmp_path, [row], "chatml with tools")) == 1
    source = STYLES["chatml with tools"].source.replace("(m.content or '')", "(m.content | string)")
    write_model(model, STYLES["chatml with tools"]._replace(source=source), KINDS[0])
    tokenizer = open_tokenizer(model, chat=True)
    settings = ConversationSettings(path=tmp_path / "rows.jsonl", chat=True)
    with pytest.raises(UserError, match=r'a content of null otherwise than an empty one; .* content ""'):
        read_conversations(settings, tokenizer, "sft.data", stops=stop_tokens(model, tokenizer, chats=True))


def test_tools_that_a_template_only_asks_about_are_refused(tmp_path: Path) -> None:
    source = "{%- if tools and messages[0].role == 'system' %}{{ tools | tojson }}{%- endif %}"
    model, tools = tmp_path / "model", [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    write_model(model, STYLES["chatml"]._replace(source=source + STYLES["chatml"].source), KINDS[0])
    file = write_rows(tmp_path, [{"prompt": [user()], "answer": "7", "tools": tools}])
    settings = DataSettings(path=file, chat=True)
    with pytest.raises(UserError, match="it does not write the tool 'add'"):
        fit_prompts(read_problems(settings), settings, open_tokenizer(model, chat=True))


def test_several_responses_to_a_prompt_are_no_duplicates(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2", "response": response} for response in ("4", "four", "4")]
    found = read(tmp_path, rows, chat=False, deduplicate=True)
    assert trained(tmp_path, found) == ["4<|endoftext|>", "four<|endoftext|>"]
    assert found.left_out.counts == {"duplicate": 1}


def test_several_templates(tmp_path: Path) -> None:
    """Chats with tools take that of tool_use, as in transformers; one named default is needed for others."""
    model = tmp_path / "model"
    write_model(model, STYLES["chatml"], KINDS[0])
    file = model / "tokenizer_config.json"
    described = json.loads(file.read_text())
    sources = {"default": STYLES["chatml"].source, "tool_use": STYLES["chatml with tools"].source}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = write_rows(tmp_path, [{"prompt": "2+2"}, {"prompt": "2+2", "tools": tools}])
    rows.write_text(rows.read_text().replace("}\n", ', "answer": "4"}\n'))
    settings = DataSettings(path=rows, chat=True)
    for write in ("list", "folder"):
        if write == "list":
            listed = [{"name": name, "template": source} for name, source in sources.items()]
            file.write_text(json.dumps(described | {"chat_template": listed}))
        else:
            (model / "chat_template.jinja").write_text(sources["default"])
            (model / "additional_chat_templates").mkdir()
            (model / "additional_chat_templates" / "tool_use.jinja").write_text(sources["tool_use"])
        for tokenizer in (open_tokenizer(model, chat=True), load_tokenizer(model)):
            plain, with_tools = fit_prompts(read_problems(settings), settings, tokenizer)[0]
            assert plain.text == "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
            assert with_tools.text == load_tokenizer(model).apply_chat_template(
                [user("2+2")], tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert '"name": "add"' in with_tools.text
    (model / "additional_chat_templates" / "tool_use.jinja").unlink()
    (model / "chat_template.jinja").unlink()
    file.write_text(json.dumps(described | {"chat_template": [{"name": "rag", "template": "x"}]}))
    with pytest.raises(UserError, match="has chat templates named rag, and none named default"):
        fit_prompts(read_problems(settings), settings, open_tokenizer(model, chat=True))


def test_prompts_that_a_template_refuses_are_skipped_and_counted(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, STYLES["turns"], KINDS[0])
    chats = [[{"role": "system", "content": "s"}, user()], [user()], [user(), answer()]]
    file = write_rows(tmp_path, [{"prompt": chat, "answer": "7"} for chat in chats])
    tokenizer, settings = open_tokenizer(model, chat=True), DataSettings(path=file, chat=True)
    with pytest.raises(UserError, match=r"rows\.jsonl:3: the chat ends with a message of the assistant"):
        fit_prompts(read_problems(settings), settings, tokenizer)
    settings = settings.model_copy(update={"malformed": "skip"})
    problems, left_out = read_problems_with_counts(settings)
    prompts, _ = fit_prompts(problems, settings, tokenizer, refused=left_out)
    assert [prompt.id for prompt in prompts] == [1]
    assert left_out.counts == {"malformed": 2}
    assert f"{file}:1: the chat template cannot render it (roles system, user)" in left_out.first
    assert f"{file}:3: the chat ends with a message of the assistant" in left_out.first


def test_duplicates_differ_by_all_fields(tmp_path: Path) -> None:
    rows = [{"messages": [user(), answer("", tool_calls=[call(f'{{"a": {n}}}')])]} for n in (1, 2, 1)]
    found = read(tmp_path, rows, "chatml with tools", deduplicate=True)
    assert len(found) == 2
    assert found.left_out.counts == {"duplicate": 1}


# -- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_the_end_of_a_turn_is_found_trained_and_stopped_at(tmp_path: Path, style: str) -> None:
    write_model(tmp_path, STYLES[style], KINDS[0])
    ours = open_tokenizer(tmp_path, chat=True)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = {backend.token_to_id(mark) for mark in (STYLES[style].end or STYLES[style].eos, STYLES[style].eos)}
    assert set(stop_tokens(tmp_path, ours, chats=True)) == ends
    assert set(stop_tokens(tmp_path, load_tokenizer(tmp_path), chats=True)) == ends
    assert set(stop_tokens(tmp_path, ours)) == {backend.token_to_id(STYLES[style].eos)}


@pytest.mark.parametrize("response", ["seven<|endoftext|>", "seven<|endoftext|>\n", "seven"])
def test_a_response_ends_once(tmp_path: Path, response: str) -> None:
    """Also one that was recorded with the text of its end."""
    found = read(tmp_path, [{"prompt": "the answer", "response": response}], chat=False)
    assert trained(tmp_path, found) == ["seven<|endoftext|>"]


def test_a_turn_without_an_end_ends_a_row_of_its_own(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, STYLES["no end"], KINDS[0])
    file = write_rows(tmp_path, [{"messages": [user(), answer("one"), user(), answer("two")]}])
    tokenizer, settings = open_tokenizer(model, chat=True), ConversationSettings(path=file, chat=True)
    end = tokenizer.vocabulary["<|end|>"]
    stops = stop_tokens(model, tokenizer, [end], chats=True)
    found = read_conversations(settings, tokenizer, "sft.data", stops=stops, end=end)
    assert trained(tmp_path, found) == ["one<|end|>", "two<|end|>"]
    # Where the next message begins with a token that ends a response, that is the end.
    stops.append(tokenizer.vocabulary["<|user|>"])
    found = read_conversations(settings, tokenizer, "sft.data", stops=stops, end=end)
    assert trained(tmp_path, found) == ["one<|user|>two<|end|>"]


# -- bounds and counts ---------------------------------------------------------------------------------------


def test_a_chat_of_very_many_turns_is_refused(tmp_path: Path) -> None:
    """Its text is rendered for each turn: a thousand would take minutes."""
    chat = [each for _ in range(500) for each in (user(), answer())]
    with pytest.raises(
        UserError, match=r"500 turns to train among 1,000 messages, .* set sft\.data\.turns to last"
    ):
        read(tmp_path, [{"messages": chat}])
    assert len(read(tmp_path, [{"messages": chat}], turns="last", max_tokens=40_000)) == 1


def test_rows_that_cannot_be_trained_are_told_by_kind_with_the_first_of_each(tmp_path: Path) -> None:
    good = {"messages": [user(), answer()]}
    rows = (
        [good] * 3 + [{"messages": [user()]}] * 2 + [{"messages": [user(), answer(weight="x")]}, {"other": 1}]
    )
    with pytest.raises(UserError) as error:
        read(tmp_path, rows)
    text = str(error.value)
    assert "sft.data: 4 rows cannot be trained: 2 rows such as " in text
    assert [f"rows.jsonl:{line}: " in text for line in (4, 5, 6, 7)] == [True, False, True, True]
    assert "sft.data.malformed=skip" in text
    found = read(tmp_path, rows, malformed="skip")
    assert (len(found), found.left_out.counts) == (3, {"malformed": 4})
