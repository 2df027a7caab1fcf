"""Reads a model's ``config.json`` into its ``ModelShape``, without torch or transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.expert_config import read_experts
from rpg_megatron.config.families import FAMILIES, NOT_SUPPORTED, Family, describe_supported
from rpg_megatron.config.files import places_of, read_json
from rpg_megatron.config.fp8_files import unread_quantisation
from rpg_megatron.config.model_keys import SIZES, read_flag, read_positive, read_size
from rpg_megatron.config.model_shape import (
    LatentAttention,
    LinearAttention,
    Llama3Rope,
    ModelShape,
    Rope,
    Scales,
    Windows,
    YarnRope,
)

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


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
    if (family := FAMILIES.get(name)) is None:
        known = next((models for start, models in NOT_SUPPORTED.items() if name.startswith(start)), None)
        what = f"{known} (architecture {name})" if known else f"architecture {name}"
        raise UserError(
            f"{file}: {what} is not supported; use one of: {describe_supported()}; CONTRIBUTING.md says how "
            "to add a family"
        )
    try:
        if family.inside:
            raw = _text_config(file, raw, family)
        given = {key: value for key, value in raw.items() if value is not None}
        sizes = {
            key: read_size(key, v) for key in SIZES if (v := (family.defaults | given).get(key)) is not None
        }
        _refuse_variants(file, raw, family)
        layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
        kv_heads = sizes.get("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads ({heads})"
            )
        latent = _latent(given, heads, kv_heads) if family.latent else None
        head_dim = sizes.get("head_dim", max(sizes["hidden_size"] // heads, 1))
        if latent is not None:  # transformers calls the rotated part of a head head_dim
            head_dim = latent.plain_dim + latent.rotated_dim
        rope = _rope(raw, family)
        return ModelShape(
            family=family.name,
            num_layers=layers,
            hidden_size=sizes["hidden_size"],
            ffn_hidden_size=sizes["intermediate_size"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=sizes["vocab_size"],
            tied_embeddings=read_flag(raw, "tie_word_embeddings"),
            qk_norm=family.qk_norm != "no" and _has(raw, family, "use_qk_norm"),
            qkv_bias=family.qkv_bias and _has(raw, family, "attention_bias"),
            rope=rope,
            norm_eps=read_positive("rms_norm_eps", raw["rms_norm_eps"]),
            max_positions=_positions(sizes["max_position_embeddings"], rope),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            experts=read_experts(raw, family, layers) if family.experts else None,
            windows=_windows(raw, family, layers),
            wide_qk_norm=family.qk_norm == "wide",
            post_norm=family.post_norm,
            fused_rows=family.fused_rows,
            scales=_scales(raw, family, head_dim),
            zero_centred=family.linear,
            gated_attention=family.linear,
            linear=_linear(raw, family, layers),
            latent=latent,
            prefix="model.language_model." if family.inside else "model.",
            untrained=_untrained(raw, family, layers),
            fp8_files=raw.get(_QUANTISED[0]) is not None,
        )
    except KeyError as e:
        raise UserError(f"{file}: the key {e.args[0]!r} is missing; copy the checkpoint again") from None
    except (TypeError, ValueError, OverflowError) as e:
        raise UserError(f"{file}: {str(e)[:300]}; copy the checkpoint again") from None


def _has(raw: dict[str, Any], family: Family, key: str) -> bool:
    """What a key of ``Family.by_key`` says; true for other families."""
    return key not in family.by_key or read_flag(raw, key)


def _untrained(raw: dict[str, Any], family: Family, layers: int) -> tuple[str, ...]:
    if family.untrained != ("next",):
        return family.untrained
    key = "num_nextn_predict_layers"
    count = raw.get(key, int(family.defaults[key]))
    none = count is None or (type(count) is int and count == 0)
    return tuple(f"model.layers.{layers + n}." for n in range(0 if none else read_size(key, count)))


def _scales(raw: dict[str, Any], family: Family, head_dim: int) -> Scales:
    if family.latent and (rope := _rope_settings(raw, family, _FULL))["rope_type"] == "yarn":
        factor = _yarn_magnitude(rope, "mscale_all_dim")
        return Scales(attention=head_dim**-0.5 * factor * factor)
    if not family.scales:
        return Scales()
    keys = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, residual, attention, divisor = (read_positive(key, raw.get(key, 1.0)) for key in keys)
    return Scales(embedding, residual, attention, 1 / divisor)


def _latent(given: dict[str, Any], heads: int, kv_heads: int) -> LatentAttention:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, plain, rotated, value = (read_size(key, given[key]) for key in keys)
    query_rank = read_size("q_lora_rank", given["q_lora_rank"]) if "q_lora_rank" in given else 0
    if kv_heads != heads or rotated % 2 or value > plain + rotated:
        raise ValueError(
            f"num_key_value_heads is {kv_heads} of {heads} heads, qk_rope_head_dim {rotated}, v_head_dim "
            f"{value} with keys of {plain + rotated}; latent attention has as many keys as queries, an even "
            "number of rotated dimensions, and values no longer than keys"
        )
    return LatentAttention(query_rank, rank, plain, rotated, value)


def _text_config(file: Path, raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """The decoder's part of a config.json, with the keys that stand outside of it."""
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", family.inside) != family.inside:
        kind = text.get("model_type") if isinstance(text, dict) else text
        raise UserError(
            f"{file}: text_config is of {shorten(ascii(kind), 80)}; with this architecture only "
            f"{family.inside} ({family.models}) is supported"
        )
    outside = ("dtype", "torch_dtype", "tie_word_embeddings", *_QUANTISED)
    inner, outer = (part.get("tie_word_embeddings") for part in (text, raw))
    if inner is not None and bool(inner) != bool(outer):
        raise UserError(
            f"{file}: tie_word_embeddings is {inner} in text_config and {outer} outside, of which "
            "transformers and vLLM read the latter; make them equal"
        )
    inside = {f"text_config.{k}" if k in _QUANTISED else k: v for k, v in text.items() if v is not None}
    return {key: raw[key] for key in outside if key in raw} | inside


_QUANTISED = ("quantization_config", "compression_config")
_QUANTISATION = "hf_quant_config.json"
_NOT_READ = (
    "the trainer does not read quantised weights, but for FP8 in blocks of 128 x 128 (docs/models.md); give "
    "the model in bfloat16, or remove this if its weights are not quantised (engine.quantization quantises "
    "those of the engines)"
)


def _refuse_variants(file: Path, raw: dict[str, Any], family: Family) -> None:
    """Raise one UserError that lists every unsupported setting of ``config.json``.

    Ignoring them would give plausible but wrong log-probs.
    """
    problems = []
    for key in (*_QUANTISED, *(f"text_config.{key}" for key in _QUANTISED)):
        if (how := raw.get(key)) is None:
            continue
        if (what := unread_quantisation(how)) or key != _QUANTISED[0]:  # engines pass over that one
            problems.append(f"{key} ({what or 'fp8'}): {_NOT_READ}")
    if (file.parent / _QUANTISATION).exists():
        problems.append(f"{_QUANTISATION} beside it: {_NOT_READ}")
    # Qwen2 has biases in any case, and transformers ignores the key there.
    if read_flag(raw, "attention_bias") and not family.qkv_bias:
        problems.append(f"attention_bias=true is not supported for {family.name}: released models have none")
    if read_flag(raw, "mlp_bias"):
        problems.append("mlp_bias=true is not supported: released models have none")
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={shorten(repr(raw['hidden_act']), 80)} is not supported; known: silu")
    if raw.get(key := "dual_chunk_attention_config"):
        problems.append(f"{key} is for engines alone; remove it, and with it the longer context")
    for key, values in family.fixed.items():
        value = raw.get(key)
        null = key in raw and value is None and True in values  # others read null as false
        if null or (value is not None and (value not in values if values else value is not False)):
            known = ", ".join(json.dumps(v) for v in values) or "none"
            problems.append(
                f"{key}={shorten(ascii(value), 80)} is not supported for {family.name}; released models "
                f"have {known}"
            )
    for key in family.required:
        if raw.get(key) is None:
            problems.append(
                f"{key} is missing, without which vLLM would compute something else; set it to "
                f"{json.dumps(family.fixed[key][0])}"
            )
    given, older = raw.get("rope_parameters"), raw.get("rope_scaling")
    if given and older and given != older:
        problems.append("rope_parameters and rope_scaling differ; keep the one that is right")
    kinds = _layer_kinds(raw, family, int(raw["num_hidden_layers"]))
    supported = {_FULL} if family.windows == "no" else {_FULL, _SLIDING}
    supported |= {_LINEAR} if family.linear else set()
    if others := sorted(set(kinds) - supported):
        count = sum(kind not in supported for kind in kinds)
        only = "only full attention is supported" if supported == {_FULL} else "this kind is not supported"
        problems.append(f"{count} of {len(kinds)} layers have {', '.join(others)}; {only}")
    for kind in dict.fromkeys([_FULL, *kinds]):
        rope = _rope_settings(raw, family, kind)
        if rope["rope_type"] not in family.ropes:
            problems.append(
                f"rope type {shorten(ascii(rope['rope_type']), 80)} is not supported for {family.name}; "
                f"known: {', '.join(family.ropes)}"
            )
        if rope.get("type", rope["rope_type"]) != rope["rope_type"]:
            problems.append(
                "rope_type and type differ, with which vLLM does not start; keep the one that is right"
            )
        if rope["rope_type"] == "default" and (rope.get("rope_dim") or rope.get("use_fope")):
            problems.append("rope_dim and use_fope are of vLLM alone; remove them")
        if rope["partial_rotary_factor"] != 1 and not family.partial_rope:
            problems.append("partial_rotary_factor is not 1; only rotation of the whole head is supported")
    if problems:
        raise UserError(f"{file}: " + "; ".join(dict.fromkeys(problems)))


def _layer_kinds(raw: dict[str, Any], family: Family, layers: int) -> list[str]:
    """The attention of each layer, with transformers' defaults for keys that the file lacks."""
    window = raw.get("sliding_window", family.defaults.get("sliding_window"))
    if family.windows == "all":
        return [_SLIDING if window is not None else _FULL] * layers
    if (kinds := raw.get("layer_types")) is not None:
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise ValueError(f"layer_types is {shorten(ascii(kinds), 80)}; it must be a list of names")
        if len(kinds) != layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
        return list(kinds)
    if family.windows == "some":
        return [_SLIDING if (i + 1) % 4 else _FULL for i in range(layers)]
    if family.linear:
        every = read_size("full_attention_interval", raw.get("full_attention_interval", 4))
        return [_LINEAR if (i + 1) % every else _FULL for i in range(layers)]
    if not read_flag(raw, "use_sliding_window") or not raw.get("sliding_window", 4096):
        return [_FULL] * layers
    # Without a list, layers max_window_layers and later have the window (transformers' default: 28).
    full = min(max(0, int(raw.get("max_window_layers", 28))), layers)
    return [_FULL] * full + [_SLIDING] * (layers - full)


def _windows(raw: dict[str, Any], family: Family, layers: int) -> Windows | None:
    kinds = _layer_kinds(raw, family, layers)
    if not (found := tuple(i for i, kind in enumerate(kinds) if kind == _SLIDING)):
        return None
    tokens = read_size("sliding_window", raw.get("sliding_window", family.defaults.get("sliding_window")))
    return Windows(tokens, found, _rope(raw, family, _SLIDING))


def _linear(raw: dict[str, Any], family: Family, layers: int) -> LinearAttention | None:
    """Layers with a gated delta net, with transformers' defaults for keys that the file lacks."""
    kinds = _layer_kinds(raw, family, layers)
    if not (found := tuple(i for i, kind in enumerate(kinds) if kind == _LINEAR)):
        return None
    if len(found) == layers:
        raise ValueError("all layers have linear attention; at least one must have full attention")
    defaults = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    sizes = [
        read_size(key, raw.get(key, default))
        for key, default in ((f"linear_{k}", v) for k, v in (defaults | {"conv_kernel_dim": 4}).items())
    ]
    key_heads, value_heads, key_dim, value_dim, kernel = sizes
    out = LinearAttention(found, key_heads, value_heads, key_dim, value_dim, kernel, family.interleaved)
    if out.kernel < 2:
        raise ValueError("linear_conv_kernel_dim is 1, which vLLM does not support")
    if out.value_heads % out.key_heads:
        raise ValueError(
            f"linear_num_key_heads is {out.key_heads}, which does not divide linear_num_value_heads "
            f"({out.value_heads})"
        )
    return out


def _rope_settings(raw: dict[str, Any], family: Family, kind: str) -> dict[str, Any]:
    """Settings of the rotary embedding of a kind of layer, from the new or the old key, all present.

    They are the same for all layers or a block for each kind. In families with some windows a file without
    blocks scales the layers with full attention only, and gives the others the default base.
    """
    default = family.defaults.get("rope_theta", 10000.0)
    rotated = raw.get("partial_rotary_factor") or family.defaults.get("partial_rotary_factor", 1)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters is {shorten(ascii(rope), 80)}; it must be an object")
    rope = dict(rope)
    theta = raw.get("rope_theta")
    if any(isinstance(value, dict) for value in rope.values()):
        if not all(isinstance(value, dict | None) for value in rope.values()):
            raise ValueError("rope_parameters has blocks with settings beside them; keep one of the two")
        rope = dict(rope.get(kind) or {})
    elif kind == _SLIDING and family.windows == "some":
        rope, theta = {}, None
    return {
        **rope,
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "rope_theta": rope.get("rope_theta") or theta or default,
        "partial_rotary_factor": rope.get("partial_rotary_factor", rotated),
    }


def _rope(raw: dict[str, Any], family: Family, kind: str = _FULL) -> Rope:
    rope = _rope_settings(raw, family, kind)
    scaling: Llama3Rope | YarnRope | None = None
    if rope["rope_type"] != "default":
        # The same order of keys as in transformers.
        key = "original_max_position_embeddings"
        original = read_size(key, raw.get(key, rope.get(key, raw["max_position_embeddings"])))
        scaling = _llama3(rope, original) if rope["rope_type"] == "llama3" else _yarn(rope, family, original)
    fraction = read_positive("partial_rotary_factor", rope["partial_rotary_factor"])
    if fraction > 1:
        raise ValueError(f"partial_rotary_factor is {fraction:g}; it must be at most 1")
    return Rope(read_positive("rope_theta", rope["rope_theta"]), fraction, scaling)


def _positions(given: int, rope: Rope) -> int:
    """The positions that a model has, of which vLLM has cosines."""
    if not isinstance(rope.scaling, YarnRope):
        return given
    return int(min(given, rope.scaling.original_positions * rope.scaling.factor))


def _llama3(rope: dict[str, Any], original: int) -> Llama3Rope:
    scaling = Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=original,
    )
    if not 1 <= scaling.factor < math.inf or not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise ValueError(
            "rope scaling needs factor >= 1 and 0 < low_freq_factor < high_freq_factor, has "
            f"{scaling.factor:g}, {scaling.low_freq_factor:g} and {scaling.high_freq_factor:g}"
        )
    return scaling


def _yarn_magnitude(rope: dict[str, Any], key: str) -> float:
    """1 + 0.1 ln(factor), the paper's sqrt(1 / t) (3.4), with DeepSeek's multiplier of the logarithm."""
    factor, multiplier = (read_positive(k, rope.get(k)) for k in ("factor", key))
    return 0.1 * multiplier * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn(rope: dict[str, Any], family: Family, original: int) -> YarnRope:
    known = ["rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"]
    known += ["original_max_position_embeddings", "beta_fast", "beta_slow"]
    known += ["truncate"] if rope.get("truncate") is True else []
    known += ["mscale", "mscale_all_dim"] if family.latent else []
    if family.name.startswith("qwen3_5"):  # in other families vLLM computes something else with these
        known += ["mrope_section", "mrope_interleaved"]
    if unknown := {key: value for key, value in rope.items() if key not in known}:
        raise ValueError(f"rope scaling of type yarn with {shorten(ascii(unknown), 80)} is not supported")
    if rope["rope_theta"] == 1:
        raise ValueError("rope_theta is 1 with YaRN; all frequencies would be the same")
    factor = read_positive("factor", rope["factor"])
    magnitude = rope.get("attention_factor")
    if family.latent:  # vLLM multiplies by an attention_factor, transformers replaces by it
        if magnitude is not None:
            raise ValueError(
                "rope scaling of type yarn with attention_factor is not supported for this family"
            )
        magnitude = _yarn_magnitude(rope, "mscale") / _yarn_magnitude(rope, "mscale_all_dim")
    if magnitude is None:
        magnitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    fast, slow = (read_positive(k, rope.get(k, v)) for k, v in (("beta_fast", 32), ("beta_slow", 1)))
    return YarnRope(factor, fast, slow, original, read_positive("attention_factor", magnitude))
