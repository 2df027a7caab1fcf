"""Calls the reward once for each data set before a run: on a row, with its reference answer as response.

The reward must fail on no row; one of 0 or less for a reference answer is told. It runs as in training: in
its worker processes, with their limits. Needs no torch in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.errors import shorten
from rpg_megatron.config.reward import RewardSettings
from rpg_megatron.config.sections import PromptSet
from rpg_megatron.data.problems import first_problems
from rpg_megatron.data.stored_problems import Problem
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.rewards.failures import RewardFailure, first_of_each
from rpg_megatron.system.terminal import one_line

if TYPE_CHECKING:
    from rpg_megatron.rewards.reward import Response, Scorer

_ADVICE = "correct it, or set guards.reward_failures=warn to start anyway"


def try_reward(settings: Settings, *, offline: bool = False, trainer: bool = True) -> list[str]:
    """Import the functions of the reward, call them once for each source of data, and ask judges once.

    offline: ask no server, call no async function, and leave out data on the hub. trainer:
    whether the training set counts. Data that cannot be read are left out; ``check_data`` reports them.

    Returns warnings. Raises UserError, one line for each problem: if a function cannot be imported, and, with
    ``guards.reward_failures`` stop, if it fails or a judge gives no answer.
    """
    reward, guard = settings.reward, settings.guards.reward_failures
    if not reward.has_custom:
        return []
    from rpg_megatron.rewards.reward import Scorer  # imports asyncio

    scorer = Scorer(reward, settings.rollout.max_response_tokens, share=reward.workers)
    try:
        if guard == "off":
            return []
        doubts: list[str] = []
        tried = _try_sets(settings, scorer, doubts, offline=offline, trainer=trainer)
        failures = first_of_each(tried)
    finally:
        scorer.close()
    problems = [f"{failure}; {_ADVICE}" for failure in failures]
    if offline:
        doubts += [
            f"{term.where}.type {term.type} was not called: it may need a server; train and doctor call it"
            for name, term in reward.all_terms.items()
            if name in scorer.async_terms
        ]
    else:
        problems += _ask_judges(reward)
    if problems and guard == "stop":
        raise UserError("\n".join(problems))
    return problems + doubts


def _try_sets(
    settings: Settings, scorer: Scorer, doubts: list[str], *, offline: bool, trainer: bool
) -> Iterator[RewardFailure]:
    """Yield the failures; a reference answer that gets 0 or less is added to ``doubts``."""
    import asyncio

    for part in settings.prompt_sets:
        if not (part.name or trainer) or (offline and any(source.on_hub for source in part.data.sources)):
            continue
        group: dict[str, Any] = {"samples": part.samples, "first_only": bool(part.name), "offline": offline}
        try:
            for problem in first_problems(part.data, part.where):
                text, response, context = _first_response(settings, part, problem)
                trial = scorer.try_once(response, problem.answer, context, **group)
                failures, values = asyncio.run(trial)
                yield from (failure.at(part.name, problem.id, text) for failure in failures)
                answer = shorten(one_line(problem.answer))
                doubts += [
                    f"{key} gives {value:g} to the reference answer itself, {answer!r} ({problem.where}); "
                    f"correct it or {part.where}.answer_key, unless a response needs more than the answer"
                    for key, value in values.items()
                    if value <= 0
                ]
        except UserError:  # of the data
            continue


def _first_response(settings: Settings, part: PromptSet, problem: Problem) -> tuple[str, Response, str]:
    """The prompt's text, the reference answer as a response, and ``Prompt.context``.

    Without a tokenizer that can be read here, the text lacks the chat template.
    """
    from rpg_megatron.rewards.reward import Response

    data, answer = part.data, problem.answer
    text = data.template.replace("{prompt}", problem.text)
    messages = [{"role": "user", "content": text}]
    context = json.dumps({"prompt": text, "messages": messages, "row": problem.row}, default=str)
    tokens: Sequence[int] = ()
    with suppress(ImportError):
        from rpg_megatron.data.prompts import fit_prompts  # needs numpy, which a login node may lack

        tokenizer = open_tokenizer(settings.model.path, chat=data.chat)
        if tokenizer is not None:
            whole = data.model_copy(update={"too_long": "cut"})
            prompts, _ = fit_prompts([problem], whole, tokenizer, part.where)
            text, context = prompts[0].text, prompts[0].context
            (tokens,) = tokenizer([answer], add_special_tokens=False)["input_ids"]
    return text, Response(answer, cast(Any, tokens or [0]), "stop"), context  # it has at least one token


def _ask_judges(reward: RewardSettings) -> Iterator[str]:
    import asyncio

    for term in reward.all_terms.values():
        if term.is_judge:
            from rpg_megatron.rewards.judge import Judge, JudgeSettings  # aiohttp

            judge = Judge(JudgeSettings.model_validate(term.settings))
            if problem := asyncio.run(judge.find_problem()):
                yield (
                    f"{term.where}.url: the judge at {judge.server} {problem}; start it, correct the "
                    "settings, or set guards.reward_failures=warn to start anyway"
                )
