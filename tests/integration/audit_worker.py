"""One trainer rank of test_audit: plants one fault after the other, in the engine or itself, and audits."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.parameter_readers import stored_weights
from rpg_megatron.commands.audit import compare_engines as auditing
from rpg_megatron.config import Settings, load_settings
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.engine.process import engine_socket
from rpg_megatron.policy.attention import PackedAttention
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.length_groups import group_by_length
from rpg_megatron.policy.microbatch import MicroBatch, PackedSequences
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.run import RankRun


@contextmanager
def rope_base(run: RankRun, base: float) -> Iterator[None]:
    """The trainer rotates with another base."""
    layers = [layer for chunk in run.policy.chunks for layer in chunk.decoder.layers]
    rotary = [layer.self_attention.core_attention.rotary for layer in layers]
    before = [r.frequencies for r in rotary]
    for r in rotary:
        d = 2 * r.frequencies.numel()
        r.frequencies = base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    yield
    for r, frequencies in zip(rotary, before, strict=True):
        r.frequencies = frequencies


@contextmanager
def head(run: RankRun, **changes: float) -> Iterator[None]:
    """The trainer's log-probs are taken at another temperature, or over another vocabulary."""
    before = run.policy._head
    run.policy._head = dataclasses.replace(before, **changes)
    yield
    run.policy._head = before


@contextmanager
def packs(run: RankRun, spoil: Callable[[MicroBatch], None]) -> Iterator[None]:
    """The trainer packs wrongly."""
    plain = Policy.pack

    def pack(self: Policy, trajectories: list) -> MicroBatch:
        batch = plain(self, trajectories)
        spoil(batch)
        return batch

    Policy.pack = pack
    yield
    Policy.pack = plain


@contextmanager
def leak(run: RankRun) -> Iterator[None]:
    """Sequences see those before them."""
    plain = PackedAttention.forward

    def forward(
        self: PackedAttention, *inputs: object, packed_seq_params: PackedSequences, **more: object
    ) -> torch.Tensor:
        row = copy.copy(packed_seq_params)
        row.groups = group_by_length([sum(row.lengths)], row.positions.device)
        return plain(self, *inputs, packed_seq_params=row, **more)

    PackedAttention.forward = forward
    yield
    PackedAttention.forward = plain


def run_on(pack: MicroBatch) -> None:
    """Positions go on from one sequence to the next."""
    pack.packed.positions = torch.arange(pack.size)


@contextmanager
def engine_temperature(run: RankRun, temperature: float) -> Iterator[None]:
    """The engine samples at another temperature."""
    plain = auditing.trace_engine

    async def trace(client: object, settings: Settings, *rest: object) -> object:
        rollout = settings.rollout.model_copy(update={"temperature": temperature})
        return await plain(client, settings.model_copy(update={"rollout": rollout}), *rest)

    auditing.trace_engine = trace
    yield
    auditing.trace_engine = plain


@contextmanager
def expert(run: RankRun, factor: float) -> Iterator[None]:
    """In every layer, the first expert of each rank adds too much."""
    blocks = [layer.mlp for chunk in run.policy.chunks for layer in chunk.decoder.layers]
    weights = [b.experts.local_experts[0].linear_fc2.weight for b in blocks]
    with torch.no_grad():
        before = [w.clone() for w in weights]
        for w in weights:
            w *= factor
        yield
        for w, plain in zip(weights, before, strict=True):
            w.copy_(plain)


TRAINER_FAULTS: dict[str, Callable[[RankRun], AbstractContextManager[None]]] = {
    "rope": lambda run: rope_base(run, 50_000.0),
    "temperature": lambda run: head(run, temperature=0.8),
    "vocabulary": lambda run: head(run, vocab=run.policy.settings.model.vocab_multiple),
    "packing": leak,
    "positions": lambda run: packs(run, run_on),
    "trainer_expert": lambda run: expert(run, 1.5),
    "engine_temperature": lambda run: engine_temperature(run, 0.7),
}


def load(run: RankRun, folder: Path) -> None:
    """Fill the policy from a checkpoint."""
    load_hf_weights(
        folder,
        run.policy.named_parameters(),
        run.trainer.layout,
        run.mesh.coordinates(run.settings.model.vocab_multiple),
    )


def main() -> None:
    """Arguments as for a rank, then the folder with the engine's faults: a checkpoint each."""
    run_dir, work, bridge, faults = (Path(a) for a in sys.argv[1:5])
    settings = load_settings(run_dir / "config.yaml")
    device = start_device("cpu")
    start_process_group(device)
    run = RankRun(
        settings, run_dir, work, bridge, os.environ[TOKEN_VARIABLE], start_mesh(settings.parallel), device
    )
    request = auditing.AuditRequest()
    tokens = auditing.choose_tokens(settings, request)[:3]
    true = run_dir / "weights"
    run.write_checkpoint(true)
    others = {"version 0": stored_weights(faults / "earlier")}
    results = {}
    cases = json.loads((run_dir / "cases.json").read_text())
    for version, case in enumerate(cases):
        # The engine gets what the policy holds; then the policy gets its own weights back.
        if (faults / case).is_dir():
            load(run, faults / case)
        run.sync_engines(version)
        load(run, settings.model.path)
        with TRAINER_FAULTS.get(case, lambda _: nullcontext())(run):
            client = EngineClient(0, engine_socket(work, 0), os.environ[TOKEN_VARIABLE], timeout=600.0)
            verdict = auditing.audit_engine(run, client, bridge, tokens, true, others)
        results[case] = verdict
    if run.mesh.rank == 0:
        (run_dir / "result.json").write_text(json.dumps(results))
    dist.barrier()
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
