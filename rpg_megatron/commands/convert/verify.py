"""Compares Megatron's logits with transformers': ``python -m rpg_megatron.commands.convert.verify``.

A process of its own: it holds the whole model in float32, by one implementation after the other, and Megatron
loads the checkpoint by its own reader. Standard input: one line of JSON, a ``Check``. Prints one JSON object:
``difference`` (largest absolute difference), ``largest`` (largest absolute logit) and ``worst`` (position of
that difference). After a user error the exit code is 2, and ``error: ...`` the last line of standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.model_shape import read_model_shape


@dataclass(frozen=True)
class Check:
    """Two checkpoints of one model. Paths are absolute."""

    megatron: str
    """Megatron's folder."""
    hf: str
    """Hugging Face's folder of the same model."""
    config: str
    """Folder with config.json for Megatron and, for adapters, the weights that they are added to."""
    sequences: list[list[int]]
    """Token ids whose logits to compare."""
    dtype: str
    """Of the result, which sums with adapters are rounded to."""
    lora: dict[str, Any] | None = None
    """Settings of the adapters that the Megatron checkpoint has instead of whole weights."""


def main() -> None:
    """Compare and print."""
    check = Check(**json.loads(sys.stdin.readline()))
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from rpg_megatron.policy.device import start_device, start_process_group

    try:
        start_process_group(start_device("cpu"))
        print(json.dumps(compare(check, megatron_logits(check))), flush=True)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)
    # Without os._exit, a library's thread that is still running when the interpreter ends can abort the
    # process ("terminate called without an active exception"); this has happened once.
    os._exit(0)


def megatron_logits(check: Check) -> list[Any]:
    """Logits after every token of every sequence, without vocabulary padding: [n, vocab] each, float32.

    In float32 whatever the checkpoint's dtype: bfloat16 rounds logits by 1% and more, which could hide a
    wrong frequency or norm.
    """
    # Megatron may be imported only after the device is prepared.
    import torch

    from rpg_megatron.checkpoints.hf_import import load_hf_weights
    from rpg_megatron.checkpoints.megatron import load_weights
    from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
    from rpg_megatron.models.lora import split_parameters
    from rpg_megatron.models.registry import mapping_for
    from rpg_megatron.policy import optimizer as _optimizer  # noqa: F401  it allows its classes in checkpoints
    from rpg_megatron.policy.lora import LoraModel, MergedWeights
    from rpg_megatron.policy.microbatch import pack_lengths
    from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config
    from rpg_megatron.system.dtypes import torch_dtype

    shape, parallel = read_model_shape(Path(check.config)), ParallelSettings()
    config = transformer_config(shape, parallel, PrecisionSettings(dtype="float32"))
    config.perform_initialization = False
    settings = ModelSettings(path=Path(check.config))
    (model,) = build_model(shape, config, settings, start_mesh(parallel))
    if check.lora is None:
        load_weights(Path(check.megatron), [model], shape.vocab_size)
    else:
        adapters = LoraModel([model], shape, LoraSettings(**check.lora), seed=0)
        weights, trained = split_parameters(dict(named_parameters([model])))
        one_rank = {"tensor": 1, "tensor_rank": 0, "vocab_multiple": 1}
        load_hf_weights(Path(check.config), weights.items(), mapping_for(shape), **one_rank)
        load_weights(Path(check.megatron), [model], shape.vocab_size)
        merged = MergedWeights(weights, adapters, torch_dtype(check.dtype))
        with torch.no_grad():
            for name, weight in weights.items():  # as in an export
                weight.copy_(merged[name].to(torch_dtype(check.dtype)))
            for parameter in trained.values():
                parameter.zero_()
    logits = []
    with torch.no_grad():
        for sequence in check.sequences:
            tokens, packed = torch.tensor([sequence]), pack_lengths([len(sequence)], torch.device("cpu"))
            positions = torch.arange(len(sequence))[None]
            output = model.eval()(tokens, positions, None, packed_seq_params=packed)
            logits.append(output[0, :, : shape.vocab_size].clone())
    return logits


def compare(check: Check, logits: list[Any]) -> dict[str, Any]:
    """What ``main`` prints, for Megatron's logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        check.hf, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()
    difference, largest, worst = 0.0, 0.0, ""
    for number, (tokens, ours) in enumerate(zip(check.sequences, logits, strict=True)):
        with torch.no_grad():
            reference = model(torch.tensor([tokens])).logits[0]
        gap = (ours - reference).abs()
        gap = torch.where(gap.isnan(), torch.inf, gap)
        largest = max(largest, float(reference.abs().max()))
        if float(gap.max()) >= difference:
            position, token = divmod(int(gap.argmax()), gap.size(1))
            difference = float(gap.max())
            worst = f"sequence {number} of {len(tokens)} tokens, position {position}, logit of token {token}"
    return {"difference": difference, "largest": largest, "worst": worst}


if __name__ == "__main__":
    main()
