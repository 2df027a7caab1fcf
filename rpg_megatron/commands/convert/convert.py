"""One rank of a conversion: reads its part of the model from one format and writes it in the other.

The model is built without gradients and optimizer, and without initial values, which Megatron would create on
every rank for the full tensors. So a rank needs memory for its shard and the data in transfer only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import save_file
from torch import Tensor

from rpg_megatron.checkpoints.hf_export import export_adapter, export_hf
from rpg_megatron.checkpoints.hf_files import verify_hf_checkpoint
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.megatron import load_weights, save_weights, stored_dtype
from rpg_megatron.checkpoints.megatron_folder import find_short_files, read_contents
from rpg_megatron.commands.convert.processes import LOGITS, Job
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import folder_size
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.model_shape import read_model_shape
from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
from rpg_megatron.models.lora import AdapterMapping, split_parameters
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy import optimizer as _optimizer  # noqa: F401  it allows its classes in checkpoints
from rpg_megatron.policy.lora import LoraModel, MergedWeights, head_parts
from rpg_megatron.policy.microbatch import pack_lengths
from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config
from rpg_megatron.system.collectives import barrier, run_together
from rpg_megatron.system.dtypes import SAFETENSORS, WEIGHT_DTYPES, torch_dtype

_REPORT_SECONDS = 0.5


class Conversion:
    """The conversion on one rank. Collective: all ranks construct it and call ``run``."""

    def __init__(self, job: Job, report: Callable[..., None]) -> None:
        self._job, self._report = job, report
        self._shape = read_model_shape(Path(job.config))
        self._layout = mapping_for(self._shape)
        self._lora = None if job.lora is None else LoraSettings(**job.lora)
        expert_tensor = job.tensor if self._shape.experts is not None else 1
        self._parallel = ParallelSettings(
            tensor=job.tensor,
            pipeline=job.pipeline,
            expert_tensor=expert_tensor,  # so that no rank holds complete experts
            sequence=expert_tensor > 1,  # required with experts
        )
        self._mesh = start_mesh(self._parallel)
        self._baseline = _memory("VmRSS")
        self._read = 0
        self._report_phase: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Convert, then save logits if the job asks for them."""
        job = self._job
        if self._mesh.rank == 0:
            threading.Thread(target=self._watch, daemon=True).start()
        if job.direction == "hf_to_megatron":
            checkpoint = Path(job.out)
            self._import(checkpoint)
        else:
            checkpoint = Path(job.source)
            self._export(checkpoint)
        if job.sequences:
            self._phase("verifying: Megatron")
            self._save_logits(checkpoint)

    def _import(self, out: Path) -> None:
        job = self._job
        model, _ = self._build(torch_dtype(job.dtype))
        parameters = list(named_parameters([model]))
        self._phase("reading", _bytes(parameters), lambda: self._read)
        load_hf_weights(
            Path(job.source),
            self._counted(parameters),
            self._layout,
            tensor=job.tensor,
            tensor_rank=self._mesh.tensor_rank,
            vocab_multiple=1,
            experts=self._mesh.experts,
        )
        self._begin_writing(torch_dtype(job.dtype))
        save_weights(out, [model])
        self._report_memory(parameters)

    def _export(self, checkpoint: Path) -> None:
        job, coordinates = self._job, self._mesh.coordinates(vocab_multiple=1)
        dtype = run_together(lambda: _check_files(checkpoint))
        model, adapters = self._build(self._merge_dtype(dtype))
        parameters = list(named_parameters([model]))
        before = _bytes_read()
        self._phase("reading", _bytes(parameters), lambda: _bytes_read() - before)
        self._load(checkpoint, model)
        weights, trained = split_parameters(dict(parameters))
        if job.direction == "megatron_to_peft":
            assert self._lora is not None
            layout = AdapterMapping(self._shape, self._lora)
            self._phase("writing")
            export_adapter(Path(job.out), trained, layout, coordinates, Path(job.config), dtype=dtype)
        else:
            self._begin_writing(dtype)
            export_hf(
                Path(job.out),
                Path(job.config),
                weights if adapters is None else MergedWeights(weights, adapters, dtype),
                self._layout,
                coordinates,
                dtype=dtype,
                max_shard_bytes=job.max_shard_bytes,
                root=Path(job.root),
                ends=lambda: job.ends,
            )
        self._report_memory(parameters)

    def _merge_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The model's, for a result in ``dtype``: sums with adapters, which have it too, are rounded once."""
        if self._lora is None or self._job.direction == "megatron_to_peft":
            return dtype
        stored = verify_hf_checkpoint(Path(self._job.config), self._layout)
        same = {torch_dtype(SAFETENSORS[t.dtype]) for t in stored.values()} == {dtype}
        return dtype if same else torch.float32

    def _load(self, checkpoint: Path, model: GPTModel) -> None:
        """Load the weights; with adapters, theirs, and the model's unless only adapters are written."""
        job = self._job
        if self._lora is not None and job.direction != "megatron_to_peft":
            load_hf_weights(
                Path(job.config),
                split_parameters(dict(named_parameters([model])))[0].items(),
                self._layout,
                tensor=job.tensor,
                tensor_rank=self._mesh.tensor_rank,
                vocab_multiple=1,
                experts=self._mesh.experts,
            )
        load_weights(checkpoint, [model], self._shape.vocab_size)

    def _save_logits(self, checkpoint: Path) -> None:
        """Save the logits of the checkpoint on disk, in float32 regardless of its dtype.

        bfloat16 rounds logits by 1% and more, which could hide a wrong frequency or norm.
        """
        model, adapters = self._build(torch.float32)
        self._load(checkpoint, model)
        if adapters is not None and (dtype := _check_files(checkpoint)) != torch.float32:
            _merge(model, adapters, dtype)
        logits = _raw_logits(model, self._job.sequences, self._shape.vocab_size)
        if self._mesh.reports:
            save_file({str(i): x for i, x in enumerate(logits)}, Path(self._job.work) / LOGITS)

    def _build(self, dtype: torch.dtype) -> tuple[GPTModel, LoraModel | None]:
        config = transformer_config(self._shape, self._parallel, PrecisionSettings(dtype="float32"))
        # Initial values are not needed. The dtype is set here, because training does not support float16.
        config.perform_initialization = False
        config.params_dtype = config.pipeline_dtype = dtype
        settings = ModelSettings(path=Path(self._job.config))
        (model,) = build_model(self._shape, config, settings, self._mesh)
        if self._lora is None:
            return model, None
        return model, LoraModel([model], self._shape, self._lora, seed=0)

    # -- reports -------------------------------------------------------------------------------------------

    def _phase(self, name: str, total: int = 0, done: Callable[[], int] = lambda: 0) -> None:
        """Begin a phase of ``total`` bytes, 0 if unknown; ``done`` returns those that are done.

        Rank 0 reports its own for all.
        """
        self._report_phase = lambda: self._report(phase=name, done=done(), total=total)
        if self._mesh.rank == 0:
            self._report_phase()

    def _watch(self) -> None:
        """Report the progress until the process ends. Run by a thread: most phases are one call."""
        while True:
            time.sleep(_REPORT_SECONDS)
            self._report_phase()

    def _begin_writing(self, dtype: torch.dtype) -> None:
        """The model has about the same size in either format."""
        total = dtype.itemsize * sum(torch.Size(s).numel() for s in self._layout.hf_tensors().values())
        folder = Path(self._job.out).parent
        barrier()  # no rank writes while rank 0 still reads
        self._phase("writing", total, lambda: folder_size(folder))

    def _counted(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and count the bytes of those that are filled."""
        for name, parameter in parameters:
            yield name, parameter
            self._read += parameter.nbytes

    def _report_memory(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._report(shard=_bytes(parameters), peak=_memory("VmHWM") - self._baseline)


@torch.no_grad()
def _merge(model: GPTModel, adapters: LoraModel, dtype: torch.dtype) -> None:
    """Replace the weights by their sums with the adapters, rounded to ``dtype`` as in an export."""
    weights, trained = split_parameters(dict(named_parameters([model])))
    merged = MergedWeights(weights, adapters, dtype)
    for name, weight in weights.items():
        weight.copy_(merged[name].to(dtype))
    for parameter in trained.values():
        parameter.zero_()


def _bytes(parameters: Iterable[tuple[str, Tensor]]) -> int:
    return sum(p.nbytes for _, p in parameters)


def _check_files(checkpoint: Path) -> torch.dtype:
    """Check the index and the length of the files; returns the dtype of the weights."""
    contents = read_contents(checkpoint)
    if short := find_short_files(checkpoint, contents):
        raise UserError(f"{checkpoint}: the checkpoint is damaged; copy it again\n  " + "\n  ".join(short))
    stored = stored_dtype(contents)
    if stored not in WEIGHT_DTYPES:
        raise UserError(f"{checkpoint}: weights are {stored}; known: {', '.join(WEIGHT_DTYPES)}")
    return torch_dtype(stored)


def _memory(field: str) -> int:
    """Resident bytes of this process, mapped files included: now (VmRSS), or at most (VmHWM)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def _bytes_read() -> int:
    """Bytes that this process has read, by the kernel's counter; 0 if it may not be read."""
    with suppress(OSError):
        return int(Path("/proc/self/io").read_text().split()[1])
    return 0


# -- logits, to compare two implementations of a model -------------------------------------------------------


@torch.no_grad()
def _raw_logits(model: GPTModel, sequences: Sequence[Sequence[int]], vocab: int) -> list[Tensor]:
    """Logits after every token of every sequence, without vocabulary padding: [n, vocab] each.

    Collective; the list is empty on ranks before the last stage. vocab: size of the vocabulary without
    padding. Holds all logits at once. Each sequence is one micro-batch.
    """
    config = model.config
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def step(iterator: Any, module: torch.nn.Module) -> tuple[Tensor, Callable[..., Tensor]]:
        sequence = list(next(iterator))
        length = len(sequence)
        sequence += [0] * (-length % multiple)  # padding at the end: no token attends to it
        tokens = torch.tensor([sequence], device=next(module.parameters()).device)
        output = module(
            tokens,
            torch.arange(tokens.size(1), device=tokens.device)[None],
            None,
            labels=tokens,
            packed_seq_params=pack_lengths([tokens.size(1)], tokens.device),
            output_processor=_logits_head,
            output_processor_context=vocab,
        )
        return output, lambda logits, non_loss_data: logits[:length]

    model.eval()
    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(sequences),
        model=[model],
        num_microbatches=len(sequences),
        seq_length=1,  # with the next, ignored: lengths vary
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return list(outputs)


def _logits_head(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: int,
    config: Any,
    **_: Any,
) -> Tensor:
    """Replaces the output layer of GPTModel.forward: the whole vocabulary, on every tensor rank."""
    weight = output_layer.weight if output_weight is None else output_weight
    added = head_parts(output_layer, hidden_states)
    if config.sequence_parallel:
        hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, group=output_layer.tp_group
        )
    local = torch.matmul(hidden_states.squeeze(1), weight.t())
    if added is not None:
        local += added[0] @ added[1].t()
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(local, group=output_layer.tp_group)
    logits: Tensor = whole[:, :context].clone()
    return logits
