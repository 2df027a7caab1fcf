"""Runs of the quickstart that are started, disturbed and compared, by the command line."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from rpg_megatron.data.rollout_files import read_rollouts
from tests.support.commands import Command

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


STEPS = 12


SETTINGS = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "training.minibatches=2",
    "training.tokens_per_microbatch=512",
    f"training.steps={STEPS}",
    "engine.max_sequences=32",
    "engine.kv_cache_gib=0.25",
    "evaluation.data.limit=8",
    "evaluation.every=3",
    "anchor={type: every, updates: 6}",
    "checkpoint={every: 2, keep: 1}",
]


SAME = (
    "policy/",
    "kl/",
    "ratio/",
    "reward/",
    "response/",
    "eval/",
    "lr",
    "step",
    "sync/version",
    "sync/bytes",
)
"""What does not depend on time or on how the engine happened to batch requests."""


class Run:
    """The same command, again and again."""

    def __init__(self, folder: Path, name: str):
        self.parent, self.name, self.folder = folder, name, folder / f"{name}-001"
        self.now: Command | None = None

    def start(self, *more: str) -> Command:
        places = [f"runs={self.parent}", f"name={self.name}", *more]
        self.now = Command(self.parent, "train", str(QUICKSTART), *SETTINGS, *places)
        return self.now

    def rows(self) -> list[dict]:
        file = self.folder / "metrics.jsonl"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [json.loads(row) for row in whole.splitlines()]

    def wait_in_step(self, step: int, most: float = 1.0) -> None:
        """Until a random moment of that step, or of the next if ``most`` is 2."""
        assert self.now is not None
        end = time.monotonic() + 900
        while len(rows := self.rows()) < step:
            assert self.now.process.poll() is None, self.told()
            assert time.monotonic() < end, self.told()
            time.sleep(0.02)
        time.sleep(random.uniform(0, most * rows[-1].get("time/step", 1.0)))
        assert self.now.process.poll() is None, "the run was over before it could be stopped"

    def told(self) -> str:
        assert self.now is not None
        return self.now.out.read_text()

    def warn(self, number: signal.Signals, everyone: bool) -> None:
        """Signal it as a scheduler does; it leaves with code 75 and nothing stays behind."""
        one = self.now
        assert one is not None
        files = one.shared_memory()
        if everyone:
            tree = [p.pid for p in psutil.Process(one.process.pid).children(recursive=True)]
            tree.append(one.process.pid)
            random.shuffle(tree)
            for pid in tree:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        else:
            one.process.send_signal(number)
        code, err = one.finish(600)
        assert code == 75, self.told() + err
        assert err.startswith(f"stopped: {number.name}; "), err
        one.assert_nothing_left(seconds=5)
        assert [file for file in files if file.exists()] == []

    def kill(self) -> None:
        """SIGKILL to the launcher and everything below it, at once."""
        assert self.now is not None
        launcher = psutil.Process(self.now.process.pid)
        tree = [*launcher.children(recursive=True), launcher]
        for one in tree:
            one.suspend()
        for one in tree:
            one.kill()
        self.now.finish()
        assert not (self.folder / "summary.json").exists()

    def finish(self) -> None:
        assert self.now is not None
        code, err = self.now.finish(1800)
        assert code == 0, self.told() + err
        self.now.assert_nothing_left()

    def assert_like(self, other: Run) -> None:
        got, wanted = self.rows(), other.rows()
        assert [row["step"] for row in got] == [row["step"] for row in wanted] == list(range(STEPS + 1))
        for mine, theirs in zip(got, wanted, strict=True):
            mine, theirs = ({k: v for k, v in row.items() if k.startswith(SAME)} for row in (mine, theirs))
            assert mine == theirs
        name = f"hf/step_{STEPS:06d}/model.safetensors"
        weights, others = load_file(self.folder / name), load_file(other.folder / name)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
        for step in range(1, STEPS + 1):
            name = f"rollouts/step_{step:06d}.jsonl.zst"
            mine, theirs = read_rollouts(self.folder / name), read_rollouts(other.folder / name)
            assert [t.response.tolist() for t in mine] == [t.response.tolist() for t in theirs]
            assert [t.seed for t in mine] == [t.seed for t in theirs]
        summaries = [json.loads((run.folder / "summary.json").read_text()) for run in (self, other)]
        assert summaries[0]["accuracy_before"] == summaries[1]["accuracy_before"]
        assert [p.name for p in self.parent.glob(f"{self.name}-*")] == [self.folder.name]
        kept = sorted(p.name for p in (self.folder / "checkpoints").iterdir())
        assert kept == ["latest.json", f"step_{STEPS:06d}"]


def results(run: Run, steps: int) -> tuple[list[dict], dict[str, torch.Tensor], list[list[int]]]:
    rows = [{k: v for k, v in row.items() if k.startswith(SAME)} for row in run.rows()]
    weights = load_file(run.folder / f"hf/step_{steps:06d}/model.safetensors")
    files = [run.folder / f"rollouts/step_{step:06d}.jsonl.zst" for step in range(1, steps + 1)]
    return rows, weights, [t.response.tolist() for file in files for t in read_rollouts(file)]


def assert_same(one: Run, other: Run, steps: int) -> None:
    """Both sampled the same tokens, wrote the same metrics and ended with the same weights, bit for bit."""
    (rows, weights, rollouts), (wanted, others, drawn) = results(one, steps), results(other, steps)
    assert rollouts == drawn
    assert rows == wanted
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
