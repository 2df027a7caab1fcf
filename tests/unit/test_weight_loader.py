"""Order of the work when modules are re-packed while the next one's slices are copied."""

import time

import pytest
import torch

from rpg_megatron.bridge.vllm import weight_loader
from rpg_megatron.bridge.vllm.weight_loader import LayerPlan


@pytest.fixture
def plans(monkeypatch):
    """Three modules whose copies take longer than all else, and the events so far."""
    plans = [LayerPlan(torch.nn.Identity()) for _ in range(3)]
    number = {plan.layer: i for i, plan in enumerate(plans)}
    events = []

    def copy(plan, reader):
        time.sleep(0.05)
        if number[plan.layer] == reader:
            raise ValueError("damaged")
        events.append(("copied", number[plan.layer]))

    monkeypatch.setattr(weight_loader, "_copy_slices", copy)
    monkeypatch.setattr(weight_loader, "_begin_reload", lambda layer: events.append(("begun", number[layer])))
    monkeypatch.setattr(
        weight_loader, "_finish_reload", lambda layer: events.append(("repacked", number[layer]))
    )
    return plans, events


@pytest.mark.parametrize("overlap", [False, True])
def test_a_module_is_repacked_after_its_copies(plans, overlap):
    plans, events = plans
    weight_loader._load_slices(plans, None, overlap)
    assert len(events) == 9
    for i in range(3):
        order = [events.index((name, i)) for name in ("begun", "copied", "repacked")]
        assert order == sorted(order)


@pytest.mark.parametrize("damaged", range(3))
def test_a_failing_copy_is_told(plans, damaged):
    plans, events = plans
    with pytest.raises(ValueError, match="damaged"):
        weight_loader._load_slices(plans, damaged, overlap=True)
    assert ("repacked", damaged) not in events
