"""An optimizer with a share in host memory makes the same updates, and checkpoints load either way.

Why: Megatron's offloading optimizer has separate code for updates and checkpoints, with pitfalls (see
``policy/optimizer.py``). Proved: with everything offloaded, or half, three updates end at the weights, main
weights and moments of the optimizer on the device, and so does the third after a checkpoint of the second was
loaded by the other kind, or with another share. The CPU stands for both devices here (see
``update``), so the arithmetic, the distribution of tensors and the checkpoints are
Megatron's own and real. Not covered: what the test replaces, which is copies between devices, pinned memory
and streams; and that anything is saved.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from rpg_megatron.checkpoints.run_folder import step_folder
from tests.distributed import resume_worker
from tests.support.checkpoints import compare, make_resume_case, write_batch
from tests.support.ranks import ranks

_IS_CUDA = Tensor.is_cuda.__get__


class TwoDevices(torch.overrides.TorchFunctionMode):
    """Makes every tensor appear to be on a GPU, except copies to the host and tensors made from them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_CUDA:
            return not getattr(args[0], "on_host", False)
        if func is Tensor.pin_memory:
            return args[0]
        moved = func is Tensor.cpu or (func is Tensor.to and args[1:] in (("cpu",), ("cuda",)))
        if moved and not kwargs:
            copy = args[0].detach().clone()
            copy.on_host = args[1:] != ("cuda",)
            return copy
        out = func(*args, **(kwargs or {}))
        if func in (Tensor.detach, Tensor.clone, Tensor.float) and getattr(args[0], "on_host", False):
            out.on_host = True
        return out


class DoneAtOnce:
    """A stream and its events whose work is complete when a call returns."""

    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self) -> DoneAtOnce:
        return self

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


@ranks(1)
def update(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    """Each case by resume_worker, with the CPU in place of a GPU and its host."""
    torch.cuda.Stream = DoneAtOnce  # type: ignore[misc,assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: DoneAtOnce()  # type: ignore[assignment,return-value]
    step = HybridDeviceOptimizer.step

    def printing_step(self: HybridDeviceOptimizer, closure: None = None) -> None:
        groups = self.gpu_optimizer.param_groups if self.gpu_optimizer else []
        print(f"update: {len(self.cpu_optimizers)} off, {sum(len(g['params']) for g in groups)} on")
        step(self, closure)

    HybridDeviceOptimizer.step = printing_step
    with TwoDevices():
        return {name: resume_worker.run(c, folder, torch.device("cpu")) for name, c in cases.items()}


def make_offload_case(
    folder: Path, share: float, data: int, load: str | None, saves: list[str | None]
) -> dict[str, Any]:
    case = make_resume_case(folder, "distributed", {"data": data}, load, saves)
    case["settings"] |= {
        "device": "cuda",
        "precision": {"dtype": "bfloat16"},
        "memory": {"offload_optimizer": share},
    }
    return case


@pytest.mark.parametrize(
    ("data", "share"), [(1, 0.5), *(pytest.param(2, s, marks=pytest.mark.long) for s in (0.5, 1))]
)
def test_the_same_updates_and_checkpoints_for_each_other(tmp_path: Path, data: int, share: float) -> None:
    write_batch(tmp_path)

    def make(of: float, load: str | None, saves: list[str | None]) -> dict[str, Any]:
        return make_offload_case(tmp_path, of, data, load, saves)

    cases = {
        "on the device": make(0, None, [None, "second", "third"]),
        "off": make(share, None, [None, "off second", "off third"]),
        "off, from on": make(share, "second", ["off from on"]),
        "on, from off": make(0, "off second", ["on from off"]),
        "another share, from off": make(0.25, "off second", ["another from off"]),
    }
    results = update(tmp_path, cases, world=data)
    counts = re.findall(r"update: (\d+) off, (\d+) on", (tmp_path / "rank_0.log").read_text())
    halves = [(int(off), int(on)) for off, on in counts]
    assert len(halves) == 3 + 1 + 1  # and no other update
    assert all(off and bool(on) == (share < 1) for off, on in halves[:4]), halves
    expected = results["on the device"]
    for name, reports in results.items():
        for actual, report in zip(reports[::-1], expected[::-1], strict=False):
            assert actual == pytest.approx(report, rel=1e-5), name
    folder = tmp_path / "distributed"
    for name in ("off third", "off from on", "on from off", "another from off"):
        compare(step_folder(folder / "third", 1), step_folder(folder / name, 1), 1e-6)
