"""Runs the user's episode before a run: two responses to the first problem, on a stand-in engine.

All but the engine is as in the run: worker processes, gateway, the run's reward. Turns are the reference
answer or random tokens. What an episode makes of such texts is a warning; a wrong use of ``generate`` and
``Episode`` is an error, and so is an episode without an end.

``python -m rpg_megatron.launcher.episode_trial FOLDER`` is the process that does it: settings from
FOLDER/config.yaml, its answer is FOLDER/failures.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.files import atomic_write_text, read_json
from rpg_megatron.data.problems import first_problems
from rpg_megatron.launcher.run_dir import resolved_yaml
from rpg_megatron.system.child import module_command

_SECONDS, _START = 60.0, 400.0
"""Limit of an episode besides its turns, in which it may import for long on a busy machine, and of the
process."""
_WRONG = (
    r"(TypeError|AttributeError|NameError|UnboundLocalError|ImportError|ModuleNotFoundError|NotImplementedError)\b"
    r"|it ended without a turn|ended after|.*(generate is called|metric '|chat template)"
)
"""Failures of which no text of the policy is the cause."""


def try_episode(settings: Settings, *, offline: bool = False) -> list[str]:
    """Run the episode, if there is one. offline: do not, since it may need a server.

    Returns warnings. Raises UserError if it is wrong, with ``guards.reward_failures`` stop.
    """
    section, guard = settings.rollout.episode, settings.guards.reward_failures
    if section is None or settings.sft is not None or guard == "off":
        return []
    name = f"rollout.episode.type {section.type}"
    if offline:
        return [f"{name} was not called: it may need a server; train and doctor call it"]
    with tempfile.TemporaryDirectory(prefix="rpg-trial-") as folder:
        atomic_write_text(Path(folder, "config.yaml"), resolved_yaml(settings))
        command = module_command("rpg_megatron.launcher.episode_trial", folder)
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{name} has not ended after {_START:g} s, with an engine that answers at once"
            ) from None
        try:
            failures = read_json(Path(folder, "failures.json"))
        except FileNotFoundError:
            last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            return [f"{name} could not be called: {last.removeprefix('error: ')}"]
    advice = "correct it, or set guards.reward_failures=warn to start anyway"
    advice = "await generate and score, or " * any("'coroutine' object" in f[1] for f in failures) + advice
    wrong = [
        f"{text}; {advice}" for kind, detail, text in failures if kind != "error" or re.match(_WRONG, detail)
    ]
    if wrong and guard == "stop":
        raise UserError("\n".join(wrong))
    others = [f"{text}; with a text that means nothing" for *_, text in failures]
    return wrong or others


async def _run(settings: Settings, folder: Path) -> list[tuple[str, str, str]]:
    """Kind, detail and text of each failure."""
    from rpg_megatron.data import prompts
    from rpg_megatron.rollout.gateway import CHAT
    from rpg_megatron.rollout.groups import GroupTask
    from rpg_megatron.rollout.seeds import stop_tokens
    from rpg_megatron.rollout.worker import Worker
    from rpg_megatron.rollout.worker_files import CODEC

    part = settings.prompt_sets[0]
    data = part.data.model_copy(update={"too_long": "cut"})
    problem = next(first_problems(part.data, part.where))
    with prompts.without_torch():
        tokenizer = prompts.load_tokenizer(settings.model.path)
    prompts.save_codec(tokenizer, folder / CODEC)
    prompts.save_chat_template(tokenizer, part.data, folder / CHAT)
    (prompt,), _ = prompts.fit_prompts([problem], data, tokenizer, part.where)
    stops = stop_tokens(settings.model.path, tokenizer, settings.rollout.stop_token_ids, chats=True)
    codec = prompts.codec_of(tokenizer)
    engine: Any = _Engine([*codec.encode(prompt.answer), stops[0]], tokenizer.vocab_size)
    worker = Worker(settings, codec, [engine], folder, stops)
    task = GroupTask(
        0, prompt.id, prompt.tokens, prompt.answer, 2, settings.seed, settings.rollout.max_response_tokens, 0,
        context=prompt.context,
    )  # fmt: skip
    try:
        await worker.generate(task, 0, 0)
        first = (await worker.score(0)).failures.first
    except UserError as e:
        return [("wrong", "", str(e))]
    finally:
        worker.close()
    return [(failure.kind, failure.detail, str(failure)) for failure in first]


class _Engine:
    """Its turns are the given tokens, or random ones."""

    def __init__(self, answer: list[int], vocab: int):
        self._answer, self._vocab = answer, vocab

    async def generate(self, prompt: Any, *, n: int, max_tokens: int, seed: int, **_: Any) -> list[Any]:
        import numpy as np

        from rpg_megatron.engine.client import Sample

        def sample(seed: int) -> Sample:
            drawn = np.random.default_rng(seed).integers(0, self._vocab, 16).tolist()
            tokens = (self._answer if seed % 2 else [*drawn, self._answer[-1]])[:max_tokens]
            finish = "stop" if tokens[-1] == self._answer[-1] else "length"
            return Sample(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), finish, 0)

        return [sample(seed + number) for number in range(n)]


def main() -> int:
    """Run the process."""
    import asyncio  # a command that only checks does without

    folder = Path(sys.argv[1])
    settings = load_settings(folder / "config.yaml")
    section = settings.rollout.episode
    assert section is not None
    episode = section.model_copy(update={"deadline": min(section.deadline, _SECONDS), "workers": 1})
    rollout = settings.rollout.model_copy(update={"episode": episode, "tool_call_parser": None, "workers": 1})
    settings = settings.model_copy(update={"rollout": rollout, "teacher": None})
    try:
        failures = asyncio.run(_run(settings, folder))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    atomic_write_text(folder / "failures.json", json.dumps(failures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
