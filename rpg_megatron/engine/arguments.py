"""The names of vLLM's server options, read from its source: importing its parser takes many seconds.

A typing error in ``engine.arguments`` is thus reported before anything starts.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import read_text

_OPTION = re.compile(r"--[a-z0-9][\w-]*")
_SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
_LEAST = 100
"""Fewer options mean that vLLM defines them elsewhere; then nothing is checked."""


def check_engine_arguments(settings: Settings) -> None:
    """Check that vLLM has the options in ``engine.arguments``; abbreviations count. Raises UserError."""
    options = [argument for argument in settings.engine.arguments if argument.startswith("--")]
    known = option_names() if options else set()
    if len(known) < _LEAST:
        return
    for argument in options:
        name = re.split("[=.]", argument)[0].replace("_", "-")
        if not any(option.startswith(name) for option in known):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            fix = f"did you mean {near[0]}?" if near else "vllm serve --help=all lists them"
            raise UserError(f"engine.arguments: vLLM has no option {name}; {fix}")


@cache
def option_names() -> set[str]:
    """The long options of vLLM's server; empty if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    names: set[str] = set()
    for file in (Path(place, source) for place in places for source in _SOURCES):
        try:
            tree = ast.parse(read_text(file))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and _OPTION.fullmatch(node.value)
            ):
                names.add(node.value)
            elif isinstance(node, ast.ClassDef) and file.name == "cli_args.py":  # an option for each field
                names |= {
                    f"--{field.target.id.replace('_', '-')}"
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
    return names | {name.replace("--", "--no-", 1) for name in names}
