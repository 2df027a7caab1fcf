"""Records the activations of vLLM's modules for an audit, by forward hooks in each worker.

``plugin.WorkerExtension`` calls this; hooks never raise into a worker (``plugin.py`` explains why). Modules
of vLLM's decoders are found by name, and vLLM is not imported, so that other processes can use
``join_workers``.

The engine must run eagerly: a compiled or captured model does not call its modules' hooks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rpg_megatron.config.files import remove
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.activation_sites import FINAL_INPUT, FINAL_NORM, LOGITS, Trace, layer_site

_QKV, _GATE_UP = "qkv", "gate_up"
_CUT = ("query_norm", "key_norm", "query_rope", "key_rope", "attention", "activation")
"""Activations of which a worker has only its own heads or columns."""


class WorkerTrace:
    """Records the activations of one worker's model. Values are copied at once, because vLLM computes norms
    and rotary embeddings in place.
    """

    def __init__(self, model: nn.Module):
        """Hook the modules of a decoder, dense or with experts. Raises AttributeError for any other
        structure.
        """
        self._kept: dict[str, list[Tensor]] = defaultdict(list)
        self._handles: list[Any] = []
        self.error = ""
        """First error in a hook; the trace is then incomplete."""
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

        # If it gets a residual, the norm adds it first and returns both.
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
        # All layers share one rotary module, so its results are taken from the attention's inputs.
        keep(
            attention.attn,
            "query_rope",
            "key_rope",
            "attention",
            take=lambda a, out: (a[0], a[1], out),
        )
        keep(attention.o_proj, "attention_output", take=lambda a, out: (out[0],))
        keep(layer.post_attention_layernorm, "middle", "mlp_norm", take=lambda a, out: (out[1], out[0]))
        if hasattr(mlp, "experts"):  # activations between router and experts are inside kernels
            keep(mlp.gate, "router", take=lambda a, out: (out[0],))
            keep(mlp, "experts", take=lambda a, out: (out,))
            return
        keep(mlp.gate_up_proj, _GATE_UP, take=lambda a, out: (out[0],))
        keep(mlp.act_fn, "activation", take=lambda a, out: (out,))
        keep(mlp.down_proj, "mlp_output", take=lambda a, out: (out[0],))

    def _hook(self, module: nn.Module, take: Callable[[Any, Any], dict[str, Any]]) -> None:
        # The module may overwrite its inputs, so they are copied before it runs.
        entered: list[Any] = []

        def before(_: nn.Module, args: Any) -> None:
            entered[:] = [_copy(a) for a in args]

        def after(_: nn.Module, args: Any, out: Any) -> None:
            try:
                for name, value in take(entered, out).items():
                    if value is not None:  # only one worker gathers the logits
                        self._kept[name].append(_copy(value).flatten(1).cpu())
            except Exception as e:
                self.error = self.error or f"{type(module).__name__}: {type(e).__name__}: {e}"

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def take(self, file: Path) -> None:
        """Write the values since the last ``take``, concatenated over calls, and discard them."""
        outputs = {name: torch.cat(values) for name, values in self._kept.items()}
        self._kept.clear()
        save_file(outputs, file)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._kept.clear()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def trace_file(folder: Path, rank: int) -> Path:
    """File that a worker writes its trace to."""
    return folder / f"trace-{rank}.safetensors"


def read_workers(folder: Path, workers: int) -> list[Trace]:
    """Every worker's trace, in rank order; removes the files."""
    files = [trace_file(folder, rank) for rank in range(workers)]
    shards = [load_file(file) for file in files]
    for file in files:
        remove(file)
    return shards


def join_workers(shards: Sequence[Trace], shape: ModelShape) -> Trace:
    """The trace of the full model from those of all workers, in rank order.

    A worker's QKV projection is its query heads, then its key heads, then its value heads; its MLP projection
    is its gate columns, then its up columns. With fewer key/value heads than workers, neighbouring workers
    hold the same ones. A norm over all heads is computed by every worker.
    """
    workers, d = len(shards), shape.head_dim
    heads, groups = shape.num_heads // workers, max(1, shape.num_kv_heads // workers)
    every = max(1, workers // shape.num_kv_heads)
    whole: Trace = {}
    for site, values in shards[0].items():
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
        elif part in _CUT and not (shape.wide_qk_norm and part.endswith("_norm")):
            step = every if part.startswith("key") else 1
            whole[site] = torch.cat([s[site] for s in shards[::step]], 1)
        else:
            whole[site] = values
    return whole
