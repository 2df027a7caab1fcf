"""What the plug-in does where vLLM's server must end, cannot start, or gets the weights of another run."""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.v1.engine.exceptions import EngineDeadError

from rpg_megatron.bridge.transports.mapped_reader import ShardError
from rpg_megatron.bridge.vllm import plugin, sync_route
from rpg_megatron.bridge.vllm.generate_route import RequestGate
from rpg_megatron.config.cluster import BRIDGE_VARIABLE


class Engine:
    """An engine client whose calls fail."""

    def __init__(self, error):
        self.error = error

    async def pause_generation(self, mode):
        raise self.error


def call(error):
    app = FastAPI()
    app.state.engine_client = Engine(error)
    sync_route.add_route(app, RequestGate())
    return TestClient(app).post(sync_route.SYNC, json={"steps": ["pause"], "update_info": {}})


def test_a_dead_core_ends_the_server():
    """VLLM ends its server when this error leaves a route; a status would leave a server without a core."""
    with pytest.raises(EngineDeadError):
        call(EngineDeadError())


def test_another_error_is_a_status_that_names_the_step():
    answer = call(ValueError("no"))
    assert answer.status_code == 500
    assert answer.text == "pause: ValueError: no"


def test_an_engine_without_its_folder_says_which_variable(monkeypatch):
    monkeypatch.delenv(BRIDGE_VARIABLE, raising=False)
    monkeypatch.setattr(plugin.WeightTransferEngine, "__init__", lambda self: None)
    with pytest.raises(RuntimeError, match=f"{BRIDGE_VARIABLE} is not set"):
        plugin.PullEngine()


@pytest.mark.parametrize(
    ("published", "lora", "message"),
    [
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", None, "without --enable-lora"),
        ("model.norm.weight", SimpleNamespace(), "no adapters are published"),
    ],
    ids=["adapters", "slots"],
)
def test_a_worker_refuses_adapters_without_slots_and_slots_without_adapters(published, lora, message):
    """Slots that nothing fills would be served as they are: the policy without its adapter."""
    engine = object.__new__(plugin.PullEngine)
    engine.vllm_config = SimpleNamespace(lora_config=lora)
    manifest = SimpleNamespace(tensors={published: SimpleNamespace(dtype="bfloat16", shape=(4, 8))})
    with pytest.raises(ShardError, match=message):
        engine._current_plan(manifest)
