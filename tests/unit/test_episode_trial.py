"""The episode is run before a run, so that a wrong one costs seconds and not the start of the engines.

Why: each case was found only after the engines were up. A real process with the worker, its processes and the
gateway; the engine is the stand-in of the check. Not covered: an episode that needs minutes to import.
"""

import asyncio
from pathlib import Path

import pytest

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.launcher import episode_trial
from rpg_megatron.launcher.checks import CHECKS
from rpg_megatron.launcher.episode_trial import try_episode
from tests.support.ranks import ROOT

EPISODES = """
import asyncio
from rpg_megatron.rollout.episode import Episode, TokenLimit

async def right(task, generate, score):
    turn = await generate(task.prompt)
    await generate(turn.context + task.encode("again"))
    return Episode(await score(turn.text))

async def no_await(task, generate, score):
    turn = generate(task.prompt)
    return Episode(float(len(turn.text)))

async def no_await_of_the_score(task, generate, score):
    turn = await generate(task.prompt)
    return Episode(score(turn.text))

async def a_float(task, generate, score):
    await generate(task.prompt)
    return 1.0

async def messages(task, generate, score):
    await generate([{"role": "user", "content": task.text}])
    return Episode(1.0)

async def text(task, generate, score):
    await generate(task.text)
    return Episode(1.0)

async def encoded_again(task, generate, score):
    turn = await generate(task.prompt)
    await generate(task.encode("x" + task.text + turn.text))
    return Episode(1.0)

async def no_turn(task, generate, score):
    return Episode(1.0)

async def two_kinds(task, generate, score):
    await generate(task.prompt)
    return Episode(1.0 if task.seed % 2 else None)

async def endless(task, generate, score):
    context = task.prompt
    while True:
        try:
            context = (await generate(context)).context
        except TokenLimit:
            pass

async def blocks(task, generate, score):
    while True:
        pass

async def reads_a_number(task, generate, score):
    turn = await generate(task.prompt)
    return Episode(float(int(turn.text)))

async def has_no_server(task, generate, score):
    await generate(task.prompt)
    await asyncio.open_connection("127.0.0.1", 9)
"""
long = pytest.mark.long


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_episodes_of_test.py").write_text(EPISODES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("rpg_megatron.launcher.episode_trial._START", 200.0)
    return ROOT / "examples" / "quickstart.yaml"


def key(episode: str) -> str:
    return f"rollout.episode={{type: own_episodes_of_test:{episode}, deadline: 3}}"


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (
            "no_await",
            "AttributeError: 'coroutine' object has no attribute 'text' at .*own_episodes_of_test.py:12",
        ),
        pytest.param("no_await_of_the_score", "TypeError: float.* not 'coroutine'", marks=long),
        ("a_float", "TypeError: it returned float instead of an Episode"),
        ("messages", "generate is called with something that is no list of token ids"),
        pytest.param("text", "generate is called with something that is no list of token ids", marks=long),
        pytest.param("encoded_again", "do not begin with the .* tokens of the conversation so", marks=long),
        pytest.param("no_turn", "it ended without a turn of the policy", marks=long),
        pytest.param("two_kinds", "return rewards of different kinds", marks=long),
        ("endless", "timeout: ended after 3 s"),
        pytest.param("blocks", "timeout: ended after 3 s", marks=long),
    ],
)
def test_a_wrong_episode_is_an_error(run: Path, episode: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        try_episode(load_settings(run, [key(episode)]))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("rollout.episode")
    assert "set guards.reward_failures=warn to start anyway" in str(error.value)


def test_what_an_episode_makes_of_a_senseless_text_is_a_warning(run: Path) -> None:
    (note,) = try_episode(load_settings(run, [key("reads_a_number")]))
    assert "ValueError: invalid literal for int()" in note
    assert try_episode(load_settings(run, [key("right")])) == []


@long
def test_servers_and_guards(run: Path) -> None:
    (note,) = try_episode(load_settings(run, [key("has_no_server")]))
    assert "ConnectionRefusedError" in note
    (warning,) = try_episode(load_settings(run, [key("a_float"), "guards.reward_failures=warn"]))
    assert "it returned float" in warning


def test_when_it_is_not_called(run: Path) -> None:
    assert try_episode(load_settings(run)) == []
    assert try_episode(load_settings(run, [key("blocks"), "guards.reward_failures=off"])) == []
    (note,) = try_episode(load_settings(run, [key("blocks")]), offline=True)
    assert note.endswith("was not called: it may need a server; train and doctor call it")
    names = [check.name for check in CHECKS]
    assert names.index("own code") < names.index("episode"), "what cannot be imported is told first"


def test_a_turn_ends_as_in_the_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the token that the chat template writes after a turn."""
    end, stops = 7, []

    def worker(*arguments: object) -> None:
        stops.extend(arguments[-1])
        raise InterruptedError

    monkeypatch.setattr("rpg_megatron.rollout.worker.Worker", worker)
    monkeypatch.setattr("rpg_megatron.data.chat_rendering.turn_end", lambda _: end)
    with pytest.raises(InterruptedError):
        asyncio.run(episode_trial._run(load_settings(run, [key("right")]), tmp_path))
    assert end in stops
