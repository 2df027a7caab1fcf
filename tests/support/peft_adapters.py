"""Adapters that PEFT itself has made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rpg_megatron.config.lora import LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def save_random_adapter(
    model: PreTrainedModel, lora: LoraSettings, folder: Path, tokens: torch.Tensor
) -> torch.Tensor:
    """Add a random adapter to a model, float32, and save it; returns the logits with it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model.float(), config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    adapted.save_pretrained(folder)
    logits: torch.Tensor = adapted(tokens).logits
    return logits
