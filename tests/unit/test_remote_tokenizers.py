"""A tokenizer that needs Python code of its model is refused, and docs/models.md says how it is converted.

Why: without the code, transformers loads another tokenizer from the same files, without a word and with other
tokens. The page's own lines convert a small tiktoken tokenizer with Kimi's expressions, whose class is built
as Moonshot's. Not covered: Moonshot's files.
"""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from rpg_megatron.config import UserError
from rpg_megatron.data.prompts import load_tokenizer
from rpg_megatron.data.tokenizer_file import refuse_remote_code

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}*{LETTERS[1]}+{END}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}+{LETTERS[1]}*{END}",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
MERGED = ["th", "he", "the", " t", " the", "in", "ing", "12", "123", "'t", "文"]
CODE = f"""
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

class Toy(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "tiktoken.model"}}

    def __init__(self, vocab_file, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        names = {{len(ranks): "[BOS]", len(ranks) + 1: "[EOS]", len(ranks) + 3: "<|im_end|>"}}
        added = {{names.get(i, f"<|reserved_{{i}}|>"): i for i in range(len(ranks), len(ranks) + 6)}}
        self.model = tiktoken.Encoding(
            "toy", pat_str={PATTERN!r}, mergeable_ranks=ranks, special_tokens=added
        )
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        read = self.model.decode_single_token_bytes
        return {{read(i).decode("latin-1"): i for i in range(self.vocab_size)}}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "MODEL"
    folder.mkdir()
    tokens = [bytes([i]) for i in range(256)] + ["文".encode()[:2]] + [text.encode() for text in MERGED]
    ranks = "".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text(ranks)
    (folder / "tokenization_toy.py").write_text(CODE)
    described = {
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[EOS]",
        "chat_template": "{{ messages }}",
    }
    described |= {"tokenizer_class": "Toy", "auto_map": {"AutoTokenizer": ["tokenization_toy.Toy", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    return folder


def test_the_page_converts_what_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs Python code of its own \(auto_map .* docs/models\.md"):
        load_tokenizer(model)
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, env=environment, check=True, timeout=120)
    (model / "tokenization_toy.py").unlink()
    for file in (tmp_path / "CONVERTED").iterdir():
        file.replace(model / file.name)
    tokenizer = load_tokenizer(model)
    ranks = load_tiktoken_bpe(str(model / "tiktoken.model"))
    added = {token: tokenizer.convert_tokens_to_ids(token) for token in ("[BOS]", "[EOS]", "<|im_end|>")}
    assert [added[name] - len(ranks) for name in added] == [0, 1, 3]
    assert tokenizer.eos_token_id == added["[EOS]"]
    assert tokenizer.chat_template == "{{ messages }}"
    theirs = tiktoken.Encoding("toy", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=added)
    for text in (
        "the 文文 thing 1234 don't [EOS]",
        "THE Thing's\n\n  x文 12345 <|im_end|>",
        "é 😀 \t a",
        "}\n/// doc",
    ):
        ids = theirs.encode(text, allowed_special="all")
        assert tokenizer([text], add_special_tokens=False)["input_ids"] == [ids]
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("auto_map", "refused"),
    [
        ({"AutoTokenizer": ["a.B", None]}, True),
        ({"AutoTokenizer": "a.B"}, True),
        (["a.B", None], True),  # the form of old files
        ({"AutoProcessor": "a.B"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_only_code_of_tokenizers_is_refused(tmp_path: Path, auto_map: object, refused: bool) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    if not refused:
        refuse_remote_code(tmp_path)
        return
    with pytest.raises(UserError, match="needs Python code of its own"):
        refuse_remote_code(tmp_path)


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_other_files_are_left_to_their_readers(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    refuse_remote_code(tmp_path)
