"""Mistakes of users who know the README and the pages of ``docs/`` only: commands as they would type them.

Why: the first message decides whether a newcomer goes on. Each mistake was written down before its message
was read: by a newcomer, a user of verl or TRL, somebody with data of their own, somebody on a cluster. Each
is refused, or told as a warning, before anything starts: with one line (or one for each of several problems)
that says what is wrong, where, and what to do, and without a traceback.

Not covered: what only a started run can find; commands that need Slurm, NeMo-Run, a GPU or the hub; other
messages of an episode's trial, which takes seconds (test_episode_trial.py); every value that a setting
refuses (test_config.py).
"""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from rpg_megatron import cli
from tests.support.commands import without_notice

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
RUN = """\
name: run
device: cpu
model: {path: MODELS/plain}
precision: {dtype: float32}
data: {path: train.jsonl, max_prompt_tokens: 32}
rollout: {prompts_per_step: 4, samples_per_prompt: 4, max_response_tokens: 32}
training: {steps: 2, minibatches: 2}
engine: {max_sequences: 16, kv_cache_gib: 0.25}
"""
SFT = """\
name: warm
device: cpu
model: {path: MODELS/plain}
precision: {dtype: float32}
sft: {data: {path: solutions.jsonl, max_tokens: 64}, batch_size: 4, epochs: 1}
"""
FILES = {
    "run.yaml": RUN,
    "sft.yaml": SFT,
    "train.jsonl": [{"prompt": f"Compute {i}+{i}\n", "answer": str(2 * i)} for i in range(8)],
    "heldout.jsonl": [{"prompt": f"Compute {i}+1\n", "answer": str(i + 1)} for i in range(4)],
    "solutions.jsonl": [{"prompt": f"Compute {i}+{i}\n", "response": f"Answer: {2 * i}"} for i in range(8)],
    "graded.jsonl": [{"response": "Answer: 2", "answer": "2"}],
}


class Mistake(NamedTuple):
    """A command of ``rpg-megatron``; "run OVERRIDES" stands for ``train run.yaml --dry-run OVERRIDES``."""

    command: str
    words: str
    """Regular expression of what the message says, its remedy included."""
    files: dict[str, str | list[dict[str, object]]] = {}  # noqa: RUF012  never changed
    lines: int = 1
    """Problems that are listed, one in a line."""
    warned: bool = False
    """It is a warning: what the user wants may be just this."""


DATA = Path(__file__).parents[1] / "data" / "mistakes.yaml"
MISTAKES = [Mistake(**mistake) for mistake in yaml.safe_load(DATA.read_text("utf-8"))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: the quickstart's, and what users have instead."""
    folder = tmp_path_factory.mktemp("models")
    for name, without, settings in (
        ("plain", "", {}),
        ("no-template", "chat_template.jinja", {}),
        ("no-tokenizer", "tokenizer.json", {}),
        ("other", "", {}),
        ("alike", "", {}),
        ("gemma", "", {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}),
        ("awq", "", {"quantization_config": {"quant_method": "awq", "bits": 4}}),
        ("kimi", "tokenizer.json", {}),
    ):
        shutil.copytree(MODEL, folder / name, ignore=shutil.ignore_patterns(without))
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | settings))
    code = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (folder / "kimi" / "tokenizer_config.json").write_text(json.dumps(code))
    file = folder / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[5:7]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(tokenizer))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.command for mistake in MISTAKES])
def test_a_mistake_is_told_in_one_line(mistake: Mistake, models: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {**FILES, **mistake.files}.items():
        Path(name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        Path(name).write_text(text.replace("MODELS", str(models)))
    command = re.sub(r"^run\b", "train run.yaml --dry-run", mistake.command).replace("MODELS", str(models))
    words = shlex.split(command)

    with pytest.raises(SystemExit) as ended:
        cli.main(words)

    shown = capsys.readouterr().err
    usage = r"Usage: |Try '|$"  # above a mistake of the command line itself
    lines = [line for line in without_notice(shown).splitlines() if not re.match(usage, line)]
    assert ended.value.code == (0 if mistake.warned else 2), shown
    assert len(lines) == mistake.lines, shown
    assert re.match("warning: " if mistake.warned else "(?i)error: ", lines[0]), shown
    assert re.search(mistake.words, lines[0]), shown
    assert "Traceback" not in shown
    assert not (tmp_path / "runs").exists()
