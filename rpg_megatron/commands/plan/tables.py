"""A plan as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rpg_megatron.commands.plan.engine_memory import SERVER, TURNS
from rpg_megatron.commands.plan.from_run import FromRun
from rpg_megatron.commands.plan.gpus import OF_THE_RUN, Assumed
from rpg_megatron.commands.plan.layout import GPUS_PER_NODE, Gpus, expert_replicas
from rpg_megatron.commands.plan.other_placements import Costed, cost_lines, faster_line
from rpg_megatron.commands.plan.plan import ROOM, Plan, count, is_bound_to_a_node
from rpg_megatron.commands.plan.step_time import StepTime
from rpg_megatron.commands.plan.trainer_memory import IMPORTS, RESERVE, MemoryPart, recomputation
from rpg_megatron.config.errors import gib


@dataclass(frozen=True)
class Answer:
    """A plan and what the command prints beside it; None: not computed, or there is none."""

    plan: Plan
    warnings: Sequence[str]
    """Those of the plan and of the checks."""
    assumed: Assumed
    steps: Sequence[StepTime] | None
    """The time of a step, first with the placement of the settings."""
    taken: FromRun | None
    """What another run measured."""
    run: Costed | None
    """The cost of the run."""
    faster: Costed | None
    """That of a faster placement on the same GPUs."""
    lighter: Plan | None
    """The same run with less recomputation, which also fits."""
    layout: Plan | None
    """The layout with the fewest ranks that fits, if the run does not."""
    engine: int | None
    """The smallest engine.tensor that fits, if the run does not."""
    swept: Sequence[Plan] | None
    """All layouts, best first."""


def print_answer(answer: Answer, console: Console) -> None:
    """Print the plan, the time of a step, whether it fits and what else would, and other layouts."""
    _print_plan(answer.plan, console)
    if answer.steps:
        _print_times(answer, answer.steps, console)
    if answer.run is not None:
        for line in cost_lines(answer.run, answer.assumed.values):
            console.print(line, highlight=False)
    if answer.faster is not None:  # in one line, to be copied
        console.print(faster_line(answer.faster), highlight=False, markup=False, soft_wrap=True)
    for line in _verdict(answer):
        console.print(line, highlight=False)
    for line in _suggestions(answer):  # in one line each, to be copied
        console.print(line, highlight=False, soft_wrap=True)
    if answer.swept is not None:
        _print_sweep(answer.swept, console)


_MEMORY = ("part", ">bytes", "basis", "when")

Row = tuple[str, ...]


def _print_table(console: Console, title: str, columns: Sequence[str], *sections: Iterable[Row]) -> None:
    """Print a table with a line between sections. columns: names; those after a > are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"), justify="right" if right else "left", no_wrap=name != columns[-1]
        )
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    console.print(table)


def _styled(style: str, *cells: str) -> Row:
    return tuple(f"[{style}]{cell}[/]" if cell else "" for cell in cells)


def _part_rows(parts: Iterable[MemoryPart]) -> list[Row]:
    return [(part.name, gib(part.nbytes), part.basis, part.phase) for part in parts]


def _print_plan(plan: Plan, console: Console) -> None:
    """Print sizes, batch, and the memory of each kind of process."""
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(plan):
        facts.add_row(name, text)
    console.print(facts)
    rank, stages = plan.largest, plan.settings.parallel.pipeline
    where = "" if stages == 1 else f", pipeline stage {rank.stage}, the largest"
    title = f"trainer rank{where}: {count(rank.parameters)} parameters"
    if rank.trained < rank.parameters:
        title += f", {count(rank.trained)} of them trained"
    _print_table(console, title, _MEMORY, *_rank_rows(plan))
    if plan.settings.engine.replicas:
        _print_table(console, "engine worker", _MEMORY, *_engine_rows(plan))
    elif not plan.on_gpu:
        _print_table(console, "all processes", _MEMORY, _machine_rows(plan))
    if plan.shared_gpu is not None:
        turns = []
        for turn in TURNS:
            total = plan.shared_gpu.total(turn)
            rows = _part_rows(part for part in plan.shared_gpu.parts if part.phase == turn)
            turns.append([*rows, _styled("bold", turn, gib(total), _share_of_target(plan, total), "")])
        _print_table(console, "GPU shared by a trainer rank and an engine worker", _MEMORY, *turns)
    if plan.on_gpu:
        everything = [_styled("bold", "all", gib(sum(part.nbytes for part in plan.host)), "", "")]
        _print_table(console, "host memory of rank 0's node", _MEMORY, _part_rows(plan.host), everything)


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    shape, settings, parallel, batch = plan.shape, plan.settings, plan.settings.parallel, plan.batch
    layers = shape.stage_layers(parallel.pipeline * parallel.virtual)
    of_layers = str(layers[0]) if len(set(layers)) == 1 else "/".join(map(str, layers))
    yield (
        "model",
        f"{shape.family}, {count(plan.parameters)} parameters: {shape.num_layers} layers, hidden "
        f"{shape.hidden_size}, heads {shape.num_heads}/{shape.num_kv_heads}, vocabulary {shape.vocab_size}"
        + (", tied" if shape.tied_embeddings else ""),
    )
    if (lora := settings.lora) is not None:
        where = "all-linear" if lora.targets == "all-linear" else ", ".join(lora.names)
        yield (
            "adapters",
            f"rank {lora.rank}, {where}: {count(plan.trained)} of {count(plan.parameters)} parameters are "
            f"trained ({plan.trained / plan.parameters:.2%})",
        )
    if (e := shape.experts) is not None:
        yield (
            "experts",
            f"{e.count} of {e.ffn_hidden_size} columns in {len(e.layers)} layers, {e.per_token} per token: "
            f"{count(sum(shape.matmul_parameters))} active parameters; EP {parallel.expert}, ETP "
            f"{parallel.expert_tensor}: {e.count // parallel.expert} experts per rank, "
            f"{expert_replicas(parallel)} replicas",
        )
    yield (
        "policy",
        f"{parallel.world} ranks: TP {parallel.tensor}{' + SP' if parallel.sequence else ''}, PP "
        f"{parallel.pipeline}{f' x VPP {parallel.virtual}' if parallel.virtual > 1 else ''}, "
        f"CP {parallel.context}, DP {parallel.data}; {of_layers} layers per "
        f"stage, {shape.num_heads // parallel.tensor} heads per rank",
    )
    fp8 = settings.precision.fp8
    kind = settings.precision.dtype if fp8 is None else f"FP8 {fp8.recipe}"
    if plan.implementation == "local":
        yield "layers", f"Megatron's own, {settings.precision.dtype}"
    else:
        yield "layers", f"Transformer Engine's, {kind}; counted from its sources"
    if settings.engine.replicas:
        yield "engines", f"{settings.engine.replicas} x TP {settings.engine.tensor}"
    if plan.on_gpu:
        yield "GPUs", _gpus(plan.gpus)
    epochs, what = settings.training.epochs, "responses" if settings.sft is None else "conversations"
    if settings.sft is not None:
        yield "step", f"one update on {batch.sequences:,} conversations"
    else:
        yield (
            "step",
            f"{batch.prompts:,} prompts x {settings.rollout.samples_per_prompt} = {batch.sequences:,} "
            f"responses, in {batch.updates} updates of {batch.sequences_per_update:,}"
            + (f" ({epochs} passes)" if epochs > 1 else ""),
        )
    yield (
        "update",
        f"{batch.sequences_per_rank:,} {what} per replica, up to {batch.longest:,} tokens: at most "
        f"{batch.microbatches:,} micro-batch{'es' if batch.microbatches > 1 else ''} of "
        f"{batch.tokens_per_microbatch:,} tokens"
        + (", gradients accumulated" if batch.microbatches > 1 else "")
        + (f"; pipeline idle {batch.pipeline_idle:.0%}" if parallel.pipeline > 1 else ""),
    )


def _gpus(gpus: Gpus) -> str:
    """Number of GPUs in total, by role and by node."""
    total = f"{gpus.total}: {gpus.trainer} for trainer ranks, {gpus.engines} for engine workers"
    if gpus.colocated:
        total = f"{gpus.total}, shared by {gpus.trainer} trainer ranks and {gpus.engines} engine workers"
    if gpus.why:
        return f"{total}; not on nodes of {GPUS_PER_NODE}, see below"
    kinds = []
    for ranks, workers in dict.fromkeys(gpus.nodes):
        held = [
            f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((ranks, "rank"), (workers, "worker")) if n
        ]
        kinds.append(f"{gpus.nodes.count((ranks, workers))} of {' + '.join(held)}")
    return f"{total}; {'1 node' if len(gpus.nodes) == 1 else f'{len(gpus.nodes)} nodes'}: {', '.join(kinds)}"


def _rank_rows(plan: Plan) -> tuple[list[Row], list[Row]]:
    """The parts of the largest trainer rank; its peak, and other values of memory.recompute."""
    rank, chosen = plan.largest, recomputation(plan.settings)
    parts: list[Row] = [
        (
            part.name + (f", recompute {chosen}" if part.name == "activations" else ""),
            gib(part.nbytes),
            part.basis,
            "host memory" if part.host else part.phase,
        )
        for part in rank.parts
    ]
    name, nbytes = ("CUDA context, reserve", RESERVE) if plan.on_gpu else ("imports", IMPORTS)
    parts.append((name, gib(nbytes), "estimated", "always"))
    phase = max(rank.phases, key=lambda name: rank.phases[name])
    peak = _styled("bold", "peak", gib(plan.rank_total), _share_of_target(plan, plan.rank_total), phase)
    others = [
        _styled("dim", f"activations, recompute {kind}", gib(nbytes), "estimated", "if set so")
        for kind, nbytes in plan.activations.items()
        if kind != chosen
    ]
    return parts, [peak, *others]


def _engine_rows(plan: Plan) -> tuple[list[Row], list[Row], list[Row]]:
    """The parts of an engine worker; its sum and KV cache; on a CPU, the other processes and all together."""
    engine = plan.engine
    parts: list[Row] = [("weights", gib(engine.weights), "exact", "always")]
    if engine.adapters:
        parts.append(("adapters", gib(engine.adapters), "exact", "always"))
    kv_basis = "engine.kv_cache_gib"
    if plan.on_gpu:
        parts.append(("batch, context, graphs, NCCL", gib(engine.running), "estimated", "rollout"))
        kv_basis = "as set" if engine.utilisation is None else f"fills {engine.utilisation:.0%}"
    if engine.buckets:
        parts.append(("bridge: buckets, NCCL", gib(engine.buckets), "estimated", "sync"))
    parts.append(("KV cache", gib(max(0, engine.kv_cache)), kv_basis, "rollout"))
    tokens, each = f"{engine.kv_tokens:,} tokens", f"{engine.kv_bytes_per_token:,} B each"
    sums = [
        _styled("bold", "all", gib(engine.total), _share_of_target(plan, engine.total), "rollout"),
        _styled("dim", "KV cache holds", tokens, each, f"{engine.full_sequences:,.1f} of full length"),
    ]
    if plan.on_gpu:
        return parts, sums, []
    return parts, sums, _machine_rows(plan)


def _machine_rows(plan: Plan) -> list[Row]:
    """On a CPU: the step, and all processes together."""
    server = f"{gib(SERVER)} per server" if plan.settings.engine.replicas else ""
    total, has = gib(plan.machine_total), f"of {gib(plan.target.nbytes)}"
    return [*_part_rows(plan.host), _styled("bold", "all processes", total, has, server)]


def _share_of_target(plan: Plan, nbytes: int) -> str:
    return f"{nbytes / plan.target.nbytes:.0%} of {plan.target.name}" if plan.on_gpu else ""


def _print_times(answer: Answer, steps: Sequence[StepTime], console: Console) -> None:
    """Print the phases of the first step, all placements, and the assumptions."""
    current, taken = steps[0], answer.taken
    measured = taken.measured if taken is not None else None
    title = f"time of a step, {current.placement}: computed, not measured"
    columns, own = ["phase", ">seconds", ">share", "bound by"], []
    if taken is not None and measured is not None:
        title = f"time of a step, {current.placement}: computed from the times of {taken.run.folder.name}"
        columns.insert(2, ">in that run")
    phases = []
    for phase in current.phases:
        own = [] if measured is None else [_seconds(measured.get(phase.name))]
        share = f"{phase.seconds / current.step:.0%}"
        phases.append((phase.name, _seconds(phase.seconds), *own, share, phase.bound))
    speed = f"{current.trained_tokens / current.step:,.0f} trained tokens/s"
    own = [] if taken is None or measured is None else [_seconds(taken.run.step)]
    total = _styled("bold", "step", _seconds(current.step), *own)
    _print_table(console, title, columns, phases, [(*total, "", speed)])
    if answer.plan.on_gpu:  # on a CPU, placements share the cores
        _print_placements(steps, console)
    title = "assumptions; change with --assume NAME=VALUE"
    numbers = [(name, _number(value), source, why) for name, value, source, why in answer.assumed.rows]
    _print_table(console, title, ("name", ">value", "source", "what"), numbers)
    if taken is not None:
        for line in _from_run_lines(taken, answer):
            console.print(line, highlight=False, markup=False)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


def _from_run_lines(taken: FromRun, answer: Answer) -> Iterator[str]:
    """Which figures came from the run, which remain assumed, and what to know of them."""
    unused = [] if answer.run else [*OF_THE_RUN]
    if answer.plan.settings.rollout.dynamic is None:
        unused.append("kept_groups")
    sources = {name: source for name, _, source, _ in answer.assumed.rows if name not in unused}
    run, ends = taken.run, "running" if taken.run.running else "not running"
    first = ", without the first after a start" if run.warm else ""
    yield f"from {run.folder} ({ends}): medians of {run.steps} steps{first}"
    by_run, guessed = ([n for n, source in sources.items() if source == kind] for kind in ("run", "assumed"))
    yield f"of the run: {', '.join(by_run) or 'nothing, since --assume sets all of it'}"
    yield f"still assumed: {', '.join(guessed)}"
    for note in taken.notes:
        yield f"note {note}"


def _print_placements(steps: Sequence[StepTime], console: Console) -> None:
    rows = []
    for step in steps:
        gpus, idle = f"{step.trainer_gpus:g} + {step.engine_gpus:g}", f"{step.engine_idle:.0%}"
        if step.placement == "colocated":
            gpus, idle = f"{step.gpus:.0f}", "the same"
        speed = f"{step.trained_tokens / step.step:,.0f}"
        rows.append((step.placement, gpus, f"{step.step:.1f}", speed, f"{step.trainer_idle:.0%}", idle))
    columns = ("placement", ">GPUs", ">step, s", ">tokens/s", ">trainers idle", ">engines idle")
    _print_table(console, "placements with the same number of GPUs", columns, rows)
    console.print("by turns, overlapped: trainers and engines on separate GPUs", highlight=False)
    console.print("overlapped: rollout.ahead 1 or more; by turns: rollout.ahead 0", highlight=False)
    console.print(waits(steps[0]), highlight=False)


def waits(step: StepTime) -> str:
    """One line: waiting times of trainer and engines in a step with the settings' placement."""
    rest = step.seconds("other")
    if step.placement == "colocated":
        tail, handover = step.seconds("rollout: tail"), step.seconds("handover")
        return (
            f"waiting, of {step.step:.0f} s: all GPUs {rest + handover:.0f} s for handovers and fixed costs; "
            f"in the rollout's tail of {tail:.0f} s most are idle"
        )
    trainer = step.step - step.training - step.seconds("sync")
    engines = step.step - step.generation - step.seconds("sync")
    line = (
        f"waiting, of {step.step:.0f} s: {step.trainer_gpus:.0f} trainer GPUs {trainer:.0f} s, "
        f"{step.engine_gpus:.0f} engine GPUs {engines:.0f} s"
    )
    if step.placement == "by turns":
        return f"{line}; rollout.ahead overlaps them"
    return f"{line}; generation {step.generation:.0f} s beside training {step.training:.0f} s"


def _verdict(answer: Answer) -> Iterator[str]:
    """Notes, problems, and whether it fits."""
    plan, lighter = answer.plan, answer.lighter
    for warning in answer.warnings:
        yield f"[yellow]note[/] {warning}"
    if lighter is not None:
        yield (
            f"[yellow]note[/] memory.recompute={recomputation(lighter.settings)} also fits and leaves "
            f"{gib(lighter.left)}: less recomputation"
        )
    for problem in plan.problems:
        yield f"[bold red]does not fit[/] {problem}"
    if plan.fits:
        yield "[bold green]fits[/]"


def _suggestions(answer: Answer) -> Iterator[str]:
    """What would fit instead; nothing if the run fits."""
    plan, layout, engine = answer.plan, answer.layout, answer.engine
    if plan.left < 0 and layout is not None:
        ranks = layout.settings.parallel.world
        yield (
            f"smallest layout that fits: {ranks} trainer rank{'s' if ranks > 1 else ''}, "
            f"{gib(layout.rank_total)} each{', tight' if layout.tight else ''}: {layout.overrides}"
        )
    elif plan.left < 0:
        more = ", or set bridge.transport=process_group for more than a node"
        yield (
            "no layout fits; lower training.tokens_per_microbatch or use larger GPUs"
            + (more if is_bound_to_a_node(plan.settings) else "")
        )
    if plan.engine.kv_cache < 0 or plan.engine.full_sequences < 1:
        none = "none; use larger GPUs or shorter responses"
        yield f"smallest engine that fits: {f'engine.tensor={engine}' if engine else none}"


def _print_sweep(layouts: Sequence[Plan], console: Console, most: int = 20) -> None:
    """Print the layouts, best first."""
    sizes = {"TP": "tensor", "PP": "pipeline", "CP": "context", "DP": "data", "SP": "sequence"}
    if any(plan.shape.experts for plan in layouts):
        sizes["EP"] = "expert"
    rows = []
    for plan in layouts[:most]:
        parallel = plan.settings.parallel
        cells = {name: str(getattr(parallel, size)) for name, size in sizes.items()}
        cells["SP"] = "on" if parallel.sequence else ""
        verdict = "[red]no[/]" if not plan.fits else "[yellow]tight[/]" if plan.tight else "[green]fits[/]"
        left = gib(plan.left) if plan.left >= 0 else "-" + gib(-plan.left)
        passes, idle = str(plan.batch.microbatches), f"{plan.batch.pipeline_idle:.0%}"
        rows.append((verdict, *cells.values(), gib(plan.rank_total), left, passes, idle))
    columns = ["", *sizes, "per rank", "left", "passes", "idle"]
    _print_table(console, "layouts, best first", [f">{name}" for name in columns], rows)
    if len(layouts) > most:
        console.print(f"and {len(layouts) - most} more; --json lists all", highlight=False)
    if any(plan.fits and plan.tight for plan in layouts):
        console.print(
            f"tight: less than {gib(ROOM)} of a GPU left, within the error of these estimates; "
            "ranked after all other layouts that fit",
            highlight=False,
        )
    if layouts and layouts[0].fits and not layouts[0].tight:
        console.print(f"best: {layouts[0].overrides}", highlight=False, soft_wrap=True)


def _number(value: float) -> str:
    for exponent in (12, 9, 6):
        if value >= 10**exponent:
            return f"{value / 10**exponent:.4g}e{exponent}"
    return f"{value:g}"


# -- JSON ----------------------------------------------------------------------------------------------------


def to_json(answer: Answer) -> str:
    """One JSON object; sizes in bytes."""
    plan, steps = answer.plan, answer.steps
    described: dict[str, Any] = {
        "fits": plan.fits,
        "problems": plan.problems,
        "warnings": answer.warnings,
        "target": plan.target,
        "parameters": plan.parameters,
        "trained_parameters": plan.trained,
        "parallel": plan.settings.parallel.model_dump(),
        "gpus": {**vars(plan.gpus), "total": plan.gpus.total},
        "implementation": plan.implementation,
        "batch": plan.batch,
        "ranks": [{**vars(r), "phases": r.phases, "peak": r.peak, "host": r.host} for r in plan.ranks],
        "rank_bytes": plan.rank_total,
        "card": None,
        "machine_bytes": None if plan.on_gpu else plan.machine_total,
        "recompute": recomputation(plan.settings),
        "activations": plan.activations,
        "host": plan.host,
        "left_bytes": plan.left,
        "tight": plan.tight,
        "routed_to_one_bytes": plan.routed_to_one,
        "engine": {
            **vars(plan.engine),
            "total": plan.engine.total,
            "kv_tokens": plan.engine.kv_tokens,
            "full_sequences": plan.engine.full_sequences,
        },
        "step_time": None,
        "run_cost": None,
    }
    if (shared := plan.shared_gpu) is not None:
        turns = {turn: shared.total(turn) for turn in TURNS}
        described["card"] = {"shares": [{**vars(p), "turn": p.phase} for p in shared.parts], **turns}
    if steps is not None:
        assumptions = {
            name: {"value": value, "source": source} for name, value, source, _ in answer.assumed.rows
        }
        placements = [
            {
                **vars(step),
                "step_seconds": step.step,
                "tokens_per_second": step.trained_tokens / step.step,
                "generation_seconds": step.generation,
                "training_seconds": step.training,
                "trainer_idle": step.trainer_idle,
                "engine_idle": step.engine_idle,
            }
            for step in steps
        ]
        described["step_time"] = {"measured": False, "placements": placements, "assumptions": assumptions}
    if (taken := answer.taken) is not None:
        described["from"] = {
            "run": str(taken.run.folder),
            "steps": taken.run.steps,
            "step_seconds": taken.run.step,
            "seconds": taken.run.seconds,
            "values": taken.values,
            "notes": taken.notes,
        }
    if (run := answer.run) is not None:
        faster = None if answer.faster is None else _cost(answer.faster)
        described["run_cost"] = {**_cost(run), "faster": faster}
    if not plan.fits:
        overrides = answer.layout.overrides if answer.layout else None
        described["suggestion"] = {"parallel": overrides, "engine.tensor": answer.engine}
    if (lighter := answer.lighter) is not None:
        described["lighter"] = {
            "memory.recompute": recomputation(lighter.settings),
            "left_bytes": lighter.left,
        }
    if answer.swept is not None:
        described["sweep"] = [
            {
                **p.settings.parallel.model_dump(),
                "fits": p.fits,
                "tight": p.tight,
                "left_bytes": p.left,
                "rank_bytes": p.rank_total,
                "microbatches": p.batch.microbatches,
                "pipeline_idle": p.batch.pipeline_idle,
                "problems": p.problems,
            }
            for p in answer.swept
        ]
    return json.dumps(described, indent=2, default=vars)


def _cost(run: Costed) -> dict[str, Any]:
    """Placement, the settings that choose it, and its cost; no cost: the run never ends."""
    cost = {} if run.cost is None else {**vars(run.cost), "days": run.cost.days}
    return {"placement": run.step.placement, "settings": run.overrides, **cost}
