"""A plan as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rpg_megatron.commands.plan.engine_memory import SERVER
from rpg_megatron.commands.plan.from_run import FromRun
from rpg_megatron.commands.plan.gpus import Assumptions
from rpg_megatron.commands.plan.layout import GPUS_PER_NODE, Gpus, expert_replicas
from rpg_megatron.commands.plan.plan import ROOM, Plan, count, is_bound_to_a_node
from rpg_megatron.commands.plan.run_cost import Costed, cost_lines
from rpg_megatron.commands.plan.step_time import StepTime
from rpg_megatron.commands.plan.trainer_memory import IMPORTS, RESERVE, MemoryPart, recomputation
from rpg_megatron.config.errors import gib

Row = tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A plan and what the command prints beside it; None: not computed, or there is none.

    warnings: of the plan and of the checks; steps: first with the placement of the settings; taken: what
    another run measured; lighter: the same run with less recomputation, which also fits. If the run does not
    fit, layout and engine are the layout with the fewest ranks and the smallest engine.tensor that do.
    """

    plan: Plan
    warnings: Sequence[str]
    assumed: Assumptions
    steps: Sequence[StepTime] | None
    taken: FromRun | None
    run: Costed | None
    lighter: Plan | None
    layout: Plan | None
    engine: int | None
    swept: Sequence[Plan] | None


def print_answer(answer: Answer, console: Console) -> None:
    """Print the plan, the time of a step, whether it fits and what else would, and other layouts."""
    _print_plan(answer.plan, console)
    if answer.steps:
        _print_times(answer, answer.steps, console)
    for line in [*(cost_lines(answer.run) if answer.run else ()), *_verdict(answer)]:
        console.print(line, highlight=False)
    for line in _suggestions(answer):  # in one line each, to be copied
        console.print(line, highlight=False, soft_wrap=True)
    if answer.swept is not None:
        _print_sweep(answer.swept, console)


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


def _print_plan(plan: Plan, console: Console) -> None:
    """Print sizes, batch, and the memory of each kind of process."""
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(plan).items():
        if text:
            facts.add_row(name, text)
    console.print(facts)
    for title, *sections in _memory_tables(plan):
        _print_table(console, title, ("part", ">bytes", "basis", "when"), *sections)


def _facts(plan: Plan) -> dict[str, str]:
    """Name and text of each line; one without a text is left out."""
    shape, settings, parallel, batch = plan.shape, plan.settings, plan.settings.parallel, plan.batch
    layers = shape.stage_layers(parallel.pipeline * parallel.virtual)
    of_layers = str(layers[0]) if len(set(layers)) == 1 else "/".join(map(str, layers))
    lora, e, fp8, sft = settings.lora, shape.experts, settings.precision.fp8, settings.sft is not None
    adapters = experts = ""
    if lora is not None:
        where = "all-linear" if lora.targets == "all-linear" else ", ".join(lora.names)
        trained = f"{count(plan.trained)} of {count(plan.parameters)} parameters are trained"
        adapters = f"rank {lora.rank}, {where}: {trained} ({plan.trained / plan.parameters:.2%})"
    if e is not None:
        active, held = count(sum(shape.matmul_parameters)), e.count // parallel.expert
        experts = (
            f"{e.count} of {e.ffn_hidden_size} columns in {len(e.layers)} layers, {e.per_token} per token: "
            f"{active} active parameters; EP {parallel.expert}, ETP {parallel.expert_tensor}: {held} experts "
            f"per rank, {expert_replicas(parallel)} replicas"
        )
    fused = f"Transformer Engine's, {settings.precision.dtype if fp8 is None else f'FP8 {fp8.recipe}'}"
    own = f"Megatron's own, {settings.precision.dtype}"
    passes = f" ({settings.training.epochs} passes)" if settings.training.epochs > 1 else ""
    several, engines = batch.microbatches > 1, settings.engine.replicas
    heads, what = shape.num_heads // parallel.tensor, "conversations" if sft else "responses"
    step = (
        f"{batch.prompts:,} prompts x {settings.rollout.samples_per_prompt} = {batch.sequences:,} responses, "
        f"in {batch.updates} updates of {batch.sequences_per_update:,}{passes}"
    )
    return {
        "model": f"{shape.family}, {count(plan.parameters)} parameters: {shape.num_layers} layers, hidden "
        f"{shape.hidden_size}, heads {shape.num_heads}/{shape.num_kv_heads}, vocabulary {shape.vocab_size}"
        f"{', tied' * shape.tied_embeddings}",
        "adapters": adapters,
        "experts": experts,
        "policy": f"{parallel.world} ranks: TP {parallel.tensor}{' + SP' * parallel.sequence}, PP "
        f"{parallel.pipeline}{f' x VPP {parallel.virtual}' * (parallel.virtual > 1)}, CP {parallel.context}, "
        f"DP {parallel.data}; {of_layers} layers per stage, {heads} heads per rank",
        "layers": own if plan.implementation == "local" else fused,
        "engines": f"{engines} x TP {settings.engine.tensor}" * (engines > 0),
        "GPUs": _gpus(plan.gpus) * plan.on_gpu,
        "step": f"one update on {batch.sequences:,} conversations" if sft else step,
        "update": f"{batch.sequences_per_rank:,} {what} per replica, up to "
        f"{batch.longest:,} tokens: at most {batch.microbatches:,} micro-batch{'es' * several} "
        f"of {batch.tokens_per_microbatch:,} tokens{', gradients accumulated' * several}"
        f"{f'; pipeline idle {batch.pipeline_idle:.0%}' * (parallel.pipeline > 1)}",
    }


def _gpus(gpus: Gpus) -> str:
    """Number of GPUs in total, by role and by node."""
    total = f"{gpus.total}: {gpus.trainer} for trainer ranks, {gpus.engines} for engine workers"
    if gpus.colocated:
        total = f"{gpus.total}, shared by {gpus.trainer} trainer ranks and {gpus.engines} engine workers"
    if gpus.why:
        return f"{total}; not on nodes of {GPUS_PER_NODE}, see below"
    kinds = []
    for node in dict.fromkeys(gpus.nodes):
        held = [
            f"{n} {word}{'s' if n > 1 else ''}" for n, word in zip(node, ("rank", "worker"), strict=True) if n
        ]
        kinds.append(f"{gpus.nodes.count(node)} of {' + '.join(held)}")
    return f"{total}; {len(gpus.nodes)} node{'s' if len(gpus.nodes) > 1 else ''}: {', '.join(kinds)}"


def _memory_tables(plan: Plan) -> Iterator[tuple[Any, ...]]:
    """Title and sections of the table of each kind of process."""

    def rows(parts: Iterable[MemoryPart], of_host: str = "always") -> list[Row]:
        return [(p.name, gib(p.nbytes), p.basis, of_host if p.host else p.phase) for p in parts]

    def total(name: str, nbytes: int, when: str = "") -> Row:
        share = f"{nbytes / plan.target.nbytes:.0%} of {plan.target.name}" if plan.on_gpu else ""
        return _styled("bold", name, gib(nbytes), share, when)

    rank, engine, engines = plan.largest, plan.engine, plan.settings.engine.replicas
    where = f", pipeline stage {rank.stage}, the largest" if plan.settings.parallel.pipeline > 1 else ""
    of_them = f", {count(rank.trained)} of them trained" if rank.trained < rank.parameters else ""
    base = ("CUDA context, reserve", RESERVE) if plan.on_gpu else ("imports", IMPORTS)
    others = [
        _styled("dim", f"activations, recompute {kind}", gib(nbytes), "estimated", "if set so")
        for kind, nbytes in plan.activations.items()
        if kind != recomputation(plan.settings)
    ]
    peak = total("peak", plan.rank_total, max(rank.phases, key=lambda name: rank.phases[name]))
    yield (
        f"trainer rank{where}: {count(rank.parameters)} parameters{of_them}",
        [*rows(rank.parts, "host memory"), *rows([MemoryPart(*base, "estimated")])],
        [peak, *others],
    )
    machine = [
        *rows(plan.host),
        total("all processes", plan.need, f"{gib(SERVER)} per server" if engines else ""),
    ]
    if engines:
        cache = f"{engine.kv_tokens:,} tokens", f"{engine.kv_bytes_per_token:,} B each"
        full = f"{engine.full_sequences:,.1f} of full length"
        sums = [total("all", engine.total, "rollout"), _styled("dim", "KV cache holds", *cache, full)]
        yield "engine worker", rows(engine.parts), sums, machine if not plan.on_gpu else []
    elif not plan.on_gpu:
        yield "all processes", machine
    if (shared := plan.shared_gpu) is not None:
        turns = [total(turn, nbytes) for turn, nbytes in shared.turns.items()]
        yield "GPU shared by a trainer rank and an engine worker", rows(shared.parts), turns
    if plan.on_gpu:
        everything = _styled("bold", "all", gib(sum(part.nbytes for part in plan.host)), "", "")
        yield "host memory of rank 0's node", rows(plan.host), [everything]


def _print_times(answer: Answer, steps: Sequence[StepTime], console: Console) -> None:
    """Print the phases of the first step, all placements, and the assumptions."""
    current, taken = steps[0], answer.taken
    measured = {} if taken is None or taken.measured is None else {**taken.measured, "step": taken.run.step}
    how = f"from the times of {taken.run.folder.name}" if taken is not None and measured else ", not measured"
    rows: list[tuple[str, float, str, str]] = [
        *((p.name, p.seconds, f"{p.seconds / current.step:.0%}", p.bound) for p in current.phases),
        ("step", current.step, "", f"{current.tokens_per_second:,.0f} trained tokens/s"),
    ]
    columns = ["phase", ">seconds", *([">in that run"] if measured else []), ">share", "bound by"]
    phases = [
        (name, _seconds(seconds), *([_seconds(measured.get(name))] if measured else []), *rest)
        for name, seconds, *rest in rows
    ]
    title = f"time of a step, {current.placement}: computed {how}".replace(" ,", ",")
    _print_table(console, title, columns, phases[:-1], [_styled("bold", *phases[-1])])
    if answer.plan.on_gpu:  # on a CPU, placements share the cores
        _print_placements(steps, console)
    title = "assumptions; change with --assume NAME=VALUE"
    numbers = [(name, f"{value:.4g}", source, why) for name, value, source, why in answer.assumed.rows]
    _print_table(console, title, ("name", ">value", "source", "what"), numbers)
    if taken is not None:
        for line in _from_run_lines(taken):
            console.print(line, highlight=False, markup=False)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


def _from_run_lines(taken: FromRun) -> Iterator[str]:
    """What was read of the run, and what to know of it; the assumptions' table says which are of the run."""
    run, ends = taken.run, "running" if taken.run.running else "not running"
    first = ", without the first after a start" if run.warm else ""
    yield f"from {run.folder} ({ends}): medians of {run.steps} steps{first}"
    factors = ", ".join(f"{name} {factor:.3g}" for name, factor in taken.factors.items())
    yield f"the run's seconds over the formulas': {factors or 'not used'}"
    yield from (f"note {note}" for note in taken.notes)


def _print_placements(steps: Sequence[StepTime], console: Console) -> None:
    rows = []
    for step in steps:
        gpus, idle = f"{step.trainer_gpus:g} + {step.engine_gpus:g}", f"{step.engine_idle:.0%}"
        if step.placement == "colocated":
            gpus, idle = f"{step.gpus:.0f}", "the same"
        speed = f"{step.tokens_per_second:,.0f}"
        rows.append((step.placement, gpus, f"{step.step:.1f}", speed, f"{step.trainer_idle:.0%}", idle))
    columns = ("placement", ">GPUs", ">step, s", ">tokens/s", ">trainers idle", ">engines idle")
    _print_table(console, "placements with the same number of GPUs", columns, rows)
    console.print("by turns, overlapped: trainers and engines on separate GPUs", highlight=False)
    console.print("overlapped: rollout.ahead 1 or more; by turns: rollout.ahead 0", highlight=False)
    console.print(waits(steps[0]), highlight=False)


def waits(step: StepTime) -> str:
    """One line: waiting times of trainer and engines in a step with the settings' placement."""
    if step.placement == "colocated":
        tail, rest = step.seconds("rollout: tail"), step.seconds("other", "handover")
        return (
            f"waiting, of {step.step:.0f} s: all GPUs {rest:.0f} s for handovers and fixed costs; "
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
    plan, notes = answer.plan, [*answer.warnings]
    if (less := answer.lighter) is not None:
        setting = f"memory.recompute={recomputation(less.settings)}"
        notes.append(f"{setting} also fits and leaves {gib(less.left)}: less recomputation")
    yield from (f"[yellow]note[/] {note}" for note in notes)
    yield from (f"[bold red]does not fit[/] {problem}" for problem in plan.problems)
    if plan.fits:
        yield "[bold green]fits[/]"


def _suggestions(answer: Answer) -> Iterator[str]:
    """What would fit instead; nothing if the run fits."""
    plan, layout, engine = answer.plan, answer.layout, answer.engine
    if plan.left < 0 and layout is not None:
        ranks = layout.settings.parallel.world
        size = f"{ranks} trainer rank{'s' * (ranks > 1)}, {gib(layout.rank_total)} each"
        yield f"smallest layout that fits: {size}{', tight' * layout.tight}: {layout.overrides}"
    elif plan.left < 0:
        more = ", or set bridge.transport=process_group for more than a node"
        none = "no layout fits; lower training.tokens_per_microbatch or use larger GPUs"
        yield none + more * is_bound_to_a_node(plan.settings)
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
        cells = {name: str(getattr(plan.settings.parallel, size)) for name, size in sizes.items()}
        cells["SP"] = "on" if plan.settings.parallel.sequence else ""
        verdict = "[red]no[/]" if not plan.fits else "[yellow]tight[/]" if plan.tight else "[green]fits[/]"
        left = gib(plan.left) if plan.left >= 0 else "-" + gib(-plan.left)
        passes, idle = str(plan.batch.microbatches), f"{plan.batch.pipeline_idle:.0%}"
        rows.append((verdict, *cells.values(), gib(plan.rank_total), left, passes, idle))
    columns = (f">{name}" for name in ("", *sizes, "per rank", "left", "passes", "idle"))
    _print_table(console, "layouts, best first", [*columns], rows)
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


# -- JSON ----------------------------------------------------------------------------------------------------


def to_json(answer: Answer) -> str:
    """One JSON object; sizes in bytes."""
    plan, steps, lighter, run = answer.plan, answer.steps, answer.lighter, answer.run
    described = _some(
        plan, "fits problems target parameters gpus implementation batch ranks activations host tight engine"
    )
    described |= {
        "warnings": answer.warnings,
        "trained_parameters": plan.trained,
        "parallel": plan.settings.parallel.model_dump(),
        "rank_bytes": plan.rank_total,
        "card": plan.shared_gpu,
        "machine_bytes": None if plan.on_gpu else plan.machine_total,
        "recompute": recomputation(plan.settings),
        "left_bytes": plan.left,
        "routed_to_one_bytes": plan.routed_to_one,
        "step_time": None,
        "run_cost": {"placement": run.step.placement, **(_all(run.cost) if run.cost else {})}
        if run
        else None,
    }
    if steps is not None:
        assumptions = {n: {"value": value, "source": source} for n, value, source, _ in answer.assumed.rows}
        renamed = {"step": "step_seconds", "generation": "generation_seconds", "training": "training_seconds"}
        placements = [
            {renamed.get(name, name): value for name, value in _all(step).items()} for step in steps
        ]
        described["step_time"] = {"measured": False, "placements": placements, "assumptions": assumptions}
    if (taken := answer.taken) is not None:
        of_run = {"run": str(taken.run.folder), "step_seconds": taken.run.step}
        described["from"] = of_run | _some(taken.run, "steps seconds") | _some(taken, "values factors notes")
    if not plan.fits:
        overrides = answer.layout.overrides if answer.layout else None
        described["suggestion"] = {"parallel": overrides, "engine.tensor": answer.engine}
    if lighter is not None:
        kind = recomputation(lighter.settings)
        described["lighter"] = {"memory.recompute": kind, "left_bytes": lighter.left}
    if answer.swept is not None:
        described["sweep"] = [
            {**p.settings.parallel.model_dump(), "left_bytes": p.left, "rank_bytes": p.rank_total}
            | _some(p, "fits tight problems")
            | _some(p.batch, "microbatches pipeline_idle")
            for p in answer.swept
        ]
    return json.dumps(described, indent=2, default=_all)


def _some(thing: Any, names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names.split()}


def _all(thing: Any) -> dict[str, Any]:
    """The fields and the properties of a dataclass."""
    properties = [name for name, value in vars(type(thing)).items() if isinstance(value, property)]
    return {name: getattr(thing, name) for name in [*(f.name for f in fields(thing)), *properties]}
