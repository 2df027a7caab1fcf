"""Folders of runs as training leaves them, written by training's own writers, with made-up numbers."""

from __future__ import annotations

import html.parser
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rpg_megatron.config import Settings
from rpg_megatron.data.rollout_files import write_rollouts
from rpg_megatron.data.trajectory import NOT_SAMPLED, Trajectory
from rpg_megatron.evaluation.metrics import score_results, write_results
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.launcher.environment import record_environment
from rpg_megatron.system.timeline import TIMELINE, Timeline
from rpg_megatron.training.metrics import MetricsWriter

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">&amp;<!--'
PROBLEMS = 40


def page_data(file: Path) -> dict[str, Any]:
    """The data in a page, extracted as a browser would."""
    chunks: list[str] = []

    class Finder(html.parser.HTMLParser):
        inside = False

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.inside = tag == "script" and ("id", "data") in attrs

        def handle_data(self, data: str) -> None:
            if self.inside:
                chunks.append(data)

        def handle_endtag(self, tag: str) -> None:
            self.inside = False

    Finder().feed(file.read_text(encoding="utf-8"))
    return json.loads("".join(chunks))


def make_run(
    folder: Path,
    *,
    steps: int = 400,
    planned: int | None = None,
    seed: int = 0,
    rollouts_every: int = 40,
    evaluate_every: int = 50,
    text: str = "",
    divergence: str | None = None,
    lr: float | None = None,
    pace: float | None = None,
) -> Path:
    """A run of ``steps`` steps that learns; unfinished if more were planned.

    text: put into a response. divergence, lr: settings; None: they depend on the seed. pace: steps in which
    it learns most; None: depends on the seed.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    divergence = divergence or ["urkl", "rkl", "ufkl", "fkl"][seed % 4]
    settings = {
        "name": folder.name,
        "seed": seed,
        "model": {"path": "/models/Qwen3-1.7B-Base"},
        "precision": {"dtype": "bfloat16"},
        "objective": {"type": "rpg", "divergence": divergence, "beta": 1e-4},
        "optimizer": {"lr": lr or 1e-6 * (1 + seed % 3)},
        "training": {"steps": planned or steps},
        "rollout": {"prompts_per_step": 256, "samples_per_prompt": 8, "max_response_tokens": 4096},
        "evaluation": {"name": "aime24", "samples": 4},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    record_environment(folder, Settings.model_validate({"model": {"path": "m"}, "data": {"path": "d"}}))
    writer = MetricsWriter(folder)
    for step in range(steps + 1):
        level = 0.15 + 0.5 * (1 - math.exp(-step / (pace or 120 + 25 * seed)))
        row: dict[str, float] = {"step": step}
        if step:
            row |= _metrics(rng, step, level, seed)
        if step % evaluate_every == 0 or step == steps:
            results = _evaluate(rng, level)
            write_results(folder / "evaluation" / f"step_{step:06d}.jsonl", results)
            row |= score_results("aime24", results)
        if step and (step % rollouts_every == 0 or step == 1):
            write_rollouts(
                folder / "rollouts" / f"step_{step:06d}.parquet", _rollouts(rng, step, level, text)
            )
        writer.write(row)
    writer.close()
    write_timeline(folder, range(max(1, steps - 9), steps + 1), engines=2)
    if not planned or planned <= steps:
        (folder / "summary.json").write_text(json.dumps({"steps": steps, "seconds": 41.7 * steps}))
    return folder


def make_study(folder: Path, lrs: Sequence[float], seeds: int, *, steps: int = 200) -> list[Path]:
    """Runs of each learning rate and seed, faster with higher rates; the last run stopped halfway."""
    ends = [steps] * (len(lrs) * seeds - 1) + [steps // 2]
    cases = [(lr, seed) for lr in lrs for seed in range(seeds)]
    return [
        make_run(
            folder / f"s-{number:03d}",
            steps=end,
            planned=steps,
            seed=seed,
            rollouts_every=steps // 2,
            evaluate_every=steps // 10,
            divergence="urkl",
            lr=lr,
            pace=120e-6 / lr + 8 * seed,
        )
        for number, ((lr, seed), end) in enumerate(zip(cases, ends, strict=True))
    ]


def write_timeline(folder: Path, steps: range, *, engines: int, begin: float = 1.7e9) -> float:
    """Rows of these steps, of 40 s each with a poll every 2 s; returns their end. Engines are busy for the
    first 18 s of a step, in which the trainer collects.
    """
    line = Timeline(folder / TIMELINE, lambda error: None)
    line.write({"start": begin - 5})
    for step in steps:
        for second in range(1, 40, 2):
            running = [100 + n if second < 18 else 0 for n in range(engines)]
            line.write({"time": begin + second, "running": running, "waiting": [0] * engines})
        ends = [
            ("collect", 0, 18),
            ("logprobs", 18, 24),
            ("update", 24, 39),
            ("sync", 39, 40),
            ("step", 0, 40),
        ]
        for phase, first, last in ends:
            line.write({"phase": phase, "step": step, "begin": begin + first, "end": begin + last})
        begin += 40
    return begin


def _metrics(rng: np.random.Generator, step: int, level: float, seed: int) -> dict[str, float]:
    accuracy = float(np.clip(level + 0.05 * rng.normal(), 0, 1))
    rollout, update = 18 + 2 * rng.random() + step / 40, 14 + rng.random()
    phases = {"rollout": rollout, "reward": 0.3, "logprobs": 5 + rng.random(), "update": update, "sync": 0.4}
    length = 700 + 2 * step + 30 * seed + 20 * rng.normal()
    spike = 30.0 if step == 200 + seed else 1.0
    return {
        "reward/mean": 2 * accuracy - 1,
        "reward/accuracy": accuracy,
        "reward/std": 2 * math.sqrt(accuracy * (1 - accuracy)),
        "groups/all_right": accuracy**8,
        "groups/all_wrong": (1 - accuracy) ** 8,
        "groups/equal_rewards": accuracy**8 + (1 - accuracy) ** 8,
        "response/length_mean": length,
        "response/truncated_frac": float(np.clip(0.02 + step / 8000 + 0.005 * rng.normal(), 0, 1)),
        "policy/entropy": 0.55 * math.exp(-step / 300) + 0.1 + 0.01 * rng.normal(),
        "policy/loss": -0.02 + 0.01 * rng.normal(),
        "policy/loss_abs": 0.05 + 0.01 * rng.random(),
        "policy/grad_norm": spike * (0.2 + 0.03 * abs(rng.normal())),
        "policy/grad_norm_first": 0.2 + 0.03 * abs(rng.normal()),
        "policy/clip_frac_high": 0.002 * rng.random(),
        "policy/clip_frac_low": 0.004 * rng.random(),
        "policy/clip_frac_c": 0.0001 * rng.random(),
        "policy/log_ratio_clamped": 0.0,
        "kl/anchor": 1e-3 * (1 + step / 200) * (1 + 0.2 * rng.random()),
        "kl/old": 8e-4 * (1 + 0.2 * rng.random()),
        "ratio/mean": 1 + 1e-3 * rng.normal(),
        "ratio/max": math.exp(1 + abs(rng.normal())),
        "lr": 1e-6 * min(1.0, step / 20),
        "throughput/tokens_per_second": 2048 * length / sum(phases.values()),
        "memory/peak_bytes": 61e9 + 2e9 * rng.random(),
        **{f"time/{name}": value for name, value in phases.items()},
        "time/step": sum(phases.values()) + 0.5,
        "mismatch/tokens": 2048 * length,
        "mismatch/stale_tokens": 0.0,
        "mismatch/logp_mean": 0.004 * (1 + 0.1 * rng.normal()),
        "mismatch/logp_p99": 0.03 * (1 + 0.1 * rng.normal()),
        "mismatch/logp_max": 0.4 * math.exp(0.4 * rng.normal()),
        "sync/seconds": 0.4,
        "sync/bytes": 3.4e9,
        "sync/version": float(step),
        "engine/restarts": float(step == 300 and seed == 1),
        "async/lag_mean": 0.8,
        "async/lag_max": 1.0,
        "async/stale_tokens": 0.8,
        "async/mixed_responses": 0.2,
        "async/recomputed_tokens": 5000.0,
        "async/segments": 1.2,
        "async/ready": 3.0,
        "async/in_flight": 40.0,
        "async/trainer_waited": 1.5,
        "async/sampler_held": 0.2,
        "correction/lag_0/ratio_mean": 1.0,
        "correction/lag_1/ratio_mean": 0.99,
        "correction/lag_0/hit_frac": 0.0,
        "correction/lag_1/hit_frac": 0.001,
        "engine/requests_resent": 12.0 * (step == 300 and seed == 1),
        **({"eval_extra/custom": rng.random()} if step % 10 == 0 else {}),
    }


def _evaluate(rng: np.random.Generator, level: float) -> list[EvalResult]:
    results = []
    for i in range(PROBLEMS):
        answer = str(17 * i % 1000)
        correct = [bool(rng.random() < np.clip(level + 0.5 - i / PROBLEMS, 0, 1)) for _ in range(4)]
        answers = [answer if ok else str(int(answer) + 1) for ok in correct]
        results.append(
            EvalResult(
                prompt_id=i,
                answer=answer,
                prompt=f"Let $x_{{{i}}}$ be the {i}th number of the sequence. Find $x_{{{i}}} \\bmod 1000$.",
                responses=[f"We count to {i} and multiply by 17.\n\nAnswer: {s}" for s in answers],
                correct=correct,
                extracted=list(map(str, answers)),
                lengths=[14] * 4,
                finishes=["stop"] * 4,
            )
        )
    return results


def _rollouts(rng: np.random.Generator, step: int, level: float, text: str) -> list[Trajectory]:
    batch = []
    for group in range(4):
        for sample in range(4):
            correct = bool(rng.random() < level)
            n = int(rng.integers(20, 60))
            mixed = not sample  # a weight update interrupted it
            logp = -rng.random(n).astype(np.float32)
            versions = np.array([step - 2] * (n // 3 * mixed) + [step - 1] * (n - n // 3 * mixed), np.int32)
            # The sampled tokens, and in every second response eight of an environment after the first half.
            mask = np.insert(np.ones(n, bool), [n // 2] * 8 * (sample % 2 == 0), False)
            logp = np.insert(logp, [n // 2] * (len(mask) - n), 0)
            batch.append(
                Trajectory(
                    prompt_id=group if step % 80 == 0 else 100 * step + group,
                    sample=sample,
                    group=group,
                    prompt=np.arange(5, 17, dtype=np.int32),
                    response=rng.integers(0, 94, len(mask)).astype(np.int32),
                    mask=mask,
                    behaviour=logp,
                    versions=np.insert(versions, [n // 2] * (len(mask) - n), NOT_SAMPLED),
                    finish="stop" if sample else "length",
                    text=f"{text}Step {step}: 17 * {group} = {17 * group}. “So be it.”\nAnswer: {correct}",
                    reward=1.0 if correct else -1.0,
                    correct=correct,
                    old=logp,
                    anchor=logp,
                    advantage=0.5 if correct else -0.5,
                )
            )
    return batch
