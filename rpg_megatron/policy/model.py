"""Builds the policy: a Megatron-Core GPTModel with the sizes in a Hugging Face config.json."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rpg_megatron.config.model_shape import ExpertShape, ModelShape
from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
from rpg_megatron.models.partition import ExpertShard, RankCoordinates
from rpg_megatron.policy.layer_specs import layer_specs, megatron_rotates, norm_type
from rpg_megatron.policy.precision import fp8_fields, fused_weight_gradients
from rpg_megatron.policy.rotary import rotary_frequencies
from rpg_megatron.system.dtypes import torch_dtype

CPU = torch.device("cpu")
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # The largest activations: dense feed-forward blocks, and experts with their router.
    # Attention keeps no score matrix, so recomputing it saves little; Megatron recomputes norms with
    # Transformer Engine only.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
_LOCAL_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)")


@dataclass(frozen=True)
class Mesh:
    """This rank's position in the parallel layout."""

    rank: int
    world: int
    tensor: int
    tensor_rank: int
    pipeline: int
    pipeline_rank: int
    data: int
    data_rank: int
    context: int
    context_rank: int
    experts: ExpertShard

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the output layer; log-probs and losses exist only on this stage."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def reports(self) -> bool:
        """Whether this rank contributes the results of its data-parallel replica: one rank of each does."""
        return self.last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def leads(self) -> bool:
        """Whether this rank is its data-parallel replica's leader, the first of its ranks."""
        return self.rank == self.replica(self.data_rank)[0]

    def coordinates(self, vocab_multiple: int) -> RankCoordinates:
        """This rank's ``RankCoordinates``. vocab_multiple: see there."""
        return RankCoordinates(
            rank=self.rank,
            tensor=self.tensor,
            tensor_rank=self.tensor_rank,
            pipeline_rank=self.pipeline_rank,
            data_rank=self.data_rank,
            context_rank=self.context_rank,
            vocab_multiple=vocab_multiple,
            experts=self.experts,
        )

    def replica(self, data: int) -> list[int]:
        """The ranks of data-parallel replica ``data``, ascending."""
        # Megatron numbers ranks by tensor, context, data, pipeline rank.
        inner = self.tensor * self.context
        return [
            rank
            for stage in range(self.pipeline)
            for rank in range((stage * self.data + data) * inner, (stage * self.data + data + 1) * inner)
        ]


def start_mesh(parallel: ParallelSettings) -> Mesh:
    """Create Megatron's process groups for a parallel layout. Collective over all ranks."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=_virtual(parallel),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=False,  # for formats of checkpoints that are not ours
    )
    # Dropout is not used, so the RNG tracker without CUDA state works on every device.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    return Mesh(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tensor=mpu.get_tensor_model_parallel_world_size(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        pipeline=mpu.get_pipeline_model_parallel_world_size(),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        data=mpu.get_data_parallel_world_size(),
        data_rank=mpu.get_data_parallel_rank(),
        context=mpu.get_context_parallel_world_size(),
        context_rank=mpu.get_context_parallel_rank(),
        experts=ExpertShard(
            parallel=mpu.get_expert_model_parallel_world_size(),
            rank=mpu.get_expert_model_parallel_rank(),
            tensor=mpu.get_expert_tensor_parallel_world_size(),
            tensor_rank=mpu.get_expert_tensor_parallel_rank(),
        ),
    )


def _virtual(parallel: ParallelSettings) -> int | None:
    """None for 1: Megatron chooses the interleaved schedule for any number, including 1."""
    return parallel.virtual if parallel.virtual > 1 else None


_LOCAL: dict[str, Any] = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "use_te_activation_func": True,  # the spec's activation, which is ours
}
_FUSED: dict[str, Any] = {
    "transformer_impl": "transformer_engine",
    "apply_rope_fusion": True,
    "bias_activation_fusion": True,
}
"""Fields for Transformer Engine's layers."""


def transformer_config(
    shape: ModelShape,
    parallel: ParallelSettings,
    precision: PrecisionSettings,
    recompute: str = "none",
    *,
    device: torch.device = CPU,
    fused: bool = False,
    replays: bool = False,
) -> TransformerConfig:
    """Megatron's TransformerConfig for a model shape, parallel layout, precision and activation recompute.

    recompute: none, selective or full. device: where weights are initialised. fused: use Transformer Engine's
    layers, which ``precision.fp8`` requires on a GPU. On a CPU the FP8 fields are not set; ``emulate_fp8`` is
    used instead. replays: routers will get the engine's choice of experts (``router_replay``).
    """
    dtype = torch_dtype(precision.dtype)
    implementation = _FUSED if fused else _LOCAL
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        layernorm_zero_centered_gamma=shape.zero_centred,
        qk_layernorm=shape.qk_norm,
        attention_output_gate=shape.gated_attention,
        **_linear_fields(shape),
        softmax_scale=shape.scales.attention,
        # Transformer Engine's; local layers get their window from the spec.
        window_size=(shape.windows.tokens - 1, 0) if shape.windows else None,
        window_attn_skip_freq=[int(shape.window(n) is not None) for n in range(shape.num_layers)],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=_virtual(parallel),
        pipeline_model_parallel_layout=_uneven_stages(shape, parallel.pipeline * parallel.virtual),
        sequence_parallel=parallel.sequence,
        context_parallel_size=parallel.context,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # FP8 weights can be initialised on a GPU only.
        use_cpu_initialization=device.type == "cpu",
        # Initialisation also marks tensor-parallel parameters. Without the marks the gradient norm, and so
        # clipping, would be silently wrong.
        perform_initialization=True,
        gradient_accumulation_fusion=fused_weight_gradients(device),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        # Transformer Engine's cuDNN attention, which supports packed sequences, also with context
        # parallelism. Local layers ignore it, but a process can set it only once.
        attention_backend=AttnBackend.fused,
        # The interleaved schedule sends in both directions of the ring. With two stages, each is the other's
        # neighbour on both sides, and one batched call could confuse an activation with a gradient.
        overlap_p2p_comm=parallel.virtual > 1,
        batch_p2p_comm=parallel.virtual == 1,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        **implementation,
        **fp8_fields(precision.fp8 if device.type == "cuda" else None),
        **_RECOMPUTE[recompute],
        **_expert_fields(shape, parallel, fused, replays),
        # Micro-batches are packed to a token budget, so their lengths differ.
        variable_seq_lengths=parallel.pipeline > 1,
        # Required by variable_seq_lengths, also for dense models. The alternative, allgather, needs the same
        # number of tokens on every rank, which packed micro-batches do not provide.
        moe_token_dispatcher_type="alltoall",
        # Losses are sums; gradients are divided once by the token count of the whole mini-batch.
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def _expert_fields(
    shape: ModelShape, parallel: ParallelSettings, fused: bool, replays: bool
) -> dict[str, Any]:
    """Fields of a mixture of experts; empty for dense models."""
    e = shape.experts
    if e is None:
        return {}
    return {
        "num_moe_experts": e.count,
        "moe_layer_freq": [int(layer in e.layers) for layer in range(shape.num_layers)],
        "moe_ffn_hidden_size": e.ffn_hidden_size,
        "moe_router_topk": e.per_token,
        "moe_shared_expert_intermediate_size": e.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": e.shared_ffn_hidden_size > 0 and e.shared_gate,
        **_router_fields(e),
        # A softmax over the chosen experts' logits equals a softmax over all, normalised afterwards.
        "moe_router_pre_softmax": not e.normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # see router_aux_loss
        # Transformer Engine's: one kernel for all experts, for sorting the tokens, for choosing experts. The
        # last ignores a choice that is given.
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "moe_router_fusion": fused and not replays,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def _router_fields(e: ExpertShape) -> dict[str, Any]:
    """Fields of a sigmoid router; empty for others. Its bias is our ``Router``'s."""
    if (router := e.router) is None:
        return {}
    grouped = router.groups > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": router.scale,
        "moe_router_num_groups": router.groups if grouped else None,
        "moe_router_group_topk": router.chosen_groups if grouped else None,
    }


def _linear_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of layers with linear attention; empty without."""
    if (linear := shape.linear) is None:
        return {}
    return {
        "linear_conv_kernel_dim": linear.kernel,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
    }


def _uneven_stages(shape: ModelShape, stages: int) -> list[list[str]] | None:
    """Megatron's list of the layers of each (virtual) stage; None if the layers divide evenly.

    Megatron's simpler settings (layers of the first and last stage) need equal stages in between.
    """
    if shape.num_layers % stages == 0:
        return None
    parts = [["decoder"] * layers for layers in shape.stage_layers(stages)]
    parts[0].insert(0, "embedding")
    parts[-1].append("loss")
    return parts


def build_model(
    shape: ModelShape,
    config: TransformerConfig,
    model: ModelSettings,
    mesh: Mesh,
    *,
    separate_norms: bool = False,
    share_prompts: bool = False,
) -> list[GPTModel]:
    """This rank's part of the policy, weights not yet loaded: one chunk for each of its virtual stages.

    Chunk v of pipeline rank p is virtual stage v x pipeline + p; without virtual stages there is one chunk.
    separate_norms: keep Transformer Engine's norms out of its linear layers, whose input adapters read.
    share_prompts: Transformer Engine's attention takes rows with shared prompts, too; local layers always do.
    """
    # Megatron warns that GPTModel is deprecated; its successor does not support our layer specs yet.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    specs = layer_specs(shape, config, separate_norms=separate_norms, share_prompts=share_prompts)
    fused = config.transformer_impl == "transformer_engine"
    rotates = fused and not share_prompts and megatron_rotates(shape)  # elsewhere attention does it itself
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    for number in range(virtual or 1):
        stage = number if virtual else None
        first = get_transformer_layer_offset(config, vp_stage=stage)
        own_layers = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
        block = TransformerBlockSubmodules(
            layer_specs=[specs[layer] for layer in own_layers], layer_norm=norm_type(fused)
        )
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=shape.padded_vocab(mesh.tensor, model.vocab_multiple),
            max_sequence_length=shape.max_positions,
            pre_process=mesh.first_stage and number == 0,
            post_process=mesh.last_stage and number == (virtual or 1) - 1,
            position_embedding_type="rope" if rotates else "none",
            rotary_base=shape.rope.theta,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            parallel_output=True,
            vp_stage=stage,
        )
        if rotates and shape.rope.scaling is not None:
            # GPTModel(rope_scaling=True) accepts the factor only: Megatron 0.19.2 fixes the other values to
            # 1, 4 and 8192. This is a plain attribute, not a buffer; Megatron moves it to the device on first
            # use.
            gpt.rotary_pos_emb.inv_freq = rotary_frequencies(shape.rope, shape.head_dim)
        if gpt.pre_process and shape.scales.embedding != 1:
            gpt.embedding.register_forward_hook(lambda _, __, out: out * shape.scales.embedding)
        if gpt.post_process and shape.scales.logits != 1:
            # Of what the output layer reads, so that no user of its weight has to know.
            gpt.decoder.final_layernorm.register_forward_hook(lambda _, __, out: out * shape.scales.logits)
        for name, parameter in gpt.named_parameters():
            if ".experts." in name:
                # Reduced over the ranks that hold the same experts. Megatron sets this only with expert
                # parallelism. Set always, so that optimizers of all layouts have the same structure and their
                # checkpoints are interchangeable.
                parameter.allreduce = False
        chunks.append(gpt)
    return chunks


def named_parameters(chunks: Iterable[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A rank's parameters under Megatron's names, layers numbered through the whole model.

    Megatron numbers the layers of each chunk from 0; here names are unique over all chunks and stages.
    """
    for chunk in chunks:
        layers = chunk.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in chunk.named_parameters():
            if match := _LOCAL_LAYER.match(name):
                name = f"{match[1]}{int(match[2]) + first}{name[match.end() :]}"
            yield name, parameter
