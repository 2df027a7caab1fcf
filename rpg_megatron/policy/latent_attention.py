"""Latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1): short vectors of each token give keys and values.

In place of Megatron 0.19.2's ``MLASelfAttention``, which in local layers loses the other tensor-parallel
ranks' gradient of the key that all heads share, puts a norm in front of ``linear_q_proj``, and rotates by
frequencies of its own. The parameters have its names and shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.policy.lora import gather_tokens
from rpg_megatron.policy.microbatch import PackedSequences
from rpg_megatron.policy.rotary import Rotary


class ReplicatedLinear(torch.nn.Linear):
    """A projection that each tensor-parallel rank has whole, with Megatron's result and extra state."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        # A rank has the gradient of its own tokens; Megatron sums them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """[tokens of this rank, 1, inputs] -> [tokens of this rank, 1, outputs], and no bias."""
        return super().forward(x), None

    def get_extra_state(self) -> None:
        """Megatron's checkpoints have one for FP8, which is not used here."""

    def set_extra_state(self, state: Any) -> None:
        """It is empty."""


class LatentSelfAttention(MegatronModule):  # type: ignore[misc]  # untyped
    """Projections, rotary embedding and attention of a layer; a rank has some of the heads."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        shape: ModelShape,
        submodules: MLASelfAttentionSubmodules,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        **_: Any,
    ) -> None:
        """shape: of the model. The rest as Megatron passes it."""
        super().__init__(config)
        assert shape.latent is not None
        self.latent = latent = shape.latent
        self.group = pg_collection.tp
        self.rotary = Rotary(shape.rope, latent.rotated_dim, interleaved=True)
        options = {"config": config, "bias": False, "is_expert": False, "tp_group": self.group}
        cut = {**options, "init_method": config.init_method, "gather_output": False, "skip_bias_add": False}
        heads, norm = shape.num_heads, {"config": config, "eps": config.layernorm_epsilon}
        if rank := latent.query_rank:
            self.linear_q_down_proj = ReplicatedLinear(config, shape.hidden_size, rank)
            self.q_layernorm = submodules.q_layernorm(hidden_size=rank, **norm)
            self.linear_q_up_proj = submodules.linear_q_up_proj(rank, heads * shape.head_dim, **cut)
        else:
            self.linear_q_proj = submodules.linear_q_proj(shape.hidden_size, heads * shape.head_dim, **cut)
        down, up = latent.rank + latent.rotated_dim, latent.plain_dim + latent.value_dim
        self.linear_kv_down_proj = ReplicatedLinear(config, shape.hidden_size, down)
        self.kv_layernorm = submodules.kv_layernorm(hidden_size=latent.rank, **norm)
        self.linear_kv_up_proj = submodules.linear_kv_up_proj(latent.rank, heads * up, **cut)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = submodules.linear_proj(
            heads * latent.value_dim,
            shape.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """[tokens of this rank, 1, hidden size] -> the same, and no bias."""
        latent, row = self.latent, packed_seq_params
        if latent.query_rank:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))
        else:
            query, _ = self.linear_q_proj(hidden_states)
        down, _ = self.linear_kv_down_proj(hidden_states)
        compressed, shared = down.split([latent.rank, latent.rotated_dim], -1)
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        shared = gather_tokens(shared, self.config, self.group)  # [c, 1, rotated_dim], of all heads

        query = query.view(len(query), -1, latent.plain_dim + latent.rotated_dim)
        plain, rotated = query.split([latent.plain_dim, latent.rotated_dim], -1)
        rotated, shared = self.rotary(rotated, shared, row)
        query = torch.cat([plain, rotated], -1)
        up = up.view(len(up), -1, latent.plain_dim + latent.value_dim)
        plain, value = up.split([latent.plain_dim, latent.value_dim], -1)
        key = torch.cat([plain, shared.expand(-1, plain.size(1), -1)], -1)
        # The fast kernels want values as long as keys; torch's other one keeps all scores.
        value = F.pad(value, (0, key.size(-1) - latent.value_dim))
        out = self.core_attention(
            query, key, value, attention_mask, attn_mask_type=AttnMaskType.causal, packed_seq_params=row
        )
        out = out.view(value.shape)[..., : latent.value_dim].flatten(1)
        return self.linear_proj(out[:, None])  # type: ignore[no-any-return]
