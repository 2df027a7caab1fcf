"""What dividing logits by the temperature in bfloat16 does to an engine's log-probs, and which engines avoid
it.

Why: vLLM's model runner V2 keeps bfloat16 logits and divides them in place; the trainer divides in float32.
The second rounding is a mismatch that nobody can tell from that of bfloat16 layers, and adds to it. Logits
are made up, with a few candidates for each token; everything but the roundings is float64. The figures in
docs/performance.md are printed by ``python tests/unit/test_engine_rounding.py``. That vLLM does so is held
by test_vllm_contract. Not covered: a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rpg_megatron.config import load_settings
from rpg_megatron.config.objective import GuardSettings
from rpg_megatron.engine.command import engine_environment

TOKENS, VOCABULARY = 1000, 2048
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def make_logits() -> Tensor:
    """[tokens, vocabulary], float64: the largest are 16 to 28, as those of language models are."""
    g = torch.Generator().manual_seed(0)
    rest = 2.5 * torch.randn(TOKENS, VOCABULARY, generator=g, dtype=torch.float64)
    largest = 16 + 12 * torch.rand(TOKENS, 1, generator=g, dtype=torch.float64)
    gaps = -(1 - torch.rand(TOKENS, 8, generator=g, dtype=torch.float64)).log() / 0.6
    gaps[:, 0] = 0
    return rest.scatter(1, torch.randint(VOCABULARY, (TOKENS, 8), generator=g), largest - gaps.cumsum(1))


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def mismatch(logits: Tensor, temperature: float, *, v2: bool, noise: float = 0.0) -> tuple[float, float]:
    """Mean and largest |engine - trainer| of sampled tokens' log-probs, nats.

    noise: standard deviation by which engine's and trainer's logits each differ from the true ones, as their
    bfloat16 layers make them.
    """
    g = torch.Generator().manual_seed(1)
    sides = [rounded(logits + noise * torch.randn(logits.shape, generator=g)) for _ in range(2)]
    engine, trainer = (side / temperature for side in sides)
    engine, trainer = (rounded(engine) if v2 else engine).log_softmax(1), trainer.log_softmax(1)
    token = torch.multinomial(engine.exp(), 1, generator=g)
    gap = (engine - trainer).gather(1, token).abs()
    return gap.mean().item(), gap.max().item()


def test_dividing_in_bfloat16_is_a_mismatch_of_its_own() -> None:
    logits = make_logits()
    assert mismatch(logits, 1.0, v2=True) == (0, 0)
    assert mismatch(logits, 0.7, v2=False) == (0, 0)
    mean, largest = mismatch(logits, 0.7, v2=True)
    assert 0.01 < mean < 0.03
    assert largest > 0.1
    assert mean < GuardSettings().thresholds("bfloat16")[1]  # so the guard would not notice


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["device=cuda", "precision.dtype=bfloat16", "rollout.temperature=0.7"], "0"),
        (["device=cuda", "precision.dtype=bfloat16"], None),
        (["device=cuda", "precision.dtype=float32", "rollout.temperature=0.7"], None),
        (["device=cpu", "precision.dtype=bfloat16", "rollout.temperature=0.7"], None),
    ],
)
def test_engines_divide_as_the_trainer_does(
    overrides: list[str],
    wanted: str | None,
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = load_settings(config_file, overrides)
    monkeypatch.delenv(RUNNER, raising=False)
    assert engine_environment(settings, 0, tmp_path, "secret").get(RUNNER) == wanted
    monkeypatch.setenv(RUNNER, "1")  # what the user says holds
    assert engine_environment(settings, 0, tmp_path, "secret")[RUNNER] == "1"


if __name__ == "__main__":
    for noise in (0.0, 0.01, 0.03):
        for temperature in (1.0, 0.7):
            row = [mismatch(make_logits(), temperature, v2=v2, noise=noise) for v2 in (False, True)]
            told = ", ".join(f"mean {mean:.4f} largest {largest:.3f}" for mean, largest in row)
            print(f"noise {noise}, temperature {temperature}: V1 and V2: {told}")
