"""Which rank holds which slice of a model, and which one sends it if several hold it. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rpg_megatron.models.boxes import Box, MappingError, Piece, check_cover
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates


@dataclass(frozen=True)
class RankShards:
    """A rank's coordinates and the names and shapes of its parameters, as exchanged between ranks."""

    coordinates: RankCoordinates
    params: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class SliceOwner:
    """One slice of an HF tensor and the rank that sends it."""

    rank: int
    param: str
    piece: Piece


def local_pieces(
    mapping: ModelMapping, coordinates: RankCoordinates, param: str, shape: Sequence[int]
) -> list[Piece]:
    """``mapping.pieces`` of one parameter, after a check of its shape.

    Raises MappingError that names the rank and the parameter.
    """
    expected = mapping.local_shape(param, coordinates)
    if tuple(shape) != expected:
        raise MappingError(
            f"rank {coordinates.rank}: {param} has shape {tuple(shape)}, {mapping.shape.family} at tensor "
            f"parallel size {coordinates.tensor} expects {expected}; model configuration and checkpoint "
            "disagree"
        )
    return mapping.pieces(param, coordinates)


def assign_owners(mapping: ModelMapping, everyone: Iterable[RankShards]) -> dict[str, list[SliceOwner]]:
    """HF tensor name -> the slices of the tensor, each with one owner; in the order of
    ``mapping.hf_tensors()``.

    If several ranks hold the same slice (norms under tensor parallelism, a tied output layer on the last
    stage, all but experts under expert parallelism, everything under data and context parallelism), the owner
    is the first one by stage, tensor rank, expert-parallel rank and expert tensor rank.
    The result is the same on every rank.
    Raises MappingError if a tensor is incomplete, or a parameter has an unexpected name or shape.
    """
    owners: dict[str, dict[Box, SliceOwner]] = {name: {} for name in mapping.hf_tensors()}
    first: dict[tuple[int, ...], RankShards] = {}
    for shards in sorted(everyone, key=lambda s: s.coordinates.rank):
        first.setdefault(shards.coordinates.shard, shards)
    for _, shards in sorted(first.items()):
        for param, shape in shards.params:
            for piece in local_pieces(mapping, shards.coordinates, param, shape):
                if piece.hf_name not in owners:
                    raise MappingError(
                        f"rank {shards.coordinates.rank}: {param} maps to {piece.hf_name}, which the model "
                        "does not have; are the layers numbered through the whole model?"
                    )
                owners[piece.hf_name].setdefault(piece.hf, SliceOwner(shards.coordinates.rank, param, piece))
    for name, shape in mapping.hf_tensors().items():
        check_cover(name, shape, owners[name])
    return {name: sorted(slices.values(), key=lambda s: s.piece.hf.start) for name, slices in owners.items()}
