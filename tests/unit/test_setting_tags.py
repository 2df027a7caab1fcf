"""What a setting affects: every setting has a tag, and the commands that ask agree with it."""

from pathlib import Path
from typing import Annotated

import pytest

from rpg_megatron.commands.report.run_files import RunFiles, read_run
from rpg_megatron.commands.report.study import find_arms
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.affects import settings_that_differ, tag_of_setting
from rpg_megatron.config.base import Affects, Section
from rpg_megatron.config.explanation import valid_keys
from rpg_megatron.config.renamed import RENAMED
from rpg_megatron.launcher.run_dir import resolved_yaml


def test_a_setting_without_a_tag_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Untagged\.rank: give the setting or its class a tag"):

        class Untagged(Section):
            rank: int = 1

    class OfTheClass(Section, affects="speed"):
        rank: int = 1
        seed: Annotated[int, Affects("training")] = 0

    class Inherits(OfTheClass):
        more: int = 2

    assert Inherits.affects == Affects("speed")


def test_the_tag_of_a_section_holds_for_all_in_it() -> None:
    """Held-out data are read like training data, and train nothing."""
    assert tag_of_setting("data.template") == Affects("training", evaluated=True)
    assert tag_of_setting("evaluation.data.template").what == "results"
    assert tag_of_setting("sft.heldout.max_tokens").what == "results"
    assert tag_of_setting("reward.terms.mine.weight").what == "training"
    assert tag_of_setting("engine.replicas").what == "speed"
    assert tag_of_setting("engine").what == "results"  # the strongest in it
    assert tag_of_setting("lora") == Affects("training")
    assert tag_of_setting("rollout.episode.a_setting_of_mine").what == "training"
    assert tag_of_setting("of_another.version").what == "training"


def test_every_key_has_a_tag_that_does_not_depend_on_the_chosen_type() -> None:
    for key in dict.fromkeys(valid_keys(Settings)):
        assert tag_of_setting(key).what in ("training", "results", "sums", "speed", "placement", "files"), key


def test_settings_that_differ_are_found_by_tag() -> None:
    then = {"seed": 1, "parallel": {"tensor": 1}, "engine": {"replicas": 1}}
    now = {"seed": 2, "parallel": {"tensor": 2}, "engine": {"replicas": 4}}
    assert settings_that_differ(then, now, "training") == {"seed": (1, 2)}
    assert settings_that_differ(then, now, "sums", "speed").keys() == {"parallel.tensor", "engine.replicas"}
    assert len(settings_that_differ(then, now)) == 3


def run_of(folder: Path, config: Path, *overrides: str) -> RunFiles:
    settings = load_settings(config, list(overrides))
    folder.mkdir()
    (folder / "config.yaml").write_text(resolved_yaml(settings))
    return read_run(folder)


def test_seeds_of_one_setting_are_one_arm_on_any_layout(config_file: Path, tmp_path: Path) -> None:
    """Other ranks, graders and engines change results by rounding, and are no other setting to compare."""
    more: list[list[str]] = [
        [],
        ["parallel.data=16"],
        ["reward.workers=4"],
        ["engine.max_sequences=8"],
        ["training.tokens_per_microbatch=100"],
    ]
    runs = [
        run_of(tmp_path / str(seed), config_file, f"seed={seed}", *each) for seed, each in enumerate(more)
    ]
    (arm,) = find_arms(runs, [str(seed) for seed in range(5)])
    assert arm.runs == {str(seed): seed for seed in range(5)}

    others = ["objective.beta=0.5", "training.steps=9", "engine.quantization=null", "guards.mismatch=warn"]
    runs += [run_of(tmp_path / each, config_file, f"seed={seed}", each) for seed, each in enumerate(others)]
    assert len(find_arms(runs, [str(i) for i in range(9)])) == 4  # quantization is null anyway


@pytest.mark.parametrize("key", [key for key in RENAMED if not key.startswith("--")])
def test_a_setting_that_is_gone_says_what_to_do(config_file: Path, key: str) -> None:
    kind = "tensorboard" if key == "trackers.responses" else "wandb"
    tracker = f"trackers=[{{type: {kind}, {key.rpartition('.')[2]}: 9}}]"
    override = tracker if key.startswith("trackers.") else f"{key}=12345"
    before = {"anchor.": ["anchor.type=fixed"], "teacher.": ["teacher.url=http://a"]}
    before |= {"checkpoint.keep_best.": ["checkpoint.keep_best={}"], "lora.": ["lora={}"]}
    before |= {
        "rollout.episode.": ["rollout.episode={type: 'a:b'}"],
        "rollout.dynamic.": ["rollout.dynamic={}"],
    }
    before |= {"evaluation.": ["evaluation={data: {path: x}}"]}
    start = next((value for prefix, value in before.items() if key.startswith(prefix)), [])
    with pytest.raises(UserError) as error:
        load_settings(config_file, [*start, override])
    assert str(error.value) == f"{config_file}: '{key}' is gone; {RENAMED[key][0]}"


def test_files_of_an_earlier_version_may_have_the_value_that_now_applies(config_file: Path) -> None:
    """A run's config.yaml has all settings."""
    nested = ("trackers.", "rollout.episode.", "teacher.", "lora.", "checkpoint.", "evaluation.")
    for key, (_, *values) in RENAMED.items():
        if not values or key.startswith(nested):
            continue
        load_settings(config_file, [f"{key}={'null' if values[0] is None else values[0]}"])
    board = "{type: tensorboard, responses: 4}"
    tracker = "{type: wandb, entity: null, group: null, tags: [], offline: false, system: true, responses: 2}"
    load_settings(config_file, [f"trackers=[{board}, {tracker}]", "lora={dropout: 0}"])
    settings = load_settings(config_file, ["rollout.episode={type: 'a:b', memory_gib: 4.0}"])
    assert settings.rollout.episode.keywords == {}


def test_keys_of_your_own_code_may_have_the_names_of_settings_that_are_gone(config_file: Path) -> None:
    own = "{type: 'my_board:Board', tags: [a], group: b, system: false, responses: 9}"
    settings = load_settings(config_file, [f"trackers=[{own}]", "rollout.dynamic={type: 'a:b', surplus: 2}"])
    assert settings.trackers[0].model_extra == {"tags": ["a"], "group": "b", "system": False, "responses": 9}
    assert settings.rollout.dynamic.keywords == {"surplus": 2}
    with pytest.raises(UserError, match=r"'reward\.memory_gib' is gone"):
        load_settings(config_file, ["reward={type: 'a:b', memory_gib: 8}"])


@pytest.mark.parametrize("odd", ["trackers=5", "guards=null", "reward=[]", "bridge=text", "trackers=[[x]]"])
def test_sections_of_another_kind_are_told_as_such(config_file: Path, odd: str) -> None:
    with pytest.raises(UserError, match=odd.partition("=")[0]):
        load_settings(config_file, [odd])
