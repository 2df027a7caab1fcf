"""How each model family's Megatron parameters map onto its Hugging Face tensors: one small file per family.

Nothing here imports torch: the preflight asks these questions on a login node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from rpg_megatron.bridge.layouts.llama import llama_layout
from rpg_megatron.bridge.layouts.parts import Shape
from rpg_megatron.bridge.layouts.qwen2 import qwen2_layout
from rpg_megatron.bridge.layouts.qwen3 import qwen3_layout
from rpg_megatron.bridge.plan import Piece
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_shape import ModelShape

__all__ = ["Layout", "check_layout", "layout_for"]


class Layout(Protocol):
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
        """Shape of one parameter on one rank. LayoutError if the name is unknown."""
        ...

    def pieces(self, param_name: str, *, tensor: int, tensor_rank: int, vocab_multiple: int) -> list[Piece]:
        """The parts of one local parameter and where they lie in HF tensors; padding rows have none.

        LayoutError if the name is unknown.
        """
        ...


LAYOUTS: dict[str, Callable[[ModelShape], Layout]] = {
    "llama": llama_layout,
    "qwen2": qwen2_layout,
    "qwen3": qwen3_layout,
}
"""Family, as ``read_model_shape`` finds it -> its table."""


def layout_for(shape: ModelShape) -> Layout:
    """The table for a model. Raises UserError if its family has none."""
    if shape.family not in LAYOUTS:
        raise UserError(f"model family {shape.family!r} has no layout; known: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[shape.family](shape)


def check_layout(shape: ModelShape, tensor: int, pipeline: int, virtual: int = 1) -> None:
    """Raise one UserError that lists every size which the tensor or (virtual) pipeline size does not fit.

    Layers need not divide evenly over the stages: see ``ModelShape.stage_layers``.
    """
    problems: list[str] = []
    if min(tensor, pipeline, virtual) < 1:
        raise UserError(
            f"parallel sizes start at 1, got tensor={tensor}, pipeline={pipeline}, virtual={virtual}"
        )
    heads, groups = shape.num_heads, shape.num_kv_heads
    for count, what in ((heads, "attention heads"), (shape.ffn_hidden_size, "feed-forward columns")):
        if count % tensor:
            problems.append(f"tensor={tensor} does not divide the model's {count} {what}")
    if groups % tensor and tensor % groups:
        problems.append(
            f"tensor={tensor} neither divides the model's {groups} key/value heads nor is a multiple of them"
        )
    rows = (heads + 2 * groups) * shape.head_dim
    if rows % tensor:
        problems.append(f"tensor={tensor} does not divide the model's {rows} query, key and value rows")
    if heads % groups:
        problems.append(f"{heads} attention heads do not form {groups} equal groups")
    if shape.num_layers < pipeline * virtual:
        stages = f"pipeline={pipeline}" + (f" x virtual={virtual}" if virtual > 1 else "")
        problems.append(f"the model has {shape.num_layers} layers, fewer than {stages}: each stage needs one")
    if problems:
        most = math.gcd(heads, shape.ffn_hidden_size)
        fits = [
            n
            for n in range(1, most + 1)
            if most % n == rows % n == 0 and (groups % n == 0 or n % groups == 0)
        ]
        sizes = ", ".join(map(str, fits))
        raise UserError("; ".join(problems) + f" (tensor parallel sizes that fit this model: {sizes})")
