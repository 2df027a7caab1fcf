"""Writes the files of ``rpg-megatron init``. Model and problems are the quickstart's."""

from __future__ import annotations

import json
import math
import random
import shlex
from pathlib import Path
from string import Template

import yaml

from rpg_megatron.commands.init.converters import place
from rpg_megatron.commands.init.from_config import convert_config
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import copy_file, open_own, open_regular
from rpg_megatron.config.policy import is_hub_id

CONFIG = "run.yaml"
OWN = {"custom": "my_reward.py", "tools": "my_tools.py"}
"""File with functions to change, by task."""
PROBLEMS = ("train.jsonl", "heldout.jsonl")
CONVERSATIONS = ("solutions.jsonl", "heldout.jsonl")
MODEL = "model"

_TEMPLATES = Path(__file__).parent
_EXAMPLES = Path(__file__).parents[3] / "examples"
_QUICKSTART = _EXAMPLES / "quickstart"
_REWARDS = {
    "math": """\
reward:                      # 1 if correct, -1 if wrong; docs/rewards.md
  type: answer_line          # the answer follows "Answer:"; others: boxed, gsm8k, auto""",
    "custom": """\
reward:                      # your own function; docs/extend.md
  type: my_reward:digits     # in my_reward.py
  partial: 0.5               # its setting""",
    "tools": """\
reward:                      # of the last message; your own function, docs/extend.md
  type: my_tools:exact       # in my_tools.py""",
    "sft": "",
}
_SFT = """\
# A run that works as it is, to be changed step by step: fine-tuning on prompts with responses, or on chats.
#
#   rpg-megatron sft run.yaml        starts a run, or resumes the newest one of this name
#
# A row of your data has prompt and response, or messages: then add chat: true beside max_tokens.
# Every setting with its default: rpg-megatron config run.yaml --explain; docs/warm-start.md
"""
_EPISODE = """\
  tool_call_parser: hermes   # how the model writes calls; vLLM's --tool-call-parser
  episode:                   # a chat in which the model may call tools; docs/environments.md
    type: rpg_megatron.environments.tools:use_tools
    tools:
      - my_tools:calculator  # in my_tools.py; there is also python, in a sandbox
    seconds: 60              # limit of a call
"""


def start(folder: Path, task: str, model: str | None, source: Path | None) -> list[str]:
    """Write the files of a task, or of a config of another stack; returns what to print. Raises UserError."""
    if source is not None and (task != "math" or model is not None):
        raise UserError("--from takes task and model from the file; leave out --task and --model")
    if folder.suffix in (".yaml", ".yml"):
        raise UserError(f"{folder}: give a folder, in which {CONFIG} is written (a config to read: --from)")
    if model is not None and not is_hub_id(model) and not Path(model).expanduser().is_dir():
        raise UserError(f"--model: {model} is not a directory; give a folder, or an id such as Qwen/Qwen3-4B")
    text, notes = convert_config(source) if source is not None else (None, [])
    written = ", ".join(str(folder / name) for name in write_files(folder, task, model, text))
    cd = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    command = "plan" if source is not None else "sft" if task == "sft" else "train"
    return [*notes, f"written: {written}", f"next: {cd}rpg-megatron {command} {CONFIG}"]


def write_files(folder: Path, task: str, model: str | None, text: str | None = None) -> list[str]:
    """Write a config and problems; for some tasks functions, and without ``model`` a tiny model.

    text: a config to write alone. Returns the names of the written files. Raises UserError if the task is
    unknown, if one of the files exists, or if the source tree, which contains the tiny model, is missing.
    """
    if task not in _REWARDS:
        raise UserError(f"--task {task}: must be one of {', '.join(_REWARDS)}")
    data = () if text is not None else CONVERSATIONS if task == "sft" else PROBLEMS
    tiny = model is None and text is None
    names = [CONFIG, *data, *filter(None, [OWN.get(task)])] + [MODEL] * tiny
    if there := [name for name in names if (folder / name).exists()]:
        raise UserError(f"{folder}: already contains {', '.join(there)}; give another folder")
    if text is None and not _QUICKSTART.is_dir():
        raise UserError(
            f"{_QUICKSTART} is missing; init copies problems and model from the source tree: install the "
            "package from a clone with pip install -e"
        )
    text = _config(task, MODEL if model is None else place(model)) if text is None else text
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for seed, name in enumerate(data):
            if task == "tools":
                _write_products(folder / name, seed)
            else:
                _copy(_QUICKSTART / name, folder)
        if tiny:
            (folder / MODEL).mkdir()
            for file in (_EXAMPLES / ("calculator" if task == "tools" else "quickstart") / MODEL).iterdir():
                _copy(file, folder / MODEL)
        if task in OWN:
            _copy(_TEMPLATES / OWN[task], folder)
        with open_own(folder / CONFIG, "x", encoding="utf-8") as config:
            config.write(text)
    except OSError as e:
        raise UserError(f"{e.filename or folder}: {e.strerror}; choose a folder that is writable") from None
    return names


def _config(task: str, model: str) -> str:
    quoted = yaml.safe_dump(model, width=math.inf, allow_unicode=True).splitlines()[0]
    if task == "sft":
        example = (_EXAMPLES / "warm_start.yaml").read_text(encoding="utf-8")
        settings = example[example.index("\nname:") :].replace("quickstart/model", quoted)
        return _SFT + settings.replace("path: quickstart/", "path: ")
    template = Template((_TEMPLATES / CONFIG).read_text(encoding="utf-8"))
    episode = _EPISODE if task == "tools" else ""
    length = "160" if episode else "64 "
    chat = "" if episode else "  # chat: true               # for models with a chat template\n"
    return template.substitute(MODEL=quoted, REWARD=_REWARDS[task], EPISODE=episode, LENGTH=length, CHAT=chat)


def _write_products(file: Path, seed: int) -> None:
    """Problems of the calculator's model."""
    draw = random.Random(seed)
    with open_own(file, "x", encoding="utf-8") as lines:
        for _ in range(400):
            a, b = draw.randint(11, 99), draw.randint(11, 99)
            lines.write(json.dumps({"prompt": f"What is {a}*{b}?", "answer": str(a * b)}) + "\n")


def _copy(file: Path, folder: Path) -> None:
    with open_regular(file) as source:
        copy_file(source, folder, file.name)
