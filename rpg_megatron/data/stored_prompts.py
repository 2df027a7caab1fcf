"""The prompts of a large data set: their texts are in a file, and they are tokenized when they are taken.

Only which prompts are too long must be known at the start. Where the tokenizer allows it
(``token_bound.py``), texts of few bytes are known to be short enough; only the others are tokenized then. A
pass over all prompts in the background gives the fingerprints, and keeps both for later runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import batched
from typing import Any, cast

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.cache_files import digest_of, find_cached, new_cached
from rpg_megatron.data.chat_rendering import chat_template
from rpg_megatron.data.problems import read_problems, warn_left_out
from rpg_megatron.data.prompt_stream import FingerprintSum, Numbers, PromptList, Prompts
from rpg_megatron.data.prompts import (
    Prompt,
    all_too_long,
    fit_prompts,
    render_prompts,
    tokenize,
    warn_too_long,
)
from rpg_megatron.data.row_store import RowStore
from rpg_megatron.data.stored_problems import LeftOut, Problem
from rpg_megatron.data.streamed_prompts import StreamedPrompts
from rpg_megatron.data.token_bound import TokenBound, token_bound

logger = logging.getLogger(__name__)

_FORM = 2
"""Increment when prompts are tokenized differently."""
_BLOCK = 10_000
"""Prompts in memory at a time: a chat template needs a process for each block."""
_PASS_BLOCK = 1000
"""Prompts between two looks of the pass at whether the process ends."""


def open_prompts(
    settings: DataSettings,
    tokenizer: Any,
    key: str = "data",
    *,
    rows: bool = False,
    vocab: int | None = None,
) -> Prompts | StreamedPrompts:
    """The prompts of a data set; parameters, warnings and errors are those of ``load_prompts``."""
    if settings.streaming:
        return StreamedPrompts(settings, tokenizer, key, rows=rows, vocab=vocab)
    problems = read_problems(settings, key, rows=rows)
    if isinstance(problems, RowStore):
        return StoredPrompts(problems, settings, tokenizer, key, vocab)
    refused = LeftOut()
    prompts, too_long = fit_prompts(problems, settings, tokenizer, key, vocab=vocab, refused=refused)
    warn_too_long(too_long, len(problems), settings, key)
    warn_left_out(refused, len(prompts))
    return PromptList(prompts)


class StoredPrompts:
    """``Prompts`` of a file of problems."""

    def __init__(
        self,
        problems: RowStore[Problem],
        settings: DataSettings,
        tokenizer: Any,
        key: str,
        vocab: int | None = None,
    ):
        """key, vocab: see ``fit_prompts``. Raises UserError as it does for prompts tokenized at the start."""
        self._problems, self._settings, self._tokenizer, self._key = problems, settings, tokenizer, key
        self._vocab = vocab
        self._name = _cache_name(problems, settings, tokenizer)
        self.fingerprints: Future[tuple[str, str]] = Future()
        """Of the prompts, and of their ``context``: see ``Prompts``."""
        too_long, refused, unused = self._read_cache(), LeftOut(), set[int]()
        if too_long is None:
            too_long = np.fromiter(self._find_too_long(refused, unused), np.int64)
        if unused:
            self._name = ""  # found again at each start, so that they are counted again
            warn_left_out(refused, len(problems) - len(unused))
        if len(problems) == len(unused):
            raise UserError(f"{key}: no prompt can be used: {refused.first}")
        if len(too_long) == len(problems) and settings.too_long == "drop":
            raise all_too_long(problems, settings, key)
        warn_too_long(len(too_long), len(problems), settings, key)
        self._kept: Numbers = np.arange(len(problems))
        """Indices of the problems whose prompts are used."""
        if settings.too_long == "drop":
            self._kept = np.delete(self._kept, [*too_long, *unused])
        elif unused:
            self._kept = np.delete(self._kept, [*unused])
        if not self.fingerprints.done():
            threading.Thread(target=self._run_pass, args=[too_long], name="prompts").start()

    def __len__(self) -> int:
        return len(self._kept)

    def sources(self) -> Numbers:
        """Index of the source of each, int64 [prompts]."""
        return np.asarray(self._problems.sources)[self._kept]

    def fetch(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these indices."""
        problems = [self._problems[int(self._kept[index])] for index in indices]
        settings, key = self._settings, self._key
        prompts, _ = fit_prompts(problems, settings, self._tokenizer, key, vocab=self._vocab)
        if len(prompts) != len(problems):
            raise RuntimeError("a prompt is longer than the bound of its tokens, or than it was at the start")
        return prompts

    def _find_too_long(self, refused: LeftOut, unused: set[int]) -> Iterator[int]:
        """Indices of the problems whose prompts are too long. Those that cannot be rendered are added to
        ``refused``, and their indices to ``unused``.
        """
        settings, limit = self._settings, self._settings.max_prompt_tokens
        bound = token_bound(self._tokenizer, special=not settings.chat)
        unknown = range(len(self._problems)) if bound is None or settings.chat else self._unbounded(bound)
        for indices in batched(unknown, _BLOCK):
            block = [self._problems[index] for index in indices]
            places = {problem.id: index for problem, index in zip(block, indices, strict=True)}
            rendered = render_prompts(block, settings, self._tokenizer, self._key, refused)
            unused.update(set(places.values()) - {places[each.problem.id] for each in rendered})
            unsure = [
                each for each in rendered if not each.text or bound is None or bound.of(each.text) > limit
            ]
            texts = [each.problem for each in unsure], [each.text for each in unsure]
            for each, ids in zip(unsure, tokenize(*texts, settings, self._tokenizer), strict=True):
                if len(ids) > limit:
                    yield places[each.problem.id]

    def _unbounded(self, bound: TokenBound) -> Sequence[int]:
        """Indices of the problems whose prompts, without a chat template, may be too long or are unknown."""
        template, lengths = self._settings.template, np.asarray(self._problems.lengths)
        count = template.count("{prompt}")
        sizes = len(template.replace("{prompt}", "").encode()) + count * np.abs(lengths)
        growth = np.where((lengths > 0) & template.isascii(), 1, bound.growth)
        known = (lengths != 0) & (bound.added + growth * sizes <= self._settings.max_prompt_tokens)
        return cast(list[int], np.flatnonzero(~known).tolist())

    # -- fingerprints ----------------------------------------------------------------------------------------

    def _run_pass(self, too_long: Numbers) -> None:
        # The tokenizer may be used by several threads at once: nothing changes its state.
        digest = FingerprintSum()
        try:
            for start in range(0, len(self._kept), _PASS_BLOCK):
                if not threading.main_thread().is_alive():  # the process ends, and waits for this thread
                    return
                digest.update(self.fetch(range(start, min(start + _PASS_BLOCK, len(self._kept)))))
        except BaseException as e:
            self.fingerprints.set_exception(e)
            return
        fingerprints = digest.result()
        self._write_cache(too_long, fingerprints)
        self.fingerprints.set_result(fingerprints)

    def _read_cache(self) -> Numbers | None:
        """The indices of prompts that are too long, if an earlier run has kept them and the fingerprints."""
        place = self._problems.place
        if place is None or not self._name:
            return None
        cached = find_cached([place.folder], self._name, lambda: place.content)
        if cached is None:
            return None
        with cached[0] as file, suppress(ValueError, KeyError, TypeError):
            file.seek(0)
            too_long = np.frombuffer(file.read(8 * cached[1]["too_long"]), np.int64)
            prompts, rows = cached[1]["fingerprints"]
            self.fingerprints.set_result((prompts, rows))
            return too_long
        return None

    def _write_cache(self, too_long: Numbers, fingerprints: tuple[str, str]) -> None:
        place = self._problems.place
        if place is None or not self._name:
            return
        try:
            with new_cached(place.folder, self._name) as writer:
                writer.write(too_long.tobytes())
                described = {"content": place.content, "too_long": len(too_long)}
                writer.finish(described | {"fingerprints": fingerprints})
        except OSError as e:
            logger.info("%s: not used (%s)", place.folder, e)


def _cache_name(problems: RowStore[Problem], settings: DataSettings, tokenizer: Any) -> str:
    """Name of the file of lengths; empty if there is none: if the tokenizer or the date may change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or problems.place is None:
        return ""
    template = ""
    if settings.chat and tokenizer.chat_template:
        template = chat_template(tokenizer) + chat_template(tokenizer, tools=True)
    if "strftime_now" in template:
        return ""
    import tokenizers
    import transformers

    how = (settings.template, settings.chat, settings.system, settings.thinking)
    limits = (settings.max_prompt_tokens, settings.too_long)
    versions = (_FORM, transformers.__version__, tokenizers.__version__, type(tokenizer).__name__)
    special = getattr(tokenizer, "special_tokens_map", {})
    digest = digest_of(problems.place.name, backend.to_str(), template, special, how, limits, versions)
    return f"{digest}.lengths"
