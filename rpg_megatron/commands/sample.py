"""``rpg-megatron sample``: prints responses of a run, with their rewards, from its saved rollouts."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rpg_megatron.commands.report.run_files import read_run
from rpg_megatron.commands.report.samples import decode_prompts
from rpg_megatron.config.errors import UserError
from rpg_megatron.system.terminal import one_line, printable

if TYPE_CHECKING:
    from rpg_megatron.data.trajectory import Trajectory


def print_samples(folder: Path, step: int | None, prompt: str | None, count: int) -> None:
    """Print responses of a step, grouped by prompt, at most ``count``.

    step: None: the newest one that is saved. prompt: only prompts that contain this text. Raises UserError if
    there is no such run, step or prompt.
    """
    from rpg_megatron.data.foreign_rollouts import iter_foreign_step  # numpy and pyarrow
    from rpg_megatron.data.rollout_files import find_rollouts, step_of

    run, file = read_run(folder), find_rollouts(folder, step)
    prompts = {t.group: t.prompt.tolist() for t in iter_foreign_step(file, folder)}
    texts = dict(zip(prompts, decode_prompts(run, list(prompts.values())), strict=True))
    matching, group = 0, None
    for t in iter_foreign_step(file, folder):
        if prompt is not None and prompt not in texts[t.group]:
            continue
        matching += 1
        if matching > count:
            continue
        if t.group != group:
            print(f"step {step_of(file)}, prompt {t.prompt_id}, answer {one_line(t.answer)}")
            print(textwrap.indent(printable(texts[t.group].rstrip("\n")), "  "))
        group = t.group
        branch = f", branch {t.branch}" if t.branch else ""
        print(f"-- response {t.sample}{branch}: {_describe(t)}")
        print(textwrap.indent(printable(t.text), "  "))
    if not matching:
        raise UserError(f"{file}: no prompt contains {prompt!r}; give another text, or another --step")
    more = "; raise --count for more" if matching > count else ""
    print(f"{min(matching, count)} of {matching} responses{more}")


def _describe(t: Trajectory) -> str:
    parts = ", ".join(f"{one_line(name)} {value:.4g}" for name, value in t.parts.items())
    several = f" ({parts})" if len(t.parts) > 1 else ""
    verdict, cut = "correct" if t.correct else "wrong", ", truncated" if t.finish == "length" else ""
    words = f"reward {t.reward:.4g}{several}, {verdict}, {t.sampled} tokens{cut}"
    return f"{words}, {one_line(t.reason)}" if t.reason else words
