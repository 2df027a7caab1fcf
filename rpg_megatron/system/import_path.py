"""Import ``module:name``. Imports only the standard library, because reward workers use it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def load_function(name: str) -> Callable[..., Any]:
    """Import ``module:function``. Raises ValueError if that fails, or if it is not callable."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path and not module.startswith("rpg_megatron."):
        sys.path.insert(0, "")  # the working directory, for a function in a file next to the config
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as e:
        fix = "add its folder to PYTHONPATH, or start in that folder"
        if module.endswith(".py"):
            fix = f"leave out .py: {module[:-3]}:{attribute}"
        elif not f"{module}.".startswith(f"{e.name}."):
            fix = f"{module} imports it: install it here, or add its folder to PYTHONPATH"
        raise ValueError(f"{name}: there is no module {e.name!r}; {fix}") from None
    except AttributeError:
        raise ValueError(f"{name}: the module {module} has no {attribute!r}; check the name") from None
    except Exception as e:
        raise ValueError(
            f"{name}: importing {module} fails: {type(e).__name__}: {e}; fix the module"
        ) from None
    if not callable(function):
        raise ValueError(f"{name}: is a {type(function).__name__}, not a function; name a function")
    return function
