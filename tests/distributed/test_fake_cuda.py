"""The policy's path on GPUs, on a machine without one: fake CUDA tensors in fake NCCL groups.

Why: a tensor on the wrong device, in the wrong group or of the wrong dtype ends a run in its first minute on
a cluster, and a line that makes the host wait for the device shows there only as a slow step. Each
layout is run as one of its ranks (fake_cuda_worker): build, pack, score, anchor, updates, offload and reload;
without pipeline stages a whole step on rank 0 and its metrics, checksums, publication by shared memory and
export; on one rank, the plan of a save. fake_cuda lists what this cannot show: values, kernels, memory, the
order of streams and messages. Layers are the local ones, not Transformer Engine's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.config import load_settings
from tests.support.ranks import run_ranks
from tests.support.recipes import EXAMPLES, H100, ROWS

WAITS_PER_MICROBATCH = 0
"""Between forward and backward, or within either, the GPU would run dry."""
WAITS = {"score": 0, "step": 5, "first update": 5, "anchor": 2, "park": 2, "checksums": 1}
"""Waits in our code, whatever the model's size: an anchor is swapped in and out, memory is offloaded and
reloaded. A step scores one micro-batch, with an anchor twice, and copies the log-probs of each and the
entropy; so does its first update if it gives the old log-probs."""
WAITS_PER_UPDATE = 3
"""Whether log-probs and gradients are finite, and the sums; next to each other, when all work is queued."""
MEGATRONS = [
    "/p2p_communication.py",  # stages tell each other how long a micro-batch is
    "/clip_grads.py",  # the gradient norm, once an update
    "/cpu_offloading/hybrid_optimizer.py",  # gradients to the offloaded part, once for each tensor
    "/moe/",  # how many tokens each expert gets, in each layer
]
"""Megatron files in which the host waits during an update."""

POINT_TO_POINT = {"send", "recv_", "alltoall_base_"}
"""Operations for which NCCL connects each pair of ranks."""

HEADS = {"num_heads": 8, "num_kv_heads": 4}
SP = {"tensor": 2, "sequence": True}
DEEP = {"tensor": 2, "sequence": True, "pipeline": 2, "context": 2}
VIRTUAL = {"pipeline": 4, "virtual": 2, "data": 2}
SCHEDULE_FREE = {"optimizer": {"type": "schedule_free_adamw", "distributed": False}}
SEQUENCES = {
    "objective": {"type": "gspo"},
    "advantage": {"type": "grpo"},
    "aggregation": {"type": "sequence_mean"},
    "correction": {"type": "icepop", "level": "sequence", "denominator": "kept"},
}
AUX_LOSS = {"training": {"minibatches": 1, "router_aux_loss": 0.01}}
SHARED = {"training": {"minibatches": 1, "share_prompts": True}}
FIXED = {"anchor": {"type": "fixed"}, "objective": {"beta": 0.01}}
ENGINE_OLD = {"training": {"minibatches": 1, "old": "engine"}}
HEAD_LORA = {"rank": 4, "targets": ["q_proj", "o_proj", "gate_proj", "lm_head"]}
TEACHER = {"teacher": {"path": "/"}}
FULL_TEACHER = {**TEACHER, "objective": {"type": "distil", "form": "full"}}
CLIPPED: list[dict[str, Any]] = [
    {"type": "rpg", "clip": {"kind": "truncate"}},
    {"type": "rpg", "clip": None, "kl_placement": "additive"},
    {"type": "rpg", "estimator": "differentiable", "ratio": "sequence"},
    {"type": "ppo"},
    {"type": "dapo"},
    {"type": "cispo"},
]


def sampled_teacher(form: str, bonus: float = 0.0) -> dict[str, Any]:
    return {**TEACHER, "objective": {"type": "distil", "form": form, "entropy_bonus": bonus, "reward": 1.0}}


def case(
    dtype: str, parallel: dict[str, Any] | None = None, rank: int = 0, *, tied: bool = True, **more: Any
) -> dict[str, Any]:
    layers = (parallel or {}).get("pipeline", 1) * (parallel or {}).get("virtual", 1)
    settings = {"precision": {"dtype": dtype}, "parallel": parallel or {}, **more}
    return {
        "settings": settings,
        "rank": rank,
        "shape": {**HEADS, "num_layers": layers, "tied_embeddings": tied},
    }


EXPERTS = {
    "experts": {"count": 8, "per_token": 2, "ffn_hidden_size": 64, "normalised": True, "layers": [0, 1]}
}

HYBRID = {
    "linear": {
        "layers": [0],
        "key_heads": 4,
        "value_heads": 8,
        "key_dim": 32,
        "value_dim": 32,
        "kernel": 4,
    }
}

LATENT = {
    "latent": {"query_rank": 24, "rank": 16, "plain_dim": 32, "rotated_dim": 16, "value_dim": 32}
} | EXPERTS

LAYOUTS = {
    "TP2+SP x PP2 x CP2, last rank, bfloat16": case("bfloat16", DEEP, 7, **SEQUENCES),
    "DP4, EP4, bfloat16": case("bfloat16", {"data": 4, "expert": 4}, **FIXED, **AUX_LOSS) | EXPERTS,
    "latent attention, TP2+SP x CP2, EP4": case(
        "bfloat16", {**SP, "context": 2, "expert": 4}, 3, tied=False, **SHARED
    )
    | LATENT,
    "adapters, TP2+SP x DP2": case(
        "bfloat16",
        {**SP, "data": 2},
        3,
        tied=False,
        lora=HEAD_LORA,
        memory={"recompute": "full"},
        **ENGINE_OLD,
    ),
    "policies of clipping": case("bfloat16", advantage={"type": "grpo"}) | {"losses": CLIPPED},
    "a teacher's distributions, hybrid": case("bfloat16", **FULL_TEACHER) | HYBRID,
}
MORE_LAYOUTS = (
    {
        f"{name}, {dtype}": case(dtype, **given)
        for dtype in ("bfloat16", "float32")
        for name, given in {
            "one rank": FIXED,
            "one rank, untied": {"tied": False},
            "Schedule-Free": SCHEDULE_FREE,
            "sequences": SEQUENCES,
            "DP8": {"parallel": {"data": 8}, "rank": 5},
            "TP2 x DP4, full recompute": {
                "parallel": {"tensor": 2, "data": 4},
                "memory": {"recompute": "full"},
            },
            "TP2+SP x PP2 x CP2, first rank": {"parallel": DEEP},
            **({"shared prompts": SHARED} if dtype == "bfloat16" else {}),
            "TP2+SP x PP2 x CP2, last rank": {"parallel": DEEP, "rank": 7},
            "PP4 x VPP2 x DP2, first rank": {"parallel": VIRTUAL},
            "PP4 x VPP2 x DP2, last rank": {"parallel": VIRTUAL, "rank": 7},
            "adapters": {"lora": {"rank": 4}},
            "adapters, PP2, last rank": {"parallel": {"pipeline": 2}, "rank": 1, "lora": {"rank": 4}},
            "engine's old log-probs": ENGINE_OLD,
            "a teacher's tokens": sampled_teacher("token"),
            "a teacher's distributions, TP2+SP x CP2": {"parallel": {**SP, "context": 2}, **FULL_TEACHER},
            "a teacher's distributions, PP2, last rank": {
                "parallel": {"pipeline": 2},
                "rank": 1,
                **FULL_TEACHER,
            },
            "entropy bonus": {"objective": {"entropy_bonus": 0.01}},
        }.items()
    }
    | {
        "half offloaded, bfloat16": case("bfloat16", memory={"offload_optimizer": 0.5}),
        "PP4 x VPP2 x DP2, float32": case("float32", VIRTUAL, **FIXED),
        "PP2, untied, bfloat16": case("bfloat16", {"pipeline": 2}, tied=False),
        "shared prompts, CP2, bfloat16": case("bfloat16", {"context": 2}, **SHARED),
        "a teacher's sequences, entropy bonus": case("bfloat16", SP, **sampled_teacher("sequence", 0.01)),
        "a teacher's distributions, shared prompts": case("bfloat16", **FULL_TEACHER, **SHARED),
        "adapters, shared prompts": case("bfloat16", **SHARED, lora={"rank": 4}),
        "hybrid, TP2+SP": case("bfloat16", SP) | HYBRID,
        "hybrid, adapters, TP2+SP": case("bfloat16", SP, lora={"rank": 4}) | HYBRID,
        "hybrid, CP2, last rank": case("bfloat16", {"context": 2}, 1) | HYBRID,
        "hybrid, full recompute": case("bfloat16", memory={"recompute": "full"}) | HYBRID,
    }
    | {
        f"experts, {name}, {dtype}": case(dtype, **given) | EXPERTS
        for dtype in ("bfloat16", "float32")
        for name, given in {
            "one rank": {"memory": {"recompute": "selective"}},
            "TP2+SP x DP2, EP4": {
                "parallel": {**SP, "data": 2, "expert": 4},
                "memory": {"recompute": "full"},
                **AUX_LOSS,
            },
            "TP2+SP, ETP2": {"parallel": {**SP, "expert_tensor": 2}},
            "TP2+SP x DP4, EP2, ETP2": {"parallel": {**SP, "data": 4, "expert": 2, "expert_tensor": 2}},
            "PP2 x DP2, EP2, last rank": {
                "parallel": {"pipeline": 2, "data": 2, "expert": 2},
                "rank": 3,
                **AUX_LOSS,
            },
        }.items()
    }
)


def examples() -> dict[str, dict[str, Any]]:
    """Each layout of the example files, with the files that use it, one for each loss."""
    layouts: dict[str, dict[str, Path]] = {}
    for file in [EXAMPLES / "quickstart.yaml", *H100, *ROWS]:
        s = load_settings(file).model_dump(mode="json")
        optimizer = {k: s["optimizer"][k] for k in ("type", "distributed", "overlap")}
        layout = [s["parallel"], s["memory"], s["precision"], optimizer, s["anchor"]["type"] != "old"]
        loss = [s[k] for k in ("objective", "aggregation", "correction", "anchor")]
        layouts.setdefault(json.dumps(layout[:4]), {}).setdefault(json.dumps(loss), file)
    cases = {}
    for files in layouts.values():
        first, *_ = files.values()
        cases[str(first.relative_to(EXAMPLES))] = {
            "files": [str(file) for file in files.values()],
            "shape": {"num_layers": 1},
        }
    return cases


EXAMPLE_FILES = ("quickstart.yaml", "qwen3_32b_dapo_math_2k.yaml")
"""Those of the default tier: the smallest and the largest layout."""


def problems(result: dict[str, Any]) -> list[str]:
    """The problems of a run, each with its source line."""
    lines = [*result["faults"], *([result["error"][-600:]] if result["error"] else [])]
    waits = result["waits"]
    for name, longer in waits.items():
        if not name.startswith("longer "):
            continue
        shorter = waits[name.removeprefix("longer ")]
        more = {where: n - shorter.get(where, 0) for where, n in longer.items()}
        lines += too_many(name, of_ours(more), WAITS_PER_MICROBATCH * result["more"])
        fixed = {where: n for where, n in of_ours(shorter).items() if not more.get(where)}
        lines += too_many(f"{name}, whatever its length", fixed, WAITS_PER_UPDATE)
        unknown = [w for w in more if w not in of_ours(more) and not any(f in w for f in MEGATRONS)]
        lines += [f"{name}: {where}: whose wait is it?" for where in unknown]
    for name, bound in WAITS.items():
        if name in waits:
            of_experts = any("expert_load" in where for where in waits[name])
            lines += too_many(name, of_ours(waits[name]), bound + of_experts)
    return lines


def of_ours(waits: dict[str, int]) -> dict[str, int]:
    return {where: n for where, n in waits.items() if where.startswith("rpg_megatron: ")}


def too_many(part: str, waits: dict[str, int], bound: int) -> list[str]:
    if sum(waits.values()) <= bound:
        return []
    return [f"{part}: the host waits {n} times in {where}" for where, n in waits.items() if n]


def check(case: dict[str, Any], folder: Path) -> None:
    result = run_ranks("tests.distributed.fake_cuda_worker", 1, folder, json.dumps(case))
    lines = problems(result)
    assert not lines, "\n".join(lines)
    assert any(name.startswith("longer update") for name in result["waits"])  # it reached the updates
    used = [[size, bool(POINT_TO_POINT & set(ops))] for size, ops in result["communicators"] if size > 1]
    assert sorted(used) == sorted(result["planned"]), result["communicators"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_runs_on_fake_gpus(name: str, tmp_path: Path) -> None:
    check(LAYOUTS[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_every_layout_runs_on_fake_gpus(name: str, tmp_path: Path) -> None:
    check(MORE_LAYOUTS[name], tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in EXAMPLE_FILES else pytest.mark.long) for n in examples()]
)
def test_an_example_runs_on_fake_gpus(name: str, tmp_path: Path) -> None:
    example = examples()[name]
    check({**example, "files": example["files"][:1]}, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", examples())
def test_every_loss_of_an_example_runs_on_fake_gpus(name: str, tmp_path: Path) -> None:
    check(examples()[name], tmp_path)


def test_planted_faults_are_found(tmp_path: Path) -> None:
    """Each is reported with the line that makes it or first uses it."""
    result = run_ranks(
        "tests.distributed.fake_cuda_worker", 1, tmp_path, json.dumps(case("bfloat16") | {"plant": True})
    )
    assert not result["error"]
    worker = "tests/distributed/fake_cuda_worker.py:"
    lines = dict.fromkeys(result["planted"], worker) | {
        "CPU tensor in a micro-batch": "rpg_megatron/policy/microbatch.py:"
    }
    assert len(lines) == 11
    for name, detected in result["planted"].items():
        waits = {f"rpg_megatron: {where}": n for where, n in detected["waits"].items()}
        messages = detected["faults"] + too_many(name, waits, WAITS_PER_MICROBATCH + WAITS_PER_UPDATE)
        assert any(lines[name] in line for line in messages), f"{name} is not found: {messages}"
