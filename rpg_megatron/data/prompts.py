"""Tokenized prompts, and the shuffled, resumable stream of prompts of a run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.errors import shorten
from rpg_megatron.data.chat_template import render_chats
from rpg_megatron.data.problems import Message, Problem, read_problems
from rpg_megatron.data.trajectory import Tokens
from rpg_megatron.data.vocabulary import check_ids
from rpg_megatron.system.foreign_input import ForeignInputError

logger = logging.getLogger(__name__)


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

    try:
        # Without an explicit False, transformers may ask on the terminal whether to run the folder's code.
        return AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
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


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """A function from token ids to text without special tokens, equal to ``tokenizer.decode``.

    It is the Rust tokenizer's own method if ``decode`` does nothing more, which is faster.
    """
    return partial((_backend(tokenizer) or tokenizer).decode, skip_special_tokens=True)


def save_decoder(tokenizer: Any, file: Path) -> None:
    """Write what ``load_decoder`` needs, if the Rust tokenizer alone can decode."""
    backend = _backend(tokenizer)
    if backend is not None:
        file.write_text(backend.to_str(), encoding="utf-8")


def load_decoder(file: Path, model: Path) -> Callable[[list[int]], str]:
    """``decoder_of`` the tokenizer in a checkpoint's folder. Needs no transformers if ``file`` exists."""
    if file.exists():
        from tokenizers import Tokenizer

        return partial(Tokenizer.from_file(str(file)).decode, skip_special_tokens=True)
    with without_torch():
        return decoder_of(load_tokenizer(model))


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
) -> list[Prompt]:
    """Read the data and tokenize it with a Hugging Face tokenizer.

    key: of ``settings`` in the configuration, for messages. rows: keep the rows, for ``Prompt.context``.
    vocab: see ``fit_prompts``.
    Prompts that are too long are left out or truncated (``data.too_long``); a warning gives their number.
    Raises UserError as ``read_problems`` and ``fit_prompts`` do.
    """
    prompts, too_long = fit_prompts(
        read_problems(settings, key, rows=rows), settings, tokenizer, key, vocab=vocab
    )
    if too_long:
        cut = settings.too_long == "cut"
        logger.warning(
            "prompts: %s %d of %d prompts, which are longer than %d tokens (%s.max_prompt_tokens)",
            "cut" if cut else "left out",
            too_long,
            len(prompts) + (0 if cut else too_long),
            settings.max_prompt_tokens,
            key,
        )
    return prompts


def fit_prompts(
    problems: list[Problem],
    settings: DataSettings,
    tokenizer: Any,
    key: str = "data",
    *,
    vocab: int | None = None,
) -> tuple[list[Prompt], int]:
    """Render and tokenize problems; returns prompts of at most ``max_prompt_tokens`` tokens, and the number
    of longer ones, which are left out or truncated to their last tokens.

    vocab: rows of the model's embedding, if known.
    Raises UserError if ``chat`` is on and the tokenizer has no chat template or the template fails on a
    problem, if a problem has no tokens or one that the model does not have, and if no prompt is short enough.
    """
    if settings.chat and not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{key}.chat: the model's tokenizer has no chat template; set {key}.chat to false")
    chats = [_chat(problem, settings, key) for problem in problems]
    texts = _render(problems, chats, settings, tokenizer, key)
    # A chat template adds the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not settings.chat)["input_ids"]
    prompts, too_long, limit = [], 0, settings.max_prompt_tokens
    for problem, chat, text, ids in zip(problems, chats, texts, encoded, strict=True):
        if not ids:
            raise UserError(f"{problem.where}: {text!r} has no tokens; fix or remove the row")
        if len(ids) > limit:
            too_long += 1
            if settings.too_long == "drop":
                continue
            ids = ids[-limit:]
            text = tokenizer.decode(ids)
        context = ""
        if problem.row is not None:
            messages = [message._asdict() for message in chat]
            context = json.dumps({"prompt": text, "messages": messages, "row": problem.row}, default=str)
        tokens = np.asarray(ids, np.int32)
        check_ids(tokens, vocab, problem.where, tokenizer)
        prompts.append(Prompt(problem.id, text, problem.answer, tokens, problem.source, context))
    if not prompts:
        raise UserError(
            f"{problems[0].where}: all {too_long} prompts are longer than {limit} tokens; "
            f"raise {key}.max_prompt_tokens"
        )
    return prompts, too_long


def _chat(problem: Problem, settings: DataSettings, key: str) -> list[Message]:
    """The messages of a prompt; without ``chat``, one message with the prompt as content."""
    chat = [Message("user", problem.prompt)] if isinstance(problem.prompt, str) else list(problem.prompt)
    if not settings.chat:
        if len(chat) != 1:
            raise UserError(
                f"{problem.where}: the problem is a chat of {len(chat)} messages; set {key}.chat to true"
            )
        return [Message(chat[0].role, settings.template.replace("{prompt}", chat[0].content))]
    if isinstance(problem.prompt, str):
        chat = [Message("user", settings.template.replace("{prompt}", problem.prompt))]
    if settings.system is not None and chat[0].role != "system":
        chat.insert(0, Message("system", settings.system))
    return chat


def _render(
    problems: list[Problem], chats: list[list[Message]], settings: DataSettings, tokenizer: Any, key: str
) -> list[str]:
    """The text of each chat."""
    if not settings.chat:
        return [chat[0].content for chat in chats]
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several with names
        template = template.get("default", "")
    variables = {**getattr(tokenizer, "special_tokens_map", {}), "add_generation_prompt": True}
    variables |= {"tools": None, "documents": None}  # as transformers does
    if settings.thinking is not None:
        variables["enable_thinking"] = settings.thinking
    messages = [[message._asdict() for message in chat] for chat in chats]
    texts = []
    try:
        for problem, chat, (text, error) in zip(
            problems, chats, render_chats(template, variables, messages), strict=True
        ):
            if error:
                roles = ", ".join(role for role, _ in chat)
                raise UserError(
                    f"{problem.where}: the chat template cannot render it (roles {roles}): {error}"
                )
            texts.append(text)
    except ForeignInputError as e:
        raise UserError(
            f"{key}.chat: the model's chat template cannot be used ({e}); correct it, or set {key}.chat to "
            "false"
        ) from None
    return texts


# -- order ---------------------------------------------------------------------------------------------------


class PromptStream:
    """Endless stream of prompts over shuffled epochs; its position can be saved and restored.

    Each source is reshuffled in each of its epochs. With several sources, the next prompt comes from the
    source that is furthest behind its weight, so the proportions hold at any time and the state is one count
    per source. The order depends only on the seed and the data. A batch that spans the end of an epoch, or is
    larger than the data, may contain a prompt twice.
    """

    def __init__(self, prompts: list[Prompt], seed: int, weights: Sequence[float] = (1.0,)):
        """weights: of each source, relative to each other. Raises UserError if one has no prompt."""
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._sources: list[list[Prompt]] = [[] for _ in weights]
        for prompt in prompts:
            self._sources[prompt.source].append(prompt)
        for number, source in enumerate(self._sources):
            if not source:
                raise UserError(
                    f"data.mixture[{number}]: no prompt of this source is left; remove it, or raise "
                    "data.max_prompt_tokens"
                )
        self._weights = [weight / sum(weights) for weight in weights]
        self._seed = seed
        self._fingerprint, self._rows = _fingerprint(prompts), _rows_fingerprint(prompts)
        self._orders: list[tuple[int, Tokens]] = [(-1, np.zeros(0, np.int32)) for _ in weights]
        self._taken = [0 for _ in weights]

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        return [next(self) for _ in range(n)]

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        total = sum(self._taken) + 1
        lags = [w * total - taken for w, taken in zip(self._weights, self._taken, strict=True)]
        number = max(range(len(lags)), key=lags.__getitem__)
        source = self._sources[number]
        epoch, position = divmod(self._taken[number], len(source))
        self._taken[number] += 1
        return source[int(self._order(number, epoch)[position])]

    def state(self) -> dict[str, Any]:
        """Position in the data, JSON-serialisable."""
        return {
            "seed": self._seed,
            "taken": list(self._taken),
            "weights": list(self._weights),
            "prompts": self._fingerprint,
            "rows": self._rows,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the position that ``state()`` returned.

        Raises UserError if the data set, its weights or the seed has changed, because the position then has
        no meaning; or if columns have changed that reward functions of the user can read.
        """
        if state["prompts"] != self._fingerprint or state["weights"] != self._weights:
            raise UserError(
                "the training prompts have changed since the checkpoint was written (the files of data.path "
                "or data.mixture, the rows of data.source, their settings or the tokenizer); restore the old "
                "ones, or start a new run from the exported model"
            )
        if state.get("rows", self._rows) != self._rows:  # earlier versions did not keep it
            raise UserError(
                "columns of the training data have changed since the checkpoint was written (those besides "
                "prompt and answer, which your reward functions can read as `row`); restore the old ones, or "
                "start a new run from the exported model"
            )
        if state["seed"] != self._seed:
            raise UserError(
                f"the checkpoint was written with seed {state['seed']}, not {self._seed}; set seed to "
                f"{state['seed']}"
            )
        if len(state["taken"]) != len(self._taken) or min(state["taken"]) < 0:
            raise ValueError(f"not a position in the data: {state}")
        self._taken = list(state["taken"])

    def _order(self, number: int, epoch: int) -> Tokens:
        """Permutation of a source in an epoch, int32 [prompts]."""
        if self._orders[number][0] != epoch:
            entropy = [self._seed, epoch] if number == 0 else [self._seed, epoch, number]
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
            self._orders[number] = epoch, rng.permutation(len(self._sources[number])).astype(np.int32)
        return self._orders[number][1]


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{prompt.source} {prompt.id} {len(prompt.tokens)} ".encode())
        digest.update(prompt.tokens.tobytes())
        digest.update(prompt.answer.encode() + b"\0")
    return digest.hexdigest()


def _rows_fingerprint(prompts: list[Prompt]) -> str:
    """Fingerprint of the prompts' ``context``; empty if no rows were kept."""
    if not any(prompt.context for prompt in prompts):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(prompt.context.encode() + b"\0")
    return digest.hexdigest()
