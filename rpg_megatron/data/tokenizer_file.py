"""A checkpoint's tokenizer without transformers, which imports torch. Sufficient to measure prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rpg_megatron.config.files import read_text

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class FileTokenizer:
    """The part of a Hugging Face tokenizer that ``fit_prompts`` uses."""

    chat_template: str | None = None

    def __init__(self, tokenizer: Any, chat_template: Any = None, special: dict[str, str] | None = None):
        """tokenizer: of the ``tokenizers`` library. chat_template: compiled by jinja; None: no template.
        special: name -> special token, for the template.
        """
        self._tokenizer, self._template, self._special = tokenizer, chat_template, special or {}
        self.chat_template = "compiled" if chat_template is not None else None

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        """Token ids of each text. Encodes one by one, because the library starts threads for a batch."""
        encoded = (self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts)
        return {"input_ids": [found.ids for found in encoded]}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, **options: Any) -> str:
        """The rendered chat."""
        return str(self._template.render(messages=messages, **self._special, **options))


def open_tokenizer(model: Path, *, chat: bool) -> FileTokenizer | None:
    """The tokenizer of a checkpoint; None if this module cannot read it.

    chat: whether its chat template is needed too.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if not chat:
            return FileTokenizer(tokenizer)
        config = json.loads(read_text(model / "tokenizer_config.json"))
        special = {key: _text(config[key]) for key in _SPECIAL if config.get(key)}
        return FileTokenizer(tokenizer, _compile(model, config), special)
    except Exception:  # the Rust library raises plain Exception; jinja templates may raise anything
        return None


def _compile(model: Path, config: dict[str, Any]) -> Any:
    """The chat template, in the environment that transformers gives it."""
    import jinja2.ext
    import jinja2.sandbox

    file = model / "chat_template.jinja"
    source = read_text(file) if file.is_file() else config["chat_template"]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: form}
    return environment.from_string(source)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
