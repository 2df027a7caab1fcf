"""A teacher held by the trainer ranks: a model of its own shape in the policy's layout, never trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.policy.host_memory import host_tensor
from rpg_megatron.policy.microbatch import MicroBatch, TeacherRow
from rpg_megatron.policy.model import Mesh, build_model, transformer_config
from rpg_megatron.policy.precision import uses_transformer_engine
from rpg_megatron.policy.scoring import ScoringModel, gather_hidden


class HeldTeacher:
    """This rank's part of the teacher. On a GPU its weights are in host memory, and copied in to score.

    Methods are collective.
    """

    def __init__(
        self,
        settings: Settings,
        shape: ModelShape,
        mesh: Mesh,
        device: torch.device,
        load: Callable[[Iterable[tuple[str, torch.nn.Parameter]]], None],
    ) -> None:
        """load: called with the parameters by Megatron's name, fills them."""
        precision = settings.precision.model_copy(update={"fp8": None})
        fused = uses_transformer_engine(settings.model_copy(update={"precision": precision}), device)
        config = transformer_config(shape, settings.parallel, precision, device=device, fused=fused)
        if device.type == "cuda":  # in host memory from the start; loading fills all of it
            config.use_cpu_initialization, config.perform_initialization = True, False
        share = bool(settings.training.share_prompts)
        built = build_model(shape, config, settings.model, mesh, share_prompts=share)
        chunks = [chunk.cpu().eval() for chunk in built]  # linear attention has small ones on the GPU
        for buffer in (buffer for chunk in chunks for buffer in chunk.buffers()):
            buffer.data = buffer.to(device)
        self.model = ScoringModel(settings, mesh, device, chunks, shape.vocab_size)
        for chunk in chunks:
            chunk.requires_grad_(False)
        load(self.model.named_parameters())
        self._held: list[tuple[torch.nn.Parameter, Tensor]] = []
        if device.type == "cuda":
            for _, p in self.model.named_parameters():
                held = host_tensor(p.shape, p.dtype, pinned=True)
                held.copy_(p)
                self._held.append((p, held))
                p.data = held

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the weights are on the device."""
        for p, held in self._held:
            p.data = held.to(self.model.device, non_blocking=True)
        try:
            yield
        finally:
            for p, held in self._held:
                p.data = held

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """As ``ScoringModel.logprobs``, of micro-batches that were packed for the policy."""
        with self.swapped_in():
            return self.model.logprobs([micro.for_other_model() for micro in micro_batches])

    def with_rows(
        self, micro_batches: Sequence[MicroBatch], direction: Literal["rkl", "fkl"]
    ) -> list[MicroBatch]:
        """The micro-batches with what an update's divergence to the teacher needs, on the last stage."""

        def step(iterator: object, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Tensor]]:
            micro: MicroBatch = next(iterator)  # type: ignore[call-overload]
            # In host memory, where the rows of a whole step fit; for a GPU torch pins it.
            return self.model.forward(
                micro, model, _hidden_head
            ), lambda output, non_loss_data: output.detach().to("cpu", non_blocking=True)

        with self.swapped_in(), torch.no_grad():
            others = [micro.for_other_model() for micro in micro_batches]
            hidden = self.model.run(step, others, forward_only=True)
            if not self.model.mesh.last_stage:
                # Other stages need not know it, but their micro-batches must look alike.
                return list(micro_batches)
            last: Any = self.model.chunks[-1]
            shared = last.share_embeddings_and_output_weights
            weight = last.shared_embedding_or_output_weight() if shared else last.output_layer.weight
            rows = [TeacherRow(row, weight.data, direction) for row in hidden[: len(micro_batches)]]
        return [replace(micro, teacher=row) for micro, row in zip(micro_batches, rows, strict=True)]


def _hidden_head(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, config: Any, **_: Any
) -> Tensor:
    return gather_hidden(hidden_states, output_layer, output_weight, config)[0]
