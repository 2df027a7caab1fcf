"""Estimated step times equal values counted by hand, and are proportional to the limiting resource.

Why: nobody can check such a table against a GPU beforehand, so its arithmetic must be correct and its
assumptions visible. Not covered: whether a real step takes that long; nothing was timed.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rpg_megatron import cli
from rpg_megatron.commands.plan import step_time
from rpg_megatron.commands.plan.gpus import GPUS, Assumptions, assume
from rpg_megatron.commands.plan.plan import make_plan
from rpg_megatron.commands.plan.step_time import (
    ALLREDUCE,
    HANDOVER,
    LINK_EFFICIENCY,
    SLICE,
    TAIL_EFFICIENCY,
    Name,
    StepTime,
    estimate_step,
)
from rpg_megatron.config import load_settings
from tests.support.recipes import EXAMPLES, SEPARATE_8B, SEPARATE_30B

QWEN3_8B = Path(__file__).parents[2] / "examples" / "qwen3_8b_dapo_math_8k.yaml"
LAYERS, HEAD = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288), 4096 * 151936
"""Qwen3-8B's parameters in matrix products: of 36 layers, and of the output layer."""
WEIGHTS = 2 * 8_190_735_360
LENGTH = 8192 + 256
"""Prompt and response, at full length, with a mean prompt of a quarter of 1,024 tokens."""

PLAIN = (
    "response_mean=1",
    "train_mfu=1",
    "score_mfu=1",
    "decode_efficiency=1",
    "decode_overhead=0",
    "step_overhead=0",
)
"""Assumptions that leave one term in each phase."""
HOST_LINK = GPUS["h100-80"].host_link * LINK_EFFICIENCY

ROLLOUT = "{prompts_per_step: 64, samples_per_prompt: 16, max_response_tokens: 8192"
SMALL = (
    f"rollout={ROLLOUT}}}",
    "training.minibatches=4",
    "parallel={tensor: 1, data: 8}",
    "engine={replicas: 8, max_sequences: 64}",
    "bridge.transport=process_group",
    "memory.recompute=none",
    "anchor.type=old",
)
COLOCATED = ("engine={colocated: true, replicas: 8, max_sequences: 64, kv_cache_gib: 36}",)


@pytest.fixture(autouse=True)
def no_overheads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "EXPERT_OVERHEAD", 0)
    monkeypatch.setattr(step_time, "SLICE", 0)


def assumptions(gpu: str, *options: str) -> Assumptions:
    """``assume`` with one more name: the data sheet's nvlink."""
    nvlink = [float(option.partition("=")[2]) for option in options if option.startswith("nvlink=")]
    assumed = assume(gpu, [*PLAIN, *(option for option in options if not option.startswith("nvlink="))])
    return replace(assumed, gpu=replace(assumed.gpu, nvlink=nvlink[0])) if nvlink else assumed


def step_of(*assumed: str, overrides: tuple[str, ...] = (), gpu: str = "h100-80") -> StepTime:
    plan = make_plan(load_settings(QWEN3_8B, [*SMALL, *overrides]), gpu)
    return estimate_step(plan, assumptions(gpu, *assumed))


def seconds(name: Name, *assumed: str, overrides: tuple[str, ...] = ()) -> float:
    return step_of(*assumed, overrides=overrides).seconds(name)


def test_a_decode_step_reads_weights_and_the_kv_cache() -> None:
    """128 responses on an engine, 64 at once; on average half of a response's KV cache is filled."""
    rollout = seconds("rollout", "memory_bandwidth=1e12", "peak_bf16=1e30")
    context, kv = 256 + 4096, 2 * 36 * 8 * 128 * 2
    step_seconds = (2 * (LAYERS + HEAD) + 64 * context * kv) / 1e12
    assert rollout == pytest.approx(128 / 64 * 8192 * step_seconds, rel=1e-9)


def test_decoding_is_bound_by_flops_where_memory_is_fast() -> None:
    rollout = step_of("memory_bandwidth=1e30", "peak_bf16=1e15").phases[0]
    decode = 128 * 8192 * 2 * (LAYERS + HEAD) / 1e15
    prefill = 8 * (2 * (LAYERS + HEAD) * 256 + 2 * 256**2 * 4096 * 36) / 1e15
    assert rollout.seconds == pytest.approx(decode + prefill, rel=1e-9)
    assert rollout.bound == "FLOP/s, 64 at once"


def test_the_longest_response_ends_alone() -> None:
    """Half of the limit on average: one response goes on from 4,096 to 8,192 tokens."""
    tail = seconds("rollout: tail", "response_mean=0.5", "memory_bandwidth=1e12", "peak_bf16=1e30")
    step_seconds = (2 * (LAYERS + HEAD) + (256 + 4096 + 2048) * 147_456) / 1e12
    assert tail == pytest.approx(4096 * step_seconds / TAIL_EFFICIENCY, rel=1e-9)
    assert seconds("rollout: tail") == 0
    assert seconds("rollout: tail", "decode_overhead=0.01", "response_mean=0.5") > 40


def test_log_probs_are_one_forward_pass_attention_included() -> None:
    flops = 2 * (LAYERS + HEAD) * LENGTH + 2 * LENGTH**2 * 4096 * 36
    assert seconds("log-probs", "peak_bf16=1e15") == pytest.approx(128 * flops / 1e15, rel=1e-9)
    swapped = 4 * WEIGHTS / HOST_LINK
    with_anchor = seconds("log-probs", "peak_bf16=1e15", overrides=("anchor.type=fixed",))
    assert with_anchor == pytest.approx(256 * flops / 1e15 + swapped, rel=1e-9)
    assert seconds("log-probs", "peak_bf16=1e30", overrides=("anchor.type=fixed",)) == pytest.approx(swapped)


def test_log_probs_that_an_update_or_the_engine_gives_take_no_pass() -> None:
    by_pass = seconds("log-probs", overrides=("training.old=pass", "training.minibatches=4"))
    three = seconds("log-probs", overrides=("training.old=update", "training.minibatches=4"))
    assert three == pytest.approx(by_pass * 3 / 4, rel=1e-9)
    for none in (("training.minibatches=1",), ("training.old=engine",)):
        assert seconds("log-probs", overrides=none) == 0


def test_a_shared_prompt_is_computed_once_a_group() -> None:
    """8 groups of 16 on a replica, responses of 64 tokens, each of which attends the prompt and itself."""
    short = "rollout={prompts_per_step: 64, samples_per_prompt: 16, max_response_tokens: 64}"
    overrides = (short, "reward.overlong=null", "training.share_prompts=true")
    shared, rest = 255, 64 + 1
    tokens = 8 * (shared + 16 * rest)
    squares = 8 * (shared**2 + 16 * (2 * shared * rest + rest**2))
    flops = 2 * (LAYERS + HEAD) * tokens + 2 * squares * 4096 * 36
    fast = "peak_bf16=1e15"
    assert seconds("log-probs", fast, overrides=overrides) == pytest.approx(flops / 1e15, rel=1e-9)
    responses = seconds("log-probs", fast, overrides=("training.share_prompts=auto",))
    assert responses == seconds("log-probs", fast)  # too short a prompt for responses of 8,192 tokens


def test_a_teacher_that_the_ranks_hold_makes_a_pass_of_its_own() -> None:
    """Of the student's size: as long, after its weights were copied to the GPU; if full, in each update."""
    teacher = f"teacher.path={QWEN3_8B.parent / 'models' / 'Qwen3-8B-Base'}"
    flops = 128 * (2 * (LAYERS + HEAD) * LENGTH + 2 * LENGTH**2 * 4096 * 36)
    fast = "peak_bf16=1e15"
    phases: tuple[tuple[str, Name, int], ...] = (("token", "log-probs", 1), ("full", "update", 4))
    for form, phase, copies in phases:
        overrides = (teacher, f"objective={{type: distil, divergence: rkl, form: {form}}}")
        added = seconds(phase, fast, overrides=overrides) - seconds(phase, fast)
        assert added == pytest.approx(flops / 1e15 + copies * WEIGHTS / HOST_LINK, rel=1e-9)


@pytest.mark.parametrize(
    ("recompute", "layers", "mlp"), [("none", 3, 0), ("selective", 3, 1), ("full", 4, 0)]
)
def test_an_update_is_forward_backward_and_recomputation(recompute: str, layers: int, mlp: int) -> None:
    update = seconds(
        "update",
        "peak_bf16=1e15",
        "memory_bandwidth=1e30",
        "network=1e30",
        "nvlink=1e30",
        overrides=(f"memory.recompute={recompute}",),
    )
    linear = 2 * LENGTH * (layers * LAYERS + mlp * 36 * 3 * 4096 * 12288 + 4 * HEAD)
    attention = layers * 2 * LENGTH**2 * 4096 * 36
    assert update == pytest.approx(128 * (linear + attention) / 1e15, rel=1e-9)


def test_optimizer_and_reduction_of_gradients() -> None:
    infinite = ("peak_bf16=1e30", "memory_bandwidth=1e30")
    moved = (4 + 2) * WEIGHTS / 2 * 7 / 8  # a ring of eight
    off = ("optimizer.overlap=false",)
    assert seconds("update", *infinite, "nvlink=1e9", overrides=off) == pytest.approx(
        4 * moved / 1e9 / LINK_EFFICIENCY
    )
    read = 30 * WEIGHTS / 2 / 8
    update = seconds("update", "peak_bf16=1e30", "nvlink=1e30", "memory_bandwidth=1e12")
    assert update == pytest.approx(4 * read / 1e12, rel=1e-6)
    hidden = seconds("update", "memory_bandwidth=1e30")
    assert seconds("update", "memory_bandwidth=1e30", overrides=off) > hidden


@pytest.mark.parametrize("tensor", [1, 2])
def test_muon_orthogonalises_whole_matrices_on_each_tensor_rank(tensor: int) -> None:
    layout = f"parallel={{tensor: {tensor}, sequence: {str(tensor > 1).lower()}, data: {8 // tensor}}}"

    def update(kind: str) -> float:
        optimizer = f"optimizer={{type: {kind}, distributed: false}}"
        return seconds("update", "peak_bf16=1e15", overrides=(layout, optimizer))

    # Five steps of three products; the smaller side squared is a matrix of its own.
    steps = 36 * 5 * sum(4 * 4096**2 * n + 2 * 4096**3 for n in (6144, 4096, 2 * 12288, 12288))
    assert update("muon") - update("adamw") == pytest.approx(4 * steps / 1e15, rel=1e-9)


def test_pipeline_ranks_wait_by_the_schedule() -> None:
    """128 or 32 rows a replica at two sequences each: 1 + 3 / (virtual x micro-batches)."""
    stages = "parallel={tensor: 1, pipeline: 4, data: 2, virtual: %d}"
    flat = seconds("log-probs")
    for virtual in (1, 3):
        cut = seconds("log-probs", overrides=(stages % virtual,))
        rows = -(-512 * LENGTH // 18432)
        assert cut == pytest.approx(flat * (1 + 3 / virtual / rows), rel=1e-9)


def test_an_update_takes_at_least_one_longest_response() -> None:
    """A mini-batch of 16 short responses for 8 replicas: one of them has the longest."""
    many = "training.minibatches=64"
    phase = step_of("response_mean=0.1", overrides=(many,)).phases[3]
    longest = seconds("update", overrides=("rollout.prompts_per_step=64", "training.minibatches=64"))
    assert phase.bound == "one longest sequence per replica"
    assert phase.seconds == pytest.approx(longest / 2, rel=0.1)


def test_tensor_parallel_ranks_exchange_the_stream() -> None:
    """Forward: two gathers and two scatters of 2 bytes x 4,096 a token and layer, of which a half is sent."""
    layout = ("parallel={tensor: 2, sequence: true, data: 8}",)
    flat, fast = (
        seconds("log-probs", "peak_bf16=1e30", f"nvlink={n}", overrides=layout) for n in (1e9, 1e30)
    )
    tokens = 1024 * LENGTH / 8
    assert flat - fast == pytest.approx(4 / 2 * 2 * 4096 * 36 * tokens / 1e9 / LINK_EFFICIENCY, rel=1e-6)


def test_layers_in_fp8_are_as_much_faster_as_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and the output layer are not."""
    monkeypatch.setattr(step_time, "FP8_GAIN", 2)
    fp8 = ("precision.fp8={recipe: blockwise}",)
    linear = 2 * LENGTH * LAYERS * 128 / 1e15
    plain, faster = (seconds("log-probs", "peak_bf16=1e15", overrides=o) for o in ((), fp8))
    assert plain - faster == pytest.approx(linear / 2, rel=1e-6)


def test_every_pass_over_the_batch_takes_its_time() -> None:
    assert seconds("update", overrides=("training.ppo_epochs=3",)) == pytest.approx(3 * seconds("update"))


def test_a_sync_takes_as_long_as_the_busiest_end() -> None:
    """Engines take turns with the replicas; a replica's ranks share the work; a worker receives its own."""
    one_copy = WEIGHTS / 1e9 / LINK_EFFICIENCY

    def group(data: int, tensor: int, engines: int) -> float:
        layout = f"parallel={{tensor: {tensor}, data: {data}}}"
        return seconds("sync", "network=1e9", overrides=(layout, f"engine.replicas={engines}"))

    assert group(1, 1, 8) == pytest.approx(8 * one_copy, rel=1e-3)
    assert group(1, 4, 8) == pytest.approx(2 * one_copy, rel=1e-3)
    assert group(2, 2, 8) == pytest.approx(2 * one_copy, rel=1e-3)
    assert group(4, 1, 9) == pytest.approx(3 * one_copy, rel=1e-3)
    assert group(8, 1, 8) == pytest.approx(one_copy, rel=1e-3)
    assert group(2, 4, 1) == pytest.approx(one_copy, rel=1e-3)
    bounds = [step_of(overrides=(f"engine={{replicas: {n}}}",)).phases[4].bound for n in (16, 8)]
    assert bounds == ["network, busiest sender", "network, an engine worker"]
    ipc = (*COLOCATED, "bridge.transport=cuda_ipc")
    assert seconds("sync", "nvlink=1e9", overrides=ipc) == pytest.approx(one_copy, rel=1e-3)


def test_a_mixtures_sync_takes_what_the_hosts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """18,867 tensors of 3B active parameters: their number costs more than their bytes over NVLink."""
    monkeypatch.setattr(step_time, "SLICE", SLICE)
    plan = make_plan(load_settings(EXAMPLES / "moe" / "qwen3_30b_a3b_dapo_math_8k.yaml"), "h100-80")
    sync = next(phase for phase in estimate_step(plan, assume("h100-80")).phases if phase.name == "sync")
    assert sync.bound == "hosts, 18,867 slices"
    assert SLICE * 18_867 < sync.seconds < 2 * SLICE * 18_867


def test_a_shared_gpu_is_handed_over_twice() -> None:
    """12 bytes of state for each parameter, over eight replicas, and the engine's graphs, there and back."""
    handover, moved = seconds("handover", overrides=COLOCATED), 12 * WEIGHTS / 2 / 8 + 512 * 1024**2
    assert handover == pytest.approx(2 * HANDOVER + 2 * moved / HOST_LINK, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "phase"),
    [
        ("memory_bandwidth", 1e12, "rollout: tail"),
        ("peak_bf16", 1e14, "log-probs"),
        ("network", 1e9, "sync"),
        ("score_mfu", 0.2, "log-probs"),
    ],
)
def test_twice_the_speed_is_half_the_time(name: str, value: float, phase: Name) -> None:
    slow, fast = (seconds(phase, "response_mean=0.4", f"{name}={v}") for v in (value, 2 * value))
    assert fast == pytest.approx(slow / 2, rel=1e-9)


def test_decoding_reads_at_a_fraction_of_the_bandwidth() -> None:
    plain = "memory_bandwidth=1e12", "peak_bf16=1e30"
    slow, fast = (seconds("rollout", *plain, f"decode_efficiency={n}") for n in (0.3, 0.6))
    assert fast == pytest.approx(slow / 2, rel=1e-9)


def test_long_responses_take_more_attention_and_decode_longer() -> None:
    """Log-normal: with a mean of 0.3 and a 90th percentile of 0.6 of the limit, E[n^2] is 1.85 of mean^2."""
    sigma = 1.2816 - (1.2816**2 - 2 * math.log(2)) ** 0.5
    spread = math.exp(sigma**2)
    lengths = "response_mean=0.3", "response_p90=0.6"
    mean = 0.3 * 8192
    squares = 256**2 + 2 * 256 * mean + spread * mean**2
    flops = 2 * (LAYERS + HEAD) * (256 + mean) + 2 * squares * 4096 * 36
    assert seconds("log-probs", "peak_bf16=1e15", *lengths) == pytest.approx(128 * flops / 1e15, rel=1e-9)
    fast = "memory_bandwidth=1e12", "peak_bf16=1e30"
    kv = 2 * 36 * 8 * 128 * 2
    read = 2 * (LAYERS + HEAD)
    batch = (read + 64 * (256 + spread * mean / 2) * kv) / 1e12
    assert seconds("rollout", *fast, *lengths) == pytest.approx(2 * mean * batch, rel=1e-9)
    third = (read + 64 / 3 * (256 + 0.45 * 8192) * kv) / 1e12
    alone = (read + (256 + 0.8 * 8192) * kv) / 1e12 / TAIL_EFFICIENCY
    tail = 0.3 * 8192 * third + 0.4 * 8192 * alone
    assert seconds("rollout: tail", *fast, *lengths) == pytest.approx(tail, rel=1e-9)


def test_dynamic_sampling_draws_more_than_it_trains_on() -> None:
    overrides = (f"rollout={ROLLOUT}, dynamic: {{}}}}",)
    assert seconds("rollout", "kept_groups=0.5", overrides=overrides) == pytest.approx(2 * seconds("rollout"))
    assert seconds("log-probs", "kept_groups=0.5", overrides=overrides) == seconds("log-probs")


AHEAD = ("rollout.ahead=1", "correction.type=truncate")


def test_placements_add_up() -> None:
    assumed = ("response_mean=0.4", "step_overhead=3")
    turns = step_of(*assumed)
    twice = ("parallel.data=16", COLOCATED[0].replace("replicas: 8", "replicas: 16"))
    shared = step_of(*assumed, overrides=twice)
    assert [s.placement for s in (turns, shared)] == ["by turns", "colocated"]
    rollout, training = turns.seconds("rollout"), turns.seconds("log-probs", "update")
    tail, sync = turns.seconds("rollout: tail"), turns.seconds("sync")
    assert turns.step == pytest.approx(rollout + tail + training + sync + 3)
    # Twice the GPUs for each: half the time, but for the longest response.
    assert shared.seconds("log-probs") == pytest.approx(turns.seconds("log-probs") / 2)
    assert shared.seconds("rollout") == pytest.approx(rollout / 2, rel=0.01)
    assert shared.seconds("rollout: tail") == tail


def test_sampling_ahead_takes_the_longer_of_both_phases() -> None:
    assumed = ("response_mean=0.4", "step_overhead=3")
    turns, beside = step_of(*assumed), step_of(*assumed, overrides=AHEAD)
    drained = step_of(*assumed, overrides=(*AHEAD, "rollout.inflight=drain"))
    assert [s.placement for s in (turns, beside, drained)] == ["by turns", "overlapped", "overlapped"]
    assert beside.phases == turns.phases == drained.phases
    rollout, tail, sync = (turns.seconds(name) for name in ("rollout", "rollout: tail", "sync"))
    training = turns.seconds("log-probs", "update")
    assert tail > 0
    in_time = (rollout + tail + training + sync + 3) / 2  # two steps hold a batch to its longest response
    assert beside.step == pytest.approx(in_time)
    assert in_time > max(rollout, training) + sync + 3
    longer = step_of(*assumed, overrides=("rollout.ahead=4", AHEAD[1]))
    assert longer.step == pytest.approx(max(rollout, training) + sync + 3)
    assert drained.step == pytest.approx(max(rollout + tail, training) + sync + 3)  # the tail is waited for
    assert (beside.generation, drained.generation) == (rollout, rollout + tail)


def test_steps_sampled_ahead_are_in_host_memory() -> None:
    def sampler(*overrides: str) -> int:
        plan = make_plan(load_settings(QWEN3_8B, [*SMALL, *overrides]), "h100-80")
        (part,) = (part.nbytes for part in plan.host if "sampler" in part.name)
        return part

    # Four of eight leaders have their shares there, half a step.
    assert sampler(AHEAD[1], "rollout.ahead=2") == sampler() * 7 // 3


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["plan", str(QWEN3_8B), *SEPARATE_8B, *arguments])
    captured = capsys.readouterr()
    return exit_info.value.code, captured.out, captured.err  # type: ignore[return-value]


def test_the_command_says_where_each_number_comes_from(capsys) -> None:
    code, out, _ = command(capsys, "--json", "--assume", "train-mfu=0.5", "--assume", "network=2e11")
    times = json.loads(out)["step_time"]
    assert (code, times["measured"]) == (0, False)
    assumed = times["assumptions"]
    assert assumed["train_mfu"] == {"value": 0.5, "source": "as set"}
    assert assumed["memory_bandwidth"] == {"value": 3.35e12, "source": "data sheet"}
    assert assumed["score_mfu"]["source"] == "assumed"
    first = times["placements"][0]
    assert first["placement"] == "by turns"
    assert sum(p["seconds"] for p in first["phases"]) == pytest.approx(first["step_seconds"])
    assert first["tokens_per_second"] == pytest.approx(first["trained_tokens"] / first["step_seconds"])
    code, out, _ = command(capsys, "--assume", "train_mfu=0.5")
    for words in ("computed, not measured", "data sheet", "as set", "bound by"):
        assert words in out


def test_speeds_follow_the_gpu() -> None:
    a, b = (assume(name) for name in ("h100-80", "h200-141"))
    assert b.memory_bandwidth / a.memory_bandwidth == pytest.approx(4.8 / 3.35)
    size = assume("48GiB")
    assert replace(size, sources=a.sources) == a
    assert size.sources["peak_bf16"] == "assumed"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("mfu=0.5", "'mfu' is not an assumption; did you mean train_mfu?"),
        ("train_mfu=fast", "train_mfu: needs a positive number of at most 1, has 'fast'"),
        ("train_mfu=40", "of at most 1, has '40'"),
        ("network=0", "network: needs a positive number such as 0.5 or 3e12, has '0'"),
        ("network", "has ''"),
        ("step_overhead=nan", "has 'nan'"),
        ("nvlink=1e9", "'--assume nvlink' is gone; choose a GPU with --gpu: it is the data sheet's"),
        ("--solve=response_mean=rollout", "NAME=PHASE:SECONDS, such as response_mean=rollout:240"),
        ("--solve=response_mean=rollouts:240", "phases: step, rollout, log-probs, update, sync"),
        ("--solve=response_mean=rollout:-3", "must be NAME=PHASE:SECONDS"),
        ("--solve=response=rollout:240", "'response' is not an assumption; did you mean response_p90?"),
        ("--solve=response_mean=rollout:1e9", "with any response_mean, rollout takes "),
    ],
)
def test_an_impossible_assumption_is_one_line(capsys, option: str, words: str) -> None:
    code, out, err = command(capsys, option if option.startswith("--") else f"--assume={option}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match("error: '?--(assume|solve)", err), err
    assert words in err


def test_times_are_of_gpus(capsys) -> None:
    quickstart = QWEN3_8B.with_name("quickstart.yaml")
    with pytest.raises(SystemExit):
        cli.main(["plan", str(quickstart), "--json"])
    assert json.loads(capsys.readouterr().out)["step_time"] is None
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["plan", str(quickstart), "--assume", "network=1e9"])
    err = capsys.readouterr().err
    assert (exit_info.value.code, err.count("\n")) == (2, 1)
    assert "time is estimated for GPUs only" in err


QWEN3_30B_A3B = Path(__file__).parents[2] / "examples" / "moe" / "qwen3_30b_a3b_dapo_math_8k.yaml"


def test_a_mixture_token_costs_its_experts_and_their_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs at full speed: 8 of 128 experts and the router; at EP 8, 7 of 8 rows go to other GPUs. What a
    token costs beside products is at least as long as the exchange of its rows.
    """
    plan = make_plan(load_settings(QWEN3_30B_A3B, [*SEPARATE_30B, "anchor.type=old"]), "h100-80")
    layer = 2048 * (2 * 4096 + 2 * 512 + 3 * 8 * 768 + 128)
    sequences, length = 8192, 8192 + 256
    flops = 2 * length * (48 * layer + 2048 * 151936) + 2 * length**2 * 4096 * 48
    sent = 2 * 48 * 8 * 2048 * 2 * 7 / 8 * length / LINK_EFFICIENCY  # bytes of a sequence, there and back
    per_gpu = sequences / 8
    for name, options, overhead, seconds in (
        ("FLOP/s, 1 pass", ["peak_bf16=1e15", "nvlink=1e30"], 0, per_gpu * flops / 1e15),
        ("communication, 1 pass", ["peak_bf16=1e30", "nvlink=1e11"], 0, per_gpu * sent / 1e11),
        ("communication, 1 pass", ["peak_bf16=1e30", "nvlink=1e30"], 2e-6, per_gpu * length * 48 * 2e-6),
    ):
        monkeypatch.setattr(step_time, "EXPERT_OVERHEAD", overhead)
        step = estimate_step(plan, assumptions("h100-80", *options))
        phase = next(p for p in step.phases if p.name == "log-probs")
        assert phase.seconds == pytest.approx(seconds, rel=1e-9)
        assert phase.bound == name


def test_decoding_reads_the_experts_that_a_batch_chooses() -> None:
    one, many = (
        estimate_step(
            make_plan(load_settings(QWEN3_30B_A3B, [*SEPARATE_30B, f"engine.max_sequences={n}"]), "h100-80"),
            assume("h100-80", [*PLAIN, "memory_bandwidth=1e12", "peak_bf16=1e30"]),
        ).seconds("rollout")
        for n in (1, 64)
    )
    sequences, context = 8192 / 0.6 / 4, 256 + 4096
    for seconds, batch in ((one, 1), (many, 64)):
        chosen = 128 * (1 - (1 - 8 / 128) ** batch)
        layer = 2048 * (2 * 4096 + 2 * 512 + 3 * chosen * 768 + 128)
        read = 2 * (48 * layer + 2048 * 151936) / 2 + batch * context * 2 * 48 * 2 * 128 * 2
        step_seconds = read / 1e12 + 2 * 48 * ALLREDUCE
        assert seconds == pytest.approx(sequences / batch * 8192 * step_seconds, rel=1e-6)


def test_an_assumption_is_solved_from_a_known_time(capsys) -> None:
    code, out, _ = command(capsys, "--json", "--solve", "response_mean=rollout:3000")
    times = json.loads(out)["step_time"]
    assert (code, times["assumptions"]["response_mean"]["source"]) == (0, "solved")
    phases = {phase["name"]: phase["seconds"] for phase in times["placements"][0]["phases"]}
    assert phases["rollout"] + phases["rollout: tail"] == pytest.approx(3000, rel=1e-6)
    _, out, _ = command(capsys, "--json", "--solve", "train_mfu=update:600")
    (update,) = (p for p in json.loads(out)["step_time"]["placements"][0]["phases"] if p["name"] == "update")
    assert update["seconds"] == pytest.approx(600, rel=1e-6)
