"""Engines of models with linear attention: their cache, their options, and what is refused before they start.

Why: vLLM would fail at its start, or at the first request, with lines about its own internals. The bytes are
those of vLLM's logs. Not covered: engines that run (tests/integration/test_hybrid_engines.py).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.config import ModelShape, UserError, load_settings
from rpg_megatron.config.model_shape import LatentAttention, LinearAttention
from rpg_megatron.engine.command import engine_command, kv_bytes_per_token
from rpg_megatron.engine.hybrid_cache import HybridCache, hybrid_cache
from rpg_megatron.launcher.layer_checks import check_linear_attention
from rpg_megatron.launcher.preflight import check_kv_cache
from tests.support.tiny_models import TINY, tiny_shape, write_byte_model


def hybrid(key_dim: int = 32, value_dim: int = 32, **changes: Any) -> ModelShape:
    """Four layers, the last one with softmax attention."""
    linear = LinearAttention((0, 1, 2), 2, 4, key_dim, value_dim, 4)
    sizes = {"num_layers": 4, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "linear": linear}
    return tiny_shape("qwen3_5", **sizes | changes)


@pytest.mark.parametrize(
    ("shape", "overrides", "expected"),
    [
        (hybrid(), [], HybridCache(65536, 128, 3, 1)),
        (hybrid(), ["engine.tensor=2"], HybridCache(32768, 128, 3, 1)),
        # A state of 268,288 bytes beside 256 bytes of a token.
        (hybrid(128, 128), ["precision.dtype=bfloat16"], HybridCache(294912, 1152, 3, 1)),
        (
            hybrid(128, 128),
            ["precision.dtype=bfloat16", "device=cuda"],
            HybridCache(256 * 1056, 1056, 3, 1),
        ),
        # Eight layers have blocks together, as 8 is not near to 24; ten as 10 is near to 8.
        (
            hybrid(num_layers=32, linear=replace(hybrid().linear, layers=tuple(range(24)))),
            [],
            HybridCache(8 * 65536, 128, 3, 1),
        ),
        (
            hybrid(num_layers=18, linear=replace(hybrid().linear, layers=tuple(range(10)))),
            [],
            HybridCache(10 * 65536, 128, 1, 1),
        ),
    ],
)
def test_blocks(config_file: Path, shape: ModelShape, overrides: list[str], expected: HybridCache) -> None:
    assert hybrid_cache(load_settings(config_file, overrides), shape) == expected
    assert hybrid_cache(load_settings(config_file, overrides), TINY) is None


def test_a_cache_smaller_than_a_sequence_is_refused(config_file: Path) -> None:
    """One sequence of 632 tokens takes five blocks, its states three, and one stays empty."""
    settings = load_settings(config_file, ["rollout.max_response_tokens=504"])
    shape = hybrid(max_positions=1024)
    assert kv_bytes_per_token(settings, shape) == 512
    for spare, message in (
        (0, None),
        (-1, r"engine\.kv_cache_gib .* 632 tokens takes 0\.0006, with its states"),
    ):
        engine = settings.engine.model_copy(update={"kv_cache_gib": (9 * 65536 + spare) / 2**30})
        with_cache = settings.model_copy(update={"engine": engine})
        if message is None:
            check_kv_cache(with_cache, shape)
        else:
            with pytest.raises(UserError, match=message):
                check_kv_cache(with_cache, shape)


@pytest.mark.parametrize(
    ("shape", "overrides", "message"),
    [
        (hybrid(), ["engine.tensor=4"], r"engine\.tensor: 4 does not divide the 2 key heads"),
        (
            hybrid(),
            ["precision.dtype=bfloat16"],
            r"precision\.dtype: .* 64 or 128 .* the model has 32 and 32",
        ),
        (hybrid(64, 128), ["precision.dtype=bfloat16"], r"the model has 64 and 128"),
        (
            hybrid(),
            ["engine.arguments=[--enable_prefix_caching]"],
            r"engine\.arguments: --enable-prefix-caching is not supported on a CPU",
        ),
        (
            hybrid(),
            ["engine.arguments=['--speculative-config={}']"],
            r"engine\.arguments: --speculative-config is not supported on a CPU",
        ),
        (
            hybrid(),
            ["engine.quantization=fp8", "device=cuda", "precision.dtype=bfloat16"],
            r"engine\.quantization: fp8 is not supported with linear or latent attention",
        ),
    ],
)
def test_what_linear_attention_excludes(
    config_file: Path, shape: ModelShape, overrides: list[str], message: str
) -> None:
    settings = load_settings(config_file, overrides)
    check_linear_attention(settings, TINY)
    check_linear_attention(load_settings(config_file), shape)
    with pytest.raises(UserError, match=message):
        check_linear_attention(settings, shape)


def test_what_latent_attention_excludes(config_file: Path) -> None:
    latent = replace(TINY, latent=LatentAttention(0, 24, 16, 16, 24))
    fp8 = ["engine.quantization=fp8", "device=cuda", "precision.dtype=bfloat16"]
    check_linear_attention(load_settings(config_file), latent)
    with pytest.raises(UserError, match="fp8 is not supported with linear or latent attention"):
        check_linear_attention(load_settings(config_file, fp8), latent)


@pytest.mark.parametrize("size", [64, 128])
def test_heads_that_vllm_has_in_bfloat16(config_file: Path, size: int) -> None:
    settings = load_settings(config_file, ["precision.dtype=bfloat16"])
    check_linear_attention(settings, hybrid(size, size))
    check_linear_attention(settings.model_copy(update={"device": "cuda"}), hybrid())


def test_options_of_an_engine(config_file: Path, tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "model", family="qwen3_5")
    for path, has in ((model, True), (load_settings(config_file).model.path, False)):
        command = engine_command(load_settings(config_file, [f"model.path={path}"]), 0, tmp_path / "e.sock")
        assert ("--no-enable-prefix-caching" in command) is has
        assert ("--mamba-ssm-cache-dtype float32" in " ".join(command)) is has


@pytest.mark.parametrize(("device", "cached"), [("cpu", False), ("cuda", True)])
def test_routes_of_an_engine(config_file: Path, tmp_path: Path, device: str, cached: bool) -> None:
    """On a GPU vLLM stores routes with cached prefixes; on a CPU an engine needs no store of them."""
    model = write_byte_model(tmp_path / "model", family="qwen3_5_moe")
    settings = load_settings(
        config_file, [f"model.path={model}", f"device={device}", "training.router_replay=rollout"]
    )
    command = engine_command(settings, 0, tmp_path / "e.sock")
    assert "--enable-return-routed-experts" in command
    assert ("--no-enable-prefix-caching" not in command) is cached
