"""A checkpoint's tokenizer without transformers, which imports torch. Sufficient to measure prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import read_json, read_text
from rpg_megatron.system.foreign_input import ForeignInputError, read_foreign

_LARGEST = 100_000_000
"""Maximum bytes of ``tokenizer.json``."""
_MORE_TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates, one a file, as transformers writes them."""
_SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class FileTokenizer:
    """The part of a Hugging Face tokenizer that ``fit_prompts`` and ``stop_tokens`` use."""

    def __init__(self, tokenizer: Any, chat_template: Any = None, special: dict[str, str] | None = None):
        """tokenizer: of the ``tokenizers`` library. special: name -> special token, for the template."""
        self._tokenizer, self.chat_template, self.special_tokens_map = tokenizer, chat_template, special or {}

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token; None if ``tokenizer_config.json`` names none."""
        token_id: int | None = self._tokenizer.token_to_id(self.special_tokens_map.get("eos_token", ""))
        return token_id

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added ones included."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The added tokens by id, as in transformers."""
        return dict(self._tokenizer.get_added_tokens_decoder())

    @property
    def largest_id(self) -> int:
        """The largest id of its tokens; -1 without any."""
        return max(self.vocabulary.values(), default=-1)

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        """Token ids of each text. Encodes one by one, because the library starts threads for a batch."""
        encoded = (self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts)
        return {"input_ids": [encoding.ids for encoding in encoded]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def read_backend(text: str) -> Any:
    """The tokenizer of the ``tokenizers`` library that a ``tokenizer.json`` describes, for whole texts.

    The file may keep a maximum length or a padding of an earlier use: they are switched off.
    """
    from tokenizers import Tokenizer

    return without_lengths(Tokenizer.from_str(text))


def without_lengths(backend: Any) -> Any:
    """A tokenizer of the ``tokenizers`` library, which from now on neither truncates nor pads."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def added_after(tokenizer: Any) -> list[int]:
    """Token ids that a tokenizer adds after each text, such as EOS: no prompt ends with them."""
    plain, whole = (tokenizer(["a"], add_special_tokens=on)["input_ids"][0] for on in (False, True))
    ends = range(len(plain), len(whole) + 1)
    return next((list(whole[n:]) for n in ends if list(whole[n - len(plain) : n]) == list(plain)), [])


def refuse_remote_code(model: Path) -> None:
    """Refuse a tokenizer that needs Python code of its model, with UserError: for some families transformers
    loads another one in its place, with other tokens.
    """
    try:
        code = read_json(model / "tokenizer_config.json").get("auto_map")
    except (OSError, ValueError, AttributeError):
        return  # whoever reads the tokenizer reports it
    if code.get("AutoTokenizer") if isinstance(code, dict) else code:
        raise UserError(
            f"model.path: the tokenizer of {model} needs Python code of its own (auto_map in "
            "tokenizer_config.json), which is not run; convert it once to a tokenizer.json, as "
            "docs/models.md shows for tiktoken (TikTokenConverter of transformers), and remove auto_map"
        )


def open_tokenizer(model: Path, *, chat: bool) -> FileTokenizer | None:
    """The tokenizer of a checkpoint; None if this module cannot read it.

    chat: whether its chat template is needed too.
    """
    try:
        tokenizer = read_backend(read_text(model / "tokenizer.json"))
        file = model / "tokenizer_config.json"
        config = json.loads(read_text(file)) if chat or file.is_file() else {}
        special = {key: _text(config[key]) for key in _SPECIAL if config.get(key)}
        return FileTokenizer(tokenizer, _template(model, config) if chat else None, special)
    except Exception:  # the Rust library raises plain Exception
        return None
    except BaseException as e:
        if type(e).__name__ == "PanicException":  # of the Rust library, for an assertion that fails in it
            return None
        raise


def decode_foreign(file: BinaryIO, prompts: Sequence[list[int]]) -> list[str]:
    """Texts of token ids, by a ``tokenizer.json`` that others may have made. Raises ForeignInputError.

    A process that can reach nothing makes them (``system/foreign_input.py``).
    """
    texts: list[str]
    (texts,) = read_foreign(f"{__name__}:decode_all", [file], prompts, list[str], values=1)
    if len(texts) != len(prompts):
        raise ForeignInputError("its texts are not as many as the prompts")
    return texts


def prepare() -> None:
    """Load what ``decode_all`` loads late."""
    import tokenizers  # noqa: F401


def decode_all(files: Sequence[BinaryIO], prompts: list[list[int]]) -> Iterator[list[str]]:
    """Reader of ``decode_foreign``."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(files[0].read(_LARGEST))
    except Exception as e:  # the Rust library raises plain Exception
        raise ValueError(str(e)) from None
    yield [_decode(tokenizer, ids) for ids in prompts]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    except Exception as e:  # such as a negative id
        return f"({len(ids)} tokens; tokenizer.json cannot show them as text: {type(e).__name__})"


def _template(model: Path, config: dict[str, Any]) -> Any:
    """The chat template: a text, or name -> text, as transformers has it."""
    file = model / "chat_template.jinja"
    files = {"default": read_text(file)} if file.is_file() else {}
    more = {each.stem: read_text(each) for each in sorted((model / _MORE_TEMPLATES).glob("*.jinja"))}
    if files or more:
        return files | more if more else files["default"]
    template = config.get("chat_template")
    return {each["name"]: each["template"] for each in template} if isinstance(template, list) else template


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
