"""Typed settings, without torch: a login node can check a job.

The names below are imported on first use: many files need ``UserError`` only, and the classes of all settings
take a quarter of a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpg_megatron.config.errors import UserError
    from rpg_megatron.config.model_config import read_model_shape
    from rpg_megatron.config.model_shape import ModelShape
    from rpg_megatron.config.settings import Settings, load_settings

__all__ = ["ModelShape", "Settings", "UserError", "load_settings", "read_model_shape"]

_MODULES = {
    "UserError": "errors",
    "ModelShape": "model_shape",
    "read_model_shape": "model_config",
    "Settings": "settings",
    "load_settings": "settings",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
