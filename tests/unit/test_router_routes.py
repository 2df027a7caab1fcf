"""Expert routes between an engine's answer and a micro-batch: none is lost, moved or invented.

Why: a route that belongs to another token, or zeros of an engine that captured none, give plausible numbers.
Not covered here: that vLLM returns them (tests/integration/test_router_replay_run.py), that routers follow
them (tests/distributed/test_router_replay.py), segments of a response (test_sampler_ahead).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rpg_megatron.commands.replay.command import _check_routes
from rpg_megatron.config import UserError, load_settings, read_model_shape
from rpg_megatron.config.model_shape import ExpertShape, SigmoidRouter
from rpg_megatron.data.rollout_files import (
    has_routes,
    part_file,
    read_rollouts,
    rollouts_file,
    write_rollouts,
)
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.command import engine_command
from rpg_megatron.engine.routes import check_routes
from rpg_megatron.launcher.preflight import check_routers
from rpg_megatron.policy import policy
from rpg_megatron.policy.context_parallel import zigzag_places
from rpg_megatron.policy.microbatch import make_micro_batch
from rpg_megatron.system.encoding import decode, encode
from rpg_megatron.training import batch_scoring
from rpg_megatron.training.rollout_saver import keeps_routes
from tests.support.tiny_models import TINY, TINY_MOE
from tests.support.trajectories import make_trajectory

EXPERTS = ExpertShape(300, 3, 64, True, (1, 3))
REPLAY = "training.router_replay=rollout"


def trajectory(prompt: int, response: int, experts: ExpertShape = EXPERTS) -> Trajectory:
    random = np.random.default_rng((prompt, response))
    size = prompt + response - 1, len(experts.layers), experts.count
    routes = random.random(size).argsort(-1)[..., : experts.per_token]
    routes = routes.astype(np.int16 if experts.count > 256 else np.uint8)
    return make_trajectory(prompt, response, prompt_id=prompt, routes=routes)


def returned(tokens: int, experts: ExpertShape = EXPERTS) -> np.ndarray:
    """As vLLM returns them: of all layers, zeros in dense ones."""
    routes = np.zeros((tokens, experts.layers[-1] + 2, experts.per_token), np.uint16)
    routes[:, experts.layers] = trajectory(1, tokens, experts).routes
    return routes


def test_routes_of_the_layers_with_experts() -> None:
    rows = check_routes(returned(7), 7, EXPERTS)
    assert rows.dtype == np.int16
    assert np.array_equal(rows, trajectory(1, 7).routes)
    few = replace(EXPERTS, count=256)
    assert check_routes(returned(7, few), 7, few).dtype == np.uint8


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r[1:], r"routes of shape \(6, 5, 3\) for 7 tokens"),
        (lambda r: r[:0, :0, :0], r"routes of shape \(0, 0, 0\) for 7 tokens"),
        (lambda r: r[:, :3], r"routes of shape \(7, 3, 3\)"),
        (lambda r: r[..., :2], "2 experts for each token instead of 3"),
        (lambda r: r * 0, "all zero"),
        (lambda r: r * (np.arange(7) != 4)[:, None, None], "an expert twice"),  # one token in all layers
        (lambda r: np.where(r == r[5, 3, 2], r[5, 3, 0], r), "an expert twice"),  # first and last of one row
        (lambda r: r + 300, "beyond the 300"),
    ],
)
def test_what_cannot_be_routes_is_an_error(spoil: Callable[[np.ndarray], np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_routes(spoil(returned(7)), 7, EXPERTS)


def test_all_zero_routes_of_a_single_expert() -> None:
    single = replace(EXPERTS, per_token=1, count=4)
    assert check_routes(returned(9, single), 9, single).any()
    with pytest.raises(ValueError, match="all zero"):
        check_routes(returned(9, single) * 0, 9, single)


@pytest.mark.parametrize("count", [6, 300])
def test_messages_keep_shape_and_type(count: int) -> None:
    t = trajectory(4, 5, replace(EXPERTS, count=count))
    decoded = decode(encode([t]), list[Trajectory])[0]
    assert (decoded.routes.dtype, decoded.routes.shape) == (t.routes.dtype, (8, 2, 3))
    assert np.array_equal(decoded.routes, t.routes)
    assert decoded.routes.flags.writeable


@pytest.mark.parametrize("count", [6, 300])
def test_rollout_files(tmp_path: Path, count: int) -> None:
    experts = replace(EXPERTS, count=count)
    batch = [trajectory(2 + i, 1 + i % 9, experts) for i in range(70)]  # more than are held at once
    for t in batch[::3]:
        t.mask = np.arange(len(t.response)) % 3 == 0
    (tmp_path / "rollouts").mkdir()
    file = rollouts_file(tmp_path, 1)
    write_rollouts(file, batch)
    for t, loaded in zip(batch, read_rollouts(file), strict=True):
        assert loaded.routes.dtype == t.routes.dtype
        assert np.array_equal(loaded.routes, t.routes)
        assert np.array_equal(loaded.mask, t.mask)
    without, bare = rollouts_file(tmp_path, 2), rollouts_file(tmp_path, 3)
    write_rollouts(without, batch, routes=False)
    write_rollouts(bare, [replace(t, routes=np.zeros((0, 0, 0), np.uint8)) for t in batch])
    assert without.read_bytes() == bare.read_bytes()
    assert read_rollouts(without)[0].routes.shape == (0, 0, 0)
    parts = rollouts_file(tmp_path, 4)
    for number, part in enumerate((batch, [])):  # a leader may have no trajectories
        write_rollouts(part_file(parts, number, 2), part)
    assert [has_routes(rollouts_file(tmp_path, step)) for step in (1, 2, 3, 4)] == [True, False, False, True]
    _check_routes(tmp_path, range(1, 2))
    with pytest.raises(
        UserError, match=r"step_000002.parquet: has no routes .* needs the routes of steps 1 to 3"
    ):
        _check_routes(tmp_path, range(1, 4))


@pytest.mark.parametrize(("context", "align"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_slices_of_context_ranks(context: int, align: int) -> None:
    batch = [trajectory(3, 4), trajectory(1, 1), trajectory(9, 6)]
    rows = np.concatenate([t.routes for t in batch])
    collected = np.zeros_like(rows)
    for rank in range(context):
        micro = make_micro_batch(
            batch, torch.device("cpu"), align=align, context=context, context_rank=rank, experts=EXPERTS
        )
        routes = micro.packed.routes
        experts = routes.experts.numpy().swapaxes(0, 1)  # [positions of this rank, layers, experts]
        assert len(experts) == micro.size // context
        assert (np.diff(np.sort(experts, -1)) > 0).all()  # on padding too
        assert experts.max() < EXPERTS.count
        used = micro.real_positions().numpy()
        place = zigzag_places(micro.packed.lengths, context)[rank]
        assert np.array_equal(routes.real.numpy(), np.isin(place, used))
        for row, position in zip(experts, place, strict=True):
            if position in used:
                collected[np.searchsorted(used, position)] = row
        assert micro.without_routes().packed.routes is None
        assert make_micro_batch(batch, torch.device("cpu")).packed.routes is None
    assert np.array_equal(collected, rows)


def test_a_micro_batch_that_lacks_routes_is_an_error() -> None:
    batch = [trajectory(3, 4), replace(trajectory(2, 2), routes=np.zeros((0, 0, 0), np.uint8))]
    with pytest.raises(ValueError, match=r"prompt 2, sample 0 have shape \(0, 0, 0\)"):
        make_micro_batch(batch, torch.device("cpu"), experts=EXPERTS)
    assert make_micro_batch([], torch.device("cpu"), experts=EXPERTS).packed.routes is None


def test_mismatch_with_other_routes_is_of_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a response with some, and of one with none."""
    batch = [trajectory(2, 4), trajectory(3, 2)]
    batch[0].mask, batch[1].mask = np.array([True, False, False, True]), np.zeros(2, bool)
    old = torch.tensor([0.5, torch.nan, 1e30, 0.25]), torch.tensor([torch.nan, 1e30])
    micro = make_micro_batch(batch, torch.device("cpu"), experts=EXPERTS)
    logprobs, replayed = torch.zeros(2, micro.size), torch.zeros(2, micro.size)
    for (_, values), scores in zip(micro.split(replayed[0]), old, strict=True):
        values.copy_(scores)
    for t, values in micro.split(logprobs[0]):
        values.copy_(torch.where(torch.from_numpy(t.mask), 2.0, torch.nan))
    monkeypatch.setattr(dist, "all_reduce", lambda values, **options: None)
    monkeypatch.setattr(batch_scoring, "control_group", lambda: None)
    scorer = object.__new__(batch_scoring.BatchScorer)
    scorer._policy = SimpleNamespace(logprobs=lambda micros: [logprobs])  # type: ignore[assignment]
    scorer._mesh = SimpleNamespace(reports=True)  # type: ignore[assignment]
    row = scorer._compare_routes([micro], [replayed])
    assert (row["routes/replayed_mismatch_mean"], row["routes/replayed_mismatch_max"]) == (0.375, 0.5)
    assert (row["routes/own_mismatch_mean"], row["routes/own_mismatch_max"]) == (2.0, 2.0)


def test_routers_that_replay_are_not_fused(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused router asks for no replay: on a GPU it would choose, and the numbers would be plausible."""
    told = []

    def note(*arguments: object, replays: bool, **options: object) -> None:
        told.append(replays)
        raise InterruptedError

    monkeypatch.setattr(policy, "transformer_config", note)
    mesh: Any = None  # is not reached
    for overrides in ([], [REPLAY]):
        settings = load_settings(config_file, overrides)
        with pytest.raises(InterruptedError):
            policy.Policy(settings, TINY_MOE, mesh, torch.device("cpu"), lambda _: None)
    assert told == [False, True]


def test_engines_return_routes(config_file: Path, tmp_path: Path) -> None:
    plain, replay = load_settings(config_file), load_settings(config_file, [REPLAY])
    flag = "--enable-return-routed-experts"
    assert [flag in engine_command(s, 0, tmp_path / "e") for s in (plain, replay)] == [False, True]


def test_replay_with_sampling_ahead_is_advised_against(config_file: Path) -> None:
    ahead = ["rollout.ahead=1", "correction.type=truncate"]
    assert [list(load_settings(config_file, changes).notes()) for changes in ([REPLAY], ahead)] == [[], []]
    (note,) = load_settings(config_file, [REPLAY, *ahead]).notes()
    assert note.startswith("training.router_replay with rollout.ahead")


@pytest.mark.parametrize(
    ("override", "off"),
    [(REPLAY, "router_replay=off"), ("training.router_aux_loss=0.01", "router_aux_loss=0")],
)
def test_settings_of_routers_need_experts(config_file: Path, override: str, off: str) -> None:
    settings = load_settings(config_file, [override])
    name, _, value = override.partition("=")
    message = f"{name} {value}: the model at .* has no experts; set it to {off.partition('=')[2]}$"
    with pytest.raises(UserError, match=message):
        check_routers(settings, read_model_shape(settings.model.path))
    check_routers(settings, TINY_MOE)
    check_routers(load_settings(config_file, [f"training.{off}"]), TINY)


def test_a_sigmoid_router_has_no_auxiliary_loss(config_file: Path) -> None:
    assert TINY_MOE.experts is not None
    shape = replace(TINY_MOE, experts=replace(TINY_MOE.experts, router=SigmoidRouter(1.0, 1, 1)))
    check_routers(load_settings(config_file, [REPLAY]), shape)
    settings = load_settings(config_file, ["training.router_aux_loss=0.01"])
    with pytest.raises(UserError, match=r"router_aux_loss 0\.01: routers of qwen3_moe .* is not defined"):
        check_routers(settings, shape)


@pytest.mark.parametrize(
    ("setting", "steps"), [("0", []), ("2", [2, 4]), ("[1, 4]", [1, 4]), ("[]", []), ("1", [1, 2, 3, 4])]
)
def test_steps_that_keep_routes(config_file: Path, setting: str, steps: list[int]) -> None:
    rollout = load_settings(config_file, [REPLAY, f"rollout.journal_routes={setting}"]).rollout
    assert [step for step in range(1, 5) if keeps_routes(step, rollout.journal_routes)] == steps
