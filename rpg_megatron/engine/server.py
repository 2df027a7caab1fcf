"""``python -m rpg_megatron.engine.server ARGUMENTS``: vLLM's own server, with fewer garbage collections.

By default Python looks for garbage after 700 new objects. Importing vLLM makes 600,000 that stay, and takes a
tenth less time if it looks less often. With ``--headless`` it is the workers of an engine that has its server
on another node.
"""

from __future__ import annotations

import gc
import sys


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
    if "--headless" in sys.argv:
        run_headless()
    else:
        from vllm.entrypoints.launchers.api_server.entry import main

        main()
