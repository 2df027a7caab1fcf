"""On a rank: the policy of a case's settings, with the weights of its checkpoint, and micro-batches for it.

To be imported after ``rpg_megatron.policy.device``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.index import StoredPart
from rpg_megatron.checkpoints.megatron import plan_save
from rpg_megatron.checkpoints.peft import check_adapter
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.models.lora import AdapterMapping, split_parameters
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.policy.teacher import HeldTeacher
from rpg_megatron.system.collectives import barrier, gather_on_first


def save_weights(folder: Path, models: Sequence[torch.nn.Module]) -> None:
    """Write this rank's part of the weights in Megatron's format. Collective; ``folder`` is empty."""
    planned = plan_save(folder, models, stage=False)
    if everyone := gather_on_first(planned.write(), list[StoredPart]):
        planned.finish(everyone)
    barrier()


def checkpoint_policy(settings: Settings, mesh: Mesh, device: torch.device) -> Policy:
    path = settings.model.path

    def load(policy: Policy) -> None:
        model, adapters = split_parameters(dict(policy.loadable_parameters()))
        load_checkpoint(path, model.items(), settings, mesh)
        if settings.model.adapter is not None:
            load_peft(settings, adapters, mesh)

    return Policy(settings, read_model_shape(path), mesh, device, load)


def load_peft(settings: Settings, adapters: dict[str, torch.Tensor], mesh: Mesh) -> None:
    folder, lora = settings.model.adapter, settings.lora
    assert folder is not None
    assert lora is not None
    mapping = AdapterMapping(read_model_shape(settings.model.path), lora)
    load_hf_weights(
        folder,
        adapters.items(),
        mapping,
        mesh.coordinates(settings.model.vocab_multiple),
        stored=check_adapter(folder, mapping),
    )


def checkpoint_teacher(settings: Settings, mesh: Mesh, device: torch.device) -> HeldTeacher | None:
    """The teacher of the settings, if they have one with a path."""
    path = settings.teacher.path if settings.teacher is not None else None
    if path is None:
        return None

    def load(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        load_checkpoint(path, parameters, settings, mesh)

    return HeldTeacher(settings, read_model_shape(path), mesh, device, load)


def load_checkpoint(
    path: Path, parameters: Iterable[tuple[str, torch.Tensor]], settings: Settings, mesh: Mesh
) -> None:
    load_hf_weights(
        path,
        parameters,
        mapping_for(read_model_shape(path)),
        mesh.coordinates(settings.model.vocab_multiple),
    )


def cut_unevenly(trajectories: list, count: int, mesh: Mesh) -> list[list]:
    """This data rank's share of ``count`` uneven micro-batches; empty ones keep the ranks in step.

    As many as there are trajectories: one each.
    """
    if count == len(trajectories):
        bounds = list(range(count + 1))
    else:
        bounds = [round(len(trajectories) * (i / count) ** 1.7) for i in range(count + 1)]
    micro = [trajectories[a:b] for a, b in pairwise(bounds)]
    share = micro[mesh.data_rank :: mesh.data]
    return share + [[]] * (-(-count // mesh.data) - len(share))
