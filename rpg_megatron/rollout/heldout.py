"""Sample and grade the held-out evaluation sets, for the sampler in training and ``rpg-megatron eval``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rpg_megatron.config import Settings, UserError
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.engine.client import Sample
from rpg_megatron.engine.command import context_length
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.rewards.reward import Scorer
from rpg_megatron.rollout.engine_pool import EnginePool, first_error
from rpg_megatron.rollout.generation import GenerationRequest, generate_all, seed_of, stop_tokens


class HeldOut:
    """The held-out sets of the settings. Call its coroutines from the engine pool's event loop."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Any,
        pool: EnginePool,
        scorer: Scorer,
        prompts: Mapping[str, list[Prompt]],
    ):
        """prompts: of each set, by its name. Raises UserError if the settings have no evaluation."""
        if settings.evaluation is None:
            raise UserError("there is no held-out set to evaluate on; set evaluation.data.path")
        self._evaluation = settings.evaluation
        self._tokenizer, self._pool, self._scorer = tokenizer, pool, scorer
        self._max_sequences = settings.engine.max_sequences
        self._max_response, self._context = settings.rollout.max_response_tokens, context_length(settings)
        self._stops = stop_tokens(settings.model.path, tokenizer)
        self._problems = [
            (heldout.name, prompt, seed_of(settings.seed, heldout.seeds, 0, index, prompt.id))
            for heldout in self._evaluation.heldout
            for index, prompt in enumerate(prompts[heldout.name])
        ]
        """Name of the set, prompt, and seed of its first response."""

    @property
    def problems(self) -> int:
        """Number of problems in all sets."""
        return len(self._problems)

    async def evaluate(
        self, on_result: Callable[[EvalResult], None], *, skip: Collection[tuple[str, int]] = ()
    ) -> list[EvalResult]:
        """Sample and grade all problems except those in ``skip``, which holds (set name, prompt id).

        on_result: called with each result as it is graded. Returns all of them, in the order of the sets. The
        responses depend on the seed, the set and the problem's index in it, not on what is skipped.
        """
        problems = [problem for problem in self._problems if (problem[0], problem[1].id) not in skip]
        requests = [
            GenerationRequest(
                prompt,
                self._evaluation.samples,
                seed,
                min(self._max_response, self._context - len(prompt.tokens)),
            )
            for _, prompt, seed in problems
        ]
        results: dict[int, EvalResult] = {}

        async def grade(index: int) -> None:
            request = requests[index]
            results[index] = await self._grade(problems[index][0], request.prompt, request.responses)
            request.found.clear()
            on_result(results[index])

        try:
            async with asyncio.TaskGroup() as group:  # an error in grading or on_result ends the sampling too

                def start(index: int) -> None:
                    group.create_task(grade(index))

                group.create_task(
                    generate_all(
                        self._pool,
                        requests,
                        start,
                        max_sequences=self._max_sequences,
                        temperature=self._evaluation.temperature,
                        top_p=self._evaluation.top_p,
                        stop_token_ids=self._stops,
                        logprobs=False,
                    )
                )
        except BaseExceptionGroup as e:
            raise first_error(e) from None
        return [results[index] for index in range(len(requests))]

    async def _grade(self, name: str, prompt: Prompt, samples: list[Sample]) -> EvalResult:
        texts = [self._tokenizer.decode(s.tokens.tolist(), skip_special_tokens=True) for s in samples]
        scores = await asyncio.gather(
            *(
                asyncio.wrap_future(self._scorer.submit(text, prompt.answer, len(sample.tokens)))
                for text, sample in zip(texts, samples, strict=True)
            )
        )
        return EvalResult(
            prompt_id=prompt.id,
            answer=prompt.answer,
            prompt=prompt.text,
            responses=texts,
            correct=[score.correct for score in scores],
            extracted=[score.extracted for score in scores],
            lengths=[len(s.tokens) for s in samples],
            finishes=[s.finish for s in samples],
            set=name,
        )
