"""Which settings reach Megatron's optimizer configuration, and which settings exclude each other.

Not covered: the optimizers themselves (tests/distributed), and that offloading saves memory on a GPU.
"""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rpg_megatron.config import Settings
from rpg_megatron.policy.optimizer import OffloadingAdam, optimizer_config


def make(**sections: Any) -> Settings:
    return Settings.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


def test_everything_is_on_the_device_by_default():
    settings = make()
    config = optimizer_config(settings.optimizer, settings.precision, settings.memory)
    assert not config.optimizer_cpu_offload
    assert not config.use_precision_aware_optimizer
    assert config.use_distributed_optimizer
    assert config.bf16


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_is_kept_in_host_memory(share: float):
    settings = make(memory={"offload_optimizer": share})
    config = optimizer_config(settings.optimizer, settings.precision, settings.memory)
    assert config.optimizer_cpu_offload
    assert config.optimizer_offload_fraction == share
    assert config.overlap_cpu_optimizer_d2h_h2d
    # Megatron's own launcher refuses offloading without it.
    assert config.use_precision_aware_optimizer
    dtypes = (
        config.main_params_dtype,
        config.main_grads_dtype,
        config.exp_avg_dtype,
        config.exp_avg_sq_dtype,
    )
    assert dtypes == (torch.float32,) * 4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"device": "cpu"}, "needs device cuda: on a CPU the optimizer is already in host memory"),
        ({"optimizer": {"distributed": False}}, "optimizer.distributed true"),
        ({"optimizer": {"type": "schedule_free_adamw", "distributed": False}}, "optimizer.type adamw"),
        ({"optimizer": {"type": "muon", "distributed": False}}, "optimizer.type adamw"),
        ({"precision": {"dtype": "float32"}}, "precision.dtype bfloat16"),
        ({"precision": {"fp8": {"parameters": True}}}, "precision.fp8.parameters"),
    ],
)
def test_off_loading_that_cannot_be_is_refused(sections: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        make(memory={"offload_optimizer": 0.5}, **sections)
    assert make(**sections).memory.offload_optimizer == 0


def test_the_gpus_half_is_adamw_with_a_step_count_per_parameter():
    torch.manual_seed(0)
    start, settings = torch.randn(5), {"lr": 0.1, "weight_decay": 0.1}
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    halves = OffloadingAdam([ours], **settings), torch.optim.AdamW([torchs], **settings)
    for number in range(3):
        for p, optimizer in zip((ours, torchs), halves, strict=True):
            p.grad = torch.full_like(p, number - 0.5)
            optimizer.param_groups[0]["step"] = 1  # what Megatron puts back
            optimizer.step()
    assert torch.equal(ours, torchs)
    assert halves[0].state[ours]["step"] == 3
    assert not isinstance(halves[0], torch.optim.AdamW)
