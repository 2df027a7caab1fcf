"""Sample and grade the held-out evaluation sets, for the sampler in training and ``rpg-megatron eval``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

import msgspec

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.evaluation import HeldOutSet
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.engine.command import context_length
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.seeds import seed_of
from rpg_megatron.system.tasks import run_all

_FIRST_TICKET = -(1 << 62)
"""First ticket of evaluations. They come before rollouts, because the trainer waits for an evaluation."""


class HeldOut:
    """The held-out sets of the settings. For the dispatcher's event loop."""

    def __init__(self, settings: Settings, dispatcher: Dispatcher, prompts: Mapping[str, list[Prompt]]):
        """prompts: name of each set -> its prompts. Raises UserError if the settings have no evaluation."""
        if settings.evaluation is None:
            raise UserError("there is no held-out set to evaluate on; set evaluation.data.path")
        evaluation = settings.evaluation
        self._top_k = evaluation.top_k
        self._dispatcher = dispatcher
        self._tickets = itertools.count(_FIRST_TICKET)
        self._max_response, self._context = settings.rollout.max_response_tokens, context_length(settings)
        self._problems = [
            (heldout, prompt, seed_of(settings.seed, heldout.seeds, 0, index, prompt.id))
            for heldout in evaluation.heldout
            for index, prompt in enumerate(prompts[heldout.name])
        ]
        """The set, a prompt of it, and the seed of its first response."""
        self.failures = {part.name: FailureCount(part.name) for part in evaluation.heldout}
        """Failures of the reward in each set, in the last evaluation."""

    @property
    def problems(self) -> int:
        """Number of problems in all sets."""
        return len(self._problems)

    async def evaluate(
        self, on_result: Callable[[EvalResult], None], *, skip: Collection[tuple[str, int]] = ()
    ) -> list[EvalResult]:
        """Sample and grade all problems except those in ``skip``, which holds (set name, prompt id).

        on_result: called with each result when it is graded. Returns all results, in the order of the sets.
        Responses depend on the seed, the set and the problem's index in it, not on ``skip``.
        """
        problems = [problem for problem in self._problems if (problem[0].name, problem[1].id) not in skip]
        results: dict[int, EvalResult] = {}
        self.failures = {name: FailureCount(name) for name in self.failures}

        async def one(index: int, task: GroupTask) -> None:
            try:
                scores = await self._dispatcher.submit(task)
                answers = await self._dispatcher.answers(task)
            finally:
                await self._dispatcher.forget([task.ticket])
            part, prompt, _ = problems[index]
            self.failures[part.name] = self.failures[part.name].add(scores.failures)
            results[index] = EvalResult(
                prompt_id=prompt.id,
                answer=prompt.answer,
                prompt=prompt.text,
                set=part.name,
                failed=scores.failures.failed,
                **msgspec.structs.asdict(answers),
            )
            on_result(results[index])

        await run_all([one(index, self._task(*problem)) for index, problem in enumerate(problems)])
        return [results[index] for index in range(len(problems))]

    def _task(self, part: HeldOutSet, prompt: Prompt, seed: int) -> GroupTask:
        return GroupTask(
            next(self._tickets),
            prompt.id,
            prompt.tokens,
            prompt.answer,
            part.samples,
            seed,
            min(part.response_tokens(self._max_response), self._context - len(prompt.tokens)),
            version=0,
            temperature=part.temperature,
            top_p=part.top_p,
            top_k=self._top_k,
            logprobs=False,
            correctness_only=True,
            context=prompt.context,
            set=part.name,
        )
