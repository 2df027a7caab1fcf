"""One rank of test_plan_memory: a trainer rank's resident set, above its size after imports, by phase."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from rpg_megatron.bridge.publisher import published
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.megatron import plan_save
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.models.lora import split_parameters, with_adapters
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.training.loss import build_aggregator, build_loss
from rpg_megatron.training.weight_sync import open_publisher
from tests.support.rank_policy import checkpoint_teacher


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (most since it was reset) of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def trajectories(lengths: list[int], vocab: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    batch = []
    for i, n in enumerate(lengths):
        prompt = rng.integers(0, vocab, n // 4)
        response = rng.integers(0, vocab, n - n // 4)
        batch.append(
            Trajectory(
                prompt_id=i,
                sample=0,
                group=i,
                prompt=prompt.astype(np.int32),
                response=response.astype(np.int32),
                behaviour=np.zeros(len(response), np.float32),
                versions=np.zeros(len(response), np.int32),
                finish="stop",
                text="",
                reward=1.0,
                advantage=(-1.0) ** i,
            )
        )
    return batch


def main() -> None:
    folder = Path(sys.argv[1])
    case = json.loads((folder / "case.json").read_text())
    import rpg_megatron.training.run  # noqa: F401

    baseline = resident("VmRSS")
    peaks: dict[str, int] = {}

    def phase(name: str) -> None:
        peaks[name] = resident("VmHWM") - baseline
        Path("/proc/self/clear_refs").write_text("5")

    settings = Settings.model_validate(case["settings"])
    device = start_device("cpu")
    start_process_group(device)
    mesh = start_mesh(settings.parallel)
    shape = read_model_shape(settings.model.path)
    layout = mapping_for(shape)
    phase("mesh")

    def load(policy: Policy) -> None:
        phase("model")
        load_hf_weights(
            settings.model.path,
            split_parameters(dict(policy.named_parameters()))[0].items(),
            layout,
            mesh.coordinates(settings.model.vocab_multiple),
        )
        phase("load")

    policy = Policy(settings, shape, mesh, device, load)
    phase("optimizer")
    placement = mesh.coordinates(settings.model.vocab_multiple)
    publisher = open_publisher(
        settings.bridge,
        Path(case["bridge"]),
        placement,
        policy.served.tensors,
        with_adapters(layout, settings.lora if settings.serves_adapters else None),
        torch_dtype(settings.precision.dtype),
        adopt=not settings.optimizer.distributed,
    )
    phase("publisher")
    has_anchor = settings.anchor.type != "old"
    anchor = HeldAnchor([p for _, p in policy.trained_parameters()], settings.anchor) if has_anchor else None
    phase("anchor")
    teacher = checkpoint_teacher(settings, mesh, device)
    phase("teacher")
    with published(publisher, 0):
        pass
    phase("publish")
    micro = trajectories(case["lengths"], shape.vocab_size)
    packs = [policy.pack(micro) for _ in range(case["microbatches"])]
    for name in ("save", "anchor"):
        (folder / name).mkdir(exist_ok=True)
    for step in (1, 2):
        old = policy.logprobs(packs)
        if anchor:
            with anchor.swapped_in():
                policy.logprobs(packs)
        if teacher and settings.full_divergence is None:
            teacher.logprobs(packs)
        for pack, values in zip(packs, old, strict=True):
            for t, logp in pack.split(values[0]):
                t.old = t.anchor = logp.numpy().copy()
        packs = [policy.pack(micro) for _ in packs]
        phase(f"logprobs {step}")
        if teacher and settings.full_divergence is not None:
            packs = teacher.with_rows(packs, settings.full_divergence)
        with policy.updating():
            policy.update(packs, build_loss(settings), build_aggregator(settings), lr=1e-6)
        phase(f"update {step}")
        policy.served.refresh()
        with published(publisher, step):
            pass
        phase(f"publish {step}")
        if step == 1:  # what is to be written is held during the next step
            before = resident("VmRSS")
            saves = [policy.plan_save(folder / "save", step, stage=True)]
            if anchor:
                with anchor.swapped_in():
                    saves.append(plan_save(folder / "anchor", policy.chunks, iteration=step, stage=True))
            grown = resident("VmRSS") - before
            phase("save")
            transient = peaks["save"] + baseline - before
    buckets = [bucket for save in saves for *_, bucket in save._strategy.writer.write_buckets]
    staged = sum(tensor.nbytes for _, tensors in buckets for _, tensor in tensors)
    del saves, buckets
    publisher.close()
    report = {
        "stage": mesh.pipeline_rank,
        "replica": mesh.data_rank * mesh.context + mesh.context_rank,
        "parameters": sum(p.numel() for _, p in policy.named_parameters()),
        "baseline": baseline,
        "peaks": peaks,
        "staged": staged,
        "grown": grown,
        "transient": transient,
    }
    reports: list = [None] * mesh.world
    dist.all_gather_object(reports, report)
    if mesh.rank == 0:
        (folder / "result.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
