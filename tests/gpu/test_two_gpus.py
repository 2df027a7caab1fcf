"""What one GPU cannot show: ranks that wait leave their GPUs idle, and engines get weights meanwhile.

Why: over NCCL a waiting rank runs a kernel; serving threads whose copies queue behind it would never answer
the engine that the first rank waits for, and engines would share their GPUs with such kernels. Proved with
two ranks on two GPUs and readers in processes of their own: the group is bound to no device; work on a
waiting rank's GPU ends at once; a publication of both ranks over the process group is read while one of them
waits, through host memory and, with a third GPU, over NCCL; over CUDA IPC a reader on either GPU reads the
replica there. Not covered: vLLM, more than one node.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.two_gpus_worker import WAIT_SECONDS
from tests.support.ranks import run_ranks


def test_two_ranks(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = run_ranks("tests.gpu.two_gpus_worker", 2, tmp_path, "cuda", timeout=350, fresh=True)
    first, second = ranks
    assert first["bound"] == second["bound"] == "None"
    assert second["wait"]["waited"] > WAIT_SECONDS / 2
    assert second["wait"]["work"] < WAIT_SECONDS / 4, "work on a waiting rank's GPU waits as well"
    assert (second["wait"]["busy"] or 0) < 50, "a kernel runs on the GPU of a rank that waits"
    for links in ("host", "nccl")[: 2 if torch.cuda.device_count() > 2 else 1]:
        assert len(first[links]) == 2, "one for each version"
    assert [r["ranks_read"] for r in first["ipc"]] == [[0], [1]] * 2
