"""The one rank of test_long_context's memory test: the second table of benchmarks/long_context.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.long_context import CHUNK, TOKENS, VOCABULARY, head_peaks, make_checkpoint, plain_peak
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    mesh = start_mesh(ParallelSettings())
    result = head_peaks(make_checkpoint(folder / "model", VOCABULARY), mesh, device, TOKENS)
    result |= {"tokens": TOKENS, "vocab": VOCABULARY, "chunk": CHUNK}
    for name, backward in (("scoring", False), ("update", True)):
        result[f"plain {name}"] = [plain_peak(n, backward=backward) for n in (1024, 2048)]
    (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
