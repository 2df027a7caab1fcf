"""A converted Megatron checkpoint gives every rank of every layout the weights of its HF checkpoint.

Why: the converter writes Megatron's format without Megatron, and runs read it without Megatron; either could
agree with the other and with nobody else. Proved, bit for bit on gloo ranks, also with experts:
Megatron-Core's own ``dist_checkpointing.load`` and our reader fill the parameters of each rank as the HF
files do, and what Megatron saves in that layout, with its own padding and parts, is the same whole model to
our reader. Not covered: optimizer state (test_resume_layouts), Transformer Engine's layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as mpu

from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.megatron import load_weights
from rpg_megatron.checkpoints.megatron_tensors import MegatronTensors
from rpg_megatron.commands.convert.command import convert_to_megatron, open_hf
from rpg_megatron.config import read_model_shape
from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config
from rpg_megatron.system.collectives import barrier, gather_objects
from tests.support.rank_policy import save_weights
from tests.support.ranks import ranks
from tests.support.tiny_models import AWKWARD, make_model


def compare(folder: Path, layout: dict[str, object], name: str) -> tuple[int, list[str]]:
    parallel = ParallelSettings(**layout)
    mesh, shape = start_mesh(parallel), read_model_shape(folder / "hf")
    mapping = mapping_for(shape)
    config = transformer_config(shape, parallel, PrecisionSettings(dtype="float32"))
    (model,) = build_model(shape, config, ModelSettings(path=folder / "hf"), mesh)
    parameters = dict(named_parameters([model]))
    ways = {
        "hf": lambda: load(folder / "hf"),
        "ours": lambda: load(folder / "megatron" / "release" / "hf"),
        "Megatron's": lambda: load_weights(folder / "megatron" / "release", [model], shape.vocab_size),
    }

    def load(model_dir: Path) -> None:
        load_hf_weights(
            model_dir,
            parameters.items(),
            mapping,
            mesh.coordinates(1),
        )

    found: dict[str, dict[str, torch.Tensor]] = {}
    for way, run in ways.items():
        for parameter in parameters.values():
            parameter.data.fill_(float("nan"))
        run()
        found[way] = {n: p.detach().clone() for n, p in parameters.items()}
    differ = [f"{way}: {n}" for way in ways for n in parameters if not same(found[way][n], found["hf"][n])]

    # And back: what Megatron saves in this layout, read as one whole model.
    saved = folder / f"saved-{name}"
    if mesh.rank == 0:
        saved.mkdir()
    barrier()
    save_weights(saved, [model])
    whole = MegatronTensors(saved, mapping)
    expected = MegatronTensors(folder / "megatron" / "release", mapping)
    differ += [f"saved: {n}" for n in whole._shapes if not same(whole.parameter(n), expected.parameter(n))]
    mpu.destroy_model_parallel()
    return len(parameters), [name for rank in gather_objects(differ, list[str]) for name in rank]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@ranks(2)
def compare_all(folder: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, tuple[int, list[str]]]:
    """Layout -> number of parameters, and those that differ."""
    return {name: compare(folder, layout, name) for name, layout in layouts.items()}


SP = {"tensor": 2, "sequence": True}
LAYOUTS: dict[tuple[str, int], dict[str, dict[str, Any]]] = {
    ("qwen3", 1): {"TP1": {}},
    ("qwen3", 2): {"TP2": SP, "PP2": {"pipeline": 2}},
    ("qwen3_moe", 2): {"EP2": {"data": 2, "expert": 2}, "TP2, ETP2": {**SP, "expert_tensor": 2}},
    ("qwen2", 4): {"TP2 x PP2": {**SP, "pipeline": 2}, "CP2 x DP2": {"context": 2, "data": 2}},
    ("qwen3_moe", 4): {"TP2 x PP2, EP2": {**SP, "pipeline": 2, "expert": 2}},
}
"""By family and number of ranks."""


@pytest.mark.parametrize(
    ("family", "world"),
    [pytest.param(*case, marks=() if case == ("qwen3_moe", 2) else pytest.mark.long) for case in LAYOUTS],
)
def test_every_rank_gets_the_weights_of_the_hf_checkpoint(tmp_path: Path, family: str, world: int) -> None:
    sizes = AWKWARD | {"head_dim": 8} if family != "qwen2" else dict(AWKWARD)
    make_model(tmp_path / "hf", family, **sizes)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    convert_to_megatron(open_hf(tmp_path / "hf"), tmp_path / "megatron", StopSignals())
    for name, (count, differ) in compare_all(tmp_path, LAYOUTS[family, world], world=world).items():
        assert count > 20
        assert differ == [], name
