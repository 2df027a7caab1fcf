"""A vLLM plug-in that makes an engine bind or apply adapters wrongly.

The fault is in the file ``fault`` of the bridge's folder, or in RPG_TEST_FAULT. With ``unchecked`` in its
name the slots are not checked.
"""

FAULTS = """
import os
from pathlib import Path

import rpg_megatron.bridge.vllm.plugin as plugin
from rpg_megatron.bridge.vllm import adapter_slots

load, check = plugin.load_adapters, plugin.check_slots

loads = []

def fault():
    file = Path(os.environ["RPG_BRIDGE_DIR"]) / "fault"
    kind = file.read_text() if file.exists() else os.environ.get("RPG_TEST_FAULT", "")
    return "" if "late" in kind and len(loads) < 3 else kind  # known ones, fresh ones, then the first update

def faulty(model, tensors, scale):
    loads.append(tensors)
    kind = fault()
    if "older" in kind:
        tensors = loads[-2]
    if "not loaded" in kind:
        return
    if "stale name" in kind:
        adapter_slots.ADAPTER_ID = 2
    if "alpha" in kind:
        scale = 1.0
    if "swapped" in kind:
        other = {"q_proj": "k_proj", "k_proj": "q_proj"}
        tensors = {
            name.replace(p, other[p]) if (p := name.split(".")[-3]) in other else name: values
            for name, values in tensors.items()
        }
    if "half" in kind:
        tensors = {name: values for i, (name, values) in enumerate(tensors.items()) if i // 2 % 2}
    if "head" in kind:  # as without B, or without alpha
        b = "base_model.model.lm_head.lora_B.weight"
        tensors = {**tensors, b: tensors[b] * (0 if "no B" in kind else 1 / scale)}
    load(model, tensors, scale)
    adapter_slots.ADAPTER_ID = 1

def checked(*arguments):
    if "unchecked" not in fault():
        check(*arguments)

def serve_the_base():
    from vllm.lora.model_manager import LoRAModelManager as Manager

    plain = Manager.set_adapter_mapping

    def without(self, mapping):
        if "base" in fault():
            zeros = [(0,) * len(part) for part in (mapping.index_mapping, mapping.prompt_mapping)]
            mapping = type(mapping)(*zeros, is_prefill=mapping.is_prefill)
        plain(self, mapping)

    Manager.set_adapter_mapping = without

def register():
    plugin.load_adapters, plugin.check_slots = faulty, checked
    serve_the_base()
"""
