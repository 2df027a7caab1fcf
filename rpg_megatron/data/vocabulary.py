"""Whether a tokenizer fits a model: an engine dies of a token that its embedding does not have.

A larger embedding is normal: many models pad it. A tokenizer that only declares tokens beyond it is odd, but
works as long as nobody uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rpg_megatron.config import UserError

if TYPE_CHECKING:  # numpy, which a login node may lack
    from rpg_megatron.data.trajectory import Tokens

_REMEDY = (
    "copy the tokenizer files of this model there, or resize the model's embedding for the tokens that were "
    "added"
)


def check_ids(tokens: Tokens, vocab: int | None, where: str, tokenizer: Any) -> None:
    """Check the token ids of a prompt, int32 [P]; raises UserError. vocab: rows of the embedding, if known.

    where: of the prompt, for the message.
    """
    if vocab is None or int(tokens.max()) < vocab:
        return
    token = int(tokens.max())
    raise UserError(
        f"{where}: its token {token} ({tokenizer.decode([token])!r}) is beyond the model's embedding of "
        f"{vocab} rows (vocab_size in config.json): the tokenizer in model.path does not fit the model; "
        f"{_REMEDY}"
    )


def check_stops(stops: Sequence[int], vocab: int) -> None:
    """Check that a response can end. stops: ids of the tokens that end it. Raises UserError."""
    if not any(0 <= token < vocab for token in stops):
        ids = ", ".join(map(str, stops))
        raise UserError(
            f"model.path: no response can end, because each end-of-sequence token ({ids}) is beyond the "
            f"model's embedding of {vocab} rows (vocab_size in config.json): the tokenizer does not fit the "
            f"model; {_REMEDY}"
        )


def warn_of_unused(largest: int, vocab: int) -> list[str]:
    """A warning if a tokenizer declares tokens that the model does not have. largest: the largest id."""
    if largest < vocab:
        return []
    return [
        f"model.path: the tokenizer declares tokens up to {largest}, but the model's embedding has {vocab} "
        "rows (vocab_size in config.json); no prompt that was checked uses them"
    ]
