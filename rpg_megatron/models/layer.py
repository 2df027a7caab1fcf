"""The parameters of a layer, by their names in Megatron's local spec. No torch here.

Where Megatron-Core and Hugging Face differ:

- Megatron stores Q, K and V in one matrix, interleaved by query group: the rows of group g are its query
  heads, then its key head, then its value head. Tensor parallelism splits this into equal blocks of rows:
  between groups, or inside groups if there are more ranks than groups (Megatron then gathers the projections,
  and each rank selects its query heads and their group). The bias is split equally.
- Gate and up projection are one matrix; *each rank's* shard is its gate rows, then its up rows.
- The output projections are split by columns; norms and routers are replicated.
- Expert-parallel ranks hold equal numbers of consecutive experts. Each expert has its own parameters, which
  expert tensor parallelism splits like those of a feed-forward block.
- With gated attention q_proj has the query rows and then the gate rows of each head; Megatron has all queries
  of a group, then all its gates.
- A gated delta net has one input projection: queries, keys, values, gates, beta, alpha, each cut by heads.
  Qwen3-Next's two tensors have these of each key head together.
- Latent attention has its own names; its projections to latents are replicated, those from them cut by heads.
- Megatron's gate of the shared expert belongs to that expert.
- Transformer Engine fuses the norms before QKV, in_proj and fc1 into those layers, under other names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from rpg_megatron.config.model_shape import LatentAttention, LinearAttention, ModelShape
from rpg_megatron.models.partition import Parameter, Segment

FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's name -> the local spec's."""
EXPERT = "mlp.experts.local_experts."
"""What the names of an expert's parameters begin with, before its number."""


def layer_parameters(s: ModelShape, layer: int) -> dict[str, Parameter]:
    """Megatron's name within a layer -> the parameter; experts are numbered through the whole layer."""
    return _parameters(s, s.has_experts(layer), s.is_linear(layer))


def stored_parts(name: str, parameter: Parameter) -> dict[str, Parameter]:
    """A parameter as Megatron's checkpoints have it: those of a gated delta net in parts; else itself."""
    if not name.endswith(("in_proj.weight", "conv1d.weight")):
        return {name: parameter}
    parts = zip(("query", "key", "value", "z", "beta", "alpha"), parameter.segments, strict=False)
    return {f"{name}.{part}": replace(parameter, segments=(segment,)) for part, segment in parts}


@lru_cache(maxsize=32)
def _parameters(s: ModelShape, experts: bool, linear: bool) -> dict[str, Parameter]:
    first, second = "input_layernorm.weight", "post_attention_layernorm.weight"
    norms = {"input_layernorm.weight": first, "pre_mlp_layernorm.weight": second}
    if s.post_norm:
        norms = {
            "self_attn_bda.norm.weight": second,
            "mlp_bda.norm.weight": "post_feedforward_layernorm.weight",
        }
    (one, its), (other, others) = ((name, vector(hf, s.hidden_size)) for name, hf in norms.items())
    heads = s.num_heads * s.head_dim
    out = {one: its}
    if linear and s.linear is not None:
        out |= {f"self_attention.{name}": parameter for name, parameter in _delta_net(s, s.linear).items()}
    elif s.latent is not None:
        out |= {f"self_attention.{name}": parameter for name, parameter in _latent(s, s.latent).items()}
    else:
        out["self_attention.linear_qkv.weight"] = qkv(s, "weight")
        out["self_attention.linear_proj.weight"] = by_columns("self_attn.o_proj.weight", s.hidden_size, heads)
    out[other] = others
    if experts and s.experts is not None:
        out["mlp.router.weight"] = Parameter((Segment("mlp.gate.weight", s.experts.count),), s.hidden_size)
        for e in range(s.experts.count):
            out |= _feed_forward(s, f"{EXPERT}{e}.", f"mlp.experts.{e}.", s.experts.ffn_hidden_size)
        if s.experts.router is not None:
            bias = Segment("mlp.gate.e_score_correction_bias", s.experts.count)
            out["mlp.router.expert_bias"] = Parameter((bias,), float32=True)
        if shared := s.experts.shared_ffn_hidden_size:
            hf = "mlp.shared_expert." if s.experts.shared_gate else "mlp.shared_experts."
            out |= _feed_forward(s, "mlp.shared_experts.", hf, shared)
            if s.experts.shared_gate:
                gate = Segment("mlp.shared_expert_gate.weight", 1)
                out["mlp.shared_experts.gate_weight"] = Parameter((gate,), s.hidden_size)
    else:
        out |= _feed_forward(s, "mlp.", "mlp.", s.ffn_hidden_size)
    if linear:
        return out
    if s.qkv_bias:
        out["self_attention.linear_qkv.bias"] = qkv(s, "bias")
    if s.qk_norm:
        for name, count in (("q", s.num_heads), ("k", s.num_kv_heads)):
            width = s.head_dim * (count if s.wide_qk_norm else 1)
            out[f"self_attention.{name}_layernorm.weight"] = vector(f"self_attn.{name}_norm.weight", width)
    return out


def _latent(s: ModelShape, latent: LatentAttention) -> dict[str, Parameter]:
    """Latent attention."""
    hf, rank, query_rank = "self_attn.", latent.rank, latent.query_rank
    queries, expanded = s.num_heads * s.head_dim, s.num_heads * (latent.plain_dim + latent.value_dim)

    def by_rows(name: str, rows: int, columns: int) -> Parameter:
        return Parameter((Segment(f"{hf}{name}.weight", rows),), columns, "rows")

    down = Segment(f"{hf}kv_a_proj_with_mqa.weight", rank + latent.rotated_dim)
    out = {
        "linear_kv_down_proj.weight": Parameter((down,), s.hidden_size),
        "kv_layernorm.weight": vector(f"{hf}kv_a_layernorm.weight", rank),
        "linear_kv_up_proj.weight": by_rows("kv_b_proj", expanded, rank),
        "linear_proj.weight": by_columns(f"{hf}o_proj.weight", s.hidden_size, s.num_heads * latent.value_dim),
    }
    if not query_rank:
        return out | {"linear_q_proj.weight": by_rows("q_proj", queries, s.hidden_size)}
    return out | {
        "linear_q_down_proj.weight": Parameter((Segment(f"{hf}q_a_proj.weight", query_rank),), s.hidden_size),
        "q_layernorm.weight": vector(f"{hf}q_a_layernorm.weight", query_rank),
        "linear_q_up_proj.weight": by_rows("q_b_proj", queries, query_rank),
    }


def _delta_net(s: ModelShape, linear: LinearAttention) -> dict[str, Parameter]:
    """A gated delta net."""
    keys, values, heads, hf = linear.keys, linear.values, linear.value_heads, "linear_attn."
    rows = ((keys, 0), (keys, keys), (values, 2 * keys))
    if linear.interleaved:
        projected = _interleaved(f"{hf}in_proj_qkvz.weight", [keys, keys, values, values], linear.key_heads)
        projected += _interleaved(f"{hf}in_proj_ba.weight", [heads, heads], linear.key_heads)
    else:
        projected = [Segment(f"{hf}in_proj_qkv.weight", count, first) for count, first in rows]
        projected += [
            Segment(f"{hf}in_proj_{n}.weight", k) for n, k in (("z", values), ("b", heads), ("a", heads))
        ]
    convolved = tuple(Segment(f"{hf}conv1d.weight", count, first) for count, first in rows)
    return {
        "dt_bias": Parameter((Segment(f"{hf}dt_bias", heads),), cut="rows"),
        "A_log": Parameter((Segment(f"{hf}A_log", heads),), cut="rows", float32=True),
        "in_proj.weight": Parameter(tuple(projected), s.hidden_size, "segments"),
        "conv1d.weight": Parameter(convolved, (1, linear.kernel), "segments"),
        "out_norm.weight": Parameter((Segment(f"{hf}norm.weight", linear.value_dim),), float32=True),
        "out_proj.weight": by_columns(f"{hf}out_proj.weight", s.hidden_size, values),
    }


def _interleaved(name: str, parts: list[int], heads: int) -> list[Segment]:
    """Parts of a tensor that has the rows of each head together. parts: rows of each part in all heads."""
    blocks = [rows // heads for rows in parts]
    starts = accumulate(blocks, initial=0)
    return [
        Segment(name, rows, first, block, sum(blocks))
        for rows, first, block in zip(parts, starts, blocks, strict=False)
    ]


def qkv(s: ModelShape, what: str) -> Parameter:
    """Query, key and value projections, interleaved by query group: their ``weight`` or their ``bias``."""
    if s.gated_attention:
        return _gated_qkv(s)
    queries = s.num_heads // s.num_kv_heads * s.head_dim
    rows = {"q": queries, "k": s.head_dim, "v": s.head_dim}
    names = {name: f"self_attn.{'qkv' if s.fused_rows else name}_proj.{what}" for name in rows}
    starts = dict.fromkeys(rows, 0)
    if s.fused_rows:  # all query rows, then all key rows, then all value rows
        starts |= {"k": s.num_kv_heads * queries, "v": s.num_kv_heads * (queries + s.head_dim)}
    segments = (
        Segment(names[n], rows[n], starts[n] + group * rows[n])
        for group in range(s.num_kv_heads)
        for n in rows
    )
    return Parameter(tuple(segments), s.hidden_size if what == "weight" else None, "rows")


def _gated_qkv(s: ModelShape) -> Parameter:
    """The same with a gate for each query head."""
    d, each = s.head_dim, s.num_heads // s.num_kv_heads
    segments: list[Segment] = []
    for group in range(s.num_kv_heads):
        for first in (0, d):
            heads = range(group * each, (group + 1) * each)
            segments += [Segment("self_attn.q_proj.weight", d, 2 * d * head + first) for head in heads]
        segments += [Segment(f"self_attn.{n}_proj.weight", d, group * d) for n in ("k", "v")]
    return Parameter(tuple(segments), s.hidden_size, "rows")


def stored_rows(s: ModelShape, name: str) -> tuple[str, slice]:
    """The HF tensor, and its rows, that hold a projection or its bias. name: as if it had its own tensor."""
    keys = s.num_kv_heads * s.head_dim
    fused = {
        "qkv_proj": {"q_proj": s.num_heads * s.head_dim, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": s.ffn_hidden_size, "up_proj": s.ffn_hidden_size},
    }
    for whole, parts in fused.items() if s.fused_rows else ():
        first = 0
        for part, rows in parts.items():
            if f".{part}." in name:
                return name.replace(part, whole), slice(first, first + rows)
            first += rows
    return name, slice(None)


def _feed_forward(s: ModelShape, block: str, hf: str, columns: int) -> dict[str, Parameter]:
    """A gated feed-forward block, or one expert. block, hf: what its names begin with."""
    gate, up = Segment(f"{hf}gate_proj.weight", columns), Segment(f"{hf}up_proj.weight", columns)
    if s.fused_rows:
        gate, up = (Segment(f"{hf}gate_up_proj.weight", columns, first) for first in (0, columns))
    return {
        f"{block}linear_fc1.weight": Parameter((gate, up), s.hidden_size, "segments"),
        f"{block}linear_fc2.weight": by_columns(f"{hf}down_proj.weight", s.hidden_size, columns),
    }


def by_columns(name: str, rows: int, columns: int) -> Parameter:
    """An output projection, split by columns."""
    return Parameter((Segment(name, rows),), columns, "columns")


def vector(name: str, size: int) -> Parameter:
    """A replicated vector."""
    return Parameter((Segment(name, size),))
