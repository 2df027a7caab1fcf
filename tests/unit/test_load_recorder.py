"""A recorded plan repeats what a loader did, and what cannot be repeated is refused instead of guessed.

Loaders here are the slicing idioms of vLLM's layers in a few lines. Not covered: vLLM's own loaders
(tests/integration).
"""

import pytest
import torch

from rpg_megatron.bridge.vllm.load_recorder import LoadRecorder, Strided, strided_box
from rpg_megatron.models.boxes import Box


def record(load, sources, targets):
    meta = {n: torch.empty_like(t, device="meta") for n, t in sources.items()}
    params = {n: torch.nn.Parameter(torch.empty_like(t, device="meta"), False) for n, t in targets.items()}
    recorder = LoadRecorder(meta, params)
    with recorder:
        load(meta, params)
    return recorder


def replay(recorder, sources, targets):
    for key, fill in recorder.fills:
        fill.target.on(targets[key]).fill_(fill.value)
    for key, copy in recorder.copies:
        copy.target.on(targets[key]).view(copy.box.extent).copy_(sources[copy.hf_name][copy.box.slices()])


def stacked_columns(s, p):
    p["qkv"].data.narrow(0, 0, 4).copy_(s["q"].narrow(0, 4, 4))
    p["qkv"].data[4:6].copy_(s["k"].chunk(2, 0)[1])
    p["down"].data.copy_(s["down"][:, 3:6])


def padded_vocabulary(s, p):
    rows = s["embed"].narrow(0, 8, 2)
    p["embed"][: rows.shape[0]].data.copy_(rows)
    p["embed"][rows.shape[0] :].data.fill_(0)


def vector_and_scalar_shapes(s, p):
    p["norm"].data.copy_(s["norm"])
    p["conv"].data.copy_(s["conv"].squeeze(1)[2:])
    p["experts"].data[1].copy_(s["expert"].unbind(0)[0])


@pytest.mark.parametrize(
    ("load", "sources", "targets"),
    [
        (stacked_columns, {"q": (8, 5), "k": (4, 5), "down": (4, 6)}, {"qkv": (6, 5), "down": (4, 3)}),
        (padded_vocabulary, {"embed": (10, 4)}, {"embed": (8, 4)}),
        (
            vector_and_scalar_shapes,
            {"norm": (7,), "conv": (6, 1, 4), "expert": (1, 3, 2)},
            {"norm": (7,), "conv": (4, 4), "experts": (2, 3, 2)},
        ),
    ],
)
def test_replay_equals_the_loader(load, sources, targets):
    sources = {n: torch.randn(s) for n, s in sources.items()}
    targets = {n: torch.zeros(s) for n, s in targets.items()}
    recorder = record(load, sources, targets)
    assert recorder.refused == []
    direct = {n: t.clone() for n, t in targets.items()}
    load(sources, direct)
    replay(recorder, sources, targets)
    assert all(torch.equal(direct[n], targets[n]) for n in targets)


@pytest.mark.parametrize(
    "load",
    [
        lambda s, p: p["w"].data.copy_(s["w"].t()),
        lambda s, p: p["w"].data.copy_(s["w"] * 2),
        lambda s, p: p["w"].data.copy_(s["w"].to(torch.bfloat16)),
        lambda s, p: p["w"].data.add_(1),
        lambda s, p: p["w"].data.view(-1)[:8].copy_(s["w"].view(-1)[:8]),
        lambda s, p: p["w"].data.copy_(s["w"][:1]),
        lambda s, p: torch.empty(4, 4, device="meta").copy_(s["w"]),
        lambda s, p: torch.empty(4, 4).copy_(s["w"]),
        lambda s, p: p["w"].data.copy_(s["w"].mul_(2)),
        lambda s, p: [p["w"].data.copy_(s["w"]), p["w"].data.fill_(0)],
    ],
    ids=[
        *("transpose", "arithmetic", "cast", "in-place", "flattened", "broadcast", "elsewhere"),
        *("no meta tensor", "changed source", "twice"),
    ],
)
def test_what_is_no_copy_of_a_box_is_refused(load):
    t = {"w": torch.zeros(4, 4)}
    assert record(load, t, t).refused


def test_strided_box_against_slicing():
    full = torch.empty(3, 1, 5, 4)
    for view, box in (
        (full, Box.whole(full.shape)),
        (full[1:, :, 2:4, 3], Box((1, 0, 2, 3), (2, 1, 2, 1))),
        (full[2, 0, 4, 1:3], Box((2, 0, 4, 1), (1, 1, 1, 2))),
        (full[2, 0, 4, 3], Box((2, 0, 4, 3), (1, 1, 1, 1))),
        (full[:, :, ::2], None),
        (full[0, 0].t(), None),
        (full[0].reshape(-1), None),
    ):
        assert strided_box(Strided.of(view), full.shape) == box
