"""Data sets and their order.

Why: a mistake in a data file must stop a run before it starts and say which line to fix; and a resumed run
must continue with exactly the prompts that the interrupted one would have taken. Not covered: real tokenizers
and chat templates (a stand-in counts characters here; the integration test uses a real one).
"""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.problems import read_problems
from rpg_megatron.data.prompt_stream import PromptStream
from rpg_megatron.data.prompts import Prompt, fit_prompts, load_prompts
from rpg_megatron.launcher import checks
from rpg_megatron.launcher.input_checks import check_data

CHAT = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
{%- if enable_thinking is false %}<no thinking>{% endif %}"""


class CharacterTokenizer:
    """One token per character, a first token 1 where special tokens are asked for."""

    chat_template: str | None = None

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        first = [1] if add_special_tokens else []
        return {"input_ids": [first + [ord(c) for c in text] for text in texts]}

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def data(path: Path, content: bytes | str, **settings: object) -> DataSettings:
    file = path / "data.jsonl"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return DataSettings(path=file, **settings)


def line(prompt: object = "1+1", answer: object = "2") -> str:
    return json.dumps({"prompt": prompt, "answer": answer}) + "\n"


def test_reads_lines_with_ids_and_kinds_of_answers(tmp_path: Path) -> None:
    content = line() + "\n" + line(answer=18) + line(answer=0.5) + line("naïve\u2028", "  x ")
    problems = read_problems(data(tmp_path, content))
    assert [p[:3] for p in problems] == [
        (0, "1+1", "2"),
        (2, "1+1", "18"),
        (3, "1+1", "0.5"),
        (4, "naïve\u2028", "x"),
    ]


def test_byte_order_mark_and_missing_last_newline(tmp_path: Path) -> None:
    assert len(read_problems(data(tmp_path, b"\xef\xbb\xbf" + (line() + line()).rstrip("\n").encode()))) == 2


def test_gsm8k_answer_follows_the_last_mark(tmp_path: Path) -> None:
    settings = data(tmp_path, line(answer="3+4 #### no\n#### 1,007"), answer_after="####")
    assert read_problems(settings)[0].answer == "1,007"


def test_limit_counts_lines_and_reads_no_further(tmp_path: Path) -> None:
    assert len(read_problems(data(tmp_path, line() * 3 + "broken", limit=3))) == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"prompt": "1+1", "answer"\n', "not valid JSON"),
        (b'{"prompt": "\xff", "answer": "2"}\n', "not UTF-8 (byte 13 of the line)"),
        (b'["1+1", "2"]\n', "holds a list"),
        (b'"1+1"\n', "holds a text"),
        (
            b'{"question": "1+1", "answer": "2"}\n',
            "'prompt' is missing (keys of this line: 'question', 'answer')",
        ),
        (b'{"prompt": "1+1"}\n', "'answer' is missing"),
        (b'{"prompt": 11, "answer": "2"}\n', "'prompt' is a number"),
        (b'{"prompt": null, "answer": "2"}\n', "'prompt' is a null"),
        (b'{"prompt": "1+1", "answer": ["2"]}\n', "'answer' is a list"),
        (b'{"prompt": "1+1", "answer": true}\n', "'answer' is a true/false value"),
        (b'{"prompt": "1+1", "answer": NaN}\n', "NaN is not a JSON number"),
        (b'{"prompt": "1+1", "answer": ' + b"9" * 5000 + b"}\n", "not valid JSON"),
        (b'{"prompt": "\\ud800", "answer": "2"}\n', "surrogate"),
        (b'{"prompt": " ", "answer": "2"}\n', "'prompt' is empty"),
        (b'{"prompt": "1+1", "answer": ""}\n', "'answer' is empty"),
        (b"[" * 100_000 + b"\n", ""),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, bad: bytes, message: str) -> None:
    settings = data(tmp_path, line().encode() * 2 + bad + line().encode())
    with pytest.raises(UserError) as error:
        read_problems(settings)
    assert str(error.value).startswith(f"{settings.path}:3: ")
    assert message in str(error.value)


def test_an_answer_without_its_mark_is_named(tmp_path: Path) -> None:
    settings = data(tmp_path, line(answer="#### 2") + line(answer="2"), answer_after="####")
    with pytest.raises(UserError, match=r":2: 'answer' does not contain '####'"):
        read_problems(settings)


def test_no_problems_no_file_no_place_in_the_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no problems"):
        read_problems(data(tmp_path, "\n\n"))
    with pytest.raises(UserError, match="does not exist"):
        read_problems(DataSettings(path=tmp_path / "no.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is a directory without data; give a file, or a folder of"):
        read_problems(DataSettings(path=tmp_path / "empty"))
    with pytest.raises(ValueError, match="no placeholder for the problem"):
        read_problems(data(tmp_path, line(), template="Solve it."))


def test_a_missing_chat_template_is_found_before_anything_starts(config_file, checkpoint, tmp_path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "plain")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (model / name).unlink(missing_ok=True)
    chat = [f"model.path={model}", "data.chat=true"]
    check_data(load_settings(config_file, chat[:1]))
    with pytest.raises(UserError, match=r"data\.chat: .*plain has no chat template"):
        check_data(load_settings(config_file, chat))
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check_data(load_settings(config_file, chat))


@pytest.mark.parametrize(("seconds", "message"), [(0.3, "reading the data\n"), (0.0, "")])
def test_a_long_read_is_reported(config_file, monkeypatch, capsys, seconds, message) -> None:
    monkeypatch.setattr(checks, "_SILENT_SECONDS", 0.1 if seconds else 60.0)
    monkeypatch.setattr(checks, "check_data", lambda *_, **__: time.sleep(seconds) or [])
    checks.check_start(checks.CheckedRun(load_settings(config_file)))
    assert capsys.readouterr().err == message


def test_template_chat_and_lengths(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer()
    content = line("{a}") + line("x" * 20)
    settings = data(tmp_path, content, template="Q {prompt} {b}", max_prompt_tokens=10)
    prompts, left_out = fit_prompts(read_problems(settings), settings, tokenizer)
    assert left_out == 1
    assert [(p.id, p.text, p.answer) for p in prompts] == [(0, "Q {a} {b}", "2")]  # braces are text
    assert prompts[0].tokens.tolist() == [1, *map(ord, "Q {a} {b}")]  # 10 tokens: just short enough
    assert prompts[0].tokens.dtype == np.int32

    chat = data(tmp_path, content, chat=True)
    with pytest.raises(UserError, match="no chat template"):
        load_prompts(chat, tokenizer)
    tokenizer.chat_template = CHAT
    first = load_prompts(chat, tokenizer)[0]
    assert first.text == "<user>{a}<assistant>"
    assert first.tokens.tolist() == [*map(ord, first.text)]  # the template writes special tokens itself

    with pytest.raises(UserError, match="all 2 prompts are longer than 3 tokens"):
        load_prompts(data(tmp_path, content, max_prompt_tokens=3), tokenizer)


def test_left_out_prompts_are_counted_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = data(tmp_path, line("x" * 20) * 2 + line(), max_prompt_tokens=10)
    assert [p.id for p in load_prompts(settings, CharacterTokenizer())] == [2]
    assert "left out 2 of 3 prompts" in caplog.text


def test_over_long_prompts_may_be_cut_to_their_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = data(tmp_path, line("abcdefgh") + line("xyz"), max_prompt_tokens=4, too_long="cut")
    prompts = load_prompts(settings, CharacterTokenizer())
    assert [(p.id, p.text) for p in prompts] == [(0, "efgh"), (1, "\x01xyz"[1:])]
    assert [len(p.tokens) for p in prompts] == [4, 4]
    assert "cut 1 of 2 prompts" in caplog.text


def test_chats_system_prompt_and_thinking(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer()
    tokenizer.chat_template = CHAT
    chat = [{"role": "user", "content": "2+2"}]
    content = line("1+1") + line(chat) + line([{"role": "system", "content": "own"}, *chat])
    settings = data(tmp_path, content, chat=True, system="Be brief.", thinking=False, template="Q: {prompt}")
    end = "<assistant><no thinking>"
    assert [p.text for p in load_prompts(settings, tokenizer)] == [
        "<system>Be brief.<user>Q: 1+1" + end,
        "<system>Be brief.<user>2+2" + end,
        "<system>own<user>2+2" + end,
    ]
    plain = data(tmp_path, line(chat), template="{prompt} =")
    assert load_prompts(plain, tokenizer)[0].text == "2+2 ="
    with pytest.raises(UserError, match=r":3: the problem is a chat of 2 messages"):
        load_prompts(data(tmp_path, content), tokenizer)

    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r":1: the chat template cannot render it .*roles must alternate"):
        load_prompts(settings, tokenizer)


# -- order ---------------------------------------------------------------------------------------------------


def some_prompts(n: int) -> list[Prompt]:
    return [Prompt(i, f"p{i}", str(i), np.array([i, i], np.int32)) for i in range(n)]


def test_each_epoch_is_another_permutation() -> None:
    stream = PromptStream(some_prompts(50), seed=3)
    epochs = [[p.id for p in stream.take(50)] for _ in range(3)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(50))
    repeated = PromptStream(some_prompts(50), seed=3)
    assert [p.id for p in repeated.take(150)] == [i for epoch in epochs for i in epoch]
    assert [p.id for p in PromptStream(some_prompts(50), seed=4).take(50)] != epochs[0]


@pytest.mark.parametrize("before", [0, 3, 7, 10, 23])
def test_a_restored_stream_goes_on_where_it_was(before: int) -> None:
    stream = PromptStream(some_prompts(10), seed=1)
    stream.take(before)
    state = json.loads(json.dumps(stream.state()))
    rest = [p.id for p in stream.take(25)]
    resumed = PromptStream(some_prompts(10), seed=1)
    resumed.take(4)
    resumed.restore(state)
    assert [p.id for p in resumed.take(25)] == rest


def test_restoring_with_other_data_or_seed_is_refused() -> None:
    state = PromptStream(some_prompts(10), seed=1).state()
    with pytest.raises(UserError, match="prompts have changed"):
        PromptStream(some_prompts(11), seed=1).restore(state)
    with pytest.raises(UserError, match="seed 1, not 2"):
        PromptStream(some_prompts(10), seed=2).restore(state)


def test_columns_that_rewards_can_read_are_part_of_the_data(tmp_path: Path) -> None:
    def stream(level: int, *, rows: bool) -> PromptStream:
        row = json.dumps({"prompt": "1+1", "answer": "2", "level": level}) + "\n"
        return PromptStream(load_prompts(data(tmp_path, row), CharacterTokenizer(), rows=rows), seed=1)

    state = stream(3, rows=True).state()
    stream(3, rows=True).restore(state)
    with pytest.raises(UserError, match="columns of the training data have changed"):
        stream(4, rows=True).restore(state)
    del state["rows"]  # of an earlier version
    stream(4, rows=True).restore(state)
    stream(4, rows=False).restore(stream(3, rows=False).state())


def mixed(*sizes: int) -> list[Prompt]:
    return [
        Prompt(100 * s + i, f"p{i}", str(i), np.array([i], np.int32), source=s)
        for s, size in enumerate(sizes)
        for i in range(size)
    ]


def test_a_mixture_keeps_its_shares_and_epochs_at_any_moment() -> None:
    stream = PromptStream(mixed(5, 40, 7), seed=3, weights=(3.0, 1.0, 0.5))
    taken = [p.source for p in stream.take(900)]
    for n in (9, 90, 333, 900):
        for source, share in enumerate((6 / 9, 2 / 9, 1 / 9)):
            assert abs(taken[:n].count(source) - share * n) < 1.5
    repeated = PromptStream(mixed(5, 40, 7), seed=3, weights=(6.0, 2.0, 1.0))
    ids = [p.id for p in repeated.take(900) if p.source == 0]
    epochs = [ids[i : i + 5] for i in range(0, 600, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 20


@pytest.mark.parametrize("before", [0, 1, 23, 60])
def test_a_restored_mixture_goes_on_where_it_was(before: int) -> None:
    def stream() -> PromptStream:
        return PromptStream(mixed(5, 40, 7), seed=1, weights=(0.2, 0.5, 0.3))

    first, second = stream(), stream()
    first.take(before)
    state = json.loads(json.dumps(first.state()))
    second.take(11)
    second.restore(state)
    assert [p.id for p in second.take(100)] == [p.id for p in first.take(100)]
    changed = PromptStream(mixed(5, 40, 7), seed=1, weights=(0.3, 0.4, 0.3))
    with pytest.raises(UserError, match="prompts have changed"):
        changed.restore(state)


def test_a_source_of_which_no_prompt_is_left_is_an_error() -> None:
    with pytest.raises(UserError, match=r"data\.mixture\[1\]: no prompt of this source is left"):
        PromptStream(mixed(5), seed=1, weights=(1.0, 1.0))
