"""Each kind of reward failure is counted, reported with its line, and stops the run if it is frequent.

Why: a reward that fails on every response trains nothing, and such a run once ended as a healthy one. Each
kind is tried on all responses and on one in three, in real reward workers and with a real connection to a
judge; then before a run, as train, doctor and plan do. Not covered: the order of the calls in a run
(tests/integration), dynamic sampling and evaluations with failures (test_sampler).
"""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.objective import GuardSettings
from rpg_megatron.launcher.reward_trial import try_reward
from rpg_megatron.rewards.failures import FailureCount, RewardFailure, first_of_each, guard_failures
from rpg_megatron.rewards.reward import Response, Score, Scorer
from rpg_megatron.rewards.worker_process import NoReward, read_result
from tests.support.judges import StandInJudge, stand_in_judge

MODULE = """
import os, time

def one(response, row):
    if response == "raise": raise KeyError("no such key")
    if response == "nan": return float("nan")
    if response == "none": return None
    if response == "list": return [1.0]
    if response == "string": return "1.0"
    if response == "time out": time.sleep(1000)
    if response == "crash": os._exit(1)
    return len(row["meta"])

def group(responses):
    return [1.0] * (len(responses) - ("short" in responses))

class Never:
    def __call__(self, response): raise ValueError(response)

async def asks(response): raise ConnectionError("nobody listens")

def digits(response, answer): return float(response == answer and response.isdigit())
def short(response): return 0.0
"""
LINES = MODULE.splitlines()
GOOD = json.dumps({"prompt": "P", "messages": [], "row": {"meta": "x"}})
WAYS = {
    "raise": ("error: KeyError: 'no such key'", 'if response == "raise"'),
    "nan": ("error: it returned nan, not a finite number", "def one"),
    "none": ("error: it returned None", "def one"),
    "list": ("error: it returned a value of type list, not a bool, a number or None", "def one"),
    "string": ("error: it returned a value of type str, not a bool, a number or None", "def one"),
    "time out": ("timeout: killed after 0.3 s", "def one"),
    "crash": ("crash: the worker died", "def one"),
    "short": ("error: it returned 1 rewards for 2 responses", "def group"),
    "column": ("error: KeyError: 'meta'", 'len(row["meta"])'),
    "judge is down": ("error: judge JUDGE: cannot be reached: ServerDisconnectedError", None),
    "judge is slow": ("error: judge JUDGE: did not answer within 0.3 s", None),
}


@pytest.fixture(scope="module")
def judge() -> Iterator[StandInJudge]:
    with stand_in_judge() as server:
        yield server


@pytest.fixture(scope="module")
def scorers(judge: StandInJudge, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scorer]]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "failing_rewards_of_test.py").write_text(MODULE)
    server = {"url": judge.url, "model": "m", "question": "{response}", "retries": 0, "rest_after": 99}
    settings = {
        "one": {"type": "failing_rewards_of_test:one", "deadline": 0.3, "workers": 3},
        "group": {"type": "failing_rewards_of_test:group"},
        "judge": {"type": "rpg_megatron.rewards.judge:Judge", "timeout": 0.3, "highest": 99, **server},
    }
    from rpg_megatron.config.settings import make_settings

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        raw = {"model": {"path": "m"}, "data": {"path": "d"}}
        by_name = {
            k: Scorer(make_settings(raw | {"reward": v}, None, "x").reward, 9) for k, v in settings.items()
        }
        yield by_name
        for scorer in by_name.values():
            scorer.close()


def scores_of(scorers: dict[str, Scorer], way: str, failing: list[bool]) -> list[Score]:
    async def score() -> list[Score]:
        return [s for fails in failing for s in await one(fails)]

    async def one(fails: bool) -> list[Score]:
        if way == "short":
            return await scorers["group"].score([response(way if fails else "fine")] * 2, "5")
        if way.startswith("judge"):
            text = {"judge is down": "dies", "judge is slow": "slow"}[way] if fails else "fine"
            return await scorers["judge"].score([response(text)], "5", GOOD)
        bad = json.dumps(json.loads(GOOD) | {"row": {}})
        context = bad if fails and way == "column" else GOOD
        return await scorers["one"].score([response(way if fails else "fine")], "5", context)

    return asyncio.run(score())


def response(text: str) -> Response:
    return Response(text, np.zeros(1, np.int32), "stop")


@pytest.mark.parametrize("share", [1.0, 1 / 3])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_fail_is_counted_and_told(
    scorers: dict[str, Scorer], judge: StandInJudge, tmp_path: Path, way: str, share: float
) -> None:
    scores = scores_of(scorers, way, [True] if share == 1 else [False, True, False])
    failures = [f.at("aime", 7, "What is\n1+1?") for s in scores for f in s.failures]
    first = first_of_each(failures)
    count = FailureCount("aime", len(failures), len(scores), first)
    assert (count.share, len(first)) == (pytest.approx(share), 1)
    reason, line = WAYS[way]
    reason = reason.replace("JUDGE", judge.url)
    if line is not None:
        number = next(n for n, text in enumerate(LINES, 1) if line in text)
        reason += f" at {first[0].place}"
        assert first[0].place.endswith(f"/failing_rewards_of_test.py:{number}")
    assert first[0].reason == reason
    assert reason in next(s for s in scores if s.failures).reason, "in the rollouts"
    (warning,), message = guard_failures([count], GuardSettings(), "step 3")
    assert warning.startswith(
        f"step 3: the reward failed on {len(failures)} of {len(scores)} responses of the "
    )
    assert warning.endswith(f"held-out set aime, prompt 7 ('What is 1+1?'): {reason}")
    assert (message is not None) == (share == 1)
    assert message is None or message.endswith(warning.partition("first: ")[2])
    assert guard_failures([count], GuardSettings(reward_failures="warn"), "")[1] is None
    assert guard_failures([count], GuardSettings(reward_failures="off"), "") == ([], None)


def test_what_did_not_fail_says_nothing(scorers: dict[str, Scorer]) -> None:
    scores = scores_of(scorers, "raise", [False, False])
    assert [(s.reward, s.failures) for s in scores] == [(1.0, ())] * 2
    assert guard_failures([FailureCount("", 0, 2)], GuardSettings(), "step 1") == ([], None)
    assert guard_failures([FailureCount()], GuardSettings(), "step 1") == ([], None)


def test_the_share_itself_stops_and_each_set_counts_for_itself() -> None:
    failure = RewardFailure("reward.type m:f", "error", "it returned None")
    half, less = FailureCount("a", 2, 4, [failure]), FailureCount("b", 1, 3, [failure._replace(set="b")])
    warnings, message = guard_failures([half, less], GuardSettings(), "step 1")
    assert len(warnings) == 2
    assert message is not None
    assert "held-out set a (50.0%), and" in message
    assert "held-out set b" not in message
    assert half.add(FailureCount("a", 0, 4)).share == 0.25


def test_the_first_of_each_kind_is_kept_whatever_its_message() -> None:
    failures = [
        RewardFailure("reward", "error", f"ValueError: {i}", "f.py:3", name, i)
        for i in (1, 2)
        for name in "ab"
    ]
    failures.append(RewardFailure("reward", "error", "ValueError: 1", "f.py:4", "a", 3))
    failures.append(RewardFailure("reward", "error", "KeyError: 1", "f.py:3", "a", 4))
    kept = first_of_each(failures)
    assert [(f.set, f.prompt_id) for f in kept] == [("a", 1), ("b", 1), ("a", 3), ("a", 4)]
    assert len(first_of_each(RewardFailure("t", "error", f"{i}") for i in range(99))) == 20


@pytest.mark.parametrize(
    ("returned", "counts", "expected"),
    [
        ([0.5, np.float64(1)], {}, [0.5, 1.0]),
        (([0.5, True], {"a": 1}), {"a": 1}, [0.5, True]),
        ([(0.5, {"a": 1, "b": 2}), (None, {"a": 2})], {"a": 3, "b": 2}, [0.5, None]),
        ([(0.5, {"a": 1}), 1.0], {"a": 1}, [0.5, 1.0]),
        ([(0.5, {"a": 1}), "1.0"], None, "type str"),
        (1.0, None, "a value of type float, not a list"),
        ({"a": 1.0, "b": 1.0}, None, "a value of type dict, not a list"),
        ("ab", None, "a value of type str, not a list"),
        ([1.0], None, "1 rewards for 2"),
    ],
)
def test_a_group_gives_a_list_or_pairs(returned: Any, counts: dict[str, float] | None, expected: Any) -> None:
    if counts is not None:
        assert read_result(returned, 2) == {"value": expected, "counts": counts}
        return
    with pytest.raises(NoReward, match=expected):
        read_result(returned, 2)


# -- before a run --------------------------------------------------------------------------------------------


@pytest.fixture
def settings(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(config_file.parent)
    Path("failing_rewards_of_test.py").write_text(MODULE)
    lines = [json.dumps({"prompt": f"{i}?", "answer": "5", "meta": "ab"}) for i in range(3)]
    Path("train.jsonl").write_text("\n".join(lines))
    Path("held.jsonl").write_text('{"prompt": "Held?", "answer": "raise"}\n')

    def make(reward: str, *overrides: str) -> Settings:
        heldout = "evaluation={data: {path: held.jsonl, max_prompt_tokens: 99}, name: held}"
        return load_settings(config_file, [f"reward={{type: {reward}}}", heldout, *overrides])

    return make


def test_the_reward_is_tried_on_each_set(settings: Any) -> None:
    reward = "failing_rewards_of_test:one"
    with pytest.raises(UserError) as error:
        try_reward(settings(reward))
    place = f"{Path('failing_rewards_of_test.py').resolve()}:5"
    assert str(error.value) == (
        f"reward.type {reward}, held-out set held, prompt 0 ('Held?'): error: KeyError: 'no such key' "
        f"at {place}; correct it, or set guards.reward_failures=warn to start anyway"
    )
    assert try_reward(settings(reward, "guards.reward_failures=warn")) == [str(error.value)]
    assert try_reward(settings(reward, "guards.reward_failures=off")) == []
    assert try_reward(settings("answer_line")) == []
    Path("held.jsonl").write_text('{"prompt": "Held?", "answer": "5"}\n')
    with pytest.raises(
        UserError, match=r"^reward.* held-out set held, .*: KeyError: 'meta' at .*py:12; correct"
    ):
        try_reward(settings(reward))
    Path("held.jsonl").unlink()
    assert try_reward(settings(reward)) == [], "the check of the data tells of that"


def test_a_reference_answer_that_gets_no_reward_is_told_with_its_row(settings: Any) -> None:
    Path("held.jsonl").write_text('{"prompt": "Held?", "answer": "five"}\n')
    reward = "failing_rewards_of_test:digits"  # 5 is right, five is not
    (note,) = try_reward(settings(reward))
    assert note == (
        f"reward.type {reward} gives 0 to the reference answer itself, 'five' (held.jsonl:1); correct it or "
        "evaluation.data.answer_key, unless a response needs more than the answer"
    )
    terms = f"{{right: {{type: answer_line}}, mine: {{type: '{reward}'}}}}"
    assert try_reward(settings("x", f"reward={{terms: {terms}}}")) == [], (
        "held-out sets use the first term only"
    )
    Path("train.jsonl").write_text('{"prompt": "5?", "answer": "five", "meta": "ab"}\n')
    assert try_reward(settings("x", f"reward={{terms: {terms}}}")) == [], "a second term may be a penalty"
    assert try_reward(settings("failing_rewards_of_test:short")) == [], "it does not look at the answer"


def test_a_group_has_the_size_of_the_run_and_a_plan_asks_nobody(settings: Any) -> None:
    terms = "{a: {type: 'failing_rewards_of_test:group'}, b: {type: 'failing_rewards_of_test:asks'}}"
    loaded = settings("x", f"reward={{terms: {terms}}}")
    (note,) = try_reward(loaded, offline=True)
    assert note.startswith("reward.terms.b.type failing_rewards_of_test:asks was not called: it may need a ")
    Path("train.jsonl").write_text('{"prompt": "A group?", "answer": "short"}')
    with pytest.raises(UserError) as error:
        try_reward(loaded)
    group, asks = str(error.value).splitlines()
    assert "training set, prompt 0 ('A group?'): error: it returned 3 rewards for 4 responses at" in group
    assert "reward.terms.b.type failing_rewards_of_test:asks, training set" in asks
    assert "ConnectionError: nobody listens" in asks


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (None, "cannot be reached: Connection refused"),
        (401, "refuses a request without a key (key_variable) (status 401)"),
        (503, "answered with status 503"),
        (404, None),
        (200, None),
    ],
)
def test_a_judge_is_asked_once(settings: Any, status: int | None, message: str | None) -> None:
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    from rpg_megatron.rewards.judge import Judge, JudgeSettings

    async def ask() -> str | None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        if status is None:
            server.close()
            await server.wait_closed()
        try:
            return await Judge(JudgeSettings(url=url, model="m", question="{response}")).find_problem()
        finally:
            server.close()

    assert asyncio.run(ask()) == message
    assert [r.split(b" HTTP")[0] for r in requests] == ([] if status is None else [b"GET /v1/models"])


def test_a_judge_that_is_down_is_told_before_the_start(settings: Any) -> None:
    with socket.socket() as free:  # bound, so that nobody else listens there
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        judge = {"url": url, "model": "m", "question": "{response}"}
        loaded = settings("x", f"reward={json.dumps(judge | {'type': 'rpg_megatron.rewards.judge:Judge'})}")
        with pytest.raises(UserError) as error:
            try_reward(loaded)
        assert str(error.value) == (
            f"reward.url: the judge at {url} cannot be reached: Connection refused; start it, correct the "
            "settings, or set guards.reward_failures=warn to start anyway"
        )
        assert [note.partition(":Judge ")[2] for note in try_reward(loaded, offline=True)] == [
            "was not called: it may need a server; train and doctor call it"
        ]
