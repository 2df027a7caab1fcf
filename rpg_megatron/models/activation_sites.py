"""Names of the activations that an audit compares between Megatron and vLLM, and the parameter of each.

A trace maps the name of a site to its values for the tokens of some sequences: [t, width], joined over ranks
or workers. Heads are concatenated in the order of the Hugging Face model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpg_megatron.config.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

type Trace = dict[str, Tensor]

PARTS: dict[str, str | None] = {
    "input": None,
    "input_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "query_rope": None,
    "key_rope": None,
    "attention": None,
    "attention_output": "self_attn.o_proj.weight",
    "middle": None,
    "mlp_norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
    "experts": None,
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "activation": None,
    "mlp_output": "mlp.down_proj.weight",
}
"""Sites of a layer in the order of computation, each with the HF parameter (name within the layer) that
computes it from earlier sites, or None. ``input`` and ``middle`` are the residual stream before attention and
before the MLP. A layer with experts has ``router``, its logits [t, experts], and ``experts``, the output of
the block, shared expert included; a dense layer has the sites after those instead.
"""
EXPERT_PARTS, _DENSE_PARTS = ("router", "experts"), ("gate", "up", "activation", "mlp_output")
SHARED_EXPERT = "shared_expert"
NORMS = ("input_norm", "query_norm", "key_norm", "mlp_norm", "final_norm")
FINAL_INPUT, FINAL_NORM, LOGITS = "final_input", "final_norm", "logits"
"""The residual stream after the last layer, its norm, and the engine's logits at the sampled positions."""


def layer_site(layer: int, part: str) -> str:
    """Name of a part of layer ``layer``, counted from 0 through the whole model."""
    return f"layers.{layer}.{part}"


def split_site(site: str) -> tuple[int | None, str]:
    """Layer and part of a site; the layer is None outside the layers."""
    if not site.startswith("layers."):
        return None, site
    _, layer, part = site.split(".")
    return int(layer), part


def all_sites(shape: ModelShape) -> list[str]:
    """All sites of a model in the order of computation."""
    inside = [layer_site(i, part) for i in range(shape.num_layers) for part in layer_parts(shape, i)]
    return [*inside, FINAL_INPUT, FINAL_NORM, LOGITS]


def layer_parts(shape: ModelShape, layer: int) -> list[str]:
    """The sites of a layer in the order of computation."""
    absent = set(_DENSE_PARTS if shape.has_experts(layer) else EXPERT_PARTS)
    if not shape.qk_norm:
        absent |= {"query_norm", "key_norm"}
    return [part for part in PARTS if part not in absent]


def block_output(shape: ModelShape, layer: int) -> str:
    """The site that is added to the residual stream after ``middle``."""
    return layer_site(layer, "experts" if shape.has_experts(layer) else "mlp_output")


def parameter_of(site: str, tied: bool = False) -> str | None:
    """HF name of the parameter that computes a site, or None. tied: input and output embeddings are tied."""
    layer, part = split_site(site)
    if layer is None:
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return {FINAL_NORM: "model.norm.weight", LOGITS: head}.get(part)
    if (layer, part) == (0, "input"):
        return "model.embed_tokens.weight"
    inside = PARTS[part]
    return inside and f"model.layers.{layer}.{inside}"


def parameters_of(site: str, shape: ModelShape) -> list[str]:
    """HF names of all parameters that compute a site: none, one, or those of all experts."""
    layer, part = split_site(site)
    if layer is not None and part == "experts" and (experts := shape.experts) is not None:
        names = [name for e in range(experts.count) for name in expert_matrices(layer, f"experts.{e}")]
        shared = [shared_gate(layer), *expert_matrices(layer, SHARED_EXPERT)]
        return names + (shared if experts.shared_ffn_hidden_size else [])
    name = parameter_of(site, shape.tied_embeddings)
    return [] if name is None else [name]


def expert_matrices(layer: int, block: str) -> list[str]:
    """HF names of an expert's matrices: gate, up, down. block: ``experts.0``, say, or ``SHARED_EXPERT``."""
    return [f"model.layers.{layer}.mlp.{block}.{matrix}_proj.weight" for matrix in ("gate", "up", "down")]


def shared_gate(layer: int) -> str:
    """HF name of what scales the output of the shared expert."""
    return f"model.layers.{layer}.mlp.{SHARED_EXPERT}_gate.weight"
