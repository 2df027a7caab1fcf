"""What a checkpoint costs training: its time on the critical path against its total, in both modes.

``python -m benchmarks.checkpoint`` builds a random bfloat16 policy with the distributed optimizer on
--tensor x --data ranks of this machine's CPUs (--layers and --hidden set its size), and saves it --repeat
times each way into a temporary folder (--folder: on the disk that is of interest). Critical is what training
waits for; total ends when the manifest is written and the checkpoint has its name. Updates are made while a
background save is under way and without one: what they take longer is what the save costs besides. Then the
checkpoint is loaded. Medians; the first round, with moments just made and cold caches, is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.device import start_device, start_process_group

VOCAB = 16384
TOKENS = 256


def main() -> None:
    """Run all ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="below it lie the checkpoints")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rpg-", dir=options.folder) as name:
        folder = Path(name)
        write_config(folder / "model", options.layers, options.hidden)
        (folder / "config.yaml").write_text("")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        world = options.tensor * options.data
        mp.spawn(measure, args=(world, port, options, folder), nprocs=world)
        report(options, json.loads((folder / "result.json").read_text()))


def write_config(folder: Path, layers: int, hidden: int) -> None:
    """All that is needed of a model; its weights are random."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(rank: int, world: int, port: int, options: argparse.Namespace, folder: Path) -> None:
    """One rank; rank 0 writes the figures."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    device = start_device("cpu")
    start_process_group(device)
    from rpg_megatron.policy.model import start_mesh
    from rpg_megatron.policy.policy import Policy
    from rpg_megatron.training.checkpoint_saver import Saver, load_model
    from rpg_megatron.training.loss import build_aggregator, build_loss

    settings = Settings.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(folder / "model")},
            "data": {"path": "unused"},
            "parallel": {"tensor": options.tensor, "data": options.data},
            "precision": {"dtype": "bfloat16"},
            "checkpoint": {"keep": 1},
        }
    )
    mesh = start_mesh(settings.parallel)
    policy = Policy(settings, read_model_shape(settings.model.path), mesh, device, lambda policy: None)
    packs = [policy.pack([make_trajectory()])]
    loss, aggregator = build_loss(settings), build_aggregator(settings)

    def update() -> None:
        policy.update(packs, loss, aggregator, lr=1e-6)

    update()
    gc.collect()
    gc.freeze()  # as a trainer does
    savers = {
        asynchronous: Saver(
            folder, policy, None, settings.checkpoint.model_copy(update={"asynchronous": asynchronous})
        )
        for asynchronous in (False, True)
    }
    rows: dict[str, list[dict[str, float]]] = {"synchronous": [], "asynchronous": []}
    step = 0
    for attempt in range(options.repeat + 1):
        alone = timed(update)
        for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
            if rank == 0:
                print(f"{name}: {attempt} of {options.repeat}    ", end="\r", flush=True)
            saver, step = savers[asynchronous], step + 1
            dist.barrier()
            critical = timed(lambda saver=saver, step=step: saver.start(step, dict))
            done, start = 0, time.perf_counter()
            while asynchronous and busy(saver):
                update()
                done += 1
            beside = (time.perf_counter() - start) / done / alone if done else 1.0
            saver.wait()
            (outcome,) = saver.pop_results()
            if outcome.problem:
                raise RuntimeError(outcome.problem)
            rows[name].append({"critical": critical, "total": outcome.seconds, "beside": beside})
    dist.barrier()
    loads = [timed(lambda: load_model(outcome.folder, policy, None)) for _ in range(options.repeat + 1)]
    if rank == 0:
        found: dict[str, Any] = {
            name: {key: statistics.median(r[key] for r in some[1:]) for key in some[0]}
            for name, some in rows.items()
        }
        found["load"] = statistics.median(loads[1:])
        found["bytes"] = sum(f.stat().st_size for f in outcome.folder.rglob("*") if f.is_file())
        (folder / "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def busy(saver: Any) -> bool:
    """Whether a save is under way on any rank: all make the same updates."""
    flag = torch.tensor([0.0 if saver.wait(timeout=0) else 1.0])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def make_trajectory() -> Trajectory:
    """Some tokens to learn from."""
    numbers = np.arange(TOKENS, dtype=np.int32)
    zeros = np.zeros(TOKENS, np.float32)
    return Trajectory(
        prompt_id=0,
        sample=0,
        prompt=numbers[:8],
        response=numbers,
        behaviour=zeros,
        versions=np.zeros(TOKENS, np.int32),
        finish="length",
        text="",
        advantage=1.0,
        old=zeros - 9.7,
        anchor=zeros - 9.7,
    )


def timed(work: Callable[[], object]) -> float:
    """Wall seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print the table."""
    size, sync = found["bytes"] / 1e9, found["synchronous"]["critical"]
    print(
        f"TP{options.tensor} x DP{options.data}, {options.layers} layers of {options.hidden}, {size:.3f} GB "
        f"of weights and optimizer state; median of {options.repeat}"
    )
    print("| save | critical path, s | total, s | critical / total | x synchronous | updates meanwhile |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in ("synchronous", "asynchronous"):
        row = found[name]
        meanwhile = f"x {row['beside']:.2f}" if name == "asynchronous" else "none"
        print(
            f"| {name} | {row['critical']:.2f} | {row['total']:.2f} | {row['critical'] / row['total']:.2f} | "
            f"{row['critical'] / sync:.2f} | {meanwhile} |"
        )
    print(f"load: {found['load']:.2f} s, {found['load'] / sync:.2f} x the synchronous save")


if __name__ == "__main__":
    main()
