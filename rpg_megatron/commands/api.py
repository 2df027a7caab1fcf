"""``rpg_megatron.load_run`` and ``rpg_megatron.train``, for notebooks and scripts. Imports no torch.

Files of a run are read as the report reads them: others may have made them.
"""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.commands.exit_codes import UNSAVED
from rpg_megatron.commands.report.changes import find_changes
from rpg_megatron.commands.report.render import render_page
from rpg_megatron.commands.report.run_files import read_run, step_in_name
from rpg_megatron.commands.report.samples import decode_prompts, read_problems
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.files import atomic_write_text, read_text
from rpg_megatron.config.settings import make_settings
from rpg_megatron.data.foreign_rollouts import iter_foreign_step
from rpg_megatron.data.rollout_files import find_rollouts, list_rollouts, step_of
from rpg_megatron.launcher.run_dir import resolved_yaml
from rpg_megatron.system.child import module_command, start_program

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "UserError", "load_run", "train"]

_RESPONSE = (
    *("prompt_id", "group", "sample", "branch", "prompt", "text", "reward"),
    *("correct", "answer", "extracted", "reason", "advantage"),
)
"""Columns of a response, named as in ``Trajectory``; the prompt as text."""
_EVALUATION = 1 << 30
"""Maximum bytes to read of the responses of an evaluation."""


def load_run(path: str | Path) -> Run:
    """Read the folder of a run, which may be finished or not. Raises UserError if it is none."""
    return Run(Path(path))


def train(
    settings: str | Path | Mapping[str, Any] | Settings,
    overrides: Mapping[str, Any] | None = None,
    *,
    fresh: bool = False,
    source: str | Path | None = None,
) -> Run:
    """Train in a process of its own, as ``rpg-megatron train`` does on one node; its output is printed.

    settings: a YAML file, or its content; relative paths in the content are taken from the working directory.
    overrides: values by dotted keys, such as ``{"optimizer.lr": 1e-5}``. fresh: do not resume an unfinished
    run of this name. source: a checkpoint to start a new run from.

    An interrupt lets the run save and end, a second one ends it at once; then KeyboardInterrupt is raised.
    Raises UserError if the settings are wrong or the run fails.
    """
    arguments = [f"{key}={json.dumps(value, default=str)}" for key, value in (overrides or {}).items()]
    command = module_command("rpg_megatron.cli", "train")
    with tempfile.TemporaryDirectory(prefix="rpg-train-") as folder:
        if isinstance(settings, str | Path):
            load_settings(Path(settings), arguments)  # refuses secrets, which all users could read there
            command += [str(settings), *arguments]
        else:
            raw = settings.model_dump(mode="json") if isinstance(settings, Settings) else dict(settings)
            # A hub id is resolved first: in the file, it would become a path.
            chosen = with_local_model(make_settings(raw, arguments, "settings"))
            file = Path(folder, "settings.yaml")
            atomic_write_text(file, resolved_yaml(chosen))
            command.append(str(file))
        command += ["--fresh"] if fresh else []
        command += ["--from", str(source)] if source else []
        return load_run(_stream(command, Path(folder, "run")))


def _stream(command: list[str], named: Path) -> Path:
    """Run the command and print its output; returns the run's folder. named: a file that will name it."""
    from rpg_megatron.commands.train import RUN_FILE  # the launcher

    # Not in the process group of a notebook, which some interrupt as a whole: the run would get it twice.
    process = start_program(
        command,
        signal.SIGTERM,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {RUN_FILE: str(named)},
    )
    assert process.stdout is not None
    message, interrupted = "", False
    while True:
        try:
            line = process.stdout.readline(1 << 20)
            if not line:
                break
            print(line, end="", flush=True)
            message = line if line.startswith("error: ") else message and message + line
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)
    process.stdout.close()
    code = process.wait()
    if interrupted:
        raise KeyboardInterrupt
    if code not in (0, UNSAVED):
        text = message.removeprefix("error: ").strip()
        raise UserError(text or f"the run ended with exit code {code}; the output says why")
    folder = Path(read_text(named))
    if code == UNSAVED:
        raise UserError(f"{folder}: trained, but its last checkpoint was not written; the output says why")
    return folder


class Run:
    """A run as its folder was when this was made. Data frames are made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if it is not the folder of a run."""
        self._files = files = read_run(folder)
        self.folder = folder
        self.settings: dict[str, Any] = files.config
        """Every setting by its dotted key, such as ``optimizer.lr``."""
        self.finished: bool = files.finished
        """Whether the run has ended by itself."""
        self.notes: list[str] = files.notes
        """What could not be read so far, one sentence each."""

    def __repr__(self) -> str:
        state = "finished" if self.finished else "running" if self._files.running else "not finished"
        return f"Run({str(self.folder)!r}, {self._files.steps} steps, {state})"

    @property
    def metrics(self) -> pd.DataFrame:
        """One row for each step, the index, and a column for each metric, float64; NaN where it has none."""
        pd = _pandas()
        rows = self._files.rows
        index = pd.Index([int(row["step"]) for row in rows], dtype="int64", name="step")
        return pd.DataFrame(rows, index=index).drop(columns="step", errors="ignore").astype("float64")

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of the complete checkpoints, by step."""
        return list(list_steps(self.folder).values())[::-1]

    @property
    def response_steps(self) -> list[int]:
        """Steps whose responses are saved."""
        return list(map(step_of, list_rollouts(self.folder)))

    def responses(self, step: int | None = None) -> pd.DataFrame:
        """The responses of a step, by default the newest one that is saved; one row each.

        Columns: step, prompt_id, group, sample, prompt, text, reward, correct, answer, extracted, reason,
        advantage, tokens, finish, and a column ``part/NAME`` for each component of the reward. Raises
        UserError if the step has none or cannot be read.
        """
        return self._read_responses(find_rollouts(self.folder, step))

    def iter_responses(self) -> Iterator[pd.DataFrame]:
        """``responses`` of every step that is saved, read one at a time."""
        return map(self._read_responses, list_rollouts(self.folder))

    @property
    def evaluations(self) -> pd.DataFrame:
        """The responses to held-out problems, one row each.

        Columns: step, set, prompt_id, prompt, answer, sample, text, correct, tokens, finish. What cannot be
        read is left out and becomes a note.
        """
        rows: list[dict[str, Any]] = []
        for file in sorted((self.folder / "evaluation").glob("step_*.jsonl")):
            try:
                problems, whole = read_problems(self._files, file, _EVALUATION)
            except OSError as e:
                self.notes.append(f"{file.name} cannot be read ({e.strerror})")
                continue
            if not whole:
                self.notes.append(f"only the first {_EVALUATION >> 30} GiB of {file.name} were read")
            for p in problems:
                same = {name: getattr(p, name) for name in ("set", "prompt_id", "prompt", "answer")}
                for sample, text in enumerate(p.responses):
                    row = {"sample": sample, "text": text, "correct": p.correct[sample]}
                    row |= {"tokens": p.lengths[sample], "finish": p.finishes[sample]}
                    rows.append({"step": step_in_name(file)} | same | row)
        return _pandas().DataFrame(rows)

    def plot(self, *others: Run) -> Page:
        """The report of this run, as it is now, beside others; a notebook shows it."""
        return Page([self.folder, *(other.folder for other in others)])

    def _read_responses(self, file: Path) -> pd.DataFrame:
        pd = _pandas()
        rows: list[dict[str, Any]] = []
        prompts: dict[int, list[int]] = {}  # by group
        for t in iter_foreign_step(file, self.folder):
            prompts.setdefault(t.group, t.prompt.tolist())
            parts = {f"part/{name}": value for name, value in t.parts.items()}
            row = {name: getattr(t, name) for name in _RESPONSE}
            rows.append({"step": step_of(file)} | row | {"tokens": t.sampled, "finish": t.finish} | parts)
        texts = dict(zip(prompts, decode_prompts(self._files, list(prompts.values())), strict=True))
        return pd.DataFrame([row | {"prompt": texts[row["group"]]} for row in rows])


class Page:
    """A report that a notebook shows in a frame; without one, use ``rpg-megatron report``."""

    def __init__(self, folders: list[Path]) -> None:
        """Raises UserError if a folder is not that of a run."""
        runs = [read_run(folder) for folder in folders]
        self._page = render_page(runs).decode()
        self._lines = ["The report is drawn when it is scrolled to."]
        for run in runs:
            self._lines.append(f"{run.folder.name}: {run.steps} steps")
            self._lines += [f"{c.name}: {c.before:.4g} → {c.after:.4g}" for c in find_changes(run, {})]

    def _repr_html_(self) -> str:
        # The frame may run the page's scripts, but cannot reach the notebook around it. Browsers do not draw
        # such frames outside the window: in a picture of a whole notebook, the frame's background is seen.
        lines = "".join(
            f'<text x="16" y="{28 + 22 * i}">{html.escape(line)}</text>' for i, line in enumerate(self._lines)
        )
        picture = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui" fill="gray">{lines}</svg>'
        background = f"url(data:image/svg+xml,{quote(picture)}) no-repeat"
        style = f"width: 100%; height: 800px; border: 0; background: {background}"
        page = html.escape(self._page)
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("pandas is not installed, and data frames need it; run pip install pandas") from None
    return pandas
