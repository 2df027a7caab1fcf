"""Writes a checkpoint of one format from one of the other, parameter by parameter, in this process.

No more of the model is in memory than one parameter and, where the result is of Hugging Face's format, the
file that is being written. Needs no Megatron: its format has no layout. Verification does, and has the whole
model in memory, by one implementation after the other.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rpg_megatron.checkpoints.hf_export import export_adapter, export_hf
from rpg_megatron.checkpoints.hf_import import read_all
from rpg_megatron.checkpoints.megatron_tensors import MegatronTensors, find_places, whole_parameters
from rpg_megatron.checkpoints.megatron_writer import MegatronWriter
from rpg_megatron.checkpoints.parameter_readers import merged_reader, parameter_reader
from rpg_megatron.commands.convert.staging import Source
from rpg_megatron.config import ModelShape, read_model_shape
from rpg_megatron.config.files import places_of, read_json
from rpg_megatron.launcher.stopping import RunFailed
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.system.dtypes import torch_dtype

Count = Callable[[int], None]
"""Called with the bytes of each parameter."""
TOLERANCE = 1e-5
"""Largest difference of logits in float32, relative to the largest logit or to 1 if that is smaller."""


def write_megatron(source: Source, folder: Path, count: Count) -> None:
    """Write the HF checkpoint in Megatron's format, into an empty folder. Raises UserError, OSError."""
    writer = MegatronWriter(folder)
    read = parameter_reader(source.folder, source.layout, torch_dtype(source.dtype))
    for name in whole_parameters(source.layout):
        parameter = read(name)
        # The two halves of a gated block's input layer are apart, as Megatron's ranks need them.
        writer.add(find_places(name, source.shape)[0], parameter, 2 if name.endswith("fc1.weight") else 1)
        count(parameter.nbytes)
    writer.finish()


def write_hf(source: Source, out: Path, count: Count, max_shard_bytes: int) -> None:
    """Write the Megatron checkpoint in Hugging Face's format or, of adapters alone, in PEFT's.

    Raises UserError, OSError.
    """
    layout = source.layout
    dtype, read = _read_source(source)
    parameters = _Parameters(layout, read, count)
    if isinstance(layout, AdapterMapping):
        export_adapter(out, parameters, layout, ONE_RANK, source.config, dtype=dtype)
        return
    export_hf(
        out,
        source.config,
        parameters,
        layout,
        ONE_RANK,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        root=source.root,
        ends=lambda: source.ends,
    )


class _Parameters(dict[str, Tensor]):
    """A whole model's parameters by Megatron's name; ``[name]`` reads one, and keeps the last one.

    ``items`` gives tensors without values, for their shapes.
    """

    def __init__(self, layout: ModelMapping, read: Callable[[str], Tensor], count: Count) -> None:
        super().__init__({n: torch.empty(s, device="meta") for n, s in whole_parameters(layout).items()})

        def counted(name: str) -> Tensor:
            parameter = read(name)
            count(parameter.nbytes)
            return parameter

        self._read = lru_cache(maxsize=1)(counted)

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)


def _read_source(source: Source) -> tuple[torch.dtype, Callable[[str], Tensor]]:
    """The dtype of the result, and what reads a parameter of it from the checkpoint."""
    layout, lora = source.layout, source.lora
    if source.folder == source.config:  # a Hugging Face checkpoint in FP8
        return (dtype := torch_dtype(source.dtype)), parameter_reader(source.folder, layout, dtype)
    if lora is None or isinstance(layout, AdapterMapping):
        stored = MegatronTensors(source.folder, layout)
        return torch_dtype(stored.dtype), stored.parameter
    adapters = MegatronTensors(source.folder, AdapterMapping(source.shape, lora))
    return torch_dtype(adapters.dtype), merged_reader(source.config, layout, adapters, lora)


def verify_logits(source: Source, megatron: Path, hf: Path) -> str:
    """Compare the logits of the two checkpoints of a conversion; returns the result as a line.

    Prepares this process for Megatron on a CPU. Raises RunFailed if they differ.
    """
    logging.disable(logging.WARNING)  # of libraries, also their progress bars
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sequences = choose_sequences(source.shape)
        return compare(hf, sequences, _megatron_logits(source, megatron, sequences))


def choose_sequences(shape: ModelShape) -> list[list[int]]:
    """A few fixed random sequences that include the first and last token of the vocabulary."""
    generator = random.Random(0)
    lengths = [min(n, shape.max_positions) for n in (1, 2, 19, 77)]
    sequences = [[generator.randrange(shape.vocab_size) for _ in range(n)] for n in lengths]
    sequences[1][0], sequences[-1][-1] = 0, shape.vocab_size - 1
    return sequences


def _megatron_logits(source: Source, checkpoint: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Logits after every token of every sequence, without vocabulary padding: [n, vocab] each, float32.

    In float32 whatever the checkpoint's dtype: bfloat16 rounds logits by 1% and more, which could hide a
    wrong frequency or norm. Megatron loads the checkpoint by its own reader.
    """
    from rpg_megatron.policy.device import start_device
    from rpg_megatron.system.collectives import host_backend

    start_device("cpu")
    dist.init_process_group(host_backend(1), store=dist.HashStore(), rank=0, world_size=1)
    # Megatron may be imported only after the device is prepared.
    from rpg_megatron.checkpoints.megatron import load_weights
    from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
    from rpg_megatron.policy import optimizer as _optimizer  # noqa: F401  it allows its classes in checkpoints
    from rpg_megatron.policy.microbatch import pack_lengths
    from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config

    shape, parallel = source.shape, ParallelSettings()
    config = transformer_config(shape, parallel, PrecisionSettings(dtype="float32"))
    config.perform_initialization = False
    (model,) = build_model(shape, config, ModelSettings(path=source.config), start_mesh(parallel))
    with torch.no_grad():
        if source.lora is None:
            load_weights(checkpoint, [model], shape.vocab_size)
        else:
            (dtype, read), layout = _read_source(source), source.layout
            for name, parameter in named_parameters([model]):
                whole = torch.cat([read(part) for part in layout.stored_parts(name)])
                kept = any(piece.hf_name in layout.float32 for piece in layout.pieces(name, ONE_RANK))
                parameter.copy_(whole if kept else whole.to(dtype))
        logits = []
        for sequence in sequences:
            tokens, positions = torch.tensor([sequence]), torch.arange(len(sequence))[None]
            packed = pack_lengths([len(sequence)], tokens.device)
            output = model.eval()(tokens, positions, None, packed_seq_params=packed)
            logits.append(output[0, :, : shape.vocab_size].clone())
    dist.destroy_process_group()
    return logits


def compare(hf: Path, sequences: list[list[int]], logits: list[Tensor]) -> str:
    """Compare Megatron's logits of the sequences with those of transformers. As ``verify_logits``."""
    import transformers

    # By its architecture: Kimi-K2's model_type is none of transformers', which renames tensors by it.
    kind = getattr(transformers, read_json(hf / "config.json", *places_of(hf))["architectures"][0])
    config = kind.config_class.from_pretrained(hf, local_files_only=True)
    config.model_type = kind.config_class.model_type
    vars(config).pop("quantization_config", None)  # it would not round to bfloat16, and needs whole blocks
    weights = read_all(hf) if read_model_shape(hf).fp8_files else None
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    model = kind.from_pretrained(None if weights else hf, config=config, state_dict=weights, **options).eval()
    difference, largest, worst = 0.0, 0.0, ""
    for number, (tokens, ours) in enumerate(zip(sequences, logits, strict=True)):
        with torch.no_grad():
            reference = model(torch.tensor([tokens])).logits[0]
        gap = torch.where((ours - reference).isnan(), torch.inf, (ours - reference).abs())
        largest = max(largest, float(reference.abs().max()))
        if float(gap.max()) >= difference:
            position, token = divmod(int(gap.argmax()), gap.size(1))
            difference = float(gap.max())
            worst = f"sequence {number} of {len(tokens)} tokens, position {position}, logit of token {token}"
    # Norms of linear attention amplify rounding, also in transformers, by ten and more.
    tolerance = TOLERANCE * max(1.0, largest) * (10 if read_model_shape(hf).linear else 1)
    if not difference <= tolerance:
        raise RunFailed(
            f"logits differ by up to {difference:.2e} ({worst}), beyond the tolerance of {tolerance:.1e} for "
            "float32 rounding: Megatron and transformers disagree; nothing was written"
        )
    return (
        f"logits: max |difference| from transformers {difference:.2e} over {sum(map(len, sequences))} "
        f"positions, tolerance {tolerance:.1e} (float32, largest logit {largest:.3g})\n"
    )
