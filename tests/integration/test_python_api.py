"""``import rpg_megatron``: a run as data frames, and training, as docs/python.md says.

Proved: the blocks of the page run as written on a run with made-up numbers; reading imports no torch, and the
import alone no package of others. ``train`` passes settings and overrides to the real command,
here with settings that it refuses. Not covered: a whole run, interrupts, how notebooks show the frame.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

import rpg_megatron
from rpg_megatron.config import UserError
from rpg_megatron.data.rollout_files import read_rollouts
from tests.support.report_runs import make_run

pytestmark = pytest.mark.usefixtures("forked_starts")

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("api") / "runs" / "math-001", steps=50)
    for name, manifest in (("step_000020", True), ("step_000040", True), ("step_000050", False)):
        (run / "checkpoints" / name).mkdir(parents=True)
        if manifest:
            (run / "checkpoints" / name / "manifest.json").write_text("{}")
    return run


def cells() -> tuple[list[str], str]:
    """The blocks that read a run, and the one that trains."""
    blocks = re.findall(r"```python( notebook)?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (train,) = [text for mark, text in blocks if mark]
    return [text for mark, text in blocks if not mark], train


def test_the_page_runs_as_written_and_imports_no_torch(folder: Path) -> None:
    reading, _ = cells()
    code = """
import sys
import rpg_megatron
others = {"pydantic", "typer", "yaml", "numpy", "pandas", "pyarrow", "torch"}
print("IMPORTED", sorted(others & sys.modules.keys()))
"""
    for text in reading:
        *before, last = ast.parse(text).body
        code += "".join(f"{ast.unparse(node)}\n" for node in before)
        shown = isinstance(last, ast.Expr)
        code += f"print('CELL', {ast.unparse(last)})\n" if shown else f"{ast.unparse(last)}\n"
    code += "print('TORCH', 'torch' in sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=folder.parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("IMPORTED []\n")
    assert done.stdout.endswith("TORCH False\n")
    assert "CELL Run('runs/math-001', 50 steps, finished)" in done.stdout
    assert done.stdout.count("CELL") == 8


def test_values_are_those_of_the_files(folder: Path) -> None:
    run = rpg_megatron.load_run(folder)
    assert run.finished
    assert run.settings["optimizer.lr"] == 1e-6
    assert list(run.metrics.index) == list(range(51))
    assert run.metrics["sync/version"].iloc[-1] == 50.0
    assert run.metrics["reward/mean"].isna().sum() == 1, "step 0 has no responses"
    assert [checkpoint.name for checkpoint in run.checkpoints] == ["step_000020", "step_000040"]
    assert run.response_steps == [1, 40]
    assert list(run.responses().step.unique()) == [40], "the newest"
    first = run.responses(1)
    assert len(first) == 16
    assert (first.text.str.endswith("True") == first.correct).all()
    written = read_rollouts(folder / "rollouts" / "step_000001.parquet")
    assert first.tokens.tolist() == [t.sampled for t in written]
    assert {len(t.response) - t.sampled for t in written} == {0, 8}
    assert [len(step) for step in run.iter_responses()] == [16, 16]
    evaluations = run.evaluations
    assert evaluations.groupby("step").size().to_dict() == {0: 160, 50: 160}
    score = run.metrics.loc[50, "eval/aime24/avg@4"]
    assert evaluations[evaluations.step == 50].correct.mean() == pytest.approx(score)
    frame = run.plot()._repr_html_()
    assert "<script" not in frame, "only within the frame"
    assert quote(f"{folder.name}: 50 steps") in frame, "seen where a browser does not draw the frame"
    with pytest.raises(UserError, match="has no rollouts of step 7, but of 1 to 40"):
        run.responses(7)
    with pytest.raises(UserError, match="no such folder"):
        rpg_megatron.load_run(folder / "nothing")


def test_without_pandas_there_is_one_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        _ = rpg_megatron.load_run(folder).metrics


def test_train_raises_the_message_of_the_command(config_file: Path) -> None:
    with pytest.raises(UserError, match=r"^.*tiny\.yaml: training\.steps: .*'many'"):
        rpg_megatron.train(config_file, {"training.steps": "many"})
    content = yaml.safe_load(config_file.read_text())
    with pytest.raises(UserError, match=r"^settings: unknown key .no_such_key."):
        rpg_megatron.train(content | {"no_such_key": 1})
