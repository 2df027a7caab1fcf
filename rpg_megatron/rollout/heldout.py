"""Held-out problems, sampled and graded: in training by the sampler, and by ``rpg-megatron eval``."""

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
from rpg_megatron.rollout.generation import GenerationRequest, sample_draws, seed_of, stop_tokens


class HeldOut:
    """The held-out sets of some settings. Its coroutines belong to the fleet's event loop."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Any,
        fleet: EnginePool,
        scorer: Scorer,
        prompts: Mapping[str, list[Prompt]],
    ):
        """prompts: of each set, by its name. Raises UserError if the settings have no evaluation."""
        if settings.evaluation is None:
            raise UserError("there is no held-out set to evaluate on; set evaluation.data.path")
        self._evaluation = settings.evaluation
        self._tokenizer, self._fleet, self._scorer = tokenizer, fleet, scorer
        self._most = settings.engine.max_sequences
        self._stops = stop_tokens(settings.model.path, tokenizer)
        context, longest = context_length(settings), settings.rollout.max_response_tokens
        self._room = {
            (part.name, prompt.id): min(longest, context - len(prompt.tokens))
            for part in self._evaluation.heldout
            for prompt in prompts[part.name]
        }
        self._draws = [
            (part.name, prompt, seed_of(settings.seed, part.seeds, 0, place, prompt.id))
            for part in self._evaluation.heldout
            for place, prompt in enumerate(prompts[part.name])
        ]

    @property
    def problems(self) -> int:
        """How many there are, of all sets."""
        return len(self._draws)

    async def evaluate(
        self, finish: Callable[[EvalResult], None], *, skip: Collection[tuple[str, int]] = ()
    ) -> list[EvalResult]:
        """Sample and grade all problems but those to ``skip``, each given by set and prompt id.

        finish: is called with each as it is graded. Returns all of them, in the order of the sets. The
        responses depend on the seed, the set and the problem's place in it, not on what is skipped.
        """
        chosen = [(name, prompt, seed) for name, prompt, seed in self._draws if (name, prompt.id) not in skip]
        samples = self._evaluation.samples
        draws = [
            GenerationRequest(prompt, samples, seed, self._room[name, prompt.id])
            for name, prompt, seed in chosen
        ]
        results: dict[int, EvalResult] = {}

        async def grade(place: int) -> None:
            results[place] = await self._grade(chosen[place][0], draws[place].prompt, draws[place].done)
            draws[place].done = []
            finish(results[place])

        try:
            async with asyncio.TaskGroup() as group:  # what cannot be graded or kept ends the sampling too

                def start(place: int) -> None:
                    group.create_task(grade(place))

                group.create_task(
                    sample_draws(
                        self._fleet,
                        draws,
                        start,
                        most=self._most,
                        temperature=self._evaluation.temperature,
                        top_p=self._evaluation.top_p,
                        stop_token_ids=self._stops,
                        logprobs=False,
                    )
                )
        except BaseExceptionGroup as e:
            raise first_error(e) from None
        return [results[place] for place in range(len(draws))]

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
