"""docs/coming-from.md and docs/troubleshooting.md name what exists: settings, metrics, commands, messages.

Why: their readers have a problem or a deadline, and a key that was renamed costs more than no page. Not
covered: the settings of verl, NeMo-RL and TRL, which were read in their releases, and whether advice helps.
"""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer

from rpg_megatron.cli import app
from rpg_megatron.config import Settings, UserError, coming_from, load_settings
from rpg_megatron.config.explanation import valid_keys

ROOT = Path(__file__).parents[2]
FOREIGN = {
    "rollout.n=5": "verl's rollout.n is rollout.samples_per_prompt here",
    "actor_rollout_ref.actor.optim.lr=1e-6": "verl's actor.optim.lr is optimizer.lr here",
    "data.train_batch_size=512": "verl's data.train_batch_size is rollout.prompts_per_step here",
    "algorithm.adv_estimator=grpo": "verl's algorithm.adv_estimator is advantage.type here",
    "rollout.gpu_memory_utilization=1": "verl's rollout.gpu_memory_utilization is not here; see engine.kv_",
    "engine.gpu_memory_utilization=1": "verl's rollout.gpu_memory_utilization is not here; see engine.kv_",
    "critic.model.path=x": "verl's critic is not here",
    "grpo.num_prompts_per_step=32": "NeMo-RL's grpo.num_prompts_per_step is rollout.prompts_per_step here",
    "loss_fn.ratio_clip_min=0.2": "NeMo-RL's loss_fn.ratio_clip_min is objective.clip.low here",
    "policy.train_global_batch_size=8": "NeMo-RL's policy.train_global_batch_size is training.minibatches",
    "learning_rate=1e-5": "TRL's learning_rate is optimizer.lr here",
    "optimizer.learning_rate=1e-5": "TRL's learning_rate is optimizer.lr here",
    "num_generations=8": "TRL's num_generations is rollout.samples_per_prompt here",
    "report_to=wandb": "TRL's report_to is trackers here",
    "top_entropy_quantile=0.2": "TRL's top_entropy_quantile is not here",
}
"""A key of another stack -> what is said about it."""
COMING_FROM = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KEYS = frozenset(valid_keys(Settings))
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
FILE = re.compile(r".*\.(jsonl?|ya?ml|md|log|html|parquet|py|sh|sbatch|jinja|sub|txt)")
METRIC = re.compile(r"[a-z]+/[a-z0-9_]+")


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\n)+", BLOCK.sub("", page), re.MULTILINE)
    cells = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in t.splitlines()] for t in blocks
    ]
    return [[header, *rows] for header, _line, *rows in cells]


def settings_tables() -> list[list[str]]:
    """Rows of the settings tables: the other framework's, ours, remark."""
    return [row for header, *rows in tables(COMING_FROM) if header[1:] == ["here", "remark"] for row in rows]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def key_of(text: str) -> str:
    """The key of ``key``, ``key: value`` or ``key=value``."""
    return re.split(r"[:=]", text)[0].strip()


@cache
def sources() -> list[str]:
    """The package's files, each text of several literals joined to one line."""
    files = (ROOT / "rpg_megatron").rglob("*.py")
    return [re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8")) for file in files]


@cache
def metrics() -> frozenset[str]:
    """Keys of metrics.jsonl: whole texts, or f"family/{...}" with any text of the same file as the name."""
    keys = set()
    for source in sources():
        keys.update(re.findall(r'"([a-z]+/[a-z0-9_]+)"', source))
        names = re.findall(r'"([a-z0-9_]+)"', source)
        keys.update(f"{family}/{name}" for family in re.findall(r'f"([a-z]+)/{', source) for name in names)
    return frozenset(keys)


def missing(message: str) -> bool:
    """Whether no line of the package has the parts of a message between "..." in this order."""
    pattern = re.compile(".*".join(map(re.escape, message.split("..."))))
    return not any(pattern.search(source) for source in sources())


def test_every_setting_of_ours_beside_theirs_exists() -> None:
    assert len(settings_tables()) > 40
    named = {key_of(text) for _, ours, _ in settings_tables() for text in quoted(ours)}
    assert named - KEYS == set()


def test_the_package_has_the_page() -> None:
    assert Path(coming_from.__file__).with_name("coming-from.md").read_text(encoding="utf-8") == COMING_FROM
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["rpg_megatron.config"] == ["*.md"]


@pytest.mark.parametrize("override", FOREIGN)
def test_an_unknown_key_with_a_name_of_another_stack_says_what_it_is_here(override: str) -> None:
    with pytest.raises(UserError) as e:
        load_settings(ROOT / "examples/quickstart.yaml", [override])
    (line,) = str(e.value).splitlines()
    assert f"; {FOREIGN[override]}" in line
    assert "has the keys" not in line
    assert "have the keys" not in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.lr=1", "did you mean 'optimizer'?"),
        ("training.lr=1", "did you mean 'optimizer.lr'?"),
        ("rollout.temprature=1", "did you mean 'rollout.temperature'?"),
        ("training.foo=1", "training has the keys steps"),
    ],
)
def test_other_unknown_keys_are_explained_as_before(override: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_settings(ROOT / "examples/quickstart.yaml", [override])


def test_dotted_names_elsewhere_on_the_page_are_ours_or_theirs() -> None:
    their_keys = {key_of(text) for names, *_ in settings_tables() for text in quoted(names)}
    text = BLOCK.sub("", COMING_FROM)
    named = {key_of(t) for t in quoted(text) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key_of(t))}
    our_keys = {name for name in named if name.partition(".")[0] in SECTIONS and not FILE.fullmatch(name)}
    assert our_keys - KEYS - their_keys == set()


def test_every_recipe_of_theirs_has_one_of_ours_that_loads(tmp_path: Path) -> None:
    blocks = BLOCK.findall(COMING_FROM)
    assert len(blocks) == 3
    for block in blocks:
        file = tmp_path / "run.yaml"
        file.write_text(block, encoding="utf-8")
        settings = load_settings(file)
        assert (settings.objective.type, settings.advantage.type) == ("grpo", "grpo")


def test_every_setting_and_metric_for_troubles_exists() -> None:
    checked = 0
    for text in quoted(TROUBLESHOOTING):
        key = key_of(text)
        if METRIC.fullmatch(text):
            assert text in metrics(), text
        elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and not FILE.fullmatch(key):
            assert key in KEYS, key
        else:
            continue
        checked += 1
    assert checked > 150


def test_every_quoted_message_is_one_of_ours() -> None:
    symptoms = [row[0] for table in tables(TROUBLESHOOTING) for row in table]
    messages = [text for symptom in symptoms for text in re.findall(r'"([^"]+)"', symptom)]
    assert len(messages) > 30
    assert [text for text in messages if missing(text)] == []


@pytest.mark.parametrize("page", [COMING_FROM, TROUBLESHOOTING], ids=["coming-from", "troubleshooting"])
def test_every_command_exists(page: str) -> None:
    group = typer.main.get_command(app)
    commands = set(getattr(group, "commands", {}))
    assert "train" in commands
    assert set(re.findall(r"rpg-megatron ([a-z]+)", " ".join(quoted(page)))) <= commands
