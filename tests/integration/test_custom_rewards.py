"""Rewards of the user: what they see, several with weights, async ones, and judges over HTTP that fail.

Why: a term that is lost or gets another response's value trains the wrong thing, and a judge's server that
hangs at night must cost scores, never the run. The judge is a stand-in that is slow, broken, dies, or answers
garbage. Not covered: a real judge (test_judge_engine), functions that hang or crash (test_reward_pool).
"""

from __future__ import annotations

import asyncio
import json
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.settings import make_settings
from rpg_megatron.rewards.custom_reward import load_reward
from rpg_megatron.rewards.judge import Judge, JudgeSettings
from rpg_megatron.rewards.reward import Response, Score, Scorer
from rpg_megatron.rewards.worker_process import NoReward
from rpg_megatron.system import forked_workers, http_client
from tests.support.judges import StandInJudge, stand_in_judge

pytestmark = pytest.mark.usefixtures("forked_starts")

MODULE = """
import asyncio, os, time
from pathlib import Path

def old(text, reference): return text == reference
def sees(response, answer, prompt, messages, row, token_ids, finish_reason, *, target: int = 3):
    whole = [response, answer, prompt, messages, row, token_ids, finish_reason, target]
    Path(f"seen{len(token_ids)}").write_text(repr(whole))  # each its own: processes write at the same time
    return len(token_ids) / target
def swapped(prompt, response): return len(response)
def ranks(responses, token_ids, row):
    order = sorted(map(len, token_ids))
    values = [order.index(len(ids)) + row["level"] for ids in token_ids]
    return [value if text else None for text, value in zip(responses, values)]
def few(responses): return [1.0]
def counts(response): return (None if response == "none" else 0.5), {"words": len(response.split())}
class Made:
    def __init__(self, base: float, step: float = 1): self.base, self.step = base, step
    def __call__(self, response, finish_reason): return self.base + self.step * (finish_reason == "stop")
async def waits(response, *, seconds: float = 0.2):
    if response == "hang": await asyncio.sleep(1000)
    if response == "block": time.sleep(1000)
    if response == "crash": os._exit(1)
    if response == "crash once" and not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(1)
    await asyncio.sleep(seconds)
    return len(response)
async def group(responses): return [float(len(r)) for r in responses]
async def raises(response):
    if response == "own limit":
        async with asyncio.timeout(0.01): await asyncio.sleep(1000)
    if response == "cancelled":
        task = asyncio.create_task(asyncio.sleep(1000))
        task.cancel()
        await task
    return 1.0

def verl(data_source, solution_str, ground_truth, extra_info=None, *, scale: float = 1):
    seen = [data_source, solution_str, ground_truth, extra_info, scale]
    if scale != 1: return len(repr(seen))
    return {"score": solution_str == ground_truth, "acc": 1.5, "pred": repr(seen)}
async def verl_async(data_source, solution_str, ground_truth): return solution_str == ground_truth
def verl_part(solution_str, ground_truth): return {"score": 0.3, "acc": solution_str == ground_truth}
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    assert list(map(len, (data_sources, ground_truths, extra_infos))) == [len(solution_strs)] * 3
    return [{"score": float(s == t)} for s, t in zip(solution_strs, ground_truths)]
def trl(completions, answer, level, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    Path("trl").write_text(repr([completions, answer, level, kwargs]))
    return [text == right for text, right in zip(texts, answer)]
async def trl_async(prompts, completions): return [len(p) + len(c) for p, c in zip(prompts, completions)]
class TRL:
    def __init__(self, weighted: float): self.weighted = weighted
    def __call__(self, completions, **columns): return [self.weighted * len(c) for c in completions]
def trl_some(completions, **columns): return [None if c == "5" else 1.0 for c in completions]
def trl_column(completions, solution): return [1.0] * len(completions)
def verl_needs(solution_str, ground_truth, threshold): return 1.0

def wrong(prompt, answer): return 1
def both(response, responses): return 1
def taken(response, *, weight: float): return 1
def needs(response, *, target: int): return 1
class Asks:
    def __call__(self, response, rows): return 1
"""
CONTEXT = json.dumps({"prompt": "P", "messages": [{"role": "user", "content": "P"}], "row": {"level": 2}})


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_rewards_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def settings(reward: dict[str, Any]) -> Settings:
    return make_settings({"model": {"path": "m"}, "data": {"path": "d"}, "reward": reward}, None, "x")


@pytest.fixture
def scores() -> Iterator[Callable[..., tuple[list[Score], dict[str, float]]]]:
    """Scores of responses, each of one more token than the one before, and the counts."""
    scorers = []

    def score(
        reward: dict[str, Any], texts: Sequence[str], **how: Any
    ) -> tuple[list[Score], dict[str, float]]:
        scorers.append(Scorer(settings(reward).reward, 100))
        responses = [Response(t, np.arange(i + 1, dtype=np.int32), "stop") for i, t in enumerate(texts)]
        results = asyncio.run(scorers[-1].score(responses, "5", CONTEXT, **how))
        counts = scorers[-1].pop_counts()
        again = scorers[-1].pop_counts()
        assert again == dict.fromkeys(counts, 0.0), "counted twice, or a series that ends"
        return results, counts

    yield score
    for scorer in scorers:
        scorer.close()


def reward_of(name: str, **more: Any) -> dict[str, Any]:
    return {"type": f"custom_rewards_of_test:{name}", **more}


def test_several_terms_each_with_what_it_asks_for(scores: Callable[..., Any], tmp_path: Path) -> None:
    terms = {
        "right": {"type": "answer_line", "wrong": 0.0},
        "old": reward_of("old", weight=2.0),
        "sees": reward_of("sees", target=2, weight=0.5),
        "ranks": reward_of("ranks", weight=0.25, failed=-4.0),
        "made": reward_of("Made", base=3, weight=0.0),
        "counts": reward_of("counts", wrong=-2.0),
        "swapped": reward_of("swapped"),
        "whole": reward_of("group"),
    }
    texts = ["Answer: 5", "5", "", "none"]
    results, counts = scores({"terms": terms, "overlong": {"buffer": 99, "factor": 1.0}}, texts)
    assert [s.correct for s in results] == [True, False, False, False], "the first term decides"
    assert [s.extracted for s in results] == ["5", None, None, None]
    overlong = [0.0, *(-n / 99 for n in (1, 2, 3))]
    assert [list(s.parts.values()) for s in results] == [
        [1.0, -1.0, 0.5, 2.0, 4.0, 0.5, 9.0, 9.0, overlong[0]],
        [0.0, 1.0, 1.0, 3.0, 4.0, 0.5, 1.0, 1.0, overlong[1]],
        [0.0, -1.0, 1.5, -4.0, 4.0, 0.5, 0.0, 0.0, overlong[2]],
        [0.0, -1.0, 2.0, 5.0, 4.0, -2.0, 4.0, 4.0, overlong[3]],
    ]
    assert list(results[0].parts) == [*terms, "overlong"]
    weights = [1.0, 2.0, 0.5, 0.25, 0.0, 1.0, 1.0, 1.0, 1.0]
    for score in results:
        assert score.reward == sum(w * v for w, v in zip(weights, score.parts.values(), strict=True))
    assert counts["reward/errors"] == 2, "no reward for the empty one of ranks, and for none of counts"
    assert counts["reward/counts/words"] == 4
    context = ["P", [{"role": "user", "content": "P"}], {"level": 2}]
    for i, text in enumerate(texts):
        whole = [text, "5", *context, list(range(i + 1)), "stop", 2]
        assert (tmp_path / f"seen{i + 1}").read_text() == repr(whole)


def with_context(monkeypatch: pytest.MonkeyPatch, **context: Any) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONTEXT", json.dumps(json.loads(CONTEXT) | context))


def test_a_function_of_verls_form(scores: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"data_source": "math", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
    with_context(monkeypatch, row=row)
    results, counts = scores(reward_of("verl"), ["7", "5"])
    assert [(s.reward, s.correct) for s in results] == [(1.0, True), (0.0, True)]
    assert counts["reward/correctness/acc"] == 3.0
    (scaled,), _ = scores(reward_of("verl", scale=2), ["7"])
    assert scaled.reward == len(repr(["math", "7", "7", {"index": 3}, 2.0]))
    results, _ = scores(reward_of("verl_part"), ["7", "5"])
    assert [(s.reward, s.correct) for s in results] == [(0.3, True), (0.3, False)], "acc decides"
    for name in ("verl_async", "verl_batch"):
        results, _ = scores(reward_of(name), ["7", "5"])
        assert [s.reward for s in results] == [1.0, 0.0]
    with_context(monkeypatch, row={"level": 2})  # the answer is that of the data
    for name in ("verl", "verl_async", "verl_batch"):
        results, _ = scores(reward_of(name), ["7", "5"])
        assert [s.reward for s in results] == [0.0, 1.0]


def test_a_function_of_trls_form(
    scores: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, _ = scores(reward_of("trl"), ["7", "5"])
    assert [(s.reward, s.correct) for s in results] == [(0.0, False), (1.0, True)]
    more = {"prompts": ["P", "P"], "completion_ids": [[0], [0, 1]]}
    assert literal_eval((tmp_path / "trl").read_text()) == [["7", "5"], ["5", "5"], [2, 2], more]
    assert [s.reward for s in scores(reward_of("trl_async"), ["7", "555"])[0]] == [2.0, 4.0]
    assert [s.reward for s in scores(reward_of("TRL", weighted=2), ["7", "555"])[0]] == [2.0, 6.0]
    with_context(monkeypatch, prompt="<user>P<assistant>")  # of a chat
    assert [s.reward for s in scores(reward_of("trl"), ["7", "5"])[0]] == [0.0, 1.0]
    completions, *_, columns = literal_eval((tmp_path / "trl").read_text())
    assert completions == [[{"role": "assistant", "content": text}] for text in ("7", "5")]
    assert columns["prompts"] == [[{"role": "user", "content": "P"}]] * 2
    with pytest.raises(UserError, match="has no setting 'scale'"):
        load_reward("reward", "custom_rewards_of_test:trl_async", {"scale": 1}, ())
    (score,), _ = scores(reward_of("trl_column"), ["7"])
    assert "'solution' is no column of the row (level) and no setting" in score.reason
    assert scores(reward_of("trl_column", solution=2), ["7"])[0][0].reward == 1.0
    with pytest.raises(UserError, match=r"reward.threshold: .* needs this setting"):
        load_reward("reward", "custom_rewards_of_test:verl_needs", {}, ())


def test_no_reward_of_one_of_trls_functions(scores: Callable[..., Any]) -> None:
    terms = {"first": reward_of("trl"), "some": reward_of("trl_some")}
    results, counts = scores({"terms": terms}, ["7", "5"])
    assert [s.parts["some"] for s in results] == [1.0, 0.0], "the sum is that of the other terms"
    assert counts["reward/some/none"] == 1.0
    assert not any(s.failures for s in results)
    results, counts = scores(reward_of("trl_some"), ["7", "5"])
    assert [len(s.failures) for s in results] == [0, 1], "no term gives a reward"


def test_one_reward_with_settings_keeps_the_form_of_one(scores: Callable[..., Any]) -> None:
    results, counts = scores(reward_of("sees", target=4), ["a", "b"])
    assert [(s.reward, s.parts, s.correct) for s in results] == [
        (0.25, {"correctness": 0.25}, True),
        (0.5, {"correctness": 0.5}, True),
    ]
    assert list(counts) == [f"reward/{name}" for name in ("timeouts", "crashes", "out_of_memory", "errors")]
    terms = {"right": {"type": "boxed"}, "sees": reward_of("sees")}
    (evaluated,), _ = scores({"terms": terms}, ["\\boxed{5}"], first_only=True)
    assert (evaluated.correct, evaluated.parts) == (True, {"right": 1.0}), "evaluations need no more"


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("wrong", {}, "has an argument 'prompt', but none named 'response'; name that one so"),
        ("both", {}, "asks for 'response' and 'responses': keep"),
        ("taken", {}, "has a setting 'weight', which is a key of the section itself; give it another name"),
        ("needs", {}, "reward.target: custom_rewards_of_test:needs needs this setting; add it"),
        ("needs", {"target": "x"}, "reward.target: Input should be a valid integer"),
        ("sees", {"tarte": 1}, "has no setting 'tarte'; did you mean 'target'?"),
        ("Asks", {}, "is called with an argument 'rows', which rewards do not have; they have response,"),
        ("Made", {}, "reward.base: custom_rewards_of_test:Made needs this setting"),
    ],
)
def test_what_is_wrong_is_one_line(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_reward("reward", f"custom_rewards_of_test:{name}", more, ("type", "weight"))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_each_wrong_term_is_told_before_the_start() -> None:
    terms = {"a": reward_of("sees", tarte=1), "b": reward_of("none"), "c": reward_of("old")}
    with pytest.raises(UserError) as error:
        Scorer(settings({"terms": terms}).reward, 1).close()
    first, second = str(error.value).splitlines()
    assert first.startswith("reward.terms.a.tarte: ")
    assert second.startswith("reward.terms.b.type: ")


def test_async_calls_run_together_and_fail_alone(scores: Callable[..., Any]) -> None:
    texts = ["hang", "crash", *("x" * n for n in range(1, 17))]
    results, counts = scores(reward_of("waits", wrong=-1.0) | {"async_deadline": 2.0}, texts)
    assert [score.reward for score in results] == [-1.0, -1.0, *range(1, 17)]
    assert (counts["reward/timeouts"], counts["reward/crashes"]) == (1, 1)
    assert [score.reason.rpartition(": ")[2].partition(" at ")[0] for score in results[:2]] == [
        "ended after 2 s",
        "the process died",
    ]


def test_own_time_outs_and_cancelled_tasks_are_errors(scores: Callable[..., Any]) -> None:
    results, counts = scores(reward_of("raises", wrong=-1.0), ["own limit", "cancelled", "fine"])
    assert [score.reward for score in results] == [-1.0, -1.0, 1.0]
    expected = ("TimeoutError", "async with asyncio"), ("CancelledError", "await task")
    for score, (name, line) in zip(results[:2], expected, strict=True):
        reason, _, place = score.reason.rpartition(" at ")
        assert reason == f"custom_rewards_of_test:raises: error: {name}"
        assert line in MODULE.splitlines()[int(place.rpartition(":")[2]) - 1]
    assert (counts["reward/timeouts"], counts["reward/errors"]) == (0, 2)


def test_a_blocking_call_is_killed_and_the_others_are_repeated(
    scores: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_workers, "GRACE_SECONDS", 0.5)
    texts = ["block", "crash once", *("x" * n for n in range(1, 9))]
    results, counts = scores(
        reward_of("waits", seconds=0.0) | {"async_deadline": 1.0, "concurrency": 1}, texts
    )
    assert [score.reward for score in results] == [-1.0, 10.0, *range(1, 9)]
    assert (counts["reward/timeouts"], counts["reward/crashes"]) == (1, 0)


# -- judges --------------------------------------------------------------------------------------------------


@pytest.fixture
def judge() -> Iterator[StandInJudge]:
    with stand_in_judge() as server:
        yield server


def judged(judge: StandInJudge, **more: Any) -> dict[str, Any]:
    quick = {"timeout": 3.0, "retries": 1, "backoff": 0.01, "question": "{response}", "highest": 100}
    base = {"type": "rpg_megatron.rewards.judge:Judge", "url": judge.url, "model": "m"}
    return base | quick | {"failed": -0.5, "prompt_cost": 2.0, "output_cost": 10.0, "rest_after": 99} | more


def test_a_judge_that_fails_costs_scores_and_counts_them(
    judge: StandInJudge,
    scores: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "s3cret")
    bad = ["slow", "broken", "refused", "garbage", "dies", "vague", "half", "x" * 101]
    good = ["once", *("y" * n for n in (0, 7, 50))]
    monkeypatch.setenv("URL_OF_TEST", judge.url)
    reward = judged(judge, key_variable="KEY_OF_TEST", url="$URL_OF_TEST")
    results, counts = scores(reward, [*bad, *good])
    assert [s.reward for s in results] == [*[-0.5] * 8, 0.04, 0.0, 0.07, 0.5]
    totals = {key.removeprefix("reward/correctness/"): value for key, value in counts.items()}
    assert totals == {
        "reward/timeouts": 0.0,
        "reward/crashes": 0.0,
        "reward/out_of_memory": 0.0,
        "reward/errors": 8.0,
        "failures": 8.0,
        "skipped": 0.0,
        "requests": float(sum(judge.requests.values())),
        "timeouts": 2.0,
        "errors": 2.0 + 1 + 2 + 2 + 1,
        "garbage": 2.0,
        "unreadable": 2.0,
        "tokens": 6 * 110.0,
        "cost": pytest.approx(6 * (200 + 100) / 1e6),
    }
    assert {question: judge.requests[question] for question in bad[:-1]} == dict(
        slow=2, broken=2, refused=1, garbage=2, dies=2, vague=1, half=2
    )
    assert judge.keys == {"bearer s3cret"}
    logged = capfd.readouterr().err  # the process's, which goes to the sampler's log
    for kind in ("within 3 s", "status 500", "status 401", "than a chat completion", "no score between"):
        assert logged.count(kind) == 1, logged
    assert "s3cret" not in logged + caplog.text + "".join(s.reason for s in results)
    causes = {failure.detail for score in results for failure in score.failures}
    assert causes == {
        f"judge $URL_OF_TEST: {cause}"
        for cause in (
            "did not answer within 3 s",
            "answered with status 500",
            "answered with status 401",
            "answered with something else than a chat completion",
            "cannot be reached: ServerDisconnectedError",
            "no score between lowest and highest where pattern looks for it",
            "cannot be reached: ClientPayloadError",
        )
    }


def test_no_more_requests_at_a_time_than_allowed(judge: StandInJudge, scores: Callable[..., Any]) -> None:
    judge.delay = 0.05
    reward = judged(judge, lowest=-20, highest=20) | {"concurrency": 3}
    results, _ = scores(reward, ["z" * n for n in range(20)])
    assert [s.reward for s in results] == [(n + 20) / 40 for n in range(20)]
    assert judge.most == 3


def test_a_judge_that_is_down_is_left_alone(judge: StandInJudge, scores: Callable[..., Any]) -> None:
    reward = judged(judge, rest_after=2, retries=0) | {"concurrency": 1}
    results, counts = scores(reward, ["broken 0", "fine", *(f"broken {n}" for n in range(1, 10))])
    assert [s.reward for s in results] == [-0.5, 0.04, *[-0.5] * 9]
    assert list(judge.requests) == ["broken 0", "fine", "broken 1", "broken 2"], "two failures in a row"
    assert counts["reward/correctness/skipped"] == 7


def test_a_judge_is_asked_again_after_waits_that_grow(
    judge: StandInJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def waits_of(text: str) -> list[float]:
        waits.clear()
        client = Judge(JudgeSettings(url=judge.url, model="m", question="{response}"))
        with pytest.raises(NoReward):
            await client(text, "5", "P")
        await client._http.close()
        return list(waits)

    monkeypatch.setattr(http_client, "asyncio", SimpleNamespace(sleep=sleep))
    for number, wait in enumerate(delays := asyncio.run(waits_of("broken"))):
        assert 0.5 * 2**number <= wait <= 1.5 * 2**number
    assert len(delays) == 3
    assert asyncio.run(waits_of("busy")) == [7.0] * 3, "the server's Retry-After"
    for judge.retry_after in ("²", "-5", "nan", "Wed, 21 Oct", "9" * 400):
        assert len(delays := asyncio.run(waits_of("busy"))) == 3
        assert max(delays) <= (30.0 if "9" in judge.retry_after else 6.0)
    assert asyncio.run(waits_of("moved")) == []
    assert judge.requests["moved"] == 1, "the key is for the server of the settings only"


def test_of_a_judges_answer_4_mib_are_read(judge: StandInJudge) -> None:
    async def scores() -> list[float]:
        client = Judge(JudgeSettings(url=judge.url, model="m", question="{response}", highest=99, retries=0))
        values = [(await client("long", "5", "P"))[0]]
        with pytest.raises(NoReward):
            await client("too long", "5", "P")
        await client._http.close()
        return values

    assert asyncio.run(scores()) == [4 / 99]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "http://user:pass@a/v1"}, "and hold no user or password"),
        ({"url": "localhost:8001"}, "reward.url: must begin with http://"),
        ({"question": "{respons}"}, "reward.question: must hold {response}"),
        ({"pattern": "score"}, "reward.pattern: needs a group"),
        ({"highest": -1}, "reward: highest must be above lowest"),
        ({"key_variable": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set; export it"),
        ({"url": "$NO_SUCH_URL"}, "the environment variable NO_SUCH_URL is not set; export it"),
        ({"modl": "m"}, "did you mean 'model'?"),
    ],
)
def test_a_wrong_judge_is_told_before_the_start(change: dict[str, Any], message: str) -> None:
    settings = {"url": "http://a/v1", "model": "m", "question": "{response}"} | change
    with pytest.raises(UserError) as error:
        load_reward("reward", "rpg_megatron.rewards.judge:Judge", settings, ("type",))
    assert message in str(error.value)
