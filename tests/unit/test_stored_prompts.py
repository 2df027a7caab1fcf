"""Prompts of large data sets are stored in a file, and tokenized when they are taken.

Why: order, seeds and resume count the kept prompts, so a large set must give exactly the prompts of the plain
implementation, which reads and tokenizes everything first. And a cache file must never be trusted if it is
damaged, of other data or another user's. Not covered: seconds and memory (docs/evidence/data.md); small sets
(test_prompts).
"""

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data import row_store, stored_problems, stored_prompts
from rpg_megatron.data.cache_files import CacheWriter, content_digest
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.data.prompt_stream import PromptList, PromptStream
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.data.row_store import RowStore
from rpg_megatron.data.stored_prompts import StoredPrompts, open_prompts
from rpg_megatron.data.token_bound import token_bound
from rpg_megatron.rollout.task_stream import TaskStream
from tests.support.stand_in_engines import ByteTokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
GROWING = "\u0958\ufb1d\U0001d160"
"""Characters that normal form C makes longer."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data sets of more than ten problems count as large."""
    monkeypatch.setattr(stored_problems, "IN_MEMORY", 10)
    monkeypatch.setattr(stored_prompts, "_BLOCK", 16)
    monkeypatch.setattr(stored_prompts, "_PASS_BLOCK", 7)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


def byte_level(normal: Any = None, *, merges: bool = True, first: bool = False, **model: Any) -> Any:
    """A byte-level BPE as transformers loads it; ``first``: with a special token before each text."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(["ab", "abab"] if merges else [])]
    pairs = [("a", "b"), ("ab", "ab")] if merges else []
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=pairs, **model))
    if normal is not None:
        backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    if first:
        backend.post_processor = processors.TemplateProcessing(
            "<|end|> $A", None, [("<|end|>", len(alphabet))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(file: Path, rng: random.Random, rows: int = 40) -> list[dict[str, Any]]:
    """Random problems, some of them blank lines, repeated, long, or in other alphabets."""
    problems: list[dict[str, Any]] = []
    with file.open("w") as out:
        for index in range(rows):
            letters = rng.choice(["ab", "ab c", "é\u4e2d", GROWING, "a<|end|>"])
            text = "".join(rng.choices(letters, k=rng.randrange(1, 30))).strip() or "x"
            row = {
                "prompt": rng.choice([text, text, "again"]),
                "answer": str(index),
                "level": rng.randrange(4),
            }
            row["note"] = [1.5, None, "\u00e9", 10**18]
            if rng.random() < 0.1:
                out.write("\n")
            out.write(json.dumps(row) + "\n")
    for number, line in enumerate(file.read_text().split("\n")):
        if line:
            problems.append({"id": number, "row": json.loads(line)})
    return problems


class Plain:
    """The plain implementation: tokenize all prompts, then take them in the order of shuffled epochs."""

    def __init__(
        self, sources: list[list[dict[str, Any]]], data: DataSettings, tokenizer: Any, *, rows: bool
    ):
        self.sources: list[list[dict[str, Any]]] = []
        self.weights = [w / sum(data.weights) for w in data.weights]
        self.taken = [0 for _ in sources]
        prompts, seen, offset = hashlib.blake2b(digest_size=16), set[str](), 0
        contexts = hashlib.blake2b(digest_size=16)
        for number, source in enumerate(sources):
            kept = []
            for problem in source:
                row, key = problem["row"], " ".join(problem["row"]["prompt"].split())
                if data.deduplicate and key in seen:
                    continue
                seen.add(key)
                text = message = data.template.replace("{prompt}", row["prompt"])
                if data.chat:
                    text = f"<user>{message}<assistant>"
                ids = tokenizer([text], add_special_tokens=not data.chat)["input_ids"][0]
                if len(ids) > data.max_prompt_tokens:
                    if data.too_long == "drop":
                        continue
                    ids = ids[-data.max_prompt_tokens :]
                    text = tokenizer.decode(ids)
                chat = [{"role": "user", "content": message}]
                context = json.dumps({"prompt": text, "messages": chat, "row": row}) if rows else ""
                entry = (offset + problem["id"], text, row["answer"], list(ids), number, context)
                prompts.update(f"{number} {entry[0]} {len(ids)} ".encode())
                prompts.update(np.array(ids, np.int32).tobytes() + row["answer"].encode() + b"\0")
                contexts.update(context.encode() + b"\0")
                kept.append(entry)
            offset += source[-1]["id"] + 1
            self.sources.append(kept)
        self.fingerprints = prompts.hexdigest(), contexts.hexdigest() if rows else ""

    def take(self, count: int, seed: int) -> list[Any]:
        taken = []
        for _ in range(count):
            total = sum(self.taken) + 1
            lags = [w * total - t for w, t in zip(self.weights, self.taken, strict=True)]
            number = lags.index(max(lags))
            epoch, position = divmod(self.taken[number], len(self.sources[number]))
            entropy = [seed, epoch] if number == 0 else [seed, epoch, number]
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
            self.taken[number] += 1
            order = rng.permutation(len(self.sources[number]))
            taken.append(self.sources[number][order[position]])
        return taken


def take(stream: PromptStream, count: int) -> list[Any]:
    prompts = stream.take(count)
    assert all(p.tokens.dtype == np.int32 for p in prompts)
    return [(p.id, p.text, p.answer, p.tokens.tolist(), p.source, p.context) for p in prompts]


class StandIn(ByteTokenizer):
    """A tokenizer without known properties."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(t for t in tokens if t).decode(errors="replace")


TOKENIZERS = {
    "bytes": byte_level,
    "normal form": lambda: byte_level(normalizers.NFC(), first=True),
    "no bound": lambda: byte_level(normalizers.Lowercase()),
    "not of transformers": StandIn,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(4))
def test_order_prompts_and_states_are_those_of_the_plain_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    rng, tokenizer, chat = random.Random(seed), TOKENIZERS[kind](), (kind, seed) == ("normal form", 3)
    if chat:  # a process for each block
        monkeypatch.setattr(stored_prompts, "_BLOCK", 100)
        monkeypatch.setattr(stored_prompts, "_PASS_BLOCK", 100)
    sources = [write(tmp_path / f"{i}.jsonl", rng) for i in range(1 if chat else rng.choice([1, 2, 3]))]
    data = DataSettings.model_validate(
        {
            "mixture": [
                {"path": tmp_path / f"{i}.jsonl", "weight": rng.choice([1, 2, 3])}
                for i in range(len(sources))
            ],
            "template": rng.choice(["{prompt}", "Q: {prompt}\nA:"]),
            "chat": chat,
            "max_prompt_tokens": 1000,
            "too_long": "cut" if seed == 1 else "drop",
            "deduplicate": rng.random() < 0.5,
        }
    )
    rows = rng.random() < 0.5
    lengths = [len(p[3]) for p in Plain(sources, data, tokenizer, rows=rows).sources[0]]
    limit = sorted(lengths)[len(lengths) // 2]  # some prompts have this length
    data = data.model_copy(update={"max_prompt_tokens": limit})
    plain = Plain(sources, data, tokenizer, rows=rows)
    for _ in range(2):  # the second one uses the first one's cache
        prompts = open_prompts(data, tokenizer, rows=rows)
        assert isinstance(prompts, StoredPrompts)
        stream = PromptStream(prompts, seed, data.weights)
        plain.taken = [0 for _ in sources]
        counts = [1, 300] if chat else [1, 5, 70, 1, 1, 300]
        for count in counts:
            before = stream.position()
            last = plain.take(count, seed)
            assert take(stream, count) == last
        state = json.loads(json.dumps(stream.state()))
        assert (state["prompts"], state["rows"]) == plain.fingerprints
        assert state["taken"] == plain.taken
        expected = take(stream, 50)
        stream.restore(state)
        assert take(stream, 50) == expected
        stream.restore(stream.sign(before))
        assert take(stream, 300) == last


@pytest.mark.parametrize("template", ["{prompt}", "{prompt}{prompt}", GROWING + "{prompt}"])
def test_texts_that_the_normal_form_makes_longer_are_measured(tmp_path: Path, template: str) -> None:
    texts = [letter * count for letter in ("a", *GROWING) for count in range(1, 16)]
    lines = [json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    tokenizer = byte_level(normalizers.NFC())
    data = DataSettings(path=tmp_path / "a.jsonl", template=template, max_prompt_tokens=40)
    encoded = tokenizer([template.replace("{prompt}", text) for text in texts])["input_ids"]
    expected = [index for index, ids in enumerate(encoded) if len(ids) <= 40]
    prompts = open_prompts(data, tokenizer)
    assert [p.id for p in prompts.fetch(range(len(prompts)))] == expected


def test_a_text_never_has_more_tokens_than_its_bound() -> None:
    rng = random.Random(0)
    for tokenizer in (byte_level(), byte_level(normalizers.NFC(), first=True), byte_level(merges=False)):
        for special in (False, True):
            bound = token_bound(tokenizer, special=special)
            texts = []
            for _ in range(300):
                letters = rng.choice(["ab", GROWING, " \n<|end|>", "".join(map(chr, range(0x300, 0x1000)))])
                texts.append("".join(rng.choices(letters, k=rng.randrange(1, 20))))
            encoded = tokenizer(texts, add_special_tokens=special)["input_ids"]
            assert all(1 <= len(ids) <= bound.of(text) for text, ids in zip(texts, encoded, strict=True))
    tight = token_bound(byte_level(merges=False), special=True)
    assert tight.of("aé") == 3


def test_there_is_a_bound_only_for_tokenizers_that_keep_it() -> None:
    def changed(change: Any) -> Any:
        tokenizer = byte_level()
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        change(described)
        backend = Tokenizer.from_str(json.dumps(described))
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    assert token_bound(changed(lambda d: None), special=True) is not None
    for change in (
        lambda d: d.update(normalizer={"type": "NFKC"}),
        lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
        lambda d: d.update(pre_tokenizer={"type": "Whitespace"}),
        lambda d: d.update(pre_tokenizer=None),
        lambda d: d["model"].update(dropout=0.1),
        lambda d: d["model"]["vocab"].pop("!"),
    ):
        assert token_bound(changed(change), special=True) is None
    assert token_bound(ByteTokenizer(), special=True) is None


# -- what is kept --------------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".problems", ".lengths"))


def read_anew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an entry for each time that data are read, not taken from the cache."""
    calls: list[int] = []
    before = stored_problems.write_rows

    def write_rows(*args: Any) -> Any:
        calls.append(1)
        return before(*args)

    for module in (stored_problems, row_store):  # for a file that is kept, and for one without a name
        monkeypatch.setattr(module, "write_rows", write_rows)
    return calls


def opened(data: DataSettings) -> tuple[tuple[str, str], list[Any]]:
    """Fingerprints and the first prompts."""
    prompts = open_prompts(data, byte_level())
    return prompts.fingerprints.result(), take(PromptStream(prompts, 1), 60)


@pytest.fixture
def data(tmp_path: Path) -> DataSettings:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", random.Random(7))
    return DataSettings(path=folder / "train.jsonl", max_prompt_tokens=30)


def test_later_runs_read_and_tokenize_nothing(data: DataSettings, tmp_path, monkeypatch) -> None:
    calls, first = read_anew(monkeypatch), opened(data)
    assert calls == [1]
    assert [file.parent for file in files(tmp_path)] == [tmp_path / "data/.rpg_cache"] * 2
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(tmp_path))
    assert (tmp_path / "data/.rpg_cache").stat().st_mode & 0o777 == 0o700

    def fail(*_: Any) -> Any:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:  # nor are unchanged data
        patch.setattr(stored_problems, "content_digest", fail)
        assert opened(data) == first
    assert data.path is not None
    os.utime(data.path)  # another time, the same content
    monkeypatch.setattr(StoredPrompts, "_find_too_long", fail)
    monkeypatch.setattr(StoredPrompts, "_run_pass", fail)
    assert opened(data) == first
    assert calls == [1]
    with pytest.raises(AssertionError, match="measured again"):  # other limits
        opened(data.model_copy(update={"max_prompt_tokens": 20}))


def test_other_data_settings_or_limits_are_read_anew(data: DataSettings, tmp_path, monkeypatch) -> None:
    calls, first = read_anew(monkeypatch), opened(data)
    before, status = data.path.read_text(), data.path.stat()
    data.path.write_text(before.replace('"answer": "3"', '"answer": "4"'))
    os.utime(data.path, ns=(status.st_atime_ns, status.st_mtime_ns))  # neither size nor time show the change
    assert opened(data)[0] != first[0]
    assert len(files(tmp_path)) == 2  # the old ones are replaced
    data.path.write_text(before)
    assert opened(data) == first
    assert len(calls) == 3
    for change in ({"deduplicate": True}, {"limit": 30}, {"where": {"level": (1, 2)}}):
        problems, *_ = read_problems_with_counts(data.model_copy(update=change))
        assert len(problems) < len(before.strip().splitlines())
    shorter = opened(data.model_copy(update={"max_prompt_tokens": 20}))
    assert shorter[0] != first[0]
    assert opened(data) == first


def test_a_damaged_file_is_made_again(data: DataSettings, tmp_path, monkeypatch) -> None:
    calls, first = read_anew(monkeypatch), opened(data)
    rng = random.Random(1)
    for count in range(2, 14):
        for file in files(tmp_path):
            content = bytearray(file.read_bytes())
            if count % 3 == 0:
                content = content[: rng.randrange(len(content))]
            else:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            file.write_bytes(content)
        assert opened(data) == first
        assert len(calls) == count


def test_a_whole_file_of_another_form_is_made_again(data: DataSettings, tmp_path: Path) -> None:
    first = opened(data)
    assert data.path is not None
    content = content_digest([data.path])
    for described in ({}, {"rows": 3}, {"rows": "x", "columns": 0}, {"rows": 10**9, "columns": 0}):
        for file in files(tmp_path):
            with file.open("wb") as sink:
                CacheWriter(sink).finish({"content": content, **described})
        assert opened(data) == first


@pytest.mark.parametrize("case", ["mode", "owner", "link", "file"])
def test_what_others_could_have_written_is_not_used(
    data: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    calls, first = read_anew(monkeypatch), opened(data)
    folder, user = tmp_path / "data/.rpg_cache", tmp_path / "user"
    kept = {file: file.read_bytes() for file in files(folder)}
    if case == "mode":
        folder.chmod(0o770)
    elif case == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif case == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        kept = {}
    else:
        for file in kept:
            file.unlink()
        folder.rmdir()
        folder.write_text("a file")
        kept = {}
    assert opened(data) == first
    assert len(calls) == 2
    assert all(file.read_bytes() == content for file, content in kept.items())
    assert len(files(user)) == (0 if case == "owner" else 2)  # the user's cache folder is next
    assert opened(data) == first
    assert len(calls) == (3 if case == "owner" else 2)


def test_another_users_file_or_a_link_is_not_used(data: DataSettings, tmp_path, monkeypatch) -> None:
    calls, first = read_anew(monkeypatch), opened(data)
    for file in files(tmp_path):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert opened(data) == first
    assert len(calls) == 2
    assert not any(file.is_symlink() for file in files(tmp_path / "data"))
    fstat = os.fstat

    def with_other_owner(descriptor: int) -> Any:
        status = fstat(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        fields = list(status)
        fields[4] += name.endswith(".problems")
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", with_other_owner)
    assert opened(data) == first
    assert len(calls) > 2


def test_data_that_change_while_they_are_read_are_not_kept(data: DataSettings, tmp_path, monkeypatch) -> None:
    before = stored_problems.write_rows
    content = data.path.read_text()

    def write_rows(*args: Any) -> Any:
        result = before(*args)
        assert data.path is not None
        with data.path.open("a") as file:
            file.write('{"prompt": "new", "answer": "1"}\n')
        return result

    monkeypatch.setattr(stored_problems, "write_rows", write_rows)
    problems, *_ = read_problems_with_counts(data)
    assert isinstance(problems, RowStore)
    assert problems.place is None
    assert len(problems) >= len(content.strip().split("\n")) - content.count("\n\n")
    assert files(tmp_path) == []


def test_few_problems_write_nothing(data: DataSettings, tmp_path: Path) -> None:
    prompts = open_prompts(data.model_copy(update={"limit": 10}), byte_level())
    assert isinstance(prompts, PromptList)
    assert not (tmp_path / "data/.rpg_cache").exists()
    assert not (tmp_path / "user").exists()


def test_a_full_disk_and_own_sources_need_no_cache(data: DataSettings, tmp_path, monkeypatch) -> None:
    first = opened(data)
    for file in files(tmp_path):
        file.unlink()

    def full(*_: Any) -> Iterator[Any]:
        raise OSError(28, "No space left on device")

    for module in (stored_problems, stored_prompts):
        monkeypatch.setattr(module, "new_cached", full)
    assert opened(data) == first
    assert files(tmp_path) == []
    monkeypatch.setattr(row_store.tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match=r"data: the problems cannot be kept in .*No space left.*set TMPDIR"):
        opened(data)


def test_errors_come_before_anything_is_kept(data: DataSettings, tmp_path: Path) -> None:
    with data.path.open("a") as file:
        file.write("broken\n")
    with pytest.raises(UserError, match=r"train\.jsonl:\d+: not valid JSON"):
        open_prompts(data, byte_level())
    assert files(tmp_path) == []
    skip = data.model_copy(update={"malformed": "skip"})
    for _ in range(2):
        problems, left_out = read_problems_with_counts(skip)
        assert isinstance(problems, RowStore)
        assert left_out.counts == {"malformed": 1}
        assert "not valid JSON" in left_out.first
    with pytest.raises(UserError, match=r"all \d+ prompts are longer than 1 tokens"):
        open_prompts(skip.model_copy(update={"max_prompt_tokens": 1, "template": "Q {prompt}"}), byte_level())


def test_prompts_that_the_template_refuses_are_left_out_of_a_stored_data_set(
    data: DataSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether long prompts are dropped or cut; and again in each later run."""
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2"}]
    bad, lines = {3, 17, 30}, [{"prompt": chat[1:], "answer": "4"} for _ in range(40)]
    for number in bad:
        lines[number]["prompt"] = chat
    data.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('no system') }}{%- endif %}"
        "{{ m.content }}{%- endfor %}"
    )
    chats = data.model_copy(update={"chat": True, "max_prompt_tokens": 1000})
    with pytest.raises(UserError, match=r"train\.jsonl:\d+: the chat template cannot render it .* no system"):
        open_prompts(chats, tokenizer)
    for too_long in ("drop", "cut"):
        skip = chats.model_copy(update={"malformed": "skip", "too_long": too_long})
        for _ in range(2):
            caplog.clear()
            prompts = open_prompts(skip, tokenizer)
            assert isinstance(prompts, StoredPrompts)
            prompts.fingerprints.result(60)
            assert {p.id for p in prompts.fetch(range(len(prompts)))} == set(range(len(lines))) - bad
            assert f"3 malformed ({len(lines) - 3} are used)" in caplog.text


def test_a_checkpoint_waits_for_the_fingerprints(config_file: Path) -> None:
    """Without blocking the requests; a cancelled request does not end the wait of others."""
    prompts = PromptList([Prompt(i, "p", "a", np.array([i], np.int32)) for i in range(5)])
    fingerprints = prompts.fingerprints.result()
    prompts.fingerprints = Future()
    stream = TaskStream(load_settings(config_file), prompts)

    async def run() -> dict[str, Any]:
        stream.take(0)
        stream.take(0)
        position = stream.position()
        first, second = (asyncio.create_task(stream.ready()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        for _ in range(5):  # a cancelled future calls others back later
            await asyncio.sleep(0)
        stream.take(0)
        stream.take(0)
        assert not second.done()
        prompts.fingerprints.set_result(fingerprints)
        await second
        return stream.sign(position)

    state = asyncio.run(run())
    assert state["stream"]["taken"] == [2]
    assert (state["stream"]["prompts"], state["stream"]["rows"]) == fingerprints


# -- order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 40])  # in memory, in a file
def test_prompts_may_keep_the_order_of_the_rows_or_of_a_column(tmp_path: Path, rows: int) -> None:
    rng, levels = random.Random(rows), []
    with (tmp_path / "a.jsonl").open("w") as file:
        for index in range(rows):
            levels.append(rng.choice([3, 1, 2.5, -4]))
            row = {"prompt": f"p{index}", "answer": "1", "extra": {"level": levels[-1]}}
            file.write(json.dumps(row) + "\n")
    plain = DataSettings(path=tmp_path / "a.jsonl", shuffle=False)

    def ids(data: DataSettings) -> list[int]:
        stream = PromptStream(open_prompts(data, byte_level()), 1, data.weights, shuffle=data.shuffle)
        first_ids = [p.id for p in stream.take(3)]
        stream.restore(json.loads(json.dumps(stream.state())))
        return first_ids + [p.id for p in stream.take(2 * rows - 3)]

    assert ids(plain) == [*range(rows), *range(rows)]
    ordered = plain.model_copy(update={"order_by": "extra.level"})
    assert ids(ordered) == 2 * sorted(range(rows), key=lambda i: (levels[i], i))
    mixture = [{"path": tmp_path / "a.jsonl", "weight": w} for w in (1, 3)]
    mixed = DataSettings.model_validate({"mixture": mixture, "shuffle": False, "order_by": "extra.level"})
    stream = PromptStream(open_prompts(mixed, byte_level()), 1, mixed.weights, shuffle=False)
    taken = [p for p in stream.take(4 * rows) if p.source == 1]
    assert [p.id - rows for p in taken[:rows]] == ids(ordered)[:rows]


def test_a_resumed_run_with_another_order_is_refused(data: DataSettings) -> None:
    def stream(shuffle: bool, order_by: str | None = None) -> PromptStream:
        changed = data.model_copy(update={"order_by": order_by})
        return PromptStream(open_prompts(changed, byte_level()), 1, shuffle=shuffle)

    shuffled, plain = stream(True).state(), stream(False).state()
    assert "shuffle" not in shuffled  # as in checkpoints of earlier versions
    with pytest.raises(UserError, match=r"written with data\.shuffle true; set it to that"):
        stream(False).restore(shuffled)
    with pytest.raises(UserError, match=r"written with data\.shuffle false; set it to that"):
        stream(True).restore(plain)
    with pytest.raises(UserError, match="the training prompts have changed"):
        stream(False, "level").restore(plain)
    stream(False).restore(plain)


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ('"hard"', "'level' is a text, and the prompts are to be ordered by it (data.order_by)"),
        ("true", "'level' is a true/false value"),
        ("null", "'level' is a null"),
        ("1e999", "'level' is inf"),
        ("1" + "0" * 400, "'level' is a number too large to order by (data.order_by)"),
        (None, "the key 'level' is missing (keys of this line: 'prompt', 'answer'); add it or set"),
    ],
)
def test_a_column_to_order_by_must_have_numbers(tmp_path: Path, level: str | None, message: str) -> None:
    column = "" if level is None else f', "level": {level}'
    text = '{"prompt": "1", "answer": "1", "level": 1}\n{"prompt": "1", "answer": "1"' + column + "}\n"
    (tmp_path / "a.jsonl").write_text(text)
    data = DataSettings(path=tmp_path / "a.jsonl", shuffle=False, order_by="level")
    with pytest.raises(UserError) as error:
        read_problems_with_counts(data)
    assert str(error.value).startswith(f"{data.path}:2: {message}")
    problems, left_out = read_problems_with_counts(data.model_copy(update={"malformed": "skip"}))
    assert (len(problems), left_out.counts) == (1, {"malformed": 1})


def test_an_order_needs_shuffle_to_be_off(config_file: Path) -> None:
    with pytest.raises(UserError, match="order_by has no effect while prompts are shuffled; set shuffle"):
        load_settings(config_file, ["data.order_by=level"])
    load_settings(config_file, ["data.order_by=level", "data.shuffle=false"])
