"""Peak memory of each process of a checkpoint conversion, against 2 x its own shard + 1 bucket.

``python -m benchmarks.convert`` writes a random bfloat16 model (--layers sets its size) to a temporary
folder, converts it to Megatron and back in several layouts, checks that every tensor is what it was, and
prints a table. Peak is the resident set at most (VmHWM, mapped files included) less the resident set after
imports; a bucket is the largest HF file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rpg_megatron.checkpoints.hf_export import group_shards
from rpg_megatron.checkpoints.hf_files import INDEX, list_checkpoint
from rpg_megatron.commands.convert.command import convert_to_hf, convert_to_megatron, open_hf, open_megatron
from rpg_megatron.config import read_model_shape
from rpg_megatron.launcher.supervisor import StopSignals
from rpg_megatron.models.registry import mapping_for

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))


def write_model(folder: Path, layers: int, bucket: int) -> int:
    """A random Qwen3 in files of ``bucket`` bytes; returns its size."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = mapping_for(read_model_shape(folder)).hf_tensors()
    sizes = {n: 2 * torch.Size(s).numel() for n, s in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    index = {}
    for i, names in enumerate(group_shards(sizes, bucket)):
        noise = {n: 0.02 * torch.randn(shapes[n], generator=generator) for n in names}
        tensors = {n: (x + ("norm" in n)).to(torch.bfloat16) for n, x in noise.items()}
        save_file(tensors, folder / f"model-{i}.safetensors")
        index |= dict.fromkeys(names, f"model-{i}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(sizes.values())


def same(a: Path, b: Path) -> bool:
    """Two HF checkpoints hold the same tensors bit by bit."""
    ours, theirs = list_checkpoint(a), list_checkpoint(b)

    def read(stored: dict, name: str) -> torch.Tensor:
        with safe_open(stored[name].file, framework="pt") as f:
            return f.get_tensor(name).view(torch.int16)

    return set(ours) == set(theirs) and all(torch.equal(read(ours, n), read(theirs, n)) for n in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--bucket-mb", type=int, default=100)
    parser.add_argument("--layout", nargs=2, type=int, action="append", metavar=("TP", "PP"))
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_model(folder / "hf", options.layers, options.bucket_mb * 10**6)
        bucket = max(t.file.stat().st_size for t in list_checkpoint(folder / "hf").values())
        print(f"{size / 1e6:.0f} MB of weights, bucket {bucket / 1e6:.0f} MB")
        print("MB, of the process nearest its bound, 2 x shard + bucket:")
        print(f"{'':16} {'layout':>10} {'shard':>7} {'peak':>7} {'bound':>7} {'peak/shard':>10} {'s':>6}")
        for tensor, pipeline in options.layout or LAYOUTS:
            where = f"TP{tensor}xPP{pipeline}"
            there, back = folder / f"megatron-{where}", folder / f"back-{where}"
            source, signals = open_hf(folder / "hf", tensor, pipeline), StopSignals()
            reports = {"HF -> Megatron": convert_to_megatron(source, there, signals)}
            source = open_megatron(there)
            reports["Megatron -> HF"] = convert_to_hf(source, back, signals, max_shard_bytes=bucket)
            for what, report in reports.items():
                m = max(report.memory, key=lambda m: m.peak - 2 * m.shard)
                bound = 2 * m.shard + bucket
                failed |= m.peak > bound
                print(
                    f"{what:16} {where:>10} {m.shard / 1e6:7.0f} {m.peak / 1e6:7.0f} {bound / 1e6:7.0f} "
                    f"{m.peak / m.shard:10.2f} {report.seconds:6.1f}{'  OVER' if m.peak > bound else ''}"
                )
            if not same(folder / "hf", back):
                failed = True
                print(f"{where}: tensors changed on the way")
    sys.exit(failed)


if __name__ == "__main__":
    main()
