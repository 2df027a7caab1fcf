"""Typed settings, without torch: a login node can check a job."""

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_shape import ModelShape, read_model_shape
from rpg_megatron.config.settings import Settings, load_settings

__all__ = ["ModelShape", "Settings", "UserError", "load_settings", "read_model_shape"]
