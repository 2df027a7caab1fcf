"""``rpg-megatron plan`` against what real trainer ranks hold: real Megatron, real updates, real publications.

Why: a plan that is wrong by a fifth sends a job into an out-of-memory error after hours in a queue. Two
proofs: the activations, as autograd saves them, to 3%, with adapters to 20%; and the peak of the resident
set, allocator and libraries included, to 15%, of most mixtures of experts to 10%. Not covered:
anything on a GPU, and the engines' memory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as mpu

from rpg_megatron.commands.plan.activations import StageActivations
from rpg_megatron.commands.plan.layout import BatchPlan, count_gpus, plan_batch
from rpg_megatron.commands.plan.trainer_memory import IMPORTS, SAVE, rank_memory
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.system.collectives import gather_objects
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.distributed.plan_memory_worker import trajectories
from tests.support.ranks import ranks, run_ranks
from tests.support.tiny_models import MOONLIGHT


def saved_bytes(case: dict[str, Any]) -> int:
    """Run one update on one micro-batch; the sum over the storages that are saved, parameters left out."""
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    shape = read_model_shape(settings.model.path)
    policy = Policy(settings, shape, mesh, torch.device("cpu"), lambda policy: None)
    pack = policy.pack(trajectories(case["lengths"], shape.vocab_size))
    weights = {p.untyped_storage().data_ptr() for _, p in policy.named_parameters()}
    storages: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        # What the loss saves is no more than a few numbers a token. Backward saves what it recomputes.
        if place not in weights and torch._C._current_graph_task_id() == -1:
            storages.setdefault(place, tensor)  # kept alive, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), policy.updating():
        policy.update([pack], build_loss(settings), build_aggregator(settings), lr=1e-6)
    mpu.destroy_model_parallel()
    return sum(t.untyped_storage().nbytes() for t in storages.values())


@ranks(1)
def saved_on_ranks(folder: Path, cases: dict[str, Any]) -> list[dict[str, int]]:
    """Of each rank, the bytes that are saved in each case."""
    return gather_objects({name: saved_bytes(case) for name, case in cases.items()})


LENGTHS = [300, 212]
TOKENS = sum(LENGTHS) - len(LENGTHS)

# About 0.12B parameters; ranks hold 1 to 3 GB.
LARGE = {
    "num_hidden_layers": 10,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 2048,
}
SMALL = LARGE | {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "vocab_size": 16384,
}
# Experts for the models above; a third of the parameters of LARGE's mixture are outside them.
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
SHARED = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 768}
LATENT = {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 512,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
NO_HEAD_SIZE = {"head_dim": None}
"""Some families have no such key."""
EXPERT_LAYOUTS = {
    "TP1": {},
    "EP2": {"parallel": {"data": 2, "expert": 2}},
    "EP2 distributed": {"parallel": {"data": 2, "expert": 2}, "optimizer": {"distributed": True}},
    "DP2 distributed": {"parallel": {"data": 2}, "optimizer": {"distributed": True}},
    "TP2+SP EP2": {"parallel": {"tensor": 2, "sequence": True, "expert": 2}},
    "TP2+SP ETP2": {"parallel": {"tensor": 2, "sequence": True, "expert_tensor": 2}},
    "PP2": {"parallel": {"pipeline": 2}},
    "EP2 full": {"parallel": {"data": 2, "expert": 2}, "memory": {"recompute": "full"}},
}
BFLOAT16 = {"precision": {"dtype": "bfloat16"}}
LAYOUTS = {
    "TP1": {},
    "TP1 bfloat16": BFLOAT16,
    "TP2": {"parallel": {"tensor": 2}},
    "TP2+SP": {"parallel": {"tensor": 2, "sequence": True}},
    "PP2": {"parallel": {"pipeline": 2}},
    "DP2": {"parallel": {"data": 2}},
    "DP2 distributed": {"parallel": {"data": 2}, "optimizer": {"distributed": True}},
    "CP2": {"parallel": {"context": 2}},
    "TP1 selective": {"memory": {"recompute": "selective"}},
    "TP1 full": {"memory": {"recompute": "full"}},
    "TP1 held anchor": {"anchor": {"type": "fixed"}},
}


ADAPTERS = {
    "LoRA": {"lora": {"rank": 16}},
    "LoRA distributed": {"lora": {"rank": 16}, "parallel": {"data": 2}, "optimizer": {"distributed": True}},
    "LoRA TP2+SP": {"lora": {"rank": 16}, "parallel": {"tensor": 2, "sequence": True}},
    "LoRA merged": {"lora": {"rank": 16, "publish": "merged"}},
    "LoRA held anchor": {"lora": {"rank": 64}, "anchor": {"type": "fixed"}},
    "LoRA head": {"lora": {"rank": 64, "targets": ["q_proj", "lm_head"]}},
    "LoRA head merged PP2": {
        "lora": {"rank": 16, "targets": ["up_proj", "lm_head"], "publish": "merged"},
        "parallel": {"pipeline": 2},
    },
}


def settings_for(model: Path, **changes: object) -> Settings:
    return Settings.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(model)},
            "precision": {"dtype": "float32"},
            "data": {"path": "none"},
            "optimizer": {"distributed": False},
            "training": {"logprob_chunk": 256},
        }
        | changes
    )


@pytest.fixture
def bridge() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rpg-plan-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def large(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("large") / "model", **LARGE)


def batch_of(settings: Settings, microbatches: int) -> BatchPlan:
    """Micro-batches of the lengths above."""
    return replace(plan_batch(settings, 2048), tokens_per_microbatch=TOKENS, microbatches=microbatches)


def check(settings: Settings, folder: Path, bridge: Path, within: float = 0.15) -> None:
    """Run two steps; every rank's peak must be within this fraction of its plan."""
    microbatches = 2
    case = {
        "settings": settings.model_dump(mode="json"),
        "bridge": str(bridge),
        "lengths": LENGTHS,
        "microbatches": microbatches,
    }
    (folder / "case.json").write_text(json.dumps(case))
    ranks = run_ranks(
        "tests.distributed.plan_memory_worker", settings.parallel.world, folder, timeout=3000, fresh=True
    )
    shape = read_model_shape(settings.model.path)
    peaks = []
    for rank in ranks:
        batch = batch_of(settings, microbatches)
        publishes = rank["replica"] == 0
        activations = StageActivations(settings, shape, rank["stage"], batch, "cpu")
        plan = rank_memory(activations, count_gpus(settings), publishes=publishes)
        save = sum(part.nbytes for part in plan.parts if part.name == SAVE)
        # Half of an adapter is on all tensor ranks, and the first of them saves it.
        if settings.lora is None or rank is ranks[0]:
            assert rank["staged"] == pytest.approx(save, rel=0.01, abs=1_000_000)
        assert rank["staged"] <= 1.01 * save + 1_000_000
        print(
            f"a save: {save / 1e6:.1f} MB planned, {rank['staged'] / 1e6:.1f} copied, "
            f"the process grew by {rank['grown'] / 1e6:.1f}"
        )
        # The process grows by less where malloc has freed memory, and may shrink if it saves nothing.
        assert rank["grown"] < 1.1 * save + 4e6
        # Adapters are small tensors, all of which may lie there.
        assert not save or settings.lora is not None or rank["grown"] > 0.8 * save - 4e6
        peaks.append((plan.peak, max(rank["peaks"].values()), rank["peaks"]))
        assert rank["parameters"] == plan.parameters
        assert abs(rank["baseline"] - IMPORTS) < 0.15 * IMPORTS
    print([(planned, measured, round(planned / measured, 3)) for planned, measured, _ in peaks])
    assert all(abs(planned / measured - 1) <= within for planned, measured, _ in peaks), peaks


def test_a_small_rank_holds_what_is_planned(
    tmp_path: Path, bridge: Path, make_checkpoint: Callable[..., Path]
) -> None:
    model = make_checkpoint(tmp_path / "model", **SMALL)
    check(settings_for(model, **LAYOUTS["TP1"]), tmp_path, bridge)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(
            (family, {})
            for family in (
                "mistral",
                "phi3",
                "olmo3",
                "qwen3_5",
                "qwen3_5_moe",
                "qwen2_moe",
                "olmoe",
                "glm4_moe",
                "deepseek_v3",
            )
        ),
        ("olmoe", {}),
        ("qwen3_5", ADAPTERS["LoRA"]),
        ("qwen3_5", ADAPTERS["LoRA merged"]),
    ],
)
def test_a_rank_of_other_layers_holds_what_is_planned(
    family: str,
    changes: dict[str, object],
    tmp_path: Path,
    bridge: Path,
    make_checkpoint: Callable[..., Path],
) -> None:
    no_head_size = (
        LATENT if family == "deepseek_v3" else NO_HEAD_SIZE if family in ("olmoe", "qwen2_moe") else {}
    )
    model = make_checkpoint(
        tmp_path / "model", family=family, **SMALL | SHARED | {"sliding_window": 64} | no_head_size
    )
    check(settings_for(model, **changes), tmp_path, bridge)


@pytest.mark.long
@pytest.mark.timeout(3600)  # bfloat16 products of a CPU without AVX-512 take about 60 times as long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_what_is_planned(layout: str, tmp_path: Path, bridge: Path, large: Path) -> None:
    check(settings_for(large, **LAYOUTS[layout]), tmp_path, bridge)


@pytest.mark.long
@pytest.mark.parametrize("layout", ADAPTERS)
def test_a_rank_with_adapters_holds_what_is_planned(
    layout: str, tmp_path: Path, bridge: Path, large: Path
) -> None:
    check(settings_for(large, **ADAPTERS[layout]), tmp_path, bridge, within=0.1)


@pytest.mark.long
@pytest.mark.parametrize("form", ["token", "full"])
def test_a_rank_holds_a_teacher_of_another_shape(
    form: str, tmp_path: Path, bridge: Path, large: Path, make_checkpoint: Callable[..., Path]
) -> None:
    """A student of a third of its teacher's size."""
    student = make_checkpoint(tmp_path / "student", **LARGE | SMALL | {"vocab_size": 32768})
    changes = {"teacher": {"path": str(large)}, "objective": {"type": "distil", "form": form}}
    check(settings_for(student, **changes), tmp_path, bridge, within=0.1)


@pytest.mark.long
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_a_rank_with_experts_holds_what_is_planned(
    layout: str, tmp_path: Path, bridge: Path, make_checkpoint: Callable[..., Path]
) -> None:
    model = make_checkpoint(tmp_path / "model", **SMALL, **EXPERTS)
    # malloc retains the most here, and not the same amount in each run.
    within = 0.15 if layout.endswith(("ETP2", "full")) else 0.1
    check(settings_for(model, **EXPERT_LAYOUTS[layout]), tmp_path, bridge, within)


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two-layer models: with norms of queries and keys, without, and with experts in the second layer."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = SMALL | {"num_hidden_layers": 2, "hidden_size": 256, "head_dim": 32, "intermediate_size": 512}
    llama = shape | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {
        "qwen3": make_checkpoint(folder / "qwen3", **shape),
        "llama": make_checkpoint(folder / "llama", **llama),
        "moe": make_checkpoint(folder / "moe", **shape, **EXPERTS, mlp_only_layers=[0]),
        "mistral": make_checkpoint(folder / "mistral", family="mistral", **shape | {"sliding_window": 64}),
        "olmo3": make_checkpoint(folder / "olmo3", family="olmo3", **shape | {"sliding_window": 64}),
        "qwen3_5": make_checkpoint(folder / "qwen3_5", family="qwen3_5", **shape),
        "qwen3_5_moe": make_checkpoint(folder / "qwen3_5_moe", family="qwen3_5_moe", **shape | SHARED),
        "glm4_moe": make_checkpoint(folder / "glm4_moe", family="glm4_moe", **shape | SHARED),
        "deepseek_v3": make_checkpoint(folder / "deepseek_v3", family="deepseek_v3", **shape | LATENT),
        "moonlight": make_checkpoint(
            folder / "moonlight", family="deepseek_v3", **shape | LATENT | MOONLIGHT
        ),
        "olmoe": make_checkpoint(folder / "olmoe", family="olmoe", **shape | SHARED | NO_HEAD_SIZE),
    }


def check_activations(cases: dict[str, Settings], folder: Path) -> None:
    """One update in each case, all of one world size; what each rank saves."""
    described = {n: {"settings": s.model_dump(mode="json"), "lengths": LENGTHS} for n, s in cases.items()}
    world = next(iter(cases.values())).parallel.world
    all_saved = saved_on_ranks(folder, described, world=world, timeout=550)
    for name, settings in cases.items():
        model, kind = read_model_shape(settings.model.path), settings.recompute
        for rank, saved in enumerate(all_saved):
            stage = rank if settings.parallel.pipeline > 1 else 0
            planned = StageActivations(settings, model, stage, batch_of(settings, 1), "cpu").saved(kind)
            # Besides what layers save there are tokens and rotary tables; with full recompute, little else.
            # Adapters leave out what no adapter reads, and the first layer's input.
            # Windows are recomputed block by block, and save no output.
            within = 0.2 if settings.lora is not None else 0.12 if model.windows else 0.03
            print(name, rank, saved[name], planned, round(planned / saved[name], 3))
            assert saved[name] == pytest.approx(planned, rel=within, abs=100_000), (name, rank)


@pytest.mark.parametrize(
    "models",
    [
        {"qwen3": "float32", "llama": "bfloat16"},
        {"mistral": "float32", "olmo3": "float32"},
        {"qwen3_5": "float32", "qwen3_5_moe": "float32"},
        pytest.param(
            {"qwen3_5_moe": "bfloat16", "olmoe": "float32", "glm4_moe": "float32"}, marks=pytest.mark.long
        ),
        pytest.param({"deepseek_v3": "float32"}),
        pytest.param({"moonlight": "bfloat16", "deepseek_v3": "bfloat16"}, marks=pytest.mark.long),
        pytest.param({"qwen3_5": "bfloat16"}, marks=pytest.mark.long),
        pytest.param({"qwen3": "bfloat16", "llama": "float32"}, marks=pytest.mark.long),
    ],
    ids=[
        "few",
        "kinds",
        "hybrids",
        "mixtures",
        "latents",
        "latents in bfloat16",
        "hybrid in bfloat16",
        "others",
    ],
)
def test_activations_are_those_that_autograd_saves(
    tmp_path: Path, tiny: dict[str, Path], models: dict[str, str]
) -> None:
    cases = {
        f"{name} {kind}": settings_for(tiny[name], precision={"dtype": dtype}, memory={"recompute": kind})
        for name, dtype in models.items()
        for kind in ("none", "selective", "full")
    }
    check_activations(cases, tmp_path)


HEAD = {"rank": 8, "targets": ["v_proj", "lm_head"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_activations_with_adapters_are_those_that_autograd_saves(
    tmp_path: Path, tiny: dict[str, Path]
) -> None:
    cases = {
        f"{dtype} {kind}": settings_for(
            tiny["qwen3"], precision={"dtype": dtype}, memory={"recompute": kind}, lora={"rank": 8}
        )
        for dtype, kind in product(("float32", "bfloat16"), ("none", "selective", "full"))
    }
    for targets in (["q_proj", "v_proj"], ["gate_proj", "down_proj"], ["o_proj", "q_proj", "lm_head"]):
        cases[f"{targets}"] = settings_for(tiny["llama"], lora={"rank": 8, "targets": targets})
    for kind in ("none", "selective"):
        lora = {"rank": 8, "targets": [*ATTENTION, "lm_head"]}
        cases[f"experts {kind}"] = settings_for(tiny["moe"], memory={"recompute": kind}, lora=lora)
        cases[f"hybrid {kind}"] = settings_for(tiny["qwen3_5"], memory={"recompute": kind}, lora={"rank": 8})
    lora = {"rank": 8, "targets": ["in_proj_qkv", "in_proj_a", "out_proj"]}
    cases["hybrid, some"] = settings_for(tiny["qwen3_5"], lora=lora)
    check_activations(cases, tmp_path)


@pytest.mark.long
def test_activations_of_experts_are_those_that_autograd_saves(tmp_path: Path, tiny: dict[str, Path]) -> None:
    kinds = ("none", "selective", "full")
    check_activations({k: settings_for(tiny["moe"], memory={"recompute": k}) for k in kinds}, tmp_path)


@pytest.mark.long
def test_activations_of_two_ranks_are_those_that_autograd_saves(
    tmp_path: Path, tiny: dict[str, Path]
) -> None:
    cases = {
        "qwen3 TP2": settings_for(tiny["qwen3"], **LAYOUTS["TP2"]),
        "qwen3 TP2+SP": settings_for(tiny["qwen3"], **LAYOUTS["TP2+SP"], **BFLOAT16),
        "llama TP2": settings_for(tiny["llama"], **LAYOUTS["TP2"], **BFLOAT16),
        "llama PP2": settings_for(tiny["llama"], **LAYOUTS["PP2"]),
        "qwen3 TP2+SP LoRA": settings_for(tiny["qwen3"], **LAYOUTS["TP2+SP"], lora={"rank": 8}),
        "qwen3 TP2 LoRA": settings_for(tiny["qwen3"], **LAYOUTS["TP2"], **BFLOAT16, lora={"rank": 8}),
        "qwen3 TP2+SP LoRA head": settings_for(tiny["qwen3"], **LAYOUTS["TP2+SP"], **BFLOAT16, lora=HEAD),
        "qwen3 TP2 LoRA head": settings_for(tiny["qwen3"], **LAYOUTS["TP2"], lora=HEAD),
    }
    check_activations(cases, tmp_path)
