"""User code given by import path is checked before a process starts, and gets its settings as declared.

Proved: train's checks, the doctor and plan report a mistake in one line that names the setting and the fix;
settings are keyword arguments or a pydantic model. Not covered: a training run with it (tests/distributed).
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rpg_megatron.commands.plan.command import run_plan
from rpg_megatron.commands.plan.plan import find_target
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.policy import OptimizerSettings
from rpg_megatron.config.settings import make_settings
from rpg_megatron.launcher import input_checks
from rpg_megatron.launcher.input_checks import check_custom_code
from rpg_megatron.launcher.run_dir import create_run
from rpg_megatron.objectives import ResponseTokens
from rpg_megatron.policy.schedules import build_schedule
from rpg_megatron.rollout.dynamic_sampling import passes_filter
from rpg_megatron.rollout.groups import GroupScores
from rpg_megatron.system.custom_code import CustomCode, find_problem, load_custom
from rpg_megatron.training.advantages import build_advantages
from rpg_megatron.training.loss import build_loss
from tests.support.checks import doctor_rows

MODULE = """
import dataclasses

from pydantic import BaseModel, Field

print("a module may print")

class Loss:
    def __init__(self, beta: float, kind: str = "a"):
        self.settings = beta, kind
        if beta < 0:
            raise ValueError("beta is negative")

    def __call__(self, logp, tokens): ...

class Settings(BaseModel):
    beta: float = Field(0.1, ge=0)

class Typed:
    def __init__(self, settings: Settings):
        self.settings = settings

    def __call__(self, logp, tokens): ...

class Nothing: ...

class Returns:
    def __init__(self, what: str):
        self.what = what

    def __call__(self, logp, tokens):
        from rpg_megatron.objectives import LossOutput

        cases = {
            "nothing": None,
            "sum": LossOutput(logp.sum()),
            "number": LossOutput(logp, {"mine": 1.0}),
            "good": LossOutput(logp, {"mine": logp}),
        }
        if self.what == "error":
            raise RuntimeError("first line\\nsecond")
        return cases[self.what]

def advantage(rewards, group, lengths, *, scale: float = 1.0):
    if scale < 0:
        return ["a", "b"] if scale > -2 else rewards["a"]
    return rewards * scale if scale else rewards[:1]

def schedule(step, steps, *, low: float = 0.5):
    return low if step % 2 else 1.0

def varied(scores, *, least: float = 0.1):
    return max(scores.rewards) - min(scores.rewards) > least

class Takes:
    def __init__(self, entropy_bonus: float): ...
    def __call__(self, logp, tokens): ...

def taken(scores, rounds=1):
    return True
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_module_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)  # from where modules are imported, as reward functions are


def loss(name: str, **settings: object) -> CustomCode:
    return CustomCode("objective", f"own_module_of_test:{name}", settings, 0, instantiate=True)


def test_settings_arrive_in_the_declared_types() -> None:
    assert load_custom(loss("Loss", beta="0.5")).settings == (0.5, "a")
    assert load_custom(loss("Typed", beta=1)).settings.beta == 1.0
    assert load_custom(CustomCode("advantage", "own_module_of_test:advantage", {"scale": 2}, 3))(3, 0, 0) == 6


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (loss("Loss", beta=1, knd="b"), "objective.knd: own_module_of_test:Loss has no setting 'knd'"),
        (loss("Loss", beta=1, x=2), "objective.x: own_module_of_test:Loss has no setting 'x'; it has beta"),
        (loss("Loss"), "objective.beta: own_module_of_test:Loss needs this setting; add it"),
        (loss("Loss", beta="high"), "objective.beta: Input should be a valid number"),
        (loss("Loss", beta=-1), "with these settings fails: ValueError: beta is negative"),
        (loss("Typed", beta=-1), "objective.beta: Input should be greater than or equal to 0 (got -1)"),
        (
            loss("Typed", bta=1),
            "objective.bta: own_module_of_test:Typed has no setting 'bta'; did you mean 'beta'?",
        ),
        (loss("Nothing"), "creates a Nothing without __call__; add it"),
        (
            loss("Absent"),
            "objective.type: own_module_of_test:Absent: the module own_module_of_test has no 'Absent'",
        ),
        (CustomCode("advantage", "own_module_of_test:advantage", {"s": 1}, 3), "advantage.s: "),
        (CustomCode("advantage", "math:nan", {}, 3), "is a float, not a function"),
        (CustomCode("advantage", "own_module_of_test:advantage", {}, 4), "takes 3 positional arguments"),
    ],
)
def test_what_is_wrong_is_one_line(code: CustomCode, message: str) -> None:
    problem = find_problem(code)
    assert message in problem
    assert len(problem.splitlines()) == 1


def test_of_very_many_wrong_settings_some_are_listed() -> None:
    many = {f"k{i}": "x" * 1000 for i in range(1000)}
    problem = find_problem(loss("Loss", **many))
    assert len(problem.splitlines()) < 30
    wrong = find_problem(loss("Typed", beta="x" * 1000))
    assert wrong is not None
    assert len(wrong) < 300


def test_train_doctor_and_plan_tell_of_it(config_file: Path) -> None:
    good = load_settings(config_file, ["objective={type: own_module_of_test:Loss, beta: 0.1}"])
    check_custom_code(good)
    assert make_settings(json.loads(good.model_dump_json()), None, "").objective == good.objective
    bad = load_settings(config_file, ["objective={type: own_module_of_test:Loss, bet: 0.1}"])
    message = "objective.bet: own_module_of_test:Loss has no setting 'bet'; did you mean 'beta'?"
    with pytest.raises(UserError, match="did you mean 'beta'"):
        check_custom_code(bad)
    failed = doctor_rows(bad, "own code")[0]
    assert message in f"{failed.found}; {failed.fix}"
    with pytest.raises(UserError, match="did you mean 'beta'"):
        run_plan(bad, find_target(bad, None), sweep=False, as_json=True)


def test_an_import_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs_in_test.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(input_checks, "CUSTOM_CODE_SECONDS", 3)
    with pytest.raises(UserError, match="importing hangs_in_test:f has not ended after 3 s"):
        check_custom_code(make("advantage.type=hangs_in_test:f"))


def make(*overrides: str) -> Settings:
    return make_settings({"model": {"path": "m"}, "data": {"path": "d"}}, list(overrides), "x")


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("{type: constant}", [0.5, 1, 1, 1, 1, 1]),
        ("{type: linear}", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("{type: linear, end: 0.2}", [0.5, 1, 1, 0.8, 0.6, 0.4]),
        ("{type: cosine}", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466]),
        ("{type: wsd, decay: 0.5}", [0.5, 1, 1, 1, 1, 0.5]),
        ("{type: 'own_module_of_test:schedule', low: 0.2}", [0.1, 1, 0.2, 1, 0.2, 1]),
    ],
)
def test_learning_rates_of_the_schedules(schedule: str, factors: list[float]) -> None:
    settings = make(
        f"optimizer.schedule={schedule}", "optimizer.warmup_steps=2", "optimizer.lr=0.2", "training.steps=6"
    )
    check_custom_code(settings)
    rate = build_schedule(settings.optimizer, settings.training.steps)
    assert [rate(step) / 0.2 for step in range(1, 7)] == pytest.approx(factors)


def test_the_default_schedule_is_warm_up_then_constant() -> None:
    rate = build_schedule(OptimizerSettings(lr=1e-6, warmup_steps=3), 5)
    assert [rate(step) for step in range(1, 6)] == [1e-6 * min(1.0, step / 3) for step in range(1, 6)]


def test_a_user_advantage_gets_its_settings_and_is_checked() -> None:
    rewards, group, lengths = np.array([1.0, 2.0]), np.array([0, 0]), np.array([3, 4])
    small = ("rollout={prompts_per_step: 1, samples_per_prompt: 2}", "training.minibatches=1")
    own = "advantage={type: 'own_module_of_test:advantage', scale: "
    check_custom_code(make(own + "3}", *small))
    for scale, wrong in (
        ("0", r"of shape \(1,\)"),
        ("-1", "fails: ValueError"),
        (".nan", r"\[nan, nan\]; .* of 2"),
    ):
        with pytest.raises(UserError, match=wrong):
            check_custom_code(make(f"{own}{scale}}}", *small))
    advantage = build_advantages(make(own + "3}").advantage)
    assert advantage(rewards, group, lengths).tolist() == [3.0, 6.0]
    short = build_advantages(make(own + "0}").advantage)
    with pytest.raises(UserError, match=r"returns shape \(1,\); return one finite number per response"):
        short(rewards, group, lengths)
    none = build_advantages(make(own + "-1}").advantage)
    with pytest.raises(UserError, match="returns a value that is not finite"):
        none(rewards, group, lengths)


def test_errors_of_user_code_name_the_setting_and_the_line() -> None:
    def line(text: str) -> str:
        number = next(i for i, source in enumerate(MODULE.splitlines(), 1) if text in source)
        return f"/own_module_of_test.py:{number}: "

    loss = build_loss(make("objective={type: 'own_module_of_test:Returns', what: error}"))
    with pytest.raises(UserError) as error:
        loss(torch.zeros(3), None)
    assert str(error.value).startswith("objective.type: own_module_of_test:Returns fails at ")
    assert str(error.value).endswith(line("raise RuntimeError") + "RuntimeError: first line; fix it")
    scale = build_advantages(make("advantage={type: 'own_module_of_test:advantage', scale: -2}").advantage)
    with pytest.raises(UserError) as error:
        scale(np.zeros(2), np.zeros(2, int), np.ones(2, int))
    assert line('rewards["a"]') + "IndexError: " in str(error.value)
    keys = "rollout.dynamic={type: 'own_module_of_test:varied', least: 0}"
    with pytest.raises(UserError) as error:
        passes_filter(make(keys).rollout, GroupScores([], [], [], [], {}))
    assert str(error.value).startswith("rollout.dynamic.type: own_module_of_test:varied fails at ")
    assert line("max(scores") + "ValueError: " in str(error.value)


@pytest.mark.parametrize(
    ("returned", "anchor", "message"),
    [
        ("nothing", "old", "returns a NoneType, not a LossOutput; see docs/extend.md"),
        ("sum", "old", r"per_token is \(\); it must be a tensor with one value per token, \(3,\) like logp"),
        ("number", "old", "mine is float; it must be a tensor"),
        ("good", "kl_trigger", "anchor.type kl_trigger needs the metric 'kl'"),
    ],
)
def test_what_a_loss_returns_is_checked(returned: str, anchor: str, message: str) -> None:
    def call(returned: str, anchor: str) -> object:
        objective = f"objective={{type: 'own_module_of_test:Returns', what: {returned}}}"
        return build_loss(make(objective, f"anchor.type={anchor}"))(torch.zeros(3), None)

    with pytest.raises(UserError, match=message):
        call(returned, anchor)
    call("good", "fixed")


def test_a_loss_of_the_user_gets_the_entropy_bonus_of_ours() -> None:
    settings = make("objective={type: 'own_module_of_test:Returns', what: good, entropy_bonus: 0.5}")
    check_custom_code(settings)  # the class has no such setting
    zeros, entropy = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    tokens = ResponseTokens(*[zeros] * 5, entropy=entropy)
    without = build_loss(make("objective={type: 'own_module_of_test:Returns', what: good}"))(zeros, tokens)
    assert (without.per_token - build_loss(settings)(zeros, tokens).per_token).tolist() == [0.5, 1.0, 1.5]


def test_a_filter_of_the_user_sees_dense_rewards() -> None:
    rollout = make("rollout.dynamic.type=own_module_of_test:varied").rollout
    dense = GroupScores([1, 1], [0.2, 0.9], [False, False], [False, False], {})
    equal = GroupScores([1, 1], [0.2, 0.2], [True, False], [False, False], {})
    assert [passes_filter(rollout, scores) for scores in (dense, equal)] == [True, False]
    strict = make("rollout.dynamic={type: 'own_module_of_test:varied', least: 0.8, rounds: 3}").rollout
    assert [passes_filter(strict, scores) for scores in (dense, equal)] == [False, False]
    assert [passes_filter(make("rollout.dynamic={}").rollout, scores) for scores in (dense, equal)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "advantage={type: 'own_module_of_test:advantage', scl: 1}",
            "advantage.scl: own_module_of_test:advantage has no",
        ),
        ("optimizer.schedule={type: 'math:copysign', x: 1}", "optimizer.schedule.x: "),
        ("optimizer.schedule={type: 'operator:sub'}", "operator:sub(1, 400) is -399.0; it must be a finite"),
        (
            "rollout.dynamic.type=own_module_of_test:vary",
            "rollout.dynamic.type: own_module_of_test:vary: the module",
        ),
        (
            "rollout.dynamic={type: 'own_module_of_test:varied', lest: 1}",
            "rollout.dynamic.lest: own_module_of_test:varied has no setting 'lest'; did you mean 'least'?",
        ),
        (
            "rollout.dynamic.type=own_module_of_test:taken",
            "has a setting 'rounds', which is a key of the section itself; give it another name",
        ),
        (
            "objective={type: 'own_module_of_test:Takes', entropy_bonus: 0.1}",
            "has a setting 'entropy_bonus', which is a key of the section itself; give it another name",
        ),
    ],
)
def test_wrong_settings_of_other_code_are_told_before_the_start(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_custom_code(make(override))
    assert message in str(error.value)


def test_a_type_that_is_no_import_path_is_told() -> None:
    with pytest.raises(UserError, match=r"objective\.type: must be an import path module:name"):
        make_settings(
            {"model": {"path": "m"}, "data": {"path": "d"}, "objective": {"type": "a-b:C"}}, None, "x"
        )


def test_arguments_of_functions_for_other_projects_are_no_settings(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded as settings, the defaults would be passed instead of the columns when the run is resumed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign_rewards_of_test.py").write_text(
        "def verl(data_source, solution_str, ground_truth, extra_info=None, scale=1.0): return 1.0\n"
        "def trl(completions, answer=None, **kwargs): return [1.0] * len(completions)\n"
    )
    for name in ("verl", "trl"):
        settings = load_settings(config_file, [f"reward.type=foreign_rewards_of_test:{name}"])
        recorded = load_settings(create_run(settings) / "config.yaml")
        assert not recorded.reward.model_extra
        check_custom_code(recorded)
