"""Checks of a teacher before a run: its model, its layout, its tokenizer. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.launcher.layer_checks import check_delta_kernels, check_rows
from rpg_megatron.launcher.preflight import check_model, check_parallel


def check_teacher(
    settings: Settings, shape: ModelShape, *, weights: bool = True, machine: bool = False
) -> None:
    """Check that the ranks can hold the teacher, and that its tokens are the policy's. Raises UserError.

    shape: the policy's. weights: whether its weights and tokenizer are here, and not only its config.json.
    machine: whether the run's packages are.
    """
    settings = with_local_model(settings) if weights else settings
    teacher = settings.teacher
    if teacher is None or teacher.path is None:
        return
    try:
        other = check_model(teacher.path) if weights else read_model_shape(teacher.path)
        check_parallel(settings, other)
        check_rows(settings, other)
        if machine:
            check_delta_kernels(settings, other)
    except UserError as e:
        raise UserError(f"teacher.path: {str(e).removeprefix('model.path: ')}") from None
    if settings.longest > other.max_positions:
        raise UserError(
            f"teacher.path: {teacher.path} has {other.max_positions} positions (max_position_embeddings), "
            f"and a prompt with its response may have {settings.longest}; lower rollout.max_response_tokens"
        )
    if settings.full_divergence is not None and other.vocab_size != shape.vocab_size:
        raise UserError(
            f"objective.form full compares distributions over one vocabulary, and the models have "
            f"{shape.vocab_size} and {other.vocab_size} tokens (vocab_size in config.json); use form token"
        )
    if weights:
        check_tokenizers(settings.model.path, teacher.path)


def check_teacher_server(settings: Settings, *, offline: bool = False) -> list[str]:
    """Ask the server of the teacher for log-probs, and for the tokens of a text; returns warnings.

    Raises UserError if it cannot be used, or tokenizes otherwise than the policy's tokenizer.
    """
    if offline or settings.teacher is None or settings.teacher.url is None:
        return []
    import asyncio

    from rpg_megatron.rollout.teacher_client import TeacherClient  # aiohttp

    teacher = settings.teacher

    async def ask(text: str) -> tuple[str | None, list[int] | None]:
        client = TeacherClient(teacher)
        try:
            problem = await client.check()
            return problem, None if problem else await client.tokenize(text)
        finally:
            await client.close()

    tokenizer = open_tokenizer(settings.model.path, chat=False)
    special = " ".join(sorted(set(tokenizer.special_tokens_map.values()))) if tokenizer is not None else ""
    text = f"{_TEXT} {special}"
    problem, theirs = asyncio.run(ask(text))
    if problem is not None:
        raise UserError(
            f"teacher.url: the server at {teacher.url} {problem}; start it, or correct the settings"
        )
    if tokenizer is None or theirs is None:
        return [f"teacher.url: the tokenizer of {teacher.url} could not be compared with the policy's"]
    (ours,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    for place, (a, b) in enumerate(zip([*ours, -1], [*theirs, -1], strict=False)):
        if a != b:
            raise UserError(
                f"teacher.url: the tokenizer of {teacher.url} is not the policy's in {settings.model.path}: "
                f"token {place} of a test text is {b} there and {a} here; choose a teacher with the same one"
            )
    return []


_TEXT = (
    "The quick brown fox: 1234567890 + 3.14 = \\boxed{x_1^2}; for i in range(10):\n\tprint(naïve, 数学, 🙂)"
)
"""Letters, digits, signs, code and other scripts, which tokenizers split differently."""


def check_tokenizers(model: Path, teacher: Path) -> None:
    """Check that two tokenizers give each token the same id. Raises UserError, with the first other token."""
    ours, theirs = _vocabulary(model), _vocabulary(teacher)
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            there = f"{theirs[token]} there" if token in theirs else "none there"
            raise UserError(
                f"teacher.path: the tokenizer in {teacher} is not the policy's in {model}: the token "
                f"{token!r} is {number} here and {there}; choose a teacher with the same tokenizer"
            )


def _vocabulary(model: Path) -> dict[str, int]:
    if (tokenizer := open_tokenizer(model, chat=False)) is not None:
        return tokenizer.vocabulary
    from rpg_megatron.data.prompts import load_tokenizer, without_torch

    with without_torch():
        return dict(load_tokenizer(model).get_vocab())
