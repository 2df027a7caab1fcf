"""Settings: a typo is caught and explained, paths mean the same everywhere, nothing heavy is imported.

Why: permissive settings turn a typo into a silent no-op, the most expensive kind of bug in a week-long job;
and a login node must be able to check a job without torch. Not covered: what the settings do; each owner
tests that.
"""

import ast
import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

import rpg_megatron
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.base import sections_in
from rpg_megatron.config.explanation import valid_keys
from rpg_megatron.config.settings import make_settings
from rpg_megatron.launcher.run_dir import create_run, resolved_yaml
from rpg_megatron.rewards.reward import overlong_penalty

PACKAGE = Path(rpg_megatron.__file__).parent
REFUSED = yaml.safe_load((Path(__file__).parents[1] / "data" / "refused_settings.yaml").read_text("utf-8"))


def test_defaults_and_values_of_the_file(config_file: Path):
    settings = load_settings(config_file)
    assert settings.training.steps == 2
    assert settings.rollout.temperature == 1.0
    assert settings.data.path == config_file.parent / "train.jsonl"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimiser.lr=1", "optimizer"),
        ("training.step=1", "training.steps"),
        ("temperature=1", "rollout.temperature"),
        ("objective.clip.hihg=1", "objective.clip.high"),
        ("evaluation.data.pth=x", "evaluation.data.path"),
        ("steps=1", "training.steps"),
        ("rollout.minibatches=1", "training.minibatches"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(config_file: Path, override: str, nearest: str):
    overrides = ["evaluation.data.path=x", override] if override.startswith("evaluation") else [override]
    with pytest.raises(UserError) as error:
        load_settings(config_file, overrides)
    assert f"did you mean {nearest!r}?" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["device=cpu"], "shared_memory"),
        (["device=cuda"], "cuda_ipc"),
        (["device=cuda", "bridge={}"], "cuda_ipc"),
        (["device=cuda", "bridge.transport=shared_memory"], "shared_memory"),
        (["device=cpu", "bridge.transport=process_group"], "process_group"),
    ],
)
def test_how_weights_reach_engines_goes_by_the_device(config_file: Path, overrides: list[str], expected: str):
    assert load_settings(config_file, overrides).bridge.transport == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.tokens_per_microbatch=4096"], "none"),
        (["training.tokens_per_microbatch=8192"], "selective"),
        (["training.tokens_per_microbatch=16384"], "full"),
        (["training.tokens_per_microbatch=16384", "parallel.context=2"], "selective"),
        (["training.tokens_per_microbatch=16384", "memory.recompute=none"], "none"),
        (["training.tokens_per_microbatch=4096", "rollout.max_response_tokens=4096"], "selective"),
        (["training.tokens_per_microbatch=4096", "rollout.max_response_tokens=16384"], "full"),
    ],
)
def test_what_is_recomputed_goes_by_length(config_file: Path, overrides: list[str], expected: str):
    settings = load_settings(config_file, overrides)
    assert settings.memory.recompute_for(settings.tokens_at_once) == expected
    assert settings.parallel.world == settings.parallel.context


def test_overrides_are_yaml_and_reach_into_sections(config_file: Path):
    overrides = [
        "optimizer.lr=3e-5",
        "objective.clip=null",
        "engine.arguments=[--a, b]",
        "guards.mismatch='off'",
    ]
    settings = load_settings(config_file, overrides)
    assert settings.optimizer.lr == 3e-5
    assert settings.objective.clip is None
    assert settings.engine.arguments == ("--a", "b")


def test_a_key_with_dots_in_a_file_is_explained(config_file: Path):
    config_file.write_text(config_file.read_text() + "objective.clip.low: 0.1\n")
    with pytest.raises(UserError, match=re.escape("write objective: {clip: {low: ...}}")):
        load_settings(config_file)


def test_paths_are_relative_to_the_file_or_the_working_directory(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_settings(config_file).data.path == tmp_path / "train.jsonl"
    assert (
        load_settings(config_file, ["data.path=train.jsonl"]).data.path.absolute()
        == elsewhere / "train.jsonl"
    )
    sets = "evaluation: {sets: [{preset: amc23, path: held/amc.jsonl}, {name: b, path: b.jsonl}]}\n"
    config_file.write_text(config_file.read_text() + sets)
    heldout = load_settings(config_file).evaluation.heldout
    assert [(part.name, part.data.path) for part in heldout] == [
        ("amc23", tmp_path / "held" / "amc.jsonl"),
        ("b", tmp_path / "b.jsonl"),
    ]


def test_a_run_writes_settings_that_load_to_the_same(config_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(config_file.parent)
    settings = load_settings(config_file, ["data.path=train.jsonl", "engine.arguments=[--x]"])
    first, second = create_run(settings), create_run(settings)
    assert (first.name, second.name) == ("tiny-001", "tiny-002")
    assert (first / "logs").is_dir()
    monkeypatch.chdir("/")
    loaded = load_settings(first / "config.yaml")
    assert loaded.data.path == config_file.parent / "train.jsonl"
    assert loaded.model_dump(exclude={"data"}) == settings.model_dump(exclude={"data"})
    assert all(Path(yaml.safe_load((first / "config.yaml").read_text())[k]).is_absolute() for k in ["runs"])


def test_a_folder_that_cannot_be_written_is_one_message(config_file: Path):
    blocked = config_file.parent / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="runs"):
        create_run(load_settings(config_file, [f"runs={blocked}/runs"]))


def test_every_key_is_explained() -> None:
    def sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
        yield section
        for field in section.model_fields.values():
            for subsection in sections_in(field.annotation):
                yield from sections(subsection)

    models = set(sections(Settings))
    assert len(models) > 50
    assert [f"{s.__name__}.{k}" for s in models for k, f in s.model_fields.items() if not f.description] == []


def test_every_key_is_read_somewhere():
    """Read by attribute name; a key with the name of another may be missed."""
    files = [f for f in PACKAGE.rglob("*.py") if f.relative_to(PACKAGE).parts[0] != "config"]
    files += [
        PACKAGE / "config" / f"{name}.py"
        for name in ("losses", "schedules", "policy", "objective", "data", "evaluation", "reward")
    ]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    # ``type`` selects a section; while each union has one member, nobody needs to look at it.
    unread = [
        k for k in valid_keys(Settings) if (last := k.rpartition(".")[2]) not in names and last != "type"
    ]
    assert unread == ["guards.uncorrected"], "it only allows what config/combinations.py refuses without it"


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [(part["base"], *row) for part in REFUSED.values() for row in part["refused"]],
)
def test_settings_that_would_not_do_what_they_say(base: dict, changes: str | dict, message: str) -> None:
    sections, overrides = ({}, changes.split("; ")) if isinstance(changes, str) else (changes, [])
    with pytest.raises(UserError, match=".*".join(map(re.escape, message.split(".*")))) as error:
        make_settings(copy.deepcopy(base) | sections, overrides, "c.yaml")
    assert "\n" not in str(error.value)


def test_of_a_long_value_the_beginning_is_shown(config_file: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"(got '{'9x' * 39}9...)")):
        load_settings(config_file, [f"training.steps={'9x' * 100_000}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: m}\ndata: [\n", "c.yaml:3: not valid YAML: "),
        ("model: {path: m}\ndata:\n\tpath: d\n", "c.yaml:3: not valid YAML: "),
        ("model: {path: m}\ndata: {limit: 2}\n", "set path (a file), hub, preset, mixture or source"),
        ("model: &m [&n [a, b, c]]\ndata: [*m, *m]\n", "model: must be a section of keys and values"),
    ],
)
def test_a_broken_file_is_one_short_line_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_settings(file)
    assert message in (line := str(caught.value).splitlines()[0])
    assert len(line) < len(str(tmp_path)) + 200
    assert "unicode string" not in line


def test_explained_settings_have_each_keys_meaning(config_file: Path) -> None:
    settings = load_settings(config_file, ["evaluation.sets=[{preset: amc23}]", "data.where={level: 5}"])
    plain, explained = resolved_yaml(settings), resolved_yaml(settings, explained=True)
    assert yaml.safe_load(explained) == yaml.safe_load(plain)
    comments = " ".join(line.strip("# ") for line in explained.splitlines() if line.lstrip().startswith("#"))
    for section in (Settings, type(settings.objective), type(settings.bridge), type(settings.engine)):
        for name, field in section.model_fields.items():
            assert field.description, name
            assert " ".join(field.description.split()) in comments, name
    assert "One of: fkl, ufkl, rkl, urkl." in comments
    assert "One of: rpg, grpo, dapo" in comments
    assert "level (token): One ratio per token" in comments, "a key of a section that is null"
    assert "buffer (null): Length, in tokens before" in comments
    assert comments.count("Share of the prompts relative to the other sources") == 1
    assert "answer_boxed, where, limit: as above." in comments, "of a mixture"


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.type=grpo", "advantage.type=grpo", "anchor.type=fixed"],
        ["objective={type: grpo, beta: 0}", "advantage.type=grpo"],
        ["objective.type=grpo", "advantage.type=leave_one_out", "anchor.type=every"],
        ["objective.type=dapo", "advantage.type=grpo"],
        ["objective.type=cispo", "advantage.type=grpo"],
        ["objective.type=reinforce_plus_plus", "advantage.type=reinforce_plus_plus"],
        ["objective.type=reinforce_plus_plus", "advantage.type=reinforce_plus_plus_baseline"],
        ["objective.type=ppo"],
        ["advantage.type=leave_one_out"],
        ["objective.type=ppo", "reward.kl={coefficient: 0.1, estimator: k3}", "anchor.type=every"],
        ["rollout.top_p=0.9", "rollout.stop=['\n\n']", "correction={type: truncate}"],
        ["rollout.top_k=20", "guards.uncorrected=true"],
    ],
)
def test_a_whole_baseline_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\ndata: {path: d}\n")
    load_settings(file, overrides)


@pytest.mark.parametrize("longest", [64, 2048])
def test_the_overlong_penalty_needs_no_numbers(tmp_path: Path, longest: int) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\ndata: {path: d}\n")
    overlong = load_settings(
        file, ["reward.overlong={}", f"rollout.max_response_tokens={longest}"]
    ).reward.overlong
    assert overlong is not None
    assert overlong_penalty(overlong, longest, longest) == -1.0
    assert overlong_penalty(overlong, longest * 3 // 4, longest) == 0.0


def test_resolved_settings_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {path: m}\ndata: {path: d}\nguards: {mismatch: off}\ncorrection: {type: truncate}\n"
    )
    first = load_settings(
        file, ["objective={type: gspo}", "advantage.type=grpo", "aggregation.type=sequence_mean"]
    )
    assert first.guards.mismatch == "off"
    file.write_text(resolved_yaml(first))
    loaded = load_settings(file)
    relative = {"model": first.model, "data": first.data, "runs": first.runs}
    assert loaded.model_copy(update=relative) == first


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_file_on_top_of_others(tmp_path: Path) -> None:
    write(tmp_path / "base/model.yaml", "model: {path: weights}\nprecision: {dtype: float32}\n")
    write(tmp_path / "base/data.yaml", "data: {path: train.jsonl, max_prompt_tokens: 7}\nseed: 3\n")
    objective = "objective: {type: grpo, beta: 0.5, clip: {high: 0.4}}"
    objective += "\nadvantage: {type: grpo}\nanchor: {type: fixed}"
    write(tmp_path / "base/both.yaml", f"extends: [model.yaml, data.yaml]\nseed: 4\n{objective}\n")
    top = write(tmp_path / "a.yaml", "extends: base/both.yaml\nobjective: {clip: {low: 0.1}}\n")
    settings = load_settings(top, ["data.limit=9"])
    assert settings.model.path == tmp_path / "base" / "weights", "relative to the file it stands in"
    assert (settings.data.max_prompt_tokens, settings.data.limit, settings.seed) == (7, 9, 4)
    assert settings.objective.type == "grpo"
    assert settings.objective.beta == 0.5
    assert (settings.objective.clip.low, settings.objective.clip.high) == (0.1, 0.4), "blocks merge"

    rpg_file = write(tmp_path / "b.yaml", "extends: a.yaml\nobjective: {type: rpg, divergence: fkl}\n")
    objective_of_another_type = load_settings(rpg_file).objective
    assert objective_of_another_type.type == "rpg"
    assert objective_of_another_type.beta == 1e-4, "another type begins anew"


def test_null_removes_a_value_of_an_extended_file(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml",
        "model: {path: m}\ndata: {path: d, where: {level: 5, kind: a}}\noptimizer: {lr: 0.1, beta1: 0.5}\n"
        "reward: {overlong: {factor: 2}, terms: {right: {type: boxed}, style: {type: gsm8k, failed: 1.0}}}\n"
        "objective: {type: my_losses:Loss, far: 2}\n",
    )
    top = "extends: base.yaml\noptimizer: {lr: null}\ndata: {where: {level: null}}\nobjective: {far: null}\n"
    top += "reward: {overlong: null, terms: {right: {weight: 2}, style: null}}\n"
    settings = load_settings(write(tmp_path / "top.yaml", top))
    assert (settings.optimizer.lr, settings.optimizer.beta1) == (type(settings.optimizer)().lr, 0.5)
    assert settings.data.where == {"kind": "a"}
    assert settings.reward.overlong is None
    assert {name: (term.type, term.weight) for name, term in settings.reward.terms.items()} == {
        "right": ("boxed", 2.0)
    }
    assert settings.objective.keywords == {"far": None}, "own code may take null"
    kept = write(tmp_path / "kept.yaml", "extends: base.yaml\nreward: {terms: {style: {failed: null}}}\n")
    assert load_settings(kept).reward.terms["style"].failed is None
    for wrong in ("model: null", "optimizer: {lrr: null}", "training: {steps: null}"):
        with pytest.raises(UserError):
            load_settings(write(tmp_path / "wrong.yaml", f"extends: base.yaml\n{wrong}\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: {a: 1}", "extends must be a file or a list of files"),
        ("extends: [3]", "extends must be a file or a list of files"),
        ("extends: loop.yaml", "which extends it"),
    ],
)
def test_files_that_cannot_be_extended(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "loop.yaml", "extends: top.yaml")
    with pytest.raises(UserError) as caught:
        load_settings(write(tmp_path / "top.yaml", text))
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["abc", "[[x]]", "{a: 1}"])
def test_messages_have_no_words_of_pydantic(config_file: Path, value: str) -> None:
    """Such as "literal['all-linear']", which it adds to the place of an error in a union."""
    words = re.compile(
        r"Input should|constrained|(literal|tuple|list|dict)\[|\.(int|bool|str|float)\b|\[key\]"
    )
    for key in dict.fromkeys(valid_keys(Settings)):
        message = ""
        try:
            load_settings(config_file, [f"{key}={value}"])
        except UserError as e:
            message = str(e)
        assert not words.search(message), message
