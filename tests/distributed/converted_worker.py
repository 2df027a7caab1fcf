"""One rank of test_converted_checkpoints: weights from HF, and from Megatron's format by both readers.

Arguments: the folder, with ``hf`` and ``megatron``. Result: for each layout of this world size the names of
parameters that differ, and how many there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.megatron import load_weights
from rpg_megatron.checkpoints.megatron_tensors import MegatronTensors
from rpg_megatron.config import read_model_shape
from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config
from rpg_megatron.system.collectives import barrier, gather_objects
from tests.support.rank_policy import save_weights


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


def main() -> None:
    folder = Path(sys.argv[1])
    start_process_group(start_device("cpu"))
    layouts = json.loads((folder / "layouts.json").read_text())
    results = {name: compare(folder, layout, name) for name, layout in layouts.items()}
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
