"""Weights in FP8 with scales are read as the bfloat16 numbers that they mean, whichever part is read.

Why: a scale of the wrong block gives a model that still talks. The reference (tests/support/fp8_models.py)
has a table of the 256 values and loops over blocks; sizes are no multiples of 128, so that slices of ranks
begin inside of blocks. What cannot be read so is refused by name. Not covered: engines and whole runs
(tests/integration/test_fp8_checkpoints.py).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpg_megatron.checkpoints.hf_export import copy_untrained, export_hf
from rpg_megatron.checkpoints.hf_files import describe_stored, list_checkpoint, verify_hf_checkpoint
from rpg_megatron.checkpoints.hf_import import load_hf_weights, read_whole
from rpg_megatron.checkpoints.megatron_tensors import whole_parameters
from rpg_megatron.checkpoints.parameter_readers import parameter_reader
from rpg_megatron.config import UserError, read_model_shape
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from tests.support.fp8_models import SCALED, dequantise, is_projection, quantise, store_in_fp8
from tests.support.megatron_shards import grid, stage_shapes, stage_values
from tests.support.tiny_models import pack_experts, random_state_dict, tiny_shape, write_checkpoint

LARGE = {"hidden_size": 200, "ffn_hidden_size": 296, "head_dim": 24, "num_layers": 2}
MIXTURE = tiny_shape("qwen3_next", hidden_size=136, num_layers=2)
MIXTURE = replace(
    MIXTURE,
    experts=replace(MIXTURE.experts, ffn_hidden_size=152, shared_ffn_hidden_size=144, layers=(1,)),
    linear=replace(MIXTURE.linear, layers=(0,), key_dim=24, value_dim=20),
)
SHAPES = {
    "dense": tiny_shape(**LARGE),
    "fused": tiny_shape("phi3", **LARGE),
    "mixture": MIXTURE,
}


def write_model(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns what its tensors mean, by the mapping's names."""
    shape = SHAPES[name]
    next_token = {"mtp.fc.weight": torch.randn(130, 260)} if shape.untrained else {}
    weights = random_state_dict(mapping_for(shape)) | next_token
    write_checkpoint(folder, shape, weights)
    return store_in_fp8(folder, dtype=dtype)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_every_rank_reads_what_its_slices_mean(tmp_path: Path, name: str, scales: torch.dtype) -> None:
    meaning = write_model(tmp_path, name, scales)
    shape = read_model_shape(tmp_path)
    assert shape.fp8_files
    layout = mapping_for(shape)
    stored = list_checkpoint(tmp_path)
    assert stored.keys() == meaning.keys()
    quantised = [tensor for tensor in stored.values() if tensor.scale]
    assert len(quantised) == (8 if name == "fused" else 14 if name == "dense" else len(quantised)) > 7
    assert f"{len(quantised)} tensors in FP8 are read as bfloat16" in describe_stored(stored)
    for each, value in meaning.items():
        assert torch.equal(read_whole(stored[each]), value), each
    expert = 2 if shape.experts else 1
    for place in grid(shape, 2, 2, vocab_multiple=16, data=expert, expert=expert, expert_tensor=2):
        wanted = stage_values(layout, place, 2, {n: w.float() for n, w in meaning.items()})
        for dtype in (torch.float32, torch.bfloat16):
            shapes = stage_shapes(layout, place, 2)
            params = {n: torch.full(s, torch.nan, dtype=dtype) for n, s in shapes.items()}
            load_hf_weights(tmp_path, params.items(), layout, place)
            for each, value in wanted.items():
                assert torch.equal(params[each], value.to(dtype)), (place, each)


def test_the_reference_is_that_of_torch_and_of_transformers() -> None:
    """All 256 values, and transformers' own dequantisation where it has one: blocks divide the sizes."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 256)
    ours = dequantise(codes, torch.tensor([[0.37, 1e-5]]))
    scale = torch.tensor([0.37, 1e-5]).repeat_interleave(128)
    assert torch.equal(ours.nan_to_num(7), (codes.float() * scale).bfloat16().nan_to_num(7))
    weight, scales = quantise(torch.randn(256, 384, generator=torch.Generator().manual_seed(1)))
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=torch.bfloat16)
    assert torch.equal(dequantise(weight, scales), theirs)
    with pytest.raises(ValueError, match="not divisible"):  # as kv_a_proj_with_mqa of DeepSeek-V3: 576 rows
        Fp8Dequantize(None)._dequantize_one(*quantise(torch.ones(576, 128)))


def test_packed_experts(tmp_path: Path) -> None:
    shape = replace(MIXTURE, family="qwen3_5_moe", untrained=())
    shape = replace(shape, linear=replace(shape.linear, interleaved=False))
    shape = replace(shape, experts=replace(shape.experts, layers=(0, 1)))
    write_checkpoint(tmp_path, shape, random_state_dict(mapping_for(shape)))
    pack_experts(tmp_path)
    meaning = store_in_fp8(tmp_path)
    stored = verify_hf_checkpoint(tmp_path, mapping_for(read_model_shape(tmp_path)))
    both = meaning["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(4):
        for begin, kind in ((0, "gate"), (152, "up")):
            part = stored[f"model.layers.1.mlp.experts.{expert}.{kind}_proj.weight"]
            assert torch.equal(read_whole(part), both[expert, begin : begin + 152])


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_exports_are_bfloat16(tmp_path: Path, name: str) -> None:
    meaning = write_model(tmp_path / "hf", name)
    shape = read_model_shape(tmp_path / "hf")
    layout = mapping_for(shape)
    read = parameter_reader(tmp_path / "hf", layout, torch.bfloat16)
    params = {n: read(n) for n in whole_parameters(layout)}
    size = {"dtype": torch.bfloat16, "max_shard_bytes": 300_000}
    export_hf(tmp_path / "out", tmp_path / "hf", params, layout, ONE_RANK, **size)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    out = {n: t for file in files for n, t in load_file(file).items()}
    assert out.keys() == meaning.keys()
    for each, value in meaning.items():
        assert torch.equal(out[each], value.to(out[each].dtype)), each
        assert out[each].dtype == (torch.float32 if each in layout.float32 else torch.bfloat16), each
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == meaning.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in out.values())
    assert not read_model_shape(tmp_path / "out").fp8_files
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    copy_untrained(tmp_path / "hf", tmp_path / "out", shape)
    if name == "mixture":
        kept = load_file(tmp_path / "out" / "untrained.safetensors")
        assert torch.equal(kept["mtp.fc.weight"], meaning["mtp.fc.weight"])


Q = "model.layers.1.self_attn.q_proj.weight"
SCALE = f"{Q}_scale_inv"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({SCALE: None}, rf"{SCALE} is missing, not \[2, 2\] F32"),
        ({SCALE: torch.ones(2, 1)}, rf"{SCALE} is \[2, 1\] F32, not \[2, 2\] F32"),
        ({SCALE: torch.ones(())}, rf"{SCALE} is \[\] F32, not \[2, 2\] F32"),
        ({SCALE: torch.ones(2, 2).to(torch.float8_e8m0fnu)}, rf"{SCALE} is \[2, 2\] F8_E8M0, not \[2, 2\]"),
        ({Q: torch.ones(192, 200)}, rf"give it in bfloat16: {SCALE} is of a tensor in F32$"),
        ({Q: torch.ones(192, 200).to(torch.float8_e5m2)}, rf"{SCALE} is of a tensor in F8_E5M2$"),
        ({Q: None}, rf"{SCALE} is of no tensor$"),
        ({"visual.a_scale_inv": torch.ones(1)}, r"visual.a_scale_inv is of no tensor$"),
        (
            {"a": torch.ones(9).to(torch.float8_e4m3fn), "a_scale_inv": torch.ones(1)},
            r"a_scale_inv is \[1\] F32, of a vector",
        ),
        ({f"{Q[:-6]}input_scale": torch.ones(1)}, r"unexpected: \S+input_scale; give the model of"),
        ({Q: torch.ones(192, 200).to(torch.float8_e5m2), SCALE: None}, rf"quantised .*{Q} is F8_E5M2"),
    ],
)
def test_scales_that_do_not_match_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_model(tmp_path, "dense")
    tensors = {n: t for file in tmp_path.glob("*.safetensors") for n, t in load_file(file).items()} | changes
    for file in tmp_path.glob("model*"):
        file.unlink()
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        verify_hf_checkpoint(tmp_path, mapping_for(read_model_shape(tmp_path)))


def test_fp8_without_a_config_that_says_so_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"weights in FP8, and config\.json no quantization_config"):
        verify_hf_checkpoint(tmp_path, mapping_for(read_model_shape(tmp_path)))


def test_a_head_in_fp8_beside_tied_embeddings_is_refused(tmp_path: Path) -> None:
    """Their bytes are not compared: what the head means is another number of bytes away."""
    shape = tiny_shape(**LARGE, tied_embeddings=True)
    weights = random_state_dict(mapping_for(shape))
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    write_checkpoint(tmp_path, shape, weights | head)
    store_in_fp8(tmp_path, lambda name: is_projection(name) or name == "lm_head.weight")
    with pytest.raises(UserError, match=r"lm_head\.weight differs from"):
        verify_hf_checkpoint(tmp_path, mapping_for(read_model_shape(tmp_path)))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"modules_to_not_convert": ["lm_head"], "weight_per_tensor": False, "act_per_tensor": False},
        {"fmt": "float8_e4m3fn", "ignored_layers": ["gate"], "scale_fmt": "ue8m0"},
        {"fmt": None, "activation_scheme": None},
        {"dequantize": False, "scale_fmt": "float", "modules_to_convert": None},  # as transformers writes it
    ],
)
def test_released_configs_are_read(tmp_path: Path, given: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, SHAPES["dense"], {})
    config = json.loads((tmp_path / "config.json").read_text())
    described = {key: value for key, value in (SCALED | given).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    assert read_model_shape(tmp_path) == replace(SHAPES["dense"], fp8_files=True)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"weight_block_size": [64, 64]}, r"'fp8' with \{\"weight_block_size\": \[64, 64\]\}"),
        ({"weight_block_size": [1, 128]}, r"\"weight_block_size\": \[1, 128\]"),
        ({"weight_block_size": None}, r"\"weight_block_size\": null"),
        ({"activation_scheme": "static"}, r"\"activation_scheme\": \"static\""),
        ({"fmt": "e5m2"}, r"\"fmt\": \"e5m2\""),
        ({"scale_fmt": "other"}, r"\"scale_fmt\": \"other\""),
        ({"dequantize": True}, r"\"dequantize\": true"),
        ({"weight_per_tensor": True}, r"\"weight_per_tensor\": true"),
        ({"kv_cache_quant_algo": "FP8"}, r"\"kv_cache_quant_algo\": \"FP8\""),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
    ],
)
def test_other_schemes_are_refused_by_name(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    write_checkpoint(tmp_path, SHAPES["dense"], {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": SCALED | given}))
    with pytest.raises(
        UserError, match=rf"quantization_config \([^)]*{named}[^)]*\): the trainer does not read"
    ):
        read_model_shape(tmp_path)
