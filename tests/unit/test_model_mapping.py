"""Every element of every HF tensor has exactly one place in the Megatron shards; round trips are bit-exact.

The maps are checked against independently made shards (``megatron_shards.megatron_value``). Not covered
here: that real GPTModels have these parameter names and shapes (tests/distributed), and that vLLM reads them
right (tests/integration).
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rpg_megatron.bridge import publisher
from rpg_megatron.checkpoints.hf_export import group_shards
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.models.boxes import Box, MappingError, Piece, check_cover
from rpg_megatron.models.partition import ONE_RANK, ExpertShard, RankCoordinates
from rpg_megatron.models.placement import RankShards, assign_owners
from rpg_megatron.models.registry import check_experts, check_layout, mapping_for
from tests.support.megatron_shards import grid, rank_layers, stage_shapes, stage_values
from tests.support.tiny_models import FAMILIES, TINY, TINY_MOE, random_state_dict, tiny_shape

MAPPED = [family for family in FAMILIES if family not in ("granite", "mistral")]
"""Granite and Mistral have Llama's tensors."""
HEADS = [(1, 6, 2), (2, 6, 2), (4, 12, 4), (4, 12, 2), (4, 12, 1)]
"""Ranks, query heads, groups: several groups on a rank, one, and one cut over two ranks and over four."""
LAYOUTS = [(*heads, p) for heads in HEADS for p in (1, 2, 3, 4)]
WIDE = [(8, 16, 4), (8, 24, 8), (8, 24, 2), *((t, 2 * t, t) for t in range(1, 9))]
"""Likewise, up to eight ranks: of the first and third a group is cut over two and over four."""
DEEP = [(p, v, p * v + more) for p in range(1, 9) for v in range(1, 4 if p > 1 else 2) for more in (0, 1, p)]
"""Pipeline ranks, virtual stages of each, layers: dividing evenly, one over, and one over for each rank."""


@pytest.mark.parametrize("family", MAPPED)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tensor", "queries", "groups", "pipeline"), LAYOUTS)
@pytest.mark.parametrize("vocab_multiple", [1, 16])
def test_hf_to_shards_and_back_is_bit_exact(tensor, queries, groups, pipeline, tied, vocab_multiple, family):
    heads = {"num_heads": queries, "num_kv_heads": groups}
    shape = tiny_shape(family, tied_embeddings=tied, **heads)
    check_round_trip(shape, tensor, pipeline, 1, vocab_multiple, fused=False)


@pytest.mark.parametrize("family", MAPPED)
@pytest.mark.parametrize(("tied", "fused"), [(False, False), (True, True)])
@pytest.mark.parametrize(("tensor", "queries", "groups"), WIDE)
def test_up_to_eight_tensor_parallel_ranks(tensor, queries, groups, tied, family, fused):
    # 840: every number up to 8 divides it.
    sizes = {"num_heads": queries, "num_kv_heads": groups, "ffn_hidden_size": 840, "hidden_size": 6}
    shape = tiny_shape(family, tied_embeddings=tied, num_layers=5, **sizes)
    check_round_trip(divided_by(tensor, shape), tensor, 2, 2, 16, fused=fused)


def divided_by(tensor, shape):
    """The shape with linear heads and experts that this number of ranks can share."""
    if shape.linear is not None:
        shape = replace(shape, linear=replace(shape.linear, key_heads=tensor, value_heads=2 * tensor))
    if shape.experts is not None:
        experts = replace(shape.experts, ffn_hidden_size=2 * tensor, shared_ffn_hidden_size=3 * tensor)
        shape = replace(shape, experts=experts)
    return shape


# How layers are dealt out does not depend on the family: the others repeat the proof.
@pytest.mark.parametrize(
    "family", [f if f == "qwen3" else pytest.param(f, marks=pytest.mark.long) for f in MAPPED]
)
@pytest.mark.parametrize("tied", [False, True])
def test_up_to_eight_stages_each_virtual_or_not(tied, family):
    for i, (pipeline, virtual, layers) in enumerate(DEEP):
        shape = tiny_shape(family, tied_embeddings=tied, num_layers=layers, hidden_size=4, ffn_hidden_size=4)
        check_round_trip(shape, 2, pipeline, virtual, 1, fused=i % 2 == 0)


@pytest.mark.long
@pytest.mark.parametrize("family", MAPPED)
@pytest.mark.parametrize(("tensor", "queries", "groups"), WIDE)
def test_every_tensor_and_pipeline_size_together(tensor, queries, groups, family):
    heads = {"num_heads": queries, "num_kv_heads": groups, "ffn_hidden_size": 840, "hidden_size": 6}
    for pipeline, virtual, layers in DEEP:
        shape = tiny_shape(family, tied_embeddings=bool(layers % 2), num_layers=layers, **heads)
        check_round_trip(divided_by(tensor, shape), tensor, pipeline, virtual, 4, fused=pipeline % 2 == 0)


EXPERTS = [
    (1, 1, 1, 1),
    (1, 2, 2, 1),
    (1, 4, 4, 1),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (2, 2, 4, 1),
    (2, 2, 2, 2),
    (2, 4, 4, 2),
    (4, 2, 2, 4),
    (4, 1, 1, 2),
    (1, 8, 8, 1),
    (2, 4, 2, 1),
]
"""Tensor and data ranks, expert-parallel size, tensor-parallel size of each expert."""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("tensor", "data", "expert", "expert_tensor"), EXPERTS)
@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_experts_are_shared_out(tensor, data, expert, expert_tensor, pipeline, virtual, fused):
    shape = TINY_MOE
    ranks = {"data": data, "expert": expert, "expert_tensor": expert_tensor}
    check_round_trip(shape, tensor, pipeline, virtual, 4, fused=fused, **ranks)


def test_a_rank_knows_its_own_experts_and_no_others():
    layout = mapping_for(TINY_MOE)
    at = RankCoordinates(experts=ExpertShard(4, 1))
    name = "decoder.layers.2.mlp.experts.local_experts.{}.linear_fc2.weight"
    (piece,) = layout.pieces(name.format(1), at)
    assert piece.hf_name == "model.layers.2.mlp.experts.3.down_proj.weight"
    with pytest.raises(MappingError, match="an expert-parallel rank holds 2 of the 8 experts"):
        layout.local_shape(name.format(2), at)
    with pytest.raises(MappingError, match="layer 2 of this qwen3_moe model has experts"):
        layout.local_shape("decoder.layers.2.mlp.linear_fc1.weight", at)
    with pytest.raises(MappingError, match="no such parameter"):
        layout.local_shape("decoder.layers.0.mlp.router.weight", at)


def test_ranks_with_other_experts_are_not_replicas():
    layout = mapping_for(TINY_MOE)
    places = grid(layout.shape, 2, 1, data=4, expert=4)
    holdings = [RankShards(p, tuple(stage_shapes(layout, p, 1).items())) for p in places]
    owners = assign_owners(layout, holdings)
    assert {s.rank for s in owners["model.embed_tokens.weight"]} == {0, 1}
    assert [owners[f"model.layers.1.mlp.experts.{e}.up_proj.weight"][0].rank for e in range(8)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3)
    ]
    with pytest.raises(
        MappingError, match=r"experts\.4\.gate_proj\.weight: 576 of 576 elements are held by no"
    ):
        assign_owners(layout, [h for h in holdings if h.coordinates.experts.rank != 2])


def test_replicas_of_a_publish_plan_hold_the_same_experts(monkeypatch):
    """Two tensor, four data, four expert-parallel ranks: rank r + 4 holds what rank r holds, and no other."""
    layout = mapping_for(TINY_MOE)
    places = grid(layout.shape, 2, 1, data=4, expert=4)
    values = [stage_values(layout, p, 1, random_state_dict(layout)) for p in places]
    shards = [
        RankShards(p, tuple((n, tuple(v.shape)) for n, v in params.items()))
        for p, params in zip(places, values, strict=True)
    ]
    monkeypatch.setattr(publisher, "gather_objects", lambda value, kind: [(s, "") for s in shards])
    monkeypatch.setattr(publisher, "run_together", lambda step: step())
    plan = publisher.make_publish_plan(places[5], values[5], layout)
    assert plan.replicas == {0: (0, 4), 1: (1, 5), 2: (2, 6), 3: (3, 7)}
    assert plan.ranks == [0, 1, 2, 3]
    sent = {rank: sum(piece.hf.numel for *_, piece in plan.slices_of(rank)) for rank in plan.ranks}
    assert sum(sent.values()) == sum(Box.whole(s).numel for s in layout.hf_tensors().values())
    experts_numel = 3 * 24 * 24 * 2 * 3  # two experts in each of three layers
    assert sent[2] == sent[3] == experts_numel < sent[0]
    # Everything but experts lies on ranks 2 and 3, too, and may be read there.
    others = plan.shared["model.layers.1.self_attn.o_proj.weight", 1]
    assert [s.rank for s in others] == [3]
    assert not any(".experts." in name for name, _ in plan.shared)


@pytest.mark.parametrize(
    ("parallel", "device", "message"),
    [
        ({"data": 3, "expert": 3}, "cuda", "expert=3 does not divide the model's 8 experts"),
        ({"tensor": 2}, "cuda", "tensor=2 with experts needs sequence parallelism"),
        ({"data": 4, "expert": 2, "expert_tensor": 2}, "cpu", "expert_tensor=2 on a CPU needs expert=1"),
        ({"data": 2, "expert_tensor": 2}, "cpu", r"must divide tensor \(1\); set it to 1"),
        ({"data": 4, "expert": 2, "expert_tensor": 2}, "cuda", None),
        ({"tensor": 2, "sequence": True, "expert_tensor": 2}, "cpu", None),
    ],
)
def test_layouts_that_experts_do_not_allow(parallel, device, message):
    shape = TINY_MOE
    if message is None:
        check_experts(shape, ParallelSettings(**parallel), device=device)
        return
    with pytest.raises(UserError, match=message):
        check_experts(shape, ParallelSettings(**parallel), device=device)


def test_a_pipeline_rank_without_experts_is_refused():
    shape = replace(TINY_MOE, experts=replace(TINY_MOE.experts, layers=(2, 3)))
    with pytest.raises(UserError, match="pipeline=2: all layers of pipeline rank 0 are dense"):
        check_experts(shape, ParallelSettings(pipeline=2), device="cpu")
    check_experts(shape, ParallelSettings(pipeline=2, virtual=2), device="cpu")
    check_experts(TINY_MOE, ParallelSettings(pipeline=2), device="cpu")
    with pytest.raises(UserError, match="pipeline rank 0 are dense"):
        check_experts(TINY_MOE, ParallelSettings(pipeline=4), device="cpu")


def test_expert_parallelism_of_a_dense_model_is_refused():
    with pytest.raises(UserError, match=r"expert=2: the model has no experts; set it to 1"):
        check_experts(TINY, ParallelSettings(data=2, expert=2), device="cuda")


def test_columns_of_an_expert_must_divide():
    shape = TINY_MOE
    with pytest.raises(UserError, match="expert_tensor=16 does not divide the 24 feed-forward columns"):
        check_layout(shape, 1, 1, expert_tensor=16)
    with pytest.raises(UserError, match=r"tensor=16 does not divide .* 24 feed-forward columns of an expert"):
        check_layout(replace(shape, num_heads=16, num_kv_heads=16), 16, 1)


def check_round_trip(shape, tensor, pipeline, virtual, vocab_multiple, *, fused, **ranks):
    """Independently made shards match the mapping, and together they are the checkpoint."""
    layout = mapping_for(shape)
    if shape.wide_qk_norm and shape.num_kv_heads % tensor:
        with pytest.raises(UserError, match="key/value heads, whose norm is over all of them"):
            check_layout(shape, tensor, pipeline, virtual)
        return
    check_layout(shape, tensor, pipeline, virtual)
    sd = random_state_dict(layout)
    places = grid(shape, tensor, pipeline, vocab_multiple, **ranks)
    shards = {p.rank: stage_values(layout, p, pipeline, sd, virtual, fused) for p in places}
    for place in places:
        for name, value in shards[place.rank].items():
            built = torch.zeros_like(value)
            assert tuple(value.shape) == layout.local_shape(name, place)
            for piece in layout.pieces(name, place):
                built[piece.local.slices()] = sd[piece.hf_name][piece.hf.slices()]
            assert torch.equal(built, value), (place, name)
    holdings = [
        RankShards(p, tuple(stage_shapes(layout, p, pipeline, virtual, fused).items())) for p in places
    ]
    sources = assign_owners(layout, holdings)
    for name, expected in sd.items():
        joined = torch.full_like(expected, float("nan"))
        for s in sources[name]:
            joined[s.piece.hf.slices()] = shards[s.rank][s.param][s.piece.local.slices()]
        assert torch.equal(joined, expected), name


def test_the_last_stages_tied_copy_loads_but_is_not_a_source():
    layout = mapping_for(tiny_shape(tied_embeddings=True))
    places = grid(layout.shape, 2, 2)
    assert "output_layer.weight" in stage_shapes(layout, places[3], 2)
    holdings = [RankShards(p, tuple(stage_shapes(layout, p, 2).items())) for p in places]
    owners = {s.param for s in assign_owners(layout, holdings)["model.embed_tokens.weight"]}
    assert owners == {"embedding.word_embeddings.weight"}


@pytest.mark.parametrize("family", [f for f in MAPPED if f != "olmo3"])
def test_fused_norm_names_map_to_the_same_tensors(family):
    layout = mapping_for(tiny_shape(family))
    at = RankCoordinates(tensor=2, tensor_rank=1)
    projection = "in_proj" if layout.shape.is_linear(1) else "linear_qkv"
    for fused, plain in (
        (f"self_attention.{projection}.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        assert layout.pieces(f"decoder.layers.1.{fused}", at) == layout.pieces(
            f"decoder.layers.1.{plain}", at
        )


@pytest.mark.parametrize(
    ("family", "has"),
    [
        ("qwen3", {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}),
        ("qwen2", {"self_attention.linear_qkv.bias"}),
        ("llama", set()),
        ("phi3", set()),
    ],
)
def test_a_family_knows_its_own_parameters_and_no_others(family, has):
    layout = mapping_for(tiny_shape(family))
    for name in (
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_qkv.bias",
    ):
        if name in has:
            assert layout.local_shape(f"decoder.layers.0.{name}", ONE_RANK)
        else:
            with pytest.raises(MappingError, match=f"the {family} mapping has no such parameter"):
                layout.local_shape(f"decoder.layers.0.{name}", ONE_RANK)


def test_chunks_of_virtual_stages_lie_apart():
    shape = tiny_shape(num_layers=10)
    assert shape.stage_layers(4 * 2) == [1, 2, 2, 1, 1, 1, 1, 1]
    layers = [rank_layers(shape, 4, 2, rank) for rank in range(4)]
    assert layers == [[0, 6], [1, 2, 7], [3, 4, 8], [5, 9]]


def test_layers_over_stages():
    shape = tiny_shape(num_layers=11)
    for pipeline in range(1, 12):
        layers = shape.stage_layers(pipeline)
        assert len(layers) == pipeline
        assert sum(layers) == 11
        assert max(layers) - min(layers) <= 1
        assert layers[-1] == min(layers), "the last stage has the output layer to carry"
    assert shape.stage_layers(4) == [3, 3, 3, 2]
    assert shape.stage_layers(3) == [4, 4, 3]
    assert tiny_shape(num_layers=4).stage_layers(3) == [1, 2, 1]
    for pipeline in (0, 12):
        with pytest.raises(ValueError, match=f"11 layers cannot fill {pipeline} stages"):
            shape.stage_layers(pipeline)


def test_replicas_are_not_sources_and_a_lost_stage_is_named():
    layout = mapping_for(TINY)
    places = grid(TINY, 2, 2)
    holdings = [RankShards(p, tuple(stage_shapes(layout, p, 2).items())) for p in places]
    copies = [
        RankShards(replace(h.coordinates, rank=h.coordinates.rank + 4, data_rank=1), h.params)
        for h in holdings
    ]
    sources = assign_owners(layout, [*copies, *holdings])
    assert {s.rank for parts in sources.values() for s in parts} == {0, 1, 2, 3}
    with pytest.raises(MappingError, match=r"model\.layers\.2\.\S+: \d+ of \d+ elements are held by no rank"):
        assign_owners(layout, holdings[:2])


def test_wrong_shapes_and_names_name_rank_and_parameter():
    layout = mapping_for(TINY)
    (place,) = grid(TINY, 1, 1)
    shapes = stage_shapes(layout, place, 1)
    wrong = {**shapes, "decoder.layers.1.mlp.linear_fc2.weight": (24, 20)}
    with pytest.raises(
        MappingError, match=r"rank 0: decoder\.layers\.1\.mlp\.linear_fc2\.weight .*\(24, 20\)"
    ):
        assign_owners(layout, [RankShards(place, tuple(wrong.items()))])
    with pytest.raises(MappingError, match=r"decoder\.layers\.0\.mlp\.router\.weight"):
        assign_owners(layout, [RankShards(place, (("decoder.layers.0.mlp.router.weight", (1,)),))])
    beyond = {**shapes, "decoder.layers.4.input_layernorm.weight": (24,)}
    with pytest.raises(MappingError, match="numbered through the whole model"):
        assign_owners(layout, [RankShards(place, tuple(beyond.items()))])


def test_cover_check_finds_gaps_overlaps_and_overhang():
    halves = [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))]
    check_cover("t", (4, 6), halves)
    check_cover("scalar", (), [Box((), ())])
    with pytest.raises(MappingError, match="t: 12 of 24 elements are held by no rank"):
        check_cover("t", (4, 6), halves[:1])
    with pytest.raises(MappingError, match=r"t: .* overlap"):
        check_cover("t", (4, 6), [*halves, Box((3, 5), (1, 1))])
    with pytest.raises(MappingError, match=r"t: .* outside"):
        check_cover("t", (4, 6), [Box((0, 0), (5, 6))])


def test_box_arithmetic():
    a, b = Box((2, 0), (4, 8)), Box((4, 6), (8, 8))
    assert a.intersect(b) == Box((4, 6), (2, 2))
    assert Box((4, 6), (2, 2)).offset_in(a) == (2, 6)
    assert a.intersect(Box((6, 0), (1, 8))) is None
    with pytest.raises(ValueError, match="inside"):
        b.offset_in(a)
    piece = Piece("t", Box((10, 0), (4, 8)), Box((0, 0), (4, 8)))
    assert piece.cut(Box((12, 2), (9, 3))) == Piece("t", Box((12, 2), (2, 3)), Box((2, 2), (2, 3)))
    assert piece.cut(Box((0, 0), (10, 8))) is None


def test_shard_grouping_keeps_order_and_bounds_size():
    assert group_shards({"a": 4, "b": 4, "c": 9, "d": 1, "e": 7}, 8) == [["a", "b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize(
    ("changes", "tensor", "pipeline", "virtual", "message"),
    [
        (
            {"num_heads": 12},
            3,
            1,
            1,
            "3 neither divides the model's 4 key/value heads nor is a mult",
        ),
        (
            {"num_heads": 16, "num_kv_heads": 1},
            8,
            1,
            1,
            "tensor=8 does not divide the model's 108 query, key and value rows",
        ),
        ({"num_kv_heads": 8, "num_heads": 8}, 3, 1, 1, "does not divide the model's 8 attention heads"),
        ({"ffn_hidden_size": 41}, 2, 1, 1, "41 feed-forward columns"),
        ({}, 1, 5, 1, "4 layers, fewer than pipeline=5: each stage needs one"),
        ({}, 1, 2, 3, "4 layers, fewer than pipeline=2 x virtual=3: each stage needs one"),
        ({}, 1, 2, 0, "parallel sizes must be at least 1, got tensor=1, pipeline=2, virtual=0"),
        ({}, 3, 5, 1, r"attention heads.*key/value heads.*layers.*that fit this model: 1, 2, 4, 8"),
        (
            {"num_heads": 6, "num_kv_heads": 2},
            4,
            1,
            1,
            r"tensor=4 does not divide the model's 6 attention heads \(.* that fit this model: 1, 2\)",
        ),
    ],
)
def test_parallel_sizes_that_do_not_fit_are_all_listed(changes, tensor, pipeline, virtual, message):
    with pytest.raises(UserError, match=message):
        check_layout(tiny_shape(**changes), tensor, pipeline, virtual)


def test_layouts_do_not_import_torch():
    code = (
        "import sys, rpg_megatron.checkpoints.hf_files, rpg_megatron.models.registry; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'safetensors', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
