"""Models whose chat template ends a turn with another token than the tokenizer's eos_token learn to stop.

Why: bases whose template was written for their chat models train, evaluate and export with the wrong end
otherwise: the loss falls, and each answer is cut at the limit. Proved with the quickstart's model, fine-tuned
on chats with three such templates and sampled by a real engine: held-out answers end by themselves, the
export names the end, and a plain evaluation of the export stops there too. A template without any end is
refused with what to set, and works with that. Default: one template; long: the others.
Not covered here: which tokens are trained (tests/unit/test_chat_properties), generation on GPUs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import Command
from tests.support.runs import QUICKSTART

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.timeout(900)]

HELD_OUT = 48
USER = "{%- for m in messages %}{%- if m.role == 'user' %}{{ m.content }}{%- else %}{{ m.content + "
TEMPLATES = {
    "another special token": (USER + "'<|endoftext|>\\n' }}{%- endif %}{%- endfor %}", "<|endoftext|>"),
    "a token of its own": (USER + "'<|turn|>\\n' }}{%- endif %}{%- endfor %}", "<|turn|>"),
    "then eos": (
        USER + "'<|turn|>\\n' }}{%- endif %}{%- endfor %}{{ '' if add_generation_prompt else eos_token }}",
        "<|turn|>",
    ),
}
NO_END = USER + "'\\n' }}{%- endif %}{%- endfor %}"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_model(folder: Path, template: str) -> None:
    """The quickstart's model with a template, and <|turn|> in place of the last token of its vocabulary."""
    shutil.copytree(QUICKSTART.parent / "quickstart" / "model", folder)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    vocabulary = described["model"]["vocab"]
    [last] = [token for token, number in vocabulary.items() if number == len(vocabulary) - 1]
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in described["model"]["merges"]]
    described["model"]["merges"] = [pair for pair in pairs if "".join(pair) != last]
    vocabulary["<|turn|>"] = vocabulary.pop(last)
    added = described["added_tokens"][0] | {"id": vocabulary["<|turn|>"], "content": "<|turn|>"}
    described["added_tokens"].append(added)
    file.write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text(template)


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    command = Command(folder, *arguments)
    code, err = command.finish()
    command.assert_nothing_left(60)
    return code, err, command.out.read_text()


def config_for(folder: Path) -> Path:
    settings: dict[str, Any] = yaml.safe_load((QUICKSTART.parent / "warm_start.yaml").read_text())
    assets = QUICKSTART.parent / "quickstart"
    settings["model"]["path"] = str(folder / "model")
    for part in ("data", "heldout"):
        settings["sft"][part] |= {"path": str(assets / "solutions.jsonl"), "chat": True}
    data = {"path": str(assets / "heldout.jsonl"), "max_prompt_tokens": 32, "limit": HELD_OUT, "chat": True}
    settings["evaluation"] = {"data": data, "samples": 1, "every": 1000}
    settings["sft"]["epochs"], settings["optimizer"]["lr"] = 6, 1e-3  # the model knows another end
    file = folder / "sft.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_end_by_themselves(tmp_path: Path, name: str) -> None:
    template, mark = TEMPLATES[name]
    write_model(tmp_path / "model", template)
    code, err, out = run(tmp_path, "sft", str(config_for(tmp_path)), "name=turns", "runs=runs")
    assert code == 0, (err, out)
    assert cut_in(tmp_path) <= 0.05 * HELD_OUT
    [export] = (tmp_path / "runs" / "turns-001" / "hf").iterdir()
    named = json.loads((export / "generation_config.json").read_text())["eos_token_id"]
    vocabulary = json.loads((export / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary[mark] in named
    assert vocabulary["<|im_end|>"] in named, "its own end stays one"

    # A plain evaluation knows nothing of the template, and stops by what the export names.
    heldout = str(QUICKSTART.parent / "quickstart" / "heldout.jsonl")
    more = [
        f"--data={heldout}",
        "--samples=1",
        "data.limit=48",
        "--max-response-tokens=64",
        "--out=evaluated",
    ]
    code, err, out = run(tmp_path, "eval", str(export), *more)
    assert code == 0, (err, out)
    [summary] = json.loads((tmp_path / "evaluated" / "summary.json").read_text())["sets"].values()
    assert summary["truncated"]["frac"] <= 0.05


def cut_in(folder: Path) -> float:
    """Answers of the last evaluation that were cut at the limit."""
    rows = [json.loads(line) for line in (folder / "runs/turns-001/metrics.jsonl").read_text().splitlines()]
    return HELD_OUT * next(float(row[key]) for row in rows[::-1] for key in row if "truncated_frac" in key)


def test_a_template_without_an_end_is_refused_with_what_to_set(tmp_path: Path) -> None:
    write_model(tmp_path / "model", NO_END)
    code, err, _ = run(tmp_path, "sft", str(config_for(tmp_path)), "runs=runs")
    assert code == 2, err
    assert "the chat template writes no token at the end of the turn" in err
    assert "set rollout.stop_token_ids to the token that ends a turn, such as [1] ('<|im_end|>')" in err
    assert err.count("\n") <= 2, err


@pytest.mark.long
def test_a_template_without_an_end_and_a_token_that_is_set(tmp_path: Path) -> None:
    write_model(tmp_path / "model", NO_END)
    settings = ["name=turns", "runs=runs", "rollout.stop_token_ids=[0]"]
    code, err, out = run(tmp_path, "sft", str(config_for(tmp_path)), *settings)
    assert code == 0, (err, out)
    assert cut_in(tmp_path) <= 0.05 * HELD_OUT
