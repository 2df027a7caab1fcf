"""Secrets among settings are refused, whatever section they are in, and what only looks similar passes.

Why: settings are written to the run's folder, sent to trackers, and shown in reports; a key that stood
there was read by all users of a node. A rule that refuses ``answer_key`` would be turned off. Not covered:
the environment of processes, and what code of the user writes itself.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import rpg_megatron
from rpg_megatron.config import UserError, load_settings
from rpg_megatron.config.secret_values import looks_secret, refuse_secrets
from rpg_megatron.system.forked_workers import ForkServer, Loader
from tests.support.ranks import ROOT

HIDDEN = "hunter2hunter2"


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("rollout.episode={type: 'a:b', search_key: sk-%s}", "rollout.episode.search_key"),
        ("rollout.episode={type: 'a:b', tools: [{name: x, apiKey: %s}]}", "rollout.episode.tools[0].apiKey"),
        ("rollout.episode={type: 'a:b', secrets: {search: %s}}", "rollout.episode.secrets.search"),
        ("rollout.dynamic={type: 'a:b', token: %s}", "rollout.dynamic.token"),
        ("reward={type: 'a:b', api_key: %s}", "reward.api_key"),
        ("reward={terms: {a: {type: 'a:b', password: %s}}}", "reward.terms.a.password"),
        ("reward={type: 'a:b', url: 'http://me:%s@host/v1'}", "reward.url"),
        ("reward={type: 'a:b', body: {headers: {Authorization: Bearer %s}}}", "reward.body.headers.Auth"),
        ("reward={type: 'a:b', headers: ['X-Api-Key: %s']}", "reward.headers[0]"),
        ("reward={type: 'a:b', key_variable: '%s-'}", "reward.key_variable"),
        ("reward={type: 'a:b', body: {note: 'ask with sk-proj-%s0123456789'}}", "reward.body.note"),
        ("teacher={url: 'https://me:%s@host/v1'}", "teacher.url"),
        ("teacher={url: 'https://host/v1?api_key=%s'}", "teacher.url"),
        ("data={source: {type: 'a:b', dsn: 'host=db user=me password=%s'}}", "data.source.dsn"),
        ("data={source: {type: 'a:b', credentials: {user: me, word: %s}}}", "data.source.credentials.word"),
        ("objective={type: 'a:b', hub_token: %s}", "objective.hub_token"),
        ("advantage={type: 'a:b', client_secret: %s}", "advantage.client_secret"),
        ("optimizer={schedule: {type: 'a:b', access_token: %s}}", "optimizer.schedule.access_token"),
        ("engine.arguments=[--hf-token, %s]", "engine.arguments[1]"),
        ("engine.arguments=[--api-key=%s]", "engine.arguments[0]"),
        ("trackers=[{type: 'a:b', passwd: %s}]", "trackers[0].passwd"),
    ],
)
def test_a_secret_is_refused_by_its_key_and_not_shown(config_file: Path, override: str, where: str) -> None:
    with pytest.raises(UserError) as error:
        load_settings(config_file, [override.replace("%s", HIDDEN)])
    message = str(error.value)
    assert where in message
    assert "environment variable" in message
    assert HIDDEN not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("answer_key", v) for v in ("solution", "answer_2", "reward_model.ground_truth", "7b_answer")),
        *(("key", v) for v in ("question", "ground_truth_answer_v2", "extra info", "col_2024")),
        ("prompt_key", "messages"),
        ("stop_token_ids", 151645),
        ("max_tokens", 512),
        ("tokenizer", "Qwen/Qwen2.5-0.5B"),
        *(("eos_token", v) for v in ("</s>", "<|im_end|>", "[SEP]", "###")),
        *(
            ("api_key", v)
            for v in ("$SEARCH_KEY", "${SEARCH_KEY}", "SEARCH_API_KEY", "EMPTY", "", None, False)
        ),
        *((name, "SEARCH") for name in ("key_variable", "api_key_variable", "password_file", "token_type")),
        ("secret", 42),  # of a game
        ("credentials", "/home/me/credentials.json"),
        *(
            ("url", v)
            for v in ("http://host:8000/v1?version=2", "ssh://git@host/x", "postgresql://me@host/db")
        ),
        ("url", "http://me:$PASSWORD@host"),
        ("template", "Password: {prompt}"),
        ("system", "Answer with key=value pairs; the password=secret is a joke. Token: none."),
        ("path", "/data/task-sk-8b/hf_checkpoints_2024/step_000100"),
        *((name, "north") for name in ("compass", "monkey", "author", "keyboard", "passage")),
    ],
)
def test_what_is_no_secret_passes(name: str, value: Any) -> None:
    assert not looks_secret(name, value)
    refuse_secrets({"reward": {"inner": [{name: value}]}})


def test_columns_of_rows_are_no_settings(config_file: Path) -> None:
    settings = load_settings(config_file, ["data.where={token: a1b2c3d4e5f6}"])
    assert settings.data.where == {"token": "a1b2c3d4e5f6"}


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/**/*.yaml")), ids=lambda file: file.stem)
def test_examples_pass(file: Path) -> None:
    from rpg_megatron.config.parsing import read_yaml

    refuse_secrets(read_yaml(file))


@pytest.mark.parametrize("part", ["a_", "!", "a=b ", "sk-", "://", "x@", "{", "[a", "A_", "/a.", "a1", "eyJ"])
def test_long_texts_take_no_time(part: str) -> None:
    """Regular expressions over texts of others: this would not end if one of them took quadratic time."""
    text = (part * 400_000)[:400_000] + "b2c3d4e5"
    for key in ("key", "password", "text"):
        with suppress(ValueError):
            refuse_secrets({key: text})


def test_settings_of_a_child_are_not_in_its_command_line(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_loader.py").write_text("def load(**arguments):\n    return print, arguments\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    arguments = {"settings": {"note": HIDDEN, "long": "x" * 300_000}}  # also more than a command line takes
    server = ForkServer(Loader("my_loader:load", {"note": HIDDEN}, "reward.type: my_loader:load", 1 << 32))
    try:
        assert server.description == {"note": HIDDEN}
        command = Path(f"/proc/{server._process[0].pid}/cmdline").read_bytes()
        assert b"fork_server" in command
        assert HIDDEN.encode() not in command
    finally:
        server.kill()
        server.close()
    monkeypatch.setattr("rpg_megatron.system.forked_workers._START_SECONDS", 60)
    (tmp_path / "my_loader.py").write_text(
        "def load(settings):\n    return print, {'n': len(settings['long'])}\n"
    )
    server = ForkServer(Loader("my_loader:load", arguments, "reward.type: my_loader:load", 1 << 32))
    assert server.description == {"n": 300_000}
    server.kill()
    server.close()


def test_a_notebooks_overrides_are_checked_before_they_are_a_command_line(config_file, monkeypatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started a process"))
    with pytest.raises(UserError, match=r"reward\.api_key looks like a secret"):
        rpg_megatron.train(config_file, {"reward": {"type": "a:b", "api_key": HIDDEN}})
