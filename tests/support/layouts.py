"""Cases that compare parallel layouts: their settings, batches, and a float64 reference by transformers."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rpg_megatron.data.prompts import TextCodec
from rpg_megatron.data.trajectory import NOT_SAMPLED, Trajectory
from rpg_megatron.engine.client import Sample
from rpg_megatron.rewards.reward import Score
from rpg_megatron.rollout.conversation import Conversation
from rpg_megatron.rollout.groups import GroupTask
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model

TEMPERATURE = 0.7
SP = {"tensor": 2, "sequence": True}
FULL, SELECTIVE = {"memory": {"recompute": "full"}}, {"memory": {"recompute": "selective"}}

OBJECTIVES: dict[str, dict[str, Any]] = {
    "rpg": {"objective": {"beta": 0.05}, "anchor": {"type": "fixed"}},
    "rpg, entropy bonus": {"objective": {"beta": 0.05, "entropy_bonus": 0.5}, "anchor": {"type": "fixed"}},
    "gspo": {
        "objective": {"type": "gspo", "low": 0.1, "high": 0.1, "entropy_bonus": 0.3},
        "advantage": {"type": "grpo"},
        "aggregation": {"type": "sequence_mean"},
    },
    "rejected tokens": {
        "objective": {"beta": 0.05},
        "anchor": {"type": "fixed"},
        "correction": {"type": "icepop", "low": 0.8, "high": 1.1, "denominator": "kept"},
    },
    "rejected sequences": {
        "objective": {"beta": 0.05, "entropy_bonus": 0.3},
        "anchor": {"type": "fixed"},
        "aggregation": {"type": "sequence_mean"},
        "correction": {"type": "geometric", "low": 0.98, "high": 1.02, "denominator": "kept"},
    },
}


TURNS = {
    0: (2, 1, 1),
    1: (0, 2, 1),
    3: (20, 30, 10, 15, 5),
    4: (1, 1, 1),
    5: (0, 10, 40, 7),
    8: (19, 1),
    9: (1, 88, 1),
    10: (0, 1, 1),
    11: (12,),
}
"""Prompt of ``make_batch`` -> lengths of its response's parts: sampled, not sampled, sampled, and so on."""


def make_layout_model(folder: Path, *, tied: bool) -> PreTrainedModel:
    """The model of most cases, a Qwen3: its vocabulary is divided by no tensor-parallel size."""
    sizes = {"vocab_size": 251, "intermediate_size": 160, "num_hidden_layers": 4}
    return make_model(folder, noise=0.08, tie_word_embeddings=tied, **sizes)


def make_batch() -> list[Trajectory]:
    """Twelve ragged trajectories, some prompts and responses of a single token."""
    random = np.random.default_rng(1)
    sizes = [
        (3, 4),
        (30, 3),
        (1, 1),
        (40, 80),
        (2, 3),
        (7, 57),
        (1, 63),
        (5, 1),
        (9, 20),
        (3, 90),
        (1, 2),
        (12, 12),
    ]
    return [
        Trajectory(
            prompt_id=i,
            sample=0,
            prompt=random.integers(0, 251, p).astype(np.int32),
            response=random.integers(0, 251, r).astype(np.int32),
            behaviour=np.zeros(r, np.float32),
            versions=np.zeros(r, np.int32),
            finish="stop",
            text="",
            advantage=float(random.normal()),
        )
        for i, (p, r) in enumerate(sizes)
    ]


def make_masked_batch() -> list[Trajectory]:
    """``make_batch`` with responses of several parts (``TURNS``); the other trajectories get no mask."""
    batch = make_batch()
    for i, lengths in TURNS.items():
        t = batch[i]
        t.mask = np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)
        t.versions = np.where(t.mask, 0, NOT_SAMPLED).astype(np.int32)
        assert len(t.mask) == len(t.response)
    return batch


def branched_batch() -> tuple[list[Trajectory], list[tuple[tuple[Trajectory, int], Trajectory]]]:
    """Rows of four conversations that a conversation's bookkeeping made, and their turns.

    Five turns in three rows: the second rewrites the first, the third continues the first, the fourth has
    another prompt, the fifth continues the second. A turn is a trajectory of its own, with its place in the
    row that has its mask.
    """
    random = np.random.default_rng(5)
    codec = TextCodec(str, str.split, str)
    rows, turns = [], []

    async def sample(number: int) -> None:
        draw = lambda count: random.integers(0, 251, count).astype(np.int32)  # noqa: E731
        prompt = draw(3 + 2 * number)
        task = GroupTask(number, 0, prompt, "", samples=1, seed=1, max_tokens=200, version=0)
        conversation = Conversation(task, 0, tuple(prompt.tolist()), 251, codec, lambda: None)

        async def turn(tokens: Any, count: int) -> Any:
            waiting = asyncio.ensure_future(conversation.generate(tuple(tokens), branch=True))
            while not conversation.is_due:
                await asyncio.sleep(0)
            conversation.add(Sample(draw(count), np.zeros(count, np.float32), "stop", 0))
            made.append(await waiting)
            return made[-1].context

        made: list[Any] = []
        first = await turn(prompt, 4)
        second = await turn([*prompt, *draw(2)], 1 + number)
        await turn([*first, *draw(3)], 6)
        await turn(draw(5), 9)
        await turn([*second, *draw(1)], 20)
        score = Score(0.0, False, None, "", {})
        own = conversation.trajectories(conversation.response(), score)
        assert len(own) == 3
        advantage = float(random.normal())
        for row in own:
            row.prompt_id, row.advantage = len(rows), advantage
            rows.append(row)
        for each in made:
            (place,) = ((row, len(each.before) - len(row.prompt)) for row in own if _samples(row, each))
            turns.append((place, _one_turn(each)))

    for number in range(4):
        asyncio.run(sample(number))
    return rows, turns


def _samples(row: Trajectory, turn: Any) -> bool:
    """Whether a row has a turn, marked as sampled."""
    whole, start = (*row.prompt.tolist(), *row.response.tolist()), len(turn.before) - len(row.prompt)
    if whole[: len(turn.context)] != turn.context or start < 0:
        return False
    return bool(row.mask[start : start + len(turn.sampled)].all())


def _one_turn(turn: Any) -> Trajectory:
    count = len(turn.sampled)
    return Trajectory(
        prompt_id=0,
        sample=0,
        prompt=turn.before,
        response=turn.sampled,
        behaviour=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        finish="stop",
        text="",
    )


def write_rewarded_batch(folder: Path, group: int) -> list[Trajectory]:
    """Write ``model``, and ``batch.pkl`` with rewards and masks in groups of this size; returns the batch."""
    make_layout_model(folder / "model", tied=False)
    batch = make_masked_batch()
    for i, t in enumerate(batch):
        t.reward, t.group, t.sample = math.sin(i), i // group, i % group
    (folder / "batch.pkl").write_bytes(pickle.dumps(batch))
    return batch


def reference_logprobs(
    model: PreTrainedModel, batch: list[Trajectory]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-prob and entropy of each response token, one sequence at a time, in the model's precision."""
    rows = []
    for t in batch:
        whole = torch.tensor(np.concatenate([t.prompt, t.response]), dtype=torch.long)
        logits = model(whole[None, :-1]).logits[0, len(t.prompt) - 1 :] / TEMPERATURE
        log_p = torch.log_softmax(logits, -1)
        rows.append((log_p.gather(1, whole[len(t.prompt) :, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    return rows


def score_batch(model: PreTrainedModel, batch: list[Trajectory]) -> list[tuple[Any, Any]]:
    """``reference_logprobs`` as arrays; sets ``old`` and ``anchor`` of the batch near them."""
    with torch.no_grad():
        rows = [(logp.numpy(), entropy.numpy()) for logp, entropy in reference_logprobs(model, batch)]
    for t, (logp, _) in zip(batch, rows, strict=True):
        random = np.random.default_rng(t.prompt_id)
        t.old = (logp + random.normal(0, 0.15, len(logp))).astype(np.float32)
        t.anchor = (logp + random.normal(0, 0.3, len(logp))).astype(np.float32)
        t.behaviour = (t.old + random.normal(0, 0.15, len(logp))).astype(np.float32)
        t.behaviour[t.versions == NOT_SAMPLED] = 0
    return rows


def reference_update(model: PreTrainedModel, batch: list[Trajectory], kind: str) -> dict[str, Any]:
    """In float64, by a second implementation of the losses: loss, mean |loss| of a token, all gradients.

    Only tokens that weights sampled (``versions``) have a loss; ``mask`` is not read.
    """
    whole, per_token, per_sequence = [], [], []
    bonus = OBJECTIVES[kind]["objective"].get("entropy_bonus", 0.0)
    for t, (logp, entropy) in zip(batch, reference_logprobs(model, batch), strict=True):
        places = [place for place, version in enumerate(t.versions.tolist()) if version >= 0]
        logp, entropy = logp[places], entropy[places]
        old, anchor, behaviour = (torch.tensor(x[places]).double() for x in (t.old, t.anchor, t.behaviour))
        log_w, log_u = logp - old, logp - anchor
        if kind != "gspo":  # REINFORCE-URKL, dual clip, an anchor of its own
            w = log_w.detach().exp()
            weight = w * t.advantage - 0.05 * w * log_u.detach()
            keep = torch.where(weight >= 0, w < 1.28, (w > 0.8) & (w < 10))
            off = old - behaviour
            factor, kept = torch.ones_like(off), torch.ones_like(off, dtype=torch.bool)
            if kind == "rejected tokens":
                factor, kept = off.exp(), (off.exp() >= 0.8) & (off.exp() <= 1.1)
            elif kind == "rejected sequences":
                kept &= bool(0.98 <= off.mean().exp() <= 1.02)
            whole.append(-(keep * weight) * logp * factor * kept - bonus * entropy)
            per_token.append(whole[-1][kept])
            if kept.any():
                per_sequence.append(per_token[-1].mean())
        else:  # GSPO
            s = log_w.mean().exp()
            loss = torch.maximum(-s * t.advantage, -s.clamp(0.9, 1.1) * t.advantage)
            per_sequence.append(loss - bonus * entropy.mean())
            whole.append((loss - bonus * entropy).detach())
    by_sequence = kind in ("gspo", "rejected sequences")
    loss = torch.stack(per_sequence).mean() if by_sequence else torch.cat(per_token).mean()
    flat = torch.cat(whole)
    loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    gradients = split_experts({name.replace(".default.", "."): g for name, g in trained.items()})
    norm = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
    mean = flat.detach().abs().mean().item()
    return {"loss": loss.item(), "abs": mean, "norm": norm.item(), "gradients": gradients}


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers' parameters (or gradients) under the names of its files: one tensor for each expert."""
    out: dict[str, torch.Tensor] = {}
    for name, whole in tensors.items():
        block, _, rest = name.partition(".mlp.experts.")
        for number, weight in enumerate(whole) if rest else []:
            expert = f"{block}.mlp.experts.{number}."
            if rest == "gate_up_proj":
                out[expert + "gate_proj.weight"], out[expert + "up_proj.weight"] = weight.chunk(2)
            else:
                out[expert + "down_proj.weight"] = weight
        if not rest:
            out[name] = whole
    return out


def make_case(
    model: Path,
    parallel: dict[str, Any],
    microbatches: int,
    settings: dict[str, Any],
    *,
    updates: int = 1,
    lr: float = 1e-3,
    after: bool = True,
    one_step: bool = False,
) -> dict[str, Any]:
    """One layout for ``layout_worker``; ``settings`` replaces whole sections. ``after``: score again then.

    one_step: all updates are mini-batches of one step.
    """
    return {
        "one_step": one_step,
        "microbatches": microbatches,
        "after": after,
        "updates": updates,
        "lr": lr,
        "settings": {
            "model": {"path": str(model), "vocab_multiple": 4},
            "data": {"path": "unused"},
            "parallel": parallel,
            "precision": {"dtype": "float32"},
            "optimizer": {"clip_grad": 1.0, "distributed": False},
            "training": {"minibatches": 1, "tokens_per_microbatch": 100, "logprob_chunk": 17},
            "rollout": {"prompts_per_step": 12, "temperature": TEMPERATURE},
            **settings,
        },
    }


def run_layouts(
    folder: Path,
    layouts: dict[str, Any],
    batch: list[Trajectory],
    settings: dict[str, Any],
    *,
    batches: Mapping[str, list[Trajectory]] = MappingProxyType({}),
    timeout: float = 240,
    worker: str = "tests.distributed.layout_worker",
    **how: Any,
) -> dict[str, Any]:
    """Run each layout on the batch with the model in ``folder``; layouts of one size share their processes.

    layouts: name -> (ranks, parallel settings, micro-batches), and perhaps sections that replace those of
    ``settings``. batches: name of a layout -> its batch, if it is another one. worker: another than the
    usual one gets interpreters of its own. how: of ``make_case``.
    """
    (folder / "batch.pkl").write_bytes(pickle.dumps(batch))
    results: dict[str, Any] = {}
    for world in sorted({ranks for ranks, *_ in layouts.values()}):
        cases = {
            name: make_case(folder / "model", parallel, microbatches, settings | dict(*more), **how)
            for name, (ranks, parallel, microbatches, *more) in layouts.items()
            if ranks == world
        }
        for number, name in enumerate(batches.keys() & cases.keys()):
            cases[name]["batch"] = f"other_{number}.pkl"
            (folder / cases[name]["batch"]).write_bytes(pickle.dumps(batches[name]))
        (folder / "cases.json").write_text(json.dumps(cases))
        fresh = worker != "tests.distributed.layout_worker"
        results |= run_ranks(worker, world, folder, timeout=timeout, fresh=fresh)
    assert set(results) == set(layouts)
    return results


FROZEN = "e_score_correction_bias"
"""How the name of a parameter without gradient ends."""


def check(
    folder: Path,
    name: str,
    result: dict,
    batch: list[Trajectory],
    rows: list,
    expected: dict[str, Any],
    *,
    file: str = "model.safetensors",
    gradient_tolerance: float = 1e-5,
) -> None:
    """One layout's results against the reference. file: of the gradients."""
    assert len(result["scored"]) == len(batch), name
    for key, parts in result["scored"].items():
        actual = dict(parts)
        logp, entropy = rows[int(key)]
        np.testing.assert_allclose(actual["logp"], logp, atol=2e-5, err_msg=f"{name}: log-probs of {key}")
        np.testing.assert_allclose(actual["entropy"], entropy, atol=2e-5, err_msg=f"{name}: entropy of {key}")
    update = result["update"]
    assert update["tokens"] == sum(int((t.versions >= 0).sum()) for t in batch), name
    assert update["grad_norm"] == pytest.approx(expected["norm"], rel=1e-5), f"{name}: gradients' norm"
    assert abs(update["loss"] - expected["loss"]) <= 1e-5 * expected["abs"], name
    assert update["abs_loss"] == pytest.approx(expected["abs"], rel=1e-5), name
    gradients = load_file(folder / "gradients" / name / file)
    gradients = {key: value for key, value in gradients.items() if not key.endswith(FROZEN)}
    assert set(gradients) == set(expected["gradients"]), name
    error, key = gradient_error(gradients, expected["gradients"])
    assert error <= gradient_tolerance, f"{name}: gradient of {key} off by {error:.1e} of its largest element"


def gradient_error(
    gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest difference of a gradient, relative to its largest element, and the parameter."""
    return max(
        (float((gradients[key].double() - reference).abs().max() / reference.abs().max()), key)
        for key, reference in expected.items()
    )


SMOOTH = {"objective": {"beta": 0.05, "clip": None}, "anchor": {"type": "fixed"}}
"""Without a clip: rounding would decide on which side of its bound a ratio is."""


def ragged_batch(seed: int, longest: int, count: int) -> list[Trajectory]:
    """Lengths from 2 to ``longest``, both among them; responses from a single token to all but the first."""
    random = np.random.default_rng(seed)
    lengths = [2, longest, *np.exp(random.uniform(np.log(2), np.log(longest), count - 2)).astype(int)]
    random.shuffle(lengths)
    batch = []
    for i, n in enumerate(lengths):
        response = 1 if i % 4 == 0 else int(random.integers(1, n))
        tokens = random.integers(0, 251, n).astype(np.int32)
        # About the values of a random model: the ratios are near 1, but not all 1.
        old, anchor = (random.normal(-5.5, 0.2, response).astype(np.float32) for _ in range(2))
        batch.append(
            Trajectory(
                prompt_id=i,
                sample=0,
                prompt=tokens[:-response],
                response=tokens[-response:],
                behaviour=old,
                versions=np.zeros(response, np.int32),
                finish="stop",
                text="",
                old=old,
                anchor=anchor,
                advantage=float(random.normal()),
            )
        )
    return batch
