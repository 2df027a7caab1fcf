"""Ranks that publish weights for the tests of the bridge, two processes or one in the test's own; without
transformers and Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.config.model_config import read_model_shape
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from tests.support.megatron_shards import grid, stage_values
from tests.support.ranks import fork_server


def state_dict(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """The checkpoint's weights, all changed in a way that depends on the seed."""
    g = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)  # the other one again
    return {n: w + 0.05 * torch.randn(w.shape, generator=g) for n, w in weights.items()}


def alone_params(model: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights as a single trainer rank holds them."""
    layout = mapping_for(read_model_shape(model))
    shapes = layout.stage_params(ONE_RANK, layers=range(layout.shape.num_layers), first=True, last=True)
    params = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_hf_weights(model, params.items(), layout, ONE_RANK)
    return params


@contextmanager
def published(
    bridge: Path,
    model: Path,
    params: dict[str, torch.Tensor],
    version: int,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Manifest]:
    """Weights of the model as a single trainer rank publishes them to engines on its node."""
    layout = mapping_for(read_model_shape(model))
    publisher = SharedMemoryPublisher(bridge, ONE_RANK, params, layout, dtype)
    try:
        manifest = publisher.publish(version)
        assert manifest is not None
        yield manifest
    finally:
        publisher.close()


class PublishingRanks:
    """Processes that publish weights on command, from shards cut by other means than the layouts.

    Each runs ``target(rank, commands, answers, *arguments)``: it takes commands until None, and puts
    ``(rank, answer)`` after each.
    """

    def __init__(self, target: Callable[..., None], world: int, *arguments: Any, context: Any = None):
        context = context or fork_server()
        self.commands, self.answers = [context.Queue() for _ in range(world)], context.Queue()
        self.processes = [
            context.Process(target=target, args=(rank, commands, self.answers, *arguments))
            for rank, commands in enumerate(self.commands)
        ]
        for p in self.processes:
            p.start()

    def tell(self, command: Any) -> list[Any]:
        """All ranks' answers."""
        for q in self.commands:
            q.put(command)
        answers = dict(self.answers.get(timeout=120) for _ in self.commands)
        return [answers[rank] for rank in range(len(self.commands))]

    def publish(self, *command: Any) -> Manifest:
        return self.tell(command)[0]

    def stop(self) -> None:
        for q in self.commands:
            q.put(None)
        for p in self.processes:
            p.join(30)
            if p.is_alive():
                p.kill()


def _trainer_rank(rank, commands, answers, model, bridge, rendezvous):
    """One of two Megatron-like ranks: publishes shards of the state dict of a seed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    layout = mapping_for(read_model_shape(model))
    place = grid(layout.shape, 2, 1, vocab_multiple=8)[rank]
    params = stage_values(layout, place, 1, state_dict(model, 0))
    publishers = {
        "shared_memory": SharedMemoryPublisher(bridge, place, params, layout, torch.float32),
        "process_group": GroupPublisher(
            "127.0.0.1", place, params, layout, torch.float32, timeout=60, bucket_bytes=1 << 16
        ),
    }
    while (command := commands.get()) is not None:
        seed, version, transport = command
        for publisher in publishers.values():
            publisher.retract()
        for name, value in stage_values(layout, place, 1, state_dict(model, seed)).items():
            params[name].copy_(value)
        answers.put((rank, publishers[transport].publish(version)))
    for publisher in publishers.values():
        publisher.close()
    dist.destroy_process_group()


def start_trainers(model: Path, bridge: Path, rendezvous: Path) -> PublishingRanks:
    """Two processes, which ``publish(seed, version, transport)``."""
    return PublishingRanks(_trainer_rank, 2, model, bridge, rendezvous, context=mp.get_context("spawn"))
