"""``rpg-megatron eval`` without engines: options, the output folder, resuming.

Why: an evaluation takes hours. It must not start over, nor silently mix the responses of two models or two
temperatures. Not covered: engines and processes (integration/test_evaluation_command).
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpg_megatron import cli
from rpg_megatron.commands.eval.output_dir import OutputDir, open_output_dir
from rpg_megatron.commands.eval.settings import EvalRequest, find_sets, make_request
from rpg_megatron.commands.eval.table import show_summary
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.data.prompts import Prompt
from rpg_megatron.evaluation.metrics import describe_set
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.evaluation.results_file import append_result, read_results
from rpg_megatron.launcher.run_dir import SUMMARY, hold_folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(5))
    )
    return file


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def request_(checkpoint: Path, data: Path) -> EvalRequest:
    return EvalRequest(checkpoint, files=[str(data)], sampling={"samples": ["4"]})


def prompts(count: int = 3) -> list[Prompt]:
    return [Prompt(2 * i, f"{i}+{i}=", str(2 * i), np.array([i + 1], np.int32)) for i in range(count)]


def result(prompt: Prompt, samples: int = 2) -> EvalResult:
    texts = [f"Answer: {i}\ud800" for i in range(samples)]  # models write whatever they like
    flags = [text == f"Answer: {prompt.answer}" for text in texts]
    return EvalResult(
        prompt.id,
        prompt.answer,
        prompt.text,
        texts,
        flags,
        [None] * samples,
        [3] * samples,
        ["stop"] * samples,
        "s",
    )


# -- results -------------------------------------------------------------------------------------------------


def test_what_is_done_is_read_in_the_order_of_the_data(tmp_path: Path) -> None:
    file, (first, second, third) = tmp_path / "s.jsonl", prompts()
    assert read_results(file, prompts(), 2) == []
    for prompt in (third, first):
        append_result(file, result(prompt))
    assert read_results(file, prompts(), 2) == [result(first), result(third)]
    append_result(file, result(second))
    assert read_results(file, prompts(), 2) == [result(p) for p in prompts()]


def test_a_line_that_was_never_finished_is_done_again(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    for prompt in prompts(2):
        append_result(file, result(prompt))
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    for cut in (1, len(lines[1]) // 2, len(lines[1]) - 1):
        file.write_bytes(lines[0] + lines[1][:cut])
        assert read_results(file, prompts(), 2) == [result(prompts()[0])]
        append_result(file, result(prompts()[1]))
        assert file.read_bytes() == content


def test_results_of_other_problems_are_refused(tmp_path: Path) -> None:
    file, problems = tmp_path / "s.jsonl", prompts()
    append_result(file, result(problems[1]))
    for changed in ([problems[0]], [replace(problems[1], text="other")], [replace(problems[1], answer="7")]):
        with pytest.raises(UserError, match=r"s.jsonl:1: the problem has changed .* choose another --out"):
            read_results(file, changed, 2)


@pytest.mark.parametrize("line", [b"{}", b"[1]", b"\xff", b'{"prompt_id": 0, "answer": "0"}', b"null"])
def test_damaged_lines_are_named(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "s.jsonl"
    append_result(file, result(prompts()[0]))
    file.write_bytes(file.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=r"s.jsonl:2: is not a problem with 2 responses; delete the line"):
        read_results(file, prompts(), 2)


# -- the folder ----------------------------------------------------------------------------------------------


def test_results_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "set.jsonl").symlink_to(tmp_path / "secret")
    for attempt in (
        lambda: append_result(tmp_path / "set.jsonl", result(prompts()[0])),
        lambda: read_results(tmp_path / "set.jsonl", prompts(), 2),  # would cut an incomplete line
    ):
        with pytest.raises(UserError, match=r"set\.jsonl: cannot be .* \(is a symbolic link, .*\); fix that"):
            attempt()
    assert (tmp_path / "secret").read_text() == "mine"


def opened(request: EvalRequest, out: Path | None) -> OutputDir:
    settings, model = make_request(request)
    return open_output_dir(out, settings, model.label)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_the_folder_of_another_user_is_refused(tmp_path: Path, request_: EvalRequest) -> None:
    (tmp_path / "out").mkdir()
    os.chown(tmp_path / "out", 12345, -1)
    with pytest.raises(UserError, match=r"--out: .*out belongs to another user; choose another folder"):
        opened(request_, tmp_path / "out")


def test_equal_settings_resume_and_others_show_the_difference(tmp_path: Path, request_: EvalRequest) -> None:
    out = tmp_path / "a" / "b"
    first = opened(request_, out)
    assert first.made
    assert first.summary() is None
    with pytest.raises(UserError, match="another evaluation is running there"):
        opened(request_, out)
    first.close()
    opened(replace(request_, overrides=["engine.replicas=2", "engine.max_sequences=7"]), out).close()
    for changed, lines in (
        (replace(request_, sampling={"samples": ["8"]}), ["evaluation.samples: 4 -> 8"]),
        (
            replace(request_, sampling={"samples": ["4"], "temperature": ["0.5"]}, overrides=["seed=3"]),
            ["evaluation.temperature: 1.0 -> 0.5", "seed: 0 -> 3"],
        ),
        (
            replace(request_, overrides=["data.template=Q {prompt}"]),
            ['evaluation.sets.sums.template: "{prompt}" -> "Q {prompt}"'],
        ),
        (replace(request_, overrides=["engine.arguments=[--x]"]), ['engine.arguments: [] -> ["--x"]']),
        (replace(request_, overrides=["reward.type=boxed"]), ['reward.type: "auto" -> "boxed"']),
    ):
        with pytest.raises(UserError, match="contains an evaluation with other settings") as caught:
            opened(changed, out)
        assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == lines
    assert not opened(request_, out).made


def test_other_weights_in_the_same_place_are_refused(
    tmp_path: Path, request_: EvalRequest, make_checkpoint: Callable[..., Path]
) -> None:
    model = make_checkpoint(tmp_path / "model")
    request = replace(request_, model=model)
    opened(request, tmp_path / "out").close()
    os.utime(model / "model.safetensors", ns=(1, 1))
    with pytest.raises(UserError, match=r"the model's files have changed: model\.safetensors"):
        opened(request, tmp_path / "out")


def test_a_folder_of_something_else_is_refused(tmp_path: Path, request_: EvalRequest) -> None:
    (tmp_path / "out").mkdir()
    opened(request_, tmp_path / "out").close()  # an empty one is accepted
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"contains thesis\.tex and no evaluation"):
        opened(request_, other)
    assert hold_folder(other) is not None, "nobody holds it"
    with pytest.raises(UserError, match=r"--out: .*thesis\.tex"):
        opened(request_, other / "thesis.tex")


def test_without_a_folder_the_settings_name_it(tmp_path, request_: EvalRequest, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = set()
    for request in (
        request_,
        request_,
        replace(request_, sampling={"samples": ["8"]}),
        replace(request_, overrides=["engine.replicas=3"]),
    ):
        folder = opened(request, None)
        folder.close()
        names.add(str(folder.path.relative_to(tmp_path)))
    assert len(names) == 2
    assert {name.split("-")[0] for name in names} == {"evals/model"}


def test_a_new_folder_without_results_can_be_removed(tmp_path: Path, request_: EvalRequest) -> None:
    folder = opened(request_, tmp_path / "out")
    folder.discard = True
    folder.close()
    assert not (tmp_path / "out").exists()
    folder = opened(request_, tmp_path / "out")
    folder.discard = True
    append_result(folder.path / "sums.jsonl", result(prompts()[0]))
    folder.close()
    assert folder.graded() == 1


def test_what_is_finished_is_shown_without_an_engine(
    tmp_path: Path, request_: EvalRequest, data: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, _ = make_request(request_)
    opened(request_, tmp_path / "out").close()
    (tmp_path / "out" / SUMMARY).write_text(json.dumps(summary_of(settings)))
    options = [
        str(checkpoint),
        "--data",
        str(data),
        "-n",
        "4",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["eval", *options, "--json"])
    assert exit_info.value.code == 0
    output = json.loads(capsys.readouterr().out)
    assert output["sets"]["sums"]["metrics"]["avg@2"]["value"] == pytest.approx(1 / 6)
    with pytest.raises(SystemExit):
        cli.main(["eval", *options])
    assert "avg@2            16.7 [0.0, 50.0]" in capsys.readouterr().out


def summary_of(settings: Settings) -> dict[str, object]:
    part = describe_set([result(prompt) for prompt in prompts()], 0)
    part["metrics"]["avg@2"] = {"value": 1 / 6, "low": 0.0, "high": 0.5}
    return {
        "model": str(settings.model.path),
        **{"samples": 4, "temperature": 1.0, "top_p": 1.0, "max_response_tokens": 16, "seed": 0},
        "sets": {"sums": part | {"left_out": {"too long": 2}}},
    }


def test_the_table_has_a_column_for_each_set(request_: EvalRequest) -> None:
    summary = summary_of(make_request(request_)[0])
    part = summary["sets"]["sums"]
    summary["sets"] = {"sums": part, "other": part | {"left_out": {}}}
    lines = show_summary(summary).splitlines()
    (accuracy,) = [line for line in lines if line.startswith("avg@2")]
    assert accuracy.split("  ", 1)[1].count("16.7 [0.0, 50.0]") == 2
    assert any(line.split()[:5] == ["left", "out", "or", "cut", "2"] for line in lines)


# -- options -------------------------------------------------------------------------------------------------


def test_suites_and_files_become_sets(tmp_path: Path) -> None:
    for name in ("aime24.jsonl", "gsm8k_test.jsonl", "mine.jsonl"):
        (tmp_path / name).touch()
    assert find_sets("aime24,gsm8k,amc23=x.jsonl", [f"own={tmp_path}/mine.jsonl", "b.parquet"], tmp_path) == [
        {"name": "aime24", "preset": "aime24", "path": str(tmp_path / "aime24.jsonl")},
        {"name": "gsm8k", "preset": "gsm8k", "path": str(tmp_path / "gsm8k_test.jsonl")},
        {"name": "amc23", "preset": "amc23", "path": str(Path("x.jsonl").absolute())},
        {"name": "own", "path": str(tmp_path / "mine.jsonl")},
        {"name": "b", "path": str(Path("b.parquet").absolute())},
    ]
    assert find_sets("gsm8k", [], None) == [{"name": "gsm8k", "preset": "gsm8k", "split": "test"}]


def test_a_run_is_evaluated_with_the_settings_of_its_training(
    tmp_path: Path, request_: EvalRequest, config_file: Path, make_checkpoint: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "tiny-001"
    for step in (2, 10):
        make_checkpoint(run / "hf" / f"step_{step:06d}")
    style = "data.template='Q {prompt}'"
    text = config_file.read_text().replace("train.jsonl", str(tmp_path / "train.jsonl"))
    text = text.replace(
        "rollout:", "rollout:\n  episode: {type: a:b, turns: 3}\n  tool_call_parser: hermes", 1
    )
    (run / "config.yaml").write_text(text + "reward: {type: boxed}\n")
    for model in (run, run / "hf" / "step_000002"):
        settings, evaluated = make_request(replace(request_, model=model, overrides=[style]))
        label, newest = evaluated.label, model == run
        assert label == ("tiny-001-step_000010" if newest else "tiny-001-step_000002")
        assert settings.model.path.name == label.removeprefix("tiny-001-")
        assert settings.reward.type == "boxed"
        assert settings.rollout.tool_call_parser == "hermes"
        assert (settings.rollout.episode.type, settings.rollout.episode.keywords) == ("a:b", {"turns": 3})
        for override, turns in (("rollout.episode=null", None), ("rollout.episode.turns=5", {"turns": 5})):
            request = replace(request_, model=model, overrides=[override, "rollout.tool_call_parser=null"])
            episode = make_request(request)[0].rollout.episode
            assert turns == (episode and episode.keywords)
        (part,) = settings.evaluation.heldout
        assert part.data.template == "Q {prompt}"
        assert settings.precision.dtype == "float32"


EVALUATED = """
seed: 7
reward: {type: boxed, kl: {}}
anchor: {type: fixed}
evaluation:
  data: {path: DATA, template: 'Q {prompt}', limit: 3, max_prompt_tokens: 64}
  name: mine
  samples: 2
  temperature: 0.5
  top_p: 0.9
  top_k: 7
"""


def test_a_run_is_evaluated_as_it_evaluates_itself(
    tmp_path: Path, data: Path, config_file: Path, make_checkpoint: Callable[..., Path]
) -> None:
    """Same seeds, problems, lengths and sampling, so the same number, unless the options say otherwise."""
    run = tmp_path / "runs" / "tiny-001"
    make_checkpoint(run / "hf" / "step_000002")
    text = config_file.read_text().replace("train.jsonl", str(tmp_path / "train.jsonl"))
    (run / "config.yaml").write_text(text + EVALUATED.replace("DATA", str(data)))
    trained = load_settings(run / "config.yaml")
    for request in (
        EvalRequest(run),
        EvalRequest(run, files=[str(data)]),
        EvalRequest(run, files=[f"mine={data}"]),
    ):
        settings, _ = make_request(request)
        assert settings.evaluation.heldout == trained.evaluation.heldout, "with the seeds of the run"
        for key in ("samples", "temperature", "top_p", "top_k"):
            assert getattr(settings.evaluation, key) == getattr(trained.evaluation, key)
        assert (settings.seed, settings.rollout.max_response_tokens) == (7, 16)
        assert settings.engine.max_sequences == trained.engine.max_sequences
    folder = open_output_dir(tmp_path / "out", settings, "tiny")
    folder.close()
    open_output_dir(tmp_path / "out", settings, "tiny").close()  # the same settings resume

    sampling = {"samples": ["4"], "temperature": ["1.0"], "top_p": ["1"], "max_response_tokens": ["32"]}
    overridden = EvalRequest(run, sampling=sampling, overrides=["seed=1", "data.limit=2"])
    settings, _ = make_request(overridden)
    evaluation = settings.evaluation
    assert (evaluation.samples, evaluation.temperature, evaluation.top_p) == (4, 1.0, 1.0)
    assert (settings.seed, settings.rollout.max_response_tokens) == (1, 32)
    assert (evaluation.heldout[0].data.limit, evaluation.heldout[0].data.template) == (2, "Q {prompt}")

    train_set, _ = make_request(EvalRequest(run, files=[str(tmp_path / "train.jsonl")]))
    (part,) = train_set.evaluation.heldout
    assert (part.name, part.data.limit, part.data.template) == ("train", None, "Q {prompt}")
    assert (train_set.seed, train_set.evaluation.samples) == (7, 2)


def test_a_run_with_several_sets_is_evaluated_on_them(
    tmp_path: Path, data: Path, config_file: Path, make_checkpoint: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "tiny-001"
    make_checkpoint(run / "hf" / "step_000002")
    sets = f"evaluation: {{sets: [{{name: a, path: {data}, limit: 2, max_prompt_tokens: 64}}, "
    sets += f"{{name: b, path: {data}, max_prompt_tokens: 64}}]}}\n"
    (run / "config.yaml").write_text(config_file.read_text() + sets)
    settings, _ = make_request(EvalRequest(run, overrides=["data.template='Q {prompt}'"]))
    a, b = settings.evaluation.heldout
    assert [(p.name, p.seeds, p.data.limit) for p in (a, b)] == [
        ("a", "evaluation/a", 2),
        ("b", "evaluation/b", None),
    ]
    assert {p.data.template for p in (a, b)} == {"Q {prompt}"}


SETS = """
evaluation:
  samples: 8
  max_response_tokens: 12
  sets:
    - {path: DATA, name: a, samples: 32, temperature: 0.6, max_prompt_tokens: 64}
    - {path: DATA, name: b, samples: 1, top_p: 0.9, max_response_tokens: 30, max_prompt_tokens: 64}
    - {path: DATA, name: c, max_prompt_tokens: 64}
"""


def test_each_set_has_its_own_sampling(tmp_path, data: Path, config_file, make_checkpoint) -> None:
    """The command line overrides the run; settings of one set override those for all sets."""
    run = tmp_path / "runs" / "tiny-001"
    make_checkpoint(run / "hf" / "step_000002")
    (run / "config.yaml").write_text(config_file.read_text() + SETS.replace("DATA", str(data)))

    def sampling(**options: list[str]) -> list[tuple[Any, ...]]:
        settings, _ = make_request(EvalRequest(run, sampling=options))
        assert settings.evaluation is not None
        return [
            (p.samples, p.temperature, p.top_p, p.response_tokens(settings.rollout.max_response_tokens))
            for p in settings.evaluation.heldout
        ]

    expected = [(32, 0.6, 1.0, 12), (1, 1.0, 0.9, 30), (8, 1.0, 1.0, 12)]
    assert sampling() == expected
    assert sampling(samples=["2"]) == [(2, *part[1:]) for part in expected]
    assert sampling(max_response_tokens=["20"], top_p=["0.5"]) == [(*part[:2], 0.5, 20) for part in expected]
    assert sampling(samples=["b=4", "2"]) == [
        (n, *part[1:]) for n, part in zip((2, 4, 2), expected, strict=True)
    ]
    only = make_request(EvalRequest(run, files=[f"x={data}"], sampling={"samples": ["x=3"]}))[0]
    assert [(p.name, p.samples) for p in only.evaluation.heldout] == [("x", 3)]


def test_the_table_shows_where_sets_differ() -> None:
    one = describe_set([result(prompts()[0], 4)], 0) | {"left_out": {}, "temperature": 1.0, "top_p": 1.0}
    two = one | {"samples": 1, "temperature": 0.0}
    limits = [{"max_response_tokens": n} for n in (4096, 32768)]
    sets = {name: part | limit for name, part, limit in zip("ab", (one, two), limits, strict=True)}
    lines = show_summary({"model": "m", "seed": 3, "sets": sets}).splitlines()
    assert lines[1] == "top-p 1, seed 3"
    assert [line.split() for line in lines[5:8]] == [
        ["samples", "4", "1"],
        ["temperature", "1", "0"],
        ["max", "response", "tokens", "4,096", "32,768"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere", "--data", "DATA"], "MODEL: /nowhere does not exist"),
        (["DATA", "--data", "DATA"], "is a file"),
        (["EMPTY", "--data", "DATA"], "MODEL: EMPTY has no config.json, and is not a Megatron checkpoint"),
        (["RUN", "--data", "DATA"], "MODEL: the run RUN has no complete checkpoint in checkpoints/ yet"),
        (["MEGATRON", "--data", "DATA"], "MEGATRON: has no hf/ with config.json and tokenizer"),
        (["MODEL"], "no problems to evaluate; give --suite"),
        (["MODEL", "--suite", "aime26"], "--suite: 'aime26' is not known; did you mean 'aime2"),
        (["MODEL", "--suite", "aime24", "--data-dir", "EMPTY"], "has no file for aime24"),
        (["MODEL", "--suite", "aime24", "--data-dir", "/nowhere"], "--data-dir: /nowhere is not a folder"),
        (["MODEL", "--suite", "aime24", "--suite", "aime24"], "sets[1] repeats the name aime24; set another"),
        (["MODEL", "--data", "/nowhere.jsonl"], "--data: /nowhere.jsonl does not exist"),
        (["MODEL", "--data", "a b.jsonl"], "'a b' is not a valid name of a set; give NAME=a b.jsonl"),
        (["MODEL", "--data", "DATA", "--temperature", "0", "-n", "2"], "set samples to 1"),
        (["MODEL", "--data", "DATA", "-n", "4", "--temperature", "sums=0"], "sets[0] (sums): temperature 0"),
        (
            ["MODEL", "--data", "DATA", "-n", "sums=0"],
            "evaluation.sets[0].samples: must be greater than or equal to 1 (got '0')",
        ),
        (["MODEL", "--data", "DATA", "-n", "many"], "evaluation.samples: must be a valid integer"),
        (["MODEL", "--data", "DATA", "--temperature", "[nan"], "evaluation.temperature: must be a"),
        (["MODEL", "--data", "DATA", "--max-response-tokens", "x"], "evaluation.max_response_tokens: "),
        (["MODEL", "--data", "DATA", "-n", "4", "-n", "2"], "--samples is given twice for all sets"),
        (["MODEL", "--data", "DATA", "--top-p", "a=b=0.5"], "there is no set a=b; the sets are sums"),
        (["MODEL", "--data", "DATA", "-n", "sums=4", "-n", "sums=2"], "--samples is given twice for sums;"),
        (["MODEL", "--data", "DATA", "--top-p", "sum=0.5"], "there is no set sum; the sets are sums"),
        (["MODEL", "--data", "DATA", "--max-response-tokens", "sums=512"], "(512) is more than the model's"),
        (["MODEL", "--data", "DATA", "--max-response-tokens", "512"], "(512) is more than the model's 512"),
        (["MODEL", "--data", "DATA", "data.max_prompt_tokens=500"], "model's 512 positions"),
        (["MODEL", "--data", "DATA", "--tensor", "3"], "--tensor: tensor=3"),
        (["MODEL", "--data", "DATA", "--device", "tpu"], "device: "),
        (["MODEL", "--data", "DATA", "optimizer.lr=1"], "has no effect on an evaluation"),
        (
            ["MODEL", "--data", "DATA", "rollout.ahead=1"],
            "has no effect on an evaluation; remove it",
        ),
        (["MODEL", "--data", "DATA", "rollout.episode=nomod:nope"], "there is no module 'nomod'"),
        (["MODEL", "--data", "DATA", "data.path=x"], "select the problems with --suite or --data"),
        (["MODEL", "--data", "DATA", "data.tempalte=x"], "did you mean 'data.template'"),
        (["MODEL", "--data", "BAD"], "bad.jsonl:2: 'answer' is empty"),
        (["MODEL", "--data", "DATA", "reward.type=nomod:nope"], "there is no module 'nomod'"),
        (["MODEL", "--data", "DATA", "data.max_prompt_tokens=1"], "all 5 prompts are longer than 1 tokens"),
    ],
)
def test_each_mistake_is_one_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    data: Path,
    checkpoint: Path,
    config_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {name: tmp_path / name.lower() for name in ("EMPTY", "RUN", "MEGATRON")}
    for folder in places.values():
        folder.mkdir()
    (places["RUN"] / "config.yaml").write_text(config_file.read_text())
    (places["MEGATRON"] / "metadata.json").write_text("{}")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1", "answer": ""}\n')
    places |= {"MODEL": checkpoint, "DATA": data, "BAD": bad}
    words = [str(places.get(word, word)) for word in arguments]
    if "--device" not in words:
        words += ["--device", "cpu"]
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["eval", *words])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    for name in ("EMPTY", "RUN", "MEGATRON"):
        message = message.replace(f"{name} has", f"{places[name]} has").replace(
            f"{name}:", f"{places[name]}:"
        )
    assert message in captured.err
    assert captured.err.count("error: ") == 1
    assert captured.out == ""
    assert not (tmp_path / "evals").exists()
