"""Order of the work when modules are re-packed while the next one's slices are copied, and loaders that write
to tensors by themselves. Not covered: vLLM's own models (tests/integration/test_bridge_vllm.py).
"""

import time
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from rpg_megatron.bridge.transports.mapped_reader import ShardError
from rpg_megatron.bridge.vllm import weight_loader
from rpg_megatron.bridge.vllm.weight_loader import LayerPlan

CPU = torch.device("cpu")


@pytest.fixture
def plans(monkeypatch):
    """Three modules whose copies take longer than all else, and the events so far."""
    plans = [LayerPlan(torch.nn.Identity()) for _ in range(3)]
    number = {plan.layer: i for i, plan in enumerate(plans)}
    events = []

    def copy(together, reader):
        (plan,) = together  # none is loaded in place
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


class Packing(QuantizeMethodBase):
    """Keeps a packed copy of the weight, as vLLM's layers do on a CPU."""

    def create_weights(self, layer, *args, **kwargs): ...

    def apply(self, layer, *args, **kwargs): ...

    def process_weights_after_loading(self, layer):
        layer.packed = layer.weight.detach().clone()


class Model(torch.nn.Module):
    """A gate and experts that share a bias, a table that is no parameter, and a loader that copies directly.

    rows: of the experts' weight that it writes.
    """

    def __init__(self, transposed=False, rows=3):
        super().__init__()
        self.transposed, self.rows = transposed, rows
        self.gate, self.experts = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(2, 3, bias=False)
        self.gate.e_score_correction_bias = torch.nn.Parameter(torch.zeros(3))
        self.experts.e_score_correction_bias = self.gate.e_score_correction_bias
        self.experts.quant_method = Packing()
        self.table = torch.zeros(4)
        self.experts.quant_method.process_weights_after_loading(self.experts)
        record_metadata_for_reloading(self)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            if name == "table":
                self.table.copy_(weight)
            elif name != "experts.weight":
                parameters[name].data.copy_(weight)
            else:
                weight = weight.t().contiguous() if self.transposed else weight
                parameters[name].data[: self.rows].copy_(weight[: self.rows])

    def shapes(self):
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        return shapes | ({"experts.weight": (2, 3)} if self.transposed else {})


class Published:
    """A reader of these tensors."""

    def __init__(self, tensors):
        self.tensors, self.manifest = tensors, SimpleNamespace(tensors=tensors)

    def whole(self, name):
        return self.tensors[name].clone()

    def load(self, copies):
        for _, part, _, target in copies.parts(self.cut):
            target.copy_(part)

    def cut(self, name, box):
        yield self.tensors[name][box.slices()], box


def plan_of(model, shapes):
    return weight_loader.record_plan(model, CPU, tuple((n, "float32", s) for n, s in shapes.items()))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_table", [False, True])
def test_what_a_loader_copies_directly_arrives(transposed, with_table):
    model = Model(transposed)
    shapes = model.shapes() | ({"table": (4,)} if with_table else {})
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    plan = plan_of(model, shapes)
    assert bool(plan.reason) == (transposed or with_table)
    for _ in range(2):
        new = {name: torch.randn(shape) for name, shape in shapes.items()}
        config = SimpleNamespace(dtype=torch.float32)
        weight_loader.load_published(model, config, CPU, plan, Published(new))
        weight = new["experts.weight"].t() if transposed else new["experts.weight"]
        assert torch.equal(model.experts.packed, weight)
        assert torch.equal(model.experts.weight, weight)
        assert torch.equal(model.gate.weight, new["gate.weight"])
        assert torch.equal(model.gate.e_score_correction_bias, new["gate.e_score_correction_bias"])
        assert model.experts.e_score_correction_bias is model.gate.e_score_correction_bias
        assert torch.equal(model.table, new.get("table", torch.zeros(4)))
        assert {name: (p, p.data_ptr()) for name, p in model.named_parameters()} == before


def test_a_recording_leaves_the_model_as_it_is():
    """Also what no plan knows of: an update that fails after it must not have changed a served model."""
    model = Model()
    model.table.fill_(7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan_of(model, model.shapes() | {"table": (4,)})
    assert torch.equal(model.table, torch.full((4,), 7.0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("left_out", "rows", "says"),
    [
        ("gate.e_score_correction_bias", 3, r"gate\.e_score_correction_bias \(0 of 3 elements written\)"),
        ("experts.weight", 3, r"experts\.weight \(0 of 6 elements written\)"),
        (None, 2, r"experts\.weight \(4 of 6 elements written\)"),
    ],
)
def test_parameters_that_would_keep_old_values_are_named(transposed, left_out, rows, says):
    model = Model(transposed, rows)
    shapes = {name: shape for name, shape in model.shapes().items() if name != left_out}
    with pytest.raises(ShardError, match=f"the engine's Model would keep old values in .*{says}"):
        plan_of(model, shapes)
    assert not any(p.is_meta for p in model.parameters())
