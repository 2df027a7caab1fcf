"""Weights in the trainer's GPU memory, read by another process through CUDA IPC: the same bits and sums.

Why: nothing is copied to publish, so a wrong offset into a shared piece of memory would serve other weights.
Proved for two versions in one process's life, with the checksums of both sides. Not covered: vLLM.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.policies import SHAPES
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from tests.support.ranks import run_alone


def test_another_process_reads_what_was_published(tmp_path: Path) -> None:
    assert run_alone("tests.gpu.ipc_worker", tmp_path) is True
    layout = mapping_for(SHAPES["tiny"])
    for version in (1, 2):
        params = load_file(tmp_path / f"wanted_{version}.safetensors")
        read = load_file(tmp_path / f"read_{version}.safetensors")
        assert set(read) == set(layout.hf_tensors())
        for name, param in params.items():
            for piece in layout.pieces(name, ONE_RANK):
                actual, expected = read[piece.hf_name][piece.hf.slices()], param[piece.local.slices()]
                assert torch.equal(actual, expected), (version, piece.hf_name)
