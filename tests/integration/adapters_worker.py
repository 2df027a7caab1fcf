"""One rank: writes an adapter of PEFT's as the Megatron checkpoint of a LoRA run, without optimizer.

Arguments: the folder, which holds model, adapter and lora.json; the dtype of the checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.index import StoredPart
from rpg_megatron.checkpoints.megatron import plan_save
from rpg_megatron.checkpoints.peft import check_adapter
from rpg_megatron.config import read_model_shape
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
from rpg_megatron.models.lora import AdapterMapping, split_parameters
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.lora import LoraModel
from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config
from rpg_megatron.system.collectives import barrier, gather_on_first
from rpg_megatron.system.dtypes import torch_dtype


def main() -> None:
    folder, dtype = Path(sys.argv[1]), torch_dtype(sys.argv[2])
    start_process_group(start_device("cpu"))
    parallel = ParallelSettings(tensor=dist.get_world_size())
    mesh = start_mesh(parallel)
    shape = read_model_shape(folder / "model")
    lora = LoraSettings.model_validate_json((folder / "lora.json").read_text())
    config = transformer_config(shape, parallel, PrecisionSettings(dtype="float32"))
    config.params_dtype = config.pipeline_dtype = dtype
    (model,) = build_model(shape, config, ModelSettings(path=folder / "model"), mesh)
    LoraModel([model], shape, lora, seed=0)
    mapping = AdapterMapping(shape, lora)
    load_hf_weights(
        folder / "adapter",
        split_parameters(dict(named_parameters([model])))[1].items(),
        mapping,
        mesh.coordinates(1),
        stored=check_adapter(folder / "adapter", mapping),
    )
    planned = plan_save(folder / "saved", [model], stage=False)
    if everyone := gather_on_first(planned.write(), list[StoredPart]):
        planned.finish(everyone)
    if mesh.rank == 0:
        (folder / "result.json").write_text("null")
    barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
