"""How often the guard on mismatch notices one faulty tensor in one of two engines, by its probes alone."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.policies import start, trajectory_of
from benchmarks.setup import CONFIG, QUICKSTART, Report, benchmark, main, train
from rpg_megatron.bridge.publisher import published
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.config import Settings, load_settings
from rpg_megatron.config.objective import PROBE_PROMPTS, PROBE_TOKENS
from rpg_megatron.data.prompts import load_prompts, load_tokenizer
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.policy.model import Mesh
from rpg_megatron.rollout.seeds import seed_of, stop_tokens
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.training.batch import Batch
from rpg_megatron.training.mismatch import check_mismatch
from rpg_megatron.training.trainer import Trainer
from rpg_megatron.training.weight_sync import open_publisher
from tests.support.engine import Engine, running_engines

Weights = dict[str, torch.Tensor]
STEP_RATE = 1e-4
"""Learning rate of the quickstart, and so of the real step."""
MULTIPLES = (1, 4, 16)
"""Probe prompts, relative to the settings."""
TENSORS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "o": ("o_proj.weight",),
    "MLP": ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "norm": ("norm.weight",),
    "embedding": ("embed_tokens.weight",),
    "head": ("lm_head.weight",),
}
"""Kind -> suffixes of the tensors' names; all norms have the suffix "norm.weight"."""


@benchmark(dtype=("float32",), faults=1, rates=(1e-4,), epsilons=(1.0,), kinds=("head",))
def guard_detection(
    report: Report,
    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16"),
    faults: int = 4,
    rates: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3),
    epsilons: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0),
    kinds: tuple[str, ...] = tuple(TENSORS),
    step: Path | None = None,
    seed: int = 0,
) -> None:
    """Share of syncs with a fault in one tensor of the quickstart's model that stop the run.

    With ``rollout.ahead`` a batch may have no token of the current weights, so only the guard protects a run
    from an engine that serves other weights than it loaded. Faults:

    - stale: the tensor (any: all of them) keeps the values from before the last step. That step is a real
      step of the quickstart (16 updates at a learning rate of 1e-4; step: its exported checkpoint, if there
      is one); for other rates its change of all weights is multiplied.
    - scaled: one row of a tensor is multiplied by 1 + eps: of a norm one number, of embedding and head the
      row of a token that occurs in the probes (they cannot detect a change of other rows).

    One real engine acts as both engines. The faulty one gets its weights by a sync whose published weights
    have the fault: its memory is then as after a good sync and a later fault. Prompts and tokens are those of
    a run's probes, a real trainer policy with the correct weights scores the answers, and ``check_mismatch``
    judges them with the bounds of the dtype. faults: number of each kind and size, in different tensors and
    rows, each tested with many sets of probes.

    A cell: detection rates with the probe prompts of the settings / 4 times / 16 times as many, in %, and in
    brackets the median over faults of the mean |log-prob difference| of the faulty engine, in nats.
    """
    old = load_file(QUICKSTART / "model" / "model.safetensors")
    with tempfile.TemporaryDirectory(prefix="rpg-bench-") as place:
        folder = Path(place)
        if step is None:
            run = train(folder, "training.steps=1", "evaluation=null", "checkpoint.every=null")
            step = run.folder / "hf" / "step_000001"
        after = load_file(step / "model.safetensors")
        change = {name: after[name].float() - old[name].float() for name in old}
        stepped = {
            rate: {n: old[n].float() + rate / STEP_RATE * change[n] for n in old}
            for rate in sorted({*rates, STEP_RATE})
        }
        device, mesh = start("cpu")
        for kind in dtype:
            overrides = ["parallel={tensor: 1}", f"precision.dtype={kind}", "engine.replicas=2"]
            overrides += [
                "engine.cpu_threads=1",
                "evaluation=null",
                "rollout.ahead=1",
                "correction.type=truncate",
            ]
            settings = load_settings(CONFIG, overrides)
            (folder / kind).mkdir()
            with running_engines(folder / kind, [settings]) as (engine,):
                rig = Rig(settings, engine, folder / kind, mesh, device, seed)
                try:
                    measure(report, rig, old, stepped, epsilons, kinds, faults)
                finally:
                    rig.close()


def measure(
    report: Report,
    rig: Rig,
    old: Weights,
    stepped: dict[float, Weights],
    epsilons: Sequence[float],
    kinds: Sequence[str],
    faults: int,
) -> None:
    """The tables of a dtype. stepped: learning rate -> weights after the step."""
    guards, dtype = rig.settings.guards, rig.settings.precision.dtype
    largest, mean = guards.thresholds(dtype)
    healthy = {rate: rig.score(rig.probe(weights, replica=0)) for rate, weights in stepped.items()}
    correct = stepped[STEP_RATE]
    tokens = statistics.fmean(len(t.response) for t in healthy[STEP_RATE]) * PROBE_PROMPTS
    sets = faults * MULTIPLES[-1]
    report.say(
        f"\n{dtype}: bounds {largest:.0e} (largest) and {mean:.0e} (mean) nats; {PROBE_PROMPTS} probe "
        f"prompts of at most {PROBE_TOKENS} tokens, {tokens:.0f} tokens an engine; {faults} faults a "
        f"cell, with {sets}, {sets // 4} and {faults} sets of probes"
    )
    report.say(f"without a fault: {measure_cell(rig, correct, [correct] * faults, healthy[STEP_RATE])}")

    def stale(kind: str, new: Weights) -> Weights:
        if kind == "any":
            return dict(old)
        name = choose(kind, new, rig.random)
        return new | {name: old[name]}

    table = report.table("stale tensor, by learning rate", *(f"{rate:.0e}" for rate in stepped))
    for kind in (*kinds, "any"):
        cells = [
            measure_cell(rig, new, [stale(kind, new) for _ in range(faults)], healthy[rate])
            for rate, new in stepped.items()
        ]
        table.row(kind, *cells)
    table = report.table("row scaled by 1 + eps", *(f"{eps:g}" for eps in epsilons))
    for kind in kinds:
        cells = []
        for eps in epsilons:
            scaled = [scale_row(correct, kind, eps, healthy[STEP_RATE], rig.random) for _ in range(faults)]
            cells.append(measure_cell(rig, correct, scaled, healthy[STEP_RATE]))
        table.row(kind, *cells)


def choose(kind: str, weights: Weights, rng: random.Random) -> str:
    """A tensor of a kind."""
    return rng.choice(sorted(name for name in weights if name.endswith(TENSORS[kind])))


def scale_row(
    weights: Weights, kind: str, eps: float, probes: Sequence[Trajectory], rng: random.Random
) -> Weights:
    """The weights with one row multiplied by 1 + eps."""
    name = choose(kind, weights, rng)
    scaled = weights[name].clone()
    row = rng.randrange(len(scaled))
    if kind in ("embedding", "head"):
        t = rng.choice(probes)
        row = int(rng.choice([*t.prompt, *t.response] if kind == "embedding" else t.response))
    scaled[row] *= 1 + eps
    return weights | {name: scaled}


def measure_cell(rig: Rig, correct: Weights, faults: Sequence[Weights], healthy: Sequence[Trajectory]) -> str:
    """The cell of these faults. healthy: scored answers of the other engine, with the correct weights."""
    rates, gaps, dtype = [], [], torch_dtype(rig.settings.precision.dtype)
    for fault in faults:
        answers = rig.probe(fault, replica=1)
        rig.load(correct)
        rig.score(answers)
        rates.append(rig.detected(healthy, answers))
        gaps.append(float(np.concatenate([np.abs(t.old - t.behaviour) for t in answers]).mean()))
    void = [
        fault is not correct and all(torch.equal(fault[n].to(dtype), correct[n].to(dtype)) for n in correct)
        for fault in faults
    ]
    rates_text = " / ".join(f"{100 * statistics.fmean(each):.0f}" for each in zip(*rates, strict=True))
    note = f"; {statistics.fmean(void):.0%} of faults change no bit" if any(void) else ""
    return f"{rates_text} ({statistics.median(gaps):.1e}{note})"


class Rig:
    """An engine, and the trainer's policy on this process; both can be given any weights."""

    def __init__(
        self, settings: Settings, engine: Engine, folder: Path, mesh: Mesh, device: torch.device, seed: int
    ):
        self.settings, self.random = settings, random.Random(seed)
        self.version = 0
        self._engine, self._folder = engine, folder / "model"
        shutil.copytree(QUICKSTART / "model", self._folder)
        self.trainer = Trainer(settings, mesh, device)
        self._publisher = open_publisher(
            settings.bridge,
            engine.bridge,
            mesh.coordinates(settings.model.vocab_multiple),
            self.trainer.policy.served.tensors,
            self.trainer.layout,
            torch_dtype(settings.precision.dtype),
            adopt=False,
        )
        tokenizer = load_tokenizer(settings.model.path)
        self._stops = stop_tokens(settings.model.path, tokenizer)
        self._prompts = load_prompts(settings.data, tokenizer)

    def close(self) -> None:
        """Retract the weights."""
        self._publisher.close()

    def load(self, weights: Weights) -> None:
        """Give the trainer's policy these weights."""
        save_file(weights, self._folder / "model.safetensors", metadata={"format": "pt"})
        policy, mesh = self.trainer.policy, self.trainer.mesh
        load_hf_weights(
            self._folder,
            policy.loadable_parameters(),
            self.trainer.layout,
            mesh.coordinates(self.settings.model.vocab_multiple),
        )
        policy.served.refresh()

    def probe(self, weights: Weights, replica: int) -> list[Trajectory]:
        """Sync the engine to these weights; returns its answers to the most probes, as from a replica."""
        self.load(weights)
        self.version += 1
        with published(self._publisher, self.version) as manifest:
            self._engine.sync(self.version, manifest)
        return asyncio.run(self._ask(replica))

    async def _ask(self, replica: int) -> list[Trajectory]:
        client = EngineClient(0, self._engine.process.socket, self._engine.token, timeout=120.0)
        count = PROBE_PROMPTS * MULTIPLES[-1]

        async def generate(i: int) -> Trajectory:
            place = self.version * count + i
            prompt = self._prompts[place % len(self._prompts)]
            [sample] = await client.generate(
                prompt.tokens,
                max_tokens=min(PROBE_TOKENS, self.settings.rollout.max_response_tokens),
                temperature=self.settings.rollout.temperature,
                seed=seed_of(self.settings.seed, "probe", self.version, place, prompt.id),
                stop_token_ids=self._stops,
            )
            t = trajectory_of(np.concatenate([prompt.tokens, sample.tokens]), len(prompt.tokens))
            return replace(t, group=replica, behaviour=sample.logprobs, finish=sample.finish)

        try:
            return await asyncio.gather(*(generate(i) for i in range(count)))
        finally:
            await client.close()

    def score(self, probes: list[Trajectory]) -> list[Trajectory]:
        """Set ``old`` with the trainer's current weights."""
        self.trainer.scorer.compute_log_probs(Batch([[probes]], probes, None))
        return probes

    def detected(self, healthy: Sequence[Trajectory], faulty: Sequence[Trajectory]) -> list[float]:
        """Share of the sets of probes for which the guard would stop a run, for each of MULTIPLES."""
        guards, dtype = self.settings.guards, self.settings.precision.dtype
        rates = []
        for multiple in MULTIPLES:
            size = PROBE_PROMPTS * multiple
            stopped = []
            for offset in range(0, len(faulty), size):
                probes = [*healthy[offset : offset + size], *faulty[offset : offset + size]]
                _, message = check_mismatch([], 0, guards, dtype, probes=probes, engines=2)
                stopped.append(message is not None)
            rates.append(statistics.fmean(stopped))
        return rates


if __name__ == "__main__":
    main(__doc__, guard_detection)
