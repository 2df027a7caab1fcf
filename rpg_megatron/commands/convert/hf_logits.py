"""Compares Megatron's logits with transformers': ``python -m rpg_megatron.commands.convert.hf_logits``.

A separate process, since it holds the whole model in float32. Standard input as in ``rank.py``: one line of
JSON with ``hf`` (folder), ``work`` and ``sequences``. Prints one JSON object: ``difference`` (largest
absolute difference), ``largest`` (largest absolute logit) and ``worst`` (position of that difference).
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file

from rpg_megatron.commands.convert.processes import LOGITS


@torch.no_grad()
def main() -> None:
    """Compare and print; exits with 0 whatever the outcome."""
    job = json.loads(sys.stdin.readline())
    warnings.filterwarnings("ignore")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job["hf"], dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()
    logits = load_file(Path(job["work"]) / LOGITS)
    difference, largest, worst = 0.0, 0.0, ""
    for number, tokens in enumerate(job["sequences"]):
        reference = model(torch.tensor([tokens])).logits[0]
        gap = (logits[str(number)] - reference).abs()
        gap = torch.where(gap.isnan(), torch.inf, gap)
        largest = max(largest, float(reference.abs().max()))
        if float(gap.max()) >= difference:
            position, token = divmod(int(gap.argmax()), gap.size(1))
            difference = float(gap.max())
            worst = f"sequence {number} of {len(tokens)} tokens, position {position}, logit of token {token}"
    print(json.dumps({"difference": difference, "largest": largest, "worst": worst}))


if __name__ == "__main__":
    main()
