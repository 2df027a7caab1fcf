"""Prompts with their reference answers, and the order in which a run goes through them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rpg_megatron.config import UserError
from rpg_megatron.config.rollout import DataSettings
from rpg_megatron.data.trajectory import Tokens

logger = logging.getLogger(__name__)


class Problem(NamedTuple):
    """One line of a data set, before the tokenizer has seen it."""

    id: int
    """Its line, from 0."""
    prompt: str
    """The problem as it stands in the file, without template."""
    answer: str
    """The reference answer."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as the engine gets it."""

    id: int
    """Line of the prompt in its data set, from 0."""
    text: str
    """What the tokens were made from: the problem in its template."""
    answer: str
    """The reference answer."""
    tokens: Tokens
    """Token ids, int32 [P]; at least one."""


# -- reading -------------------------------------------------------------------------------------------------


def read_problems(settings: DataSettings) -> list[Problem]:
    """Read and check a JSON lines file; needs neither torch nor a tokenizer. Empty lines are skipped.

    Raises UserError that names file and line (from 1) for a line that is no JSON object in UTF-8, lacks a key
    or holds a value of the wrong type, and for a data set without a single problem.
    """
    if not settings.chat and "{prompt}" not in settings.template:
        raise UserError(
            f"data.template: {settings.template!r} has no place for the problem; put {{prompt}} into it"
        )
    path = settings.path
    problems: list[Problem] = []
    try:
        with path.open("rb") as file:
            for index, raw in enumerate(file):
                if settings.limit is not None and index >= settings.limit:
                    break
                if raw.strip():
                    problems.append(_parse(settings, raw, index))
    except FileNotFoundError:
        raise UserError(f"data.path: {path} does not exist; give a JSON lines file") from None
    except IsADirectoryError:
        raise UserError(f"data.path: {path} is a directory; give a JSON lines file") from None
    except OSError as e:
        raise UserError(f"data.path: {path} cannot be read ({e.strerror or e})") from None
    if not problems:
        raise UserError(
            f'{path}: holds no problems; it needs one JSON object a line, such as {{"{settings.prompt_key}": '
            f'"What is 1+1?", "{settings.answer_key}": "2"}}'
        )
    return problems


def _parse(settings: DataSettings, raw: bytes, index: int) -> Problem:
    where = f"{settings.path}:{index + 1}"
    try:
        text = raw.decode("utf-8-sig" if index == 0 else "utf-8")
    except UnicodeDecodeError as e:
        raise UserError(
            f"{where}: not UTF-8 (byte {e.start + 1} of the line); save the file as UTF-8"
        ) from None
    try:
        row = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise UserError(f"{where}: nested too deeply; give one flat JSON object a line") from None
    except ValueError as e:
        raise UserError(f"{where}: not valid JSON ({e}); give one JSON object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: holds a {_name(row)}, not an object; give one JSON object a line")
    prompt = _field(row, settings.prompt_key, "data.prompt_key", where)
    answer = _field(row, settings.answer_key, "data.answer_key", where)
    if not isinstance(prompt, str):
        raise UserError(f"{where}: {settings.prompt_key!r} is a {_name(prompt)}, not text; put it in quotes")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(f"{where}: {settings.answer_key!r} is a {_name(answer)}; it must be text or a number")
    try:
        answer = str(answer)
        (prompt + answer).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; remove it"
        ) from None
    except ValueError:  # an integer of more digits than Python prints
        raise UserError(
            f"{where}: {settings.answer_key!r} is a number too long to print; put it in quotes"
        ) from None
    if settings.answer_after is not None:
        _before, mark, answer = answer.rpartition(settings.answer_after)
        if not mark:
            raise UserError(
                f"{where}: {settings.answer_key!r} does not hold {settings.answer_after!r} "
                "(data.answer_after); mend the line, or set data.answer_after to the mark that this file uses"
            )
    answer = answer.strip()
    for key, value in ((settings.prompt_key, prompt), (settings.answer_key, answer)):
        if not value.strip():
            raise UserError(f"{where}: {key!r} is empty; fill it in or remove the line")
    return Problem(index, prompt, answer)


def _field(row: dict[str, Any], key: str, setting: str, where: str) -> Any:
    if key not in row:
        keys = ", ".join(repr(k) for k in row) or "none"
        raise UserError(
            f"{where}: the key {key!r} is missing (keys of this line: {keys}); add it or set {setting}"
        )
    return row[key]


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _name(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "true/false value", type(None): "null"}
    return names.get(type(value), "number")


# -- tokens --------------------------------------------------------------------------------------------------


def load_prompts(settings: DataSettings, tokenizer: Any) -> list[Prompt]:
    """Read a data set and tokenize it with a Hugging Face tokenizer. Over-long prompts are left out; a
    warning counts them.

    Raises UserError as ``read_problems`` does, and if the tokenizer has no chat template although ``chat`` is
    on, or if no prompt is short enough.
    """
    prompts, left_out = fit_prompts(read_problems(settings), settings, tokenizer)
    if left_out:
        logger.warning(
            "%s: left out %d of %d prompts, which are longer than %d tokens (data.max_prompt_tokens)",
            settings.path,
            left_out,
            left_out + len(prompts),
            settings.max_prompt_tokens,
        )
    return prompts


def fit_prompts(problems: list[Problem], settings: DataSettings, tokenizer: Any) -> tuple[list[Prompt], int]:
    """Tokenize problems; returns those of at most ``max_prompt_tokens`` tokens, and how many are longer."""
    if settings.chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("data.chat: the model's tokenizer has no chat template; set data.chat to false")
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": problem.prompt}], tokenize=False, add_generation_prompt=True
            )
            for problem in problems
        ]
    else:
        texts = [settings.template.replace("{prompt}", problem.prompt) for problem in problems]
    # A chat template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not settings.chat)["input_ids"]
    prompts, left_out = [], 0
    for problem, text, ids in zip(problems, texts, encoded, strict=True):
        if not ids:
            raise UserError(
                f"{settings.path}:{problem.id + 1}: the tokenizer makes no token of {text!r}; mend it"
            )
        if len(ids) > settings.max_prompt_tokens:
            left_out += 1
        else:
            prompts.append(Prompt(problem.id, text, problem.answer, np.asarray(ids, np.int32)))
    if not prompts:
        raise UserError(
            f"{settings.path}: all {left_out} prompts are longer than {settings.max_prompt_tokens} tokens; "
            "raise data.max_prompt_tokens"
        )
    return prompts, left_out


# -- order ---------------------------------------------------------------------------------------------------


class PromptStream:
    """Endless walk through a data set, shuffled anew in each epoch; its place can be saved and taken up
    again.

    The order depends on the seed and the data alone. When a batch spans the end of an epoch, or is larger
    than the data set, a prompt may come twice in it.
    """

    def __init__(self, prompts: list[Prompt], seed: int):
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._fingerprint = _fingerprint(prompts)
        self._go_to(0, 0)

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        return [next(self) for _ in range(n)]

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        if self._position == len(self._prompts):
            self._go_to(self._epoch + 1, 0)
        self._position += 1
        return self._prompts[self._order[self._position - 1]]

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as plain values that JSON can hold."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "prompts": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where ``state()`` was taken.

        Raises UserError if the data set or the seed is another one: the walk could not go on where it
        stopped.
        """
        if state["prompts"] != self._fingerprint:
            raise UserError(
                "the training prompts have changed since the checkpoint was written (data set, its settings "
                "or the tokenizer); bring the old ones back, or start a new run from the exported model"
            )
        if state["seed"] != self._seed:
            raise UserError(
                f"the checkpoint was written with seed {state['seed']}, not {self._seed}; set seed to it"
            )
        if not (state["epoch"] >= 0 and 0 <= state["position"] <= len(self._prompts)):
            raise ValueError(f"no such place in the data: {state}")
        self._go_to(state["epoch"], state["position"])

    def _go_to(self, epoch: int, position: int) -> None:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
        self._epoch, self._position = epoch, position
        self._order = rng.permutation(len(self._prompts))


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{prompt.id} {len(prompt.tokens)} ".encode())
        digest.update(prompt.tokens.tobytes())
        digest.update(prompt.answer.encode() + b"\0")
    return digest.hexdigest()
