"""The scores of a group's responses, from what their episodes and the run's reward say."""

from __future__ import annotations

from collections.abc import Sequence

from rpg_megatron.config import UserError
from rpg_megatron.config.rollout import EpisodeSettings
from rpg_megatron.rewards.failures import RewardFailure
from rpg_megatron.rewards.reward import Score
from rpg_megatron.rollout.episode import EpisodeResult


def needs_run_scores(results: Sequence[EpisodeResult], settings: EpisodeSettings | None) -> bool:
    """Whether the run's reward of the whole responses is needed. settings: None, if the episode is the
    default one.
    """
    ended = [result.reward for result in results if result.failure is None]
    return settings is None or (bool(ended) and (settings.weight is not None or None in ended))


def episode_scores(
    results: Sequence[EpisodeResult],
    run_scores: Sequence[Score] | None,
    failures: Sequence[tuple[RewardFailure, ...]],
    settings: EpisodeSettings | None,
    prompt_id: int,
) -> list[Score]:
    """The score of each response. run_scores: None, if they are not needed. failures: of the run's reward,
    when the episode asked for it. Raises UserError if the episodes return rewards of different kinds.
    """
    if settings is None:
        assert run_scores is not None
        return list(run_scores)
    rewards = [result.reward for result in results if result.failure is None]
    kinds = {tuple(r.parts) if isinstance(r, Score) else type(r).__name__ for r in rewards}
    if len(kinds) > 1:
        raise UserError(
            f"rollout.episode: the episodes of prompt {prompt_id} return rewards of different kinds; return "
            "for every response a number, or the result of score, or no reward"
        )
    if settings.weight is not None and None in rewards:
        raise UserError(
            "rollout.episode.weight is set, but the episode returns no reward; remove one of the two"
        )
    scores = []
    for number, (result, failed) in enumerate(zip(results, failures, strict=True)):
        score = _score(result, run_scores[number] if run_scores else None, settings)
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
    if run is not None:
        assert settings.weight is not None
        parts = run.parts | {"episode": value}
        return run._replace(reward=run.reward + settings.weight * value, parts=parts)
    return (
        reward
        if isinstance(reward, Score)
        else Score(value, value > 0, None, "by the episode", {"episode": value})
    )
