"""Megatron-Bridge, NVIDIA's converter, as a second source of which HF element lies where in a Megatron shard.

Its converters are called once for each rank, with HF tensors of the numbers of their own elements; where they
arrive can be compared with the ``pieces`` of a mapping. They share no line with ``rpg_megatron.models``.

The unpacked wheel is enough (``make .megatron-bridge``): the ``__init__`` of its packages, which import
Transformer Engine, do not run, and stand-ins replace its modules that build and train models. No process
group is started. Taken from Megatron instead: ``_SPLIT``, and that the experts of a rank are consecutive.
"""

from __future__ import annotations

import fnmatch
import importlib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rpg_megatron.models.boxes import Piece
from rpg_megatron.models.partition import RankCoordinates

WHEEL = Path(__file__).parents[2] / ".megatron-bridge"
_STAND_INS = re.compile(r"megatron\.bridge\.(peft|training|models\.(hf_pretrained|(\w+\.)?\w+_provider))\b")
_SPLIT = {
    "RMSNorm": r"\.layer_norm_(weight|bias)$",  # part of a split layer in Transformer Engine
    "ColumnParallelLinear": r"embeddings|output_layer|_(qkv|fc1|q_proj)|up_proj|in_proj|conv1d|A_log|dt_bias",
    "RowParallelLinear": r"linear_proj|linear_fc2|out_proj",
}
"""Class of a layer -> parameters that tensor parallelism splits like its; the others are replicated."""


class _AnyField(dict[str, Any]):
    def __contains__(self, name: object) -> bool:
        return True


class _StandIn:
    """Takes any argument; an attribute that nobody has set is None."""

    __dataclass_fields__ = _AnyField()

    def __init__(self, *args: Any, **settings: Any) -> None:
        vars(self).update(settings)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, type(name, (_StandIn,), {}))


@cache
def _prepare_import() -> None:
    """Enter the packages of the wheel, and the stand-ins, into ``sys.modules``."""
    for path in (WHEEL / "megatron").rglob("*"):
        name = ".".join(path.relative_to(WHEEL).with_suffix("").parts)
        if _STAND_INS.match(name):
            sys.modules[name] = _StandInModule(name)
        elif path.is_dir():
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(path)]


def _bridge_of(architecture: str) -> Any:
    """Megatron-Bridge's object for an HF architecture. Raises LookupError if there is none."""
    _prepare_import()
    for file in WHEEL.glob("megatron/bridge/models/*/*_bridge.py"):
        if re.search(rf'source="?{architecture}\b', file.read_text(encoding="utf-8")):
            module = importlib.import_module(f"megatron.bridge.models.{file.parent.name}.{file.stem}")
            for value in vars(module).values():
                if getattr(value, "SOURCE_NAME", "") == architecture:
                    return value()
    raise LookupError(f"Megatron-Bridge has no {architecture}")


class MegatronBridge:
    """Its conversion of one checkpoint: architecture and sizes are in ``config``."""

    def __init__(self, config: PretrainedConfig, hf_tensors: Mapping[str, tuple[int, ...]]) -> None:
        sizes = [math.prod(shape) for shape in hf_tensors.values()]
        numbers = torch.arange(1, sum(sizes) + 1).split(sizes)
        self.numbered = {n: x.reshape(s) for (n, s), x in zip(hf_tensors.items(), numbers, strict=True)}
        """Each HF tensor with the numbers of its elements, counted through all tensors from 1."""
        files = SimpleNamespace(get_all_keys=hf_tensors.keys, has_glob=partial(fnmatch.filter, hf_tensors))
        bridge = _bridge_of(config.architectures[0])
        bridge.hf_config = config
        bridge.hf_pretrained = SimpleNamespace(config=config, state=SimpleNamespace(source=files))
        self._config = bridge.provider_bridge(bridge.hf_pretrained)
        self._registry = bridge.mapping_registry()

    def origins(self, param: str, shape: tuple[int, ...], place: RankCoordinates) -> Tensor:
        """Numbers of the HF elements in one parameter of a rank, int64 [*shape]; 0 in padding.

        param, shape: as in ``ModelMapping.stage_params``. Raises LookupError if the parameter is not known.
        """
        experts = place.experts
        first = experts.rank * ((self._config.num_moe_experts or 0) // experts.parallel)
        number = r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+"
        name = re.sub(number, lambda m: str(first + int(m[0])), param)
        grouped = re.sub(r"local_experts\.(\d+)\.(linear_fc\d)\.(\w+)$", r"\2.\3\1", name)
        mapping = next(filter(None, map(self._registry.megatron_to_hf_lookup, (name, grouped))), None)
        if mapping is None:
            raise LookupError(f"Megatron-Bridge has no parameter {name}")
        hf = mapping.hf_param
        values = {k: self.numbered[n] for k, n in hf.items()} if isinstance(hf, dict) else self.numbered[hf]
        kind = next((kind for kind, params in _SPLIT.items() if re.search(params, name)), "RMSNorm")
        layer: Any = type(kind, (nn.Module,), {"config": self._config})()
        zeros = nn.Parameter(torch.zeros(shape, dtype=torch.int64), requires_grad=False)
        layer.register_parameter(re.sub(r"\d+$", "0", mapping.megatron_param.rpartition(".")[2]), zeros)
        ranks = [(place.tensor, place.tensor_rank), (experts.tensor, experts.tensor_rank)]
        rank_0 = {  # cuts whole tensors and sends each rank its part
            "tp_rank": 0,
            "tp_size": property(lambda m: ranks[m.is_expert][0]),
            "scatter_to_tp_ranks": lambda m, parts, *_, **__: parts[ranks[m.is_expert][1]],
            "broadcast_tensor_to_tp_ranks": lambda m, whole, src_rank: whole,
        }
        base = "megatron.bridge.models.conversion.param_mapping.MegatronParamMapping"
        with patch.multiple(base, **rank_0), patch("torch.cuda.current_device", lambda: None):
            out: Tensor = mapping.hf_to_megatron(values, layer)
        # It subtracts 1 from the weights of a norm that it lets Megatron compute as 1 + w.
        return out + (type(mapping).__name__ == "RMSNorm2ZeroCenteredRMSNormMapping")

    def origins_of(self, pieces: Iterable[Piece], shape: tuple[int, ...]) -> Tensor:
        """The same by the pieces of a mapping."""
        out = torch.zeros(shape, dtype=torch.int64)
        for p in pieces:
            out[p.local.slices()] = self.numbered[p.hf_name][p.hf.slices()].reshape(p.local.extent)
        return out

    def element(self, number: int) -> str:
        """HF name and flat index of an element."""
        for name, values in self.numbered.items():
            if 0 <= (index := number - int(values.flatten()[0])) < values.numel():
                return f"{name}[{index}]"
        return "padding"
