"""What the plug-in does where vLLM's server must end, and where it cannot start."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.v1.engine.exceptions import EngineDeadError

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
