"""``plan``: GPUs in all and by node, host memory of a step, and how much of a card a layout has to leave.

Why: a job request needs the number of GPUs, and a layout that fits by half a GiB of figures that
were never measured does not fit. Not covered: what libraries take of a node's memory.
"""

import json
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rpg_megatron import cli
from rpg_megatron.commands.plan.layout import count_gpus
from rpg_megatron.commands.plan.plan import (
    ROOM,
    Plan,
    Target,
    lighter,
    make_plan,
    plan_for,
    smallest_engine,
    sweep,
)
from rpg_megatron.commands.plan.tables import _suggestions
from rpg_megatron.commands.plan.trainer_memory import TOKEN, TRAJECTORY
from rpg_megatron.config import load_settings, read_model_shape
from rpg_megatron.data.trajectory import Trajectory
from tests.support.recipes import SEPARATE_8B, SEPARATE_30B
from tests.support.trajectories import make_trajectory

EXAMPLES = Path(__file__).parents[2] / "examples"
QWEN3_8B = EXAMPLES / "qwen3_8b_dapo_math_8k.yaml"
GIB = 1024**3


def plan_of(*overrides: str, gpu: str = "h100-80") -> Plan:
    return make_plan(load_settings(QWEN3_8B, [*SEPARATE_8B, *overrides]), gpu)


def command(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit):
        cli.main(["plan", arguments[0], *SEPARATE_8B, *arguments[1:]])
    return capsys.readouterr().out


SPAN = ["engine={replicas: 1, tensor: 16}"]
"""An engine that has two nodes."""


@pytest.mark.parametrize(
    ("overrides", "total", "nodes"),
    [
        ([], 16, ((4, 4), (4, 4))),
        (["parallel.data=16", "engine.replicas=32"], 64, ((4, 4),) * 8),
        (["cluster={trainer_nodes: 1, engine_nodes: 1}"], 16, ((8, 0), (0, 8))),
        (["engine.colocated=true"], 8, ((8, 8),)),
        (["engine={colocated: true, replicas: 8}", "parallel.data=8"], 16, ((8, 4), (8, 4))),
        (["parallel.data=1", "engine={replicas: 3, tensor: 2}"], 8, ((2, 6),)),
        (["parallel.data=3", "engine.replicas=3"], 9, ((2, 1), (2, 1), (2, 1))),
        ([*SPAN, "cluster={trainer_nodes: 1, engine_nodes: 2}"], 24, ((8, 0), (0, 8), (0, 8))),
    ],
)
def test_gpus_in_all_and_by_node(overrides: list[str], total: int, nodes) -> None:
    gpus = count_gpus(load_settings(QWEN3_8B, [*SEPARATE_8B, *overrides]))
    assert (gpus.total, gpus.nodes, gpus.why) == (total, nodes, "")
    assert gpus.colocated == any("colocated" in item for item in overrides)


def test_gpus_that_no_nodes_can_share_are_told(capsys) -> None:
    gpus = count_gpus(load_settings(QWEN3_8B, [*SEPARATE_8B, "bridge={transport: shared_memory}"]))
    assert (gpus.total, gpus.nodes) == (16, ())
    assert "shared_memory works within one node only" in gpus.why
    parts = (
        "engine={colocated: true, kv_cache_gib: 30, replicas: 16}",
        "parallel={tensor: 2, pipeline: 2, data: 4}",
    )
    colocated = plan_of(*parts, "bridge={transport: cuda_ipc}")
    (problem,) = colocated.problems
    assert problem.startswith(
        "ranks and engines cannot be placed on nodes of 8 GPUs: bridge.transport cuda_ipc"
    )
    assert plan_of(*parts, "bridge={transport: process_group}").fits
    out = " ".join(command(capsys, str(QWEN3_8B)).split())
    assert "GPUs 16: 8 for trainer ranks, 8 for engine workers; 2 nodes: 2 of 4 ranks + 4 workers" in out
    out = " ".join(command(capsys, str(QWEN3_8B), "engine.colocated=true", "engine.kv_cache_gib=4").split())
    assert "GPUs 8, shared by 8 trainer ranks and 8 engine workers; 1 node: 1 of 8 ranks + 8 work" in out
    output = json.loads(command(capsys, str(QWEN3_8B), "--json"))
    assert output["gpus"]["total"] == 16
    assert output["implementation"] == "transformer_engine"


def test_an_engine_that_has_two_nodes() -> None:
    why = count_gpus(load_settings(QWEN3_8B, [*SEPARATE_8B, *SPAN])).why
    assert why.endswith("set both cluster.trainer_nodes=1 and cluster.engine_nodes=2")
    half = [*SPAN, "engine.tensor=8", "cluster={trainer_nodes: 1, engine_nodes: 2}"]
    assert "uses 4 of the 8 GPUs" in count_gpus(load_settings(QWEN3_8B, [*SEPARATE_8B, *half])).why
    large = load_settings(EXAMPLES / "qwen3_235b_a22b_lora.yaml", ["engine.tensor=4"])
    plan = make_plan(large, "4xh100-80")
    assert not plan.fits
    assert smallest_engine(plan) == 8
    told = list(_suggestions(SimpleNamespace(plan=plan, layout=plan, engine=8)))
    size = "engine.tensor=8 cluster.engine_nodes=2 bridge.transport=process_group"
    assert told == [f"smallest engine that fits: {size}"]
    apart = large.changed(engine={"tensor": 8}, cluster={"trainer_nodes": 2, "engine_nodes": 2})
    spans = make_plan(apart, "4xh100-80")
    assert spans.gpus.nodes == ((4, 0), (4, 0), (0, 4), (0, 4))
    assert any("each engine is on 2 nodes: its workers' all-reduces" in text for text in spans.warnings)
    assert not any("all-reduces" in text for text in make_plan(large, "h100-80").warnings)


def test_a_layout_that_leaves_little_is_ranked_behind(capsys) -> None:
    """A card on which one layout, the first by its cuts, would have 0.54 GiB left."""
    first = plan_of("parallel={data: 8}")
    size = first.rank_total + int(0.54 * GIB)
    plans = sweep(make_plan(load_settings(QWEN3_8B, SEPARATE_8B), str(size)), 8)
    assert plans[0].left >= ROOM
    tight = [plan for plan in plans if plan.fits and plan.left < ROOM]
    assert first.settings.parallel in [p.settings.parallel for p in tight]
    assert all(p.tight and any("of a GPU are left" in w for w in p.warnings) for p in tight)
    order = [(plan.fits, plan.left >= ROOM) for plan in plans]
    assert order == sorted(order, reverse=True)
    out = command(capsys, str(QWEN3_8B), "--sweep", "--gpu", str(size))
    assert "tight: less than 4.00 GiB of a GPU left" in out
    assert "best: parallel.tensor=2 parallel.pipeline=1 parallel.context=1" in out
    data = json.loads(command(capsys, str(QWEN3_8B), "--sweep", "--json", "--gpu", str(size)))
    assert [c["tight"] for c in data["sweep"] if c["fits"] and c["left_bytes"] < ROOM] == [True] * len(tight)


def test_where_every_layout_is_tight_none_is_called_best(capsys) -> None:
    arguments = [str(QWEN3_8B), "parallel={tensor: 8, sequence: true}", "--sweep"]
    least = min(c["rank_bytes"] for c in json.loads(command(capsys, *arguments, "--json"))["sweep"])
    out = command(capsys, *arguments, "--gpu", str(least + GIB))
    assert "tight" in out
    assert "best:" not in out


def test_room_is_asked_of_cards_alone() -> None:
    settings = load_settings(EXAMPLES / "quickstart.yaml")
    shape = read_model_shape(settings.model.path)
    need = make_plan(settings).need
    plan = plan_for(settings, shape, Target("cpu", "x", need + GIB))
    assert (plan.fits, plan.left, plan.tight) == (True, GIB, False)
    step = sum(part.nbytes for part in plan.host)
    assert step > 0
    without = Plan(**{**vars(plan), "host": ()})
    assert plan.need - without.need == step


def test_less_recomputation_that_fits_is_told(capsys) -> None:
    plan = plan_of()
    assert plan.settings.memory.recompute is None  # so all of a layer, at 18,432 tokens
    less = lighter(plan)
    assert less.settings.memory.recompute == "selective"
    none = plan_of("memory.recompute=none")
    assert none.left < ROOM  # which is why it is not that
    out = " ".join(command(capsys, str(QWEN3_8B)).split())
    assert "note memory.recompute=selective also fits and leaves" in out
    assert out.startswith("fits, ")
    assert lighter(less) is None
    small = less.need + GIB  # it would fit, and leave too little
    assert lighter(make_plan(plan.settings, str(small))) is None
    most = lighter(make_plan(plan.settings, "h200-141"))
    assert most.settings.memory.recompute == "none"


def test_what_a_step_takes_of_the_first_nodes_memory() -> None:
    """8,192 sequences of 1,024 + 8,192 tokens, with the sampler and two of four leaders, two ranks each."""
    of_ranks, step = [p.nbytes for p in plan_of().host]
    parameters = plan_of().ranks[0].parameters
    # The first replica writes; its buffers are copied one by one. To resume, the second reads them too.
    assert of_ranks == 2 * 16 * parameters + 2 * 12 * parameters
    each = 8192 * (TRAJECTORY + TOKEN * (1024 + 8192))
    assert step == each + 2 * each // 2  # leaders send their shares to the other rank
    without_broadcast = plan_of(
        "parallel.tensor=1", "parallel.sequence=false", "parallel.data=8", "checkpoint.every=null"
    ).host
    (only,) = without_broadcast  # leaders, four of eight, send to nobody
    assert only.nbytes == each + each // 2


def test_what_ranks_of_the_first_node_keep_in_its_memory() -> None:
    """Four ranks with a held anchor each; two of them send weights, through shared memory."""
    weights = plan_of().ranks[0].parts[0].nbytes
    layout = ("parallel.data=2", "engine.replicas=4", "checkpoint.every=null")
    (anchors, step) = plan_of("anchor.type=fixed", *layout).host
    assert (anchors.name, anchors.nbytes) == ("of 4 ranks", 4 * weights)
    assert [part.name for part in plan_of(*layout).host] == [step.name]
    (copies, _) = plan_of("bridge={transport: shared_memory}", *layout).host
    assert (copies.name, copies.nbytes) == ("of 4 ranks", 2 * weights)


def test_trajectories_take_what_is_planned() -> None:
    """Python's objects included, as its allocator counts them; a prompt's tokens have an id alone."""
    number, prompt, response = 300, 100, 800

    def make(i: int) -> Trajectory:
        numbers = {"prompt_id": 10**6 + i, "sample": i, "group": 10**6 + i, "seed": 10**6 + i}
        numbers |= {"reward": float(i), "advantage": float(i)}
        logps = {name: np.zeros(response, np.float32) for name in ("old", "anchor")}
        texts = {"text": "x" * 4 * response, "answer": str(i), "extracted": str(i)}
        parts = {"correctness": float(i), "overlong": 0.0, "format": 0.0}
        return make_trajectory(prompt, response, parts=parts, **numbers, **logps, **texts)

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    trajectories = [make(i) for i in range(number)]
    measured = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(trajectories) == number
    planned = number * (TRAJECTORY + TOKEN * (prompt + response))
    assert planned - number * (TOKEN - 4) * prompt == pytest.approx(measured, rel=0.02)


def test_replayed_routes_are_in_host_memory() -> None:
    """48 layers of 8 experts a token, one byte each; all eight leaders are on the sampler's node."""

    def plan_of_mixture(*overrides: str) -> Plan:
        file = EXAMPLES / "moe" / "qwen3_30b_a3b_dapo_math_8k.yaml"
        return make_plan(load_settings(file, [*SEPARATE_30B, *overrides]), "h100-80")

    def step(plan: Plan) -> int:
        return sum(part.nbytes for part in plan.host if "sampler" in part.name)

    plan, off = plan_of_mixture(), plan_of_mixture("training.router_replay=off")
    routes = step(plan) - step(off)
    assert routes == 2 * plan.batch.sequences * plan.batch.longest * 48 * 8
    ahead = "rollout.ahead=1", "rollout.dynamic.oversample=1", "guards.uncorrected=true"
    assert step(plan_of_mixture(*ahead)) == step(plan) * 3 // 2


def test_nodes_may_have_other_numbers_of_gpus(capsys) -> None:
    """Four a node: twice the nodes, and the first has half the ranks."""
    four, eight = (plan_of(gpu=gpu) for gpu in ("4xh100-80", "h100-80"))
    assert (four.gpus.nodes, eight.gpus.nodes) == (((2, 2),) * 4, ((4, 4),) * 2)
    assert (four.target.nbytes, four.target.name) == (eight.target.nbytes, "h100-80")
    shared = "engine={colocated: true, replicas: 4, kv_cache_gib: 20}", "parallel.data=2"
    out = command(capsys, str(QWEN3_8B), "--gpu", "4xh100-80", *shared)
    assert "1 node: 1 of 4 ranks + 4 workers" in " ".join(out.split())
    out = command(capsys, str(QWEN3_8B), "--gpu", "4xh100-80", "bridge.transport=shared_memory")
    assert "placed on nodes of 4 GPUs: bridge.transport shared_memory works within" in " ".join(out.split())


def test_the_sweep_says_why_layouts_are_left_out(capsys) -> None:
    sizes = "parallel.data=6", "engine.replicas=6", "rollout.prompts_per_step=96", "training.minibatches=4"
    out = " ".join(command(capsys, str(QWEN3_8B), *sizes, "--sweep", "--gpu", "30GiB").split())
    assert out.startswith("does not fit a trainer rank needs ")
    assert re.search(r"\d+ do not fit: a trainer rank needs N GiB, 30GiB has N GiB", out)
    assert re.search(r"\d+ are not possible: parallel: tensor=N does not divide ", out)
