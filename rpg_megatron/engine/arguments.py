"""Names of vLLM's server options and tool call parsers, from its source: importing it takes many seconds.

A typing error in the settings is thus reported before anything starts.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import read_text

_OPTION = re.compile(r"--[a-z0-9][\w-]*")
_SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
_PARSERS = "tool_parsers/__init__.py"
_OURS = {
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp"),
        "engines have no pipeline stages; remove it and raise engine.tensor, also over several nodes",
    ),
    **dict.fromkeys(
        ("--tensor-parallel-size", "-tp", "--prefill-context-parallel-size", "-pcp"),
        "set engine.tensor instead",
    ),
    **dict.fromkeys(("--data-parallel-size", "-dp"), "set engine.replicas instead"),
    **dict.fromkeys(("--quantization", "-q"), "set engine.quantization instead"),
    **dict.fromkeys(
        ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
        "the launcher sets it, by engine.replicas, engine.tensor and cluster.engine_nodes; remove it",
    ),
    "--trust-remote-code": "no Python code of a model is run; remove it",
}
"""Options that place an engine's workers, change weights, or run code -> what to do instead."""
_FUSION = re.compile(r"fuse_allreduce_rms\W+(true|false)")
_LEAST, _LEAST_PARSERS = 100, 10
"""Fewer mean that vLLM defines them elsewhere; then nothing is checked."""


def uses_flashinfer(settings: Settings) -> bool:
    """Whether all-reduces of engines are FlashInfer's, which it compiles with nvcc at the first start.

    vLLM would decide by what is installed. Off unless ``engine.arguments`` say otherwise: vLLM's own need no
    compiler, and add in a fixed order.
    """
    chosen = _FUSION.findall(" ".join(settings.engine.arguments).lower())
    return reduces_on_gpus(settings) and chosen[-1:] == ["true"]


def reduces_on_gpus(settings: Settings) -> bool:
    """Whether an engine's workers add up numbers of several GPUs."""
    return settings.device == "cuda" and settings.engine.tensor > 1


def check_engine_arguments(settings: Settings) -> None:
    """Check that vLLM has the options in ``engine.arguments`` (abbreviations count), that none of them is
    set elsewhere, and that it has the parser of ``rollout.tool_call_parser``. Raises UserError.
    """
    parser = settings.rollout.tool_call_parser
    parsers = parser_names() if parser else set()
    if parser and parser not in parsers and len(parsers) >= _LEAST_PARSERS:
        near = difflib.get_close_matches(parser, parsers, n=1)
        fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(parsers))}"
        raise UserError(f"rollout.tool_call_parser: vLLM has no parser {parser}; {fix}")
    for argument in settings.engine.arguments:
        given = argument.partition("=")[0].replace("_", "-")
        for option, instead in _OURS.items():
            short = len(given) > 3 and option.startswith(given)
            if given == option or short or re.match(option + (r"\d+$" if option[2:] else "."), given):  # -n2
                raise UserError(f"engine.arguments: {given}: {instead}")
        name = given.partition(".")[0]
        is_whole = given.startswith("-cc") or (len(name) > 5 and "--compilation-config".startswith(name))
        whole = is_whole and reduces_on_gpus(settings)
        if whole and not _FUSION.search(" ".join(settings.engine.arguments).lower()):
            raise UserError(
                f"engine.arguments: {given} replaces our choice of all-reduces; add "
                '"pass_config": {"fuse_allreduce_rms": false} to it'
            )
    options = [argument for argument in settings.engine.arguments if argument.startswith("--")]
    known = option_names() if options else set()
    for argument in options:
        name = re.split("[=.]", argument)[0].replace("_", "-")
        if name.startswith(("--hf-o", "--hf-c")):  # --hf-overrides and --hf-config-path
            raise UserError(
                f"engine.arguments: {name} would change the model in engines only; change config.json in "
                "model.path, which trainers read, too"
            )
        if len(known) >= _LEAST and not any(option.startswith(name) for option in known):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            fix = f"did you mean {near[0]}?" if near else "vllm serve --help=all lists them"
            raise UserError(f"engine.arguments: vLLM has no option {name}; {fix}")


@cache
def option_names() -> set[str]:
    """The long options of vLLM's server; empty if vLLM is not installed."""
    names: set[str] = set()
    for file, tree in _sources(_SOURCES):
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


@cache
def parser_names() -> set[str]:
    """The names of vLLM's tool call parsers; empty if vLLM is not installed."""
    nodes = (node for _, tree in _sources((_PARSERS,)) for node in ast.walk(tree))
    keys = (key for node in nodes if isinstance(node, ast.Dict) for key in node.keys)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _sources(names: Sequence[str]) -> Iterator[tuple[Path, ast.Module]]:
    """Files of vLLM and their syntax; none if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for file in (Path(place, name) for place in places for name in names):
        with suppress(OSError, ValueError, SyntaxError):
            yield file, ast.parse(read_text(file))
