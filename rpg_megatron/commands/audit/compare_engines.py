"""The ranks' part of ``rpg-megatron audit``: the same tokens through engine and trainer, module by module.

An engine samples a few responses, one request at a time, so that its hooks see one sequence in order, on the
code path of rollouts (prefill, then token by token). The trainer computes the log-probs of the same tokens
twice: packed as in training, and each sequence alone. Rank 0 compares (``verdict.py``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpg_megatron.bridge.vllm.trace import join_workers, read_workers
from rpg_megatron.checkpoints.parameter_readers import Weights, stored_weights
from rpg_megatron.commands.audit.module_check import ActivationTrace
from rpg_megatron.commands.audit.trace_megatron import trace_policy
from rpg_megatron.commands.audit.verdict import Expected, diagnose
from rpg_megatron.commands.rank_job import WEIGHTS
from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape
from rpg_megatron.data.prompt_stream import PromptStream
from rpg_megatron.data.prompts import load_prompts, load_tokenizer
from rpg_megatron.data.rollout_files import read_rollouts, step_of
from rpg_megatron.data.trajectory import Tokens, Trajectory
from rpg_megatron.engine.client import EngineClient
from rpg_megatron.engine.command import context_length
from rpg_megatron.engine.process import engine_socket
from rpg_megatron.models.activation_sites import FINAL_INPUT, LOGITS, Trace
from rpg_megatron.policy.microbatch import MicroBatch
from rpg_megatron.rollout.seeds import seed_of
from rpg_megatron.system.collectives import broadcast_object
from rpg_megatron.system.dtypes import dtype_name
from rpg_megatron.training.mismatch import find_gaps
from rpg_megatron.training.rank import RankProcess
from rpg_megatron.training.run import RankRun

_SEQUENCES = 6
_SAMPLED = 32
"""Maximum tokens sampled per sequence."""
_PROMPTS = 64
"""Maximum prompts of the data among which sequences are chosen."""
_LONG = 512
"""Sequences with more given tokens are skipped if there are shorter ones."""


@dataclass(frozen=True)
class AuditRequest:
    """Options of an audit, besides the settings."""

    sync: bool = True
    """Sync the trainer's weights to the engines first; else the engines keep those they loaded."""
    rollouts: str | None = None
    """Rollouts file of a step: audit the responses with the largest mismatch, counting only tokens sampled
    by the weights before the step's update."""
    others: dict[str, str] = field(default_factory=dict)
    """Checkpoints that may explain a wrong weight: name in messages -> folder."""


def audit(rank: RankProcess, request: AuditRequest) -> dict[str, Any]:
    """Audit every engine; rank 0 returns the report, for JSON. Collective."""
    run = rank.start_run(RankRun)
    if request.sync:
        run.sync_engines(version=0)
    settings, weights = run.settings, rank.run_dir / WEIGHTS
    sequences = choose_tokens(settings, request) if run.mesh.rank == 0 else []
    run.write_checkpoint(weights)
    others = {name: stored_weights(Path(path)) for name, path in request.others.items()}
    engines = []
    for index in range(settings.engine.replicas):
        socket, timeout = engine_socket(rank.work, index), settings.engine.request_timeout
        client = EngineClient(index, socket, rank.token, timeout=timeout)
        engines.append(audit_engine(run, client, rank.bridge, sequences, weights, others))
    return {
        "clean": all(e.get("clean") for e in engines),
        "dtype": settings.precision.dtype,
        "model": str(settings.model.path),
        "synced": request.sync,
        "engines": engines,
    }


def audit_engine(
    run: RankRun,
    client: EngineClient,
    bridge: Path,
    sequences: Sequence[Tokens],
    weights: Path,
    others: Mapping[str, Weights],
) -> dict[str, Any]:
    """Compare one engine with the trainer. Collective; rank 0 returns the verdict, for JSON.

    client: of the engine, used on rank 0. sequences: on rank 0, tokens that the engine continues. weights:
    folder of the trainer's weights as a Hugging Face checkpoint.
    """
    settings = run.settings
    shape = read_model_shape(settings.model.path)
    traced: list[tuple[Trajectory, Trace]] = []
    if run.mesh.rank == 0:
        run.events.phase("tracing the engine", 0, 1)
        traced = asyncio.run(trace_engine(client, settings, shape, bridge, sequences))
        run.events.phase("tracing the trainer", 0, 1)
    trajectories: list[Trajectory] = broadcast_object([t for t, _ in traced], list[Trajectory])
    packs = [run.policy.pack(trajectories)]
    apart = [run.policy.pack([t]) for t in trajectories]
    packed, alone = (trace_policy(run.policy, shape, p) for p in (packs, apart))
    if run.mesh.rank:
        return {}
    run.events.phase("comparing", 0, 1)
    dtype = settings.precision.dtype
    expected = Expected(
        shape,
        stored_weights(weights),
        temperature=settings.rollout.temperature,
        dtype=dtype,
        bounds=settings.guards.thresholds(dtype),
        others=others,
        device=run.policy.device,
        replayed=settings.training.router_replay == "rollout",
    )
    verdict = diagnose(
        _engine_side(trajectories, [trace for _, trace in traced]),
        trainer_side(trajectories, packs, packed),
        trainer_side(trajectories, apart, alone),
        expected,
    )
    tokens = sum(t.length - 1 for t in trajectories)
    return {"engine": client.index, "sequences": len(sequences), "tokens": tokens} | verdict.to_json()


def choose_tokens(settings: Settings, request: AuditRequest) -> list[Tokens]:
    """Tokens for the engine to continue: prompts of the data, or saved responses cut in half."""
    if request.rollouts is not None:
        file = Path(request.rollouts)
        version = step_of(file) - 1
        worst = sorted(read_rollouts(file), key=lambda t: _mismatch(t, version), reverse=True)
        starts = [np.concatenate([t.prompt, t.response[: len(t.response) // 2]]) for t in worst]
    else:
        prompts = load_prompts(settings.prompts("audit"), load_tokenizer(settings.model.path), first=_PROMPTS)
        stream = PromptStream(prompts, settings.seed, settings.data.weights)
        starts = [prompt.tokens for prompt in stream.take(min(len(prompts), _PROMPTS))]
    short = [s for s in starts if len(s) <= _LONG] or [min(starts, key=len)]
    room = context_length(settings) - 1
    return [s[:room] for s in short[:_SEQUENCES]]


async def trace_engine(
    client: EngineClient, settings: Settings, shape: ModelShape, bridge: Path, sequences: Sequence[Tokens]
) -> list[tuple[Trajectory, Trace]]:
    """Have the engine continue each given sequence, one at a time; returns it with its modules' outputs.

    Raises UserError if the engine cannot be traced.
    """
    traced = []
    try:
        await client.wait_ready(settings.engine.start_timeout)
        await _call(client, "start")
        for number, tokens in enumerate(sequences):
            room = context_length(settings) - len(tokens)
            (sample,) = await client.generate(
                tokens,
                max_tokens=min(_SAMPLED, settings.rollout.max_response_tokens, room),
                temperature=settings.rollout.temperature,
                seed=seed_of(settings.seed, "audit", 0, number, 0),
            )
            await _call(client, "take")
            shards = await asyncio.to_thread(read_workers, bridge, settings.engine.tensor)
            trajectory = Trajectory(
                prompt_id=number,
                sample=0,
                prompt=np.asarray(tokens, np.int32),
                response=sample.tokens,
                behaviour=sample.logprobs,
                versions=np.zeros(len(sample.tokens), np.int32),
                finish=sample.finish,
                text="",
            )
            traced.append((trajectory, _cut(join_workers(shards, shape), trajectory)))
        await _call(client, "stop")
    finally:
        await client.close()
    return traced


async def _call(client: EngineClient, action: str) -> None:
    status, text = await client.post("/collective_rpc", {"method": "rpg_trace", "args": [action]})
    errors = [text[:500]] if status != 200 else [a["error"] for a in json.loads(text)["results"]]
    if any(errors):
        listed = "; ".join(e for e in errors if e)
        raise UserError(f"engine {client.index} cannot be traced ({action}): {listed}; see its log")


def _cut(trace: Trace, trajectory: Trajectory) -> Trace:
    """The rows of the sequence; an engine with asynchronous scheduling may have computed one more."""
    positions, sampled = trajectory.length - 1, len(trajectory.response)
    out = {}
    for site, values in trace.items():
        expected = sampled if site == LOGITS else positions
        if values.size(0) < expected:
            raise UserError(
                f"the engine's trace has {values.size(0)} of {expected} rows of {site}: it does not run all "
                "tokens through its modules; remove prefix caching, compilation and speculation from "
                "engine.arguments"
            )
        out[site] = values[:expected]
    return out


def _engine_side(trajectories: Sequence[Trajectory], traces: Sequence[Trace]) -> ActivationTrace:
    trace = {site: torch.cat([t[site] for t in traces]) for site in traces[0]}
    logp = np.concatenate([t.behaviour for t in trajectories])
    return _side("engine", trajectories, trace, torch.from_numpy(logp))


def trainer_side(
    trajectories: Sequence[Trajectory],
    packs: Sequence[MicroBatch],
    traced: Sequence[tuple[Trace, torch.Tensor]],
) -> ActivationTrace:
    """The trainer's trace of packs that together hold the trajectories in order; padding is removed.

    traced: the result of ``trace_policy``.
    """
    used = [p.real_positions() for p in packs]
    sites = traced[0][0]
    trace = {s: torch.cat([f[0][s][u] for f, u in zip(traced, used, strict=True)]) for s in sites}
    logp = torch.cat([part for f, p in zip(traced, packs, strict=True) for _, part in p.split(f[1][0])])
    return _side("trainer", trajectories, trace, logp)


def _side(name: str, trajectories: Sequence[Trajectory], trace: Trace, logp: torch.Tensor) -> ActivationTrace:
    inputs = np.concatenate([np.append(t.prompt, t.response)[:-1] for t in trajectories])
    predicts = np.concatenate([np.arange(1, t.length) >= len(t.prompt) for t in trajectories])
    return ActivationTrace(
        name=name,
        trace=trace,
        tokens=torch.from_numpy(inputs.astype(np.int64)),
        lengths=[t.length - 1 for t in trajectories],
        predicts=torch.from_numpy(predicts),
        sampled=torch.from_numpy(np.concatenate([t.response for t in trajectories]).astype(np.int64)),
        logp=logp,
        dtype=dtype_name(trace[FINAL_INPUT].dtype),
    )


def _mismatch(t: Trajectory, version: int) -> float:
    """Largest |engine - trainer| of a saved response, over tokens sampled by these weights; inf if NaN."""
    gap, _ = find_gaps([t], version)
    return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))
