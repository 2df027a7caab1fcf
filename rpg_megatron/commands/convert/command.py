"""Conversion of checkpoints between Hugging Face and Megatron: checks, processes, verification.

One process per rank (``rank.py``) does the work, connected by gloo; this process imports no torch. The result
is written beside the target folder, and renamed when it is complete and, on request, verified.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.checkpoint_path import (
    find_lora,
    find_model_files,
    find_settings,
    kind_of,
    open_step,
)
from rpg_megatron.checkpoints.hf_files import (
    describe_computed,
    list_checkpoint,
    list_copied,
    open_copied,
    verify_hf_checkpoint,
)
from rpg_megatron.checkpoints.megatron_folder import (
    HF,
    LATEST,
    RELEASE,
    CheckpointMetadata,
    find_checkpoint,
    find_damage,
    read_manifest,
    write_manifest,
)
from rpg_megatron.commands.convert.processes import ConvertProcesses, Job, StagingDir
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import atomic_write_text, copy_file, folder_size, places_of
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.model_shape import ModelShape, read_model_shape
from rpg_megatron.launcher.supervisor import RunFailed, StopSignals
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.lora import AdapterMapping, check_heads, with_adapters
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import ExpertShard
from rpg_megatron.models.registry import check_layout, mapping_for
from rpg_megatron.rollout.seeds import chat_ends
from rpg_megatron.system.dtypes import ITEM_BYTES, SAFETENSORS

RANK = "rpg_megatron.commands.convert.rank"
HF_LOGITS = "rpg_megatron.commands.convert.hf_logits"
TOLERANCE = 1e-5
"""Largest difference of logits, relative to the largest logit or to 1 if that is smaller.

Both sides compute in float32, in different orders of summation.
"""


@dataclass(frozen=True)
class Verification:
    """Comparison of Megatron's logits with those of transformers."""

    difference: float
    """Largest absolute difference."""
    largest: float
    """Largest absolute logit."""
    worst: str
    """Where the largest difference is."""
    tokens: int
    """Positions compared, each over the whole vocabulary."""

    @property
    def tolerance(self) -> float:
        """Largest difference due to rounding."""
        return TOLERANCE * max(1.0, self.largest)


@dataclass(frozen=True)
class Memory:
    """Memory of a rank's process, bytes."""

    shard: int
    """Its parameters."""
    peak: int
    """Peak above what it had before the model was built, mapped files included."""


@dataclass(frozen=True)
class Report:
    """A finished conversion."""

    out: Path
    seconds: float
    memory: list[Memory]
    verification: Verification | None


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert, whose headers and sizes were checked."""

    shape: ModelShape
    layout: ModelMapping
    """Of the result."""
    dtype: str
    """Dtype of the weights; empty if only Megatron's index has it."""
    config: Path
    """Folder with config.json and tokenizer and, for adapters, the weights that they are added to."""
    root: Path
    """The folder that the user has named for them: no link of theirs may leave it."""
    folder: Path
    """Folder of the weights."""
    whole: Path
    """Folder of the checkpoint, which the names in ``files`` are relative to."""
    files: dict[str, dict[str, Any]]
    """Files to compare with the manifest: name -> bytes, sha256. Empty without a manifest."""
    tensor: int
    pipeline: int
    lora: LoraSettings | None = None
    """Of a LoRA run's checkpoint, which has adapters and no other weights."""
    ends: list[int] = field(default_factory=list)
    """Of a run with chats: the tokens that end a response (``chat_ends``)."""
    note: str = ""
    """About tensors that are not converted."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(Box.whole(shape).numel for shape in self.layout.hf_tensors().values())

    def __str__(self) -> str:
        """One line: model and layout, and where the model's configuration is if that is another folder."""
        elsewhere = not self.config.absolute().is_relative_to(self.whole.absolute())
        read = "weights, config.json" if self.lora is not None else "config.json"
        return (
            f"{self.shape.family}, {self.shape.num_layers} layers, {self.parameters:,} parameters"
            f"{', ' + self.dtype if self.dtype else ''}; tensor={self.tensor} pipeline={self.pipeline}"
            f"{f'; {read} and tokenizer of {self.config}' if elsewhere else ''}"
            f"{f'; adapters of rank {self.lora.rank}' if self.lora is not None else ''}"
            f"{f'; {self.note}' if self.note else ''}"
        )


# -- the two directions --------------------------------------------------------------------------------------


def open_hf(hf: Path, tensor: int, pipeline: int) -> Source:
    """Check an HF checkpoint and the target layout.

    Raises one UserError that lists all tensors that are missing, unexpected, or of a wrong shape or dtype.
    """
    if kind_of(hf, "--hf") != "hf":
        raise UserError(
            f"--hf: {hf} is a Megatron checkpoint; convert it with megatron-to-hf --megatron {hf}"
        )
    shape = _read_shape(hf, hf)
    check_layout(shape, tensor, pipeline)
    layout = mapping_for(shape)
    stored = verify_hf_checkpoint(hf, layout, one_dtype=True)
    dtype = next(iter(stored.values())).dtype
    note = describe_computed(list_checkpoint(hf))
    return Source(shape, layout, SAFETENSORS[dtype], hf, hf, hf, hf, {}, tensor, pipeline, note=note)


def open_megatron(
    megatron: Path,
    tensor: int | None = None,
    pipeline: int | None = None,
    config: Path | None = None,
    *,
    adapter: bool = False,
    name: str = "--megatron",
) -> Source:
    """Find a Megatron checkpoint and check the layout for reading it, by default its own.

    megatron: its folder; a checkpoint of a run; or a run, for its newest one. config: HF folder with
    config.json and tokenizer, for a checkpoint written by Megatron-LM, or instead of that which a run's
    settings name. adapter: convert a LoRA run's adapters alone. name: option or argument, for messages.
    """
    kind = kind_of(megatron, name)
    if kind == "hf":
        raise UserError(
            f"{name}: {megatron} is a Hugging Face checkpoint already; there is nothing to convert"
        )
    metadata = CheckpointMetadata("", "", 1, 1)
    files: dict[str, dict[str, Any]] = {}
    lora: LoraSettings | None = None
    ends: list[int] = []
    if kind == "megatron":
        folder = whole = find_checkpoint(megatron)
        if (manifest := read_manifest(folder, *places_of(folder))) is not None:
            metadata, files = manifest
        if config is None and not files and not (folder / HF).is_dir():
            raise UserError(
                f"{folder}: has no {HF}/ with config.json and tokenizer, so it was not converted from an HF "
                "checkpoint by this tool; give an HF folder of the same model with --config (of rpg-megatron "
                "convert megatron-to-hf)"
            )
        source, root = config or folder / HF, config or megatron
    else:
        step = open_step(megatron, name)
        folder, whole, metadata = step.weights, step.folder, step.metadata
        files = {name: f for name, f in step.files.items() if name.startswith(f"{folder.name}/")}
        lora = find_lora(step)
        source, root = (config, config) if config else find_model_files(step, base=lora is not None)
        if (settings := find_settings(step)) is not None:
            ends = chat_ends(settings, source)
    try:
        shape = _read_shape(source, root)
    except UserError:
        if source.is_relative_to(whole):  # there may be further damage
            _refuse_damage(whole, files)
        raise
    tensor, pipeline = tensor or metadata.tensor, pipeline or metadata.pipeline
    check_layout(shape, tensor, pipeline)
    layout: ModelMapping = mapping_for(shape)
    if lora is not None:
        check_heads(shape, tensor, "--tensor")
        if adapter:
            layout = AdapterMapping(shape, lora)
        else:
            verify_hf_checkpoint(source, layout)
    elif adapter:
        raise UserError(f"--adapter: {megatron} is not a LoRA run or its checkpoint; leave out --adapter")
    dtype = metadata.dtype
    return Source(shape, layout, dtype, source, root, folder, whole, files, tensor, pipeline, lora, ends)


def convert_to_megatron(source: Source, out: Path, signals: StopSignals, *, verify: bool = False) -> Report:
    """Write ``out`` as a Megatron checkpoint, including the files needed to convert it back.

    Raises UserError for user errors; RunFailed if a process failed or, with ``verify``, logits differ;
    Interrupted after a signal. In these cases, no files are left.
    """
    began = time.monotonic()
    signals.raising = False  # from here on, resources must be cleaned up
    with StagingDir(out, _bytes(source)) as place, ConvertProcesses(place.work, signals) as processes:
        folder = place.result / RELEASE
        folder.mkdir(parents=True)
        job = _job(source, "hf_to_megatron", folder, place.work, verify=verify)
        memory = _run_ranks(job, processes)
        (folder / HF).mkdir()
        for name, file in open_copied(source.config, source.root):
            copy_file(file, folder / HF, name)
        verification = _compare(job, source.config, processes) if verify else None
        processes.phase("checksums", folder_size(folder))
        metadata = CheckpointMetadata(_megatron_version(), source.dtype, source.tensor, source.pipeline)
        write_manifest(folder, metadata, processes.count)
        atomic_write_text(place.result / LATEST, RELEASE)
        place.keep()
    return Report(out, time.monotonic() - began, memory, verification)


def convert_to_hf(
    source: Source,
    out: Path,
    signals: StopSignals,
    *,
    verify: bool = False,
    max_shard_bytes: int = 5 * 1024**3,
) -> Report:
    """Write ``out`` as an HF checkpoint, in files of at most ``max_shard_bytes``, or as an adapter for PEFT.

    Raises as ``convert_to_megatron`` does. Checks every file against the manifest first, if there is one.
    """
    began = time.monotonic()
    signals.raising = False  # from here on, resources must be cleaned up
    with StagingDir(out, _bytes(source)) as place, ConvertProcesses(place.work, signals) as processes:
        if source.files:
            processes.phase("checking", sum(f["bytes"] for f in source.files.values()))
            _refuse_damage(source.whole, source.files, processes.count)
        direction = "megatron_to_peft" if isinstance(source.layout, AdapterMapping) else "megatron_to_hf"
        job = _job(source, direction, place.result, place.work, verify=verify, bound=max_shard_bytes)
        memory = _run_ranks(job, processes)
        verification = _compare(job, place.result, processes) if verify else None
        place.keep()
    return Report(out, time.monotonic() - began, memory, verification)


def mapping(source: Source) -> Iterator[str]:
    """The mapping, line by line: every parameter of every rank, and its slices of HF tensors."""
    layout, first = source.layout, 0
    if not isinstance(layout, AdapterMapping):
        layout = with_adapters(layout, source.lora)
    yield "rank, Megatron parameter [local shape]; below it: HF tensor [its part] -> [part of the parameter]"
    for stage, count in enumerate(source.shape.stage_layers(source.pipeline)):
        for tensor_rank in range(source.tensor):
            experts = ExpertShard(tensor=source.tensor, tensor_rank=tensor_rank)  # as in ``Conversion``
            params = layout.stage_params(
                layers=range(first, first + count),
                first=stage == 0,
                last=stage == source.pipeline - 1,
                tensor=source.tensor,
                vocab_multiple=1,
                experts=experts,
            )
            yield (
                f"rank {stage * source.tensor + tensor_rank}: tensor {tensor_rank} of {source.tensor}, "
                f"stage {stage} of {source.pipeline}, layers {first}-{first + count - 1}"
            )
            for name, shape in params.items():
                yield f"  {name} {list(shape)}"
                pieces = layout.pieces(
                    name, tensor=source.tensor, tensor_rank=tensor_rank, vocab_multiple=1, experts=experts
                )
                yield from (f"    {p.hf_name} {_range(p.hf)} -> {_range(p.local)}" for p in pieces)
                padding = shape[0] - sum(p.local.extent[0] for p in pieces)
                if len(pieces) < 2 and padding:
                    yield f"    {padding} rows of padding, zero"
        first += count


# -- used by both --------------------------------------------------------------------------------------------


def _read_shape(folder: Path, root: Path) -> ModelShape:
    try:
        shape = read_model_shape(folder)
        list_copied(folder, root)  # raises for files that cannot be copied, before anything is converted
        return shape
    except UserError as e:
        raise UserError(str(e).removeprefix("model.path: ")) from None


def _refuse_damage(
    folder: Path, files: dict[str, dict[str, Any]], count: Callable[[int], None] = lambda n: None
) -> None:
    if damage := find_damage(folder, files, count, places_of(folder)):
        raise UserError(f"{folder}: the checkpoint is damaged; copy it again\n  " + "\n  ".join(damage))


def _range(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.end, strict=True)) + "]"


def _bytes(source: Source) -> int:
    return source.parameters * ITEM_BYTES[source.dtype or "float32"]


def _job(source: Source, direction: str, out: Path, work: Path, *, verify: bool, bound: int = 0) -> Job:
    return Job(
        direction=direction,
        source=str(source.folder.absolute()),
        config=str(source.config.absolute()),
        root=str(source.root.absolute()),
        out=str(out.absolute()),
        work=str(work.absolute()),
        tensor=source.tensor,
        pipeline=source.pipeline,
        dtype=source.dtype,
        max_shard_bytes=bound,
        sequences=_sequences(source.shape) if verify else [],
        ends=source.ends,
        lora=None if source.lora is None else source.lora.model_dump(mode="json"),
    )


def _sequences(shape: ModelShape) -> list[list[int]]:
    """A few fixed random sequences that include the first and last token of the vocabulary."""
    generator = random.Random(0)
    lengths = [min(n, shape.max_positions) for n in (1, 2, 19, 77)]
    sequences = [[generator.randrange(shape.vocab_size) for _ in range(n)] for n in lengths]
    sequences[1][0], sequences[-1][-1] = 0, shape.vocab_size - 1
    return sequences


def _run_ranks(job: Job, processes: ConvertProcesses) -> list[Memory]:
    world = job.tensor * job.pipeline
    processes.phase(f"starting {world} process{'es' if world > 1 else ''}")
    return [Memory(**report) for report in processes.run(RANK, "rank", asdict(job), world)]


def _compare(job: Job, hf: Path, processes: ConvertProcesses) -> Verification:
    """Compare the logits that the ranks saved with those of transformers for ``hf``."""
    processes.phase("verifying: transformers")
    request = {"hf": str(hf.absolute()), "work": job.work, "sequences": job.sequences}
    (report,) = processes.run(HF_LOGITS, "transformers", request, 1)
    result = Verification(**report, tokens=sum(map(len, job.sequences)))
    if not result.difference <= result.tolerance:
        raise RunFailed(
            f"logits differ by up to {result.difference:.2e} ({result.worst}), beyond the "
            f"tolerance of {result.tolerance:.1e} for float32 rounding: Megatron and transformers disagree; "
            "nothing was written"
        )
    return result


def _megatron_version() -> str:
    from importlib.metadata import version

    return version("megatron-core")
