"""The engine that vLLM's CUDA build configures for each example: the table in docs/evidence/performance.md.

Why: on a GPU an engine differs from one on a CPU (model runner, scheduling, graphs, back ends), and vLLM
derives that from our command line. A change should show before it reaches a GPU. Not covered: what needs a
kernel, such as the size of the KV cache.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.commands.plan.plan import make_plan
from rpg_megatron.config import Settings, load_settings
from rpg_megatron.engine.command import engine_command, engine_environment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TABLE = ROOT / "docs" / "evidence" / "performance.md"

QUICKSTART = EXAMPLES / "quickstart.yaml"
QWEN3_4B = EXAMPLES / "qwen3_4b_dapo_math_8k.yaml"
MIXTURE = EXAMPLES / "moe" / "qwen3_30b_a3b_dapo_math_8k.yaml"
VARIANTS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "4B, colocated": (QWEN3_4B, ("engine={colocated: true, kv_cache_gib: 24}",)),
    "4B, FP8 engines": (QWEN3_4B, ("engine.quantization=fp8",)),
    "30B-A3B, FP8 engines": (MIXTURE, ("engine.quantization=fp8",)),
    "30B-A3B, router replay": (MIXTURE, ("training.router_replay=rollout",)),
}
"""Settings that no example has."""


def cases() -> dict[str, tuple[Path, tuple[str, ...]]]:
    """All examples of runs, without the paper's rows, whose engines are among these; and variants.

    Not those that have their data elsewhere: in code, or for fine-tuning.
    """
    files = [*EXAMPLES.glob("*.yaml"), *(EXAMPLES / "async").glob("*"), *(EXAMPLES / "moe").glob("*")]
    named = {f"`{file.relative_to(EXAMPLES)}`": (file, ()) for file in sorted(files)}
    apart = re.compile(r"^ *(source|sft):", re.MULTILINE)
    return {name: row for name, row in named.items() if not apart.search(row[0].read_text())} | VARIANTS


def settings_of(file: Path, *changes: str) -> Settings:
    """As ``train`` makes them on H100s, with a model folder that has a config.json."""
    paths = [] if "quickstart" in file.name else [f"data.path={QUICKSTART.parent / 'quickstart/train.jsonl'}"]
    settings = load_settings(file, [*paths, "device=cuda", *changes])
    model = EXAMPLES / "models" / settings.model.path.name
    if model.is_dir():
        settings = load_settings(file, [*paths, f"model.path={model}", "device=cuda", *changes])
    return settings if settings.engine.max_sequences else make_plan(settings, "h100-80").settings


def resolve(settings: Settings, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """The final configuration of engine 0, by vLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name, value in engine_environment(settings, 0, folder, "token").items():
        patch.setenv(name, value)
    command = engine_command(settings, 0, folder / "socket")
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(command[command.index("--model") :])
    validate_parsed_serve_args(arguments)
    # As the server: its defaults of tokens and sequences are others than those without a context.
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)


@pytest.mark.parametrize("asked", [False, True])
def test_workers_add_up_by_flashinfer_if_it_is_asked_for(asked, tmp_path, monkeypatch):
    """Here as where vLLM would take it: with its compiled kernels."""
    import vllm.envs
    import vllm.utils.flashinfer as flashinfer

    flashinfer.has_flashinfer.cache_clear()
    monkeypatch.setattr(flashinfer, "has_flashinfer_cubin", lambda: True)
    fused = '--compilation-config={"pass_config": {"fuse_allreduce_rms": true}}'
    changes = (f"engine.arguments=['{fused}']",) if asked else ()
    settings = settings_of(EXAMPLES / "qwen3_32b_dapo_math_8k.yaml", *changes)
    passes = resolve(settings, tmp_path, monkeypatch).compilation_config.pass_config
    flashinfer.has_flashinfer.cache_clear()
    assert passes.fuse_allreduce_rms == vllm.envs.VLLM_ALLREDUCE_USE_FLASHINFER == asked


def described(config: Any) -> tuple[str, ...]:
    """The cells of a row of the table, after its first."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend

    model, scheduler, compilation = config.model_config, config.scheduler_config, config.compilation_config
    with set_current_vllm_config(config):
        attention = get_attn_backend(
            model.get_head_size(), model.dtype, config.cache_config.cache_dtype
        ).get_name()
        if attention == "FLASH_ATTN":
            attention += f" {get_flash_attn_version()}"
    return (
        "V2" if config.use_v2_model_runner else "V1",
        "asynchronous" if scheduler.async_scheduling else "synchronous",
        str(scheduler.max_num_batched_tokens) if scheduler.enable_chunked_prefill else "whole",
        str(scheduler.max_num_seqs),
        f"{compilation.cudagraph_mode.name}, {compilation.max_cudagraph_capture_size}",
        attention,
        model.quantization or "",
    )


def table() -> dict[str, tuple[str, ...]]:
    """Example or variant -> the cells of its row in the page."""
    rows = {}
    for line in TABLE.read_text().split("<!-- engines -->")[1].splitlines():
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows |= dict.fromkeys((name.strip() for name in names.split(";")), tuple(cells))
    return rows


def test_the_table_has_no_other_rows():
    assert table().keys() - cases().keys() <= {"", "engine of", "---"}


@pytest.mark.parametrize("name", cases())
def test_engine_of(name, tmp_path, monkeypatch):
    file, changes = cases()[name]
    row = described(resolve(settings_of(file, *changes), tmp_path, monkeypatch))
    assert row == table().get(name), f"the table in {TABLE.name} differs; {name} is now | {' | '.join(row)} |"
