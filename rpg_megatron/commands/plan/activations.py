"""Activation memory: the tensors that autograd saves between the forward and the backward pass.

One table has a column for Megatron's own (local) layers and one for Transformer Engine's (fused) ones. Local:
counted from the layers that ``policy/model.py`` specifies; a test compares the sums with what autograd saves.
Fused: counted from the sources of Transformer Engine 2.20.2 and Megatron-Core 0.19.2, as passed to
``save_for_backward``; memory that two tensors share counts once. Not measured on a GPU. Not counted: tensors
with one number per sequence, and the rotary angles, 4 bytes x head size x longest sequence for all layers.

With adapters all other weights are frozen: a linear layer then saves its input only if an adapter reads it,
in bfloat16 also with FP8, and norms save nothing for the gradient of their weight. Transformer Engine's norms
are layers of their own. Not counted: the copies of A that are read as one matrix. Counted too much: the first
layer of all saves less, since its input needs no gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.commands.plan.layout import in_fp8, layers_of
from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.config.lora import ATTENTION_TARGETS, OUTPUT_LAYER, LoraSettings
from rpg_megatron.config.policy import FP8Settings, ParallelSettings
from rpg_megatron.models.lora import PACKED
from rpg_megatron.system.dtypes import ITEM_BYTES

Device = Literal["cpu", "cuda"]
Recompute = Literal["none", "selective", "full"]
Routes = Literal["even", "worst"]
"""How tokens choose experts: even load, or all tokens choose the experts of one rank."""

_WIDE = 4
"""Bytes of a float32 number: norms, softmax and the weights of experts use it."""
_INDEX = 8
"""Bytes of an index, int64."""
_BLOCK = 128
"""Values that share one float32 scale with the blockwise FP8 recipe."""


def uses_fused_layers(settings: Settings, device: str) -> bool:
    """Whether the policy's layers are Transformer Engine's on this kind of device (cpu, cuda).

    The same rule as ``policy.precision.uses_transformer_engine``, assuming that the package is installed.
    """
    implementation, dtype = settings.model.implementation, settings.precision.dtype
    return device == "cuda" and dtype == "bfloat16" and implementation != "local"


def expert_rows(shape: ModelShape, parallel: ParallelSettings, routes: Routes = "even") -> float:
    """Rows that the experts of a rank process in one layer, per token of its micro-batch; dense model: 0.

    A row is one token in one of its experts. With even load, a rank processes as many rows as its own tokens
    have, times the ranks that share an expert. No token is dropped: at worst, all tokens of the
    expert-parallel ranks choose the experts of one rank.
    """
    e = shape.experts
    if e is None:
        return 0
    shared = parallel.expert_tensor / parallel.tensor
    if routes == "even":
        return shared * e.per_token
    return shared * parallel.expert * min(e.per_token, e.count // parallel.expert)


def saved_tensors(
    shape: ModelShape,
    parallel: ParallelSettings,
    dtype: str,
    *,
    fused: bool,
    recompute: Recompute,
    fp8: FP8Settings | None = None,
    experts: bool = False,
    routes: Routes = "even",
    lora: LoraSettings | None = None,
) -> dict[str, float]:
    """Bytes per token of a context rank of each tensor that a layer saves, in the order of the forward pass.

    fused: which column. fp8: of fused layers; None for a layer in bfloat16. experts: whether the layer has
    experts instead of a dense MLP. Local layers with sequences of similar length, which share an attention
    call, save less than is counted here.
    """
    item, hidden, tensor = ITEM_BYTES[dtype], shape.hidden_size, parallel.tensor
    # Columns of this rank: of the residual stream, of queries, of keys (as many as of values).
    stream = hidden / (tensor if parallel.sequence else 1)
    heads, kv_heads = shape.num_heads / tensor, max(1.0, shape.num_kv_heads / tensor)
    queries, keys = heads * shape.head_dim, kv_heads * shape.head_dim
    if recompute == "full":
        return {"layer's input": item * stream}
    # FP8: only one orientation, that of the weight gradient's product; with sequence parallelism and one
    # scale per tensor the other, from which it is computed after the all-gather. Both are a byte per element.
    low = item if fp8 is None else 1 + (_WIDE / _BLOCK if fp8.recipe == "blockwise" else 0)
    # With delayed scaling, the projection saves its own FP8 input, because the scale has changed by the
    # backward pass. Otherwise it reads the memory of attention's output.
    projected = low * queries if fp8 is not None and fp8.recipe == "delayed" and lora is None else 0
    frozen, names = lora is not None, () if lora is None else lora.names
    if experts:
        names = tuple(name for name in names if name in ATTENTION_TARGETS)

    def read(*projections: str, width: float = low) -> float:
        """Bytes per column of the input of these projections, which the gradient of a weight needs."""
        return (item if any(name in names for name in projections) else 0) if frozen else width

    def narrow(*projections: str, ranks: float = 1) -> float:
        """A x of adapters, of the tokens of one of ``ranks`` ranks."""
        rows = 0 if lora is None else lora.rank * sum(name in names for name in projections)
        return item * rows / ranks

    qkv_names, _, inner_names, _ = PACKED
    cut = tensor if parallel.sequence else 1
    # With context parallelism, local layers gather the keys and values of all ranks and recompute attention.
    # Fused layers save their own queries and output, and the keys and values of one rank, the last received.
    one_rank = parallel.context == 1
    qkv = item * (queries + 2 * keys) if one_rank or shape.qk_norm else 0
    gathered = 0 if one_rank else parallel.context * 2 * item * keys
    rms, head_rms = _WIDE * stream / hidden, _WIDE * (heads + kv_heads)
    # (tensor, bytes in local layers, bytes in fused layers)
    attention = [
        ("layer's input, which the first norm reads", item * stream, item * stream),
        ("1/rms", rms, rms),
        (
            "first norm's output, read by QKV",
            read(*qkv_names, width=item) * stream,
            read(*qkv_names) * stream,
        ),
        ("adapters of QKV: A x", *(narrow(*qkv_names),) * 2),
        ("QKV, of which values, and keys before their norm, are views", qkv, 0),
    ]
    if shape.qk_norm:
        attention += [
            ("queries before their norm", item * queries, item * queries),
            ("keys before their norm", 0, item * keys),
            ("1/rms of query and key heads", head_rms, head_rms),
        ]
    attention += [
        ("queries, rotated", item * queries, item * queries),
        ("keys, rotated", one_rank * item * keys, item * keys),
        ("values", 0, item * keys),
        ("keys and values of all context ranks", gathered, 0),
        ("attention's output", one_rank * item * queries, item * queries),
        ("log-sum-exp of each head", one_rank * _WIDE * heads, _WIDE * heads),
        ("outputs of all sequences, read by the projection", read("o_proj", width=item) * queries, 0),
        ("attention's output in FP8, read by the projection", 0, projected),
        ("adapter of the projection: A x", *(narrow("o_proj", ranks=cut),) * 2),
        ("attention's sum with the stream, which the second norm reads", item * stream, item * stream),
    ]
    # A router reads it, and the recomputed part of a layer begins with it.
    wide, thin = read(*inner_names, width=item), read(*inner_names)
    if frozen and (experts or recompute == "selective"):
        wide = thin = item
    second_norm = [
        ("1/rms, second", rms, rms),
        ("second norm's output", wide * stream, thin * stream),
    ]
    columns = shape.ffn_hidden_size / tensor
    mlp = [
        ("adapters of gate and up: A x", *(narrow(*inner_names),) * 2),
        ("gate|up", 2 * item * columns, 2 * item * columns),
        (
            "silu(gate) x up, read by the second linear layer",
            read("down_proj", width=item) * columns,
            read("down_proj") * columns,
        ),
        ("adapter of the second linear layer: A x", *(narrow("down_proj", ranks=cut),) * 2),
    ]
    if experts and (e := shape.experts) is not None:
        rows = expert_rows(shape, parallel, routes)
        columns = rows * item * e.ffn_hidden_size / parallel.expert_tensor
        # Indices of all (expert, token) pairs, of which Megatron keeps a view; of each choice two indices and
        # a weight.
        router = (_INDEX * e.count + e.per_token * (2 * _INDEX + _WIDE)) / tensor
        trained = not frozen
        mlp = [
            ("rows in the order of the experts", *(trained * rows * item * hidden,) * 2),
            ("gate|up", 2 * columns, 2 * columns),
            ("product before it is weighted", columns, 0),
            ("weighted product, read by the second linear layer", *(trained * columns,) * 2),
            ("weights of the rows", rows * _WIDE, rows * _WIDE),
            ("router's indices and weights", router, router),
        ]
    # Selective recomputation keeps all up to the MLP. The second norm is a part of a dense fused MLP, if that
    # is trained.
    kept = attention + (second_norm if recompute == "none" or experts or not fused or frozen else [])
    table = kept + (mlp if recompute == "none" else [])
    column = {name: of_fused if fused else of_local for name, of_local, of_fused in table}
    return {name: nbytes for name, nbytes in column.items() if nbytes}


def head_tensors(
    shape: ModelShape, parallel: ParallelSettings, dtype: str, lora: LoraSettings | None = None
) -> dict[str, float]:
    """Bytes per token of what the last stage saves after the layers: final norm and log-prob head."""
    item, stream = ITEM_BYTES[dtype], shape.hidden_size / (parallel.tensor if parallel.sequence else 1)
    table = {
        "final norm's input": item * stream,
        "1/rms": _WIDE * stream / shape.hidden_size,
        "head's input, of all tokens": item * shape.hidden_size,
        "targets, two normalisers, entropy": 20,
    }
    if lora is not None and OUTPUT_LAYER in lora.names:
        table["adapter of the head: A x"] = item * lora.rank
        if parallel.sequence:  # elsewhere the head's own input
            table["adapter's input"] = item * stream
    return table


@dataclass(frozen=True)
class StageActivations:
    """The activations of a rank of one pipeline stage."""

    settings: Settings
    shape: ModelShape
    stage: int
    tokens: int
    """Tokens of the largest micro-batch of its replica."""
    microbatches: int
    """Micro-batches per update."""
    device: Device

    @property
    def fused(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return uses_fused_layers(self.settings, self.device)

    @property
    def _sizes(self) -> tuple[ModelShape, ParallelSettings, str]:
        return self.shape, self.settings.parallel, self.settings.precision.dtype

    @property
    def _layers(self) -> list[int]:
        return [n for part in layers_of(self.shape, self.settings.parallel, self.stage) for n in part]

    def saved(self, recompute: Recompute, routes: Routes = "even") -> int:
        """Bytes of all micro-batches in flight."""
        parallel, fp8, shape = self.settings.parallel, self.settings.precision.fp8, self.shape
        kinds = Counter((in_fp8(fp8, n, shape.num_layers), shape.has_experts(n)) for n in self._layers)
        of_layers = sum(
            number * self._layer_bytes(recompute, routes, fp8=fp8 if on else None, experts=experts)
            for (on, experts), number in kinds.items()
        )
        total = in_flight(self.stage, parallel, self.microbatches) * of_layers / parallel.virtual
        if self.stage == parallel.pipeline - 1:
            head = sum(head_tensors(*self._sizes, self.settings.lora).values())
            total += self.tokens / parallel.context * head
        return round(total)

    def _layer_bytes(
        self, recompute: Recompute, routes: Routes, *, fp8: FP8Settings | None = None, experts: bool
    ) -> float:
        """Bytes that a layer saves for one micro-batch."""
        saved = saved_tensors(
            *self._sizes,
            fused=self.fused,
            recompute=recompute,
            fp8=fp8,
            experts=experts,
            routes=routes,
            lora=self.settings.lora,
        )
        return self.tokens / self.settings.parallel.context * sum(saved.values())

    def working(self, recompute: Recompute, routes: Routes = "even") -> int:
        """Bytes of the largest backward pass of one layer besides the activations that are saved.

        What is recomputed, and the gradients of the MLP's inner tensors, of the stream and of one weight.
        """
        most = 0.0
        for experts in {self.shape.has_experts(n) for n in self._layers}:
            kept, everything = (self._layer_bytes(r, routes, experts=experts) for r in (recompute, "none"))
            most = max(most, self._gradients(routes, experts=experts) + everything - kept)
        return round(most)

    def _gradients(self, routes: Routes, *, experts: bool) -> float:
        """Bytes of the gradients that a layer's backward pass holds at once.

        Fused layers compute all experts of a rank at once, local layers one after the other. Frozen weights
        have no gradient, but adding adapters to gate|up takes three tensors of its size.
        """
        shape, parallel, dtype = self._sizes
        hidden, tokens = shape.hidden_size, -(-self.tokens // parallel.context)
        columns, frozen = shape.ffn_hidden_size / parallel.tensor, self.settings.lora is not None
        inner, weight = (6 if frozen else 5) * columns, 2 * columns * hidden
        if experts and (e := shape.experts) is not None:
            held, columns = e.count // parallel.expert, e.ffn_hidden_size / parallel.expert_tensor
            # The rows in the order of the tokens and of the experts, and the inner tensors.
            of_row = 2 * hidden + (3 * columns if self.fused else 5 * columns / held)
            inner = expert_rows(shape, parallel, routes) * of_row
            weight = (held if self.fused else 1) * 2 * columns * hidden
        return ITEM_BYTES[dtype] * (tokens * (inner + 3 * hidden) + (0 if frozen else weight))

    def worst_routes(self, recompute: Recompute) -> int:
        """Additional bytes in an update if all tokens choose this rank's experts; 0 for a dense model."""
        saved = self.saved(recompute, "worst") - self.saved(recompute)
        return saved + self.working(recompute, "worst") - self.working(recompute)


def in_flight(stage: int, parallel: ParallelSettings, microbatches: int) -> int:
    """Micro-batches whose activations a pipeline rank holds at once, each for one of its (virtual) stages.

    1F1B: the first rank has the most. Interleaved: the warm-up has 2 x (later ranks) + (virtual - 1) x
    pipeline forward passes of one chunk, plus the current one.
    """
    behind = parallel.pipeline - stage - 1
    if parallel.virtual == 1:
        return min(microbatches, behind + 1)
    rounded = -(-microbatches // parallel.pipeline) * parallel.pipeline
    return min(rounded * parallel.virtual, 2 * behind + (parallel.virtual - 1) * parallel.pipeline + 1)
