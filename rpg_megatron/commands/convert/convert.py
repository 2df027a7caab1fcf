"""One rank of a conversion: reads its part of the model from one format and writes it in the other.

The model is built without gradients and optimizer, and without initial values, which Megatron would create on
every rank for the full tensors. So a rank needs memory for its shard and the data in transfer only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from torch import Tensor

from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.megatron import load_weights, save_weights, stored_dtype
from rpg_megatron.checkpoints.megatron_folder import find_short_files, read_contents
from rpg_megatron.commands.convert.megatron_logits import raw_logits
from rpg_megatron.commands.convert.processes import LOGITS, Job
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_shape import read_model_shape
from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy import optimizer as _optimizer  # noqa: F401  it allows its classes in checkpoints
from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config
from rpg_megatron.system.collectives import barrier, run_together
from rpg_megatron.system.dtypes import WEIGHT_DTYPES, torch_dtype


class Conversion:
    """The conversion on one rank. Collective: all ranks construct it and call ``run``."""

    def __init__(self, job: Job, report: Callable[..., None]) -> None:
        self._job, self._report = job, report
        self._shape = read_model_shape(Path(job.config))
        self._layout = mapping_for(self._shape)
        expert_tensor = job.tensor if self._shape.experts is not None else 1
        self._parallel = ParallelSettings(
            tensor=job.tensor,
            pipeline=job.pipeline,
            expert_tensor=expert_tensor,  # so that no rank holds complete experts
            sequence=expert_tensor > 1,  # required with experts
        )
        self._mesh = start_mesh(self._parallel)
        self._baseline = memory()[0]

    def run(self) -> None:
        """Convert, then save logits if the job asks for them."""
        job = self._job
        if job.direction == "hf_to_megatron":
            checkpoint = Path(job.out)
            self._import(checkpoint)
        else:
            checkpoint = Path(job.source)
            self._export(checkpoint)
        if job.sequences:
            self._phase("verifying: Megatron", 0, "")
            self._save_logits(checkpoint)

    def _import(self, out: Path) -> None:
        job = self._job
        dtype = torch_dtype(job.dtype)
        model = self._build(dtype)
        parameters = list(named_parameters([model]))
        self._phase("reading", self._total_bytes(parameters), "reported")
        load_hf_weights(
            Path(job.source),
            self._counted(parameters),
            self._layout,
            tensor=job.tensor,
            tensor_rank=self._mesh.tensor_rank,
            vocab_multiple=1,
            experts=self._mesh.experts,
        )
        barrier()
        self._phase("writing", self._model_bytes(dtype), "files")
        save_weights(out, [model])
        self._report_memory(parameters)

    def _export(self, checkpoint: Path) -> None:
        job = self._job
        dtype = run_together(lambda: _check_files(checkpoint))
        model = self._build(dtype)
        parameters = list(named_parameters([model]))
        self._phase("reading", self._total_bytes(parameters), "read")
        load_weights(checkpoint, [model], self._shape.vocab_size)
        self._phase("writing", self._model_bytes(dtype), "files")
        export_hf(
            Path(job.out),
            Path(job.config),
            dict(parameters),
            self._layout,
            self._mesh.coordinates(vocab_multiple=1),
            dtype=dtype,
            max_shard_bytes=job.max_shard_bytes,
            root=Path(job.root),
        )
        self._report_memory(parameters)

    def _save_logits(self, checkpoint: Path) -> None:
        """Save the logits of the checkpoint on disk, in float32 regardless of its dtype.

        bfloat16 rounds logits by 1% and more, which could hide a wrong frequency or norm.
        """
        model = self._build(torch.float32)
        load_weights(checkpoint, [model], self._shape.vocab_size)
        logits = raw_logits(model, self._job.sequences, self._shape.vocab_size)
        if self._mesh.reports:
            save_file({str(i): x for i, x in enumerate(logits)}, Path(self._job.work) / LOGITS)

    def _build(self, dtype: torch.dtype) -> GPTModel:
        config = transformer_config(self._shape, self._parallel, PrecisionSettings(dtype="float32"))
        # Initial values are not needed. The dtype is set here, because training does not support float16.
        config.perform_initialization = False
        config.params_dtype = config.pipeline_dtype = dtype
        settings = ModelSettings(path=Path(self._job.config))
        (model,) = build_model(self._shape, config, settings, self._mesh)
        return model

    # -- reports -------------------------------------------------------------------------------------------

    def _phase(self, name: str, total: int, measure: str) -> None:
        """Report the next phase to the parent: name, bytes, and how the parent can measure them."""
        if self._mesh.rank == 0:
            self._report("phase", name, total, measure)

    def _counted(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and report their bytes to the parent."""
        for name, parameter in parameters:
            yield name, parameter
            self._report("bytes", parameter.nbytes)

    def _total_bytes(self, parameters: Iterable[tuple[str, Tensor]]) -> int:
        """Bytes of the parameters on all ranks."""
        total = torch.tensor(sum(p.nbytes for _, p in parameters))
        dist.all_reduce(total)
        return int(total)

    def _model_bytes(self, dtype: torch.dtype) -> int:
        """Approximate bytes of the model on disk, in either format."""
        return dtype.itemsize * sum(torch.Size(s).numel() for s in self._layout.hf_tensors().values())

    def _report_memory(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._report(
            "memory", self._mesh.rank, sum(p.nbytes for _, p in parameters), self._baseline, memory()[1]
        )


def _check_files(checkpoint: Path) -> torch.dtype:
    """Check the index and the length of the files; returns the dtype of the weights."""
    contents = read_contents(checkpoint)
    if short := find_short_files(checkpoint, contents):
        raise UserError(f"{checkpoint}: the checkpoint is damaged; copy it again\n  " + "\n  ".join(short))
    stored = stored_dtype(contents)
    if stored not in WEIGHT_DTYPES:
        raise UserError(f"{checkpoint}: weights are {stored}; known: {', '.join(WEIGHT_DTYPES)}")
    return torch_dtype(stored)


def memory() -> tuple[int, int]:
    """Resident bytes of this process, mapped files included: current and peak."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
