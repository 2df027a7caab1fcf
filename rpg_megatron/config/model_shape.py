"""Sizes and kinds of a model's layers: what mappings, Megatron's modules, memory and cost follow from.

Nothing here knows a family: what those have in common is in ``families.py``, how a config.json is read in
``model_config.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's scaling of the rotary frequencies, by their wavelength in tokens.

    Wavelengths up to ``original_positions / high_freq_factor`` are unchanged. Those of at least
    ``original_positions / low_freq_factor`` become ``factor`` times as long. Frequencies in between are
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    """Maximum sequence length before the scaling (original_max_position_embeddings)."""


@dataclass(frozen=True)
class YarnRope:
    """YaRN's scaling of the rotary frequencies (Peng et al. 2023, arXiv 2309.00071, section 3).

    Pairs that turn more than ``fast`` times within ``original_positions`` are unchanged. Those that turn
    less than ``slow`` times become ``factor`` times as slow. Pairs in between are interpolated by index.
    """

    factor: float
    fast: float
    slow: float
    original_positions: int
    magnitude: float
    """Factor of the rotated queries and keys (attention_factor)."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a layer."""

    theta: float
    """The base of the frequencies."""
    fraction: float = 1.0
    """Share of a head's dimensions that are rotated, the first ones (partial_rotary_factor)."""
    scaling: Llama3Rope | YarnRope | None = None


@dataclass(frozen=True)
class Windows:
    """Layers whose tokens attend to the latest tokens only."""

    tokens: int
    """How many tokens a token attends to, itself included (sliding_window)."""
    layers: tuple[int, ...]
    """Indices of these layers, ascending."""
    rope: Rope
    """The rotary embedding in these layers."""


@dataclass(frozen=True)
class LinearAttention:
    """Layers with a gated delta net (Yang et al. 2024, arXiv 2412.06464) instead of softmax attention.

    Each value head has a matrix of key_dim x value_dim that every token decays and updates. In front of it a
    short causal convolution runs over queries, keys and values.
    """

    layers: tuple[int, ...]
    """Indices of these layers, ascending."""
    key_heads: int
    """Heads of queries and of keys."""
    value_heads: int
    """A multiple of ``key_heads``."""
    key_dim: int
    """Size of a query's and of a key's head."""
    value_dim: int
    kernel: int
    """Tokens that the convolution covers."""
    interleaved: bool = False
    """Whether the checkpoint has two input projections, with the rows of each key head together."""

    @property
    def keys(self) -> int:
        """Columns of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all values, of their gates, and of the output."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def in_rows(self) -> int:
        """Rows of the input projection: queries, keys, values, gates, and two numbers for each value head."""
        return self.convolved + self.values + 2 * self.value_heads

    @property
    def token_products(self) -> int:
        """Multiplications of a token besides the matrices: with its head's state, and within its chunk.

        Three with the state (two reads, one update); in a chunk of 64 tokens, which attends causally to
        itself, two with keys, and three with values or keys.
        """
        in_chunk = CHUNK // 2 * (3 * self.key_dim + 2 * self.value_dim)
        return self.value_heads * (3 * self.key_dim * self.value_dim + in_chunk)


@dataclass(frozen=True)
class LatentAttention:
    """Softmax attention with keys and values from a short vector of each token, the latent.

    The rotated dimensions of a key come from the token itself, and all heads share them (DeepSeek-V2, arXiv
    2405.04434, 2.1).
    """

    query_rank: int
    """Size of the queries' own latent (q_lora_rank); 0: queries are projected in one step."""
    rank: int
    """Size of the latent of keys and values (kv_lora_rank)."""
    plain_dim: int
    """Dimensions of a query's and of a key's head that are not rotated (qk_nope_head_dim)."""
    rotated_dim: int
    """Those that are, the last ones, in neighbouring pairs (qk_rope_head_dim)."""
    value_dim: int
    """Size of a value's head (v_head_dim)."""


CHUNK = 64
"""Tokens that the gated delta rule computes together, in FLA and here."""


@dataclass(frozen=True)
class Scales:
    """Constant factors of a model's values."""

    embedding: float = 1.0
    """Of the embedding's output."""
    residual: float = 1.0
    """Of what attention and the MLP add to the residual stream."""
    attention: float | None = None
    """Of the attention scores; None: 1 / sqrt(head_dim)."""
    logits: float = 1.0
    """Of the logits."""


@dataclass(frozen=True)
class SigmoidRouter:
    """Experts are chosen by the sigmoid of the router's logits plus a bias, which is not trained (see
    DeepSeek-V3, arXiv 2412.19437, 2.1.2). A token's weights are the sigmoids of its experts, normalised.
    """

    scale: float
    """Factor of the weights (routed_scaling_factor)."""
    groups: int
    """Groups of consecutive experts (n_group)."""
    chosen_groups: int
    """Groups from which a token's experts are, those with the largest sum of their best two (topk_group)."""


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a mixture-of-experts model; all layers with experts have the same number."""

    count: int
    """Number of experts in a layer."""
    per_token: int
    """Number of experts that the router chooses for a token (top-k)."""
    ffn_hidden_size: int
    """Feed-forward size of one expert (moe_intermediate_size)."""
    normalised: bool
    """Whether the weights of a token's chosen experts sum to 1 (norm_topk_prob)."""
    layers: tuple[int, ...]
    """Indices of the layers with experts, ascending; the other layers are dense."""
    shared_ffn_hidden_size: int = 0
    """Feed-forward size of one more expert, for all tokens; 0: none."""
    shared_gate: bool = True
    """Whether a sigmoid gate scales the shared expert's output."""
    router: SigmoidRouter | None = None
    """None: the router's weights are a softmax."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model and kinds of its layers."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qk_norm: bool
    """Whether queries and keys are normalised, each head by itself or, with ``wide_qk_norm``, together."""
    qkv_bias: bool
    rope: Rope
    norm_eps: float
    max_positions: int
    dtype: str
    """dtype of the weights in the checkpoint: float32, bfloat16 or float16."""
    experts: ExpertShape | None = None
    """None: all layers are dense. Otherwise ``ffn_hidden_size`` is that of the dense layers, if any."""
    windows: Windows | None = None
    """None: every token attends to all earlier ones in all layers."""
    wide_qk_norm: bool = False
    post_norm: bool = False
    """Whether the norms are behind attention and MLP, before the residual stream, instead of in front."""
    fused_rows: bool = False
    """Whether the checkpoint has one tensor for query, key and value, and one for gate and up."""
    scales: Scales = field(default_factory=Scales)
    zero_centred: bool = False
    """Whether norms multiply by 1 + weight, but for those inside of linear attention."""
    gated_attention: bool = False
    """Whether q_proj also computes a gate, which the output of softmax attention is multiplied by."""
    linear: LinearAttention | None = None
    """None: all layers have softmax attention."""
    latent: LatentAttention | None = None
    """None: keys and values are projected in one step. Otherwise ``head_dim`` is that of queries and keys."""
    prefix: str = "model."
    """What the names of the tensors begin with, but for the output layer."""
    untrained: tuple[str, ...] = ()
    """How the names of tensors begin that are not the decoder's, but a vision tower's, say."""
    fp8_files: bool = False
    """Whether weights on disk are in FP8 with scales (``fp8_files``); they are read as bfloat16."""

    @property
    def is_part(self) -> bool:
        """Whether the checkpoint has other parts, of which the decoder is ``model.language_model``."""
        return self.prefix != "model."

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a dense feed-forward block."""
        return self.experts is None or len(self.experts.layers) < self.num_layers

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, has experts instead of a dense feed-forward block."""
        return self.experts is not None and layer in self.experts.layers

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        return self.linear is not None and layer in self.linear.layers

    @property
    def softmax_layers(self) -> int:
        """Number of layers with softmax attention, which have a KV cache."""
        return self.num_layers - (len(self.linear.layers) if self.linear else 0)

    def window(self, layer: int) -> int | None:
        """Number of tokens that a token attends to in a layer; None: all."""
        return self.windows.tokens if self.windows and layer in self.windows.layers else None

    def rope_of(self, layer: int) -> Rope:
        """The rotary embedding of a layer."""
        return self.windows.rope if self.windows and layer in self.windows.layers else self.rope

    def padded_vocab(self, tensor: int, multiple: int) -> int:
        """Vocabulary rows, padded so that each of ``tensor`` ranks holds a multiple of ``multiple``."""
        step = tensor * multiple
        return -(-self.vocab_size // step) * step

    @property
    def matmul_parameters(self) -> tuple[int, int]:
        """Active parameters of a token: in the matrices of all layers, and in the output layer."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        columns = self.active_ffn_columns / self.num_layers
        if (latent := self.latent) is not None:
            down = latent.rank + latent.rotated_dim + (latent.query_rank or heads)
            up = latent.rank * self.num_heads * (latent.plain_dim + latent.value_dim)
            up += latent.query_rank * heads
            per_layer = up + self.hidden_size * (down + self.num_heads * latent.value_dim + 3 * columns)
            return int(self.num_layers * per_layer), self.hidden_size * self.vocab_size
        if (linear := self.linear) is None and not self.gated_attention:
            layer = int(self.hidden_size * (2 * heads + 2 * kv + 3 * columns))
            return self.num_layers * layer, self.hidden_size * self.vocab_size
        softmax = self.softmax_layers * ((3 if self.gated_attention else 2) * heads + 2 * kv)
        others = len(linear.layers) * (linear.in_rows + linear.values) if linear else 0
        layers = self.hidden_size * (softmax + others + self.num_layers * 3 * columns)
        return int(layers), self.hidden_size * self.vocab_size

    @property
    def attention_length(self) -> float:
        """Sequence length at which causal attention takes as many FLOPs as everything else, in tokens.

        The cost of a sequence of n tokens is proportional to n + n^2 / attention_length. Layers with windows
        and with linear attention count as everything else; infinite if there are no others.
        """
        full = self.softmax_layers - (len(self.windows.layers) if self.windows else 0)
        if full == self.num_layers:
            return self._attention_length
        others = 1 + self.state_products / sum(self.matmul_parameters)
        return self._attention_length * others * self.num_layers / full if full else math.inf

    @property
    def state_products(self) -> int:
        """Multiplications of a token in all layers with linear attention, besides the matrices."""
        return len(self.linear.layers) * self.linear.token_products if self.linear else 0

    @property
    def _attention_length(self) -> float:
        """The same, if all layers had full attention."""
        in_layers, in_head = self.matmul_parameters
        layers = self.num_layers
        value_dim = self.latent.value_dim if self.latent else self.head_dim
        return (in_layers // layers + in_head / layers) / (self.num_heads * (self.head_dim + value_dim) / 2)

    def forward_flops(self, tokens: float, squares: float) -> float:
        """FLOPs of a forward pass; a backward pass takes twice as many.

        tokens, squares: sums of n and ``squares(n)`` over the sequences of n tokens.
        2 P n for products with the P parameters of matrices (Kaplan et al. 2020, arXiv 2001.08361, 2.1), and
        2 n^2 heads head_dim layers for causal attention, half of 4 n^2 (Narayanan et al. 2021, arXiv
        2104.04473, appendix); head_dim is the mean of a key's and a value's.
        """
        flops = 2 * sum(self.matmul_parameters) * (tokens + squares / self._attention_length)
        return flops + 2 * self.state_products * tokens

    def squares(self, n: float) -> float:
        """Twice the number of pairs that causal attention covers in n tokens, on average over the layers.

        n^2 without windows; n tokens with a window of w < n have w (2 n - w). Linear attention has none.
        """
        pairs = n * n if self.linear is None else n * n * self.softmax_layers / self.num_layers
        if self.windows is None or n <= (w := self.windows.tokens):
            return pairs
        return pairs - len(self.windows.layers) / self.num_layers * (n - w) ** 2

    def attended(self, n: float) -> float:
        """Keys that the last of n tokens reads, on average over the layers with softmax attention."""
        if self.windows is None or n <= (w := self.windows.tokens):
            return n
        return n - len(self.windows.layers) / self.softmax_layers * (n - w)

    @property
    def active_ffn_columns(self) -> float:
        """Feed-forward columns that a token passes in all layers together.

        A router's outputs count a third: an expert has three matrices, the router one, as the shared
        expert's gate has.
        """
        e = self.experts
        if e is None:
            return self.num_layers * self.ffn_hidden_size
        dense = self.num_layers - len(e.layers)
        chosen = e.per_token * e.ffn_hidden_size + e.count / 3
        if e.shared_ffn_hidden_size:
            chosen += e.shared_ffn_hidden_size + e.shared_gate / 3
        return dense * self.ffn_hidden_size + len(e.layers) * chosen

    def stage_layers(self, stages: int) -> list[int]:
        """Number of layers on each of ``stages`` stages, in the order of the layers, at least one each.

        Virtual stages count: of pipeline x virtual stages, stage i is chunk i // pipeline of pipeline rank
        i % pipeline. Where the layers do not divide evenly, the middle stages have one more, then the first,
        and never the last: the ends have the embedding and the larger work of the output layer to carry
        besides.
        Raises ValueError unless 1 <= stages <= num_layers.
        """
        if not 1 <= stages <= self.num_layers:
            raise ValueError(f"{self.num_layers} layers cannot fill {stages} stages")
        few, more = divmod(self.num_layers, stages)
        larger = [*range(1, stages - 1), 0][:more]
        return [few + (stage in larger) for stage in range(stages)]
