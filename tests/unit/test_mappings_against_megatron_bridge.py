"""Our mappings and Megatron-Bridge's put the same element of a checkpoint at the same place of each shard.

Why: the other tests of mappings share our idea of Megatron's formats. Here every parameter of every tensor-
and expert-parallel rank is compared with another converter, under the names of Megatron's local layers and
under Transformer Engine's. Not covered: pipeline stages, tied embeddings, families that Megatron-Bridge lacks
(``NOT_THERE``), and whether checkpoints have these tensors (tests/integration/test_convert_tools.py). Skipped
without ``make .megatron-bridge``.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from rpg_megatron.config import read_model_shape
from rpg_megatron.models.boxes import Box, Piece
from rpg_megatron.models.registry import mapping_for
from tests.support.megatron_bridge import WHEEL, MegatronBridge
from tests.support.megatron_shards import grid, stage_shapes
from tests.support.tiny_models import CONFIGS, MOONLIGHT

pytestmark = pytest.mark.skipif(not (WHEEL / ".complete").exists(), reason="run make .megatron-bridge")

COMPARED = {
    "llama": 105,
    "mistral": 105,
    "qwen2": 119,
    "qwen3": 133,
    "qwen3_5": 147,
    "qwen3_moe": 247,
    "qwen3_5_moe": 303,
    "qwen3_next": 303,
    "olmoe": 247,
    "glm4_moe": 225,
    "deepseek_v3": 253,
    "moonlight": 225,
    "glm4_moe_lite": 253,
}
"""Family -> parameters of two layers on all ranks of LAYOUTS."""
ALIKE = {"moonlight": ("deepseek_v3", MOONLIGHT)}
"""Not of ``CONFIGS`` -> the family, and what is different."""
NOT_THERE = {"granite", "olmo3", "phi3", "qwen2_moe"}
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 53}
"""Two and four ranks pad the vocabulary; four cut a query group in two."""
LAYOUTS = [(1, 1, 1), (2, 2, 1), (4, 2, 2)]
"""Tensor-parallel ranks, expert-parallel size, tensor-parallel size of each expert."""

type Change = Callable[[list[Piece]], list[Piece]]


def compare(folder: Path, family: str, *, fused: bool, change: Change = list) -> tuple[int, list[str]]:
    """Number of parameters on all ranks; those that differ, with the first element that does.

    fused: names of Transformer Engine's layers. change: applied to the pieces of each parameter.
    """
    family, changes = ALIKE.get(family, (family, {}))
    sizes = SIZES | ({"num_key_value_heads": 8} if "kv_lora_rank" in CONFIGS[family] else {})
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | sizes | changes))
    mapping = mapping_for(read_model_shape(folder))
    bridge = MegatronBridge(AutoConfig.from_pretrained(folder), mapping.hf_tensors())
    count, problems = 0, []
    for tensor, expert, expert_tensor in LAYOUTS:
        for place in grid(mapping.shape, tensor, 1, expert=expert, expert_tensor=expert_tensor):
            for name, shape in stage_shapes(mapping, place, 1, fused=fused).items():
                ours = bridge.origins_of(change(mapping.pieces(name, place)), shape)
                theirs = bridge.origins(name, shape, place)
                count += 1
                where = f"{name} on rank {place.tensor_rank} of {tensor}"
                if ours.shape != theirs.shape:
                    problems.append(f"{where}: {list(ours.shape)} here, {list(theirs.shape)} there")
                elif not ours.equal(theirs):
                    at = tuple((ours != theirs).nonzero()[0].tolist())
                    here, there = (bridge.element(int(x[at])) for x in (ours, theirs))
                    problems.append(f"{where}, element {list(at)}: {here} here, {there} there")
    return count, problems


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", COMPARED)
def test_every_element_of_every_shard(tmp_path: Path, family: str, fused: bool) -> None:
    assert compare(tmp_path, family, fused=fused) == (COMPARED[family], [])


def test_no_family_is_left_out() -> None:
    assert set(CONFIGS) == {*COMPARED, *NOT_THERE} - set(ALIKE)


def swap(first: str, second: str) -> Change:
    """These parts of HF names for each other."""
    other = {first: second, second: first}

    def change(pieces: list[Piece]) -> list[Piece]:
        pattern = f"{first}|{second}"
        return [replace(p, hf_name=re.sub(pattern, lambda m: other[m[0]], p.hf_name)) for p in pieces]

    return change


def reverse_groups(pieces: list[Piece]) -> list[Piece]:
    boxes = [p.hf for p in pieces if ".q_proj." in p.hf_name]
    return [replace(p, hf=boxes.pop()) if ".q_proj." in p.hf_name else p for p in pieces]


def columns_of_rank_0(pieces: list[Piece]) -> list[Piece]:
    return [replace(p, hf=Box((p.hf.start[0], *(0 for _ in p.hf.start[1:])), p.hf.extent)) for p in pieces]


GATE_AND_UP = swap("gate_proj", "up_proj")
FAULTS: dict[str, tuple[str, Change, str, int, str]] = {
    # In two layers: on each of seven ranks.
    "gate and up": ("llama", GATE_AND_UP, "linear_fc1", 2 * 7, r"up_proj\.weight\[0\] here, .*gate_proj"),
    # All eight experts on the only rank, four on each of two, parts of four on each of four.
    "experts": ("qwen3_moe", GATE_AND_UP, "linear_fc1", 2 * (8 + 8 + 16), r"\.experts\.0\.gate_proj"),
    # Weight and bias; of four ranks, two hold queries alone.
    "key and value": ("qwen2", swap("k_proj", "v_proj"), "linear_qkv", 2 * 2 * (1 + 2 + 2), "k_proj.* there"),
    # The only rank has both groups.
    "query groups": ("qwen3", reverse_groups, r"linear_qkv\.weight", 2, r"\[8192\] here, .*\[0\] there"),
    # Two matrices, on all ranks but the first.
    "columns": ("llama", columns_of_rank_0, "linear_(proj|fc2)", 2 * 2 * (1 + 3), r"rank 1 of 2, .*\[32\]"),
}
"""Family, fault, parameters that differ and their number, part of the first message."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str) -> None:
    family, change, where, count, message = FAULTS[fault]
    _, problems = compare(tmp_path, family, fused=False, change=change)
    assert len([p for p in problems if re.search(where, p)]) == len(problems) == count
    assert re.search(message, problems[0])
