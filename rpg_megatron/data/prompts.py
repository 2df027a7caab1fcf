"""Tokenizers, and problems that are rendered and tokenized as prompts."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.errors import shorten
from rpg_megatron.data.chat_messages import Message
from rpg_megatron.data.chat_rendering import chat_template, render_messages, template_variables
from rpg_megatron.data.problems import read_problems, warn_left_out
from rpg_megatron.data.stored_problems import LeftOut, Problem
from rpg_megatron.data.tokenizer_file import (
    added_after,
    open_tokenizer,
    read_backend,
    refuse_remote_code,
    without_lengths,
)
from rpg_megatron.data.trajectory import Tokens
from rpg_megatron.data.vocabulary import check_ids

logger = logging.getLogger(__name__)

_AT_ONCE = 1000
"""Texts tokenized at a time: the tokenizer's own results are far larger than the tokens."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenized prompt."""

    id: int
    """``Problem.id``."""
    text: str
    """The rendered text: the template with the problem."""
    answer: str
    """The reference answer."""
    tokens: Tokens
    """Token ids, int32 [P]; at least one."""
    source: int = 0
    """Index of its source in the mixture."""
    context: str = ""
    """Inputs of custom reward functions, as a JSON object: ``prompt``, the text; ``messages``, the chat that
    it was rendered from; and ``row``, all columns. Empty if rows were not kept."""


# -- tokens --------------------------------------------------------------------------------------------------


@contextmanager
def without_torch() -> Iterator[None]:
    """Within the block torch cannot be imported: transformers imports it even for tokenizers, without need.

    Saves 1.3 s of CPU and 450 MB, unless torch is needed later. Only for processes that use no transformers
    models: transformers checks only once whether torch is installed.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # no warning that torch is missing
    try:
        yield
    finally:
        del sys.modules["torch"]


def load_tokenizer(model: Path) -> Any:
    """The tokenizer in a checkpoint's folder. No code in the folder is executed.

    Raises UserError if there is no tokenizer, or if it needs code of its own.
    """
    from transformers import AutoTokenizer  # slow to import

    refuse_remote_code(model)
    try:
        # Without an explicit False, transformers may ask on the terminal whether to run the folder's code.
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            without_lengths(backend)
        return tokenizer
    except BaseException as e:
        # Transformers raises what its code meets, and the Rust library plain Exceptions and, for an assertion
        # that fails in it, a PanicException, which is no Exception.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        why = str(e) if isinstance(e, OSError | ValueError) else f"{type(e).__name__}: {e}"
        raise UserError(
            f"model.path: no usable tokenizer in {model} ({shorten(why, 500)}); copy the model's tokenizer "
            "files there"
        ) from None


def quick_tokenizer(model: Path, *, chat: bool = True) -> Any:
    """The tokenizer in a checkpoint's folder, by transformers only if it takes that. Errors of
    ``load_tokenizer``. chat: see ``open_tokenizer``.
    """
    tokenizer = open_tokenizer(model, chat=chat)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return tokenizer
    with without_torch():
        return load_tokenizer(model)


class TextCodec(NamedTuple):
    """Text to token ids and back, as the sampler's workers need it."""

    decode: Callable[[list[int]], str]
    """Text of token ids without special tokens, equal to ``tokenizer.decode``."""
    encode: Callable[[str], list[int]]
    """Token ids of a text; no token is added at its ends."""
    decode_all: Callable[[list[int]], str]
    """Text of token ids with special tokens."""


def codec_of(tokenizer: Any) -> TextCodec:
    """The codec of a tokenizer: the Rust tokenizer's own methods if they do the same, which is faster."""
    backend = _backend(tokenizer)
    if backend is not None:
        return _codec_of_backend(backend)
    return TextCodec(
        partial(tokenizer.decode, skip_special_tokens=True),
        lambda text: tokenizer([text], add_special_tokens=False)["input_ids"][0],
        partial(tokenizer.decode, skip_special_tokens=False),
    )


def save_codec(tokenizer: Any, file: Path) -> None:
    """Write what ``load_codec`` needs, if the Rust tokenizer alone can decode."""
    backend = _backend(tokenizer)
    if backend is not None:
        file.write_text(backend.to_str(), encoding="utf-8")


def save_chat_template(tokenizer: Any, settings: DataSettings, file: Path) -> None:
    """Write the source and the variables of the chat template, and the source for chats with tools."""
    if getattr(tokenizer, "chat_template", None):
        templates = [chat_template(tokenizer), chat_template(tokenizer, tools=True)]
        content = [templates[0], template_variables(tokenizer, settings), templates[1]]
        file.write_text(json.dumps(content, default=str), encoding="utf-8")


def load_codec(file: Path, model: Path) -> TextCodec:
    """``codec_of`` the tokenizer in a checkpoint's folder. Needs no transformers if ``file`` exists."""
    if file.exists():
        return _codec_of_backend(read_backend(file.read_text(encoding="utf-8")))
    with without_torch():
        return codec_of(load_tokenizer(model))


def _codec_of_backend(backend: Any) -> TextCodec:
    without_lengths(backend)
    return TextCodec(
        partial(backend.decode, skip_special_tokens=True),
        lambda text: backend.encode(text, add_special_tokens=False).ids,
        partial(backend.decode, skip_special_tokens=False),
    )


def _backend(tokenizer: Any) -> Any | None:
    """The Rust tokenizer, if ``tokenizer.decode`` only calls it; else None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return None
    from transformers import PreTrainedTokenizerFast  # slow to import

    return backend if type(tokenizer)._decode is PreTrainedTokenizerFast._decode else None


def load_prompts(
    settings: DataSettings,
    tokenizer: Any,
    key: str = "data",
    *,
    rows: bool = False,
    vocab: int | None = None,
    first: int | None = None,
) -> list[Prompt]:
    """Read the data and tokenize it with a Hugging Face tokenizer.

    key: of ``settings`` in the configuration, for messages. rows: keep the rows, for ``Prompt.context``.
    vocab: see ``fit_prompts``. first: see ``read_problems``.
    Prompts that are too long are left out or truncated (``data.too_long``); a warning gives their number.
    Raises UserError as ``read_problems`` and ``fit_prompts`` do.
    """
    problems, refused = read_problems(settings, key, rows=rows, first=first), LeftOut()
    prompts, too_long = fit_prompts(problems, settings, tokenizer, key, vocab=vocab, refused=refused)
    warn_too_long(too_long, len(problems), settings, key)
    warn_left_out(refused, len(prompts))
    return prompts


def warn_too_long(too_long: int, total: int, settings: DataSettings, key: str) -> None:
    """Log how many of all prompts are too long, if any."""
    if too_long:
        logger.warning(
            "prompts: %s %d of %d prompts, which are longer than %d tokens (%s.max_prompt_tokens)",
            "cut" if settings.too_long == "cut" else "left out",
            too_long,
            total,
            settings.max_prompt_tokens,
            key,
        )


def fit_prompts(
    problems: Sequence[Problem],
    settings: DataSettings,
    tokenizer: Any,
    key: str = "data",
    *,
    vocab: int | None = None,
    refused: LeftOut | None = None,
) -> tuple[list[Prompt], int]:
    """Render and tokenize problems; returns prompts of at most ``max_prompt_tokens`` tokens, and the number
    of longer ones, which are left out or truncated to their last tokens.

    vocab: rows of the model's embedding, if known. refused: see ``render_prompts``.
    Raises UserError as ``encode_prompts`` does, and if no prompt is short enough.
    """
    prompts, too_long = encode_prompts(problems, settings, tokenizer, key, vocab=vocab, refused=refused)
    if not prompts and refused is not None and refused.first:
        raise UserError(f"{key}: no prompt can be used: {refused.first}")
    if not prompts:
        raise all_too_long(problems, settings, key)
    return prompts, too_long


def encode_prompts(
    problems: Sequence[Problem],
    settings: DataSettings,
    tokenizer: Any,
    key: str,
    *,
    vocab: int | None,
    refused: LeftOut | None = None,
) -> tuple[list[Prompt], int]:
    """``fit_prompts`` that allows for all prompts being too long.

    Raises UserError if ``chat`` is on and the tokenizer has no chat template or the template fails on a
    problem, and if a problem has no tokens or one that the model does not have.
    """
    rendered = render_prompts(problems, settings, tokenizer, key, refused)
    encoded = tokenize([r.problem for r in rendered], [r.text for r in rendered], settings, tokenizer)
    prompts, too_long, limit = [], 0, settings.max_prompt_tokens
    for (problem, chat, text), ids in zip(rendered, encoded, strict=True):
        if len(ids) > limit:
            too_long += 1
            if settings.too_long == "drop":
                continue
            ids = ids[-limit:]
            text = tokenizer.decode(ids)
        context = ""
        if problem.row is not None:
            messages = [message.plain for message in chat]
            context = json.dumps({"prompt": text, "messages": messages, "row": problem.row}, default=str)
        tokens = np.asarray(ids, np.int32)
        check_ids(tokens, vocab, problem.where, tokenizer)
        prompts.append(Prompt(problem.id, text, problem.answer, tokens, problem.source, context))
    return prompts, too_long


def all_too_long(problems: Sequence[Problem], settings: DataSettings, key: str) -> UserError:
    """The error if no prompt is short enough."""
    return UserError(
        f"{problems[0].where}: all {len(problems)} prompts are longer than {settings.max_prompt_tokens} "
        f"tokens; raise {key}.max_prompt_tokens"
    )


def tokenize(
    problems: Sequence[Problem], texts: Sequence[str], settings: DataSettings, tokenizer: Any
) -> Iterator[list[int]]:
    """The token ids of each text. Raises UserError for a text without tokens."""
    suffix = [] if settings.chat else added_after(tokenizer)
    for chunk in batched(zip(problems, texts, strict=True), _AT_ONCE):
        # A chat template adds the special tokens itself.
        encoded = tokenizer([text for _, text in chunk], add_special_tokens=not settings.chat)["input_ids"]
        for (problem, text), ids in zip(chunk, encoded, strict=True):
            ids = ids[: len(ids) - len(suffix)]
            if not ids:
                raise UserError(f"{problem.where}: {text!r} has no tokens; fix or remove the row")
            yield ids


class RenderedPrompt(NamedTuple):
    """A problem with the messages and the text of its prompt."""

    problem: Problem
    chat: list[Message]
    text: str


def render_prompts(
    problems: Sequence[Problem],
    settings: DataSettings,
    tokenizer: Any,
    key: str,
    refused: LeftOut | None = None,
) -> list[RenderedPrompt]:
    """The text of each problem's prompt. Raises UserError as ``fit_prompts`` does.

    refused: with ``malformed`` skip, problems that cannot be rendered are left out and counted there.
    """
    if settings.chat and not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{key}.chat: the model's tokenizer has no chat template; set {key}.chat to false")

    def refuse(error: UserError) -> None:
        if refused is None or settings.malformed == "stop":
            raise error
        refused.add(error)

    chats: list[tuple[Problem, list[Message]]] = []
    for problem in problems:
        try:
            chats.append((problem, _chat(problem, settings, key)))
        except UserError as e:
            refuse(e)
    if not settings.chat:
        return [RenderedPrompt(problem, chat, chat[0].text) for problem, chat in chats]
    found = []
    texts = render_messages([c for _, c in chats], [p for p, _ in chats], settings, tokenizer, key)
    for (problem, chat), (text, error) in zip(chats, texts, strict=True):
        if error:
            roles = ", ".join(message.role for message in chat)
            why = f"the chat template cannot render it (roles {roles}): {error}"
            refuse(UserError(f"{problem.where}: {why}"))
        else:
            found.append(RenderedPrompt(problem, chat, text))
    return found


def _chat(problem: Problem, settings: DataSettings, key: str) -> list[Message]:
    """The messages of a prompt; without ``chat``, one message with the prompt as content."""
    chat = [Message("user", problem.prompt)] if isinstance(problem.prompt, str) else list(problem.prompt)
    if not settings.chat:
        if len(chat) != 1 or chat[0].fields:
            raise UserError(
                f"{problem.where}: the problem is a chat of {len(chat)} messages; set {key}.chat to true"
                if len(chat) != 1
                else f"{problem.where}: its message has the field {min(chat[0].fields or '')!r}; set "
                f"{key}.chat to true, or remove it"
            )
        return [Message(chat[0].role, settings.template.replace("{prompt}", chat[0].text))]
    if isinstance(problem.prompt, str):
        chat = [Message("user", settings.template.replace("{prompt}", problem.prompt))]
    elif chat[-1].role == "assistant":
        raise UserError(
            f"{problem.where}: the chat ends with a message of the assistant, and the policy begins a turn "
            "of its own; remove that message"
        )
    if settings.system is not None and chat[0].role != "system":
        chat.insert(0, Message("system", settings.system))
    return chat
