"""``rpg-megatron plan``: figures that are published or can be counted by hand, the command, and no torch.

Why: users trust a plan because its exact parts are exact. Not covered: how close the estimates are to real
ranks (tests/distributed/test_plan_memory); what a GPU adds was never measured.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rpg_megatron import cli
from rpg_megatron.commands.plan.activations import StageActivations, expert_rows, in_flight
from rpg_megatron.commands.plan.engine_memory import CONTEXT, engine_memory, worker_parameters
from rpg_megatron.commands.plan.gpus import gpu_bytes
from rpg_megatron.commands.plan.layout import count_gpus, plan_batch
from rpg_megatron.commands.plan.plan import Target, make_plan, plan_for, smallest, sweep
from rpg_megatron.commands.plan.trainer_memory import (
    RESERVE,
    communicator_bytes,
    rank_memory,
)
from rpg_megatron.config import ModelShape, Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.engine.command import engine_command

GIB = 1024**3

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
QWEN3_8B = LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
QWEN3_06B = QWEN3_8B | {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}

TWO_NODES = {"engine": {"replicas": 8}, "bridge": {"transport": "process_group"}}
"""Eight trainer ranks and eight engines."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a model's config.json, data, and a YAML file that names both; returns the latter."""

    def make(config: dict[str, object], **settings: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        (tmp_path / "d").write_text('{"prompt": "1+1", "answer": "2"}\n')
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({"model": {"path": "model"}, "data": {"path": "d"}, **settings}))
        return file

    return make


def plan_of(file: Path, gpu: str = "h100-80"):
    settings = load_settings(file)
    return plan_for(settings, read_model_shape(settings.model.path), Target("cuda", gpu, gpu_bytes(gpu)))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_8B, 8_030_261_248),
        (QWEN3_06B, 596_049_920),
    ],
)
def test_parameters_are_the_published_numbers(write: Callable[..., Path], config, parameters: int) -> None:
    plan = plan_of(write(config))
    assert plan.parameters == parameters
    assert plan.engine.weights == 2 * parameters  # vocabularies are multiples of 64 here
    assert worker_parameters(plan.shape, 1) == parameters


@pytest.mark.parametrize("tensor", [1, 2])
def test_muon_has_one_moment_of_the_layers_matrices(write: Callable[..., Path], tensor: int) -> None:
    def optimizer(kind: str) -> int:
        optimizer = {"type": kind, "distributed": False}
        plan = plan_of(write(QWEN3_06B, optimizer=optimizer, parallel={"tensor": tensor}))
        return next(part.nbytes for part in plan.largest.parts if part.name == "optimizer")

    # 28 layers of query, key, value, output and the three of the MLP.
    matrices = 28 * (1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072)
    assert optimizer("adamw") - optimizer("muon") == 4 * matrices / tensor


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_sharded_bytes_per_parameter_are_the_published_numbers(
    write: Callable[..., Path], replicas: int
) -> None:
    """Megatron-LM's table for the distributed optimizer."""
    for dtype, expected in (("bfloat16", 6 + 12 / replicas), ("float32", 8 + 8 / replicas)):
        plan = plan_of(write(QWEN3_06B, parallel={"data": replicas}, precision={"dtype": dtype}))
        held = [p.nbytes for p in plan.largest.parts if p.name in ("parameters", "gradients", "optimizer")]
        assert sum(held) / plan.largest.parameters == pytest.approx(expected)


def test_key_value_cache_of_llama_8b_is_128_kib_a_token(write: Callable[..., Path]) -> None:
    settings = load_settings(write(LLAMA_8B))
    shape = read_model_shape(settings.model.path)
    size = {"longest": 4096, "device": "cuda", "gpu_bytes": 80 * GIB}
    single = engine_memory(settings, shape, count_gpus(settings), **size)
    assert single.kv_bytes_per_token == 128 * 1024
    wide = settings.model_copy(update={"engine": settings.engine.model_copy(update={"tensor": 16})})
    sharded = engine_memory(wide, shape, count_gpus(wide), **size)
    assert sharded.kv_bytes_per_token == 16 * 1024  # 8 heads over 16 workers: one each, twice


def test_buckets_come_on_top_of_what_vllm_takes(write: Callable[..., Path]) -> None:
    grouped = {"bridge": {"transport": "process_group"}}
    plain, more = plan_of(write(LLAMA_8B)), plan_of(write(LLAMA_8B, **grouped))
    assert more.engine.total - plain.engine.total == (256 + 550) * 1024**2  # bucket, link in a node
    full = {"engine": {"arguments": ["--gpu-memory-utilization", "1.0"]}}
    assert any("lower --gpu-memory-util" in p for p in plan_of(write(LLAMA_8B, **grouped, **full)).problems)


def test_a_shared_card_is_counted_turn_by_turn(write: Callable[..., Path], capsys) -> None:
    """8B, two ranks, two engines: memory held in each turn, counted by hand."""
    weights, n = 16_381_470_720, 8_190_735_360
    colocated = {"colocated": True, "replicas": 2, "kv_cache_gib": 20}
    ipc = {"bridge": {"transport": "cuda_ipc"}}
    plan = plan_of(write(QWEN3_8B, parallel={"data": 2}, engine=colocated, **ipc), "b200-180")
    apart = plan_of(write(QWEN3_8B, parallel={"data": 2}, engine={"replicas": 2}, **ipc), "b200-180")
    assert plan.shared_gpu
    assert apart.shared_gpu == ()
    rest = plan.engine.running + RESERVE
    nccl = 3 * 518 * 1024**2  # all ranks, twice, and data x context
    assert plan.turns["rollout"] == 2 * weights + 20 * GIB + rest + nccl
    assert plan.turns["update"] == apart.largest.peak + CONTEXT + RESERVE
    # A worker reads the replica on its own card. With two cards, the other card's worker reads here too.
    cut = plan_of(write(QWEN3_8B, parallel={"tensor": 2}, engine=colocated, **ipc), "b200-180")
    far = {"bridge": {"transport": "process_group"}}
    less = plan_of(write(QWEN3_8B, parallel={"tensor": 2}, engine=colocated, **far), "b200-180")
    assert cut.turns["rollout"] == less.turns["rollout"] + GIB // 2
    assert plan.need == max(plan.turns.values()) > apart.rank_total
    parked = [p.nbytes for p in plan.largest.parts if p.name == "optimizer off the GPU"]
    assert parked == [12 * n // 2]
    assert plan.largest.host == apart.largest.host + parked[0]
    assert plan.engine.kv_cache == 20 * GIB
    # Messages are in host memory.
    sent = {"bridge": {"transport": "process_group"}}
    over_host = plan_of(write(QWEN3_8B, parallel={"data": 2}, engine=colocated, **sent), "b200-180")
    assert over_host.turns["rollout"] == plan.turns["rollout"]
    # Each turn alone may exceed the card's memory.
    for settings, gpu, problem in (
        (
            {"engine": colocated | {"kv_cache_gib": 150}},
            "b200-180",
            "while engines sample,.*lower engine.kv_cache",
        ),
        ({"engine": colocated}, "h100-80", "during an update a GPU holds .*h100-80 has"),
    ):
        (message,) = plan_of(write(QWEN3_8B, parallel={"data": 2}, **settings, **ipc), gpu).problems
        assert re.search(problem, message)
    file = write(QWEN3_8B, parallel={"data": 2}, engine=colocated, **ipc)
    with pytest.raises(SystemExit):
        cli.main(["plan", str(file)])
    overrides = re.search(r"smallest layout that fits: .*: (parallel.*)", capsys.readouterr().out)[1].split()
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["plan", str(file), "--json", *overrides])
    assert exit_info.value.code == 0
    assert json.loads(capsys.readouterr().out)["card"]["turns"]["update"] < gpu_bytes("h100-80")


def test_all_reduces_of_engines_hold_memory_also_asleep(write: Callable[..., Path], capsys) -> None:
    """VLLM's own always, FlashInfer's workspace where engine.arguments ask for it."""
    engine = {"colocated": True, "replicas": 1, "kv_cache_gib": 20}
    fused = {"arguments": ["--compilation-config", '{"pass_config": {"fuse_allreduce_rms": true}}']}

    def of(tensor: int, **more: object) -> tuple[int, int, str]:
        settings = {"parallel": {"tensor": tensor}, "bridge": {"transport": "cuda_ipc"}}
        file = write(QWEN3_8B, engine={**engine, "tensor": tensor, **more}, **settings)
        plan = plan_of(file, "b200-180")
        (asleep,) = (p.nbytes for p in plan.shared_gpu if p.name == "engine asleep: context, NCCL")
        capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main(["plan", str(file), "--gpu", "b200-180"])
        return plan.engine.running, asleep, re.sub(r"\s+", " ", capsys.readouterr().out)

    one, two, four, with_flashinfer = of(1), of(2), of(4), of(2, **fused)
    assert one[1] == CONTEXT
    assert "all-reduces" not in one[2]
    assert two[1] == CONTEXT + communicator_bytes(2, 2, large=True) + 192 * 1024**2
    assert four[1] == CONTEXT + communicator_bytes(4, 4, large=True) + 192 * 1024**2
    assert [a - b for a, b in zip(with_flashinfer[:2], two[:2], strict=True)] == [512 * 1024**2] * 2
    assert "all-reduces are vLLM's, without nvcc" in two[2]
    assert "all-reduces are FlashInfer's, compiled with nvcc" in with_flashinfer[2]


def test_the_number_of_sequences_follows_from_memory(write: Callable[..., Path]) -> None:
    """147,456 bytes a token, 8,192 + 1,024 tokens: a quarter of them are 324 MiB."""

    def plan(gib: float, config: dict[str, object] = QWEN3_8B, **settings: Any):
        engine = {"colocated": True, "replicas": 2, "kv_cache_gib": gib} | settings.pop("engine", {})
        more = {"data": {"path": "d", "max_prompt_tokens": 1024}, "bridge": {"transport": "cuda_ipc"}}
        rollout = {"max_response_tokens": 8192, "prompts_per_step": 512, "samples_per_prompt": 8}
        more |= {"training": {"minibatches": 1}, "parallel": {"data": 2}}
        file = write(config, engine=engine, rollout=rollout | settings, **more)
        return plan_of(file, "b200-180")

    def chosen(*arguments: Any, **settings: Any) -> int | None:
        return plan(*arguments, **settings).settings.engine.max_sequences

    assert chosen(36) == 36 * GIB // (2304 * 147_456) // 8 * 8 == 112
    assert chosen(18) == 56
    assert chosen(2) == 6  # fewer than eight
    assert chosen(36, prompts_per_step=8) == 32  # all of an engine's share of a step
    assert chosen(36, prompts_per_step=8, dynamic={"oversample": 1.5}) == 48
    assert chosen(36, engine={"max_sequences": 300}) == 300
    small = QWEN3_8B | {"num_key_value_heads": 1, "num_hidden_layers": 2}
    assert chosen(36, small) == 1024  # vLLM's own default
    apart = {"colocated": False}
    assert chosen(36, engine=apart) > chosen(36)  # by what vLLM leaves of the GPU, not by kv_cache_gib
    of_cpu = write(QWEN3_8B, device="cpu")
    assert make_plan(load_settings(of_cpu)).settings.engine.max_sequences is None
    assert load_settings(of_cpu).engine.most_sequences == 256
    command = engine_command(plan(36).settings, 0, Path("socket"))
    assert command[command.index("--max-num-seqs") + 1] == "112"


def test_prompts_are_shared_on_a_gpu_where_it_pays(write: Callable[..., Path], capsys) -> None:
    """Their attention takes twice as long. Of 1,024 + 8,192 tokens of an 8B it is 1,655 tokens' worth."""

    def of(response: int, samples: int = 8, share: object = "auto", config: dict[str, object] = QWEN3_8B):
        rollout = {"max_response_tokens": response, "samples_per_prompt": samples}
        data = {"path": "d", "max_prompt_tokens": 1024}
        file = write(config, data=data, rollout=rollout, training={"share_prompts": share})
        capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main(["plan", str(file), "--gpu", "b200-180"])
        (row,) = (line for line in capsys.readouterr().out.splitlines() if "(training.share_prompts)" in line)
        plan = plan_of(file)
        each = (1024 + response) ** 2 / plan.shape.attention_length
        pays = each <= 1024 * (1 - 1 / samples)
        return plan.settings.training.share_prompts, pays, "not shared" not in row

    assert of(8192) == (False, False, False)
    assert of(2048) == ("auto", True, True)
    assert of(5120, 2) == (False, False, False)  # one of two prompts is saved
    assert of(5120, 16) == ("auto", True, True)
    assert of(2048, config=QWEN3_06B) == (False, False, False)  # more of a small model is attention
    assert of(8192, share=True) == (True, False, True)
    assert of(2048, share=False) == (False, True, False)
    cpu = load_settings(write(QWEN3_8B, device="cpu", training={"share_prompts": "auto"}))
    assert make_plan(cpu).settings.training.share_prompts == "auto"


def test_on_a_cpu_taking_turns_costs_memory(write: Callable[..., Path]) -> None:
    """Parked optimizer state needs a second allocation there; the first is free only while engines sample."""
    cpu = {"device": "cpu", "precision": {"dtype": "float32"}}
    target = Target("cpu", "x", 64 * GIB)
    plans = [
        plan_for(settings, read_model_shape(settings.model.path), target)
        for settings in (
            load_settings(write(QWEN3_06B, **cpu), [f"engine.colocated={on}"]) for on in ("false", "true")
        )
    ]
    assert plans[1].shared_gpu == ()
    assert plans[1].largest.peak - plans[0].largest.peak >= 8 * 596_049_920


def test_vllm_arguments_are_read(write: Callable[..., Path]) -> None:
    fixed = {"max_sequences": 256}
    plan = plan_of(write(LLAMA_8B, engine=fixed))
    assert plan.engine.utilisation == 0.92
    for arguments in (
        ["--gpu-memory-utilization", "0.5"],
        ["--gpu_memory_utilization=0.5"],
        ["--gpu-memory-utilization=0.7", "--gpu-memory-utilization", "0.5"],  # vLLM uses the last one
    ):
        less = plan_of(write(LLAMA_8B, engine=fixed | {"arguments": arguments}))
        assert less.engine.utilisation == 0.5
        assert plan.engine.kv_cache - less.engine.kv_cache == pytest.approx(
            0.42 * gpu_bytes("h100-80"), abs=2
        )
    with pytest.raises(UserError, match="needs a number, has 'half'"):
        plan_of(write(LLAMA_8B, engine={"arguments": ["--gpu-memory-utilization", "half"]}))


@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2}, {"pipeline": 3}, {"pipeline": 2, "virtual": 3}, {"tensor": 2, "pipeline": 2, "data": 2}],
)
@pytest.mark.parametrize("config", [QWEN3_8B, QWEN3_06B])
def test_the_ranks_together_hold_the_model(write: Callable[..., Path], config, parallel) -> None:
    plan = plan_of(write(config, parallel=parallel))
    shape, sizes = plan.shape, plan.settings.parallel
    total = sum(r.parameters for r in plan.ranks if r.publishes) * sizes.tensor
    norms = shape.num_layers * (2 * shape.hidden_size + 2 * shape.head_dim) + shape.hidden_size
    twice = shape.vocab_size * shape.hidden_size if shape.tied_embeddings and sizes.pipeline > 1 else 0
    assert total == plan.parameters + (sizes.tensor - 1) * norms + twice


@pytest.mark.parametrize(
    ("pipeline", "virtual", "microbatches", "held"),
    [
        (1, 1, 8, [1]),
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        (4, 2, 8, [11, 9, 7, 5]),  # warm-up 2 (p - r - 1) + (v - 1) p chunks, and one under way
        (2, 2, 1, [4, 3]),  # filled up to 2 micro-batches of 2 chunks
    ],
)
def test_micro_batches_in_flight(pipeline: int, virtual: int, microbatches: int, held: list[int]) -> None:
    parallel = ParallelSettings(pipeline=pipeline, virtual=virtual)
    assert [in_flight(s, parallel, microbatches) for s in range(pipeline)] == held


@pytest.mark.parametrize("data", [1, 3])
def test_a_step_is_cut_as_the_trainer_cuts_it(write: Callable[..., Path], data: int) -> None:
    settings_file, prompts = (
        write(
            QWEN3_8B,
            parallel={"data": data},
            rollout={"prompts_per_step": 12, "samples_per_prompt": 5, "max_response_tokens": 900},
            training={"minibatches": 4, "tokens_per_microbatch": 4096},
        ),
        ["data.max_prompt_tokens=100"],
    )
    batch = plan_batch(load_settings(settings_file, prompts), 40960)
    assert (batch.sequences, batch.sequences_per_update, batch.longest) == (60, 15, 1000)
    assert batch.context == 1000
    heldout = "{preset: aime24, max_prompt_tokens: 200, max_response_tokens: 3000}"
    longer = load_settings(settings_file, [*prompts, f"evaluation.sets=[{heldout}]"])
    assert (plan_batch(longer, 40960).context, plan_batch(longer, 40960).longest) == (3200, 1000)
    real = plan_batches([1000] * 60, minibatches=4, data=data, budget=4096)
    assert {len(mini) for share in real for mini in share} == {batch.microbatches}
    assert max(1000 * len(micro) for share in real for mini in share for micro in mini) <= (
        batch.tokens_per_microbatch
    )


def test_the_larger_the_layout_the_smaller_the_rank(write: Callable[..., Path]) -> None:
    def peak(**parallel: object) -> int:
        return plan_of(write(QWEN3_8B, parallel=parallel)).largest.peak

    peaks = [
        plan_of(write(QWEN3_8B, memory={"recompute": r})).largest.peak for r in ("none", "selective", "full")
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert peak() > peak(tensor=2) > peak(tensor=2, sequence=True) > peak(tensor=4, sequence=True)
    assert peak(data=2) < peak()  # the distributed optimizer
    assert peak(context=2) < peak()  # half the tokens, and the distributed optimizer
    no_recompute = {"memory": {"recompute": "none"}}
    longer = plan_of(write(QWEN3_8B, training={"tokens_per_microbatch": 16384}, **no_recompute))
    assert longer.largest.peak > plan_of(write(QWEN3_8B, **no_recompute)).largest.peak


def test_what_does_not_fit_is_told_with_what_would(write: Callable[..., Path], capsys) -> None:
    file = write(QWEN3_8B)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["plan", str(file), "--json"])
    assert exit_info.value.code == 1
    output = json.loads(capsys.readouterr().out)
    assert not output["fits"]
    assert "a trainer rank needs" in output["problems"][0]
    overrides = output["suggestion"]["parallel"].split()
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["plan", str(file), *overrides])
    assert exit_info.value.code == 0
    assert "fits" in capsys.readouterr().out
    plan = make_plan(load_settings(file), "80GiB")
    best = smallest(plan)
    fewer = best.settings.parallel.world // 2
    plans = sweep(plan, fewer)
    assert plans
    assert not any(plan.fits for plan in plans), "a smaller layout also fits"


def test_an_engine_that_does_not_fit_is_told(write: Callable[..., Path], capsys) -> None:
    big = QWEN3_8B | {"num_hidden_layers": 64, "hidden_size": 8192, "intermediate_size": 28672}
    file = write(big, parallel={"tensor": 8, "pipeline": 8, "sequence": True})
    with pytest.raises(SystemExit):
        cli.main(["plan", str(file), "--json"])
    output = json.loads(capsys.readouterr().out)
    assert any("raise engine.tensor" in problem for problem in output["problems"])
    with pytest.raises(SystemExit):
        cli.main(["plan", str(file), "--json", f"engine.tensor={output['suggestion']['engine.tensor']}"])
    assert json.loads(capsys.readouterr().out)["engine"]["full_sequences"] >= 1


def test_sweep_lists_all_layouts_best_first(write, capsys) -> None:
    file = write(QWEN3_8B, parallel={"tensor": 8, "sequence": True}, **TWO_NODES)
    with pytest.raises(SystemExit):
        cli.main(["plan", str(file), "--sweep", "--json"])
    swept = json.loads(capsys.readouterr().out)["sweep"]
    sizes = {(c["tensor"], c["pipeline"], c["context"], c["data"]) for c in swept}
    powers = (1, 2, 4, 8)
    assert sizes == {
        (t, p, c, 8 // (t * p * c)) for t in powers for p in powers for c in powers if t * p * c <= 8
    }
    fits = [c["fits"] for c in swept]
    assert fits == sorted(fits, reverse=True)
    assert True in fits
    assert False in fits


@pytest.mark.parametrize(("name", "size"), [("80GiB", 80 * GIB), ("96e9", 96 * 10**9), ("H200-141", None)])
def test_cards(name: str, size: int | None) -> None:
    assert gpu_bytes(name) == (size or 143771 * 1024**2)
    with pytest.raises(UserError, match="did you mean h100-80"):
        gpu_bytes("h100")


def test_tables_fit_80_columns_and_do_not_wrap_in_a_pipe(write: Callable[..., Path]) -> None:
    file = write(QWEN3_8B, parallel={"tensor": 4, "sequence": True})
    # As on a login node: no torch, no vLLM, no Megatron.
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'megatron', 'transformers', 'numpy'): sys.modules[name] = None\n"
        "from rpg_megatron import cli; cli.main()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    printed = {}
    for columns in ("80", ""):
        process = subprocess.run(
            [sys.executable, "-c", code, "plan", str(file), "--sweep"],
            env=environment | ({"COLUMNS": columns} if columns else {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (process.returncode, process.stderr) == (0, "")
        assert "\x1b" not in process.stdout
        for word in ("activations", "KV cache", "exact", "estimated", "layouts, best first"):
            assert word in process.stdout
        assert "…" not in process.stdout
        # The best layout is in one line, to be copied.
        printed[columns] = [line for line in process.stdout.splitlines() if not line.startswith("best:")]
    assert max(map(len, printed["80"])) <= 80
    # Without a width a row is one line, so that grep and a log show it whole.
    facts = ("fits,", "", "model", "policy", "layers", "engines", "GPUs", "prompts", "step", "update")
    assert [line.partition(" ")[0] for line in printed[""][: len(facts)]] == list(facts)


def test_shared_memory_counts_where_the_weights_are_copied(tmp_path: Path, write) -> None:
    def parts(**settings: object) -> dict[str, int]:
        loaded = Settings.model_validate(load_settings(write(QWEN3_06B)).model_dump() | settings)
        shape: ModelShape = read_model_shape(loaded.model.path)
        batch = plan_batch(loaded, shape.max_positions)
        activations = StageActivations(loaded, shape, 0, batch, loaded.device)
        rank = rank_memory(activations, count_gpus(loaded), publishes=True)
        return {p.name: p.nbytes for p in rank.parts if not p.host}

    weights = 2 * 596_049_920
    cpu = {"device": "cpu", "bridge": {"transport": "shared_memory"}}
    assert parts(**cpu)["bridge: copy in shared memory"] == weights
    plain = parts(**cpu, optimizer={"distributed": False})
    assert not any(name.startswith("bridge") for name in plain)  # parameters lie there
    assert "bridge: copy in shared memory" not in parts(bridge=cpu["bridge"])  # the machine's memory
    assert parts(bridge={"transport": "process_group"})["bridge: buckets"] == 256 * 1024**2
    # Five engines take turns with two replicas: three of them read from one.
    group = {"bridge": {"transport": "process_group"}, "engine": {"replicas": 5}}
    assert parts(**group, parallel={"data": 2})["bridge: buckets"] == 3 * 256 * 1024**2
    assert parts(anchor={"type": "fixed"}, **cpu)["held anchor"] == weights
    assert parts(memory={"offload_optimizer": 0.75})["optimizer"] == 12 * 596_049_920 // 4
    assert "optimizer off the GPU" not in parts(memory={"offload_optimizer": 0.75})


QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
EXPERTS = 48 * 128 * 3 * 2048 * 768
OTHERS = 30_532_122_624 - EXPERTS


def test_each_group_of_ranks_has_buffers_and_experts_on_a_node_more(write: Callable[..., Path]) -> None:
    """On two nodes: all ranks, twice, and data x context; in one: the experts' messages and counts; between
    two ranks of them: the gradients of the same experts.
    """
    shared = {"engine": {"colocated": True, "replicas": 16}, "bridge": {"transport": "cuda_ipc"}}
    plan = plan_of(write(QWEN3_30B_A3B, parallel={"data": 16, "expert": 8}, **shared))
    (nccl,) = (part.nbytes for part in plan.largest.parts if part.name == "NCCL buffers")
    assert plan.gpus.nodes[0][0] == 8
    assert nccl == (3 * 654 + 230 + 7 * 384 + 518 + 348) * 1024**2
    assert not any(part.name == "NCCL buffers" for part in plan_of(write(QWEN3_8B)).largest.parts)


@pytest.mark.parametrize(
    ("ranks", "here", "use", "mib"),
    [
        (8, 8, {}, 518),
        (8, 8, {"large": True}, 774),  # 16 channels x 2 directions x 1 MiB for each rank on the switch
        (4, 4, {"large": True}, 518),
        (2, 1, {}, 348),
        (2, 1, {"large": True}, 348),  # no two of its ranks share a switch
        (16, 4, {}, 790),
        (16, 8, {"large": True}, 654 + 256 + 640),
        (4, 4, {"peers": 3, "collectives": False}, 230 + 3 * 384),
        (2, 1, {"peers": 1, "collectives": False}, 44),
        (16, 8, {"peers": 15, "collectives": False}, 134 + 7 * 48 + 16 * 2 * 9),
        (1, 8, {"large": True}, 0),
    ],
)
def test_buffers_of_a_communicator(ranks: int, here: int, use: dict[str, Any], mib: int) -> None:
    """The parts that docs/evidence/plan.md lists: once, a ring, a tree, the switch, messages."""
    assert communicator_bytes(ranks, here, **use) == mib * 1024**2


def test_a_rank_holds_its_share_of_experts_and_their_state(write: Callable[..., Path]) -> None:
    """EP 8 on 16 ranks: two ranks hold the same experts, sixteen the rest."""
    plan = plan_of(write(QWEN3_30B_A3B, parallel={"data": 16, "expert": 8}))
    assert plan.parameters == 30_532_122_624  # as published
    assert worker_parameters(plan.shape, 1) == 30_532_122_624
    assert plan.largest.parameters == OTHERS + EXPERTS // 8
    parts = {p.name: p.nbytes for p in plan.largest.parts}
    assert parts["optimizer"] == 12 * OTHERS // 16 + 12 * EXPERTS // 8 // 2
    split = {"tensor": 2, "sequence": True, "data": 8, "expert": 4, "expert_tensor": 2}
    plan = plan_of(write(QWEN3_30B_A3B, parallel=split))
    optimizer = {p.name: p.nbytes for p in plan.largest.parts}["optimizer"]
    assert optimizer == 12 * (plan.largest.parameters - EXPERTS // 8) // 8 + 12 * EXPERTS // 8 // 2
    # Both tensor ranks of an expert process the tokens that either of them routes.
    assert expert_rows(plan.shape, plan.settings.parallel) == 8
    # At worst all tokens of the 8 ranks choose their 8 experts among the 32 of two ranks.
    assert expert_rows(plan.shape, plan.settings.parallel, worst=True) == 32
    # An engine worker has the routers whole.
    routers, norms, heads = 48 * 128 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048, 2048 * 151936
    cut = 30_532_122_624 - routers - norms - 2 * heads
    assert worker_parameters(plan.shape, 2) == cut // 2 + routers + norms + heads


def test_a_rank_may_get_more_tokens_than_its_expert_share(write: Callable[..., Path]) -> None:
    """At worst every token of the 8 ranks has all its 8 experts among the 16 of one: 8 times the rows."""
    full = write(QWEN3_30B_A3B, parallel={"data": 8, "expert": 8}, memory={"recompute": "full"})
    plan = plan_of(full)
    tokens = plan.batch.tokens_per_microbatch
    row = 2 * (2048 + 3 * 768) + 4  # what a row saves: in bfloat16, and its weight
    gradients = 2 * (2 * 2048 + 3 * 768)
    assert plan.routed_to_one == pytest.approx(tokens * 8 * 7 * (row + gradients), rel=1e-6)
    assert any("assumed to be even" in note for note in plan.warnings)
    assert plan_of(write(QWEN3_8B)).routed_to_one == 0


def test_sweep_tries_expert_parallel_sizes(write: Callable[..., Path]) -> None:
    settings = load_settings(write(QWEN3_30B_A3B, memory={"offload_optimizer": 0.5}, **TWO_NODES))
    plans = sweep(make_plan(settings, "h100-80"), 8)
    sizes = {plan.settings.parallel.expert for plan in plans}
    assert sizes == {1, 2, 4, 8}
    assert plans[0].fits
    assert "parallel.expert=8" in plans[0].overrides
