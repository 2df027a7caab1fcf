"""``python -m rpg_megatron.engine.server ARGUMENTS``: vLLM's own server, whose packages are imported faster.

By default Python looks for garbage after 700 new objects. Importing vLLM makes 600,000 that stay, and takes a
tenth less time if it looks less often. With ``--headless`` it is the workers of an engine that has its server
on another node.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections import defaultdict
from types import ModuleType
from typing import cast


def packages_distributions() -> dict[str, list[str]]:
    """As ``importlib.metadata``'s, which transformers calls, but does not look for each of 50,000 files."""
    found = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        packages = (distribution.read_text("top_level.txt") or "").split()
        if not packages:
            lines = (distribution.read_text("RECORD") or "").splitlines()
            parts = (line.split(",")[0].split("/") for line in lines)
            names = {path[0] if len(path) > 1 else inspect.getmodulename(path[0]) for path in parts}
            packages = [name for name in names if name and "." not in name]
        for package in packages:
            found[package].append(distribution.metadata["Name"])
    return dict(found)


def import_without_compiler() -> None:
    """Import vLLM where nothing is compiled, without 500 modules of torch's compiler.

    vLLM adds names to a list of the compiler, unless that cannot be imported.
    """
    name, modules = "torch._inductor.lowering", cast(dict[str, ModuleType | None], sys.modules)
    modules.setdefault(name, None)  # Python's way to say that it cannot
    importlib.import_module("vllm")
    if modules[name] is None:
        del modules[name]


def run_headless() -> None:
    """As ``vllm serve --headless``, whose own command asks for a package that is called vllm."""
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    args.api_server_count = 0
    serve.run_headless(args)


if __name__ == "__main__":
    gc.set_threshold(50_000, 20, 100)
    importlib.metadata.packages_distributions = packages_distributions
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        import_without_compiler()
    if "--headless" in sys.argv:
        run_headless()
    else:
        from vllm.entrypoints.launchers.api_server.entry import main

        main()
