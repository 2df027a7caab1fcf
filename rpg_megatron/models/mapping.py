"""How a model's Megatron parameters map onto its Hugging Face tensors: what every family tells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import Piece
from rpg_megatron.models.partition import Shape


class ModelMapping(Protocol):
    """The table of one model: which HF tensors it has, and how one rank's parameters are cut from them.

    Parameter names are those of ``GPTModel.named_parameters()``, but layers are numbered through the whole
    model and not from the first of a pipeline stage: a name says which parameter it is, wherever it lies.
    """

    @property
    def shape(self) -> ModelShape:
        """The sizes that this table was made for."""
        ...

    def hf_tensors(self) -> dict[str, Shape]:
        """Name and full shape of every tensor of the HF checkpoint, layer by layer."""
        ...

    def stage_params(
        self, *, layers: Iterable[int], first: bool, last: bool, tensor: int, vocab_multiple: int
    ) -> dict[str, Shape]:
        """Names and local shapes of the parameters of some layers and, where said, of the model's ends.

        With Megatron's local layer spec.
        """
        ...

    def local_shape(self, param_name: str, *, tensor: int, vocab_multiple: int) -> Shape:
        """Shape of one parameter on one rank. MappingError if the name is unknown."""
        ...

    def pieces(self, param_name: str, *, tensor: int, tensor_rank: int, vocab_multiple: int) -> list[Piece]:
        """The parts of one local parameter and where they lie in HF tensors; padding rows have none.

        MappingError if the name is unknown.
        """
        ...
