"""HF checkpoints convert to Megatron and back bit by bit, through the command lines and the files.

Why: a converter is trusted with a model that took weeks; it must not change it, write half of it, accept
damaged weights, or need memory for all of it. Random models of awkward sizes: an odd vocabulary, query
groups, tied embeddings. ``make test`` has one case per family (Qwen2's is the fixture ``pair``, which comes
back in ``test_a_checkpoint_of_megatron_lm_needs_a_config``). The contents of a Megatron checkpoint are also
compared with shards that were made without the box table, and ``--verify`` loads it by Megatron's own reader;
tests/distributed/test_converted_checkpoints.py does that in several layouts. An exported mixture of experts
is served by vLLM without our plug-in. Not covered: Megatron-LM's own training loop, Transformer Engine's
layers, and optimizer state.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as torch_checkpoint

from rpg_megatron.commands.convert import command
from rpg_megatron.commands.convert.convert import choose_sequences, compare
from rpg_megatron.commands.convert.staging import Staging
from rpg_megatron.config import read_model_shape
from rpg_megatron.launcher.stopping import Interrupted, RunFailed, StopSignals
from rpg_megatron.models.partition import ONE_RANK
from tests.support.conversion import difference, fail, run, succeed, tensors
from tests.support.forking import fresh_starts
from tests.support.megatron_shards import megatron_value
from tests.support.run_checkpoints import write_step
from tests.support.tiny_models import AWKWARD, LLAMA3_ROPE, MOONLIGHT, make_model, pack_experts

pytestmark = pytest.mark.usefixtures("forked_starts")

ROOT = Path(__file__).parents[2]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 8, "mlp_only_layers": [1]}),
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {"sliding_window": 40}),
    "olmo3": ("olmo3", {}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "qwen3.5": ("qwen3_5", {"head_dim": 8}),
    "qwen3.5-moe": ("qwen3_5_moe", {"head_dim": 8}),
    "qwen3.5-moe-packed": ("qwen3_5_moe", {"head_dim": 8}),
    "qwen3-next": ("qwen3_next", {"head_dim": 8, "mlp_only_layers": [1]}),
    "qwen2-moe": ("qwen2_moe", {}),
    "olmoe": ("olmoe", {}),
    "glm4-moe": ("glm4_moe", {"head_dim": 8, "num_nextn_predict_layers": 1}),
    "deepseek-v3": ("deepseek_v3", {"num_key_value_heads": 6, "num_nextn_predict_layers": 1}),
    "moonlight": ("deepseek_v3", {"num_key_value_heads": 6, **MOONLIGHT}),
    "glm4-moe-lite": ("glm4_moe_lite", {"num_key_value_heads": 6}),
    "kimi-k2": ("deepseek_v3", {"num_key_value_heads": 6}),
}


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """A random model of awkward sizes in several files, with stand-ins for a tokenizer and its template."""
    name, family_changes = FAMILIES[family]
    make_model(folder, name, max_shard_size="200KB", **AWKWARD | family_changes | changes)
    if family.endswith("packed"):
        pack_experts(folder)
    if changes.get("num_nextn_predict_layers") or family_changes.get("num_nextn_predict_layers"):
        add_next_layer(folder)
    if family == "kimi-k2":  # code of its own, which is not run
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
        config["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("a b\n")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def add_next_layer(folder: Path) -> None:
    """Tensors of a layer that predicts the token after the next one, which transformers does not save."""
    file = sorted(folder.glob("*.safetensors"))[-1]
    last = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    more = {f"model.layers.{last}.{name}.weight": torch.randn(3, 5) for name in ("eh_proj", "mlp.gate")}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"] |= dict.fromkeys(more, file.name)
    index.write_text(json.dumps(described))


def check_same(source: Path, back: Path) -> None:
    """Every tensor bit by bit, and all other files of the checkpoint."""
    expected, actual = tensors(source), tensors(back)
    assert set(expected) == set(actual)
    for name, t in expected.items():
        assert actual[name].dtype == t.dtype, name
        bits = torch.int16 if t.itemsize == 2 else torch.int32
        assert torch.equal(actual[name].view(bits), t.view(bits)), f"{name} is not what it was"
    for name in ("config.json", "generation_config.json"):
        assert json.loads((back / name).read_text()) == json.loads((source / name).read_text())
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert list(back.parent.glob(".*")) == []


def there_and_back(folder: Path, source: Path, verify: str = "") -> None:
    """Convert and convert back. verify: the tool that verifies."""
    there = ("--hf", source, "--out", folder / "there")
    back = ("--megatron", folder / "there", "--out", folder / "back")
    config = (source / "config.json").read_text()
    for tool, arguments in (("hf_to_megatron", there), ("megatron_to_hf", back)):
        verified = verify in (tool, "both")
        output = succeed(tool, *arguments, *(["--verify"] if verified else []))
        if verified:
            assert difference(output) <= (3e-5 if "linear_attention" in config else 1e-5)
    check_same(source, folder / "back")


@pytest.mark.parametrize(
    ("family", "dtype", "changes", "verify"),
    [
        ("qwen3", torch.bfloat16, {"tie_word_embeddings": True}, "hf_to_megatron"),
        ("phi3", torch.bfloat16, {}, ""),
        ("qwen3.5-moe-packed", torch.bfloat16, {}, "megatron_to_hf"),
        ("deepseek-v3", torch.bfloat16, {}, "megatron_to_hf"),
        # Each verification is a start of Megatron; what these add is in ``test_every_dtype`` too.
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("llama", torch.float32, {}, "megatron_to_hf"),
                ("qwen3-moe", torch.float32, {}, ""),
                ("olmo3", torch.float32, {}, "megatron_to_hf"),
                ("granite", torch.float32, {}, "hf_to_megatron"),
                ("qwen3.5", torch.bfloat16, {}, "hf_to_megatron"),
                ("qwen3-next", torch.float32, {}, "hf_to_megatron"),
                ("glm4-moe", torch.bfloat16, {}, "megatron_to_hf"),
                ("qwen2-tied", torch.float32, {}, "hf_to_megatron"),
                ("qwen3-moe", torch.bfloat16, {}, "both"),
                ("mistral", torch.float32, {}, "both"),
                ("phi3", torch.float32, {}, "both"),
                ("qwen3.5", torch.float32, {}, "both"),
                ("qwen3.5-moe", torch.float32, {}, "both"),
                ("qwen2-moe", torch.float32, {}, "both"),
                ("olmoe", torch.float32, {}, "both"),
                ("moonlight", torch.float32, {}, "both"),
                ("glm4-moe-lite", torch.bfloat16, {}, "both"),
                ("kimi-k2", torch.float32, {}, "hf_to_megatron"),
            )
        ),
    ],
    ids=str,
)
def test_there_and_back_is_bit_exact(
    tmp_path: Path, family: str, dtype: torch.dtype, changes: dict[str, Any], verify: str
) -> None:
    there_and_back(tmp_path, write_model(tmp_path / "hf", family, dtype=str(dtype)[6:], **changes), verify)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_dtype(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    there_and_back(tmp_path, write_model(tmp_path / "hf", family, dtype=str(dtype)[6:]), "both")


def test_memory_is_bounded_by_a_parameter_and_a_file(tmp_path: Path) -> None:
    """Both directions: peaks above what a process has after the conversion of a tiny model."""
    sizes = {"num_hidden_layers": 14, "hidden_size": 512, "intermediate_size": 1408, "vocab_size": 2000}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    write_model(tmp_path / "small", "qwen3")
    write_model(tmp_path / "large", "qwen3", **sizes)
    weights = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    with fresh_starts():
        command = [sys.executable, "-c", MEASURED, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    parameter, file = 2 * 1408 * 512 * 4, 5e6
    bound = 2 * parameter + 2 * file + 15e6  # what malloc and torch keep differs by 10 MB from run to run
    assert weights > 4 * bound, "this model would not show it"
    for direction, line in zip(("to Megatron", "to HF"), done.stdout.split()[-2:], strict=True):
        print(f"{direction}: {int(line) / 1e3:.0f} MB for {weights / 1e6:.0f} MB")
        assert int(line) * 1024 < bound, "safetensors copies a file"


MEASURED = """
import sys
from pathlib import Path
from rpg_megatron.commands.convert import command
from rpg_megatron.launcher.stopping import StopSignals

def measure(work):
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0])

def convert(name, size):
    hf, out, back = (folder / f"{name}{end}" for end in ("", "-there", "-back"))
    yield measure(lambda: command.convert_to_megatron(command.open_hf(hf), out, StopSignals()))
    source = command.open_megatron(out)
    yield measure(lambda: command.convert_to_hf(source, back, StopSignals(), max_shard_bytes=size))

folder = Path(sys.argv[1])
list(convert("small", 5 * 10**6))
print(*convert("large", 5 * 10**6))
"""


ROTARY = """
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
"""
STOCK_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, prompts = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        model, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
        kv_cache_memory_bytes=2**26,
    )
    outs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
    )
    found = [
        [entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], ids[1:], strict=True)]
        for o, ids in zip(outs, prompts, strict=True)
    ]
    print("FOUND", json.dumps(found))
"""


@pytest.mark.long  # an engine's start; exports are bit-identical to what transformers wrote, as tested above
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3-moe", "qwen2-moe", "olmoe", "glm4-moe", "mistral", "phi3", "olmo3", "granite"),
        *("deepseek-v3", "moonlight", "glm4-moe-lite"),
    ],
)
def test_a_stock_vllm_serves_an_export(tmp_path: Path, family: str) -> None:
    """Without our plug-in: log-probs as transformers computes them from the model before the conversion.

    On a CPU latent attention needs two changes of vLLM, which are made here.
    """
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    sizes |= {"vocab_size": 128}
    if family in ("qwen3-moe", "glm4-moe"):
        sizes |= {"head_dim": 32}
    if family.endswith("moe"):
        sizes |= {"moe_intermediate_size": 32}
    latent = family in ("deepseek-v3", "moonlight", "glm4-moe-lite")
    if latent:
        sizes |= {"moe_intermediate_size": 32, "num_key_value_heads": 4}
    source = write_model(tmp_path / "hf", family, **sizes)
    there_and_back(tmp_path, source)

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 128, (n,), generator=generator).tolist() for n in (40, 17, 5)]
    (tmp_path / "serve.py").write_text(ROTARY * latent + STOCK_VLLM)
    # No plug-in; what a CPU with two cores needs is as in engine/command.py.
    environment = os.environ | {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    environment |= {
        "VLLM_MLA_DISABLE": str(int(latent)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not latent)),
    }
    command = [sys.executable, str(tmp_path / "serve.py"), str(tmp_path / "back"), json.dumps(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for ids, logprobs in zip(prompts, json.loads(lines[0].removeprefix("FOUND ")), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        gap = (torch.tensor(logprobs, dtype=torch.float64) - expected).abs().max().item()
        print(f"vLLM against transformers: {gap:.1e}")
        assert gap <= 1e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An HF checkpoint in several files, and the same of Megatron, by the command. Do not change them."""
    folder = tmp_path_factory.mktemp("pair")
    source = write_model(folder / "hf", "qwen2")
    command = [sys.executable, "-m", "rpg_megatron.cli", "convert", "hf-to-megatron", "--verify"]
    command += ["--hf", str(source), "--out", str(folder / "megatron")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert difference(done.stdout) <= 1e-5
    return source, folder / "megatron"


def test_the_checkpoint_holds_megatrons_tensors(pair: tuple[Path, Path]) -> None:
    """Read by torch alone, under the keys that Megatron-LM forms with Transformer Engine's layers."""
    source, megatron = pair
    shape, weights = read_model_shape(source), tensors(source)
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    reader = torch_checkpoint.FileSystemReader(megatron / "release")
    metadata = reader.read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size) for n, m in metadata.items() if hasattr(m, "size")}
    torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    for key, value in state.items():
        name = next((key.replace(a, b) for a, b in names.items() if a in key), key)
        expected = megatron_value(name, weights, shape, ONE_RANK)
        assert torch.equal(value, expected), key
    assert len(state) == 3 + 7 * shape.num_layers


def test_a_checkpoint_of_megatron_lm_needs_a_config(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, megatron = pair
    iteration = tmp_path / "megatron" / "iter_0000040"
    shutil.copytree(megatron / "release", iteration, ignore=shutil.ignore_patterns("hf", "manifest.json"))
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("40")
    arguments = ("--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    assert "give an HF folder of the same model with --config" in fail("megatron_to_hf", *arguments)
    assert succeed("megatron_to_hf", *arguments, "--config", source)
    check_same(source, tmp_path / "back")

    other_model = write_model(tmp_path / "other", "qwen2-tied", intermediate_size=104)
    shutil.rmtree(tmp_path / "back")
    error = fail("megatron_to_hf", *arguments, "--config", other_model)
    assert "unexpected: output_layer.weight" in error
    assert "wrong shape: decoder.layers.4.mlp.linear_fc2.weight is [48, 100], not [48, 104]" in error
    assert not list(tmp_path.glob("*back*"))


@pytest.mark.long
def test_a_step_of_a_run_needs_no_config(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Its settings name the model; the run's folder works too."""
    step = write_step(tmp_path / "r-001", 3, pair[0], pair[1] / "release")
    assert succeed("megatron_to_hf", "--megatron", tmp_path / "r-001", "--out", tmp_path / "back")
    check_same(pair[0], tmp_path / "back")
    assert f"{step}: Megatron-Core (torch_dist) checkpoint" in succeed(
        "inspect_checkpoint", tmp_path / "r-001"
    )


def test_a_damaged_megatron_checkpoint_is_refused_in_one_message(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    release = tmp_path / "megatron" / "release"
    shutil.copytree(pair[1] / "release", release)
    (release / "metadata.json").unlink()
    (release / "metadata.json").symlink_to(pair[1] / "release" / "metadata.json")
    data = (release / "__0_0.distcp").read_bytes()
    (release / "__0_0.distcp").write_bytes(data[:-100])
    (release / "hf" / "tokenizer.json").write_text("[]")
    damage = (
        "metadata.json cannot be read",
        f"__0_0.distcp has {len(data) - 100} bytes, not {len(data)}",
        "hf/tokenizer.json does not have the contents that were written",
    )
    error = fail("megatron_to_hf", "--megatron", release, "--out", tmp_path / "back")
    for part in damage:
        assert part in error
    (release / "hf" / "config.json").unlink()  # without it not even the model's shape is known
    damage = (*damage, "hf/config.json is missing")
    error = fail("megatron_to_hf", "--megatron", release, "--out", tmp_path / "back")
    for part in damage:
        assert part in error
    assert not list(tmp_path.glob("*back*"))
    shown = run("inspect_checkpoint", release)
    assert shown.returncode == 2
    for part in damage:
        assert part in shown.stdout


def test_a_wrong_hf_checkpoint_is_refused_in_one_message(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(pair[0], source)
    weights = tensors(source)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    del weights["model.norm.weight"]
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(47)
    weights["lm_head.weight"] = weights["lm_head.weight"].half()
    save_file(weights, source / "model.safetensors")
    arguments = ("--hf", source, "--out", tmp_path / "out")
    error = fail("hf_to_megatron", *arguments)
    for part in (
        "missing: model.norm.weight",
        "unexpected: model.layers.7.mlp.up_proj.weight",
        "wrong shape: model.layers.0.self_attn.q_proj.bias is [47], not [48]",
        "not F32, as 62 tensors are; save it with one dtype: lm_head.weight is F16",
    ):
        assert part in error
    for option in ("--tensor", "--tp", "--pipeline"):
        error = fail("hf_to_megatron", *arguments, option, "4")
        assert "is gone; remove it: a converted checkpoint has no layout" in error
    (tmp_path / "out").mkdir()
    assert "already exists" in fail("hf_to_megatron", "--hf", pair[0], "--out", tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["hf", "out"]


def test_truncated_hf_files_are_all_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(pair[0], tmp_path / "hf")
    first, second, *_ = sorted((tmp_path / "hf").glob("*.safetensors"))
    for file in (first, second):
        file.write_bytes(file.read_bytes()[:-1])
    error = fail("hf_to_megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "out")
    assert first.name in error
    assert second.name in error


def test_inspect_lists_both_kinds(pair: tuple[Path, Path]) -> None:
    source, megatron = pair
    stored = tensors(source)
    hf = json.loads(succeed("inspect_checkpoint", source, "--json"))
    assert {t["name"]: t["shape"] for t in hf["tensors"]} == {n: list(t.shape) for n, t in stored.items()}
    parameters = sum(t.numel() for t in stored.values())
    assert hf["totals"]["parameters"] == hf["model"]["parameters"] == parameters
    shown = json.loads(succeed("inspect_checkpoint", megatron, "--json"))
    assert shown["model"]["parameters"] == parameters
    assert shown["totals"]["parameters"] == parameters
    assert shown["whole"]
    table = succeed("inspect_checkpoint", megatron)
    assert "output_layer.weight" in table
    assert "whole: every file has the SHA-256 of the manifest" in table


def test_wrong_logits_are_noticed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The comparison itself, with transformers' own logits, of which one is changed a little."""
    sequences = choose_sequences(read_model_shape(pair[0]))
    model = transformers.AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([s])).logits[0].clone() for s in sequences]
    assert "logits: max |difference| from transformers 0.00e+00" in compare(pair[0], sequences, logits)
    logits[2][7, 250] += 1e-4
    with pytest.raises(RunFailed, match=r"up to 1\.0.*position 7, logit of token 250"):
        compare(pair[0], sequences, logits)


@pytest.fixture
def stopped(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[Any]:
    """Start a conversion, and signal it while it writes; returns its exit code."""
    processes = []

    def stop(number: signal.Signals) -> int:
        command = [sys.executable, ROOT / "tools" / "hf_to_megatron.py"]
        with fresh_starts():
            process = subprocess.Popen(
                [*command, "--hf", pair[0], "--out", tmp_path / "out"], stderr=subprocess.PIPE, text=True
            )
        processes.append(process)
        assert process.stderr is not None
        while not (tmp_path / ".out.incomplete" / "result" / "release").exists():
            assert process.poll() is None, "ended before it wrote"
        process.send_signal(signal.SIGSTOP)
        assert not (tmp_path / "out").exists(), "the conversion was over before it was stopped"
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        process.stderr.read()
        return process.wait(60)

    yield stop
    for process in processes:
        process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_conversion_leaves_nothing(
    stopped: Any, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    assert stopped(number) == code
    assert list(tmp_path.iterdir()) == []


def test_a_signal_waits_until_the_next_parameter(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Raised anywhere, a Ctrl-C once left a lock held, and the conversion hung."""
    reached, plain = [], Staging.count

    def count(staging: Staging, size: int) -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append(size)  # the signal was only noted
        plain(staging, size)

    source = command.open_megatron(pair[1])
    with pytest.MonkeyPatch.context() as patch, StopSignals() as signals:
        patch.setattr(Staging, "count", count)
        with pytest.raises(Interrupted):
            command.convert_to_hf(source, tmp_path / "out", signals)
    assert reached == [0]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_message(pair: tuple[Path, Path], tmp_path: Path) -> None:
    code = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
sys.argv[1:] = ["--hf", "{hf}", "--out", "{out}"]
runpy.run_path("tools/hf_to_megatron.py", run_name="__main__")
""".format(hf=pair[0], out=tmp_path / "out")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("out: not written (File too large)")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_conversions_folder_is_removed_by_the_next(
    stopped: Any, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert stopped(signal.SIGKILL) == -9
    assert [f.name for f in tmp_path.iterdir()] == [".out.incomplete"]
    (tmp_path / ".out.incomplete" / "result" / "release" / "stray").write_text(
        "left by the one that was killed"
    )
    succeed("hf_to_megatron", "--hf", pair[0], "--out", tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "release" / "stray").exists()
