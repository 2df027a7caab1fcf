"""Names of the activations that an audit compares between Megatron and vLLM, and the parameter behind each.

A trace maps the name of a site to its values for the tokens of some sequences: [t, width], joined over ranks
or workers. Heads are side by side in a row, in the order of the Hugging Face model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "activation": None,
    "mlp_output": "mlp.down_proj.weight",
}
"""Sites of a layer in the order of computation, each with the HF parameter (name within the layer) that
computes it from earlier sites, or None. ``input`` and ``middle`` are the residual stream before attention and
before the MLP.
"""
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


def all_sites(layers: int, qk_norm: bool) -> list[str]:
    """Every site of a model in the order of computation."""
    parts = [p for p in PARTS if qk_norm or p not in ("query_norm", "key_norm")]
    inside = [layer_site(i, part) for i in range(layers) for part in parts]
    return [*inside, FINAL_INPUT, FINAL_NORM, LOGITS]


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
