"""The scores of a group's responses, from what their episodes and the run's reward say."""

from __future__ import annotations

from collections.abc import Sequence

from rpg_megatron.config import UserError
from rpg_megatron.config.rollout import EpisodeSettings
from rpg_megatron.rewards.failures import RewardFailure
from rpg_megatron.rewards.reward import Response, Score
from rpg_megatron.rollout.episode import EpisodeResult


class EpisodeRewards:
    """What a run's episodes return as rewards. Of those that a limit has ended, some return none."""

    def __init__(self, settings: EpisodeSettings | None):
        """settings: None, if the episode is the default one."""
        self._settings = settings
        self._numbers = True if settings is not None and settings.weight is not None else None
        """Whether episodes return numbers; None: not known yet."""

    def complete(
        self, results: Sequence[EpisodeResult], responses: Sequence[Response], prompt_id: int
    ) -> list[EpisodeResult]:
        """The results of a group, with the reward ``failed`` where a limit has ended an episode that returned
        none, if episodes return numbers; otherwise such a response has the run's reward.

        Raises UserError if the episodes that no limit has ended return rewards of different kinds.
        """
        settings = self._settings
        if settings is None:
            return list(results)
        cut = [response.finish == "length" for response in responses]
        ended = [(r.reward, c) for r, c in zip(results, cut, strict=True) if r.failure is None]
        whole = [reward for reward, limited in ended if not limited]
        kinds = {tuple(r.parts) if isinstance(r, Score) else type(r).__name__ for r in whole}
        if len(kinds) > 1:
            raise UserError(
                f"rollout.episode: the episodes of prompt {prompt_id} return rewards of different kinds; "
                "return for every response a number, or the result of score, or no reward"
            )
        if settings.weight is not None and None in whole:
            raise UserError(
                "rollout.episode.weight is set, but the episode returns no reward; remove one of the two"
            )
        known = whole or [reward for reward, _ in ended if reward is not None and self._numbers is None]
        if known:
            self._numbers = isinstance(known[0], float)
        return [
            r._replace(reward=settings.failed)
            if self._numbers and limited and r.failure is None and r.reward is None
            else r
            for r, limited in zip(results, cut, strict=True)
        ]

    def needs_run_scores(self, results: Sequence[EpisodeResult]) -> bool:
        """Whether the run's reward of the whole responses is needed, by what ``complete`` has returned."""
        ended = [result.reward for result in results if result.failure is None]
        settings = self._settings
        return settings is None or (bool(ended) and (settings.weight is not None or None in ended))

    def scores(
        self,
        results: Sequence[EpisodeResult],
        run_scores: Sequence[Score] | None,
        failures: Sequence[tuple[RewardFailure, ...]],
    ) -> list[Score]:
        """The score of each response, by what ``complete`` has returned. run_scores: None, if they are not
        needed. failures: of the run's reward, when the episode asked for it.
        """
        if self._settings is None:
            assert run_scores is not None
            return list(run_scores)
        scores = []
        for number, (result, failed) in enumerate(zip(results, failures, strict=True)):
            score = _score(result, run_scores[number] if run_scores else None, self._settings)
            parts = score.parts | {f"env/{name}": value for name, value in result.metrics.items()}
            scores.append(score._replace(parts=parts, failures=score.failures + failed))
        return scores


def _score(result: EpisodeResult, run: Score | None, settings: EpisodeSettings) -> Score:
    failure, reward = result.failure, result.reward
    if failure is not None:
        parts = run.parts if run else {"episode": settings.failed}
        return Score(settings.failed, False, None, failure.reason, parts, (failure,))
    if reward is None:
        assert run is not None
        return run
    value = reward.reward if isinstance(reward, Score) else reward
    if run is not None and settings.weight is not None:
        parts = run.parts | {"episode": value}
        return run._replace(reward=run.reward + settings.weight * value, parts=parts)
    return (
        reward
        if isinstance(reward, Score)
        else Score(value, value > 0, None, "by the episode", {"episode": value})
    )
