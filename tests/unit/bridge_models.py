"""Tiny random models for the bridge's tests, and Megatron shards of them made without the layouts under test.

``megatron_value`` re-derives each shard by concatenating and chunking whole tensors, the way Megatron's own
converters do. It shares no arithmetic with ``rpg_megatron.bridge``, so agreement means something.
"""

import json
from dataclasses import replace

import torch
from safetensors.torch import save_file

from rpg_megatron.config.model_shape import Llama3Rope, ModelShape
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.placement import RankCoordinates

TINY = ModelShape(
    family="qwen3",
    num_layers=4,
    hidden_size=24,
    ffn_hidden_size=40,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    vocab_size=53,
    tied_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_positions=512,
    dtype="float32",
)


FAMILIES = {
    "qwen3": {},
    "qwen2": {"family": "qwen2", "qk_norm": False, "qkv_bias": True},
    "llama": {"family": "llama", "qk_norm": False, "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 64)},
}
"""What differs from TINY in each family."""


FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""The local spec's names of the norms that Transformer Engine fuses into the layers behind them -> TE's."""


def tiny_shape(family="qwen3", **changes) -> ModelShape:
    return replace(TINY, **{**FAMILIES[family], **changes})


def random_state_dict(layout: ModelMapping, dtype=torch.float32, seed=0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g).to(dtype) for n, s in layout.hf_tensors().items()}


def megatron_value(name, sd, shape, *, tensor, tensor_rank, vocab_multiple):
    """The value of one local Megatron parameter, from a full HF state dict."""

    def rows(w):
        return w.chunk(tensor, 0)[tensor_rank]

    def columns(w):
        return w.chunk(tensor, 1)[tensor_rank]

    def vocabulary(w):
        padded = shape.padded_vocab(tensor, vocab_multiple)
        return rows(torch.cat([w, w.new_zeros(padded - w.shape[0], w.shape[1])]))

    if name == "embedding.word_embeddings.weight":
        return vocabulary(sd["model.embed_tokens.weight"])
    if name == "output_layer.weight":
        return vocabulary(sd["model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"])
    if name == "decoder.final_layernorm.weight":
        return sd["model.norm.weight"]
    _, _, index, rest = name.split(".", 3)
    p = f"model.layers.{index}."
    if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        parts = [sd[f"{p}self_attn.{x}_proj.{rest.rpartition('.')[2]}"] for x in "qkv"]
        groups = torch.cat([w.unflatten(0, (shape.num_kv_heads, -1)) for w in parts], 1)
        return rows(groups.flatten(0, 1))
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([rows(sd[p + "mlp.gate_proj.weight"]), rows(sd[p + "mlp.up_proj.weight"])])
    rest = {fused: plain for plain, fused in FUSED_NORMS.items()}.get(rest, rest)
    return {
        "input_layernorm.weight": lambda: sd[p + "input_layernorm.weight"],
        "self_attention.q_layernorm.weight": lambda: sd[p + "self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": lambda: sd[p + "self_attn.k_norm.weight"],
        "self_attention.linear_proj.weight": lambda: columns(sd[p + "self_attn.o_proj.weight"]),
        "pre_mlp_layernorm.weight": lambda: sd[p + "post_attention_layernorm.weight"],
        "mlp.linear_fc2.weight": lambda: columns(sd[p + "mlp.down_proj.weight"]),
    }[rest]()


def grid(shape: ModelShape, tensor: int, pipeline: int, vocab_multiple: int = 1) -> list[RankCoordinates]:
    return [
        RankCoordinates(
            rank=p * tensor + t,
            tensor=tensor,
            tensor_rank=t,
            pipeline_rank=p,
            data_rank=0,
            context_rank=0,
            vocab_multiple=vocab_multiple,
        )
        for p in range(pipeline)
        for t in range(tensor)
    ]


def rank_layers(shape: ModelShape, pipeline: int, virtual: int, rank: int) -> list[int]:
    """The layers of a pipeline rank: stages are dealt out in turn, so its chunks lie ``pipeline`` apart."""
    dealt: list[list[int]] = [[] for _ in range(pipeline)]
    layers = iter(range(shape.num_layers))
    for stage, count in enumerate(shape.stage_layers(pipeline * virtual)):
        dealt[stage % pipeline] += [next(layers) for _ in range(count)]
    return dealt[rank]


def stage_shapes(
    layout: ModelMapping, place: RankCoordinates, pipeline: int, virtual: int = 1, fused: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes on one rank; ``fused``: under Transformer Engine's names."""
    shapes = layout.stage_params(
        layers=rank_layers(layout.shape, pipeline, virtual, place.pipeline_rank),
        first=place.pipeline_rank == 0,
        last=place.pipeline_rank == pipeline - 1,
        tensor=place.tensor,
        vocab_multiple=place.vocab_multiple,
    )
    return {_fused(name) if fused else name: shape for name, shape in shapes.items()}


def _fused(name: str) -> str:
    layer, _, rest = name.partition(".layers.")
    number, _, rest = rest.partition(".")
    return f"{layer}.layers.{number}.{FUSED_NORMS[rest]}" if rest in FUSED_NORMS else name


def stage_values(
    layout: ModelMapping, place: RankCoordinates, pipeline: int, sd, virtual: int = 1, fused: bool = False
) -> dict[str, torch.Tensor]:
    return {
        name: megatron_value(
            name,
            sd,
            layout.shape,
            tensor=place.tensor,
            tensor_rank=place.tensor_rank,
            vocab_multiple=place.vocab_multiple,
        ).clone()
        for name in stage_shapes(layout, place, pipeline, virtual, fused)
    }


def write_checkpoint(folder, shape: ModelShape, sd, files: int = 1) -> None:
    """A HF checkpoint folder: weights in one or several files, config.json, a stand-in for the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(sd)
    if files == 1:
        save_file(sd, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for i in range(files):
            file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
            part = {n: sd[n] for n in names[i::files]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": [f"{shape.family.capitalize()}ForCausalLM"],
        "model_type": shape.family,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "torch_dtype": "float32",
    }
    if (scaling := shape.rope_scaling) is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("a b\n")
