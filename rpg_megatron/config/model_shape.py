"""Model architecture from a Hugging Face ``config.json``, read without torch or transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.files import places_of, read_json

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""HF architecture name -> family; each family is one file in ``models``."""


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


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, from which layouts, memory and the Megatron configuration follow."""

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
    qkv_bias: bool
    rope_theta: float
    norm_eps: float
    max_positions: int
    dtype: str
    """dtype of the weights in the checkpoint: float32, bfloat16 or float16."""
    rope_scaling: Llama3Rope | None = None
    experts: ExpertShape | None = None
    """None: all layers are dense. Otherwise ``ffn_hidden_size`` is that of the dense layers, if any."""

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a dense feed-forward block."""
        return self.experts is None or len(self.experts.layers) < self.num_layers

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, has experts instead of a dense feed-forward block."""
        return self.experts is not None and layer in self.experts.layers

    def padded_vocab(self, tensor: int, multiple: int = 1) -> int:
        """Vocabulary rows, padded so that each of ``tensor`` ranks holds a multiple of ``multiple``."""
        step = tensor * multiple
        return -(-self.vocab_size // step) * step

    @property
    def matmul_parameters(self) -> tuple[int, int]:
        """Active parameters of a token: in the matrices of all layers, and in the output layer."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        columns = self.active_ffn_columns / self.num_layers
        layer = int(self.hidden_size * (2 * heads + 2 * kv + 3 * columns))
        return self.num_layers * layer, self.hidden_size * self.vocab_size

    @property
    def attention_length(self) -> float:
        """Sequence length at which causal attention takes as many FLOPs as everything else, in tokens.

        The cost of a sequence of n tokens is proportional to n + n^2 / attention_length.
        """
        in_layers, in_head = self.matmul_parameters
        layers = self.num_layers
        return (in_layers // layers + in_head / layers) / (self.num_heads * self.head_dim)

    def forward_flops(self, tokens: float, squares: float) -> float:
        """FLOPs of a forward pass; a backward pass takes twice as many.

        tokens, squares: sums of n and n^2 over the sequences of n tokens.
        2 P n for products with the P parameters of matrices (Kaplan et al. 2020, arXiv 2001.08361, 2.1), and
        2 n^2 heads head_dim layers for causal attention, half of 4 n^2 (Narayanan et al. 2021, arXiv
        2104.04473, appendix).
        """
        return 2 * sum(self.matmul_parameters) * (tokens + squares / self.attention_length)

    @property
    def active_ffn_columns(self) -> float:
        """Feed-forward columns that a token passes in all layers together.

        A router's outputs count a third: an expert has three matrices, the router one.
        """
        e = self.experts
        if e is None:
            return self.num_layers * self.ffn_hidden_size
        dense = self.num_layers - len(e.layers)
        chosen = e.per_token * e.ffn_hidden_size + e.count / 3
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


def read_model_shape(path: Path) -> ModelShape:
    """Read ``path/config.json``.

    Raises UserError if the directory or the file is missing, is not JSON, or describes an unsupported model
    family or variant.
    """
    file = path / "config.json"
    if not path.is_dir():
        raise UserError(
            f"model.path: {path} is not a directory; give the folder of a Hugging Face checkpoint, from "
            "hf download NAME --local-dir FOLDER (plan needs only its config.json)"
        )
    try:
        raw: dict[str, Any] = read_json(file, *places_of(file.parent))
    except FileNotFoundError:
        fix = "a Hugging Face checkpoint holds one"
        if (path / "adapter_config.json").is_file():
            fix = "this is an adapter: set model.path to its base model, model.adapter to it, and lora"
        raise UserError(f"model.path: {file} is missing; {fix}") from None
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror or e}); copy the checkpoint again") from None
    except ValueError as e:
        raise UserError(f"{file}: not valid JSON ({e}); copy the checkpoint again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: holds a {type(raw).__name__}, not an object; copy the checkpoint again")
    names = raw.get("architectures") or ["(none)"]
    name = str(names[0])[:80] if isinstance(names, list) else "(not a list)"
    name = name if name.isprintable() else ascii(name)
    family = FAMILIES.get(name)
    if family is None:
        raise UserError(
            f"{file}: architecture {name} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    try:
        sizes = {key: _size(key, raw[key]) for key in _SIZES if raw.get(key) is not None}
        _refuse_variants(file, raw, family)
        rope = _rope(raw)
        heads = sizes["num_attention_heads"]
        kv_heads = sizes.get("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads ({heads})"
            )
        # transformers' default head size where the file has none.
        head_dim = 128 if family == "qwen3" else max(sizes["hidden_size"] // heads, 1)
        return ModelShape(
            family=family,
            num_layers=sizes["num_hidden_layers"],
            hidden_size=sizes["hidden_size"],
            ffn_hidden_size=sizes["intermediate_size"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=sizes.get("head_dim", head_dim),
            vocab_size=sizes["vocab_size"],
            tied_embeddings=_flag(raw, "tie_word_embeddings"),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=family == "qwen2",
            rope_theta=_positive("rope_theta", rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            norm_eps=_positive("rms_norm_eps", raw["rms_norm_eps"]),
            max_positions=sizes["max_position_embeddings"],
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            rope_scaling=_llama3_rope(raw),
            experts=_experts(raw, sizes["num_hidden_layers"]) if family == "qwen3_moe" else None,
        )
    except KeyError as e:
        raise UserError(f"{file}: the key {e.args[0]!r} is missing; copy the checkpoint again") from None
    except (TypeError, ValueError, OverflowError) as e:
        raise UserError(f"{file}: {str(e)[:300]}; copy the checkpoint again") from None


_LARGEST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**31 - 1,  # token ids are int32
    "max_position_embeddings": 2**31 - 1,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "num_experts_per_tok": 2**16,
    "moe_intermediate_size": 2**22,
    "decoder_sparse_step": 10_000,
}
"""Key -> maximum value, far above that of any model."""


_QUANTISATION = "hf_quant_config.json"
_QUANTISED = (
    "the trainer does not read quantised weights; give the model in bfloat16, or remove this if its weights "
    "are not quantised (engine.quantization quantises those of the engines)"
)
_MOST_EXPERTS = 2**17
"""In all layers: each has tensors with names of their own."""
_SIZES = list(_LARGEST)[:8]
"""Keys of all families; the other keys belong to experts."""


def _size(key: str, value: Any) -> int:
    """A size in ``config.json``. Raises ValueError if it is not an integer from 1 to the key's maximum."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST[key]:
        raise ValueError(f"{key} is {repr(value)[:80]}; it must be an integer of 1 to {_LARGEST[key]:,}")
    return value


def _flag(raw: dict[str, Any], key: str) -> bool:
    """A key that is true or false, false where it is absent, as in transformers' classes of all families."""
    if not isinstance(value := raw.get(key), bool | None):
        raise ValueError(f"{key} is {repr(value)[:80]}; it must be true or false")
    return bool(value)


def _positive(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {str(value)[:80]}; it must be a number greater than 0")
    return float(value)


def _refuse_variants(file: Path, raw: dict[str, Any], family: str) -> None:
    """Raise one UserError that lists every unsupported setting of ``config.json``.

    Ignoring them would give plausible but wrong log-probs.
    """
    problems = []
    for key in ("quantization_config", "compression_config"):
        if (how := raw.get(key)) is not None:
            method = str(how.get("quant_method") or how.get("quant_algo")) if isinstance(how, dict) else how
            problems.append(f"{key} ({shorten(ascii(method), 80)}): {_QUANTISED}")
    if (file.parent / _QUANTISATION).exists():
        problems.append(f"{_QUANTISATION} beside it: {_QUANTISED}")
    # Qwen2 has biases in any case, and transformers ignores the key there.
    if _flag(raw, "attention_bias") and family != "qwen2":
        problems.append(f"attention_bias=true is not supported for {family}: released models have none")
    if _flag(raw, "mlp_bias"):
        problems.append("mlp_bias=true is not supported: released models have none")
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={raw['hidden_act']!r} is not supported; known: silu")
    layers = int(raw["num_hidden_layers"])
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    if (
        raw.get("layer_types") is None
        and _flag(raw, "use_sliding_window")
        and raw.get("sliding_window", 4096)
    ):
        # Without a list, layers max_window_layers and later have the window (transformers' default: 28).
        full = min(max(0, int(raw.get("max_window_layers", 28))), layers)
        kinds = [*kinds[:full], *["sliding_attention"] * (layers - full)]
    if others := sorted(set(kinds) - {"full_attention"}):
        count = sum(kind != "full_attention" for kind in kinds)
        problems.append(
            f"{count} of {layers} layers have {', '.join(others)}; only full attention is supported"
        )
    rope = _rope(raw)
    kind = rope["rope_type"]
    if kind not in (types := ["default", "llama3"] if family == "llama" else ["default"]):
        problems.append(f"rope type {kind!r} is not supported for {family}; known: {', '.join(types)}")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1) != 1:
        problems.append("partial_rotary_factor is not 1; only rotation of the whole head is supported")
    if problems:
        raise UserError(f"{file}: " + "; ".join(problems))


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Settings of the rotary embedding, from the new or the old key; ``rope_type`` is always present."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    return {**rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _llama3_rope(raw: dict[str, Any]) -> Llama3Rope | None:
    rope = _rope(raw)
    if rope["rope_type"] != "llama3":
        return None
    key = "original_max_position_embeddings"
    scaling = Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        # The same order of keys as in transformers.
        original_positions=_size(
            "max_position_embeddings", raw.get(key) or rope.get(key) or raw["max_position_embeddings"]
        ),
    )
    if not 1 <= scaling.factor < math.inf or not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise ValueError(
            "rope scaling needs factor >= 1 and 0 < low_freq_factor < high_freq_factor, has "
            f"{scaling.factor:g}, {scaling.low_freq_factor:g} and {scaling.high_freq_factor:g}"
        )
    return scaling


def _experts(raw: dict[str, Any], layers: int) -> ExpertShape:
    """The experts of a Qwen3-MoE model, with transformers' defaults for keys that the file lacks."""
    # transformers writes num_local_experts; published files have num_experts.
    counts = {key: _size(key, raw[key]) for key in ("num_experts", "num_local_experts") if key in raw}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"num_experts is {raw['num_experts']}, but num_local_experts {raw['num_local_experts']}"
        )
    count = next(iter(counts.values()), 128)
    if layers * count > _MOST_EXPERTS:
        raise ValueError(f"{layers} layers of {count} experts; at most {_MOST_EXPERTS:,} experts in all")
    per_token = _size("num_experts_per_tok", raw.get("num_experts_per_tok", 8))
    normalised = _flag(raw, "norm_topk_prob")
    if per_token > count:
        raise ValueError(f"num_experts_per_tok is {per_token}, more than num_experts ({count})")
    if per_token == 1 and normalised:
        raise ValueError(
            "num_experts_per_tok is 1 with norm_topk_prob true: the router would have no gradient, and "
            "Megatron does not support it"
        )
    step = _size("decoder_sparse_step", raw.get("decoder_sparse_step", 1))
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise ValueError(f"mlp_only_layers is {repr(dense)[:80]}; it must be a list of layer indices")
    sparse = tuple(i for i in range(layers) if i not in set(dense) and (i + 1) % step == 0)
    if not sparse:
        raise ValueError("decoder_sparse_step and mlp_only_layers leave no layer with experts")
    return ExpertShape(
        count, per_token, _size("moe_intermediate_size", raw["moe_intermediate_size"]), normalised, sparse
    )
