"""Train a shortened quickstart with every loss and several seeds; one warm engine for all runs.

``python -m benchmarks.objectives`` runs what is missing in docs/evidence/objectives.jsonl (it can be stopped
and resumed) and prints a table; ``--write`` puts the table into docs/objectives.md. What it shows is
that every loss trains, and how far they spread; a tiny model on arithmetic says nothing about which is better
on real mathematics.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rpg_megatron.config import Settings, load_settings
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.engine.process import EngineProcess, engine_socket

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "evidence" / "objectives.jsonl"
PAGE = ROOT / "docs" / "objectives.md"
BEGIN, END = "<!-- table: benchmarks/objectives.py -->", "<!-- end of table -->"
SHORT = ["training.steps=6", "rollout.prompts_per_step=48", "evaluation.every=6", "evaluation.samples=4"]
SEEDS = (1, 2, 3)
LOSSES: dict[str, list[str]] = {
    f"RPG-{'REINFORCE-' if estimator == 'reinforce' else ''}{divergence.upper()}": [
        f"objective={{type: rpg, divergence: {divergence}, estimator: {estimator}}}"
    ]
    for estimator in ("reinforce", "differentiable")
    for divergence in ("fkl", "ufkl", "rkl", "urkl")
} | {
    "GRPO": ["objective={type: grpo}", "advantage.type=grpo", "anchor.type=fixed"],
    "DAPO": ["objective={type: dapo}", "advantage.type=grpo"],
    "REINFORCE++": ["objective={type: reinforce_plus_plus}", "advantage.type=reinforce_plus_plus"],
}


def environment(token: str) -> dict[str, str]:
    """Of the sampler and the ranks."""
    return {**os.environ, TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def settings_of(loss: str, seed: int) -> Settings:
    """Settings of one run."""
    return load_settings(ROOT / "examples" / "quickstart.yaml", [*SHORT, f"seed={seed}", *LOSSES[loss]])


def run(loss: str, seed: int, work: Path, bridge: Path, token: str) -> dict[str, object]:
    """Train once against the running engine; the run's figures."""
    settings = settings_of(loss, seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.yaml").write_text(settings.to_yaml())
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        (work / "sampler.sock").unlink(missing_ok=True)
        places = [place, str(work), str(bridge)]
        shared = environment(token) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        world = settings.parallel.world
        children = []
        with (folder / "log").open("w+") as log:
            for rank in range(-1, world):
                module = "rpg_megatron.rollout.sampler" if rank < 0 else "rpg_megatron.training.rank"
                own = shared if rank < 0 else shared | {"RANK": str(rank), "WORLD_SIZE": str(world)}
                command = [sys.executable, "-m", module, *places]
                children.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
            try:
                codes = [child.wait(900) for child in children[1:]]
            finally:
                for child in children:
                    child.kill()
                    child.wait()
            if any(codes):
                log.seek(0)
                raise SystemExit(f"{loss}, seed {seed} failed:\n{log.read()[-3000:]}")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    key = f"eval/heldout/avg@{settings.evaluation.samples}" if settings.evaluation else ""
    steps = rows[1:]
    return {
        "loss": loss,
        "seed": seed,
        "before": rows[0][key],
        "after": rows[-1][key],
        "entropy": steps[-1]["policy/entropy"],
        "kl_old": statistics.fmean(r["kl/old"] for r in steps),
        "clipped": statistics.fmean(r["policy/clip_frac_high"] + r["policy/clip_frac_low"] for r in steps),
        "mismatch_max": max(r["mismatch/logp_max"] for r in steps),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip(),
    }


def table(done: list[dict]) -> str:
    """Markdown: a row a loss, mean over seeds and (lowest to highest)."""

    def cell(values: list[float], form: str) -> str:
        spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
        return f"{statistics.fmean(values):{form}}{spread}"

    lines = [
        "| loss | seeds | accuracy before | after | entropy, nats | KL to the old policy, nats | clipped |",
        "|---|---|---|---|---|---|---|",
    ]
    for loss in LOSSES:
        rows = [d for d in done if d["loss"] == loss]
        if not rows:
            continue
        column = {k: [float(d[k]) for d in rows] for k in ("before", "after", "entropy", "kl_old", "clipped")}
        lines.append(
            f"| {loss} | {len(rows)} | {cell(column['before'], '.1%')} | {cell(column['after'], '.1%')} "
            f"| {cell(column['entropy'], '.3f')} | {cell(column['kl_old'], '.1e')} "
            f"| {statistics.fmean(column['clipped']):.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, print the table."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--write", action="store_true", help="put the table into docs/objectives.md")
    arguments.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds (default: all)")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine and the folders go, too
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    have = {(d["loss"], d["seed"]) for d in done}
    missing = [(loss, seed) for seed in SEEDS[: options.seeds] for loss in LOSSES if (loss, seed) not in have]
    if missing:
        token = secrets.token_urlsafe(16)
        with (
            tempfile.TemporaryDirectory(prefix="rpg-bench-") as work,
            tempfile.TemporaryDirectory(prefix="rpg-bench-", dir="/dev/shm") as bridge,
        ):
            engine = EngineProcess(
                settings_of(*missing[0]),
                0,
                socket=engine_socket(Path(work), 0),
                log=Path(work) / "engine.log",
                bridge_dir=Path(bridge),
                token=token,
            )
            engine.start()
            try:
                print(f"engine up after {engine.wait_healthy():.0f} s; {len(missing)} runs to do", flush=True)
                for i, (loss, seed) in enumerate(missing, 1):
                    result = run(loss, seed, Path(work), Path(bridge), token)
                    done.append(result)
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(result) + "\n")
                    told = f"{result['before']:.1%} -> {result['after']:.1%}"
                    print(f"{i}/{len(missing)}  {loss}, seed {seed}: {told}", flush=True)
            finally:
                engine.stop()
    text = table(done)
    print(text)
    if options.write:
        page = PAGE.read_text()
        head, rest = page.split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
