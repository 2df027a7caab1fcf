"""What makes an engine on a CPU faster changes nothing that it samples, and no answer of Python's.

Why: seeds from another place of a request's stream give other tokens than the run before, without an error; a
core that keeps the server's socket open lets clients of a dead server wait; and transformers takes a package
that it does not find for missing. Not covered: that an engine starts
(tests/integration/test_engine_process.py), and how much faster it is (docs/evidence/performance.md).
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpg_megatron.engine import server


def test_packages_are_in_the_same_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, files in {"declared": {"top_level.txt": "one\ntwo\n"}, "listed": {}}.items():
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        rows = [f"{folder.name}/METADATA,sha256=x,9", "three/deep/a.py,,", "four.py,,", "../../bin/five,,"]
        for path in (tmp_path / "three/deep/a.py", tmp_path / "four.py"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        texts = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", "RECORD": "\n".join(rows)}
        for file, text in (texts | files).items():
            (folder / file).write_text(text)
    everywhere = [str(tmp_path), *sys.path]
    discover = importlib.metadata.Distribution.discover
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: discover(path=everywhere))
    ours = server.packages_distributions()
    assert ours == importlib.metadata.packages_distributions()
    assert ours["one"] == ["declared"]
    assert ours["three"] == ours["four"] == ["listed"]


def test_vllm_is_imported_without_the_compiler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name, found = "torch._inductor.lowering", []

    def look(module: str) -> None:
        found.append((module, sys.modules[name]))

    monkeypatch.setattr(server.importlib, "import_module", look)
    monkeypatch.delitem(sys.modules, name, raising=False)
    server.import_without_compiler()
    assert found == [("vllm", None)]
    assert name not in sys.modules
    monkeypatch.setitem(sys.modules, name, sys)  # a process that has it keeps it
    server.import_without_compiler()
    assert found[1:] == [("vllm", sys)]
    assert sys.modules[name] is sys


@pytest.fixture(scope="module")
def samplers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The sampler of vLLM on a CPU, and ours."""
    import vllm._C  # noqa: F401  # its kernels
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from rpg_megatron.bridge.vllm import cpu_engine

    plain = TopKTopPSampler.forward_cpu
    cpu_engine._draw_seeds_in_blocks()
    ours, TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_cpu, plain
    assert ours is not plain
    return plain, ours


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_tokens_are_those_of_seeds_drawn_one_by_one(
    samplers: tuple[Callable[..., Any], Callable[..., Any]], mode: str, limited: bool
) -> None:
    """Over more steps than a block has, with requests that change their rows, end, and have no seed."""
    torch.manual_seed(0)
    steps = torch.randn(150, 6, 40)
    results = []
    for sample in samplers:
        torch.manual_seed(1)  # of the row without a seed
        own = [torch.Generator().manual_seed(7 + i) for i in range(6)]
        sampler = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode=mode)
        tokens, logprobs = [], []
        for step, logits in enumerate(steps):
            requests = [(i + step // 40) % 6 for i in range(6 - step // 50)]
            generators = {row: own[i] for row, i in enumerate(requests) if i != 3}
            k = torch.full((len(requests),), 5) if limited else None
            drawn, returned = sample(sampler, logits[: len(requests)].clone(), generators, k, None)
            tokens.append(drawn)
            logprobs.append(torch.zeros(0) if returned is None else returned)
        results.append((tokens, logprobs))
    for plain, ours in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert len({tuple(t[:3].tolist()) for t in results[0][0]}) > 100  # they are random


@pytest.fixture(scope="module")
def norms() -> Any:
    """The operations of vLLM, with our implementations."""
    import vllm._C  # noqa: F401  # its kernels
    from vllm import ir
    from vllm.platforms import current_platform

    from rpg_megatron.bridge.vllm import cpu_engine

    platform = type(current_platform)
    plain = platform.get_default_ir_op_priority
    if "cpu_kernel" not in ir.ops.rms_norm.impls:  # else this process has loaded the plug-in
        cpu_engine._normalize_by_kernels(current_platform)
    chosen, platform.get_default_ir_op_priority = current_platform.get_default_ir_op_priority(None), plain
    assert chosen.rms_norm == chosen.fused_add_rms_norm == ["cpu_kernel", "native"]
    return ir.ops


HEADS = torch.randn(40, 6, 4, 32, generator=torch.Generator().manual_seed(1))
NORMED = {
    "hidden": HEADS[:, 0].reshape(40, 128),
    "one row": HEADS[:1, 0].reshape(1, 128),
    "heads": HEADS[:, 0].contiguous(),
    "heads of a fused projection": HEADS[:, 1],
    "columns of a fused projection": HEADS.reshape(40, 768)[:, 128:384],
    "large and small": HEADS[:, 2].reshape(40, 128) * torch.logspace(-9, 9, 40)[:, None],
}


@pytest.mark.parametrize("name", NORMED)
def test_norms_by_kernels_are_those_of_torch(norms: Any, name: str) -> None:
    x, weight = NORMED[name], torch.linspace(-1, 2, NORMED[name].shape[-1])
    kept = x.clone()
    kernel, native = (norms.rms_norm.impls[provider] for provider in ("cpu_kernel", "native"))
    assert kernel.supports_args(x, weight, 1e-6)
    found = kernel.impl_fn(x, weight, 1e-6)
    torch.testing.assert_close(found, native.impl_fn(x, weight, 1e-6), rtol=2e-6, atol=0)
    assert torch.equal(x, kept)
    added = norms.fused_add_rms_norm.impls
    assert added["cpu_kernel"].supports_args(x, x, weight, 1e-6) is x.is_contiguous()
    if x.is_contiguous():
        expected = added["native"].impl_fn(x, x.flip(0), weight, 1e-6)
        found = added["cpu_kernel"].impl_fn(x.clone(), x.flip(0), weight, 1e-6)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def test_what_the_kernels_cannot_norm_is_left_to_torch(norms: Any) -> None:
    weight, kernel = torch.ones(32), norms.rms_norm.impls["cpu_kernel"]
    refused = [
        (torch.ones(2, 32, dtype=torch.bfloat16), weight.bfloat16(), 1e-6),  # rounded before the weight
        (torch.ones(2, 32), weight.bfloat16(), 1e-6),
        (torch.ones(2, 32), None, 1e-6),
        (torch.ones(2, 32), weight, 1e-6, 16),
        (torch.ones(2, 24), torch.ones(24), 1e-6),
    ]
    assert not any(kernel.supports_args(*arguments) for arguments in refused)
    assert kernel.supports_args(torch.ones(2, 32), weight, 1e-6)


def test_a_forked_core_keeps_connections_but_no_server(
    samplers: tuple[Callable[..., Any], Callable[..., Any]], tmp_path: Path
) -> None:
    from rpg_megatron.bridge.vllm.cpu_engine import _leave_server

    mine, childs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket() as bound:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        bound.bind(("127.0.0.1", 0))  # vLLM listens later
        if (pid := os.fork()) == 0:
            try:
                _leave_server()
                childs.sendall(b"left")
                mine.close()
                childs.recv(1)
            finally:
                os._exit(0)
        childs.close()
        assert mine.recv(4) == b"left"
        bound.listen()
        address = bound.getsockname()
    for kind, place in ((socket.AF_UNIX, str(tmp_path / "s")), (socket.AF_INET, address)):
        with socket.socket(kind) as client, pytest.raises(ConnectionRefusedError):
            client.connect(place)
    mine.close()
    os.waitpid(pid, 0)
