"""The stream of prompts of a run: its order, which can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rpg_megatron.config import UserError
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.data.trajectory import Tokens

_READ_AHEAD = 256
"""Prompts that are read and tokenized at least at a time."""

Numbers = NDArray[np.int64]


class Prompts(Protocol):
    """The prompts of a data set, in the order of the data."""

    @property
    def fingerprints(self) -> Future[tuple[str, str]]:
        """Of the prompts, and of their ``context`` (empty if no rows were kept).

        They may be known only when all prompts have been tokenized; a UserError if one cannot be.
        """

    def __len__(self) -> int: ...

    def sources(self) -> Numbers:
        """Index of the source of each prompt, int64 [prompts]."""

    def fetch(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these indices."""


class PromptList:
    """``Prompts`` in memory."""

    def __init__(self, prompts: Sequence[Prompt]):
        self._prompts = prompts
        digest = FingerprintSum()
        digest.update(prompts)
        self.fingerprints: Future[tuple[str, str]] = Future()
        """Of the prompts, and of their ``context``: see ``Prompts``."""
        self.fingerprints.set_result(digest.result())

    def __len__(self) -> int:
        return len(self._prompts)

    def sources(self) -> Numbers:
        """Index of the source of each, int64 [prompts]."""
        return np.array([prompt.source for prompt in self._prompts], np.int64)

    def fetch(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these indices."""
        return [self._prompts[index] for index in indices]


class FingerprintSum:
    """Computes ``Prompts.fingerprints``."""

    def __init__(self) -> None:
        self._prompts, self._rows = (hashlib.blake2b(digest_size=16) for _ in range(2))
        self._has_rows = False

    def update(self, prompts: Iterable[Prompt]) -> None:
        """Add prompts, in the order of the data."""
        for prompt in prompts:
            self._prompts.update(f"{prompt.source} {prompt.id} {len(prompt.tokens)} ".encode())
            self._prompts.update(prompt.tokens.tobytes())
            self._prompts.update(prompt.answer.encode() + b"\0")
            self._rows.update(prompt.context.encode() + b"\0")
            self._has_rows = self._has_rows or bool(prompt.context)

    def result(self) -> tuple[str, str]:
        """The fingerprints of the prompts so far."""
        return self._prompts.hexdigest(), self._rows.hexdigest() if self._has_rows else ""


class PromptStream:
    """Endless stream of prompts over shuffled epochs; its position can be saved and restored.

    Each source is reshuffled in each of its epochs. With several sources, the next prompt comes from the
    source that is furthest behind its weight, so the proportions hold at any time and the state is one count
    per source. The order depends only on the seed and the data. A batch that spans the end of an epoch, or is
    larger than the data, may contain a prompt twice.
    """

    def __init__(
        self,
        prompts: Prompts | list[Prompt],
        seed: int,
        weights: Sequence[float] = (1.0,),
        *,
        shuffle: bool = True,
        key: str = "data",
    ):
        """weights: of each source, relative to each other. shuffle: false keeps the order of the prompts.
        key: of the data in the settings, for messages.

        Raises UserError if a source has no prompt.
        """
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self.prompts: Prompts = PromptList(prompts) if isinstance(prompts, list) else prompts
        """All prompts."""
        sources = self.prompts.sources()
        self._sources = [np.flatnonzero(sources == number) for number in range(len(weights))]
        """Indices of each source's prompts."""
        for number, source in enumerate(self._sources):
            if not len(source):
                raise UserError(
                    f"{key}.mixture[{number}]: no prompt of this source is left; remove it, or raise "
                    f"{key}.{'max_prompt_tokens' if key == 'data' else 'max_tokens'}"
                )
        self._weights = [weight / sum(weights) for weight in weights]
        self._seed, self._shuffle, self._key = seed, shuffle, key
        self._orders: list[tuple[int, Tokens]] = [(-1, np.zeros(0, np.int32)) for _ in weights]
        self._taken = [0 for _ in weights]
        self._fetched: dict[int, Prompt] = {}
        """Prompts that come next, by index."""

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        indices = [self._advance() for _ in range(n)]
        if not all(index in self._fetched for index in indices):
            taken = list(self._taken)
            ahead = [*indices, *(self._advance() for _ in range(_READ_AHEAD - n))]
            self._taken = taken
            unique = list(dict.fromkeys(ahead))
            self._fetched = dict(zip(unique, self.prompts.fetch(unique), strict=True))
        return [self._fetched[index] for index in indices]

    def _advance(self) -> int:
        """Index of the next prompt, which counts as taken."""
        total = sum(self._taken) + 1
        lags = [w * total - taken for w, taken in zip(self._weights, self._taken, strict=True)]
        number = max(range(len(lags)), key=lags.__getitem__)
        source = self._sources[number]
        epoch, position = divmod(self._taken[number], len(source))
        self._taken[number] += 1
        return int(source[self._order(number, epoch)[position] if self._shuffle else position])

    def state(self) -> dict[str, Any]:
        """Position in the data, JSON-serialisable. Waits for ``Prompts.fingerprints``."""
        return self.sign(self.position())

    def position(self) -> dict[str, Any]:
        """``state()`` without what it may wait for."""
        position = {"seed": self._seed, "taken": list(self._taken), "weights": list(self._weights)}
        return position if self._shuffle else position | {"shuffle": False}

    def sign(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position as a state. Waits for ``Prompts.fingerprints``."""
        prompts, rows = self.prompts.fingerprints.result()
        return position | {"prompts": prompts, "rows": rows}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the position that ``state()`` returned.

        Raises UserError if the data set, its weights or the seed has changed, because the position then has
        no meaning; or if columns have changed that reward functions of the user can read. Waits for
        ``Prompts.fingerprints``.
        """
        if state.get("streaming"):
            raise UserError(
                "the checkpoint was written with data.streaming true; set it to that, or start a new run "
                "from the exported model"
            )
        fingerprint, rows = self.prompts.fingerprints.result()
        if state["prompts"] != fingerprint or state["weights"] != self._weights:
            raise UserError(
                "the training prompts have changed since the checkpoint was written (the files of "
                f"{self._key}.path or {self._key}.mixture, the rows of {self._key}.source, their settings or "
                "the tokenizer); restore the old ones, or start a new run from the exported model"
            )
        if state.get("rows", rows) != rows:  # earlier versions did not keep it
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
        if state.get("shuffle", True) != self._shuffle:
            before = "true" if self._shuffle is False else "false"
            raise UserError(
                f"the checkpoint was written with {self._key}.shuffle {before}; set it to that, or start a "
                "new run from the exported model"
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
