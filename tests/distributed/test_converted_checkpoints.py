"""A converted Megatron checkpoint gives every rank of every layout the weights of its HF checkpoint.

Why: the converter writes Megatron's format without Megatron, and runs read it without Megatron; either could
agree with the other and with nobody else. Proved, bit for bit on gloo ranks, also with experts:
Megatron-Core's own ``dist_checkpointing.load`` and our reader fill the parameters of each rank as the HF
files do, and what Megatron saves in that layout, with its own padding and parts, is the same whole model to
our reader. Not covered: optimizer state (test_resume_layouts), Transformer Engine's layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.commands.convert.command import convert_to_megatron, open_hf
from rpg_megatron.launcher.stopping import StopSignals
from tests.support.ranks import run_ranks
from tests.support.tiny_models import AWKWARD, make_model

SP = {"tensor": 2, "sequence": True}
LAYOUTS: dict[tuple[str, int], dict[str, dict[str, Any]]] = {
    ("qwen3", 1): {"TP1": {}},
    ("qwen3", 2): {"TP2": SP, "PP2": {"pipeline": 2}},
    ("qwen3_moe", 2): {"EP2": {"data": 2, "expert": 2}, "TP2, ETP2": {**SP, "expert_tensor": 2}},
    ("qwen2", 4): {"TP2 x PP2": {**SP, "pipeline": 2}, "CP2 x DP2": {"context": 2, "data": 2}},
    ("qwen3_moe", 4): {"TP2 x PP2, EP2": {**SP, "pipeline": 2, "expert": 2}},
}
"""By family and number of ranks; with four they are long."""


@pytest.mark.parametrize(
    ("family", "world"),
    [pytest.param(*case, marks=pytest.mark.long if case[1] > 2 else ()) for case in LAYOUTS],
)
def test_every_rank_gets_the_weights_of_the_hf_checkpoint(tmp_path: Path, family: str, world: int) -> None:
    sizes = AWKWARD | {"head_dim": 8} if family != "qwen2" else dict(AWKWARD)
    make_model(tmp_path / "hf", family, **sizes)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    convert_to_megatron(open_hf(tmp_path / "hf"), tmp_path / "megatron", StopSignals())
    (tmp_path / "layouts.json").write_text(json.dumps(LAYOUTS[family, world]))
    for name, (count, differ) in run_ranks("tests.distributed.converted_worker", world, tmp_path).items():
        assert count > 20
        assert differ == [], name
