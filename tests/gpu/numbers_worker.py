"""The process of test_numbers_of_recipes: one checkpoint through transformers and the policy's precisions."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from benchmarks.mismatch import SECTIONS, by_transformers, numbers
from benchmarks.policies import SHAPES, batch_of, build, forget, start, write_checkpoint


def main() -> None:
    folder = Path(sys.argv[1])
    device, mesh = start(sys.argv[2] if len(sys.argv) > 2 else "cuda")
    shape = replace(SHAPES["tiny"], num_layers=4, hidden_size=256, ffn_hidden_size=512, num_heads=4)
    model = write_checkpoint(folder / "model", shape)
    batch = batch_of([40, 300, 123], shape.vocab_size)
    recipes = ["blockwise", "tensorwise", "delayed", "blockwise+params"] if device.type == "cuda" else []
    measured = {}
    for name in ("fp32", "bf16", *recipes):
        forget()
        measured[name] = numbers(build(shape, mesh, device, name, model, **SECTIONS), batch)
    gaps = {}
    for name, base in (("bf16", "fp32"), *((recipe, "bf16") for recipe in recipes)):
        (logp, grad), (base_logp, base_grad) = measured[name], measured[base]
        gaps[name] = [
            float((logp - base_logp).abs().mean()),
            float((grad - base_grad).norm() / base_grad.norm()),
        ]
    gaps["transformers"] = [
        float((by_transformers(model, batch, device) - measured["fp32"][0]).abs().mean()),
        0.0,
    ]
    (folder / "result.json").write_text(json.dumps(gaps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
