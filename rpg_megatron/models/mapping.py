"""Interface of a model family's mapping between Megatron parameters and Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import Piece
from rpg_megatron.models.partition import RankCoordinates, Shape


class ModelMapping(Protocol):
    """The HF tensors of one model, and how the parameters of each rank are sliced from them.

    Parameter names are those of ``GPTModel.named_parameters()``, but layers are numbered through the whole
    model, not from the first of a pipeline stage.
    """

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        ...

    @property
    def float32(self) -> frozenset[str]:
        """Names of HF tensors that are float32 in trainer, engines and exports of any dtype."""
        ...

    def stored_parts(self, param_name: str) -> list[str]:
        """The names under which Megatron's checkpoints have a parameter; ``pieces`` knows them as well."""
        ...

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        ...

    def hf_tensors(self) -> dict[str, Shape]:
        """Name and full shape of every tensor of the HF checkpoint, layer by layer."""
        ...

    def stage_params(
        self, at: RankCoordinates, *, layers: Iterable[int], first: bool, last: bool
    ) -> dict[str, Shape]:
        """Megatron name -> local shape of the parameters of some layers, in Megatron's local layer spec.

        at: the rank; which layers it has is said here alone. first, last: include the parameters of the first
        stage (embedding) or of the last (final norm, output layer).
        """
        ...

    def local_shape(self, param_name: str, at: RankCoordinates) -> Shape:
        """Shape of one parameter on one rank. Raises MappingError if the name is unknown."""
        ...

    def pieces(self, param_name: str, at: RankCoordinates) -> list[Piece]:
        """The pieces of one local parameter; padding rows of the vocabulary have none.

        Raises MappingError if the name is unknown.
        """
        ...
