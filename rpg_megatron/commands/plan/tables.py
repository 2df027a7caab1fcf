"""A plan as tables and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rpg_megatron.commands.plan.engine_memory import SERVER
from rpg_megatron.commands.plan.from_run import FromRun
from rpg_megatron.commands.plan.gpus import Assumptions
from rpg_megatron.commands.plan.layout import Gpus, expert_replicas
from rpg_megatron.commands.plan.plan import ROOM, Plan, count, is_bound_to_a_node, kind_of
from rpg_megatron.commands.plan.run_cost import Job, cost_lines, cost_of
from rpg_megatron.commands.plan.step_time import StepTime
from rpg_megatron.commands.plan.trainer_memory import IMPORTS, RESERVE, MemoryPart
from rpg_megatron.config.errors import gib
from rpg_megatron.engine.arguments import reduces_on_gpus, uses_flashinfer

Row = tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A plan and what the command prints beside it; None: not computed, or there is none.

    warnings: of the plan and of the checks; taken: what another run measured; lighter: the same run with less
    which also fits. If the run does not fit, layout and engine are the layout with the fewest
    ranks and the smallest engine.tensor that do.
    """

    plan: Plan
    warnings: Sequence[str]
    assumed: Assumptions
    step: StepTime | None
    taken: FromRun | None
    lighter: Plan | None
    layout: Plan | None
    engine: int | None
    swept: Sequence[Plan] | None
    refused: Counter[str]
    """Why other layouts of ``swept`` are not valid, and how many."""

    @property
    def job(self) -> Job:
        """A job of the run."""
        return Job(3600 * self.assumed.walltime)


def print_answer(answer: Answer, console: Console) -> None:
    """Print whether it fits or what would, the plan, the time of a step, notes, and other layouts."""
    plan, step = answer.plan, answer.step
    for line in _verdict(answer):
        console.print(line, highlight=False)
    for line in _suggestions(answer):  # in one line each, to be copied
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(plan):
        facts.add_row(name, text)
    console.print(facts)
    for title, *sections in _memory_tables(plan):
        _print_table(console, title, ("part", ">bytes", "basis", "when"), *sections)
    if step is not None:
        _print_times(answer, step, console)
    costs = cost_lines(plan, step, answer.job) if step is not None and plan.on_gpu else ()
    for line in [*costs, *_notes(answer)]:
        console.print(line, highlight=False)
    if answer.swept is not None:
        _print_sweep(answer.swept, answer.refused, console)


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


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Name and text of each line."""
    shape, settings, parallel, batch = plan.shape, plan.settings, plan.settings.parallel, plan.batch
    layers = shape.stage_layers(parallel.pipeline * parallel.virtual)
    of_layers = str(layers[0]) if len(set(layers)) == 1 else "/".join(map(str, layers))
    sft, several, passes = settings.sft is not None, batch.microbatches > 1, settings.training.ppo_epochs
    yield (
        "model",
        f"{shape.family}, {count(plan.parameters)} parameters: {shape.num_layers} layers, hidden "
        f"{shape.hidden_size}, heads {shape.num_heads}/{shape.num_kv_heads}, vocabulary {shape.vocab_size}"
        f"{', tied' * shape.tied_embeddings}",
    )
    if (lora := settings.lora) is not None:
        where = "all-linear" if lora.targets == "all-linear" else ", ".join(lora.names_in(shape))
        trained = f"{count(plan.trained)} of {count(plan.parameters)} parameters are trained"
        yield "adapters", f"rank {lora.rank}, {where}: {trained} ({plan.trained / plan.parameters:.2%})"
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
        f"{parallel.world} ranks: TP {parallel.tensor}{' + SP' * parallel.sequence}, PP {parallel.pipeline}"
        f"{f' x VPP {parallel.virtual}' * (parallel.virtual > 1)}, CP {parallel.context}, DP "
        f"{parallel.data}; {of_layers} layers per stage, {shape.num_heads // parallel.tensor} heads per rank",
    )
    kind = f"FP8 {settings.precision.fp8.recipe}" if settings.precision.fp8 else settings.precision.dtype
    own = f"Megatron's own, {settings.precision.dtype}"
    yield "layers", own if plan.implementation == "local" else f"Transformer Engine's, {kind}"
    if settings.engine.replicas:
        sizes = f"{settings.engine.replicas} x TP {settings.engine.tensor}, each with up to "
        sizes += f"{settings.engine.most_sequences:,} sequences at once"
        reduces = "FlashInfer's, compiled with nvcc" if uses_flashinfer(settings) else "vLLM's, without nvcc"
        yield "engines", sizes + f"; all-reduces are {reduces}" * reduces_on_gpus(settings)
    if plan.on_gpu:
        yield "GPUs", _gpus(plan.gpus)
    samples, updates = settings.rollout.samples_per_prompt, batch.updates
    of_rollouts = (
        f"{batch.prompts:,} prompts x {samples} = {batch.sequences:,} responses, in {updates} updates of "
        f"{batch.sequences_per_update:,}{f' ({passes} passes)' * (passes > 1)}"
    )
    if plan.on_gpu and not sft and samples > 1:
        yield "prompts", f"{'' if settings.training.share_prompts else 'not '}shared (training.share_prompts)"
    yield "step", f"one update on {batch.sequences:,} conversations" if sft else of_rollouts
    yield (
        "update",
        f"{batch.sequences_per_rank:,} {'conversations' if sft else 'responses'} per replica, up to "
        f"{batch.longest:,} tokens: at most {batch.microbatches:,} micro-batch{'es' * several} "
        f"of {batch.tokens_per_microbatch:,} tokens{', gradients accumulated' * several}"
        f"{f'; pipeline idle {batch.pipeline_idle:.0%}' * (parallel.pipeline > 1)}",
    )


def _gpus(gpus: Gpus) -> str:
    """Number of GPUs in total, by role and by node."""
    total = f"{gpus.total}: {gpus.trainer} for trainer ranks, {gpus.engines} for engine workers"
    if gpus.colocated:
        total = f"{gpus.total}, shared by {gpus.trainer} trainer ranks and {gpus.engines} engine workers"
    if gpus.why:
        return f"{total}; not on nodes of {gpus.per_node}, see above"
    kinds = []
    for node in dict.fromkeys(gpus.nodes):
        held = [f"{n} {word}{'s' * (n > 1)}" for n, word in zip(node, ("rank", "worker"), strict=True) if n]
        kinds.append(f"{gpus.nodes.count(node)} of {' + '.join(held)}")
    return f"{total}; {len(gpus.nodes)} node{'s' * (len(gpus.nodes) > 1)}: {', '.join(kinds)}"


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
        if kind != plan.settings.recompute
    ]
    peak = total("peak", plan.rank_total, max(rank.phases, key=lambda name: rank.phases[name]))
    yield (
        f"trainer rank{where}: {count(rank.parameters)} parameters{of_them}",
        rows([*rank.parts, MemoryPart(*base, "estimated")], "host memory"),
        [peak, *others],
    )
    if engines:
        states = f", {engine.state:,} B a sequence" if engine.state else ""
        cache = f"{engine.kv_tokens:,} tokens", f"{engine.kv_bytes_per_token:,} B each{states}"
        full = f"{engine.full_sequences:,.1f} of full length"
        sums = [total("all", engine.total, "rollout"), _styled("dim", "KV cache holds", *cache, full)]
        yield "engine worker", rows(engine.parts), sums
    if plan.shared_gpu:
        turns = [total(turn, nbytes) for turn, nbytes in plan.turns.items()]
        yield "GPU shared by a trainer rank and an engine worker", rows(plan.shared_gpu), turns
    if plan.on_gpu:
        everything = _styled("bold", "all", gib(sum(part.nbytes for part in plan.host)), "", "")
        yield "host memory of rank 0's node", rows(plan.host), [everything]
    else:
        servers = f"{gib(SERVER)} per server" * (engines > 0)
        yield "this machine", rows(plan.host), [total("all processes", plan.need, servers)]


def _print_times(answer: Answer, step: StepTime, console: Console) -> None:
    """Print the phases of a step, and the assumptions."""
    taken, how = answer.taken, "computed, not measured"
    if taken is not None and taken.timed:
        how = f"computed from the times of {taken.run.folder.name}"
    phases = [(p.name, _seconds(p.seconds), f"{p.seconds / step.step:.0%}", p.bound) for p in step.phases]
    total = "step", _seconds(step.step), "", f"{step.tokens_per_second:,.0f} trained tokens/s"
    title = f"time of a step, {step.placement}: {how}"
    columns = "phase", ">seconds", ">share", "bound by"
    _print_table(console, title, columns, phases, [_styled("bold", *total)])
    title = "assumptions; change with --assume NAME=VALUE"
    numbers = [(name, f"{value:.4g}", source, why) for name, value, source, why in answer.assumed.rows]
    _print_table(console, title, ("name", ">value", "source", "what"), numbers)
    for line in _from_run_lines(taken) if taken is not None else ():
        console.print(line, highlight=False, markup=False)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


def _from_run_lines(taken: FromRun) -> Iterator[str]:
    """What was read of the run, and what to know of it; the assumptions' table says which are of the run."""
    run, ends = taken.run, "running" if taken.run.running else "not running"
    first = ", without the first of the run" if run.warm else ""
    yield f"from {run.folder} ({ends}): medians of {run.steps} steps{first}"
    seconds = ", ".join(f"{name} {_seconds(value)} s" for name, value in run.seconds.items())
    yield f"its steps took {_seconds(run.step)} s: {seconds}"
    factors = ", ".join(f"{name} {factor:.3g}" for name, factor in taken.assumed.factors.items())
    yield f"the run's seconds over the formulas': {factors or 'not used'}"
    yield from (f"note {note}" for note in taken.notes)


def _verdict(answer: Answer) -> Iterator[str]:
    """Whether it fits, or its problems."""
    plan, step = answer.plan, answer.step
    yield from (f"[bold red]does not fit[/] {problem}" for problem in plan.problems)
    if plan.fits:
        seconds = f", a step of {_seconds(step.step)} s" if step is not None else ""
        yield f"[bold green]fits[/], {gib(plan.need)} of {gib(plan.target.nbytes)}{seconds}"


def _notes(answer: Answer) -> Iterator[str]:
    """What to know although it may fit."""
    yield from (f"[yellow]note[/] {note}" for note in answer.warnings)
    if (less := answer.lighter) is not None:
        setting = f"memory.recompute={less.settings.recompute}"
        yield f"[yellow]note[/] {setting} also fits and leaves {gib(less.left)}: less recomputation"


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
        nodes = -(-(engine or 1) // plan.target.per_node)
        on = f" cluster.engine_nodes={nodes * plan.settings.engine.replicas} bridge.transport=process_group"
        yield f"smallest engine that fits: {f'engine.tensor={engine}{on * (nodes > 1)}' if engine else none}"


def _print_sweep(layouts: Sequence[Plan], refused: Counter[str], console: Console, most: int = 20) -> None:
    """Print the layouts, best first, and why others are not possible."""
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
    columns = [f">{name}" for name in ("", *sizes, "per rank", "left", "passes", "idle")]
    _print_table(console, "layouts, best first", columns, rows)
    if len(layouts) > most:
        console.print(f"and {len(layouts) - most} more; --json lists all", highlight=False)
    unfit = Counter(kind_of(problem) for plan in layouts for problem in plan.problems[:1])
    for what, kinds in (("do not fit", unfit), ("are not possible", refused)):
        for kind, number in kinds.most_common(5):
            console.print(f"{number} {what}: {kind}", highlight=False)
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
    plan, step, taken, lighter = answer.plan, answer.step, answer.taken, answer.lighter
    of_plan = "target parameters gpus implementation batch ranks activations host engine"
    described = _layout(plan) | _some(plan, of_plan)
    described |= {
        "warnings": answer.warnings,
        "trained_parameters": plan.trained,
        "parallel": plan.settings.parallel.model_dump(),
        "card": {"parts": plan.shared_gpu, "turns": plan.turns} if plan.shared_gpu else None,
        "machine_bytes": None if plan.on_gpu else plan.need,
        "recompute": plan.settings.recompute,
        "routed_to_one_bytes": plan.routed_to_one,
        "step_time": None,
        "run_cost": None,
    }
    if step is not None:
        sources = {n: {"value": value, "source": source} for n, value, source, _ in answer.assumed.rows}
        seconds = {f"{name}_seconds": getattr(step, name) for name in ("step", "generation", "training")}
        times = {"measured": False, "placements": [_all(step) | seconds], "assumptions": sources}
        described["step_time"] = times
    if step is not None and plan.on_gpu:
        cost = cost_of(plan, step, answer.job)
        of_jobs = _all(cost) if cost else {}
        described["run_cost"] = {"placement": step.placement, "step": step.step, **of_jobs}
    if taken is not None:
        of_run = {"run": str(taken.run.folder), "step_seconds": taken.run.step, "notes": taken.notes}
        described["from"] = of_run | _some(taken.run, "steps seconds") | _some(taken.assumed, "factors")
    if not plan.fits:
        overrides = answer.layout.overrides if answer.layout else None
        described["suggestion"] = {"parallel": overrides, "engine.tensor": answer.engine}
    if lighter is not None:
        described["lighter"] = {"memory.recompute": lighter.settings.recompute} | _layout(lighter)
    if answer.swept is not None:
        described["sweep"] = [
            p.settings.parallel.model_dump() | _layout(p) | _some(p.batch, "microbatches pipeline_idle")
            for p in answer.swept
        ]
    return json.dumps(described, indent=2, default=_all)


def _layout(plan: Plan) -> dict[str, Any]:
    figures = {"left_bytes": plan.left, "rank_bytes": plan.rank_total}
    return _some(plan, "fits tight problems") | figures


def _some(thing: Any, names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names.split()}


def _all(thing: Any) -> dict[str, Any]:
    """The fields and the properties of a dataclass."""
    properties = [name for name, value in vars(type(thing)).items() if isinstance(value, property)]
    return _some(thing, " ".join([*(f.name for f in fields(thing)), *properties]))
