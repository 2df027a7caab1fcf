"""A reader finds published shards, in any layout, if they are complete, current and ours.

One process stands in for all ranks. Not covered: several ranks (tests/distributed/test_publisher_ranks.py),
vLLM (tests/integration).
"""

import json
import os

import pytest
import torch

from rpg_megatron.bridge.checksum import checksum
from rpg_megatron.bridge.manifest import read_manifest
from rpg_megatron.bridge.transports.mapped_reader import ShardError, ShardReader
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.config.errors import UserError
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.registry import mapping_for
from tests.support.megatron_shards import grid, stage_values
from tests.support.tiny_models import TINY, random_state_dict


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "bridge"
    path.mkdir(mode=0o700)
    return path


def publisher(folder, layout=None, sd=None, dtype=torch.float32):
    layout = layout or mapping_for(TINY)
    sd = sd or random_state_dict(layout)
    (place,) = grid(layout.shape, 1, 1)
    params = stage_values(layout, place, 1, sd)
    return SharedMemoryPublisher(folder, place, params, layout, dtype), params, sd


def test_reader_returns_every_tensor_and_any_box_of_it(folder):
    pub, _, sd = publisher(folder)
    manifest = pub.publish(3)
    assert manifest == read_manifest(folder / "manifest.json")
    reader = ShardReader(folder)
    reader.open(manifest.place, 3)
    for name, expected in sd.items():
        assert torch.equal(reader.whole(name), expected)
        assert manifest.checksum(name) == checksum(expected, (0,) * expected.dim())
    name = "model.layers.1.self_attn.q_proj.weight"
    requested = Box((5, 3), (20, 7))
    out = torch.zeros(requested.extent)
    for part, box in reader.cut(name, requested):
        out[Box(box.offset_in(requested), box.extent).slices()] = part
    assert torch.equal(out, sd[name][5:25, 3:10])
    reader.close()
    pub.close()
    assert list(folder.iterdir()) == []


def test_what_a_closed_publisher_has_left_is_refused(folder):
    """A reader keeps its map, whose memory the trainer may use for something else from then on."""
    pub, _, _ = publisher(folder)
    reader = ShardReader(folder)
    reader.open(pub.publish(1).place, 1)
    pub.close()
    with pytest.raises(ShardError, match="must not be read now"):
        reader.check_version()


def test_publishing_again_reuses_the_file_and_the_readers_map(folder):
    pub, params, sd = publisher(folder, dtype=torch.bfloat16)
    reader = ShardReader(folder)
    reader.open(pub.publish(1).place, 1)
    before = reader._files[0]
    with torch.no_grad():
        params["decoder.final_layernorm.weight"].add_(1)
    manifest = pub.publish(2)
    with pytest.raises(ShardError, match="holds version 2, asked for 1"):
        reader.check_version()
    reader.open(manifest.place, 2)
    assert reader._files[0] is before
    assert torch.equal(reader.whole("model.norm.weight"), (sd["model.norm.weight"] + 1).bfloat16())
    # A new trainer replaces the file; the old map must not be taken for it.
    pub2, _, sd2 = publisher(folder, sd=random_state_dict(mapping_for(TINY), seed=9))
    reader.open(pub2.publish(5).place, 5)
    assert reader._files[0] is not before
    assert torch.equal(reader.whole("lm_head.weight"), sd2["lm_head.weight"])


def test_reader_refuses_what_is_stale_foreign_or_misplaced(folder, tmp_path):
    pub, _, _ = publisher(folder)
    manifest = pub.publish(1)
    shard = folder / manifest.shards[0].file
    reader = ShardReader(folder)
    with pytest.raises(ShardError, match="holds version 1, asked for 2"):
        reader.open(manifest.place, 2)
    pub._word.fill_(-1)
    with pytest.raises(ShardError, match=r"shard-00000\.bin \(trainer rank 0\) must not be read now"):
        reader.open(manifest.place, 1)
    pub._word.fill_(1)
    with pytest.raises(ShardError, match="outside"):
        ShardReader(tmp_path / "elsewhere").open(manifest.place, 1)
    (folder / "link.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(ShardError, match="outside"):
        reader.open({"manifest": str(folder / "link.json")}, 1)
    shard.chmod(0o644)
    with pytest.raises(ShardError, match="not a private file"):
        reader.open(manifest.place, 1)
    shard.chmod(0o600)
    raw = json.loads((folder / "manifest.json").read_text())
    raw["layout"]["shards"][0]["file"] = "../x"
    (folder / "other.json").write_text(json.dumps(raw))
    with pytest.raises(ShardError, match="impossible file"):
        reader.open({"manifest": str(folder / "other.json")}, 1)
    raw["layout"]["tensors"]["lm_head.weight"]["boxes"][0]["shared_with"] = [9]
    (folder / "other.json").write_text(json.dumps(raw))
    with pytest.raises(ShardError, match="in a shard that is not listed"):
        reader.open({"manifest": str(folder / "other.json")}, 1)
    (folder / "other.json").write_text('{"version": 1}')
    with pytest.raises(ShardError, match="not a manifest"):
        reader.open({"manifest": str(folder / "other.json")}, 1)
    os.truncate(shard, manifest.shards[0].size - 64)
    with pytest.raises(ShardError, match="bytes, its manifest says"):
        reader.open(manifest.place, 1)
    target = tmp_path / "moved.bin"
    shard.rename(target)
    shard.symlink_to(target)
    with pytest.raises(ShardError, match="cannot be opened"):
        reader.open(manifest.place, 1)


@pytest.mark.parametrize("phase", ["check", "apply"])
def test_weights_that_change_while_they_are_read_are_refused(folder, phase):
    """The trainer withdraws them as the first slice is read; no later phase need notice."""
    pub, _, _ = publisher(folder)
    withdraw = []
    reader = ShardReader(folder, on_progress=lambda: [pub.retract() for _ in withdraw])
    manifest = pub.publish(1)
    reader.open(manifest.place, 1)
    box = Box.whole(manifest.tensors["model.norm.weight"].shape)
    if phase == "check":
        withdraw.append(True)
        with pytest.raises(ShardError, match="must not be read now"):
            reader.check([("model.norm.weight", box)])
    else:
        reader.check([("model.norm.weight", box)])
        reader.begin()
        withdraw.append(True)
        reader.whole("model.norm.weight")
        with pytest.raises(ShardError, match="must not be read now"):
            reader.end()


def test_damage_is_traced_to_the_file(folder):
    pub, _, _ = publisher(folder)
    manifest = pub.publish(1)
    reader = ShardReader(folder)
    reader.open(manifest.place, 1)
    name = "model.layers.2.mlp.down_proj.weight"
    assert reader.damaged(name) == []
    shard = pub._shards["decoder.layers.2.mlp.linear_fc2.weight"]
    shard.view(torch.int32)[3, 7] ^= 1
    assert [f.rank for f in reader.damaged(name)] == [0]
    assert reader.damaged("model.layers.2.mlp.up_proj.weight") == []


def test_folder_must_be_private_and_memory_must_suffice(tmp_path, folder, monkeypatch):
    public = tmp_path / "public"
    public.mkdir(mode=0o755)
    with pytest.raises(UserError, match="0755"):
        publisher(public)

    def full(fd, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"no room to publish .* MiB"):
        publisher(folder)
    assert list(folder.iterdir()) == []
