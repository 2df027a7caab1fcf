"""HF checkpoints convert to Megatron and back bit by bit, through the command lines and the files.

Why: a converter is trusted with a model that took weeks; it must not change it, write half of it, or accept
damaged weights. Real Megatron-Core on gloo ranks, random models of awkward sizes: a vocabulary
that tensor parallelism does not divide, layers that stages do not, query groups that are cut, tied
embeddings. ``make test`` has one case per family (Qwen2's is the fixture ``pair``, which comes back in
``test_a_checkpoint_of_megatron_lm_needs_a_config``); the grid of layouts is ``long``. The contents of a
Megatron checkpoint are also compared with shards that were made without the box table. An exported mixture of
experts is served by vLLM without our plug-in. Not covered: Megatron-LM's own training loop, Transformer
Engine's layers, optimizer state, and memory (benchmarks/checkpoints.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as torch_checkpoint

from rpg_megatron.commands.convert import command
from rpg_megatron.commands.convert.processes import LOGITS, ConvertProcesses
from rpg_megatron.config import read_model_shape
from rpg_megatron.launcher.supervisor import Interrupted, RunFailed, StopSignals
from tests.support.forking import fresh_starts
from tests.support.launcher import wait_for
from tests.support.megatron_shards import megatron_value
from tests.support.run_checkpoints import write_step
from tests.support.runs import signal_all
from tests.support.tiny_models import AWKWARD, LLAMA3_ROPE, WIDE, make_model

pytestmark = pytest.mark.usefixtures("forked_starts")

ROOT = Path(__file__).parents[2]
MARK = "RPG_TEST_MARK"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 8, "mlp_only_layers": [1]}),
}


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """A random model of awkward sizes in several files, with stand-ins for a tokenizer and its template."""
    name, family_changes = FAMILIES[family]
    make_model(folder, name, max_shard_size="200KB", **AWKWARD | family_changes | changes)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("a b\n")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def run(tool: str, *arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """One of tools/, by its absolute path and from another folder."""
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd="/", check=False)


def succeed(tool: str, *arguments: str | Path) -> str:
    done = run(tool, *arguments)
    assert done.returncode == 0, f"{tool} {arguments}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


def fail(tool: str, *arguments: str | Path, code: int = 2) -> str:
    done = run(tool, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def difference(output: str) -> float:
    """The difference that --verify printed."""
    match = re.search(r"max \|difference\| from transformers (\S+)", output)
    assert match, output
    return float(match[1])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


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


def there_and_back(
    folder: Path, source: Path, written: tuple[int, int], read: tuple[int, int] | None, verify: str = ""
) -> None:
    """Convert at one layout, back at another (None: as written); ``verify``: the tool that verifies."""
    sizes = ("--tp", written[0], "--pp", written[1])
    there = ("--hf", source, "--out", folder / "there", *sizes)
    back = ("--megatron", folder / "there", "--out", folder / "back")
    if read is not None:
        back = (*back, "--tp", read[0], "--pp", read[1])
    for tool, arguments in (("hf_to_megatron", there), ("megatron_to_hf", back)):
        verified = verify in (tool, "both")
        output = succeed(tool, *map(str, arguments), *(["--verify"] if verified else []))
        if verified:
            assert difference(output) <= 1e-5
    check_same(source, folder / "back")


@pytest.mark.parametrize(
    ("family", "dtype", "changes", "written", "read", "verify"),
    [
        ("llama", torch.float32, {}, (2, 1), (1, 2), "megatron_to_hf"),
        ("qwen3", torch.bfloat16, {"tie_word_embeddings": True}, (1, 2), (1, 1), "hf_to_megatron"),
        # Each rank is a start of Megatron; what these add is in ``test_every_layout`` too.
        pytest.param("qwen3", torch.bfloat16, {}, (1, 3), (2, 1), "hf_to_megatron", marks=pytest.mark.long),
        pytest.param(
            "qwen2-tied", torch.float32, {}, (2, 2), (1, 1), "hf_to_megatron", marks=pytest.mark.long
        ),
        # Experts are cut over the tensor ranks; test_experts has bit-identical exports in the default tier.
        pytest.param("qwen3-moe", torch.float32, {}, (2, 2), (1, 3), "both", marks=pytest.mark.long),
        pytest.param(
            "qwen3-moe", torch.bfloat16, {}, (1, 1), (2, 1), "megatron_to_hf", marks=pytest.mark.long
        ),
    ],
    ids=["llama", "qwen3-tied-bf16", "qwen3-bf16", "qwen2-tied", "qwen3-moe", "qwen3-moe-bf16"],
)
def test_there_and_back_is_bit_exact(
    tmp_path: Path,
    family: str,
    dtype: torch.dtype,
    changes: dict[str, Any],
    written: tuple[int, int],
    read: tuple[int, int],
    verify: str,
) -> None:
    source = write_model(tmp_path / "hf", family, dtype=str(dtype)[6:], **changes)
    there_and_back(tmp_path, source, written, read, verify)


GRID = [(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2, 3)]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("written", GRID, ids=lambda layout: f"tp{layout[0]}-pp{layout[1]}")
def test_every_layout(tmp_path: Path, family: str, written: tuple[int, int]) -> None:
    """6/2 heads where they fit, 12/2 at TP4; read back as written."""
    source = write_model(tmp_path / "hf", family, **(WIDE if written[0] == 4 else {}))
    there_and_back(tmp_path, source, written, None, "hf_to_megatron")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_dtype(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    source = write_model(tmp_path / "hf", family, dtype=str(dtype)[6:], **WIDE)
    there_and_back(tmp_path, source, (2, 3), (4, 2), "both")


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
def test_a_stock_vllm_serves_an_exported_mixture(tmp_path: Path) -> None:
    """Without our plug-in: log-probs as transformers computes them from the model before the conversion."""
    experts = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts |= {"intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 128}
    source = write_model(tmp_path / "hf", "qwen3-moe", **experts)
    there_and_back(tmp_path, source, (2, 1), (1, 2))

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 128, (n,), generator=generator).tolist() for n in (40, 17, 5)]
    (tmp_path / "serve.py").write_text(STOCK_VLLM)
    # No plug-in; what a CPU with two cores needs is as in engine/command.py.
    environment = os.environ | {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
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
    """An HF checkpoint in several files, and the same at TP2, by ``rpg-megatron``. Do not change them."""
    folder = tmp_path_factory.mktemp("pair")
    source = write_model(folder / "hf", "qwen2")
    command = [sys.executable, "-m", "rpg_megatron.cli", "convert", "hf-to-megatron", "--tp", "2", "--verify"]
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
        expected = megatron_value(name, weights, shape, tensor=1, tensor_rank=0, vocab_multiple=1)
        if value.size(0) > expected.size(0):
            assert value.shape[0] == 252
            assert not value[251:].any()
            value = value[:251]
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
    step = write_step(tmp_path / "r-001", 3, pair[0], pair[1] / "release", tensor=2)
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
    (release / "__0_0.distcp").unlink()
    data = (release / "__1_0.distcp").read_bytes()
    (release / "__1_0.distcp").write_bytes(data[:-100])
    (release / "hf" / "tokenizer.json").write_text("[]")
    damage = (
        "__0_0.distcp is missing",
        f"__1_0.distcp has {len(data) - 100} bytes, not {len(data)}",
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
    assert "tensor=4 does not divide the model's 6 attention heads" in fail(
        "hf_to_megatron", *arguments, "--tp", "4"
    )
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


def test_a_dry_run_prints_every_piece_and_writes_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, megatron = pair
    out = tmp_path / "out"
    to_megatron = succeed(
        "hf_to_megatron", "--hf", source, "--out", out, "--tp", "2", "--pp", "3", "--dry-run"
    )
    to_hf = succeed("megatron_to_hf", "--megatron", megatron, "--tp", "2", "--pp", "3", "--dry-run")
    assert to_megatron == to_hf
    assert list(tmp_path.iterdir()) == []
    lines = to_megatron.splitlines()
    last = lines.index("rank 5: tensor 1 of 2, stage 2 of 3, layers 4-4")
    at = lines.index("  output_layer.weight [126, 48]", last)
    assert lines[at + 1 : at + 3] == [
        "    lm_head.weight [126:251, 0:48] -> [0:125, 0:48]",
        "    1 rows of padding, zero",
    ]
    for name in tensors(source):
        assert any(line.startswith(f"    {name} [") for line in lines), name


def test_inspect_lists_both_kinds(pair: tuple[Path, Path]) -> None:
    source, megatron = pair
    stored = tensors(source)
    hf = json.loads(succeed("inspect_checkpoint", source, "--json"))
    assert {t["name"]: t["shape"] for t in hf["tensors"]} == {n: list(t.shape) for n, t in stored.items()}
    parameters = sum(t.numel() for t in stored.values())
    assert hf["totals"]["parameters"] == hf["model"]["parameters"] == parameters
    shown = json.loads(succeed("inspect_checkpoint", megatron, "--json"))
    assert shown["facts"]["tensor"] == 2
    assert shown["model"]["parameters"] == parameters
    assert shown["totals"]["parameters"] == parameters + 2 * 48  # a row of padding in either vocabulary
    assert shown["whole"]
    table = succeed("inspect_checkpoint", megatron)
    assert "output_layer.weight" in table
    assert "whole: every file has the SHA-256 of the manifest" in table


def test_wrong_logits_are_noticed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The comparison itself, with transformers' own logits, of which one is changed a little."""
    source = command.open_hf(pair[0], 1, 1)
    job = command._job(source, "hf_to_megatron", tmp_path / "out", tmp_path, verify=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    with torch.no_grad():
        logits = {str(i): model(torch.tensor([s])).logits[0].clone() for i, s in enumerate(job.sequences)}
    logits["2"][7, 250] += 1e-4
    save_file(logits, tmp_path / LOGITS)
    with (
        ConvertProcesses(tmp_path, StopSignals()) as processes,
        pytest.raises(RunFailed, match=r"position 7, logit of token 250") as e,
    ):
        command._compare(job, pair[0], processes)
    assert "up to 1.0" in str(e.value)


def marked(mark: str) -> list[int]:
    """Living processes that descend from a command started with this mark in its environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


@pytest.fixture
def stopped_at(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[Any]:
    """Start a conversion, signal it while it starts or while it writes: exit code and children left."""
    mark = uuid.uuid4().hex

    def stop(while_it_writes: bool, number: signal.Signals) -> tuple[int, list[int]]:
        command = [sys.executable, ROOT / "tools" / "hf_to_megatron.py", "--tp", "2"]
        with fresh_starts():
            process = subprocess.Popen(
                [*command, "--hf", pair[0], "--out", tmp_path / "out"],
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {MARK: mark},
            )
        assert process.stderr is not None
        while "starting" not in process.stderr.readline():
            assert process.poll() is None, "ended before it started its ranks"
        wait_for(lambda: len(marked(mark)) >= 3, 60)  # the ranks import Megatron
        if while_it_writes:
            pids = marked(mark)
            while not (tmp_path / ".out.incomplete" / "result" / "release").exists():
                assert process.poll() is None, "ended before it wrote"
            signal_all(pids, signal.SIGSTOP)
            assert not (tmp_path / "out").exists(), "the conversion was over before it was stopped"
        process.send_signal(number)
        if while_it_writes:
            signal_all(pids, signal.SIGCONT)
        process.stderr.read()
        code = process.wait(60)
        deadline = time.monotonic() + 20
        while (remaining := marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return code, remaining

    yield stop
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("while_it_writes", "number", "code"),
    [(True, signal.SIGINT, 130), (False, signal.SIGTERM, 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupted_conversion_leaves_nothing(
    stopped_at: Any, tmp_path: Path, while_it_writes: bool, number: signal.Signals, code: int
) -> None:
    assert stopped_at(while_it_writes, number) == (code, [])
    assert list(tmp_path.iterdir()) == []


def test_a_signal_waits_until_no_child_is_half_known(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Raised inside ``Popen.poll``, a Ctrl-C once left its lock held, and the conversion hung."""
    reached, plain = [], ConvertProcesses.count

    def count(processes: ConvertProcesses, size: int) -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append(size)  # the signal was only noted
        plain(processes, size)

    source = command.open_megatron(pair[1])
    with pytest.MonkeyPatch.context() as patch, StopSignals() as signals:
        patch.setattr(ConvertProcesses, "count", count)
        with pytest.raises(Interrupted):
            command.convert_to_hf(source, tmp_path / "out", signals)
    assert reached == [0]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_conversions_folder_is_removed_by_the_next(
    stopped_at: Any, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert stopped_at(True, signal.SIGKILL) == (-9, [])
    assert [f.name for f in tmp_path.iterdir()] == [".out.incomplete"]
    (tmp_path / ".out.incomplete" / "result" / "release" / "stray").write_text(
        "left by the one that was killed"
    )
    succeed("hf_to_megatron", "--hf", pair[0], "--out", tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "release" / "stray").exists()
