"""How often the guard on mismatch notices one faulty tensor in one of two engines, by its probes alone.

    python -m benchmarks.guard_detection [--dtype float32 bfloat16] [--faults 4]

With ``rollout.ahead`` a batch may have no token of the present weights, so this is what protects a run from
an engine that serves other weights than it loaded. Faults, each in one tensor of the quickstart's model:

- stale: the tensor keeps the values from before the last step. That step is one of the quickstart, really
  made (16 updates at a learning rate of 1e-4); for other rates its change of all weights is multiplied.
- scaled: one row of a tensor is multiplied by 1 + eps: of a norm one number, of embedding and head the row of
  a token that occurs in the probes (of other tokens they cannot show anything).

One real engine plays both engines. The faulty one gets its weights by a sync whose published weights have the
fault: what is then in its memory is what a fault after a good sync would leave there. The prompts, their
number and the tokens are those that a run probes with (``guards.probe_prompts`` and ``probe_tokens``), a real
trainer policy with the right weights scores the answers, and ``check_mismatch`` judges them with the bounds
of the dtype: whether a run would stop at the first sync. Each fault is met by many sets of probes.

A cell: detection rates with the probe prompts of the settings / 4 times / 16 times as many, in %, and in
brackets the median over faults of the mean |log-prob difference| of the faulty engine, in nats. ``any`` of
stale is an engine that kept all old weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu_policies import QUICKSTART, machine, start
from rpg_megatron.bridge.publisher import published
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.config import Settings, load_settings
from rpg_megatron.data.prompts import Prompt, load_prompts, load_tokenizer
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.policy.model import Mesh
from rpg_megatron.rollout.seeds import seed_of, stop_tokens
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.training.mismatch import check_mismatch
from rpg_megatron.training.trainer import Batch, Trainer
from rpg_megatron.training.weight_sync import open_publisher
from tests.support.engine import Engine, running_engines

ROOT = Path(__file__).parents[1]
Weights = dict[str, torch.Tensor]
RATES = (1e-6, 1e-5, 1e-4, 1e-3)
"""Learning rates of the last step."""
STEP_RATE = 1e-4
"""That of the quickstart, whose step is really made."""
EPSILONS = (1e-3, 1e-2, 1e-1, 1.0)
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
"""Kind -> ends of the tensors' names; "norm" is the end of all norms' names."""


@dataclass
class Cell:
    """What the guard made of some faults of one kind and size."""

    rates: list[float]
    """Detected share of the sets of probes, for each of MULTIPLES."""
    gap: float
    """Median over the faults of the mean gap on the faulty engine, nats."""


def main() -> None:
    """Make the step, then print the tables of each dtype."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"]
    )
    parser.add_argument("--faults", type=int, default=4, help="of each kind and size: other tensors and rows")
    parser.add_argument("--step", type=Path, help="an exported checkpoint after the step; not made again")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine and the folders go, too
    old = load_file(QUICKSTART / "model" / "model.safetensors")
    with tempfile.TemporaryDirectory(prefix="rpg-bench-") as place:
        folder = Path(place)
        after = load_file((a.step or make_step(folder)) / "model.safetensors")
        change = {name: after[name].float() - old[name].float() for name in old}
        device, mesh = start("cpu")
        print(machine(device))
        for dtype in a.dtype:
            (folder / dtype).mkdir()
            settings = settings_of(dtype)
            with running_engines(folder / dtype, [settings]) as (engine,):
                rig = Rig(settings, engine, folder / dtype, mesh, device, a.seed)
                try:
                    measure(rig, old, change, a.faults)
                finally:
                    rig.close()


def make_step(folder: Path) -> Path:
    """One step of the quickstart, by the command line; returns its checkpoint."""
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(ROOT / "examples" / "quickstart.yaml")]
    command += ["--fresh", "name=step", f"runs={folder}", "training.steps=1", "evaluation=null"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, "checkpoint.every=null"],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return folder / "step-001" / "hf" / "step_000001"


def settings_of(dtype: str) -> Settings:
    """The quickstart's, for two engines and one trainer rank."""
    overrides = ["parallel={tensor: 1}", f"precision.dtype={dtype}", "engine.replicas=2", "evaluation=null"]
    overrides += ["engine.cpu_threads=1", "rollout.ahead=1", "correction.type=truncate"]
    return load_settings(ROOT / "examples" / "quickstart.yaml", overrides)


class Rig:
    """An engine, and the trainer's policy on this process, both with any weights."""

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
        model, mesh = self.settings.model, self.trainer.mesh
        load_hf_weights(
            self._folder,
            self.trainer.policy.loadable_parameters(),
            self.trainer.layout,
            tensor=mesh.tensor,
            tensor_rank=mesh.tensor_rank,
            vocab_multiple=model.vocab_multiple,
        )
        self.trainer.policy.served.refresh()

    def probe(self, weights: Weights, replica: int) -> list[Trajectory]:
        """Sync the engine to these weights; its answers to the largest number of probes, as a replica's."""
        self.load(weights)
        self.version += 1
        with published(self._publisher, self.version) as manifest:
            self._engine.sync(self.version, manifest)
        return asyncio.run(self._ask(replica))

    async def _ask(self, replica: int) -> list[Trajectory]:
        guards = self.settings.guards
        client = EngineClient(0, self._engine.process.socket, self._engine.token, timeout=120.0)
        count = guards.probe_prompts * MULTIPLES[-1]

        async def one(i: int) -> Trajectory:
            place = self.version * count + i
            prompt: Prompt = self._prompts[place % len(self._prompts)]
            [sample] = await client.generate(
                prompt.tokens,
                max_tokens=min(guards.probe_tokens, self.settings.rollout.max_response_tokens),
                temperature=self.settings.rollout.temperature,
                seed=seed_of(self.settings.seed, "probe", self.version, place, prompt.id),
                stop_token_ids=self._stops,
            )
            return Trajectory(
                prompt_id=prompt.id,
                sample=0,
                group=replica,
                prompt=prompt.tokens,
                response=sample.tokens,
                behaviour=sample.logprobs,
                versions=np.zeros(len(sample.tokens), np.int32),
                finish=sample.finish,
                text="",
            )

        try:
            return await asyncio.gather(*(one(i) for i in range(count)))
        finally:
            await client.close()

    def score(self, probes: list[Trajectory]) -> None:
        """Set ``old`` with the trainer's present weights."""
        self.trainer.compute_log_probs(Batch([[probes]], probes, None))

    def detected(self, healthy: Sequence[Trajectory], faulty: Sequence[Trajectory]) -> list[float]:
        """Share of the sets of probes that the guard would stop a run for, for each of MULTIPLES."""
        rates = []
        for multiple in MULTIPLES:
            size = self.settings.guards.probe_prompts * multiple
            verdicts = []
            for first in range(0, len(faulty), size):
                probes = [*healthy[first : first + size], *faulty[first : first + size]]
                _, message = check_mismatch(
                    [],
                    0,
                    self.settings.guards,
                    self.settings.precision.dtype,
                    leaders=1,
                    probes=probes,
                    engines=2,
                )
                verdicts.append(message is not None)
            rates.append(statistics.fmean(verdicts))
        return rates


# -- faults --------------------------------------------------------------------------------------------------


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


def stale(weights: Weights, kind: str, old: Weights, rng: random.Random) -> Weights:
    """The weights with one tensor, or with ``any`` all of them, as before the step."""
    if kind == "any":
        return dict(old)
    name = choose(kind, weights, rng)
    return weights | {name: old[name]}


def meet(
    rig: Rig, right: Weights, faults: Sequence[Weights], healthy: Sequence[Trajectory]
) -> tuple[Cell, float]:
    """The guard meets some faults; also the share of faults that change nothing in the dtype.

    healthy: scored answers of the other engine, with the right weights.
    """
    found, gaps, dtype = [], [], torch_dtype(rig.settings.precision.dtype)
    for fault in faults:
        answers = rig.probe(fault, replica=1)
        rig.load(right)
        rig.score(answers)
        found.append(rig.detected(healthy, answers))
        gaps.append(float(np.concatenate([np.abs(t.old - t.behaviour) for t in answers]).mean()))
    void = [all(torch.equal(f[n].to(dtype), right[n].to(dtype)) for n in right) for f in faults]
    rates = [statistics.fmean(each) for each in zip(*found, strict=True)]
    return Cell(rates, statistics.median(gaps)), statistics.fmean(void)


def measure(rig: Rig, old: Weights, change: Weights, faults: int) -> None:
    """Print the tables of a dtype."""
    guards, dtype = rig.settings.guards, rig.settings.precision.dtype
    largest, mean = guards.thresholds(dtype)

    def after(rate: float) -> Weights:
        return {name: old[name].float() + rate / STEP_RATE * change[name] for name in old}

    def start_from(right: Weights) -> list[Trajectory]:
        healthy = rig.probe(right, replica=0)
        rig.score(healthy)
        return healthy

    right = after(STEP_RATE)
    healthy = start_from(right)
    none, _ = meet(rig, right, [right] * faults, healthy)
    tokens = statistics.fmean(len(t.response) for t in healthy) * guards.probe_prompts
    sets = faults * MULTIPLES[-1]
    print(
        f"\n{dtype}: bounds {largest:.0e} (largest) and {mean:.0e} (mean) nats; {guards.probe_prompts} probe "
        f"prompts of at most {guards.probe_tokens} tokens, {tokens:.0f} tokens an engine\n"
        f"{faults} faults a cell, with {sets}, {sets // 4} and {faults} sets of probes\n"
        f"without a fault: {cell_of(none)}\n"
    )

    def table(name: str, sizes: Sequence[str], kinds: Sequence[str], row: Callable[[str], list[str]]) -> None:
        print(f"| {name} | {' | '.join(sizes)} |\n{'|---' * (1 + len(sizes))}|")
        for kind in kinds:
            print(f"| {kind} | {' | '.join(row(kind))} |", flush=True)
        print()

    steps = [(after(rate), start_from(after(rate))) for rate in RATES]

    def stale_row(kind: str) -> list[str]:
        return [
            cell_of(
                *meet(
                    rig,
                    new,
                    [stale(new, kind, old, rig.random) for _ in range(faults)],
                    answers,
                )
            )
            for new, answers in steps
        ]

    def scaled_row(kind: str) -> list[str]:
        return [
            cell_of(
                *meet(
                    rig,
                    right,
                    [scale_row(right, kind, eps, healthy, rig.random) for _ in range(faults)],
                    healthy,
                )
            )
            for eps in EPSILONS
        ]

    table("stale tensor, by learning rate", [f"{r:.0e}" for r in RATES], [*TENSORS, "any"], stale_row)
    table("row scaled by 1 + eps", [f"{e:g}" for e in EPSILONS], list(TENSORS), scaled_row)


def cell_of(cell: Cell, void: float = 0.0) -> str:
    """A cell of the table."""
    rates = " / ".join(f"{100 * rate:.0f}" for rate in cell.rates)
    same = f"; {void:.0%} of faults change no bit" if void else ""
    return f"{rates} ({cell.gap:.1e}{same})"


if __name__ == "__main__":
    main()
