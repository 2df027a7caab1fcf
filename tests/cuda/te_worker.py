"""The ranks of test_te_layers: the layouts' worker, with Transformer Engine's modules on CPU stand-ins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

torch.cuda.is_available = lambda: True
import transformer_engine.pytorch  # noqa: E402, F401, looks at the driver
from transformer_engine.pytorch.attention.dot_product_attention import (  # noqa: E402
    backends,
    context_parallel,
    dot_product_attention,
)

from tests.cuda import te_kernels  # noqa: E402

H100 = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)


LOCAL = "local layers"
"""The path of the data in a case that uses Megatron's local layers."""


class Nothing:
    """Stands in for a stream or an event: CPU work runs in order."""

    def __init__(self, *_: Any, **answers: Any) -> None:
        self.__dict__ |= answers

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


@contextmanager
def one_by_one(*_: Any, **__: Any) -> Iterator[Nothing]:
    """Collectives that NCCL joins into one; gloo, which cannot, has done each when its call returns."""
    yield Nothing()


class Once:
    """A gloo message, which can be waited for only once. Callers wait twice, as NCCL allows."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()


def pretend_gpu() -> None:
    """Fake what Transformer Engine queries of a GPU; tensors stay on the CPU."""
    torch.cuda.is_available = lambda: True
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # of delayed scales, with torch
    torch._dynamo.config.disable = True
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[misc]
    torch.distributed._coalescing_manager = one_by_one
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: H100
    # Attention is chosen as for bfloat16, and accepts float32: numbers can then be compared closely.
    utils = dot_product_attention.dpa_utils
    choose = utils.get_attention_backend

    def chosen(params: Any) -> Any:
        params.qkv_dtype = torch.bfloat16
        return choose(params)

    utils.get_attention_backend = chosen
    backends.all = lambda _: True  # of its assertions about dtypes
    send = context_parallel.flash_attn_p2p_communicate
    context_parallel.flash_attn_p2p_communicate = lambda *args: [Once(work) for work in send(*args)]


def delayed_scales(model: torch.nn.Module) -> dict[str, list[float]]:
    """Of each linear layer: the scales of its input, its weight and its output's gradient."""
    scales = {}
    for name, layer in model.named_modules():
        meta, emulated = getattr(layer, "fp8_meta", None), getattr(layer, "fp8", None)
        if isinstance(emulated, torch.nn.Module):
            scales[name] = emulated.scale.tolist()
        elif meta and "scaling_fwd" in meta and "linear" in name:
            forward, backward = meta["scaling_fwd"].scale, meta["scaling_bwd"].scale
            scales[name] = [*forward[:2].tolist(), backward[0].item()]
    return scales


def added_in_place(policy: Any) -> list[str]:
    """Parameters whose last gradient a layer has added to Megatron's buffer itself."""
    return [name for name, p in policy.trained_parameters() if p.grad_added_to_main_grad]


def parked_caches(policy: Any) -> list[int]:
    """Modules that keep FP8 copies of weights, before and after the GPU is given to engines."""

    def caching() -> int:
        modules = (module for chunk in policy.chunks for module in chunk.modules())
        return sum(bool(getattr(module, "_fp8_workspaces", None)) for module in modules)

    before = caching()
    policy.offloader.offload()
    return [before, caching()]


def main() -> None:
    torch.cuda.is_available = lambda: False
    from megatron.core.fp8_utils import is_float8tensor

    from rpg_megatron.policy import logprobs, model, optimizer, policy
    from tests.distributed import layout_worker

    start = layout_worker.start_device

    def start_device(name: str) -> torch.device:
        device = start(name)
        pretend_gpu()
        return device

    te_kernels.install()
    layout_worker.start_device = start_device
    logprobs.FUSE = False
    configure, emulate = policy.transformer_config, policy.emulate_fp8
    cuda = torch.device("cuda")
    folder = Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text())
    if not any((c["settings"]["precision"].get("fp8") or {}).get("parameters") for c in cases.values()):
        for module in (model, optimizer):  # so that rounding to FP8 is all that differs
            module.torch_dtype = lambda name: torch.float32

    def transformer_config(*args: Any, device: torch.device, fused: bool, **more: Any) -> Any:
        config = configure(*args, device=cuda if fused else device, fused=fused, **more)
        assert config.moe_permute_fusion == (fused and config.num_moe_experts is not None)
        config.moe_permute_fusion = False  # Triton's interpreter would take minutes: see test_sorting_kernels
        return config

    def uses_transformer_engine(settings: Any, device: torch.device) -> bool:
        fused = str(settings.data.path) != LOCAL
        policy.emulate_fp8 = (lambda *_: None) if fused else emulate
        return fused

    policy.transformer_config = transformer_config
    policy.uses_transformer_engine = uses_transformer_engine
    build, scales, policies = layout_worker.checkpoint_policy, {}, []

    def checkpoint_policy(settings: Any, *args: Any) -> Any:
        built = build(settings, *args)
        policies.append(built)
        fp8 = settings.precision.fp8
        if fp8 is not None and fp8.recipe == "delayed":
            scales[len(scales)] = built.chunks[0]
        return built

    held_anchor = layout_worker.HeldAnchor

    def anchor(params: Any, settings: Any) -> Any:
        """No anchor for FP8 parameters, which the product rejects."""
        quantised = any(is_float8tensor(p) for p in params)
        return Nothing(swapped_in=nullcontext) if quantised else held_anchor(params, settings)

    layout_worker.HeldAnchor = anchor
    layout_worker.checkpoint_policy = checkpoint_policy
    layout_worker.main()
    names = [name for name in cases if name.startswith("delayed")]
    layer_scales = {name: delayed_scales(chunk) for name, chunk in zip(names, scales.values(), strict=True)}
    if os.environ["WORLD_SIZE"] == "1":
        (folder / "scales.json").write_text(json.dumps(layer_scales))
        in_place = {name: added_in_place(policy) for name, policy in zip(cases, policies, strict=True)}
        (folder / "in_place.json").write_text(json.dumps(in_place))
        parked = {name: parked_caches(policy) for name, policy in zip(cases, policies, strict=True)}
        (folder / "parked.json").write_text(json.dumps(parked))
    with (folder / "kernels.txt").open("a") as f:
        f.writelines(f"{name}\n" for name in te_kernels.RAN)


if __name__ == "__main__":
    main()
