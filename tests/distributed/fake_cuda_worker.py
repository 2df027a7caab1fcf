"""One rank's policy on a fake H100 (fake_cuda): everything that a step does with it, once.

``python fake_cuda_worker.py FOLDER CASE``: CASE is JSON with ``settings``, and ``losses`` where there are
several, or the ``files`` that have them, the ``rank``, changes to the model's ``shape``, and ``plant`` to
make faults on purpose. Of several files the first one's layout is taken and the losses of all. Writes faults
and waits to FOLDER/result.json.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import rpg_megatron.checkpoints.hf_export as hf_export
import rpg_megatron.training.trainer as trainer_module
from benchmarks.policies import SHAPES, batch_of
from rpg_megatron.bridge.publisher import make_publish_plan
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.commands.plan.activations import StageActivations
from rpg_megatron.commands.plan.layout import plan_batch
from rpg_megatron.commands.plan.trainer_memory import communicators
from rpg_megatron.config import Settings, load_settings, read_model_shape
from rpg_megatron.config.model_shape import ExpertShape, LatentAttention, LinearAttention
from rpg_megatron.models.placement import RankShards
from rpg_megatron.policy.attention import Runs
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.training.efficiency import Efficiency
from rpg_megatron.training.loss import build_aggregator, build_loss
from rpg_megatron.training.trainer import Trainer
from tests.support import fake_cuda
from tests.support.batches import prepare

LENGTHS = [60, 40]
"""Tokens of each sequence of a micro-batch."""


class Report:
    """Waits of each part, by owner, for result.json."""

    def __init__(self, recorder: fake_cuda.Recorder) -> None:
        self.recorder = recorder
        self.parts: dict[str, Counter[tuple[str, str]]] = {}
        self.error = ""
        self.more = 0
        """Micro-batches by which the longer of two updates exceeds the shorter."""
        self.planted: dict[str, Any] = {}
        self.planned: list[Any] = []
        """From ``plan``: size, and whether messages go to single ranks."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        before = self.recorder.waits.copy()
        try:
            yield
        finally:
            self.parts[name] = self.recorder.waits - before

    def as_json(self) -> dict[str, Any]:
        return {
            "faults": self.recorder.faults,
            "error": self.error,
            "more": self.more,
            "planted": self.planted,
            "messages": self.recorder.messages,
            "planned": self.planned,
            "communicators": [[size, sorted(ops)] for size, ops in self.recorder.communicators.values()],
            "waits": {
                name: {f"{owner}: {where}": n for (owner, where), n in sorted(counts.items())}
                for name, counts in self.parts.items()
            },
        }


def settings_of(case: dict[str, Any]) -> list[Settings]:
    if "files" in case:
        return [load_settings(Path(f), ["device=cuda", "training.minibatches=1"]) for f in case["files"]]
    base = {"model": {"path": "-"}, "data": {"path": "-"}, "device": "cuda", "training": {"minibatches": 1}}
    losses = case.get("losses") or [case["settings"].get("objective", {})]
    return [Settings.model_validate(base | case["settings"] | {"objective": loss}) for loss in losses]


def drive(every: list[Settings], case: dict[str, Any], folder: Path, report: Report) -> None:
    """Build a policy and call what a run calls, in the same order."""
    settings = every[0]
    device = start_device("cuda")
    start_process_group(device)
    shape = read_model_shape(settings.model.path) if "files" in case else SHAPES["tiny"]
    shape = replace(shape, **case.get("shape", {}))
    if "linear" in case:
        linear = LinearAttention(**case["linear"] | {"layers": tuple(case["linear"]["layers"])})
        shape = replace(shape, family="qwen3_5_text", linear=linear)
    if "latent" in case:
        latent = LatentAttention(**case["latent"])
        head_dim = latent.plain_dim + latent.rotated_dim
        sizes = {"num_kv_heads": shape.num_heads, "head_dim": head_dim, "qk_norm": False}
        shape = replace(shape, **sizes, latent=latent)
    if "experts" in case:
        experts = case["experts"] | {"layers": tuple(case["experts"]["layers"])}
        shape = replace(shape, family="qwen3_moe", experts=ExpertShape(**experts))
    mesh = start_mesh(settings.parallel)
    trainer_module.read_model_shape = lambda path: shape

    def load(path: Path, parameters: Iterable[tuple[str, torch.Tensor]], *_: Any, **__: Any) -> None:
        """A held teacher is built in host memory: on the GPU it would be beside the policy."""
        if settings.teacher is not None and path == settings.teacher.path:
            given = list(parameters)
            there = [name for name, p in given if p.device.type != "cpu"]
            if there or not given:
                report.recorder.fault(f"the teacher is built on the GPU: {there[:3]}")

    trainer_module.load_hf_weights = load
    trainer = Trainer(settings, mesh, device)
    policy = trainer.policy
    batch, stage = plan_batch(settings, shape.max_positions), mesh.pipeline_rank
    planned = communicators(StageActivations(settings, shape, stage, batch, "cpu"))  # "cpu": local layers
    report.planned = [[ranks, use.get("peers", 0) > 0] for ranks, _, use in planned if ranks > 1]

    def packs(number: int) -> list[MicroBatch]:
        micro_batches = []
        for i in range(number):
            batch = batch_of(LENGTHS, shape.vocab_size, seed=i)
            for t in batch:
                t.old = t.anchor = t.behaviour
                t.prompt = batch[0].prompt
            micro_batches.append(policy.pack(batch))
        return micro_batches

    if case.get("plant"):
        report.planted = plant_faults(policy, packs(1), report)
        return
    few = mesh.pipeline if settings.parallel.virtual > 1 else 1
    scored = packs(few)
    # What a stage of a pipeline receives: the shape of an activation.
    rows = scored[0].tokens.size(1) // (mesh.tensor if settings.parallel.sequence else 1)
    fake_cuda.received_shape[:] = [rows, 1, shape.hidden_size]
    with report.part("score"):
        policy.logprobs(scored)
    if settings.training.share_prompts:
        assert isinstance(scored[0].packed.runs, Runs)
    if trainer.anchor is not None:
        with report.part("anchor"), trainer.anchor.swapped_in():
            pass

    def update(number: int, s: Settings) -> None:
        with policy.updating():
            micro_batches = packs(number)
            if trainer.teacher is not None and s.full_divergence is not None:
                micro_batches = trainer.teacher.with_rows(micro_batches, s.full_divergence)
            policy.update(micro_batches, build_loss(s), build_aggregator(s), lr=1e-6)

    update(few, settings)  # a skipped one, which also learns the names of the metrics
    fake_cuda.flags_are_set[0] = False
    if mesh.rank == 0 and mesh.pipeline == 1:  # other ranks receive their batch
        step(trainer, report)
    for number, s in enumerate(every):
        with report.part(f"update {number}"):
            update(few, s)
        if number == 0:
            with report.part("park"):
                park(policy, report)
        with report.part(f"longer update {number}"):
            update(2 * few, s)
    report.more = few
    if trainer.teacher is not None:
        left = [n for n, p in trainer.teacher.model.named_parameters() if p.device.type != "cpu"]
        if left:
            report.recorder.fault(f"the teacher stays on the GPU after its passes: {left[:3]}")
    policy.served.refresh()
    if mesh.pipeline == 1:
        publish(trainer, folder, report)
    if mesh.world == 1:
        (folder / "save").mkdir()
        with report.part("save"):
            policy.plan_save(folder / "save", 1, stage=True)
        (folder / "save_at_once").mkdir()
        with report.part("save at once"):
            save = policy.plan_save(folder / "save_at_once", 1, stage=False)
        for *_, (_, tensors) in save._strategy.writer.write_buckets:
            for item, x in tensors:
                if x.device.type != "cpu":
                    report.recorder.fault(f"Megatron cannot write {item.index.fqn}: on {x.device}")


def park(policy: Policy, report: Report) -> None:
    """What engines that share the GPU need: all that is freed goes back to the device."""
    layer: Any = policy.chunks[0].decoder.layers[0]
    layer._fp8_workspaces = {"weight": torch.empty(4, device="cuda")}  # as Transformer Engine caches weights
    policy.offloader.offload()
    if report.recorder.cached:
        report.recorder.fault("memory that was freed for engines stays in torch's cache")
    if layer._fp8_workspaces:
        report.recorder.fault("FP8 weights stay cached while engines run")
    policy.offloader.reload()


def step(trainer: Trainer, report: Report) -> None:
    """What rank 0 does between rollouts and publication, with a micro-batch for each data rank."""
    everything = batch_of(LENGTHS * trainer.mesh.data, trainer.shape.vocab_size)
    for number, t in enumerate(everything):
        t.reward = float(number % 2)
        t.group, t.sample, t.prompt = number // 2, number % 2, everything[0].prompt
    with report.part("step"):
        batch = prepare(trainer, everything)
        trainer.scorer.compute_log_probs(batch)
    with report.part("first update"):
        trainer.update(1, batch, lambda done, all_: None)
    efficiency = Efficiency(trainer.settings, trainer.shape, trainer.policy.device)
    efficiency.metrics({"step/tokens": 1.0, "step/forward_flops": 1.0, "time/step": 1.0})
    efficiency.close()


def publish(trainer: Trainer, folder: Path, report: Report) -> None:
    """Checksums, the file that engines of the node read, and an export."""
    policy, settings, (layout, _) = trainer.policy, trainer.settings, trainer.published
    placement = policy.mesh.coordinates(settings.model.vocab_multiple)
    params, dtype = policy.served.tensors, torch_dtype(settings.precision.dtype)
    plan = make_publish_plan(placement, params, layout)
    with report.part("checksums"):
        plan.sum_boxes(params, dtype)
    bridge = folder / "bridge"
    bridge.mkdir(mode=0o700)
    publisher = SharedMemoryPublisher(bridge, placement, params, layout, dtype, adopt=False)
    with report.part("publish"):
        publisher.publish(1)
    publisher.close()
    hf_export.save_file = _check_file
    (folder / "source").mkdir()
    (folder / "source" / "config.json").write_text("{}")
    with report.part("export"):
        weights = policy.complete_weights(torch.bfloat16)
        hf_export.export_hf(
            folder / "out", folder / "source", weights, trainer.layout, placement, dtype=torch.bfloat16
        )


def _check_file(tensors: dict[str, torch.Tensor], path: Path, metadata: object) -> None:
    """Replaces safetensors, which needs real memory; reports tensors that it would not write."""
    for name, x in tensors.items():
        if x.device.type != "cpu" or not x.is_contiguous():
            fake_cuda.RECORDER.fault(f"safetensors cannot write {name}: on {x.device}, strides {x.stride()}")
    path.write_bytes(b"")


def _peer(tensor: int, value: Any, rank: int) -> Any:
    """The value of another rank of the same stage: this rank's, with the other's coordinates."""

    def placed(holding: RankShards) -> RankShards:
        p = holding.coordinates
        e = p.experts
        part = replace(e, rank=rank // e.tensor % e.parallel, tensor_rank=rank % e.tensor)
        moved = replace(p, rank=rank, tensor_rank=rank % tensor, data_rank=rank // tensor, experts=part)
        return replace(holding, coordinates=moved)

    if isinstance(value, RankShards):
        return placed(value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], RankShards):
        return placed(value[0]), value[1]
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        return rank, _AnySum()
    return value


class _AnySum(dict[Any, int]):
    """Checksums of a rank that is not there."""

    def __missing__(self, key: Any) -> int:
        return 0


def plant_faults(policy: Policy, packs: list[MicroBatch], report: Report) -> dict[str, Any]:
    """Make each fault once; returns the faults and waits that were recorded."""
    loss, aggregator = build_loss(policy.settings), build_aggregator(policy.settings)

    def update(micro_batches: list[MicroBatch], by: Callable[..., Any] = loss) -> None:
        with policy.updating():
            policy.update(micro_batches, by, aggregator, lr=1e-6)

    def through_numpy(logp: torch.Tensor, tokens: Any) -> Any:
        np.mean(logp.detach().numpy())
        return loss(logp, tokens)

    def token_by_token(logp: torch.Tensor, tokens: Any) -> Any:
        sum(x.item() for x in logp.detach()[:50])
        return loss(logp, tokens)

    def by_mask(logp: torch.Tensor, tokens: Any) -> Any:
        for x in (tokens.old, tokens.behaviour, tokens.advantages):
            x[x != 0].sum()
        return loss(logp, tokens)

    def scalars(logp: torch.Tensor, tokens: Any) -> Any:
        for i in range(3):
            torch.tensor(float(i), device=logp.device) * logp
        return loss(logp, tokens)

    pack, gpu = packs[0], torch.ones(4, 4, device="cuda")
    gloo = dist.new_group(backend="gloo")
    faults: dict[str, Callable[[], object]] = {
        "CPU tensor in a micro-batch": lambda: update([replace(pack, old=torch.zeros(pack.size))]),
        ".numpy() in a loss": lambda: update([pack], through_numpy),
        ".item() a token": lambda: update([pack], token_by_token),
        "CPU tensor over NCCL": lambda: dist.all_reduce(torch.ones(1)),
        "boolean indices": lambda: update([pack], by_mask),
        "scalars to the GPU": lambda: update([pack], scalars),
        "CUDA tensor over gloo": lambda: dist.all_reduce(gpu, group=gloo),
        "columns over NCCL": lambda: dist.broadcast(gpu[:, 0], src=0),
        "int16 over NCCL": lambda: dist.broadcast(gpu.to(torch.int16), src=0),
        "objects over NCCL": lambda: dist.all_gather_object([None], 1),
        "barrier over NCCL": lambda: dist.barrier(),
    }
    detected = {}
    for name, make in faults.items():
        before = len(report.recorder.faults)
        with report.part(name):
            try:
                make()
            except (RuntimeError, TypeError, ValueError) as e:
                print(f"{name}: {e}")
        waits = {where: n for (owner, where), n in report.parts[name].items() if owner == fake_cuda.OURS}
        detected[name] = {"faults": report.recorder.faults[before:], "waits": waits}
    return detected


def main() -> None:
    folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    gc.disable()  # the process ends soon, and Megatron asks for collections
    gc.freeze()
    every = settings_of(case)
    parallel = every[0].parallel
    fake_cuda.peer_value[0] = partial(_peer, parallel.tensor)
    with fake_cuda.fake_cuda(case.get("rank", 0), parallel.world) as recorder:
        report = Report(recorder)
        try:
            drive(every, case, folder, report)
        except Exception:
            report.error = traceback.format_exc()
    (folder / "result.json").write_text(json.dumps(report.as_json(), indent=1))
    fake_cuda.leave()


if __name__ == "__main__":
    main()
