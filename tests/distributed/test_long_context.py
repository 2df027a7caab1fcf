"""Long and uneven sequences: packed rows, context ranks and recomputation change no gradient.

Why: each of them reorders sums or cuts sequences, and a mistake shows as a plausible loss. Real Megatron-Core
in float32 over gloo; the reference is the same batch without the feature, one sequence at a time where
packing is what is tested. Single-token responses and sequences as long as the budget are in every batch.
Not covered here: the numbers against transformers in float64 (test_layouts), GPUs, the engine.
"""

from __future__ import annotations

import itertools
import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.policies import trajectory_of
from benchmarks.shared_prompts import CHUNK, build_policy, make_checkpoint, run_policy
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from tests.support.allocations import AllocationWatch
from tests.support.layouts import SMOOTH, make_case, make_layout_model, ragged_batch
from tests.support.ranks import ranks, run_ranks

TOKENS, VOCABULARY = 8192, 151_936
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP1": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "TP2+SP": (2, {"tensor": 2, "sequence": True}),
    "PP2": (2, {"pipeline": 2}),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual": 2}),
    "CP2": (2, {"context": 2}),
    "DP2": (2, {"data": 2}),
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}),
    "TP2xPP2+SP": (4, {"tensor": 2, "pipeline": 2, "sequence": True}),
    "CP2xTP2": (4, {"context": 2, "tensor": 2}),
    "CP2xTP2+SP": (4, {"context": 2, "tensor": 2, "sequence": True}),
    "CP2xPP2": (4, {"context": 2, "pipeline": 2}),
    "CP2xPP2xVPP2": (4, {"context": 2, "pipeline": 2, "virtual": 2}),
    "CP4": (4, {"context": 4}),
}


def case(folder: Path, parallel: dict[str, Any], microbatches: int, budget: int, **sections: Any) -> Any:
    training = {"minibatches": 1, "tokens_per_microbatch": budget, "logprob_chunk": 300}
    sections = {"memory": {"recompute": "none"}, **SMOOTH, **sections, "training": training}
    return make_case(folder / "model", parallel, microbatches, sections, after=False)


def run_cases(folder: Path, cases: dict[str, Any], world: int, timeout: float = 240) -> dict[str, Any]:
    (folder / "cases.json").write_text(json.dumps(cases))
    return run_ranks("tests.distributed.layout_worker", world, folder, timeout=timeout)


def compare(
    folder: Path, results: dict[str, Any], name: str, reference: str, tolerance: float = 1e-5
) -> None:
    """Loss and every gradient, relative to the mean |loss| of a token and a tensor's largest element."""
    actual, expected = results[name]["update"], results[reference]["update"]
    assert actual["tokens"] == expected["tokens"], name
    assert abs(actual["loss"] - expected["loss"]) <= tolerance * expected["abs_loss"], name
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), name
    gradients, reference_gradients = (
        load_file(folder / "gradients" / n / "model.safetensors") for n in (name, reference)
    )
    assert set(gradients) == set(reference_gradients), name
    for key, gradient in reference_gradients.items():
        error = (gradients[key] - gradient).abs().max() / gradient.abs().max()
        assert error <= tolerance, f"{name}: gradient of {key} off by {error:.1e} of its largest element"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One ragged batch on two ranks: cut by data, by context, by tensor, and with recomputation."""
    folder = tmp_path_factory.mktemp("two_ranks")
    make_layout_model(folder / "model", tied=False)
    (folder / "batch.pkl").write_bytes(pickle.dumps(ragged_batch(3, longest=130, count=9)))
    layouts = {name: LAYOUTS[name][1] for name in ("DP2", "CP2", "TP2+SP", "PP2")}
    cases = {
        f"{name}, {recompute}": case(folder, parallel, 0, 130, memory={"recompute": recompute})
        for name, parallel in layouts.items()
        for recompute in (("none",) if name == "DP2" else ("none", "selective", "full"))
    }
    return folder, run_cases(folder, cases, 2)


def test_two_context_ranks_do_not_halve_the_gradient(two_ranks: tuple[Path, dict[str, Any]]) -> None:
    """The loss is divided by the tokens of the mini-batch, of which each context rank counts all or none."""
    folder, results = two_ranks
    compare(folder, results, "CP2, none", "DP2, none")


@pytest.mark.parametrize("layout", ["CP2", "TP2+SP", "PP2"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradient(
    two_ranks: tuple[Path, dict[str, Any]], layout: str, recompute: str
) -> None:
    folder, results = two_ranks
    compare(folder, results, f"{layout}, {recompute}", f"{layout}, none", tolerance=1e-7)


@pytest.mark.parametrize("batches", [3, pytest.param(200, marks=pytest.mark.long)])
def test_packed_equals_one_sequence_at_a_time(tmp_path: Path, batches: int) -> None:
    make_layout_model(tmp_path / "model", tied=False)
    cases = {}
    for seed in range(batches):
        batch = ragged_batch(seed, longest=513, count=10)  # 1 to 512 places
        file = tmp_path / f"batch_{seed}.pkl"
        file.write_bytes(pickle.dumps(batch))
        for name, count in (("packed", 0), ("alone", len(batch))):
            cases[f"{seed}, {name}"] = {**case(tmp_path, {}, count, 513), "batch": file.name}
    results = {}
    # Torch's process groups, and with them 60 threads and 80 files a case, last as long as the process.
    for group in itertools.batched(cases.items(), 40):
        results |= run_cases(tmp_path, dict(group), 1, timeout=500)
    for seed in range(batches):
        compare(tmp_path, results, f"{seed}, packed", f"{seed}, alone")


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(5))
def test_long_packs_equal_one_sequence_at_a_time_in_every_layout(tmp_path: Path, seed: int) -> None:
    make_layout_model(tmp_path / "model", tied=False)
    batch = ragged_batch(seed, longest=8192, count=10)
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(batch))
    results = run_cases(tmp_path, {"alone": case(tmp_path, {}, len(batch), 8192)}, 1, timeout=1200)
    for world in (1, 2, 4):
        cases = {
            name: case(tmp_path, parallel, 0, 8192)
            for name, (ranks, parallel) in LAYOUTS.items()
            if ranks == world
        }
        results |= run_cases(tmp_path, cases, world, timeout=3000)
    for name in LAYOUTS:
        compare(tmp_path, results, name, "alone")


def plain_peak(tokens: int, *, backward: bool) -> int:
    """Peak bytes of log_softmax and entropy on full logits, beyond weight and hidden states."""
    hidden = torch.randn(tokens, 256, requires_grad=backward)
    weight = torch.randn(VOCABULARY, 256, requires_grad=backward)
    targets = torch.randint(0, VOCABULARY, (tokens, 1))
    with AllocationWatch() as watch:
        log_p = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
        rows = log_p.gather(1, targets)[:, 0] - (log_p.exp() * log_p).sum(-1)
        if backward:
            rows.sum().backward()
    return watch.peak - (4 * weight.numel() if backward else 0)


def head_peaks(policy: Policy) -> dict[str, Any]:
    """Peak bytes of our log-prob pass and update, without the gradient of the output weight, and the elements
    of their largest tensor.
    """
    rng = np.random.default_rng(0)
    cuts = [0, 1, 9, TOKENS // 16, TOKENS // 3, TOKENS]
    sequences = [rng.integers(1, VOCABULARY, b - a + 1).astype(np.int32) for a, b in pairwise(cuts)]
    packs = [policy.pack([trajectory_of(s, 1, i) for i, s in enumerate(sequences)])]
    assert packs[0].size == TOKENS
    with AllocationWatch() as scoring:
        policy.logprobs(packs)
    with AllocationWatch() as update:
        run_policy(policy, packs)
    largest = max(torch.Size(w.largest).numel() for w in (scoring, update))
    return {"scoring": scoring.peak, "update": update.peak - 4 * 256 * VOCABULARY, "largest": largest}


@ranks(1)
def measure_peaks(folder: Path) -> dict[str, Any]:
    """Peaks of the log-prob head, ours and plain torch's."""
    mesh, device = start_mesh(ParallelSettings()), torch.device("cpu")
    model = make_checkpoint(folder / "model", VOCABULARY)
    result = head_peaks(build_policy(model, mesh, device, TOKENS))
    result |= {"tokens": TOKENS, "vocab": VOCABULARY, "chunk": CHUNK}
    for name, backward in (("scoring", False), ("update", True)):
        result[f"plain {name}"] = [plain_peak(n, backward=backward) for n in (1024, 2048)]
    return result


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_memory_at_8192_tokens_and_a_real_vocabulary(tmp_path: Path) -> None:
    """Beyond weights and gradients: hidden states and 2.5 chunks of logits, and no tensor of all logits.

    Hidden states are those of the two layers that are kept, what the layers add while they are computed
    again included. Plain torch needs over ten times as much at 8192 tokens, by a line through 1024 and 2048.
    """
    peaks = measure_peaks(tmp_path, timeout=2400)
    tokens, vocab, chunk = peaks["tokens"], peaks["vocab"], peaks["chunk"]
    assert (tokens, vocab) == (8192, 151936)
    hidden_states = 4 * tokens * 256 * 3  # what goes into each layer, and what comes out of the last
    for name in ("scoring", "update"):
        assert peaks[name] <= hidden_states + 2.5 * 4 * chunk * vocab, (name, peaks)
        small, large = peaks[f"plain {name}"]
        assert small + (large - small) * 7 >= 10 * peaks[name], (name, peaks)
    assert peaks["largest"] == chunk * vocab
