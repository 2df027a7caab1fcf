"""Emulated FP8 in a whole policy: several ranks round the same values as Transformer Engine's would.

Proved: under tensor (and sequence) parallelism blocks are those of one rank, bit for bit; a tensor's own
scale is taken on each rank for its part of the weights, over all of them for tokens that are cut over ranks;
delayed scales are the same on all ranks that share a layer, and those of one rank. Recomputed layers give the
same gradients, bit for bit; micro-batches, checkpoints and layers that stay bfloat16 do as they should. The
same of linear attention, whose input projection is cut in six parts.
Not covered: how a recipe's numbers compare with bfloat16 (benchmarks/mismatch.py), GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import load_file, save_file

from benchmarks.policies import batch_of
from rpg_megatron.checkpoints.megatron import load_weights
from rpg_megatron.config import Settings
from rpg_megatron.policy.fp8_emulation import E4M3, RECIPES, EmulatedProduct, round_whole
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.training.loss import build_aggregator, build_loss
from tests.support.rank_policy import checkpoint_policy, cut_unevenly, save_weights
from tests.support.ranks import ranks


def watch(layer: torch.nn.Module, operands_by_name: dict[str, torch.Tensor], name: str) -> None:
    """Record the operands of a layer's products; later ones replace earlier ones."""
    product = getattr(layer, "fp8", None)
    if product is None:
        return
    operands = product.for_output

    def watched(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = operands(*args)
        operands_by_name.update({f"{name} x": x, f"{name} w": w})
        return x, w

    product.for_output = watched


def measure(case: dict[str, Any], settings: Settings, mesh: Mesh) -> dict[str, Any]:
    policy = checkpoint_policy(settings, mesh, torch.device("cpu"))
    batch = batch_of([40, 90, 33, 64, 21], 256)
    packs = [policy.pack(micro) for micro in cut_unevenly(batch, case.get("microbatches", 1), mesh)]
    first = policy.chunks[0].decoder.layers[0]
    linear, attention = settings.model.path.name == "hybrid", first.self_attention
    inputs, output = ("in_proj", "out_proj") if linear else ("linear_qkv", "linear_proj")
    values: dict[str, Any] = {"raw w": getattr(attention, inputs).weight.detach().clone()}
    watch(getattr(attention, inputs), values, "qkv")
    watch(getattr(attention, output), values, "proj")

    def logprobs() -> torch.Tensor:
        parts = [p.split(v[0]) for p, v in zip(packs, policy.logprobs(packs), strict=True)]
        return torch.cat([part for pack in parts for _, part in pack])

    if case.get("load"):
        load_weights(Path(case["load"]), policy.chunks, 256)
    values["logp"] = logprobs()
    first_pass = {name: value.clone() for name, value in values.items()}
    values["logp again"] = logprobs()
    for _ in range(case.get("updates", 1)):
        with policy.updating():
            policy.update(packs, build_loss(settings), build_aggregator(settings), lr=0.0)
    products = {n: m for n, m in policy.chunks[0].named_modules() if isinstance(m, EmulatedProduct)}
    result = {
        **values,
        **first_pass,
        "gradients": {n: p.main_grad.clone() for n, p in policy.named_parameters()},
        "products": sorted(products),
        "scales": {n: m.scale for n, m in products.items() if hasattr(m, "scale")},
        "after": logprobs(),
    }
    if case.get("save"):
        if mesh.rank == 0:
            Path(case["save"]).mkdir()
        dist.barrier()
        save_weights(Path(case["save"]), policy.chunks)
    return result


@ranks(2)
def measure_all(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Score and update a fixed batch with emulated FP8; each rank writes what it has of each case."""
    cut, mesh = None, None
    for name, case in cases.items():
        settings = Settings.model_validate(case["settings"])
        if mesh is None or settings.parallel != cut:
            if mesh is not None:
                mpu.destroy_model_parallel()
            cut, mesh = settings.parallel, start_mesh(settings.parallel)
        torch.save(measure(case, settings, mesh), folder / f"{name}_{mesh.rank}.pt")


SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
}
"""128 and its multiples on each of two ranks."""
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""The first and the third layer have an in_proj of 2 x 336 rows, a multiple of 16."""


def settings_of(checkpoint: Path, recipe: str | None, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(checkpoint)},
        "data": {"path": "-"},
        "device": "cpu",
        "precision": {"dtype": "bfloat16", "fp8": recipe and {"recipe": recipe}},
        "objective": {"clip": None},
        "optimizer": {"clip_grad": 0.0},
        **sections,
    }


def run(folder: Path, cases: dict[str, dict[str, Any]], world: int) -> dict[str, list[dict[str, Any]]]:
    """Each rank's results, by case."""
    folder.mkdir()
    measure_all(folder, cases, world=world)
    return {n: [torch.load(folder / f"{n}_{r}.pt") for r in range(world)] for n in cases}


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]
) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("fp8")
    model = make_checkpoint(folder / "model", **SIZES)
    alone: dict[str, dict[str, Any]] = {"bf16": {"settings": settings_of(model, None)}}
    together: dict[str, dict[str, Any]] = {}
    # Delayed scales move from one micro-batch to the next.
    passes = {r: {"microbatches": 3, "updates": 2} if r == "delayed" else {} for r in RECIPES}
    for recipe in RECIPES:
        for recompute in ("none", "selective", "full"):
            settings = settings_of(model, recipe, memory={"recompute": recompute})
            alone[f"{recipe} {recompute}"] = {"settings": settings, **passes[recipe]}
    for name, sequence in (("TP2", False), ("TP2+SP", True)):
        for recipe in RECIPES:
            settings = settings_of(model, recipe, parallel={"tensor": 2, "sequence": sequence})
            together[f"{recipe} {name}"] = {"settings": settings, **passes[recipe]}
    data = settings_of(model, "delayed", parallel={"data": 2})
    together["delayed DP2"] = {"settings": data, "microbatches": 4}
    alone["delayed none"]["save"] = str(folder / "saved")
    alone["resumed"] = {
        "settings": settings_of(model, "delayed"),
        "microbatches": 3,
        "load": str(folder / "saved"),
    }
    alone["without"] = {"settings": settings_of(model, None), "load": str(folder / "saved")}
    bf16 = settings_of(model, "blockwise")
    bf16["precision"]["fp8"]["first_last_bf16"] = 1
    alone["ends in bf16"] = {"settings": bf16}
    hybrid = make_checkpoint(folder / "hybrid", family="qwen3_5", **SIZES, **LINEAR)
    weights = load_file(hybrid / "model.safetensors")
    for name, weight in weights.items():  # of short queries and keys the norms would amplify the rounding
        weight *= 12 if "conv1d" in name else 6 if "in_proj_qkv" in name else 1
        if "norm" in name and "linear_attn" not in name:
            weight.zero_()  # they multiply by 1 + weight
    save_file(weights, hybrid / "model.safetensors")
    for name, recipe in {"bf16": None, "tensorwise": "tensorwise", "delayed": "delayed"}.items():
        alone[f"hybrid {name}"] = {"settings": settings_of(hybrid, recipe), **passes.get(name, {})}
    full = settings_of(hybrid, "delayed", memory={"recompute": "full"})
    alone["hybrid delayed full"] = {"settings": full, **passes["delayed"]}
    alone["hybrid delayed"]["save"] = str(folder / "saved hybrid")
    alone["hybrid resumed"] = {
        "settings": settings_of(hybrid, "delayed"),
        "microbatches": 3,
        "load": str(folder / "saved hybrid"),
    }
    for recipe in ("tensorwise", "delayed"):
        settings = settings_of(hybrid, recipe, parallel={"tensor": 2, "sequence": True})
        together[f"hybrid {recipe} TP2+SP"] = {"settings": settings, **passes[recipe]}
    return run(folder / "one", alone, 1) | run(folder / "two", together, 2)


@pytest.mark.parametrize("layout", ["TP2", "TP2+SP"])
def test_operands_on_two_ranks_are_those_of_one(results: dict[str, Any], layout: str) -> None:
    for recipe in RECIPES:
        (single,), ranks = results[f"{recipe} none"], results[f"{recipe} {layout}"]
        for rank in ranks:  # tokens that are cut over ranks are gathered, with one scale or whole blocks
            real = min(len(rank["qkv x"]), len(single["qkv x"]))  # padding differs
            assert torch.equal(rank["qkv x"][:real], single["qkv x"][:real]), recipe
        rows = torch.cat([r["qkv w"] for r in ranks])
        columns = torch.cat([r["proj w"] for r in ranks], dim=1)
        equal = torch.equal(rows, single["qkv w"]) and torch.equal(columns, single["proj w"])
        assert equal == (recipe != "tensorwise")
        if recipe == "tensorwise":  # each rank has a scale of its own for its part
            parts = [round_whole(part, E4M3) for part in single["raw w"].chunk(2)]
            assert torch.equal(rows, torch.cat(parts))


def test_delayed_scales_are_agreed_upon(results: dict[str, Any]) -> None:
    (single,) = results["delayed none"]
    first = "decoder.layers.0.self_attention.linear_qkv.fp8"
    for layout in ("TP2", "TP2+SP", "DP2"):
        a, b = (rank["scales"] for rank in results[f"delayed {layout}"])
        assert all(torch.equal(a[n], b[n]) for n in a), layout
        assert all(torch.equal(a[n][1], single["scales"][n][1]) for n in a), layout  # of whole weights
        assert torch.equal(a[first][0], single["scales"][first][0]), layout
        if layout != "DP2":  # which has other micro-batches
            for name, scale in a.items():  # what deeper layers see differs by rounding
                assert (scale / single["scales"][name] - 1).abs().max() < 0.3, (layout, name)


def test_layouts_give_the_same_logprobs_but_for_rounding(results: dict[str, Any]) -> None:
    (plain,) = results["bf16"]
    for recipe in RECIPES:
        (single,) = results[f"{recipe} none"]
        from_bf16 = (single["logp"] - plain["logp"]).abs().mean()
        assert 0.01 < from_bf16 < 0.2, recipe
        for layout in ("TP2", "TP2+SP"):
            for rank in results[f"{recipe} {layout}"]:
                gap = (rank["logp"] - single["logp"]).abs().mean()
                assert gap < (2.0 if recipe == "tensorwise" else 1.0) * from_bf16, (recipe, layout)


def test_layouts_give_the_same_gradients_but_for_rounding(results: dict[str, Any]) -> None:
    """Gradients of the first norm, which depend on every product and on the sum over ranks."""
    name = "decoder.layers.0.input_layernorm.weight"
    for recipe in RECIPES:
        expected = results[f"{recipe} none"][0]["gradients"][name]
        for layout in ("TP2", "TP2+SP"):
            for rank in results[f"{recipe} {layout}"]:
                gap = (rank["gradients"][name] - expected).norm() / expected.norm()
                assert gap < 0.5, (recipe, layout)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_layers_and_second_passes_give_the_same_bits(results: dict[str, Any], recipe: str) -> None:
    (none,), (selective,), (full,) = (results[f"{recipe} {how}"] for how in ("none", "selective", "full"))
    for recomputed in (selective, full):
        for name, gradient in none["gradients"].items():
            assert torch.equal(gradient, recomputed["gradients"][name]), name
        assert torch.equal(none["after"], recomputed["after"])
        assert all(torch.equal(scale, recomputed["scales"][n]) for n, scale in none["scales"].items())
    assert torch.equal(none["logp"], none["logp again"])
    # Weights have not changed: without gradients the scales stay, and updates move them.
    assert torch.equal(none["logp"], none["after"]) == (recipe != "delayed")


def test_which_layers_are_emulated(results: dict[str, Any]) -> None:
    parts = ["mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv"]
    expected = [f"decoder.layers.{layer}.{part}.fp8" for layer in range(3) for part in parts]
    assert results["blockwise none"][0]["products"] == expected
    assert results["ends in bf16"][0]["products"] == expected[4:8]
    assert results["bf16"][0]["products"] == results["without"][0]["products"] == []


def test_delayed_scales_are_in_checkpoints(results: dict[str, Any]) -> None:
    (saved,), (resumed,) = results["delayed none"], results["resumed"]
    assert torch.equal(resumed["logp"], saved["after"])
    assert not torch.equal(resumed["logp"], saved["logp"])  # with scales of 1
    # A run without FP8 takes the checkpoint, too.
    assert torch.equal(results["without"][0]["logp"], results["bf16"][0]["logp"])


def test_linear_attention(results: dict[str, Any]) -> None:
    (plain,), (delayed,), (full,) = (
        results[f"hybrid {kind}"] for kind in ("bf16", "delayed", "delayed full")
    )
    mlp = ["mlp.linear_fc1", "mlp.linear_fc2"]
    softmax, linear = ["linear_proj", "linear_qkv"], ["in_proj", "out_proj"]
    parts = [[*mlp, *(f"self_attention.{name}" for name in names)] for names in (linear, softmax, linear)]
    assert delayed["products"] == [
        f"decoder.layers.{layer}.{part}.fp8" for layer, names in enumerate(parts) for part in names
    ]
    assert torch.equal(results["hybrid resumed"][0]["logp"], delayed["after"])
    assert not torch.equal(delayed["logp"], delayed["after"])
    for name, gradient in delayed["gradients"].items():
        assert torch.equal(gradient, full["gradients"][name]), name
    sections = [64, 64, 256, 256, 16, 16]  # queries, keys, values, gates, beta, alpha
    for recipe in ("tensorwise", "delayed"):
        (single,), ranks = results[f"hybrid {recipe}"], results[f"hybrid {recipe} TP2+SP"]
        from_bf16 = (single["logp"] - plain["logp"]).abs().mean()
        assert 0.001 < from_bf16 < 0.2, recipe
        first, equal = [part.chunk(2) for part in single["qkv w"].split(sections)], []
        for rank, result in enumerate(ranks):
            real = min(len(result["qkv x"]), len(single["qkv x"]))  # padding differs
            assert torch.equal(result["qkv x"][:real], single["qkv x"][:real]), recipe
            equal.append(torch.equal(result["qkv w"], torch.cat([halves[rank] for halves in first])))
            gap = (result["logp"] - single["logp"]).abs().mean()
            assert gap < (2.0 if recipe == "tensorwise" else 1.0) * from_bf16, recipe
        assert all(equal) == (recipe == "delayed")  # the rank without the largest weight has its own scale
    a, b = (rank["scales"] for rank in results["hybrid delayed TP2+SP"])
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert all(torch.equal(a[n][1], delayed["scales"][n][1]) for n in a)  # of whole weights
