"""``rpg-megatron init --from`` takes what maps from a verl, NeMo-RL or TRL config, and lists every other key.

Why: who comes with a config of another stack must not lose a setting without being told. The configs follow
the public recipes of the three stacks. Not covered: that a run with the result learns as theirs does, and
releases of theirs after those that docs/coming-from.md names.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rpg_megatron.commands.init import converters
from rpg_megatron.commands.init.command import start
from rpg_megatron.commands.init.converters import STACKS
from rpg_megatron.commands.init.from_config import convert_config
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.coming_from import find_row, rows
from rpg_megatron.config.explanation import valid_keys

KEYS = frozenset(valid_keys(Settings))
FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
EXPECTED = yaml.safe_load((FOREIGN / "expected.yaml").read_text(encoding="utf-8"))
NEMO_MATH_1B = (FOREIGN / "nemo_rl" / "math_1b.yaml").read_text(encoding="utf-8")


def convert(folder: Path, name: str, text: str) -> tuple[Settings, dict[str, str], str]:
    """Settings that load, reasons of their keys that were not taken, and the counts."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    written, notes = convert_config(file)
    (folder / "run.yaml").write_text(written, encoding="utf-8")
    assert all(f"\n# {note}\n" in written for note in notes[1:])
    pairs = [note.split("  # ") if "  # " in note else note.split(": ", 1) for note in notes[1:]]
    return load_settings(folder / "run.yaml"), {k.split(": ")[0]: why for k, why in pairs}, notes[0]


def value_of(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


def check(settings: Settings, expected: dict[str, Any]) -> None:
    found = {key: value_of(settings, key) for key in expected}
    plain = {type(Path()): str, tuple: list}
    assert {k: plain[type(v)](v) if type(v) in plain else v for k, v in found.items()} == expected


@pytest.mark.parametrize("file", EXPECTED)
def test_a_recipe_is_taken_as_expected(tmp_path, monkeypatch, file: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "grpo_math_1B.yaml").write_text(NEMO_MATH_1B, encoding="utf-8")  # others extend it
    text = (FOREIGN / file).read_text(encoding="utf-8")
    settings, reasons, _ = convert(tmp_path, Path(file).name, text)
    check(settings, EXPECTED[file]["taken"])
    assert {key for key in reasons if not key.startswith("here ")} == set(EXPECTED[file]["left"])


def test_every_key_is_counted(tmp_path: Path) -> None:
    _, reasons, counts = convert(tmp_path, "c.yaml", NEMO_MATH_1B)
    taken, left, listed = map(int, re.findall(r"\d+", counts))
    leaves = sum(1 for _ in flatten(yaml.safe_load(NEMO_MATH_1B)))
    assert taken + left + listed == leaves
    assert listed == len([key for key in reasons if not key.startswith("here ")])


def flatten(value: Any) -> Any:
    for inner in value.values():
        if isinstance(inner, dict) and inner:
            yield from flatten(inner)
        else:
            yield inner


def test_an_unknown_key_a_reference_and_the_reason_are_listed(tmp_path: Path) -> None:
    text = "{learning_rate: 1e-5, my_own_key: 3, max_steps: '${steps}', use_cpu: null, top_p: 0.9}"
    settings, reasons, counts = convert(tmp_path, "c.yaml", text)
    assert settings.optimizer.lr == 1e-5
    assert "lr: 1.0e-05" in (tmp_path / "run.yaml").read_text()  # "1e-5" is a text in YAML 1.1
    assert reasons["my_own_key"] == "unknown"
    assert reasons["max_steps"] == "refers to what is not in the file"
    assert reasons["top_p"].startswith("rollout.top_p needs a correction")
    assert reasons["here model.path"] == reasons["here data.path"] == "not in the file; check it"
    assert "1 taken, 1 not set, off or always so here, 3 not taken" in counts


def test_cispo_counts_from_one(tmp_path: Path) -> None:
    settings, *_ = convert(tmp_path, "c.yaml", "{loss_type: cispo, epsilon_high: 5.0}")
    check(settings, {"objective.type": "cispo", "objective.low": 1.0, "objective.high": 4.0})


def test_files_of_a_script_are_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also ``$(pwd)`` is known; and a reward's name without its file is not lost."""
    monkeypatch.chdir(tmp_path)
    reward = "algorithm.adv_estimator=grpo custom_reward_function.name=score custom_reward_function.path="
    settings, reasons, _ = convert(
        tmp_path, "a.sh", f'D="$(pwd)"\nmain {reward}$D/mine.py data.train_files=$(pwd)/a'
    )
    check(settings, {"reward.type": "mine:score", "data.path": str(tmp_path / "a")})
    assert "custom_reward_function.name" not in reasons
    settings, reasons, _ = convert(tmp_path, "b.sh", f"main {reward}$(dirname $0)/mine.py")
    check(settings, {"reward.type": "auto"})
    assert {"custom_reward_function.name", "custom_reward_function.path"} <= set(reasons)


def test_functions_of_trl_become_terms(tmp_path: Path) -> None:
    functions = "num_generations: 4, reward_funcs: [accuracy_reward, my.rewards.short]"
    text = f"{{{functions}, reward_weights: [1.0, 0.2]}}"
    settings, reasons, _ = convert(tmp_path, "a.yaml", text)
    found = {name: (term.type, term.weight, term.wrong) for name, term in settings.reward.terms.items()}
    assert found == {"accuracy_reward": ("auto", 1.0, 0.0), "short": ("my.rewards:short", 0.2, 0.0)}
    assert not {"reward_funcs", "reward_weights"} & set(reasons)
    _, reasons, _ = convert(tmp_path, "b.yaml", functions.join(("{", ", reward_weights: [1.0]}")))
    assert "reward_weights" in reasons


def test_words_of_the_tables_exist_on_both_sides() -> None:
    """Every key of ours in tables, converters and stacks.yaml exists, and theirs is in the tables."""
    assert {row.here for row in rows()} - KEYS == {""}
    assert set(STACKS["words"]) <= KEYS
    for stack, names in STACKS["defaults"].items():
        assert [
            n for n in names if (row := find_row(stack, n)) is None or row.name != n or not row.same
        ] == []
    for stack, names in STACKS["always"].items():
        assert [name for name in names if find_row(stack, name) is None] == []
    tree = ast.parse(Path(converters.__file__).read_text(encoding="utf-8"))
    literals = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    dotted = {text for text in literals if "." in text and text.replace(".", "").replace("_", "").isalnum()}
    others = {"stacks.yaml", "train.jsonl", "reward_model.ground_truth"}
    assert {text for text in dotted - others if text not in KEYS and "." not in (text[0], text[-1])} == set()
    assert len(dotted) > 20


@pytest.mark.parametrize(
    "row", [row for row in rows() if row.same], ids=lambda row: f"{row.stack}-{row.name}"
)
def test_a_row_that_takes_values_has_a_plain_key(row: Any) -> None:
    assert row.here in KEYS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "[1, 2]", "must contain keys and values, not a list"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "a: 1\na: 2", "appears twice"),
        ("a.yaml", "", "neither verl's, NeMo-RL's nor TRL's: its keys are none"),
        ("a.yaml", "{model: {path: x}, data: {path: y}}", "neither verl's, NeMo-RL's nor TRL's: its keys"),
        ("a.yaml", "{max_length: 9, packing: true, learning_rate: 1}", "max_length is a setting of"),
        ("a.yaml", "{sft: {max_num_epochs: 1}, policy: {model_name: m}}", "sft is a setting of fine-tuning"),
        ("a.sh", "echo hello", "neither verl's"),
        ("a.sh", "python -m x 'a.b=1", "cannot be read (No closing quotation)"),
        (None, "", "no such config file"),
        ("", "", "is a directory"),
    ],
)
def test_what_is_no_config_is_refused_in_one_line(
    tmp_path: Path, name: str | None, text: str, message: str
) -> None:
    file = tmp_path / (name or "") if name is not None else tmp_path / "none.yaml"
    if name:
        file.write_text(text, encoding="utf-8")
    if name == "":
        file = tmp_path / "folder.yaml"
        file.mkdir()
    with pytest.raises(UserError) as e:
        convert_config(file)
    assert message in str(e.value)
    assert len(str(e.value).splitlines()) == 1


ODD = (
    "abc",
    "",
    "[1]",
    "{a: 1}",
    ".inf",
    ".nan",
    "-1",
    "0",
    "1.5",
    "true",
    "~",
    "'~nobody/x'",
    "1e400",
    "[]",
)


@pytest.mark.parametrize("value", ODD)
def test_odd_values_are_listed_and_the_rest_loads(tmp_path: Path, value: str) -> None:
    for stack in STACKS["defaults"]:
        marks = {"verl": "algorithm: {x: 1}", "NeMo-RL": "loss_fn: {x: 1}", "TRL": "num_iterations: 1"}
        names = sorted(
            {row.name for row in rows() if row.stack == stack and row.same and "*" not in row.name}
        )
        for name in names[len(value) % 7 :: 7]:
            file = tmp_path / "c.yaml"
            inner = value
            for part in reversed(name.split(".")):
                inner = f"{{{part}: {inner}}}"
            raw = yaml.safe_load(marks[stack]) if not name.startswith(marks[stack][:5]) else {}
            file.write_text(yaml.safe_dump(raw | yaml.safe_load(inner)), encoding="utf-8")
            text, _ = convert_config(file)
            (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
            load_settings(tmp_path / "run.yaml")


def test_a_comment_cannot_become_a_setting(tmp_path: Path) -> None:
    text = yaml.safe_dump(
        {"learning_rate": 1e-5, "a\nseed: 7\nb\u2028\x85": "x\nseed: 8"}, allow_unicode=True
    )
    settings, *_ = convert(tmp_path, "c.yaml", text)
    assert settings.seed == 0


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text("{num_generations: 4, report_to: none, weird: 1}", encoding="utf-8")

    def init(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "rpg_megatron.cli", "init", *arguments]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    process = init("new", "--from", "grpo.yaml")
    assert process.returncode == 0, process.stderr
    first, unknown, *missing, written, then = process.stdout.splitlines()
    assert first == "TRL: 2 taken, 0 not set, off or always so here, 1 not taken"
    assert unknown == "weird: 1  # unknown"
    assert missing == [
        f"here {key}: not in the file; check it" for key in ("model.path", "data.path", "reward.type")
    ]
    assert (written, then) == ("written: new/run.yaml", "next: cd new && rpg-megatron plan run.yaml")
    again = init("new", "--from", "grpo.yaml")
    assert (again.returncode, again.stderr) == (
        2,
        "error: new: already contains run.yaml; give another folder\n",
    )
    with pytest.raises(UserError, match="leave out --task and --model"):
        start(tmp_path, "sft", None, file)
