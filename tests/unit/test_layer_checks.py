"""What a run cannot do with a kind of layer is refused by name, before anything starts.

Why: each of these would compute something plausible and wrong, or fail within a library. Not covered: what
these layers compute (tests/distributed/test_families.py).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.checkpoints.hf_files import list_untrained, verify_hf_checkpoint
from rpg_megatron.config import ModelShape, UserError, load_settings
from rpg_megatron.config.model_shape import LatentAttention, Rope, Scales, Windows
from rpg_megatron.launcher.layer_checks import check_delta_kernels, check_layers
from rpg_megatron.launcher.teacher_checks import check_teacher
from rpg_megatron.models.registry import check_layout, mapping_for
from tests.support.tiny_models import TINY, random_state_dict, tiny_shape, write_checkpoint

HYBRID = tiny_shape("qwen3_5")
WINDOWS = Windows(8, (0, 1), Rope(1e4))
PART: dict[str, Any] = {"prefix": "model.language_model.", "untrained": ("vision_tower.",)}


@pytest.mark.parametrize(
    ("shape", "overrides", "message"),
    [
        (tiny_shape(windows=WINDOWS), ["training.share_prompts=true"], "training.share_prompts: qwen3"),
        (
            tiny_shape(windows=WINDOWS),
            ["parallel.context=2", "device=cuda", "precision.dtype=bfloat16"],
            "parallel.context: Transformer Engine's attention",
        ),
        (tiny_shape("phi3"), ["lora.rank=4"], "lora: phi3 models in this form"),
        (tiny_shape("olmo3"), ["lora.rank=4"], "lora: olmo3 models in this form"),
        (tiny_shape(scales=Scales(residual=0.5)), ["lora.rank=4"], "lora: qwen3 models in this form"),
        (tiny_shape(**PART), ["lora.rank=4"], "lora: qwen3 models in this form"),
        (
            tiny_shape(latent=LatentAttention(0, 24, 16, 16, 24)),
            ["lora.rank=4"],
            "lora: qwen3 models .* latent attention",
        ),
        (
            HYBRID,
            ["precision.dtype=bfloat16", "optimizer.distributed=false"],
            "optimizer.distributed: false with qwen3_5 models in bfloat16",
        ),
        (HYBRID, ["training.share_prompts=true"], "training.share_prompts: qwen3_5 models have linear"),
        (HYBRID, ["parallel.tensor=2"], "parallel.tensor: 2 with linear attention .* needs sequence"),
        (
            HYBRID,
            ["parallel.tensor=4", "parallel.sequence=true", "parallel.context=2"],
            "tensor 4 x context 2 does not divide the 4 key heads",
        ),
    ],
)
def test_what_layers_exclude(config_file, shape: ModelShape, overrides: list[str], message: str) -> None:
    settings = load_settings(config_file, overrides)
    check_layers(settings, TINY)
    check_layers(load_settings(config_file), shape)
    with pytest.raises(UserError, match=message):
        check_layers(settings, shape)


def test_kernels_of_a_gpu_are_asked_for(config_file: Path) -> None:
    check_delta_kernels(load_settings(config_file), HYBRID)
    settings = load_settings(config_file, ["device=cuda", "precision.dtype=bfloat16"])
    check_delta_kernels(settings, TINY)
    with pytest.raises(UserError, match="flash-linear-attention is missing"):
        check_delta_kernels(settings, HYBRID)


def test_a_teachers_kernels_are_asked_for(config_file: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "teacher", HYBRID, random_state_dict(mapping_for(HYBRID)))
    distil = [f"teacher.path={tmp_path / 'teacher'}", "objective.type=distil", "device=cuda"]
    settings = load_settings(config_file, [*distil, "precision.dtype=bfloat16"])
    check_teacher(settings, replace(TINY, vocab_size=HYBRID.vocab_size), weights=False)
    with pytest.raises(UserError, match=r"teacher\.path: python package flash-linear-attention is missing"):
        check_teacher(settings, TINY, weights=False, machine=True)


def test_a_teacher_has_windows_too(config_file: Path, tmp_path: Path) -> None:
    teacher = tiny_shape("mistral")
    write_checkpoint(tmp_path / "teacher", teacher, random_state_dict(mapping_for(teacher)))
    distil = [f"teacher.path={tmp_path / 'teacher'}", "objective.type=distil", "training.share_prompts=true"]
    with pytest.raises(UserError, match=r"teacher\.path: training\.share_prompts: mistral models"):
        check_teacher(load_settings(config_file, distil), TINY, weights=False)


def test_a_teacher_has_linear_attention_too(config_file: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "teacher", HYBRID, random_state_dict(mapping_for(HYBRID)))
    distil = [f"teacher.path={tmp_path / 'teacher'}", "objective.type=distil", "parallel.tensor=2"]
    with pytest.raises(UserError, match=r"teacher\.path: parallel\.tensor: 2 with linear attention"):
        check_teacher(load_settings(config_file, distil), TINY, weights=False)


def test_a_norm_over_all_heads_needs_whole_heads() -> None:
    shape = tiny_shape("olmo3", num_heads=8, num_kv_heads=2)
    check_layout(shape, 2, 1)
    with pytest.raises(UserError, match=r"norm is over all of them \(tensor .* fit this model: 1, 2\)"):
        check_layout(shape, 4, 1)


def test_tensors_under_two_names_and_files_that_only_look_like_ours(tmp_path: Path) -> None:
    shape = tiny_shape("mistral", **PART)
    weights = random_state_dict(mapping_for(shape))
    tower = {"vision_tower.a": next(iter(weights.values())).clone()}
    write_checkpoint(tmp_path / "model", {}, weights | tower)
    # A file of this name beside a whole model is not what a conversion has written.
    write_checkpoint(tmp_path / "other", {}, {"x": tower["vision_tower.a"]})
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model" / "untrained.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights | tower, "model.safetensors")}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(list_untrained(tmp_path / "model", shape)) == set(tower)
    old = {"language_model.model.norm.weight": weights["model.language_model.norm.weight"].clone()}
    write_checkpoint(tmp_path / "twice", {}, weights | old)
    with pytest.raises(
        UserError, match=r"under two names: \S+ \(model\.language_model\.norm\.weight\); remove one"
    ):
        verify_hf_checkpoint(tmp_path / "twice", mapping_for(shape))
