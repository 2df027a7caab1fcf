"""Emulated FP8 in a whole policy: what several ranks round is what Transformer Engine's would round.

Proved: under tensor (and sequence) parallelism blocks are those of one rank, bit for bit; a tensor's own
scale is taken on each rank for its part of the weights, over all of them for tokens that are cut over ranks;
delayed scales are the same on all ranks that share a layer, and those of one rank. Recomputed layers give the
same gradients, bit for bit; micro-batches, checkpoints and layers that stay bfloat16 do as they should.
Not covered: how a recipe's numbers compare with bfloat16 (benchmarks/mismatch.py), GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rpg_megatron.policy.fp8_emulation import E4M3, RECIPES, round_whole
from tests.support.ranks import run_ranks

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
    """Of each case, what each rank found."""
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks("tests.distributed.fp8_worker", world, folder)
    return {n: [torch.load(folder / f"{n}_{r}.pt") for r in range(world)] for n in cases}


@pytest.fixture(scope="module")
def found(
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
    return run(folder / "one", alone, 1) | run(folder / "two", together, 2)


@pytest.mark.parametrize("layout", ["TP2", "TP2+SP"])
def test_operands_on_two_ranks_are_those_of_one(found: dict[str, Any], layout: str) -> None:
    for recipe in RECIPES:
        (one,), ranks = found[f"{recipe} none"], found[f"{recipe} {layout}"]
        for rank in ranks:  # tokens that are cut over ranks are gathered, with one scale or whole blocks
            real = min(len(rank["qkv x"]), len(one["qkv x"]))  # what fills micro-batches up differs
            assert torch.equal(rank["qkv x"][:real], one["qkv x"][:real]), recipe
        rows = torch.cat([r["qkv w"] for r in ranks])
        columns = torch.cat([r["proj w"] for r in ranks], dim=1)
        alike = torch.equal(rows, one["qkv w"]) and torch.equal(columns, one["proj w"])
        assert alike == (recipe != "tensorwise")
        if recipe == "tensorwise":  # each rank has a scale of its own for its part
            parts = [round_whole(part, E4M3) for part in one["raw w"].chunk(2)]
            assert torch.equal(rows, torch.cat(parts))


def test_delayed_scales_are_agreed_upon(found: dict[str, Any]) -> None:
    (one,) = found["delayed none"]
    first = "decoder.layers.0.self_attention.linear_qkv.fp8"
    for layout in ("TP2", "TP2+SP", "DP2"):
        a, b = (rank["scales"] for rank in found[f"delayed {layout}"])
        assert all(torch.equal(a[n], b[n]) for n in a), layout
        assert all(torch.equal(a[n][1], one["scales"][n][1]) for n in a), layout  # of whole weights
        assert torch.equal(a[first][0], one["scales"][first][0]), layout
        if layout != "DP2":  # which has other micro-batches
            for name, scale in a.items():  # what deeper layers see differs by rounding
                assert (scale / one["scales"][name] - 1).abs().max() < 0.3, (layout, name)


def test_layouts_give_the_same_logprobs_but_for_rounding(found: dict[str, Any]) -> None:
    (plain,) = found["bf16"]
    for recipe in RECIPES:
        (one,) = found[f"{recipe} none"]
        from_bf16 = (one["logp"] - plain["logp"]).abs().mean()
        assert 0.01 < from_bf16 < 0.2, recipe
        for layout in ("TP2", "TP2+SP"):
            for rank in found[f"{recipe} {layout}"]:
                apart = (rank["logp"] - one["logp"]).abs().mean()
                assert apart < (2.0 if recipe == "tensorwise" else 1.0) * from_bf16, (recipe, layout)


def test_layouts_give_the_same_gradients_but_for_rounding(found: dict[str, Any]) -> None:
    """Of the first norm, behind every product; without the sum over ranks it would be another one."""
    name = "decoder.layers.0.input_layernorm.weight"
    for recipe in RECIPES:
        wanted = found[f"{recipe} none"][0]["gradients"][name]
        for layout in ("TP2", "TP2+SP"):
            for rank in found[f"{recipe} {layout}"]:
                apart = (rank["gradients"][name] - wanted).norm() / wanted.norm()
                assert apart < 0.5, (recipe, layout)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_layers_and_second_passes_give_the_same_bits(found: dict[str, Any], recipe: str) -> None:
    (none,), (selective,), (full,) = (found[f"{recipe} {how}"] for how in ("none", "selective", "full"))
    for other in (selective, full):
        for name, gradient in none["gradients"].items():
            assert torch.equal(gradient, other["gradients"][name]), name
        assert torch.equal(none["after"], other["after"])
        assert all(torch.equal(scale, other["scales"][n]) for n, scale in none["scales"].items())
    assert torch.equal(none["logp"], none["logp again"])
    # Weights have not changed: without gradients the scales stay, and updates move them.
    assert torch.equal(none["logp"], none["after"]) == (recipe != "delayed")


def test_which_layers_are_emulated(found: dict[str, Any]) -> None:
    parts = ["mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv"]
    wanted = [f"decoder.layers.{layer}.{part}.fp8" for layer in range(3) for part in parts]
    assert found["blockwise none"][0]["products"] == wanted
    assert found["ends in bf16"][0]["products"] == wanted[4:8]
    assert found["bf16"][0]["products"] == found["without"][0]["products"] == []


def test_delayed_scales_are_in_checkpoints(found: dict[str, Any]) -> None:
    (saved,), (resumed,) = found["delayed none"], found["resumed"]
    assert torch.equal(resumed["logp"], saved["after"])
    assert not torch.equal(resumed["logp"], saved["logp"])  # with scales of 1
    # A run without FP8 takes the checkpoint, too.
    assert torch.equal(found["without"][0]["logp"], found["bf16"][0]["logp"])
