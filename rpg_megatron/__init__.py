"""RL post-training of LLMs: Megatron-Core policies, vLLM rollouts, KL-regularised policy gradients.

The names below are imported on first use: commands and ranks import this package, and need none of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpg_megatron.commands.api import Run, load_run, train
    from rpg_megatron.config.errors import UserError

__all__ = ["Run", "UserError", "load_run", "train"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rpg_megatron.commands import api

    return getattr(api, name)
