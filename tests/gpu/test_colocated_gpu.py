"""A whole run on one GPU that engine and trainer share: it ends, and agrees with its engine.

Why: sleeping, waking, pulling over CUDA IPC and offloading are combined nowhere else. Proved with the
quickstart's model in BF16, three steps with a checkpoint after each: the mismatch is that of BF16, vLLM
really gave memory back, the trace of a step has CUDA kernels and phases, the memory snapshot can be read. Not
covered: speed, flat memory in figures (benchmarks/gpu.py).
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SETTINGS = [
    "device=cuda",
    "parallel.tensor=1",
    "precision.dtype=bfloat16",
    "bridge.transport=cuda_ipc",
    "engine={colocated: true, kv_cache_gib: 2, max_sequences: 64}",
    "rollout.prompts_per_step=8",
    "training={steps: 3, minibatches: 2, tokens_per_microbatch: 4096}",
    "evaluation.data.limit=8",
    "checkpoint={every: 1, keep: 1}",
    "profile={steps: [2], memory: true, nvtx: true}",
    "name=colocated",
]


def test_a_run_in_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(QUICKSTART), *SETTINGS]
    done = subprocess.run([*command, f"runs={tmp_path}"], capture_output=True, text=True, timeout=460)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "colocated-001"
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["mismatch/logp_mean"] < 0.05 for row in rows[1:])
    freed = re.findall(r"Sleep mode freed ([\d.]+) GiB", (run / "logs" / "engine_0.log").read_text())
    assert len(freed) == 1 + 3 + 3  # at the start, before every update, and while every checkpoint is made
    assert all(float(gib) > 1.9 for gib in freed)
    events = json.loads(gzip.decompress((run / "profile" / "step_000002_rank_0.json.gz").read_bytes()))
    kinds = {event.get("cat") for event in events["traceEvents"]}
    names = {event.get("name") for event in events["traceEvents"]}
    assert "kernel" in kinds
    assert {"collect", "handover", "logprobs", "update", "sync"} <= names
    snapshot = pickle.loads((run / "profile" / "step_000002_rank_0.pickle").read_bytes())
    assert snapshot["segments"]
