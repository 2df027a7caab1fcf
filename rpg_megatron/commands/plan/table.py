"""A plan as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from rpg_megatron.commands.plan.colocated import SharedGpu, Turn
from rpg_megatron.commands.plan.engine_memory import SERVER
from rpg_megatron.commands.plan.experts import expert_replicas
from rpg_megatron.commands.plan.gpu_count import GPUS_PER_NODE, Gpus
from rpg_megatron.commands.plan.plan import ROOM, Plan, count
from rpg_megatron.commands.plan.sweep import Candidate, is_bound_to_a_node
from rpg_megatron.commands.plan.trainer_memory import IMPORTS, RESERVE, recomputation
from rpg_megatron.config.errors import gib


def print_plan(plan: Plan, console: Console) -> None:
    """Print sizes, batch, and memory of a trainer rank and an engine worker."""
    console.print(_facts(plan))
    console.print(_trainer_table(plan))
    console.print(_engine_table(plan))
    if plan.shared_gpu is not None:
        console.print(_shared_gpu_table(plan, plan.shared_gpu))
    if plan.target.device == "cuda":
        console.print(_host_table(plan))


def print_verdict(plan: Plan, console: Console, lighter: Plan | None = None) -> None:
    """Print notes, problems, and whether it fits.

    lighter: the same run with less recomputation, which also fits.
    """
    for warning in plan.warnings:
        console.print(f"[yellow]note[/] {warning}", highlight=False)
    if lighter is not None:
        console.print(
            f"[yellow]note[/] memory.recompute={recomputation(lighter.settings)} also fits and leaves "
            f"{gib(lighter.left)}: less recomputation",
            highlight=False,
        )
    for problem in plan.problems:
        console.print(f"[bold red]does not fit[/] {problem}", highlight=False)
    if plan.fits:
        console.print("[bold green]fits[/]", highlight=False)


def print_sweep(candidates: Sequence[Candidate], console: Console, most: int = 20) -> None:
    """Print the layouts, best first."""
    table = Table(box=box.SIMPLE_HEAD, title="layouts, best first", title_justify="left", title_style="bold")
    experts = any(c.plan.shape.experts for c in candidates)
    for name in ("", "TP", "PP", "CP", "DP", "SP", *(["EP"] if experts else [])):
        table.add_column(name, justify="right")
    for name in ("per rank", "left", "passes", "idle"):
        table.add_column(name, justify="right")
    for candidate in candidates[:most]:
        p = candidate.plan
        parallel = p.settings.parallel
        verdict = "[red]no[/]" if not p.fits else "[yellow]tight[/]" if p.tight else "[green]fits[/]"
        table.add_row(
            verdict,
            str(parallel.tensor),
            str(parallel.pipeline),
            str(parallel.context),
            str(parallel.data),
            "on" if parallel.sequence else "",
            *([str(parallel.expert)] if experts else []),
            gib(p.rank_total),
            gib(p.left) if p.left >= 0 else "-" + gib(-p.left),
            str(p.batch.microbatches),
            f"{p.batch.pipeline_idle:.0%}",
        )
    console.print(table)
    if len(candidates) > most:
        console.print(f"and {len(candidates) - most} more; --json lists all", highlight=False)
    if any(c.plan.fits and c.plan.tight for c in candidates):
        console.print(
            f"tight: less than {gib(ROOM)} of a GPU left, within the error of these estimates; "
            "ranked after all other layouts that fit",
            highlight=False,
        )
    best = candidates[0] if candidates else None
    if best is not None and best.plan.fits and not best.plan.tight:
        console.print(f"best: {best.overrides}", highlight=False, soft_wrap=True)


def print_suggestion(layout: Candidate | None, engine: int | None, plan: Plan, console: Console) -> None:
    """Print what would fit instead. layout, engine: None if nothing does."""
    needs_layout = plan.need > plan.target.nbytes
    if needs_layout and layout is not None:
        ranks = layout.plan.settings.parallel.world
        console.print(
            f"smallest layout that fits: {ranks} trainer rank{'s' if ranks > 1 else ''}, "
            f"{gib(layout.plan.rank_total)} each{', tight' if layout.plan.tight else ''}: {layout.overrides}",
            highlight=False,
            soft_wrap=True,
        )
    elif needs_layout:
        more = ", or set bridge.transport=process_group for more than a node"
        console.print(
            "no layout fits; lower training.tokens_per_microbatch or use larger GPUs"
            + (more if is_bound_to_a_node(plan.settings) else ""),
            highlight=False,
        )
    if plan.engine.kv_cache < 0 or plan.engine.full_sequences < 1:
        found = f"engine.tensor={engine}" if engine else "none; use larger GPUs or shorter responses"
        console.print(f"smallest engine that fits: {found}", highlight=False)


def to_json(
    plan: Plan,
    *,
    layout: Candidate | None = None,
    engine: int | None = None,
    sweep: Sequence[Candidate] | None = None,
    lighter: Plan | None = None,
    times: dict[str, Any] | None = None,
) -> str:
    """One JSON object; sizes in bytes. times: see ``step_table.describe_times``; None: not estimated."""
    found = _describe(plan) | {"step_time": times}
    if not plan.fits:
        found["suggestion"] = {"parallel": layout.overrides if layout else None, "engine.tensor": engine}
    if lighter is not None:
        found["lighter"] = {"memory.recompute": recomputation(lighter.settings), "left_bytes": lighter.left}
    if sweep is not None:
        found["sweep"] = [
            {
                **c.plan.settings.parallel.model_dump(),
                "fits": c.plan.fits,
                "tight": c.plan.tight,
                "left_bytes": c.plan.left,
                "rank_bytes": c.plan.rank_total,
                "microbatches": c.plan.batch.microbatches,
                "pipeline_idle": c.plan.batch.pipeline_idle,
                "problems": list(c.plan.problems),
            }
            for c in sweep
        ]
    return json.dumps(found, indent=2)


def _describe(plan: Plan) -> dict[str, Any]:
    engine = plan.engine
    return {
        "fits": plan.fits,
        "problems": list(plan.problems),
        "warnings": list(plan.warnings),
        "target": vars(plan.target),
        "parameters": plan.parameters,
        "parallel": plan.settings.parallel.model_dump(),
        "gpus": {**vars(plan.gpus), "total": plan.gpus.total},
        "implementation": plan.implementation,
        "batch": vars(plan.batch),
        "ranks": [
            {
                "stage": r.stage,
                "publishes": r.publishes,
                "parameters": r.parameters,
                "parts": [vars(p) for p in r.parts],
                "phases": r.phases,
                "peak": r.peak,
                "host": r.host,
            }
            for r in plan.ranks
        ],
        "rank_bytes": plan.rank_total,
        "card": None
        if plan.shared_gpu is None
        else {
            "shares": [vars(share) for share in plan.shared_gpu.shares],
            "rollout": plan.shared_gpu.total("rollout"),
            "update": plan.shared_gpu.total("update"),
        },
        "machine_bytes": plan.machine_total if plan.target.device == "cpu" else None,
        "recompute": recomputation(plan.settings),
        "activations": plan.activations,
        "host": [vars(part) for part in plan.host],
        "left_bytes": plan.left,
        "tight": plan.tight,
        "routed_to_one_bytes": plan.routed_to_one,
        "engine": {
            **vars(engine),
            "total": engine.total,
            "kv_tokens": engine.kv_tokens,
            "full_sequences": engine.full_sequences,
        },
    }


def _facts(plan: Plan) -> Table:
    shape, parallel, batch = plan.shape, plan.settings.parallel, plan.batch
    engine = plan.settings.engine
    layers = shape.stage_layers(parallel.pipeline * parallel.virtual)
    of_layers = str(layers[0]) if len(set(layers)) == 1 else "/".join(map(str, layers))
    pieces = "micro-batches" if batch.microbatches > 1 else "micro-batch"
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "model",
        f"{shape.family}, {count(plan.parameters)} parameters: {shape.num_layers} layers, hidden "
        f"{shape.hidden_size}, heads {shape.num_heads}/{shape.num_kv_heads}, vocabulary {shape.vocab_size}"
        + (", tied" if shape.tied_embeddings else ""),
    )
    if (e := shape.experts) is not None:
        table.add_row(
            "experts",
            f"{e.count} of {e.ffn_hidden_size} columns in {len(e.layers)} layers, {e.per_token} per token: "
            f"{count(sum(shape.matmul_parameters))} active parameters; EP {parallel.expert}, ETP "
            f"{parallel.expert_tensor}: {e.count // parallel.expert} experts per rank, "
            f"{expert_replicas(parallel)} replicas",
        )
    table.add_row(
        "policy",
        f"{parallel.world} ranks: TP {parallel.tensor}{' + SP' if parallel.sequence else ''}, PP "
        f"{parallel.pipeline}{f' x VPP {parallel.virtual}' if parallel.virtual > 1 else ''}, "
        f"CP {parallel.context}, DP {parallel.data}; {of_layers} layers per "
        f"stage, {shape.num_heads // parallel.tensor} heads per rank",
    )
    table.add_row("layers", _layers(plan))
    table.add_row("engines", f"{engine.replicas} x TP {engine.tensor}")
    if plan.target.device == "cuda":
        table.add_row("GPUs", _gpus(plan.gpus))
    table.add_row(
        "step",
        f"{batch.prompts:,} prompts x {plan.settings.rollout.samples_per_prompt} = {batch.sequences:,} "
        f"responses, in {batch.updates} updates of {batch.sequences_per_update:,}"
        + (f" ({epochs} passes)" if (epochs := plan.settings.training.epochs) > 1 else ""),
    )
    table.add_row(
        "update",
        f"{batch.sequences_per_rank:,} responses per replica, up to {batch.longest:,} tokens: at most "
        f"{batch.microbatches:,} {pieces} of {batch.tokens_per_microbatch:,} tokens"
        + (", gradients accumulated" if batch.microbatches > 1 else "")
        + (f"; pipeline idle {batch.pipeline_idle:.0%}" if parallel.pipeline > 1 else ""),
    )
    return table


def _layers(plan: Plan) -> str:
    fp8 = plan.settings.precision.fp8
    if plan.implementation == "local":
        return f"Megatron's own, {plan.settings.precision.dtype}"
    kind = plan.settings.precision.dtype if fp8 is None else f"FP8 {fp8.recipe}"
    return f"Transformer Engine's, {kind}; counted from its sources"


def _gpus(gpus: Gpus) -> str:
    """Number of GPUs in total, by role and by node."""
    total = f"{gpus.total}: {gpus.trainer} for trainer ranks, {gpus.engines} for engine workers"
    if gpus.colocated:
        total = f"{gpus.total}, shared by {gpus.trainer} trainer ranks and {gpus.engines} engine workers"
    if gpus.why:
        return f"{total}; not on nodes of {GPUS_PER_NODE}, see below"
    parts = [f"{gpus.nodes.count(kind)} of {' + '.join(_held(kind))}" for kind in dict.fromkeys(gpus.nodes)]
    return f"{total}; {'1 node' if len(gpus.nodes) == 1 else f'{len(gpus.nodes)} nodes'}: {', '.join(parts)}"


def _held(kind: tuple[int, int]) -> list[str]:
    words = ("rank", "worker")
    return [f"{n} {word}{'s' if n > 1 else ''}" for n, word in zip(kind, words, strict=True) if n]


def _trainer_table(plan: Plan) -> Table:
    rank = plan.largest
    where = "" if plan.settings.parallel.pipeline == 1 else f", pipeline stage {rank.stage}, the largest"
    table = _table(f"trainer rank{where}: {count(rank.parameters)} parameters")
    for part in rank.parts:
        when = "host memory" if part.host else part.phase
        kind = f", recompute {recomputation(plan.settings)}" if part.name == "activations" else ""
        table.add_row(part.name + kind, gib(part.nbytes), part.basis, when)
    if plan.target.device == "cuda":
        table.add_row("CUDA context, NCCL, reserve", gib(RESERVE), "estimated", "always")
    else:
        table.add_row("imports", gib(IMPORTS), "estimated", "always")
    table.add_section()
    worst = max(rank.phases, key=lambda phase: rank.phases[phase])
    table.add_row("[bold]peak[/]", f"[bold]{gib(plan.rank_total)}[/]", _of(plan, plan.rank_total), worst)
    for kind, nbytes in plan.activations.items():
        if kind != recomputation(plan.settings):
            name = f"activations, recompute {kind}"
            table.add_row(name, gib(nbytes), "estimated", "if set so", style="dim")
    return table


def _engine_table(plan: Plan) -> Table:
    engine = plan.engine
    table = _table("engine worker")
    table.add_row("weights", gib(engine.weights), "exact", "always")
    if plan.target.device == "cuda":
        table.add_row("largest batch, context, graphs", gib(engine.running), "estimated", "rollout")
        kv = "as set" if engine.utilisation is None else f"fills {engine.utilisation:.0%}"
    else:
        kv = "engine.kv_cache_gib"
    if engine.buckets:
        table.add_row("bridge: buckets", gib(engine.buckets), "exact", "sync")
    table.add_row("KV cache", gib(max(0, engine.kv_cache)), kv, "rollout")
    table.add_section()
    table.add_row("[bold]all[/]", f"[bold]{gib(engine.total)}[/]", _of(plan, engine.total), "rollout")
    table.add_row(
        "KV cache holds",
        f"{engine.kv_tokens:,} tokens",
        f"{engine.kv_bytes_per_token:,} B each",
        f"{engine.full_sequences:,.1f} of full length",
        style="dim",
    )
    if plan.target.device == "cpu":
        table.add_section()
        for part in plan.host:
            table.add_row(part.name, gib(part.nbytes), part.basis, "always")
        total = f"[bold]{gib(plan.machine_total)}[/]"
        table.add_row(
            "[bold]all processes[/]", total, f"of {gib(plan.target.nbytes)}", f"{gib(SERVER)} per server"
        )
    return table


def _shared_gpu_table(plan: Plan, gpu: SharedGpu) -> Table:
    table = _table("GPU shared by a trainer rank and an engine worker")
    for turn in get_args(Turn):
        for share in gpu.shares:
            if share.turn == turn:
                table.add_row(share.name, gib(share.nbytes), share.basis, turn)
        total = gpu.total(turn)
        table.add_row(f"[bold]{turn}[/]", f"[bold]{gib(total)}[/]", _of(plan, total), "")
        table.add_section()
    return table


def _host_table(plan: Plan) -> Table:
    table = _table("host memory of rank 0's node")
    for part in plan.host:
        table.add_row(part.name, gib(part.nbytes), part.basis, "always")
    table.add_section()
    table.add_row("[bold]all[/]", f"[bold]{gib(sum(p.nbytes for p in plan.host))}[/]", "", "")
    return table


def _table(title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("part", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("basis")
    table.add_column("when")
    return table


def _of(plan: Plan, nbytes: int) -> str:
    if plan.target.device == "cpu":
        return ""
    return f"{nbytes / plan.target.nbytes:.0%} of {plan.target.name}"
