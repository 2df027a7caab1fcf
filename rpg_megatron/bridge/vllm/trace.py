"""vLLM side of an audit: forward hooks in a worker that keep what each module gave, until they are asked for.

``vllm_plugin.WorkerExtension`` calls this; nothing here raises into a worker (see there why). It knows vLLM's
dense decoders by their modules' names alone and imports nothing of vLLM, so that ``join_workers``, which
puts the workers' shares together, can be used by whoever compares.

An engine must run eagerly: a compiled or captured model does not call its modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.activation_sites import FINAL_INPUT, FINAL_NORM, LOGITS, Trace, layer_site

_QKV, _GATE_UP = "qkv", "gate_up"
_CUT = ("query_norm", "key_norm", "query_rope", "key_rope", "attention", "activation")
"""Parts that hold just this worker's heads or columns."""


class WorkerTrace:
    """Keeps what the modules of one worker's model compute. Every value is copied at once: vLLM computes
    norms and rotations in place.
    """

    def __init__(self, model: nn.Module):
        """Hook the modules of a dense decoder. Raises AttributeError if it is built in another way."""
        self._kept: dict[str, list[Tensor]] = defaultdict(list)
        self._handles: list[Any] = []
        self.error = ""
        """What went wrong in a hook; the trace is not whole then."""
        inner: Any = model.model
        for i, layer in enumerate(inner.layers):
            self._hook_layer(i, layer)
        self._hook(inner.norm, lambda a, out: {FINAL_INPUT: out[1], FINAL_NORM: out[0]})
        logits: Any = model.logits_processor
        self._hook(logits, lambda a, out: {LOGITS: out})

    def _hook_layer(self, i: int, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp

        def keep(module: nn.Module, *parts: str, take: Callable[[Any, Any], Sequence[Any]]) -> None:
            names = [layer_site(i, p) for p in parts]
            self._hook(module, lambda a, out: dict(zip(names, take(a, out), strict=True)))

        # With a residual the norm adds it first, and hands both on.
        keep(
            layer.input_layernorm,
            "input",
            "input_norm",
            take=lambda a, out: (out[1], out[0]) if isinstance(out, tuple) else (a[0], out),
        )
        keep(attention.qkv_proj, _QKV, take=lambda a, out: (out[0],))
        if getattr(attention, "q_norm", None) is not None:
            keep(attention.q_norm, "query_norm", take=lambda a, out: (out,))
            keep(attention.k_norm, "key_norm", take=lambda a, out: (out,))
        # One rotary module serves all layers, so its results are taken from where they go in.
        keep(
            attention.attn,
            "query_rope",
            "key_rope",
            "attention",
            take=lambda a, out: (a[0], a[1], out),
        )
        keep(attention.o_proj, "attention_output", take=lambda a, out: (out[0],))
        keep(layer.post_attention_layernorm, "middle", "mlp_norm", take=lambda a, out: (out[1], out[0]))
        keep(mlp.gate_up_proj, _GATE_UP, take=lambda a, out: (out[0],))
        keep(mlp.act_fn, "activation", take=lambda a, out: (out,))
        keep(mlp.down_proj, "mlp_output", take=lambda a, out: (out[0],))

    def _hook(self, module: nn.Module, take: Callable[[Any, Any], dict[str, Any]]) -> None:
        # What goes in may be overwritten by the module, so it is copied before the module runs.
        entered: list[Any] = []

        def before(_: nn.Module, args: Any) -> None:
            entered[:] = [_copy(a) for a in args]

        def after(_: nn.Module, args: Any, out: Any) -> None:
            try:
                for name, value in take(entered, out).items():
                    if value is not None:  # logits come together on one worker
                        self._kept[name].append(_copy(value).flatten(1).cpu())
            except Exception as e:
                self.error = self.error or f"{type(module).__name__}: {type(e).__name__}: {e}"

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def take(self, file: Path) -> None:
        """Write what was kept since the last time, call after call end to end, and forget it."""
        kept = {name: torch.cat(values) for name, values in self._kept.items()}
        self._kept.clear()
        save_file(kept, file)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._kept.clear()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def trace_file(folder: Path, rank: int) -> Path:
    """Where a worker leaves its trace."""
    return folder / f"trace-{rank}.safetensors"


def read_workers(folder: Path, workers: int) -> list[Trace]:
    """Every worker's trace, in rank order; the files are removed."""
    files = [trace_file(folder, rank) for rank in range(workers)]
    shards = [load_file(file) for file in files]
    for file in files:
        file.unlink()
    return shards


def join_workers(shards: Sequence[Trace], shape: ModelShape) -> Trace:
    """The whole model's trace from all workers' shares, in rank order.

    A worker's projections are its query heads, then its key heads, then its value heads; its gate columns,
    then its up columns. With fewer key/value heads than workers, neighbours hold the same ones.
    """
    workers, d = len(shards), shape.head_dim
    heads, groups = shape.num_heads // workers, max(1, shape.num_kv_heads // workers)
    every = max(1, workers // shape.num_kv_heads)
    whole: Trace = {}
    for site, mine in shards[0].items():
        stem, _, part = site.rpartition(".")
        if part == _QKV:
            cut = [s[site].split([heads * d, groups * d, groups * d], dim=1) for s in shards]
            whole[f"{stem}.query"] = torch.cat([c[0] for c in cut], 1)
            whole[f"{stem}.key"] = torch.cat([c[1] for c in cut[::every]], 1)
            whole[f"{stem}.value"] = torch.cat([c[2] for c in cut[::every]], 1)
        elif part == _GATE_UP:
            halves = [s[site].chunk(2, 1) for s in shards]
            whole[f"{stem}.gate"] = torch.cat([h[0] for h in halves], 1)
            whole[f"{stem}.up"] = torch.cat([h[1] for h in halves], 1)
        elif part in _CUT:
            step = every if part.startswith("key") else 1
            whole[site] = torch.cat([s[site] for s in shards[::step]], 1)
        else:
            whole[site] = mine
    return whole
