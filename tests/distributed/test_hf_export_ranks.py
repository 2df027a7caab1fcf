"""Four ranks (TP2, PP2) export the Hugging Face checkpoint that their shards were cut from, in many files.

Real gloo processes, because the point of an export is who sends what to whom. Not covered: NCCL, and that
transformers loads the result (tests/distributed/test_layouts.py does that with a real model).
"""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import load_file

from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.checkpoints.hf_files import verify_hf_checkpoint
from rpg_megatron.config.errors import UserError
from rpg_megatron.models.registry import mapping_for
from tests.support.megatron_shards import grid, stage_values
from tests.support.ranks import fork_server
from tests.support.tiny_models import TINY, random_state_dict, tiny_shape, write_checkpoint

EXPORTED = {
    "untied": tiny_shape(),
    "tied": tiny_shape(tied_embeddings=True),
    "qwen2, tied, layers 3 and 2": tiny_shape("qwen2", tied_embeddings=True, num_layers=5),
    "llama, layers 3 and 2": tiny_shape("llama", num_layers=5),
}


def _export_rank(rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    for name, shape in EXPORTED.items():
        layout = mapping_for(shape)
        place = grid(shape, 2, 2, vocab_multiple=16)[rank]
        params = stage_values(layout, place, 2, random_state_dict(layout))
        args = (folder / name, folder / "source", params, layout, place)
        export_hf(*args, dtype=torch.bfloat16, max_shard_bytes=8000)
    # Only rank 0 checks the folder, but every rank must get the error, or the others wait forever.
    with pytest.raises(UserError, match="already exists"):
        export_hf(*args, dtype=torch.bfloat16)
    dist.destroy_process_group()


def test_export_from_tp2_pp2_is_the_checkpoint_again(tmp_path):
    write_checkpoint(tmp_path / "source", TINY, random_state_dict(mapping_for(TINY)))
    fork_server()
    mp.start_processes(_export_rank, (4, tmp_path), nprocs=4, start_method="forkserver")
    for name, shape in EXPORTED.items():
        check_export(tmp_path / name, mapping_for(shape))


def check_export(out, layout):
    sd = random_state_dict(layout)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 4, "more files than ranks, so that a rank assembles more than one"
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert all(f.stat().st_size < 8000 + 3000 for f in files)
    back = {}
    for file in files:
        back.update(load_file(file))
        with safe_open(file, "pt") as f:
            assert f.metadata() == {"format": "pt"}
    assert list(index["weight_map"]) == list(sd)
    assert back.keys() == sd.keys()
    assert all(torch.equal(back[n], sd[n].bfloat16()) for n in sd)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (out / "tokenizer.json").exists()
    assert (out / "merges.txt").exists()
    assert not (out.parent / f".{out.name}.incomplete").exists()
    verify_hf_checkpoint(out, layout)
