"""One rank of test_optimizer_offload: resume_worker, with the CPU in place of a GPU and its host."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from rpg_megatron.policy import device as policy_device
from tests.distributed import resume_worker
from tests.support.ranks import measure_cases

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


def main() -> None:
    torch.cuda.Stream = DoneAtOnce  # type: ignore[misc,assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    start_device = policy_device.start_device

    def start(device: str) -> torch.device:
        target = start_device(device)
        torch.cuda.current_stream = lambda device=None: DoneAtOnce()  # type: ignore[assignment,return-value]
        return target

    step = HybridDeviceOptimizer.step

    def printing_step(self: HybridDeviceOptimizer, closure: None = None) -> None:
        groups = self.gpu_optimizer.param_groups if self.gpu_optimizer else []
        print(f"update: {len(self.cpu_optimizers)} off, {sum(len(g['params']) for g in groups)} on")
        step(self, closure)

    policy_device.start_device = start
    HybridDeviceOptimizer.step = printing_step
    with TwoDevices():
        measure_cases(resume_worker.run)


if __name__ == "__main__":
    main()
