"""Better messages than Click's for mistakes in a command line."""

import re
from typing import Any

from rpg_megatron.config.renamed import explain_renamed


def improve(error: Any) -> None:
    """Set the message of an error of Click, whose classes Typer hides, if there is a better one."""
    name, given = getattr(error, "option_name", None) or "", str(getattr(error, "message", ""))
    key = name.lstrip("-").replace("-", "_") if given.startswith("No such") else ""
    message = explain_renamed(name) or ""
    if file := re.match(r"No such command '(.*\.ya?ml)'", given):
        message = f"No such command '{file[1]}'; write rpg-megatron train {file[1]}"
    elif not message and ("." in key or (key and any(p.name == "config" for p in error.ctx.command.params))):
        from rpg_megatron.config.coming_from import recognize  # these take time
        from rpg_megatron.config.explanation import namesakes, valid_keys
        from rpg_megatron.config.settings import Settings

        keys, theirs = namesakes(key, list(valid_keys(Settings))), recognize(key, None)
        keys = [key] if "." in key else keys or ([theirs.here] if theirs and theirs.same else [])
        message = f"No such option: {name}; write {' or '.join(f'{k}=...' for k in keys)}" if keys else ""
    if message:
        error.message, error.possibilities = message, None
