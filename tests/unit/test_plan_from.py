"""``plan --from RUN`` gives a run's own times for its settings, scales them, and says what it could not use.

Why: figures of a run that stand under settings they do not fit mislead more than a guess that says so. Runs
are made with given times. Not covered: whether the next run takes as long.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rpg_megatron import cli
from rpg_megatron.config import Settings, load_settings
from tests.support.recipes import EXAMPLES
from tests.support.timed_runs import make_timed_run

QUICKSTART = EXAMPLES / "quickstart.yaml"
QWEN3_8B = EXAMPLES / "qwen3_8b_dapo_math_8k.yaml"
TIMES = {"step": 10.0, "collect": 3.2, "rollout": 3.0, "logprobs": 1.5, "update": 4.8, "sync": 0.3}
GPU_TIMES = {**TIMES, "step": 1000.0, "collect": 510.0, "rollout": 500.0, "logprobs": 120.0, "update": 330.0}
GPU_TIMES |= {"sync": 3.0, "handover": 12.0}
LONG = {"prompt": 200.0, "response": 3000.0, "longest": 8000.0}

Plan = Callable[..., dict]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """The command's JSON."""

    def run(file: Path, folder: Path, *arguments: str) -> dict:
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["plan", str(file), "--from", str(folder), "--json", *arguments])
        out, err = capsys.readouterr()
        assert exit_info.value.code in (0, None), err
        return json.loads(out)

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line of a refusal."""

    def run(file: Path, folder: Path, *arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["plan", str(file), "--from", str(folder), *arguments])
        err = capsys.readouterr().err
        assert exit_info.value.code == 2
        assert err.count("\n") == 1
        return err

    return run


def settings_of(file: Path, folder: Path, *overrides: str) -> Settings:
    return load_settings(file, [f"runs={folder}", "name=run", *overrides])


def phases(answer: dict) -> dict[str, float]:
    step = answer["step_time"]["placements"][0]
    seconds = {phase["name"]: phase["seconds"] for phase in step["phases"]}
    seconds["rollout"] += seconds.pop("rollout: tail")
    return {**seconds, "step": step["step_seconds"]}


def test_a_run_s_own_settings_give_its_own_times(plan: Plan, tmp_path: Path) -> None:
    run = make_timed_run(settings_of(QUICKSTART, tmp_path), TIMES, more={"time/checkpoint": 2.0})
    answer = plan(QUICKSTART, run)
    expected = {"rollout": 3.0, "log-probs": 1.5, "update": 4.8, "sync": 0.3, "other": 0.4, "step": 10.0}
    assert phases(answer) == pytest.approx(expected, rel=1e-6)
    assumed = answer["step_time"]["assumptions"]
    assert {name: about["value"] for name, about in assumed.items() if name.endswith("_mean")} == (
        pytest.approx({"prompt_mean": 20 / 32, "response_mean": 30 / 64})
    )
    assert assumed["step_overhead"] == {"value": pytest.approx(0.4), "source": "run"}
    assert assumed["decode_overhead"]["source"] == "assumed"
    assert answer["from"]["steps"] == 5  # without the first, which took ten times as long
    assert answer["run_cost"] is None


def test_a_run_without_a_pass_says_nothing_of_its_speed(plan: Plan, tmp_path: Path) -> None:
    settings = settings_of(QUICKSTART, tmp_path, "training.minibatches=1")
    answer = plan(
        QUICKSTART, make_timed_run(settings, {**TIMES, "logprobs": 0.003}), "training.minibatches=1"
    )
    assert phases(answer)["update"] == pytest.approx(4.8, rel=1e-6)
    assert set(answer["from"]["factors"]) == {"rollout", "update", "sync"}


def test_each_phase_has_one_factor(plan: Plan, tmp_path: Path) -> None:
    """The run's seconds over the formula's; the formulas say what half of the prompts take of them."""
    run = make_timed_run(settings_of(QUICKSTART, tmp_path), TIMES)
    own, half = plan(QUICKSTART, run), plan(QUICKSTART, run, "rollout.prompts_per_step=32")
    assert half["from"]["factors"] == own["from"]["factors"]
    seconds, before = phases(half), phases(own)
    assert seconds["log-probs"] == pytest.approx(before["log-probs"] / 2)
    assert seconds["update"] == pytest.approx(before["update"] / 2, rel=0.1)  # and the optimizer
    assert before["rollout"] / 2 <= seconds["rollout"] < before["rollout"]
    assert (seconds["sync"], seconds["other"]) == (before["sync"], before["other"])


def test_a_setting_that_differs_is_told_once_and_computed(plan: Plan, tmp_path: Path) -> None:
    """Shared prompts, FP8 of the trainer and of engines, and adapters change the estimate."""
    run = make_timed_run(settings_of(QWEN3_8B, tmp_path), GPU_TIMES, **LONG)
    own = phases(plan(QWEN3_8B, run))
    for overrides, phase in (
        (
            ["training.share_prompts=true", "rollout.max_response_tokens=2048", "reward.overlong=null"],
            "update",
        ),
        (["precision.fp8.recipe=blockwise"], "update"),
        (["engine.quantization=fp8"], "rollout"),
        (["lora.rank=16"], "update"),
    ):
        answer = plan(QWEN3_8B, run, "name=other", *overrides)
        (note,) = (note for note in answer["from"]["notes"] if "changed" in note)
        assert note.startswith("changed settings, with the lengths of the run: ")
        assert overrides[0].partition("=")[0].partition(".")[2] in note
        assert "name:" not in note  # of files only
        assert not any("not computed" in note for note in answer["from"]["notes"])
        assert phases(answer)[phase] < own[phase]


def test_efficiencies_of_a_gpu_run_carry_over(plan: Plan, tmp_path: Path) -> None:
    dynamic = {"sampling/generated": 1024.0}
    settings = settings_of(QWEN3_8B, tmp_path)
    run = make_timed_run(settings, GPU_TIMES, more=dynamic, **LONG)
    answer = plan(QWEN3_8B, run)
    expected = {"rollout": 500, "log-probs": 120, "update": 330, "sync": 3, "handover": 12, "other": 35}
    assert phases(answer) == pytest.approx({**expected, "step": 1000}, rel=1e-6)
    kept = answer["step_time"]["assumptions"]["kept_groups"]
    assert kept == {"value": settings.rollout.prompts_per_step / 1024, "source": "run"}
    assert answer["run_cost"]["step"] == pytest.approx(1000)
    assert set(answer["from"]["factors"]) == {"rollout", "log-probs", "update", "sync", "handover"}
    more = plan(QWEN3_8B, run, "parallel.data=16", "engine.replicas=32", "--assume", "train_mfu=0.5")
    assert "update" not in more["from"]["factors"]
    assert more["step_time"]["assumptions"]["train_mfu"] == {"value": 0.5, "source": "as set"}
    assert phases(more)["log-probs"] < 70
    assert any(note.startswith("another layout: work is divided") for note in more["from"]["notes"])


def test_another_model_leaves_efficiencies_another_device_lengths(plan: Plan, tmp_path: Path) -> None:
    other = EXAMPLES / "qwen3_4b_dapo_math_8k.yaml"
    run = make_timed_run(settings_of(QWEN3_8B, tmp_path), GPU_TIMES, **LONG)
    answer = plan(other, run)
    assumed = answer["step_time"]["assumptions"]
    assert answer["from"]["factors"]["update"] != 1
    assert assumed["response_mean"]["source"] == "assumed"
    assert any("lengths and kept groups are not used" in note for note in answer["from"]["notes"])
    on_cpu = make_timed_run(settings_of(QUICKSTART, tmp_path), TIMES)
    answer = plan(QUICKSTART, on_cpu, "device=cuda", "engine.colocated=true", "bridge.transport=cuda_ipc")
    assumed = answer["step_time"]["assumptions"]
    assert (answer["from"]["factors"], assumed["response_mean"]["source"]) == ({}, "run")
    assert any("its times are not" in note for note in answer["from"]["notes"])


def test_overlapped_rollouts_count_while_engines_had_work(plan: Plan, tmp_path: Path) -> None:
    ahead = ("rollout.ahead=1", "correction.type=truncate")
    times = {**TIMES, "rollout": 0.5, "collect": 3.2}
    run = make_timed_run(settings_of(QUICKSTART, tmp_path, *ahead), times, more={"async/sampler_held": 4.0})
    answer = plan(QUICKSTART, run, *ahead)
    step = answer["step_time"]["placements"][0]
    assert (step["placement"], step["generation_seconds"]) == ("overlapped", pytest.approx(6.0))


def test_what_a_run_cannot_tell_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    settings = settings_of(QUICKSTART, tmp_path / "runs")
    run, empty = make_timed_run(settings, TIMES), make_timed_run(settings, TIMES, steps=0)
    assert "no such folder" in refused(QUICKSTART, tmp_path / "none")
    assert "not the folder of a run" in refused(QUICKSTART, tmp_path / "runs")
    assert "metrics.jsonl has no completed step with times" in refused(QUICKSTART, empty)
    assert "the run has parallel.tensor 2, this config 1" in refused(QUICKSTART, run, "parallel.tensor=1")
    moe = f"model.path={EXAMPLES}/quickstart/moe_model", "parallel.sequence=true"
    assert "on device cpu: its times tell nothing about this one" in refused(QUICKSTART, run, *moe)
    assert "another model" in refused(QWEN3_8B, run)
    assert "fine-tuning (sft)" in refused(EXAMPLES / "qwen3_8b_sft.yaml", run)
    (run / "config.yaml").write_text("name: [")
    assert "its settings cannot be read" in refused(QUICKSTART, run)


def test_the_table_says_what_came_from_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = make_timed_run(settings_of(QUICKSTART, tmp_path), TIMES, steps=2)
    with pytest.raises(SystemExit):
        cli.main(
            ["plan", str(QUICKSTART), "--from", str(run), "engine.arguments=['--max-num-batched-tokens=512']"]
        )
    out = " ".join(capsys.readouterr().out.split())
    assert "time of a step, by turns: computed from the times of run-001" in out
    assert "its steps took 10.0 s: rollout 3.00 s, log-probs 1.50 s, update 4.80 s" in out
    assert "the run's seconds over the formulas': rollout " in out
    assert "medians of 1 step: few" in out
    assert "changed settings, with the lengths of the run: engine.arguments" in out
