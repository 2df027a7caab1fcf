"""``plan`` of runs with adapters: what is saved, and each figure against numbers written out by hand.

Why: the reason to train adapters is that they fit fewer GPUs; a plan that counts frozen weights as trained,
or trained ones as frozen, sends a user to the wrong number of them. Measurements of real ranks are in
tests/distributed/test_plan_memory. Not covered: anything on a GPU.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rpg_megatron import cli
from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.layout import rank_parameters
from rpg_megatron.commands.plan.plan import Plan, make_plan
from rpg_megatron.commands.plan.step_time import LINK_EFFICIENCY, SLICE, Name, estimate_step
from rpg_megatron.config import UserError, load_settings, read_model_shape
from rpg_megatron.launcher.input_checks import disk_bytes
from rpg_megatron.launcher.preflight import check_shared_memory
from tests.support.recipes import EXAMPLES

GIB = 1024**3
ONE_LAYER = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (12_288, 4096),
    "up_proj": (12_288, 4096),
    "down_proj": (4096, 12_288),
}
"""Outputs and inputs in Qwen3-8B."""
TRAINED = 36 * 16 * sum(outputs + inputs for outputs, inputs in ONE_LAYER.values())
ADAPTERS = "lora={rank: 16}"
ONE_GPU = (
    *(
        "parallel={data: 1}",
        "engine={colocated: true, replicas: 1, kv_cache_gib: 20}",
        "optimizer.overlap=false",
    ),
    "optimizer.distributed=false",
)
EIGHT = "qwen3_8b_dapo_math_8k.yaml"


def plan_of(*overrides: str, file: str = EIGHT) -> Plan:
    """By default Qwen3-8B on one H100 at 8K, all weights trained."""
    return make_plan(load_settings(EXAMPLES / file, [*(ONE_GPU if file == EIGHT else ()), *overrides]))


def parts(plan: Plan) -> dict[str, int]:
    return {part.name: part.nbytes for part in plan.largest.parts}


def saved_disk(plan: Plan) -> int:
    """Bytes of one checkpoint."""
    settings = plan.settings.model_copy(
        update={"export": plan.settings.export.model_copy(update={"enabled": False})}
    )
    return disk_bytes(settings, plan.shape, checkpoints=1)


def test_qwen3_8b_takes_a_quarter_of_the_memory_and_a_hundredth_of_the_disk() -> None:
    full, adapters = plan_of(), plan_of(ADAPTERS)
    assert full.batch == adapters.batch
    assert full.batch.longest == 1024 + 8192
    assert not full.fits
    assert adapters.fits
    assert adapters.rank_total <= full.rank_total / 4
    assert saved_disk(adapters) <= saved_disk(full) / 100
    sizes = f"{adapters.rank_total / GIB:.0f} GiB of a trainer rank instead of {full.rank_total / GIB:.0f}"
    disk = f"a checkpoint is {saved_disk(adapters) / saved_disk(full):.2%} of the size"
    page = " ".join((EXAMPLES.parent / "docs" / "plan.md").read_text().split())
    assert sizes in page
    assert disk in page


def test_only_adapters_have_gradients_and_state() -> None:
    plan = plan_of(ADAPTERS, "anchor={type: fixed}")
    assert (plan.parameters, plan.trained) == (8_190_735_360, TRAINED)
    assert (plan.largest.parameters, plan.largest.trained) == (8_190_735_360 + TRAINED, TRAINED)
    part = parts(plan)
    assert part["parameters"] == 2 * plan.largest.parameters
    assert part["gradients"] == 4 * TRAINED
    assert part["optimizer"] == part["optimizer off the GPU"] == 12 * TRAINED
    assert part["held anchor"] == 2 * TRAINED
    assert part["checkpoint to be written"] == (2 + 2 + 12) * TRAINED
    assert saved_disk(plan) == 14 * TRAINED
    exported = disk_bytes(plan.settings, plan.shape, checkpoints=1) - saved_disk(plan)
    assert exported == 2 * plan.largest.parameters  # merged, and the adapters alone


def test_adapters_are_cut_as_their_projections_are() -> None:
    """At TP 2, A is whole in front of column-parallel layers, B behind row-parallel ones."""
    plan = plan_of(ADAPTERS, "parallel={tensor: 2, sequence: true, data: 1}", "engine.tensor=2")
    row = ("o_proj", "down_proj")
    cut = sum((o + i // 2) if name in row else (o // 2 + i) for name, (o, i) in ONE_LAYER.items())
    assert plan.largest.trained == 36 * 16 * cut
    assert plan.trained == TRAINED


def test_a_hybrid_has_other_projections() -> None:
    """Qwen3.5-9B: of 32 layers eight have softmax attention, whose q_proj has gates, too."""
    in_linear = (8192, 4096), (4096, 4096), (32, 4096), (32, 4096), (4096, 4096)
    in_softmax = (8192, 4096), (1024, 4096), (1024, 4096), (4096, 4096)
    mlp = 3 * (12_288 + 4096)
    trained = 24 * sum(map(sum, in_linear)) + 8 * sum(map(sum, in_softmax)) + 32 * mlp
    plan = plan_of(ADAPTERS, file="hybrid/qwen3.5_9b_dapo_math_8k.yaml")
    assert plan.trained == 16 * trained
    # At TP 2; A in front of column-parallel layers, and B behind o_proj, out_proj and down_proj, are whole.
    a = 24 * (4 * 4096 + 2048) + 8 * (3 * 4096 + 2048) + 32 * (2 * 4096 + 6144)
    b = 24 * (4096 + 2048 + 32 + 4096) + 8 * (4096 + 1024 + 4096) + 32 * (12_288 + 4096)
    assert plan.largest.trained == 16 * (a + b)
    matrices = 24 * (12_352 + 4096) * 4096 + 8 * (10_240 + 4096) * 4096 + 32 * 3 * 4096 * 12_288
    assert rank_parameters(plan.settings, plan.shape, 0).adapted == matrices // 2


def test_what_engines_hold_of_adapters() -> None:
    """Slots have vLLM's rank; what was read is there too."""
    plan = plan_of("lora={rank: 20, targets: [q_proj, down_proj]}")
    assert plan.engine.adapters == 2 * (
        36 * (20 + 32) * sum(sum(ONE_LAYER[name]) for name in ("q_proj", "down_proj"))
    )
    assert plan.engine.total == plan_of().engine.total + plan.engine.adapters
    (shared,) = (p.nbytes for p in plan.shared_gpu if p.name == "engine: adapters")
    assert shared == plan.engine.adapters


def test_the_output_layer_has_an_adapter_on_the_last_stage() -> None:
    """Its B is cut and padded as its weight is; an engine's worker is planned with all of it."""
    lora = "lora={rank: 20, targets: [q_proj, lm_head]}"
    plan = plan_of(lora, "parallel={pipeline: 2, tensor: 2, sequence: true, data: 1}", "engine.tensor=2")
    first, last = (rank_parameters(plan.settings, plan.shape, stage) for stage in (0, 1))
    vocab, of_layers = 151_936, 18 * 20 * (2048 + 4096)
    assert (first.trained, last.trained) == (of_layers, of_layers + 20 * (vocab // 2 + 4096))
    assert last.adapted - first.adapted == vocab // 2 * 4096
    padded = plan_of(lora, "model.vocab_multiple=151937")
    assert padded.largest.trained == 36 * 20 * (4096 + 4096) + 20 * (151_937 + 4096)
    assert plan.trained == 36 * 20 * (4096 + 4096) + 20 * (vocab + 4096)
    slots = 36 * 32 * (4096 + 4096) + 32 * (vocab + 4096)
    assert plan.engine.adapters == 2 * (slots + plan.trained)
    assert saved_disk(plan) == 14 * plan.trained


def test_sleeping_engines_keep_weights_that_are_published_once() -> None:
    def asleep(plan: Plan) -> list[int]:
        return [part.nbytes for part in plan.host if part.name.startswith("of sleeping engines")]

    plan = plan_of(ADAPTERS, "parallel.data=2", "engine.replicas=2")
    graphs = 512 * 1024**2
    assert asleep(plan) == [2 * (plan.engine.weights + plan.engine.adapters + graphs)]
    (without,) = asleep(plan_of())
    assert without % graphs == 0 < without
    assert asleep(plan_of(ADAPTERS, "engine.colocated=false")) == []


def test_merged_weights_are_a_copy_that_is_published_every_time() -> None:
    merged = plan_of("lora={targets: [q_proj, o_proj], publish: merged}", "precision.dtype=float32")
    adapters = plan_of("lora={targets: [q_proj, o_proj]}", "precision.dtype=float32")
    copies = 4 * 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096)  # Megatron's QKV is one matrix
    assert parts(merged)["weights merged with adapters"] == copies
    assert "weights merged with adapters" not in parts(adapters)
    assert merged.engine.adapters == 0
    in_rollout = [plan.turns["rollout"] for plan in (merged, adapters)]
    assert in_rollout[0] - in_rollout[1] == copies - adapters.engine.adapters


def test_adapters_save_a_x_and_frozen_experts_no_rows() -> None:
    """Bytes a token at TP2: rank x adapters in front of B; rows of k experts with their weighted product."""
    few, many = (plan_of("memory.recompute=none", f"lora={{rank: {rank}}}") for rank in (8, 16))
    tokens = few.batch.tokens_per_microbatch
    assert parts(many)["activations"] - parts(few)["activations"] == tokens * 36 * 2 * 8 * 7
    lora = "lora={rank: 16, targets: [q_proj, o_proj]}"
    file, kept = (
        "moe/qwen3_30b_a3b_dapo_math_8k.yaml",
        ("memory.recompute=none", "training.router_replay=off"),
    )
    frozen, trained = (plan_of(*kept, *more, file=file) for more in ((lora,), ()))
    rows = frozen.batch.tokens_per_microbatch * 48 * 8 * 2 * (2048 + 768)
    a_x = frozen.batch.tokens_per_microbatch * 48 * 2 * 16 * 2
    assert trained.activations["none"] - frozen.activations["none"] == rows - a_x


def test_the_head_keeps_its_input_and_no_gradient_of_its_weight() -> None:
    full, adapters = (plan_of("memory.recompute=none", *more) for more in ((), (ADAPTERS,)))
    assert parts(full)["logits chunk, transient gradients"] == (6 * 4096 + 8 * 1024) * 151_936
    working = 2 * adapters.batch.tokens_per_microbatch * (6 * 12_288 + 3 * 4096)
    assert parts(adapters)["logits chunk, transient gradients"] == working > 8 * 1024 * 151_936


def seconds(plan: Plan, name: Name) -> float:
    current = estimate_step(plan, assume(plan.target.name))
    return current.seconds(name)


def test_an_update_leaves_out_the_gradients_of_frozen_weights() -> None:
    """One pass less of layers and head, and three small ones of adapters."""
    fixed = ("memory.recompute=none", "parallel={data: 64}", "engine.replicas=64")
    full, adapters = plan_of(*fixed), plan_of(*fixed, ADAPTERS)
    in_layers, in_head = full.shape.matmul_parameters
    assumed = assume("h100-80")
    tokens = 32 * 16 // 64 * (256 + 0.4 * 8192)  # mean prompt and response of the sequences of a replica
    tokens = max(tokens, 256 + 8192)
    flops = 2 * tokens * (in_layers + in_head - 3 * TRAINED)
    reduced = 6 * (plan_of(*fixed).parameters - TRAINED) * 63 / 64 / (assumed.network * LINK_EFFICIENCY)
    state = 30 * (full.parameters - TRAINED) / (assumed.memory_bandwidth * assumed.decode_efficiency)
    updates = full.batch.updates
    expected = updates * (flops / assumed.peak_bf16 / assumed.train_mfu + reduced + state)
    assert seconds(full, "update") - seconds(adapters, "update") == pytest.approx(expected)


def test_an_adapter_of_the_output_layer_is_computed_as_often_as_the_others() -> None:
    """Forward, and twice in the backward pass."""
    fixed = ("memory.recompute=none", "optimizer.distributed=true", "training.minibatches=1")
    without, with_head = (
        plan_of(*fixed, f"lora={{rank: 16, targets: [q_proj{more}]}}") for more in ("", ", lm_head")
    )
    added, assumed = 16 * (151_936 + 4096), assume("h100-80")
    assert with_head.trained - without.trained == added
    tokens = 512 * 16 * (256 + 0.4 * 8192)
    flops = 3 * 2 * tokens * added
    state = 30 * added / (assumed.memory_bandwidth * assumed.decode_efficiency)
    expected = flops / assumed.peak_bf16 / assumed.train_mfu + state
    assert seconds(with_head, "update") - seconds(without, "update") == pytest.approx(expected, rel=1e-6)


def test_a_sync_moves_adapters_alone_and_a_handover_the_engines_weights() -> None:
    ipc = "bridge={transport: cuda_ipc}"
    full, adapters = plan_of(ipc), plan_of(ipc, ADAPTERS)
    assumed = assume("h100-80")
    link = assumed.gpu.nvlink * LINK_EFFICIENCY
    # Each matrix that is adapted has two slices.
    slices = 2 * len(ONE_LAYER) * adapters.shape.num_layers
    assert seconds(adapters, "sync") - SLICE * slices == pytest.approx(2 * TRAINED / link, rel=1e-6)
    assert seconds(full, "sync") - SLICE * 398 > 150 * 2 * TRAINED / link
    moved = 2 * (12 * TRAINED + adapters.engine.weights + adapters.engine.adapters + 512 * 1024**2)
    assert seconds(adapters, "handover") == pytest.approx(
        4 + moved / (assumed.gpu.host_link * LINK_EFFICIENCY)
    )


def test_the_command_shows_what_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    def output(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["plan", *arguments])
        assert exit_info.value.code == 0
        return capsys.readouterr().out

    file = str(EXAMPLES / "qwen3_8b_lora.yaml")
    share = f"{TRAINED / 1e6:.2f}M of 8.19B parameters are trained ({TRAINED / 8_190_735_360:.2%})"
    assert share in " ".join(output(file).split())
    described = json.loads(output(file, "--json"))
    assert (described["parameters"], described["trained_parameters"]) == (8_190_735_360, TRAINED)
    assert described["engine"]["adapters"] > 0
    plain = output(str(EXAMPLES / "qwen3_4b_dapo_math_2k.yaml"))
    assert "adapters" not in plain
    assert "trained (" not in plain


def test_shared_memory_must_hold_the_adapters_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = plan_of("bridge={transport: shared_memory}", "lora={rank: 512}").settings
    shape, needed = read_model_shape(settings.model.path), 2 * (8_190_735_360 + 32 * TRAINED) + 256 * 1024**2

    free = [needed, needed - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free.pop(0)))
    check_shared_memory(settings, shape, tmp_path)
    with pytest.raises(UserError, match="the weights need"):
        check_shared_memory(settings, shape, tmp_path)


def test_a_teacher_has_no_adapters(tmp_path: Path) -> None:
    teacher = f"teacher={{path: {EXAMPLES}/models/Qwen3-8B-Base}}"
    plan = plan_of(ADAPTERS, teacher, "objective={type: distil}")
    assert parts(plan)["teacher"] == 2 * 8_190_735_360


def test_experts_are_frozen_on_every_rank() -> None:
    plan = plan_of(file="qwen3_235b_a22b_lora.yaml")
    held = rank_parameters(plan.settings, plan.shape, 0)
    assert held.in_experts > 0
    assert held.replicated(plan.settings.parallel) == [(held.trained, 2), (0, 1)]
    assert parts(plan)["gradients"] == 4 * held.trained
    assert parts(plan)["optimizer"] == 12 * held.trained // 2
