"""The process of test_fused_layers: models of Transformer Engine's layers, their names and checkpoints."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from benchmarks.policies import SHAPES, start
from rpg_megatron.checkpoints.megatron import load_weights
from rpg_megatron.config.model_shape import LinearAttention, ModelShape, Rope, Windows
from rpg_megatron.config.policy import FP8Settings, ModelSettings, ParallelSettings, PrecisionSettings
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.model import Mesh, build_model, named_parameters, transformer_config
from tests.support.rank_policy import save_weights

SHAPE = SHAPES["tiny"]
FAMILIES = {
    "qwen3": {},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "llama": {"qk_norm": False, "tied_embeddings": False},
    "mistral": {"qk_norm": False, "windows": Windows(64, (0, 1), Rope(1e4))},
    "phi3": {"qk_norm": False, "fused_rows": True, "rope": Rope(1e4, 0.75)},
    "olmo3": {"wide_qk_norm": True, "post_norm": True, "windows": Windows(64, (0,), Rope(1e3))},
}
if find_spec("fla") is not None:
    FAMILIES["qwen3_5"] = {
        "zero_centred": True,
        "gated_attention": True,
        "rope": Rope(1e4, 0.25),
        "linear": LinearAttention((0,), 2, 4, 64, 64, 4),
    }


class Builder:
    """Makes models on one device."""

    def __init__(self, device: torch.device, mesh: Mesh):
        self.device, self.mesh = device, mesh

    def __call__(self, shape: ModelShape, fp8: FP8Settings | None, *, fused: bool) -> GPTModel:
        """A model with random weights."""
        precision = PrecisionSettings(fp8=fp8)
        config = transformer_config(shape, ParallelSettings(), precision, device=self.device, fused=fused)
        (model,) = build_model(shape, config, ModelSettings(path=Path()), self.mesh)
        return model.to(self.device)


def names(shape: ModelShape, model: GPTModel) -> list[str]:
    """Names that the layout or the model lacks, and parameters of another shape than the layout's."""
    layout, problems, known = mapping_for(shape), [], set()
    for name, p in named_parameters([model]):
        if layout.local_shape(name, ONE_RANK) != tuple(p.shape):
            problems.append(f"{name} has shape {tuple(p.shape)}")
        pieces = layout.pieces(name, ONE_RANK)
        known |= {piece.hf_name for piece in pieces}
    return problems + sorted(known ^ set(layout.hf_tensors()))


def same(a: GPTModel, b: GPTModel, build: Builder, folder: Path) -> bool:
    """Whether b has a's weights after it has loaded a's checkpoint, whichever layers they use."""
    folder.mkdir()
    save_weights(folder, [a])
    load_weights(folder, [b], SHAPE.vocab_size)
    again = folder.with_suffix(".again")
    again.mkdir()
    save_weights(again, [b])
    loaded = build(SHAPE, None, fused=False)
    load_weights(again, [loaded], SHAPE.vocab_size)
    expected = build(SHAPE, None, fused=False)
    load_weights(folder, [expected], SHAPE.vocab_size)
    return all(
        bool((p == q).all())
        for (_, p), (_, q) in zip(named_parameters([loaded]), named_parameters([expected]), strict=True)
    )


def main() -> None:
    folder, build = Path(sys.argv[1]), Builder(*start("cuda"))
    result: dict[str, object] = {}
    for family, changes in FAMILIES.items():
        shape = replace(SHAPE, family=family, **changes)
        for recipe in (None, "blockwise", "tensorwise", "delayed")[: 1 if shape.linear else None]:
            model = build(shape, FP8Settings(recipe=recipe) if recipe else None, fused=True)
            result[f"{family} {recipe}"] = names(shape, model)
    delayed = FP8Settings(recipe="delayed")
    kinds = {"own": (None, False), "fused": (None, True), "delayed": (delayed, True)}
    for source_kind, (fp8, fused) in kinds.items():
        for target_kind, (target_fp8, target_fused) in kinds.items():
            source, target = build(SHAPE, fp8, fused=fused), build(SHAPE, target_fp8, fused=target_fused)
            result[f"{source_kind} -> {target_kind}"] = same(
                source, target, build, folder / f"{source_kind}-{target_kind}"
            )
    (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
