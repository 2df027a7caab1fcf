"""What a trainer publishes in each sync, and that a version's weights stay the same.

Why: a sync that sends the whole model where adapters alone have changed has the right result, and takes a
hundred times as long. Weights that change while engines load them are served by some engines only.

A publisher of shared memory, and a sampler that notes what it is given. Not covered: several ranks
(tests/distributed), engines (tests/integration).
"""

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.config import UserError
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.models.lora import AdapterMapping, with_adapters
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.rollout.sampler_client import ResyncRequired, SyncResult
from rpg_megatron.training.preemption import StopRequest
from rpg_megatron.training.run import RankRun
from rpg_megatron.training.weight_sync import WeightSync
from tests.support.alone import alone
from tests.support.tiny_models import TINY

LORA = LoraSettings(rank=2)
ADAPTERS = AdapterMapping(TINY, LORA).hf_tensors().keys()
MODEL = mapping_for(TINY).hf_tensors().keys()
NORM = "decoder.layers.1.pre_mlp_layernorm.weight"
HF_NORM = "model.layers.1.post_attention_layernorm.weight"


class Sampler:
    """Accepts what it is given, but for the answers that a test has set."""

    def __init__(self) -> None:
        self.given: list[tuple[set[str], int, bool]] = []
        """Tensors, version and ``resync`` of each call."""
        self.refusals: list[str] = []
        self.seen = lambda: None
        """Called in each sync, while the weights are published."""

    def sync(self, manifest: Manifest, version: int, resync: bool, trial: bool) -> SyncResult:
        self.given.append((set(manifest.tensors), version, resync))
        self.seen()
        return SyncResult(refused=[self.refusals.pop(0)] if self.refusals else [])

    def resume_request(self) -> str:
        return "resumed"


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Any]:
    folder = tmp_path / "bridge"
    folder.mkdir(mode=0o700)
    mapping = with_adapters(mapping_for(TINY), LORA)
    shapes = mapping.stage_params(ONE_RANK, layers=range(TINY.num_layers), first=True, last=True)
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    with alone():
        publisher = SharedMemoryPublisher(folder, ONE_RANK, params, mapping, torch.float32)

        def make(adapters: Collection[str] | None) -> WeightSync:
            return WeightSync(publisher, sampler, StopRequest(), adapters)  # type: ignore[arg-type]

        sampler = Sampler()
        yield SimpleNamespace(make=make, sampler=sampler, params=params)
        publisher.close()


def test_adapters_are_published_alone_once_all_engines_have_the_model(rank: Any) -> None:
    sync = rank.make(ADAPTERS)
    sync.sync(0)
    sync.sync(1)
    sync.sync(2)
    everything = {*MODEL, *ADAPTERS}
    assert rank.sampler.given == [
        (everything, 0, False),
        (set(ADAPTERS), 1, False),
        (set(ADAPTERS), 2, False),
    ]


def test_an_engine_that_was_restarted_gets_the_model_too(rank: Any) -> None:
    sync = rank.make(ADAPTERS)
    sync.sync(0)
    sync.sync(1)
    answers = iter([ResyncRequired((0,))])
    assert sync.call_with_resync(lambda sampler: next(answers)) == "resumed"
    sync.sync(2)
    rank.sampler.refusals = ["engine 0: has no slots"]
    sync.sync(3)
    everything = {*MODEL, *ADAPTERS}
    assert rank.sampler.given[2:] == [
        (everything, 1, True),
        (set(ADAPTERS), 2, False),
        (set(ADAPTERS), 3, False),
        (everything, 3, True),
    ]


def test_a_model_without_adapters_is_published_whole_each_time(rank: Any) -> None:
    sync = rank.make(None)
    sync.sync(0)
    sync.sync(1)
    assert [names for names, *_ in rank.sampler.given] == [{*MODEL, *ADAPTERS}] * 2


def test_a_version_that_is_refused_is_published_again_with_the_same_weights(rank: Any) -> None:
    rank.sampler.refusals = ["engine 1: a checksum differs"]
    sync = rank.make(None)
    sync.sync(4)
    assert [(version, again) for _, version, again in rank.sampler.given] == [(4, False), (4, True)]
    rank.params[NORM].add_(1)
    sync.sync(5)  # another version may have other weights
    rank.sampler.refusals = ["engine 1: no", "engine 1: still no"]
    with pytest.raises(UserError, match="weights were refused twice: engine 1: still no"):
        sync.sync(6)


def test_weights_that_change_within_a_version_end_the_run(rank: Any) -> None:
    rank.sampler.refusals = ["engine 1: a checksum differs"]
    rank.sampler.seen = lambda: rank.params[NORM].add_(1)
    with pytest.raises(UserError) as error:
        rank.make(None).sync(7)
    message = str(error.value)
    assert message.startswith(f"weights of version 7 changed after they were first published: {HF_NORM} (in ")
    assert "engine 1: a checksum differs" in message
    assert len(rank.sampler.given) == 1


@pytest.mark.parametrize("count", [5, 6])
def test_at_most_five_changed_tensors_are_listed(rank: Any, count: int) -> None:
    names = [name for name in rank.params if name.endswith(".lora.q_proj.A") or name.endswith("norm.weight")]
    rank.sampler.refusals = ["engine 1: a checksum differs"]
    rank.sampler.seen = lambda: [rank.params[name].add_(1) for name in names[:count]]
    assert len(names) >= count
    with pytest.raises(UserError) as error:
        rank.make(None).sync(7)
    listed = str(error.value).partition("published: ")[2].partition(". Other code")[0]
    assert listed.count(" (in ") == 5
    assert listed.endswith(" and more") == (count > 5)


@pytest.mark.parametrize("colocated", [False, True])
def test_only_the_first_sync_waits_for_engines(colocated: bool) -> None:
    """And colocated ones are there before the ranks."""
    phases: list[str] = []
    run: Any = object.__new__(RankRun)
    run.settings = SimpleNamespace(engine=SimpleNamespace(colocated=colocated, replicas=1))
    run.row, run._engines_up = None, colocated
    run.time = lambda phase: nullcontext()
    run.events = SimpleNamespace(phase=lambda name, done, total: phases.append(name))
    run.policy = SimpleNamespace(
        offloader=SimpleNamespace(offload=lambda: None), served=SimpleNamespace(refresh=lambda: None)
    )
    run.weight_sync = SimpleNamespace(check_stop=lambda: None, sync=lambda version, trial: [])
    for version in range(3):
        run.sync_engines(version)
    assert phases == ["sync" if colocated else "waiting for engines", "sync", "sync"]
