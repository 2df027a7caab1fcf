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
from typing import Any


def packages_distributions() -> dict[str, list[str]]:
    """As ``importlib.metadata``'s, which transformers calls, but does not look for each of 50,000 files."""
    found = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        names = (distribution.read_text("top_level.txt") or "").split()
        if not names:
            rows = (distribution.read_text("RECORD") or "").splitlines()
            firsts = {row.split(",")[0].split("/")[0] for row in rows}
            names = [name for name in {inspect.getmodulename(x) or x for x in firsts} if "." not in name]
        for name in names:
            found[name].append(distribution.metadata["Name"])
    return dict(found)


def import_without_compiler() -> None:
    """Import vLLM, which extends a list of torch's compiler (500 modules) unless that cannot be imported."""
    modules: dict[str, Any] = sys.modules
    lowering = modules.setdefault("torch._inductor.lowering", None)  # None: it cannot
    importlib.import_module("vllm")
    if lowering is None:
        del modules["torch._inductor.lowering"]


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
