"""Megatron shards of tiny models, made without the layouts under test.

``megatron_value`` re-derives each shard by concatenating and chunking whole tensors, the way Megatron's own
converters do. It shares no arithmetic with ``rpg_megatron.bridge``, so agreement is evidence.
"""

import re

import torch

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import ExpertShard, RankCoordinates

FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""The local spec's names of the norms that Transformer Engine fuses into the layers behind them -> TE's."""
FUSED_LATENT_NORMS = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""The same with latent attention."""


def megatron_value(name, sd, shape, place):
    """The value of one local Megatron parameter, from a full HF state dict."""
    tensor, tensor_rank, experts = place.tensor, place.tensor_rank, place.experts

    def rows(w):
        return w.chunk(tensor, 0)[tensor_rank]

    def columns(w):
        return w.chunk(tensor, 1)[tensor_rank]

    def vocabulary(w):
        padded = shape.padded_vocab(tensor, place.vocab_multiple)
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
        what = rest.rpartition(".")[2]
        if shape.gated_attention:  # of each head, its query and its gate
            heads = sd[f"{p}self_attn.q_proj.weight"].unflatten(
                0, (shape.num_kv_heads, -1, 2, shape.head_dim)
            )
            parts = [*heads.transpose(1, 2).flatten(2, 3).flatten(0, 1).unflatten(0, (-1, 2)).unbind(1)]
            parts = [part.flatten(0, 1) for part in parts]
            parts += [sd[f"{p}self_attn.{x}_proj.weight"] for x in "kv"]
        elif shape.fused_rows:
            counts = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
            parts = sd[f"{p}self_attn.qkv_proj.{what}"].split(counts)
        else:
            parts = [sd[f"{p}self_attn.{x}_proj.{what}"] for x in "qkv"]
        groups = torch.cat([w.unflatten(0, (shape.num_kv_heads, -1)) for w in parts], 1)
        return rows(groups.flatten(0, 1))
    if rest.startswith("self_attention.") and shape.is_linear(int(index)) and "layer_norm" not in rest:
        linear, p = shape.linear, p + "linear_attn."
        parts = [linear.keys, linear.keys, linear.values]
        if rest == "self_attention.in_proj.weight" and linear.interleaved:
            value_rows = linear.values // linear.key_heads
            by_head = sd[p + "in_proj_qkvz.weight"].unflatten(0, (linear.key_heads, -1))
            parts = [*by_head.split([linear.key_dim, linear.key_dim, value_rows, value_rows], 1)]
            parts += sd[p + "in_proj_ba.weight"].unflatten(0, (linear.key_heads, -1)).chunk(2, 1)
            return torch.cat([rows(w.flatten(0, 1)) for w in parts])
        if rest == "self_attention.in_proj.weight":
            parts = [
                *sd[p + "in_proj_qkv.weight"].split(parts),
                *(sd[f"{p}in_proj_{x}.weight"] for x in "zba"),
            ]
            return torch.cat([rows(w) for w in parts])
        if rest == "self_attention.conv1d.weight":
            return torch.cat([rows(w) for w in sd[p + "conv1d.weight"].split(parts)])
        return {
            "self_attention.A_log": lambda: rows(sd[p + "A_log"]),
            "self_attention.dt_bias": lambda: rows(sd[p + "dt_bias"]),
            "self_attention.out_norm.weight": lambda: sd[p + "norm.weight"],
            "self_attention.out_proj.weight": lambda: columns(sd[p + "out_proj.weight"]),
        }[rest]()
    if rest == "mlp.router.weight":
        return sd[p + "mlp.gate.weight"]
    if rest == "mlp.router.expert_bias":
        return sd[p + "mlp.gate.e_score_correction_bias"]
    if rest == "mlp.shared_experts.gate_weight":
        return sd[p + "mlp.shared_expert_gate.weight"]
    if rest.startswith("mlp.shared_experts."):
        p += "mlp.shared_expert." if shape.experts.shared_gate else "mlp.shared_experts."
        if "linear_fc2" in rest:
            return columns(sd[p + "down_proj.weight"])
        return torch.cat([rows(sd[f"{p}{x}_proj.weight"]) for x in ("gate", "up")])
    if rest.startswith("mlp.experts."):
        number = int(re.search(r"(?:local_experts\.|weight)(\d+)", rest)[1])
        local_experts = torch.arange(shape.experts.count).chunk(experts.parallel)[experts.rank].tolist()
        p += f"mlp.experts.{local_experts[number]}."
        if "linear_fc2" in rest:
            return sd[p + "down_proj.weight"].chunk(experts.tensor, 1)[experts.tensor_rank]
        halves = [
            sd[f"{p}{x}_proj.weight"].chunk(experts.tensor)[experts.tensor_rank] for x in ("gate", "up")
        ]
        return torch.cat(halves)
    if rest == "mlp.linear_fc1.weight" and shape.fused_rows:
        return torch.cat([rows(half) for half in sd[p + "mlp.gate_up_proj.weight"].chunk(2)])
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([rows(sd[p + "mlp.gate_proj.weight"]), rows(sd[p + "mlp.up_proj.weight"])])
    if shape.latent is not None and rest.startswith("self_attention.") and "linear_proj" not in rest:
        p += "self_attn."
        return {
            "linear_q_proj": lambda: rows(sd[p + "q_proj.weight"]),
            "linear_q_down_proj": lambda: sd[p + "q_a_proj.weight"],
            "q_layernorm": lambda: sd[p + "q_a_layernorm.weight"],
            "linear_q_up_proj": lambda: rows(sd[p + "q_b_proj.weight"]),
            "linear_kv_down_proj": lambda: sd[p + "kv_a_proj_with_mqa.weight"],
            "kv_layernorm": lambda: sd[p + "kv_a_layernorm.weight"],
            "linear_kv_up_proj": lambda: rows(sd[p + "kv_b_proj.weight"]),
        }[rest.split(".")[1]]()
    rest = rest.replace(".in_proj.layer_norm", ".linear_qkv.layer_norm")
    rest = {fused: plain for plain, fused in FUSED_NORMS.items()}.get(rest, rest)
    return {
        "input_layernorm.weight": lambda: sd[p + "input_layernorm.weight"],
        "self_attention.q_layernorm.weight": lambda: sd[p + "self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": lambda: sd[p + "self_attn.k_norm.weight"],
        "self_attention.linear_proj.weight": lambda: columns(sd[p + "self_attn.o_proj.weight"]),
        "pre_mlp_layernorm.weight": lambda: sd[p + "post_attention_layernorm.weight"],
        "self_attn_bda.norm.weight": lambda: sd[p + "post_attention_layernorm.weight"],
        "mlp_bda.norm.weight": lambda: sd[p + "post_feedforward_layernorm.weight"],
        "mlp.linear_fc2.weight": lambda: columns(sd[p + "mlp.down_proj.weight"]),
    }[rest]()


def grid(
    shape: ModelShape,
    tensor: int,
    pipeline: int,
    vocab_multiple: int = 1,
    *,
    data: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
) -> list[RankCoordinates]:
    return [
        RankCoordinates(
            rank=(p * data + d) * tensor + t,
            tensor=tensor,
            tensor_rank=t,
            pipeline_rank=p,
            data_rank=d,
            context_rank=0,
            vocab_multiple=vocab_multiple,
            experts=ExpertShard(
                parallel=expert,
                rank=(d * tensor + t) // expert_tensor % expert,
                tensor=expert_tensor,
                tensor_rank=(d * tensor + t) % expert_tensor,
            ),
        )
        for p in range(pipeline)
        for d in range(data)
        for t in range(tensor)
    ]


def rank_layers(shape: ModelShape, pipeline: int, virtual: int, rank: int) -> list[int]:
    """The layers of a pipeline rank: stages are assigned in turn, so its chunks are ``pipeline`` apart."""
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
        place,
        layers=rank_layers(layout.shape, pipeline, virtual, place.pipeline_rank),
        first=place.pipeline_rank == 0,
        last=place.pipeline_rank == pipeline - 1,
    )
    return {_fused(layout.shape, name) if fused else name: shape for name, shape in shapes.items()}


def _fused(model: ModelShape, name: str) -> str:
    layer, _, rest = name.partition(".layers.")
    number, _, rest = rest.partition(".")
    if rest and model.has_experts(int(number)):
        if rest == "pre_mlp_layernorm.weight":
            return name  # the router reads it too
        if match := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight", rest):
            return f"{layer}.layers.{number}.mlp.experts.{match[2]}.weight{match[1]}"
    norms = FUSED_LATENT_NORMS if model.latent else FUSED_NORMS
    if rest not in norms:
        return name
    fused = norms[rest]
    if model.is_linear(int(number)):
        fused = fused.replace("linear_qkv", "in_proj")
    return f"{layer}.layers.{number}.{fused}"


def stage_values(
    layout: ModelMapping, place: RankCoordinates, pipeline: int, sd, virtual: int = 1, fused: bool = False
) -> dict[str, torch.Tensor]:
    return {
        name: megatron_value(name, sd, layout.shape, place).clone()
        for name in stage_shapes(layout, place, pipeline, virtual, fused)
    }
