"""Problems as the engine gets them, and the order in which a run goes through them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.problems import Message, Problem, read_problems
from rpg_megatron.data.trajectory import Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as the engine gets it."""

    id: int
    """Row of the problem in its data set, from 0; in a mixture the rows of the sources before count too."""
    text: str
    """What the tokens were made from: the problem in its template."""
    answer: str
    """The reference answer."""
    tokens: Tokens
    """Token ids, int32 [P]; at least one."""
    source: int = 0
    """Which part of the mixture it is from."""


# -- tokens --------------------------------------------------------------------------------------------------


def load_prompts(settings: DataSettings, tokenizer: Any) -> list[Prompt]:
    """Read the data and tokenize it with a Hugging Face tokenizer. Over-long prompts are left out or cut, as
    the settings say; a warning counts them.

    Raises UserError as ``read_problems`` does, and as ``fit_prompts``.
    """
    prompts, too_long = fit_prompts(read_problems(settings), settings, tokenizer)
    if too_long:
        cut = settings.too_long == "cut"
        logger.warning(
            "prompts: %s %d of %d prompts, which are longer than %d tokens (data.max_prompt_tokens)",
            "cut" if cut else "left out",
            too_long,
            len(prompts) + (0 if cut else too_long),
            settings.max_prompt_tokens,
        )
    return prompts


def fit_prompts(problems: list[Problem], settings: DataSettings, tokenizer: Any) -> tuple[list[Prompt], int]:
    """Render and tokenize problems; returns prompts of at most ``max_prompt_tokens`` tokens, and how many
    were longer: left out, or cut to their last tokens.

    Raises UserError if ``chat`` is on and the tokenizer has no chat template, or the template refuses a
    problem; if a problem makes no token; and if no prompt is short enough.
    """
    if settings.chat and not getattr(tokenizer, "chat_template", None):
        raise UserError("data.chat: the model's tokenizer has no chat template; set data.chat to false")
    texts = [_render(problem, settings, tokenizer) for problem in problems]
    # A chat template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not settings.chat)["input_ids"]
    prompts, too_long, most = [], 0, settings.max_prompt_tokens
    for problem, text, ids in zip(problems, texts, encoded, strict=True):
        if not ids:
            raise UserError(f"{problem.where}: the tokenizer makes no token of {text!r}; mend it")
        if len(ids) > most:
            too_long += 1
            if settings.too_long == "drop":
                continue
            ids = ids[-most:]
            text = tokenizer.decode(ids)
        prompts.append(Prompt(problem.id, text, problem.answer, np.asarray(ids, np.int32), problem.source))
    if not prompts:
        raise UserError(
            f"{problems[0].where}: all {too_long} prompts are longer than {most} tokens; "
            "raise data.max_prompt_tokens"
        )
    return prompts, too_long


def _render(problem: Problem, settings: DataSettings, tokenizer: Any) -> str:
    chat = [("user", problem.prompt)] if isinstance(problem.prompt, str) else list(problem.prompt)
    if not settings.chat:
        if len(chat) != 1:
            raise UserError(
                f"{problem.where}: the problem is a chat of {len(chat)} messages; set data.chat to true"
            )
        return settings.template.replace("{prompt}", chat[0][1])
    if isinstance(problem.prompt, str):
        chat = [Message("user", settings.template.replace("{prompt}", problem.prompt))]
    if settings.system is not None and chat[0][0] != "system":
        chat.insert(0, Message("system", settings.system))
    options = {} if settings.thinking is None else {"enable_thinking": settings.thinking}
    messages = [{"role": role, "content": content} for role, content in chat]
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )
        return text
    except Exception as e:  # templates are programs of their own, and raise what they like
        roles = ", ".join(role for role, _ in chat)
        raise UserError(
            f"{problem.where}: the chat template cannot render it (roles {roles}): {type(e).__name__}: {e}"
        ) from None


# -- order ---------------------------------------------------------------------------------------------------


class PromptStream:
    """Endless walk through the data; its place can be saved and taken up again.

    Each source is shuffled anew in each of its epochs. Of several sources the one that lags most behind its
    weight is next, so that the shares are right at any moment and nothing but the counts need be kept. The
    order depends on the seed and the data alone. When a batch spans the end of an epoch, or is larger than
    the data, a prompt may come twice in it.
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
                    f"data.mixture[{number}]: no prompt is left of this source; remove it, or raise "
                    "data.max_prompt_tokens"
                )
        self._weights = [weight / sum(weights) for weight in weights]
        self._seed = seed
        self._fingerprint = _fingerprint(prompts)
        self._orders: list[tuple[int, Tokens]] = [(-1, np.zeros(0, np.int32)) for _ in weights]
        self._taken = [0 for _ in weights]

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        return [next(self) for _ in range(n)]

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        drawn = sum(self._taken) + 1
        lags = [w * drawn - taken for w, taken in zip(self._weights, self._taken, strict=True)]
        number = max(range(len(lags)), key=lags.__getitem__)
        source = self._sources[number]
        epoch, position = divmod(self._taken[number], len(source))
        self._taken[number] += 1
        return source[int(self._order(number, epoch)[position])]

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as plain values that JSON can hold."""
        return {
            "seed": self._seed,
            "taken": list(self._taken),
            "weights": list(self._weights),
            "prompts": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where ``state()`` was taken.

        Raises UserError if the data set, its weights or the seed is another one: the walk could not go on
        where it stopped.
        """
        if state["prompts"] != self._fingerprint or state["weights"] != self._weights:
            raise UserError(
                "the training prompts have changed since the checkpoint was written (data set, its settings "
                "or the tokenizer); bring the old ones back, or start a new run from the exported model"
            )
        if state["seed"] != self._seed:
            raise UserError(
                f"the checkpoint was written with seed {state['seed']}, not {self._seed}; set seed to it"
            )
        if len(state["taken"]) != len(self._taken) or min(state["taken"]) < 0:
            raise ValueError(f"no such place in the data: {state}")
        self._taken = list(state["taken"])

    def _order(self, number: int, epoch: int) -> Tokens:
        """Permutation of a source in an epoch."""
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
