"""The prompts of a source that is asked for its rows during the run (``data.streaming``)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from itertools import islice
from typing import Any, NamedTuple

from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.problems import MAX_UNUSED, iterate_problems, warn_left_out
from rpg_megatron.data.prompt_stream import PromptList, Prompts
from rpg_megatron.data.prompts import Prompt, all_too_long, encode_prompts, warn_too_long
from rpg_megatron.data.stored_problems import LeftOut, Problem

logger = logging.getLogger(__name__)

_BLOCK = 32
"""Problems that are read and tokenized at least at a time: a chat template needs a process for each block."""


class _Position(NamedTuple):
    """A place between two problems of the source."""

    drawn: int
    """Number of rows before it."""
    digest: str
    """Of the problems before it."""

    def after(self, problem: Problem) -> _Position:
        """The position after the next problem."""
        value = json.dumps([self.digest, problem.id, problem.prompt, problem.answer, problem.row])
        return _Position(problem.id + 1, hashlib.blake2b(value.encode(), digest_size=16).hexdigest())


_START = _Position(0, "")


class StreamedPrompts:
    """Endless stream of prompts in the order of their source; its position can be saved and restored.

    It has the methods of ``PromptStream``. The source must give the same rows each time: to restore a
    position, it is asked again for all rows before it, which are compared with the position's digest.
    """

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        key: str = "data",
        *,
        rows: bool = False,
        vocab: int | None = None,
    ):
        """Parameters as in ``load_prompts``. Reads the first prompts; raises UserError as ``take`` does."""
        self._settings, self._tokenizer, self._key = settings, tokenizer, key
        self._keep_rows, self._vocab = rows, vocab
        self._read_to = _START
        """The position up to which problems have been read."""
        self._begin()
        self._fill(1)
        self.prompts: Prompts = PromptList([prompt for prompt, _ in self._next])
        """The first prompts, for probes."""

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts.

        Raises UserError if the source fails or ends, if it gives a row that cannot be used (unless
        ``data.malformed`` is skip), and if none of many rows can be used.
        """
        self._fill(n)
        taken = [self._next.popleft() for _ in range(n)]
        if taken:
            self._position = taken[-1][1]
        return [prompt for prompt, _ in taken]

    def position(self) -> dict[str, Any]:
        """Position in the source, JSON-serialisable."""
        return {"streaming": True, **self._position._asdict()}

    def sign(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position as a state: the same, since it has a digest."""
        return position

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a position. Raises UserError if the source does not give the same rows before it."""
        if not state.get("streaming"):
            raise UserError(
                "the checkpoint was written with data.streaming false; set it to that, or start a new run "
                "from the exported model"
            )
        position = _Position(state["drawn"], state["digest"])
        self._begin()
        logger.info("%s: asking again for the %d rows before the checkpoint", self._name, position.drawn)
        while self._read_to.drawn < position.drawn and (problem := next(self._problems, None)):
            self._read_to = self._read_to.after(problem)
        if self._read_to != position:
            raise UserError(
                f"{self._name} does not give the rows again that the run took before the checkpoint "
                f"({position.drawn:,}, with the columns that are used); restore its code and settings, or "
                "start a new run from the exported model"
            )
        self._position = position

    @property
    def _name(self) -> str:
        assert self._settings.source is not None
        return f"{self._key}.source: {self._settings.source.type}"

    def _begin(self) -> None:
        """Start the source anew."""
        self._left_out, self._too_long, self._reported, self._unused = LeftOut(), 0, 0, 0
        self._problems = iterate_problems(self._settings, self._key, self._keep_rows, self._left_out)
        self._next: deque[tuple[Prompt, _Position]] = deque()
        """Prompts that come next, and the position after each."""
        self._position = self._read_to = _START

    def _fill(self, n: int) -> None:
        """Read problems until there are at least ``n`` prompts."""
        while len(self._next) < n:
            problems = list(islice(self._problems, max(n - len(self._next), _BLOCK)))
            if not problems:
                raise UserError(
                    f"{self._name} has ended after {self._read_to.drawn:,} rows, and the run needs more; let "
                    f"it yield more and resume, or set {self._key}.streaming to false, which repeats its rows"
                )
            prompts, too_long = self._encode(problems)
            after = {}
            for problem in problems:
                after[problem.id] = self._read_to = self._read_to.after(problem)
            self._next.extend((prompt, after[prompt.id]) for prompt in prompts)
            self._unused = 0 if prompts else self._unused + len(problems)
            if self._unused >= MAX_UNUSED:
                raise all_too_long(problems, self._settings, self._key)
            self._too_long += too_long
            self._warn()

    def _warn(self) -> None:
        """Log how many rows and prompts were left out, whenever their number has doubled."""
        left_out, rows = self._left_out.counts.total(), self._read_to.drawn
        if left_out + self._too_long > 2 * self._reported:
            self._reported = left_out + self._too_long
            warn_left_out(self._left_out, rows - left_out)
            warn_too_long(self._too_long, rows - left_out, self._settings, self._key)

    def _encode(self, problems: list[Problem]) -> tuple[list[Prompt], int]:
        return encode_prompts(
            problems, self._settings, self._tokenizer, self._key, vocab=self._vocab, refused=self._left_out
        )
