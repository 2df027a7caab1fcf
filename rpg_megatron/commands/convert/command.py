"""Conversion of checkpoints between Hugging Face and Megatron: checks, the two directions, verification.

The result is written beside the target folder, and renamed when it is complete and, on request, verified.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rpg_megatron
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
from rpg_megatron.checkpoints.megatron_tensors import whole_parameters
from rpg_megatron.commands.convert.staging import Phases, StagingDir
from rpg_megatron.commands.convert.verify import Check
from rpg_megatron.config.cluster import RENDEZVOUS_VARIABLE
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import atomic_write_text, copy_file, folder_size, places_of
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.model_shape import ModelShape, read_model_shape
from rpg_megatron.launcher.supervisor import RunFailed, StopSignals
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.lora import AdapterMapping, with_adapters
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.rollout.seeds import chat_ends
from rpg_megatron.system.child import end_children, explain, start_child, user_error
from rpg_megatron.system.dtypes import ITEM_BYTES, SAFETENSORS

VERIFY = "rpg_megatron.commands.convert.verify"
_POLL_SECONDS = 0.1
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
class Report:
    """A finished conversion."""

    out: Path
    seconds: float
    peak: int
    """Peak memory of this process above what it had at the beginning, mapped files included, bytes."""
    size: int
    """Bytes of the weights."""
    verification: Verification | None

    def __str__(self) -> str:
        """The last lines of the command."""
        written = (
            f"{self.out}: written in {self.seconds:.1f} s; peak memory {self.peak / 1e6:,.1f} MB above that "
            f"at the start, for {self.size / 1e6:,.1f} MB of weights"
        )
        if (v := self.verification) is None:
            return written
        return (
            f"logits: max |difference| from transformers {v.difference:.2e} over {v.tokens} positions, "
            f"tolerance {v.tolerance:.1e} (float32, largest logit {v.largest:.3g})\n{written}"
        )


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert, whose headers and sizes were checked."""

    shape: ModelShape
    layout: ModelMapping
    """Of the weights in the result."""
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
        """One line: the model, and where the model's configuration is if that is another folder."""
        elsewhere = not self.config.absolute().is_relative_to(self.whole.absolute())
        read = "weights, config.json" if self.lora is not None else "config.json"
        return (
            f"{self.shape.family}, {self.shape.num_layers} layers, {self.parameters:,} parameters"
            f"{', ' + self.dtype if self.dtype else ''}"
            f"{f'; {read} and tokenizer of {self.config}' if elsewhere else ''}"
            f"{f'; adapters of rank {self.lora.rank}' if self.lora is not None else ''}"
            f"{f'; {self.note}' if self.note else ''}"
        )


# -- the two directions --------------------------------------------------------------------------------------


def open_hf(hf: Path) -> Source:
    """Check an HF checkpoint.

    Raises one UserError that lists all tensors that are missing, unexpected, or of a wrong shape or dtype.
    """
    if kind_of(hf, "--hf") != "hf":
        raise UserError(
            f"--hf: {hf} is a Megatron checkpoint; convert it with megatron-to-hf --megatron {hf}"
        )
    shape = _read_shape(hf, hf)
    layout = mapping_for(shape)
    stored = verify_hf_checkpoint(hf, layout, one_dtype=True)
    dtype = next(iter(stored.values())).dtype
    note = describe_computed(list_checkpoint(hf))
    return Source(shape, layout, SAFETENSORS[dtype], hf, hf, hf, hf, {}, note=note)


def open_megatron(
    megatron: Path, config: Path | None = None, *, adapter: bool = False, name: str = "--megatron"
) -> Source:
    """Find a Megatron checkpoint, and what is needed beside it.

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
    layout: ModelMapping = mapping_for(shape)
    if lora is not None:
        if adapter:
            layout = AdapterMapping(shape, lora)
        else:
            verify_hf_checkpoint(source, layout)
    elif adapter:
        raise UserError(f"--adapter: {megatron} is not a LoRA run or its checkpoint; leave out --adapter")
    return Source(shape, layout, metadata.dtype, source, root, folder, whole, files, lora, ends)


def convert_to_megatron(source: Source, out: Path, signals: StopSignals, *, verify: bool = False) -> Report:
    """Write ``out`` as a Megatron checkpoint, including the files needed to convert it back and to train.

    Raises UserError for user errors; RunFailed if, with ``verify``, logits differ or its process failed;
    Interrupted after a signal. In these cases, no files are left.
    """
    from rpg_megatron.commands.convert.convert import write_megatron  # torch

    with _conversion(source, out, signals) as (place, phases, finish):
        folder = place.result / RELEASE
        folder.mkdir(parents=True)
        phases.begin("converting", _bytes(source))
        write_megatron(source, folder, phases.count)
        (folder / HF).mkdir()
        for name, file in open_copied(source.config, source.root):
            copy_file(file, folder / HF, name)
        verification = _compare(source, folder, source.config, place, phases) if verify else None
        phases.begin("checksums", folder_size(folder))
        write_manifest(folder, CheckpointMetadata(version("megatron-core"), source.dtype, 1, 1), phases.count)
        atomic_write_text(place.result / LATEST, RELEASE)
        return finish(verification)


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
    from rpg_megatron.commands.convert.convert import write_hf  # torch

    with _conversion(source, out, signals) as (place, phases, finish):
        if source.files:
            phases.begin("checking", sum(f["bytes"] for f in source.files.values()))
            _refuse_damage(source.whole, source.files, phases.count)
        phases.begin("converting", _bytes(source))
        write_hf(source, place.result, phases.count, max_shard_bytes)
        verification = _compare(source, source.folder, place.result, place, phases) if verify else None
        return finish(verification)


@contextmanager
def _conversion(
    source: Source, out: Path, signals: StopSignals
) -> Iterator[tuple[StagingDir, Phases, Callable[[Verification | None], Report]]]:
    """The staging folder, the progress, and a function that moves the result to its place."""
    began, before = time.monotonic(), _memory("VmRSS")
    with suppress(OSError):  # begin the peak anew
        Path("/proc/self/clear_refs").write_text("5")
    signals.raising = False  # from here on, resources must be cleaned up

    def finish(verification: Verification | None) -> Report:
        peak = _memory("VmHWM") - before
        place.keep()
        return Report(out, time.monotonic() - began, peak, _bytes(source), verification)

    with StagingDir(out, _bytes(source)) as place, Phases(signals) as phases:
        try:
            yield place, phases, finish
        except OSError as e:
            raise UserError(f"{out}: cannot be written ({e.strerror or e}); nothing was written") from None


def mapping(source: Source) -> Iterator[str]:
    """The mapping, line by line: every parameter, and its slices of HF tensors."""
    layout = source.layout
    if not isinstance(layout, AdapterMapping):
        layout = with_adapters(layout, source.lora)
    yield "Megatron parameter [shape]; below it: HF tensor [its part] -> [part of the parameter]"
    for name, shape in whole_parameters(layout).items():
        yield f"{name} {list(shape)}"
        for p in layout.pieces(name, tensor=1, tensor_rank=0, vocab_multiple=1):
            yield f"  {p.hf_name} {_range(p.hf)} -> {_range(p.local)}"


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


def _memory(field: str) -> int:
    """Resident bytes of this process, mapped files included: now (VmRSS), or at most (VmHWM)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def _sequences(shape: ModelShape) -> list[list[int]]:
    """A few fixed random sequences that include the first and last token of the vocabulary."""
    generator = random.Random(0)
    lengths = [min(n, shape.max_positions) for n in (1, 2, 19, 77)]
    sequences = [[generator.randrange(shape.vocab_size) for _ in range(n)] for n in lengths]
    sequences[1][0], sequences[-1][-1] = 0, shape.vocab_size - 1
    return sequences


def _compare(source: Source, megatron: Path, hf: Path, place: StagingDir, phases: Phases) -> Verification:
    """Compare Megatron's logits with those of transformers, in a process of its own."""
    phases.begin("verifying")
    lora = None if source.lora is None else source.lora.model_dump(mode="json")
    folders = (str(folder.absolute()) for folder in (megatron, hf, source.config))
    check = Check(*folders, _sequences(source.shape), source.dtype or "float32", lora)
    environment = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        RENDEZVOUS_VARIABLE: str(place.work / "rendezvous"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1),
        "CUDA_VISIBLE_DEVICES": "",  # torch and Megatron would use a visible GPU
    }
    command = [sys.executable, "-P", "-m", VERIFY]
    root = str(Path(rpg_megatron.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    child = start_child("verification", command, environment, place.work / "verification.log", pipes=True)
    try:
        child.pipes[0].write(json.dumps(asdict(check)).encode() + b"\n")
        while child.exit_code() is None:
            time.sleep(_POLL_SECONDS)
            phases.count(0)
        if child.exit_code():
            if message := user_error(child):
                raise UserError(message)
            raise RunFailed(explain(child))
        values = json.loads(child.pipes[1].read().splitlines()[-1])
        result = Verification(**values, tokens=sum(map(len, check.sequences)))
    finally:
        end_children([child])
    require_equal(result)
    return result


def require_equal(result: Verification) -> None:
    """Raise RunFailed for logits that differ by more than rounding."""
    if not result.difference <= result.tolerance:
        raise RunFailed(
            f"logits differ by up to {result.difference:.2e} ({result.worst}), beyond the "
            f"tolerance of {result.tolerance:.1e} for float32 rounding: Megatron and transformers disagree; "
            "nothing was written"
        )
