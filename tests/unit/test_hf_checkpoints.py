"""A Hugging Face checkpoint survives the way into Megatron shards and out again, and a broken one is refused.

Not covered: an export by several ranks (tests/distributed/test_hf_export_ranks.py), files larger than memory.
"""

import resource
import struct

import pytest
import torch
from safetensors.torch import load_file

from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.checkpoints.hf_files import verify_hf_checkpoint
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_shape import read_model_shape
from rpg_megatron.models.boxes import MappingError
from rpg_megatron.models.registry import mapping_for
from tests.support.megatron_shards import grid, stage_shapes, stage_values
from tests.support.tiny_models import FAMILIES, TINY, random_state_dict, tiny_shape, write_checkpoint


def load(folder, layout, place, pipeline, dtype=torch.float32):
    params = {
        n: torch.full(s, float("nan"), dtype=dtype) for n, s in stage_shapes(layout, place, pipeline).items()
    }
    nbytes_read = load_hf_weights(
        folder,
        params.items(),
        layout,
        tensor=place.tensor,
        tensor_rank=place.tensor_rank,
        vocab_multiple=place.vocab_multiple,
    )
    return params, nbytes_read


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pipeline", [2, 3])
def test_each_rank_loads_its_slices_and_no_more(tmp_path, files, tied, family, pipeline):
    shape = tiny_shape(family, tied_embeddings=tied)
    layout = mapping_for(shape)
    sd = random_state_dict(layout)
    # Tied checkpoints in the wild often carry lm_head.weight too; it must be ignored, not refused.
    write_checkpoint(
        tmp_path, shape, {**sd, "lm_head.weight": torch.zeros(53, 24)} if tied else sd, files=files
    )
    assert read_model_shape(tmp_path) == shape
    total = 0
    for place in grid(shape, 2, pipeline, vocab_multiple=16):
        params, nbytes_read = load(tmp_path, layout, place, pipeline)
        for name, value in stage_values(layout, place, pipeline, sd).items():
            assert torch.equal(params[name], value), (place, name)
        total += nbytes_read
    weights = sum(t.nbytes for t in sd.values())
    norms = sum(t.nbytes for n, t in sd.items() if "norm" in n)  # every tensor rank reads these
    tied_copy = sd["model.embed_tokens.weight"].nbytes if tied else 0
    assert total == weights + norms + tied_copy


def test_values_are_cast_to_the_parameters_dtype(tmp_path):
    layout = mapping_for(TINY)
    sd = random_state_dict(layout, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, TINY, sd)
    params, _ = load(tmp_path, layout, grid(TINY, 1, 1)[0], 1)
    assert torch.equal(params["output_layer.weight"][:53], sd["lm_head.weight"].float())


def test_wrong_tensors_are_all_listed_in_one_error(tmp_path):
    layout = mapping_for(TINY)
    sd = random_state_dict(layout)
    del sd["model.norm.weight"], sd["model.layers.2.mlp.up_proj.weight"]
    sd["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(3)
    sd["model.layers.1.self_attn.q_norm.weight"] = torch.zeros(7)
    sd["model.layers.3.self_attn.k_norm.weight"] = torch.zeros(6, dtype=torch.int32)
    write_checkpoint(tmp_path, TINY, sd)
    with pytest.raises(UserError) as e:
        verify_hf_checkpoint(tmp_path, layout)
    for part in (
        "missing: model.layers.2.mlp.up_proj.weight, model.norm.weight",
        "unexpected: model.layers.0.self_attn.q_proj.bias",
        "wrong shape: model.layers.1.self_attn.q_norm.weight is [7], not [6]",
        "model.layers.3.self_attn.k_norm.weight is I32",
    ):
        assert part in str(e.value)


def corrupt(kind, file):
    data = file.read_bytes()
    file.write_bytes(
        {
            "truncated": data[:-5],
            "longer": data + b"x",
            "empty": b"",
            "cut in the header": data[:100],
            "header is not JSON": struct.pack("<Q", 8) + b"notjson!" + data[16:],
        }[kind]
    )


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "longer",
        "empty",
        "cut in the header",
        "header is not JSON",
    ],
)
def test_a_corrupt_file_is_one_clear_error(tmp_path, kind):
    layout = mapping_for(TINY)
    write_checkpoint(tmp_path, TINY, random_state_dict(layout), files=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    corrupt(kind, file)
    with pytest.raises(UserError, match=rf"{file.name}: truncated or corrupt.*copy the file again"):
        verify_hf_checkpoint(tmp_path, layout)


def test_missing_files_are_named(tmp_path):
    layout = mapping_for(TINY)
    with pytest.raises(UserError, match="holds neither"):
        verify_hf_checkpoint(tmp_path, layout)
    write_checkpoint(tmp_path, TINY, random_state_dict(layout), files=2)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors: cannot be read"):
        verify_hf_checkpoint(tmp_path, layout)


def test_a_model_built_with_other_sizes_is_refused(tmp_path):
    layout = mapping_for(TINY)
    write_checkpoint(tmp_path, TINY, random_state_dict(layout))
    kw = {"tensor": 1, "tensor_rank": 0, "vocab_multiple": 1}
    with pytest.raises(MappingError, match=r"decoder\.final_layernorm\.weight has shape \(25,\)"):
        load_hf_weights(tmp_path, [("decoder.final_layernorm.weight", torch.zeros(25))], layout, **kw)
    with pytest.raises(MappingError, match="numbered through the whole model"):
        load_hf_weights(
            tmp_path, [("decoder.layers.9.input_layernorm.weight", torch.zeros(24))], layout, **kw
        )


def test_an_export_without_room_is_an_oserror_and_leaves_nothing(tmp_path):
    layout = mapping_for(TINY)
    sd = random_state_dict(layout)
    write_checkpoint(tmp_path / "source", TINY, sd)
    (place,) = grid(TINY, 1, 1)
    args = (tmp_path / "out", tmp_path / "source", stage_values(layout, place, 1, sd), layout, place)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match=r"File too large: .*model\.safetensors"):
            export_hf(*args, dtype=torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [f.name for f in tmp_path.iterdir()] == ["source"]


def test_export_in_one_process_and_replacing(tmp_path):
    layout = mapping_for(TINY)
    sd = random_state_dict(layout)
    write_checkpoint(tmp_path / "source", TINY, sd, files=2)
    (place,) = grid(TINY, 1, 1)
    args = (tmp_path / "out", tmp_path / "source", stage_values(layout, place, 1, sd), layout, place)
    (tmp_path / ".out.incomplete").mkdir()
    (tmp_path / ".out.incomplete" / "model-00007-of-00009.safetensors").write_text("left by a killed export")
    export_hf(*args, dtype=torch.float32)
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(loaded[n], sd[n]) for n in sd)
    with pytest.raises(UserError, match="already exists"):
        export_hf(*args, dtype=torch.float32)
    export_hf(*args, dtype=torch.float16, replace=True)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(loaded[n], sd[n].half()) for n in sd)
    assert {p.name for p in tmp_path.iterdir()} == {"out", "source"}
