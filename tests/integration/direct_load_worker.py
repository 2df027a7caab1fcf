"""The engine of test_direct_loads: vLLM in this process, with the plug-in's plan and loading in its workers.

Arguments: the folder, which holds model; the number of workers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions for workers
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import torch
from vllm import LLM, SamplingParams

from rpg_megatron.bridge.transports.mapped_reader import Copies, ShardError
from rpg_megatron.bridge.vllm.weight_loader import load_published, record_plan
from rpg_megatron.models.boxes import Box
from tests.support.bridge_rig import PROMPT
from tests.support.bridge_trainers import state_dict


class Weights:
    """A reader of a seed's weights, but for those left out."""

    def __init__(self, folder: str, seed: int, left_out: str) -> None:
        self.tensors = {n: w for n, w in state_dict(Path(folder), seed).items() if n != left_out}
        self.manifest: Any = SimpleNamespace(tensors=self.tensors)

    def whole(self, name: str) -> torch.Tensor:
        return self.tensors[name].clone()

    def load(self, copies: Copies) -> None:
        for _, part, _, target in copies.parts(self.cut):
            target.copy_(part)

    def cut(self, name: str, box: Box) -> Iterator[tuple[torch.Tensor, Box]]:
        yield self.tensors[name][box.slices()], box


def load(worker: Any, folder: str, seed: int, left_out: str = "") -> str:
    """Load a seed's weights in a worker; returns why not by slices, or the refusal."""
    reader, device = Weights(folder, seed, left_out), torch.device("cpu")
    signature = tuple((n, "float32", tuple(w.shape)) for n, w in reader.tensors.items())
    try:
        plan = record_plan(worker.model_runner.model, device, signature)
    except ShardError as e:
        return str(e)
    load_published(worker.model_runner.model, worker.model_config, device, plan, reader)  # type: ignore[arg-type]
    return plan.reason


def main() -> None:
    folder = Path(sys.argv[1])
    model = str(folder / "model")
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        kv_cache_memory_bytes=2**26,
        tensor_parallel_size=int(sys.argv[2]),
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)

    def logprobs() -> list[float]:
        (answer,) = engine.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        return [x[t].logprob for t, x in zip(PROMPT[1:], answer.prompt_logprobs[1:], strict=True)]

    rows = [(engine.collective_rpc(load, args=(model, seed)), logprobs()) for seed in (1, 2)]
    left_out = "model.layers.1.self_attn.sinks"
    rows.append((engine.collective_rpc(load, args=(model, 3, left_out)), logprobs()))
    (folder / "result.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
