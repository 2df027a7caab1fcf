"""A Hugging Face checkpoint survives the way into Megatron shards and out again, and a broken one is refused.

Not covered: an export by several ranks (tests/distributed/test_hf_export_ranks.py), files larger than memory.
"""

import json
import resource
import struct
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.checkpoints.hf_files import describe_stored, list_checkpoint, verify_hf_checkpoint
from rpg_megatron.checkpoints.hf_forms import Form, form_of
from rpg_megatron.checkpoints.hf_import import load_hf_weights, read_whole
from rpg_megatron.commands.convert.inspect import inspect_checkpoint
from rpg_megatron.config import Settings
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_config import read_model_shape
from rpg_megatron.models.boxes import MappingError
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.training import trainer
from tests.support.megatron_shards import grid, megatron_value, stage_shapes, stage_values
from tests.support.tiny_models import (
    FAMILIES,
    TINY,
    pack_experts,
    random_state_dict,
    tiny_shape,
    write_checkpoint,
)


def load(folder, layout, place, pipeline, dtype=torch.float32):
    params = {
        n: torch.full(s, float("nan"), dtype=dtype) for n, s in stage_shapes(layout, place, pipeline).items()
    }
    nbytes_read = load_hf_weights(folder, params.items(), layout, place)
    return params, nbytes_read


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pipeline", [2, 3])
def test_each_rank_loads_its_slices_and_no_more(tmp_path, files, tied, family, pipeline):
    shape = tiny_shape(family, tied_embeddings=tied)
    layout = mapping_for(shape)
    sd = random_state_dict(layout)
    # Tied checkpoints in the wild often have a copy of the embedding as lm_head.weight.
    head = {"lm_head.weight": sd["model.embed_tokens.weight"].clone()} if tied else {}
    write_checkpoint(tmp_path, shape, {**sd, **head}, files=files)
    assert read_model_shape(tmp_path) == shape
    total = 0
    for place in grid(shape, 2, pipeline, vocab_multiple=16, expert_tensor=2 if shape.experts else 1):
        params, nbytes_read = load(tmp_path, layout, place, pipeline)
        for name, value in stage_values(layout, place, pipeline, sd).items():
            assert torch.equal(params[name], value), (place, name)
        total += nbytes_read
    weights = sum(t.nbytes for t in sd.values())
    whole = ("norm", "mlp.gate.", "expert_gate")  # every tensor rank reads these
    norms = sum(t.nbytes for n, t in sd.items() if any(part in n for part in whole))
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


PACKED = tiny_shape("qwen3_5_moe")


def packed_checkpoint(folder, **changes):
    """A mixture whose experts are in two tensors a layer; its weights, by the mapping's names."""
    sd = random_state_dict(mapping_for(PACKED))
    write_checkpoint(folder, PACKED, sd)
    tensors = pack_experts(folder)
    write_checkpoint(
        folder, PACKED, {name: tensor for name, tensor in (tensors | changes).items() if len(tensor)}
    )
    return sd


@pytest.mark.parametrize("expert", [1, 2])
def test_packed_experts_are_read_as_one_tensor_an_expert(tmp_path, expert):
    layout, sd = mapping_for(PACKED), packed_checkpoint(tmp_path)
    stored = verify_hf_checkpoint(tmp_path, layout)
    assert set(stored) == set(sd)
    assert all(torch.equal(read_whole(stored[name]), tensor) for name, tensor in sd.items())
    # The bytes are where the part begins in the file, too.
    part = stored["model.layers.2.mlp.experts.3.up_proj.weight"]
    data = (tmp_path / "model.safetensors").read_bytes()[part.begin :][: 4 * 24 * 24]
    assert data == sd["model.layers.2.mlp.experts.3.up_proj.weight"].numpy().tobytes()
    for place in grid(PACKED, 2, 1, data=expert, expert=expert, expert_tensor=2):
        params, _ = load(tmp_path, layout, place, 1)
        for name, value in params.items():
            assert torch.equal(value, megatron_value(name, sd, PACKED, place)), name


def test_packed_experts_that_are_wrong_are_refused(tmp_path):
    layout, name = mapping_for(PACKED), "model.layers.1.mlp.experts.gate_up_proj"
    twice = "model.layers.1.mlp.experts.0.up_proj.weight"
    for changes, message in (
        ({name: torch.zeros(3, 48, 24)}, r"missing: model\.layers\.1\.mlp\.experts\.3\.gate_proj\.weight, "),
        (
            {name: torch.zeros(5, 48, 24)},
            r"unexpected: model\.layers\.1\.mlp\.experts\.4\.gate_proj\.weight, ",
        ),
        ({name: torch.zeros(4, 50, 24)}, r"experts\.0\.gate_proj\.weight is \[25, 24\], not \[24, 24\]"),
        ({name: torch.zeros(4, 49, 24)}, rf"unexpected: {name}"),
        ({name: torch.zeros(192, 24)}, rf"unexpected: {name}"),
        ({name: torch.zeros(0)}, r"missing: model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight, "),
        ({twice: torch.zeros(24, 24)}, rf"tensors under two names: \S+ \({twice}\); remove one"),
    ):
        packed_checkpoint(tmp_path, **changes)
        with pytest.raises(UserError, match=message):
            verify_hf_checkpoint(tmp_path, layout)


@pytest.mark.parametrize(("dtype", "shape"), [("F32", [2**62, 0, 24]), ("F8_E8M0", [2**40, 48, 24])])
@pytest.mark.timeout(60)
def test_packed_experts_of_any_number_cost_nothing(tmp_path, dtype, shape):
    """A header of a few bytes may name more experts than fit into memory: without numbers, or of a dtype
    whose size is unknown.
    """
    name = "model.layers.1.mlp.experts.gate_up_proj"
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(
        UserError, match=r"unexpected: model\.layers\.1\.mlp\.experts\.4\.gate_proj\.weight, "
    ):
        verify_hf_checkpoint(tmp_path, mapping_for(PACKED))


def test_packed_experts_in_a_dense_model_are_named(tmp_path):
    weights = random_state_dict(mapping_for(TINY))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    write_checkpoint(tmp_path, TINY, weights | {name: torch.zeros(4, 48, 24)})
    with pytest.raises(UserError, match=rf"unexpected: {name};"):
        verify_hf_checkpoint(tmp_path, mapping_for(TINY))


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


TIED = tiny_shape(tied_embeddings=True)


def with_head(sd, change=lambda head: head):
    return {**sd, "lm_head.weight": change(sd["model.embed_tokens.weight"].clone())}


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
)
@pytest.mark.parametrize("files", [1, 3])
def test_a_tied_head_that_equals_the_embedding_is_left_out(tmp_path, files, embedding, head):
    # Eighths of small integers, which all of these dtypes have.
    sd = {n: (t * 8).round().clamp(-99, 99) / 8 for n, t in random_state_dict(mapping_for(TIED)).items()}
    sd["model.embed_tokens.weight"] = sd["model.embed_tokens.weight"].to(embedding)
    write_checkpoint(tmp_path, TIED, with_head(sd, lambda x: x.to(head)), files=files)
    assert set(verify_hf_checkpoint(tmp_path, mapping_for(TIED))) == set(mapping_for(TIED).hf_tensors())


@pytest.mark.parametrize(
    "change",
    [
        lambda head: torch.randn(head.shape),
        lambda head: head.index_put((torch.tensor(52), torch.tensor(23)), torch.tensor(7.0)),  # the last one
        lambda head: head.bfloat16(),  # rounded
        lambda head: torch.cat([head, head[:1]]),
        lambda head: head.to(torch.float8_e5m2),
        lambda head: head.view(24, 53),
    ],
)
@pytest.mark.parametrize("files", [1, 3])
def test_a_tied_head_that_differs_is_refused(tmp_path, files, change):
    layout = mapping_for(TIED)
    write_checkpoint(tmp_path, TIED, with_head(random_state_dict(layout), change), files=files)
    with pytest.raises(UserError, match=r"lm_head\.weight differs .*set tie_word_embeddings to false"):
        verify_hf_checkpoint(tmp_path, layout)


def test_a_large_head_is_compared_to_its_end_in_little_memory(tmp_path):
    shape = tiny_shape(tied_embeddings=True, vocab_size=2**20)
    layout = mapping_for(shape)
    sd = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in layout.hf_tensors().items()}
    head = torch.zeros(2**20, 24, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, shape, {**sd, "lm_head.weight": head})
    tracemalloc.start()
    verify_hf_checkpoint(tmp_path, layout)
    assert tracemalloc.get_traced_memory()[1] < head.nbytes / 4
    tracemalloc.stop()
    head[-1, -1] = 1.0
    write_checkpoint(tmp_path, shape, {**sd, "lm_head.weight": head})
    with pytest.raises(UserError, match="differs"):
        verify_hf_checkpoint(tmp_path, layout)


def test_a_missing_head_names_the_setting(tmp_path):
    layout = mapping_for(TINY)
    sd = random_state_dict(layout)
    del sd["lm_head.weight"]
    write_checkpoint(tmp_path, TINY, sd)
    with pytest.raises(UserError, match=r"missing: lm_head\.weight; .*tie_word_embeddings to true"):
        verify_hf_checkpoint(tmp_path, layout)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.rotary_emb.inv_freq",  # Llama 2
        "layers.3.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_pos_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.rotary_emb.sin_cached",
    ],
)
def test_buffers_that_follow_from_the_configuration_are_not_read(tmp_path, name):
    layout = mapping_for(TINY)
    sd = random_state_dict(layout, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, TINY, {**sd, name: torch.ones(3)})  # of another dtype than the weights
    assert set(verify_hf_checkpoint(tmp_path, layout, one_dtype=True)) == set(layout.hf_tensors())
    assert f"1 buffers are not read ({name})" in describe_stored(list_checkpoint(tmp_path))
    shown = inspect_checkpoint(tmp_path)
    assert not shown.problems
    assert f"1 buffers are not read ({name})" in shown.checked


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.masked_bias",  # vLLM refuses these two
        "model.position_ids",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.mlp.up_proj.qweight",
        "my_rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq.weight",
        "model.lm_head.weight",
    ],
)
@pytest.mark.parametrize("shape", [TINY, TIED])
def test_other_tensors_are_refused_by_name(tmp_path, name, shape):
    layout = mapping_for(shape)
    write_checkpoint(tmp_path, shape, {**random_state_dict(layout), name: torch.ones(3)})
    with pytest.raises(UserError, match=f"unexpected: {name}; give the model"):
        verify_hf_checkpoint(tmp_path, layout)


def test_files_that_readers_would_read_differently_are_refused(tmp_path):
    # vLLM takes all that is in the files, and without an index every file.
    layout, sd = mapping_for(TIED), random_state_dict(mapping_for(TIED))
    one = write_checkpoint(tmp_path / "one", TIED, sd)
    save_file({"lm_head.weight": torch.ones(53, 24)}, one / "more.safetensors")
    with pytest.raises(UserError, match=r"holds more\.safetensors besides model\.safetensors"):
        verify_hf_checkpoint(one, layout)
    two = write_checkpoint(tmp_path / "two", TIED, sd, files=2)
    second = two / "model-00002-of-00002.safetensors"
    stored = load_file(second)
    save_file({**stored, "lm_head.weight": torch.ones(53, 24)}, second)  # not in the index
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        verify_hf_checkpoint(two, layout)
    save_file({**stored, "model.embed_tokens.weight": torch.ones(53, 24)}, second)
    with pytest.raises(
        UserError, match=r"model-00002-of-00002\.safetensors: holds tensors that are in another"
    ):
        verify_hf_checkpoint(two, layout)
    save_file(stored, second)
    assert verify_hf_checkpoint(two, layout)
    save_file(sd, two / "model.safetensors")
    with pytest.raises(UserError, match=r"holds model\.safetensors, which .* does not list"):
        verify_hf_checkpoint(two, layout)


def test_a_model_built_with_other_sizes_is_refused(tmp_path):
    layout = mapping_for(TINY)
    write_checkpoint(tmp_path, TINY, random_state_dict(layout))
    with pytest.raises(MappingError, match=r"decoder\.final_layernorm\.weight has shape \(25,\)"):
        load_hf_weights(tmp_path, [("decoder.final_layernorm.weight", torch.zeros(25))], layout, ONE_RANK)
    with pytest.raises(MappingError, match="numbered through the whole model"):
        load_hf_weights(
            tmp_path, [("decoder.layers.9.input_layernorm.weight", torch.zeros(24))], layout, ONE_RANK
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


@pytest.mark.parametrize("limit", [None, 8000])
def test_a_trainer_writes_as_few_files_as_its_limit_allows(tmp_path, monkeypatch, limit):
    """An export that is cut into a file for each tensor is complete, but nobody wants it."""
    if limit is not None:
        monkeypatch.setattr(trainer, "_SHARD_BYTES", limit)
    layout, folder = mapping_for(TINY), tmp_path / "model"
    sd = random_state_dict(layout)
    write_checkpoint(folder, TINY, sd)
    raw = {"model": {"path": str(folder)}, "data": {"path": "d"}, "precision": {"dtype": "float32"}}
    params = stage_values(layout, ONE_RANK, 1, sd)
    rank = SimpleNamespace(
        settings=Settings.model_validate(raw),
        policy=SimpleNamespace(
            served=SimpleNamespace(refresh=lambda: None), complete_weights=lambda dtype: params
        ),
        layout=layout,
        mesh=SimpleNamespace(coordinates=lambda multiple: ONE_RANK),
    )
    trainer.Trainer.write_checkpoint(rank, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    stored = [load_file(file) for file in files]
    assert {name for part in stored for name in part} == sd.keys()
    sizes = [sum(t.nbytes for t in part.values()) for part in stored]
    if limit is None:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        assert len(files) > 1
        assert all(size <= limit or len(part) == 1 for size, part in zip(sizes, stored, strict=True))
        assert any(len(part) > 1 for part in stored)


def test_a_form_of_old_names_keeps_other_names() -> None:
    form = form_of(["vision_tower.x", "model.norm.weight"], ())
    assert form == Form(old_names=True)
    assert form.tensors({"model.norm.weight": (4,), "lm_head.weight": (8, 4)}).keys() == {
        "model.norm.weight",
        "language_model.lm_head.weight",
    }


def test_packed_tensors_that_are_not_trained_say_nothing_of_the_decoders() -> None:
    names = ["model.layers.0.mlp.experts.0.gate_proj.weight", "mtp.layers.0.mlp.experts.gate_up_proj"]
    assert form_of(names, ("mtp.",)) == Form()
    assert (
        form_of(names, ())
        == form_of(["model.layers.0.mlp.experts.gate_up_proj"], ("mtp.",))
        == Form(packed=True)
    )
    shapes = mapping_for(PACKED).hf_tensors()
    tensors = Form(packed=True).tensors(shapes)
    assert tensors["model.layers.3.mlp.experts.gate_up_proj"].shape == (4, 48, 24)
    assert tensors["model.layers.3.mlp.experts.down_proj"].shape == (4, 24, 24)
    assert {name for tensor in tensors.values() for name in tensor.parts} == {*shapes}
