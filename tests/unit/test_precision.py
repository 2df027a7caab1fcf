"""Settings of layers and FP8 reach Megatron-Core under its names; what cannot work is refused in one line.

Why: a recipe that reaches the model but not the optimizer, a micro-batch whose length a kernel does not take,
or an FP8 setting that silently does nothing are found only on a GPU, hours later.
Not covered: Transformer Engine itself and every number it gives (tests/gpu).
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from megatron.core.extensions import transformer_engine_spec_provider as te_specs
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import TEGroupedMLP

from rpg_megatron.config import ModelShape, Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.policy import (
    FP8Settings,
    MemorySettings,
    OptimizerSettings,
    ParallelSettings,
    PrecisionSettings,
)
from rpg_megatron.launcher.checks import CheckedRun, check_start
from rpg_megatron.launcher.preflight import FP8_EMULATED, check_gpus, check_precision, has_gpu
from rpg_megatron.policy import layer_specs, optimizer, precision
from rpg_megatron.policy.microbatch import make_micro_batch
from rpg_megatron.policy.model import transformer_config
from tests.support.recipes import EXAMPLES
from tests.support.tiny_models import TINY_MOE
from tests.support.trajectories import make_trajectory

CUDA = torch.device("cuda")


def settings_of(tmp_path: Path, *overrides: str) -> Settings:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"path": "d"}}))
    return load_settings(file, list(overrides))


def shape_of(checkpoint: Path, **changes: Any) -> ModelShape:
    return ModelShape(**{**vars(read_model_shape(checkpoint)), **changes})


@pytest.mark.parametrize(
    ("fp8", "fields"),
    [
        (None, {"fp8": None, "fp8_param": False, "first_last_layers_bf16": False}),
        (FP8Settings(), {"fp8": "e4m3", "fp8_recipe": "blockwise", "first_last_layers_bf16": False}),
        (
            FP8Settings(recipe="tensorwise", first_last_bf16=1, parameters=True),
            {
                "fp8": "hybrid",
                "fp8_recipe": "tensorwise",
                "fp8_param": True,
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 1,
                "num_layers_at_end_in_bf16": 1,
            },
        ),
        (
            FP8Settings(recipe="delayed"),
            {
                "fp8": "hybrid",
                "fp8_recipe": "delayed",
                "fp8_amax_history_len": 1024,
                "fp8_amax_compute_algo": "max",
            },
        ),
    ],
)
def test_recipe_reaches_model_gradients_and_optimizer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fp8: FP8Settings | None, fields: dict[str, Any]
) -> None:
    settings = PrecisionSettings(fp8=fp8)
    shape = shape_of(checkpoint, num_layers=4)
    config = transformer_config(shape, ParallelSettings(), settings, device=CUDA)
    assert {name: getattr(config, name) for name in fields} == fields
    on_cpu = transformer_config(shape, ParallelSettings(), settings)
    assert (on_cpu.fp8, on_cpu.fp8_param, on_cpu.first_last_layers_bf16) == (None, False, False)
    assert (config.bf16, config.params_dtype) == (True, torch.bfloat16)

    captured: dict[str, Any] = {}
    monkeypatch.setattr(
        optimizer,
        "DistributedDataParallel",
        lambda _, ddp, chunk, disable_bucketing: captured.update(ddp=ddp),
    )
    monkeypatch.setattr(
        optimizer,
        "get_megatron_optimizer",
        lambda config, *_, **__: captured.update(optimizer=config) or SimpleNamespace(param_groups=[]),
    )
    fused, other = SimpleNamespace(fuse_wgrad_accumulation=False), SimpleNamespace()
    chunk: Any = SimpleNamespace(config=config, named_parameters=lambda: [], modules=lambda: [fused, other])
    optimizer.wrap_data_parallel([chunk], OptimizerSettings(), settings, 1)
    assert fused.fuse_wgrad_accumulation is True
    assert not vars(other)
    optimizer.build_optimizer([], OptimizerSettings(), settings, MemorySettings())
    assert captured["ddp"].fp8_param_gather == bool(fp8 and fp8.parameters)
    assert captured["optimizer"].fp8_recipe == (fp8.recipe if fp8 else None)


@pytest.mark.parametrize(
    ("overrides", "multiple"),
    [
        ([], 1),
        (["precision.fp8={}"], 128),
        (["precision.fp8.recipe=tensorwise"], 16),
        (["precision.fp8.recipe=delayed", "parallel.tensor=2", "parallel.sequence=true"], 32),
        (["precision.fp8={}", "parallel.tensor=2", "parallel.context=2", "parallel.sequence=true"], 256),
    ],
)
def test_every_rank_gets_a_multiple_of_tokens(tmp_path: Path, overrides: list[str], multiple: int) -> None:
    settings = settings_of(tmp_path, *overrides)
    align, context = settings.precision.token_multiple(settings.parallel), settings.parallel.context
    assert align == multiple
    for lengths in ([], [1], [3, 50, 200], [127], [128, 1]):
        trajectories = [make_trajectory(4, n, sample=i, group=0) for i, n in enumerate(lengths)]
        for rank in range(context):
            pack = make_micro_batch(
                trajectories, torch.device("cpu"), align=align, context=context, context_rank=rank
            )
            local = pack.tokens.shape[1]
            assert local > 0
            assert local % multiple == 0
            assert local * context == pack.size
            assert pack.mask.sum() == sum(lengths)
            # No gap between sequences and nothing behind them: attention asks for no padding.
            assert pack.packed.cu_seqlens_q_padded is None
            assert int(pack.packed.cu_seqlens_q[-1]) == pack.size


def test_layers_depend_on_device_precision_and_installation(tmp_path, monkeypatch) -> None:
    def chosen(*overrides: str, installed: bool = True, device: torch.device = CUDA) -> bool:
        spec = object() if installed else None
        monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: spec)
        return precision.uses_transformer_engine(settings_of(tmp_path, *overrides), device)

    assert chosen()
    assert not chosen(installed=False)
    assert not chosen("precision.dtype=float32")
    assert not chosen("model.implementation=local")
    assert not chosen(device=torch.device("cpu"))
    assert not chosen("precision.fp8={}", "device=cpu", device=torch.device("cpu"))
    for override, alternative in (
        ("precision.fp8={}", "null"),
        ("model.implementation=transformer_engine", "local"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert chosen(override)
        with pytest.raises(UserError, match=f"transformer_engine is not installed.*={alternative}$"):
            chosen(override, installed=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(UserError, match=r"A100 has compute capability 8\.0, and FP8 training needs 9\.0"):
        chosen("precision.fp8={}")


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so_in_one_line(config_file: Path) -> None:
    settings = load_settings(config_file, ["device=cuda"])
    message = r"^device is cuda, but this environment has .* instead of vllm; install requirements/gpu\.txt"
    with pytest.raises(UserError, match=message):
        check_start(CheckedRun(settings))
    with pytest.raises(
        UserError, match=r"^device is cuda, but this machine has no NVIDIA GPU; set device=cpu"
    ):
        check_gpus(settings, CheckedRun(settings).assignment)


def test_emulation_is_announced_once(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emulated = load_settings(config_file, ["precision={dtype: bfloat16, fp8: {recipe: tensorwise}}"])
    check_start(CheckedRun(emulated))
    assert capsys.readouterr().err.splitlines() == [f"warning: {FP8_EMULATED}"]
    check_start(CheckedRun(load_settings(config_file, [])))
    assert "emulated" not in capsys.readouterr().err


def test_fp8_is_refused_with_experts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"precision\.fp8 is not supported for mixtures of experts"):
        check_precision(settings_of(tmp_path, "precision.fp8={}"), TINY_MOE)
    check_precision(settings_of(tmp_path), TINY_MOE)


def test_rows_of_linear_attention_that_fp8_does_not_take(tmp_path: Path) -> None:
    """Of Qwen3.5-9B 12,352 rows, which is 772 x 16 and no multiple of 128."""
    shape = read_model_shape(EXAMPLES / "models" / "Qwen3.5-9B-Base")
    tensorwise, parallel = "precision.fp8.recipe=tensorwise", "parallel.tensor=%d"
    assert shape.linear.in_rows == 12_352
    for tensor in (1, 2, 4):
        check_precision(settings_of(tmp_path, tensorwise, parallel % tensor), shape)
    with pytest.raises(UserError, match="not divisible: rows of linear attention's in_proj 1544; lower"):
        check_precision(settings_of(tmp_path, tensorwise, parallel % 8), shape)
    with pytest.raises(UserError, match=r"in_proj 12352; .*set recipe to tensorwise or delayed"):
        check_precision(settings_of(tmp_path, "precision.fp8={}"), shape)
    mixture = replace(shape, experts=TINY_MOE.experts)
    with pytest.raises(UserError, match="not supported for mixtures of experts"):
        check_precision(settings_of(tmp_path, tensorwise), mixture)


@pytest.mark.parametrize(
    ("recompute", "modules"),
    [("none", ["core_attn"]), ("selective", ["mlp", "moe"]), ("full", ["core_attn"])],
)
def test_what_megatron_is_told_of_experts(recompute: str, modules: list[str]) -> None:
    parallel = ParallelSettings(data=4, expert=2)
    config = transformer_config(TINY_MOE, parallel, PrecisionSettings(), recompute, device=CUDA)
    assert (config.moe_token_dispatcher_type, config.moe_router_dtype) == ("alltoall", "fp32")
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (2, 1)
    assert config.moe_layer_freq == [0, 1, 1, 1]
    assert (config.moe_aux_loss_coeff, config.moe_router_load_balancing_type) == (0.0, "none")
    assert config.moe_router_pre_softmax is False
    assert config.recompute_modules == modules
    kernels = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
    assert not any(getattr(config, name) for name in kernels)
    unscaled = replace(TINY_MOE, experts=replace(TINY_MOE.experts, normalised=False))
    assert transformer_config(unscaled, parallel, PrecisionSettings()).moe_router_pre_softmax is True


class NamedSpecs(te_specs.TESpecProvider):
    """Megatron's provider of Transformer Engine's layers, with names for layers, as it is not installed."""

    def __getattribute__(self, name: str) -> Any:
        real = super().__getattribute__(name)
        if name.startswith("__") or name in ("grouped_mlp_modules", "fuse_layernorm_and_linear"):
            return real
        return lambda *_, **__: name


def test_expert_layers_use_transformer_engine_grouped_linears(monkeypatch) -> None:
    """And a separate norm before the router, under the local layers' name, unlike dense layers."""
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", NamedSpecs)
    monkeypatch.setattr(te_specs, "TEColumnParallelGroupedLinear", "grouped column")
    monkeypatch.setattr(te_specs, "TERowParallelGroupedLinear", "grouped row")
    usual = {"separate_norms": False, "share_prompts": False}
    layer = layer_specs._fused_layer(TINY_MOE, 1, **usual).submodules
    experts = layer.mlp.keywords["submodules"].experts
    assert experts.func is TEGroupedMLP
    assert experts.keywords["submodules"].linear_fc1 == "grouped column"
    assert experts.keywords["submodules"].linear_fc2 == "grouped row"
    assert layer.pre_mlp_layernorm == "layer_norm"
    dense = layer_specs._fused_layer(TINY_MOE, 0, **usual).submodules
    assert dense.pre_mlp_layernorm is IdentityOp
    assert dense.mlp.keywords["submodules"].linear_fc1 == "column_parallel_layer_norm_linear"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_sizes_that_fp8_does_not_take(tmp_path: Path, checkpoint: Path, device: str) -> None:
    on = f"device={device}"
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "head_dim": 64, "num_layers": 8}
    shape = shape_of(checkpoint, **sizes)
    check_precision(settings_of(tmp_path, on, "precision.fp8={}", "parallel.tensor=2"), shape)
    with pytest.raises(UserError, match=r"multiples of 128.*attention columns 64; .*recipe to tensorwise"):
        check_precision(settings_of(tmp_path, on, "precision.fp8={}", "parallel.tensor=4"), shape)
    check_precision(settings_of(tmp_path, on, "precision.fp8.recipe=tensorwise", "parallel.tensor=4"), shape)
    bf16 = "precision.fp8.first_last_bf16="
    check_precision(settings_of(tmp_path, on, bf16 + "3"), shape)
    with pytest.raises(UserError, match="of 8 layers on 4 pipeline stages it can be at most 2"):
        check_precision(settings_of(tmp_path, on, bf16 + "3", "parallel.pipeline=4"), shape)
