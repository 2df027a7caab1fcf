"""Settings of adapters, their mapping, and what engines are started with.

Why: a rank, a target or a cut that is wrong trains something else than the user asked for. The numbers are
proved by tests/distributed/test_lora_layouts and tests/integration/test_lora_engine.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rpg_megatron.bridge.publisher import make_publish_plan
from rpg_megatron.config import ModelShape, Settings, UserError
from rpg_megatron.config.lora import ENGINE_RANKS, LoraSettings
from rpg_megatron.config.settings import make_settings
from rpg_megatron.engine.command import engine_command
from rpg_megatron.launcher.layer_checks import check_layers
from rpg_megatron.launcher.preflight import check_lora
from rpg_megatron.models.boxes import MappingError
from rpg_megatron.models.lora import AdapterMapping, split_parameters, with_adapters
from rpg_megatron.models.partition import ONE_RANK, RankCoordinates
from rpg_megatron.models.placement import RankShards, assign_owners
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.training.mismatch import check_known_adapters
from rpg_megatron.training.run import RankRun
from tests.support.layouts import make_batch
from tests.support.tiny_models import TINY, TINY_MOE, config_of, tiny_shape, write_checkpoint

BASE: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "unused"},
    "device": "cpu",
    "precision": {"dtype": "float32"},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
HYBRID = tiny_shape("qwen3_5", prefix="model.language_model.")
NEXT = tiny_shape("qwen3_next")


def settings_with(lora: dict[str, Any] | None, **more: Any) -> Settings:
    return make_settings(BASE | {"lora": lora} | more, None, "run.yaml")


def test_the_scale_is_that_of_peft() -> None:
    assert LoraSettings(rank=16, alpha=32).scale == 2
    assert LoraSettings(rank=16, alpha=32, rslora=True).scale == 8
    assert LoraSettings(targets=("lm_head", "o_proj", "q_proj")).names == ("q_proj", "o_proj", "lm_head")
    assert "lm_head" not in LoraSettings().names  # PEFT's all-linear leaves it out, too
    assert [LoraSettings(rank=r).engine_rank for r in (1, 2, 8, 9, 200, 512)] == [1, 8, 8, 16, 256, 512]
    assert tuple(sorted(ENGINE_RANKS)) == ENGINE_RANKS


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        *((TINY, targets) for targets in ("all-linear", ("k_proj", "down_proj"))),
        *((TINY, targets) for targets in (("q_proj", "lm_head"), ("lm_head",))),
        *((HYBRID, targets) for targets in ("all-linear", ("q_proj", "in_proj_qkv"), ("in_proj_a",))),
        *(
            (NEXT, targets)
            for targets in (("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"), ("in_proj_ba",))
        ),
    ],
)
def test_ranks_hold_every_element_once(shape: ModelShape, tensor: int, pipeline: int, targets: Any) -> None:
    mapping = AdapterMapping(shape, LoraSettings(rank=3, targets=targets))
    ranks = []
    for stage in range(pipeline):
        layers = range(stage * shape.num_layers // pipeline, (stage + 1) * shape.num_layers // pipeline)
        for cut in range(tensor):
            place = RankCoordinates(
                rank=len(ranks),
                tensor=tensor,
                tensor_rank=cut,
                pipeline_rank=stage,
                vocab_multiple=5,  # 53 tokens: 55, 60 and 60 rows
            )
            ends = {"first": stage == 0, "last": stage == pipeline - 1}
            shapes = mapping.stage_params(place, layers=layers, **ends)
            ranks.append(RankShards(place, tuple(shapes.items())))
    owners = assign_owners(mapping, ranks)  # checks that the slices cover each tensor once
    names = list(owners)
    heads = ["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"]
    adapted = {name.removesuffix("weight") for name in mapping_for(shape).hf_tensors()}
    adapted = {name for name in adapted if name.split(".")[-2] in mapping.lora.names}
    assert set(names) == {f"base_model.model.{name}lora_{x}.weight" for name in adapted for x in "AB"}
    prefix = f"base_model.model.{shape.prefix}layers."
    assert all(
        (name.startswith(prefix) and name.endswith((".lora_A.weight", ".lora_B.weight"))) or name in heads
        for name in names
    )
    assert list(mapping.hf_tensors())[-2:] == heads or not mapping.on_output_layer
    cut_names = {name.split(".")[-3] for name, slices in owners.items() if len(slices) >= tensor > 1}
    assert cut_names == (set(mapping.names) if tensor > 1 else set())
    for name, slices in owners.items():  # B's rows are on the ranks that have the weight's
        weight = name.removeprefix("base_model.model.").replace("lora_B.", "")
        if not name.endswith(".lora_B.weight") or weight == "lm_head.weight":
            continue
        for s in slices if len(slices) > 1 else ():
            at = next(r.coordinates for r in ranks if r.coordinates.rank == s.rank)
            layer, whole = int(s.param.split(".")[2]), mapping_for(shape)
            of_weight = [
                row
                for param in whole.stage_params(at, layers=[layer], first=False, last=False)
                for piece in whole.pieces(param, at)
                if piece.hf_name == weight
                for row in range(piece.hf.start[0], piece.hf.end[0])
            ]
            own = [row for p in mapping.pieces(s.param, at) for row in range(p.hf.start[0], p.hf.end[0])]
            assert own == of_weight, name
    elements = sum(math.prod(shape) for shape in mapping.hf_tensors().values())
    held = sum(s.piece.hf.numel for slices in owners.values() for s in slices)
    assert held == elements


@pytest.mark.parametrize("shape", [TINY, HYBRID, NEXT])
def test_known_values_are_the_same_in_all_layouts(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes of B's rows those that the mapping gives it."""
    import torch

    from rpg_megatron.policy import lora as policy_lora

    mapping, config = (
        AdapterMapping(shape, LoraSettings(rank=3)),
        SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False),
    )
    for layer, target in ((n, t) for n in range(shape.num_layers) for t in mapping.in_layer(n)):
        name = f"decoder.layers.{layer}.{mapping.in_layer(layer)[target]}.lora.{target}.B"
        for rank in range(2):
            at = RankCoordinates(tensor=2, tensor_rank=rank)
            monkeypatch.setattr(policy_lora.mpu, "get_tensor_model_parallel_world_size", lambda: 2)
            monkeypatch.setattr(policy_lora.mpu, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            adapter = policy_lora.Adapter(target, shape, 3, config, "key")
            assert adapter.B.shape == mapping.local_shape(name, at)
            whole, own = torch.zeros(adapter.outputs, 3), torch.zeros(adapter.B.shape)
            hf = torch.arange(3.0 * adapter.outputs).view(-1, 3)
            for values, place in ((whole, ONE_RANK), (own, at)):
                for piece in mapping.pieces(name, place):
                    values[piece.local.slices()] = hf[piece.hf.slices()]
            assert torch.equal(whole if adapter.row_parallel else adapter.own(whole, 0), own), name


def test_names_of_no_adapter_are_refused() -> None:
    mapping = AdapterMapping(TINY, LoraSettings(targets=("q_proj",)))
    name = "decoder.layers.0.self_attention.lora.{}.A"
    assert mapping.local_shape(name.format("q_proj"), ONE_RANK) == (16, TINY.hidden_size)
    others = (name.format("k_proj"), "decoder.layers.0.self_attention.linear_qkv.weight")
    for other in (*others, "output_layer.lora.q_proj.A", "output_layer.lora.lm_head.A"):
        with pytest.raises(MappingError, match="not a parameter of an adapter"):
            mapping.local_shape(other, ONE_RANK)


def test_some_tensors_are_published_alone() -> None:
    import torch

    lora = LoraSettings(rank=2)
    mapping = with_adapters(mapping_for(TINY), lora)
    shapes = mapping.stage_params(ONE_RANK, layers=range(TINY.num_layers), first=True, last=True)
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    model, adapters = split_parameters(params)
    assert set(model) == set(
        mapping_for(TINY).stage_params(ONE_RANK, layers=range(TINY.num_layers), first=True, last=True)
    )
    assert len(adapters) == TINY.num_layers * 7 * 2
    plan = make_publish_plan(ONE_RANK, params, mapping)
    names = AdapterMapping(TINY, lora).hf_tensors().keys()
    assert plan.restricted(None) is plan
    assert plan.restricted(names).owners.keys() == names
    assert {param for _, _, param, _ in plan.restricted(names).slices_of(0)} == adapters.keys()


@pytest.mark.parametrize(
    ("shape", "lora", "tensor", "message"),
    [
        (TINY, {}, 8, "needs parallel.tensor to divide the model's 4 key/value heads"),
        (TINY_MOE, {}, 1, "gate_proj, up_proj are in experts, which get no adapters"),
        (TINY_MOE, {"targets": [*ATTENTION, "up_proj"]}, 1, "lora.targets: up_proj are in experts"),
    ],
)
def test_models_that_cannot_have_the_adapters(shape: Any, lora: Any, tensor: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_lora(settings_with(lora, parallel={"tensor": tensor}), shape)
    check_lora(settings_with({"targets": ATTENTION}, parallel={"tensor": 4}), shape)


@pytest.mark.parametrize(
    ("shape", "lora", "more", "message"),
    [
        (
            TINY,
            {"targets": ["in_proj_z", "q_proj"]},
            {},
            "qwen3 models have no in_proj_z; theirs are q_proj, .*, down_proj$",
        ),
        (HYBRID, {"targets": ["in_proj_z"]}, {}, "does not adapt in_proj_z without in_proj_qkv"),
        (
            HYBRID,  # three of four layers have linear attention: all but the third
            {"targets": ["q_proj"]},
            {"parallel": {"pipeline": 2}},
            "layers 0 to 1, a stage by parallel.pipeline, have none",
        ),
        (
            replace(HYBRID, experts=TINY_MOE.experts),
            {},
            {},
            r"set it to \[q_proj, k_proj, v_proj, o_proj, in_proj_qkv, .*, out_proj\]",
        ),
        (NEXT, {}, {}, r"set it to \[q_proj, k_proj, v_proj, o_proj, in_proj_qkvz, in_proj_ba, out_proj\]"),
        (
            NEXT,
            {"targets": ["in_proj_qkv"]},
            {},
            "qwen3_next models have no in_proj_qkv; .* in_proj_ba, out_proj",
        ),
        (
            NEXT,
            {"targets": ["in_proj_ba", "q_proj"]},
            {"engine": {"tensor": 2}},
            "cuts adapters of in_proj_ba at",
        ),
    ],
)
def test_what_linear_attention_excludes(shape: ModelShape, lora: Any, more: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_lora(settings_with(lora, **more), shape)
    for allowed in ({}, {"targets": LINEAR}, {"targets": ["in_proj_z"], "publish": "merged"}):
        assert check_lora(settings_with({"rank": 9} | allowed), HYBRID) == []  # B of in_proj_b has 8 rows
    check_layers(settings_with({}), HYBRID)
    both = ["in_proj_qkvz", "in_proj_ba"]
    assert check_lora(settings_with({"targets": both, "rank": 9}), NEXT) == []
    check_lora(settings_with({"targets": both, "publish": "merged"}, engine={"tensor": 2}), NEXT)
    check_lora(settings_with({"targets": ["q_proj", "in_proj_b"]}, parallel={"pipeline": 2}), HYBRID)
    check_lora(settings_with({"targets": LINEAR}), replace(HYBRID, experts=TINY_MOE.experts))


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"tied_embeddings": True}, {}, "lm_head is also this model's embedding"),
        ({"vocab_size": 258_049}, {}, "up to a vocabulary of 258048, the model has 258049"),
        ({"family": "qwen2"}, {}, "does not adapt lm_head of qwen2 models"),
        ({}, {"parallel": {"pipeline": 2}}, "lm_head alone leaves nothing to train"),
    ],
)
def test_output_layers_that_cannot_have_an_adapter(changes: Any, more: Any, message: str) -> None:
    shape = replace(TINY, **changes)
    with pytest.raises(UserError, match=message):
        check_lora(settings_with({"targets": ["lm_head"]}, **more), shape)
    check_lora(settings_with({"targets": ["lm_head"]}), TINY)
    check_lora(settings_with({"targets": ["lm_head", "q_proj"]}, parallel={"pipeline": 2}), TINY)
    check_lora(settings_with({"targets": [*ATTENTION, "lm_head"]}), TINY_MOE)
    if not more and not shape.tied_embeddings:  # a limit of engines that apply adapters
        check_lora(settings_with({"targets": ["lm_head"], "publish": "merged"}), shape)
        without = {"data": None, "sft": {"data": {"path": "x"}}}
        check_lora(settings_with({"targets": ["lm_head"]}, **without), shape)


def test_a_rank_that_no_matrix_can_have_is_told() -> None:
    sides = {"q_proj": min(TINY.num_heads * TINY.head_dim, TINY.hidden_size)}
    sides["k_proj"] = min(TINY.num_kv_heads * TINY.head_dim, TINY.hidden_size)
    (warning,) = check_lora(settings_with({"rank": 512, "targets": ["q_proj", "k_proj"]}), TINY)
    assert f"lora.rank 512 exceeds the smaller side of q_proj ({sides['q_proj']}), k_proj (" in warning
    assert f"{max(sides.values())} or less is enough" in warning
    fits = settings_with({"rank": min(sides.values()), "targets": ["q_proj", "k_proj"]})
    assert check_lora(fits, TINY) == []


def test_engines_get_slots_only_for_published_adapters(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config_of(TINY), {})

    def options(lora: dict[str, Any] | None, weights: Any = "dummy") -> list[str]:
        settings = settings_with(
            lora,
            model={"path": str(tmp_path / "model")},
            data={"path": "unused", "max_prompt_tokens": 32},
        )
        command = engine_command(settings, 0, tmp_path / "socket", weights=weights)
        return command[command.index("--enable-lora") :] if "--enable-lora" in command else []

    found = options({"rank": 9, "targets": ["k_proj", "lm_head", "q_proj", "down_proj"]})
    assert found[:7] == [
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", "16"),
        *("--lora-target-modules", "qkv_proj"),
    ]
    assert found[7:9] == ["down_proj", "lm_head"]
    assert "in_proj_qkvz" not in options({})
    assert options(None) == options({"publish": "merged"}) == options({"rank": 4}, "checkpoint") == []
    write_checkpoint(tmp_path / "model", config_of(HYBRID), {})
    found = options({"targets": ["in_proj_a", "in_proj_b", "in_proj_z", "in_proj_qkv", "out_proj"]})
    assert found[6:9] == ["in_proj_qkvz", "in_proj_ba", "out_proj"]


@pytest.mark.parametrize(("adapters", "level"), [(None, 2), (["lora_A"], 1)])
def test_engines_keep_what_is_not_published_again(adapters: list[str] | None, level: int) -> None:
    """At level 2 an engine on a GPU loses the model's weights; one on a CPU has them still."""
    levels: list[int] = []
    run: Any = object.__new__(RankRun)
    run.settings = SimpleNamespace(engine=SimpleNamespace(colocated=True))
    run.time = lambda phase: nullcontext()
    run.weight_sync = SimpleNamespace(sleep=levels.append)
    run.trainer = SimpleNamespace(published=SimpleNamespace(adapters=adapters))
    run.policy = SimpleNamespace(offloader=SimpleNamespace(reload=lambda: None))
    run.offload_engines()
    assert levels == [level]


def test_known_adapters_must_be_what_each_engine_computes_with() -> None:
    def judge(*engines: tuple[float, float]) -> str | None:
        """Each engine's gap to the trainer and what the adapters change, in nats."""
        probes, known, own = [], [], []
        for number, (gap, change) in enumerate(engines):
            probe = make_batch()[3]
            probe.group, probe.behaviour = number, np.full(len(probe.response), -2.0 - gap, np.float32)
            probes.append(probe)
            known.append(np.full(len(probe.response), -2.0, np.float32))
            own.append(np.full(len(probe.response), -2.0 - change, np.float32))
        return check_known_adapters(probes, known, own, 0, 3)

    assert judge((0.001, 0.01), (0.0, 4.0)) is None  # the third one has restarted
    wrong = judge((0.001, 0.01), (0.5, 1.0))
    assert wrong is not None
    assert "engine 1 differs from the trainer by 5.00e-01" in wrong
    assert judge((float("nan"), 1.0)) is not None
    assert judge((0.0, 0.0)) is None
    with pytest.raises(UserError, match="no engine answered a probe with known adapters"):
        judge()
