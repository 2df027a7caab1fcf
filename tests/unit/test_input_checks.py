"""The inputs of a run are checked before a process starts: reward function, lengths of prompts, disk, batch.

Why: found later, each of them costs the start of all engines, or the last checkpoint. Not covered: broken
lines of data (test_prompts, test_datasets), the doctor's report (tests/integration/test_doctor_command).
"""

import io
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rpg_megatron.commands.convert.command import open_hf
from rpg_megatron.commands.convert.inspect import inspect_checkpoint
from rpg_megatron.commands.plan.command import run_plan
from rpg_megatron.commands.plan.plan import find_target
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.data.problems import read_problems
from rpg_megatron.data.prompts import fit_prompts, load_prompts
from rpg_megatron.data.tokenizer_file import open_tokenizer
from rpg_megatron.launcher import checks
from rpg_megatron.launcher.checks import CheckedRun, check_start, run_checks
from rpg_megatron.launcher.input_checks import check_data, check_disk, disk_bytes
from tests.support.checks import doctor_rows

GIB = 1024**3


def shape_of(settings: Settings):
    return read_model_shape(settings.model.path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.type=nomod:nope", "reward.type: nomod:nope: there is no module 'nomod'"),
        ("reward.type=json:nope", "reward.type: json:nope: the module json has no 'nope'"),
        ("data.max_prompt_tokens=1", "all 8 prompts are longer than 1 tokens; raise data.max_prompt_tokens"),
        (
            "evaluation={data: {path: HELD, max_prompt_tokens: 1}}",
            "all 8 prompts are longer than 1 tokens; raise evaluation.data.max_prompt_tokens",
        ),
    ],
)
def test_train_doctor_and_plan_tell_of_bad_inputs(config_file: Path, override: str, message: str) -> None:
    override = override.replace("HELD", str(config_file.parent / "train.jsonl"))
    settings = load_settings(config_file, [override])
    with pytest.raises(UserError) as error:
        check_start(CheckedRun(settings))
    assert message in str(error.value)
    failed = [row for row in doctor_rows(settings, "data", "reward") if row.verdict == "failed"]
    assert len(failed) == 1
    assert message in f"{failed[0].found}; {failed[0].fix}"
    with pytest.raises(UserError) as planned:
        run_plan(settings, find_target(settings, None), sweep=False, as_json=True)
    assert str(planned.value) == str(error.value)


@pytest.mark.parametrize("command", ["train", "doctor"])
@pytest.mark.parametrize(
    ("override", "waits"),
    [
        ("reward.type=my_slow:reward", "waiting for the check: reward (my_slow:reward)\n"),
        ("advantage={type: 'my_slow:advantages'}", "waiting for the check: own code (my_slow:advantages)\n"),
        (
            "data={source: {type: 'my_slow:rows'}, max_prompt_tokens: 64}",
            "reading the data (my_slow:rows; an endless source needs data.limit)\n",
        ),
    ],
)
def test_a_module_that_is_waited_for_is_named(
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    waits: str,
    command: str,
) -> None:
    """Its import ends only when the line has been printed."""
    go = tmp_path / "go"
    (tmp_path / "my_slow.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\n"
        "def reward(response, answer):\n    return 1.0\n"
        "def advantages(rewards, groups, lengths):\n    return rewards\n"
        "def rows():\n    return ({'prompt': 'What is 1+1?', 'answer': '2'} for _ in range(8))\n"
    )

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            if "my_slow" in text:
                go.touch()
            return super().write(text)

    terminal = Terminal()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(checks, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(sys, "stderr", terminal)
    settings = load_settings(config_file, [override])
    if command == "train":
        check_start(CheckedRun(settings))
    else:
        assert {row.verdict for row in doctor_rows(settings, "data", "reward", "own code")} == {"ok"}
    assert waits in terminal.getvalue()


def test_what_is_only_odd_is_a_warning(config_file: Path) -> None:
    lengths = sorted(
        len(ids)
        for ids in open_tokenizer(load_settings(config_file).model.path, chat=False)(
            [p.text for p in read_problems(load_settings(config_file).data)], add_special_tokens=True
        )["input_ids"]
    )
    assert check_data(load_settings(config_file)) == []
    lines = [json.dumps({"prompt": f"What is {i}+{i}?" + " again" * i, "answer": "1"}) for i in range(8)]
    (config_file.parent / "train.jsonl").write_text("\n".join(lines))
    odd = [f"data.max_prompt_tokens={lengths[0] + 2}", "rollout.prompts_per_step=10"]
    odd += ["rollout.samples_per_prompt=1", "data.limit=6"]
    alone, long, few = run_checks(CheckedRun(load_settings(config_file, odd)))
    assert "of 6 prompts are longer than" in long
    assert "are left out (data.max_prompt_tokens" in long
    assert few.startswith("data: 6 problems, fewer than the 10 of a step (rollout.prompts_per_step)")
    assert alone.startswith("rollout.samples_per_prompt is 1, so advantage.type rpg has no group")
    rows = doctor_rows(load_settings(config_file, odd), "settings without effect", "data")
    assert [row.verdict for row in rows] == ["warning", "warning", "warning"]
    enough = [*odd[1:3], "advantage.type=batch_mean", "data.limit=8"]
    assert len(check_data(load_settings(config_file, enough))) == 1


def test_the_disk_must_have_room_for_a_checkpoint(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(config_file)
    shape, usage = shape_of(settings), namedtuple("usage", "total used free")

    def free(nbytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(nbytes, 0, nbytes))

    one_checkpoint, all_checkpoints = disk_bytes(settings, shape, checkpoints=1), disk_bytes(settings, shape)
    free(all_checkpoints)
    assert check_disk(settings, shape) == []
    free(all_checkpoints - 1)
    (warning,) = check_disk(settings, shape)
    assert "checkpoints and export need" in warning
    assert " MiB free" in warning, "of a tiny model, not 0.0 GiB"
    free(one_checkpoint - 1)
    with pytest.raises(UserError, match=r"one checkpoint and the export need .*; remove old runs, lower"):
        check_disk(settings, shape)
    assert (
        check_disk(load_settings(config_file, ["checkpoint.every=null", "export.enabled=false"]), shape) == []
    )


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("evaluation={data: {path: BAD}}", "evaluation.data"),
        ("evaluation={sets: [{name: a, path: GOOD}, {name: b, path: BAD}]}", "evaluation.sets[1]"),
        ("data={mixture: [{path: GOOD}, {path: BAD}]}", "data.mixture[1]"),
        ("data={path: BAD}", "data"),
    ],
)
@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"question": "1+1", "answer": "2"}', "", "is missing (keys of this line: 'question', 'answer'); "
         "add it or set KEY.prompt_key"),
        ('{"prompt": "1+1", "answer": "2"}', ", answer_after: '#'", "set KEY.answer_after to the marker"),
        (None, "", "KEY.path: "),
        ('{"prompt": "1+1", "answer": "2"}', ", preset: amc24", "KEY.preset: 'amc24' is not known"),
    ],
)  # fmt: skip
def test_a_hint_names_the_key_of_its_section(
    config_file: Path, tmp_path: Path, section: str, key: str, line: str | None, options: str, message: str
) -> None:
    good, bad = config_file.parent / "train.jsonl", tmp_path / "bad.jsonl"
    if line is not None:
        bad.write_text(line + "\n")
    override = section.replace("GOOD", str(good)).replace("BAD", f"{bad}{options}")
    with pytest.raises(UserError) as error:
        check_data(load_settings(config_file, [override]))
    assert message.replace("KEY", key) in str(error.value)


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}\n"
CHAT += "{%- if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize("chat", [False, True])
def test_lengths_are_those_of_the_sampler(config_file, checkpoint, tmp_path, chat: bool) -> None:
    from transformers import AutoTokenizer

    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT)
    settings = load_settings(config_file, [f"data.chat={chat}", f"model.path={model}"])
    problems = read_problems(settings.data)
    tokenizer = open_tokenizer(model, chat=chat)
    assert tokenizer is not None
    actual, _ = fit_prompts(problems, settings.data, tokenizer)
    expected, _ = fit_prompts(problems, settings.data, AutoTokenizer.from_pretrained(str(model)))
    assert [p.tokens.tolist() for p in actual] == [p.tokens.tolist() for p in expected]


def test_a_tokenizer_that_cannot_be_read_here_is_not_judged(config_file: Path, tmp_path: Path) -> None:
    assert open_tokenizer(tmp_path, chat=False) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert open_tokenizer(tmp_path, chat=False) is None


def test_the_checks_import_no_torch(config_file: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom rpg_megatron.config import load_settings\n"
        "from rpg_megatron.launcher.checks import CheckedRun, check_start\n"
        "check_start(CheckedRun(load_settings(Path(sys.argv[1]), ['reward.type=operator:eq'])))\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(config_file)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def copy_with_tokens(checkpoint: Path, folder: Path, *added: str, **config: object) -> Path:
    """The model with more tokens in its tokenizer, and a changed config.json."""
    from tokenizers import AddedToken, Tokenizer

    model = shutil.copytree(checkpoint, folder)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.save(str(model / "tokenizer.json"))
    described = json.loads((model / "config.json").read_text()) | config
    (model / "config.json").write_text(json.dumps(described))
    return model


def test_tokens_that_the_model_does_not_have(config_file: Path, checkpoint: Path, tmp_path: Path) -> None:
    """An embedding of 258 rows: of the added tokens 257, 258 and 259 the first is its last row."""
    model = copy_with_tokens(checkpoint, tmp_path / "model", "<a>", "<b>", "<c>", vocab_size=258)
    settings = load_settings(config_file, [f"model.path={model}"])
    data = config_file.parent / "train.jsonl"
    for declared in ("<a>", "<a> again"):
        data.write_text(json.dumps({"prompt": declared, "answer": "1"}) + "\n")
        odd, few = check_data(settings)
        assert odd.startswith(
            "model.path: the tokenizer declares tokens up to 259, but the model's embedding"
        )
        assert few.startswith("data: 1 problems")
    data.write_text(json.dumps({"prompt": "1+1 <b>", "answer": "1"}) + "\n")
    with pytest.raises(UserError, match=r"train\.jsonl:1: its token 258 \('<b>'\) is beyond .* of 258 rows"):
        check_data(settings)
    with pytest.raises(UserError, match="its token 258"):  # as the sampler does, which sees every prompt
        load_prompts(settings.data, open_tokenizer(model, chat=False), vocab=258)
    assert check_data(load_settings(config_file, [f"model.path={checkpoint}"]))[1:] == []


def test_a_checkpoint_is_one_model_for_trainer_and_engine(config_file, checkpoint, tmp_path) -> None:
    """Engines use a head that differs from the embedding, though config.json ties them."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    weights = load_file(model / "model.safetensors")
    save_file(
        weights | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in (0, 1)},
        model / "model.safetensors",
    )
    settings = load_settings(config_file, [f"model.path={model}"])
    (note,) = run_checks(CheckedRun(settings))
    assert note.startswith("model.path: 2 buffers are not read (model.layers.0.self_attn.rotary_emb.inv_freq")
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    requests = [
        lambda: check_start(CheckedRun(settings)),
        lambda: run_plan(settings, find_target(settings, None), sweep=False, as_json=True),
        lambda: open_hf(model),
        lambda: run_checks(CheckedRun(settings, frozenset({"weights", "engines"}))),  # as eval does
    ]
    for request in requests:
        with pytest.raises(UserError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false"):
            request()
    (problem,) = inspect_checkpoint(model).problems
    assert "lm_head.weight differs" in problem


def test_responses_that_cannot_end(config_file: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The only token that ends a response is one that the model cannot give; others may be odd."""
    model = copy_with_tokens(checkpoint, tmp_path / "model", vocab_size=256)
    (config_file.parent / "train.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "1"}) + "\n")
    with pytest.raises(UserError, match=r"no response can end, .* \(256\) is beyond .* of 256 rows"):
        check_data(load_settings(config_file, [f"model.path={model}"]))
    check_data(load_settings(config_file, [f"model.path={model}", "rollout.stop_token_ids=[10]"]))
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 300]}')
    check_data(load_settings(config_file, [f"model.path={model}"]))
