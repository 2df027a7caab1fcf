"""The engine's command line, environment and GPUs, and the cause of its end in its log.

Why: a setting that does not reach vLLM's command line is silently another run, and the token must not show
on it. Not covered: an engine that runs (tests/integration/test_engine_process.py).
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rpg_megatron.commands.eval.settings import EvalModel, check_request
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.model_shape import LatentAttention
from rpg_megatron.engine.arguments import check_engine_arguments, option_names, parser_names
from rpg_megatron.engine.command import (
    context_length,
    engine_command,
    engine_environment,
    kv_bytes_per_token,
    span_arguments,
)
from rpg_megatron.engine.process import first_error
from rpg_megatron.launcher.checks import CheckedRun, check_start
from rpg_megatron.launcher.nodes import assign_node
from rpg_megatron.launcher.preflight import check_expert_columns, check_head_dim, check_kv_cache
from rpg_megatron.system.child import tail_of
from tests.support.tiny_models import TINY, TINY_MOE


@pytest.fixture
def settings(config_file: Path) -> Settings:
    return load_settings(config_file, ["engine.start_timeout=20"])


def test_command_line(config_file: Path, tmp_path: Path) -> None:
    settings = load_settings(
        config_file, ["engine.tensor=2", 'engine.arguments=["--swap-space", "0"]', "seed=7"]
    )
    command = engine_command(settings, 1, tmp_path / "e.sock")
    flags = dict(zip(command[3::2], command[4::2], strict=False))
    assert command[1:3] == ["-m", "rpg_megatron.engine.server"]
    assert flags["--model"] == str(settings.model.path)
    assert flags["--dtype"] == "float32"
    assert flags["--load-format"] == "dummy"
    assert flags["--tensor-parallel-size"] == "2"
    assert flags["--max-model-len"] == str(128 + 16)
    assert flags["--max-num-seqs"] == "16"
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--generation-config"] == "vllm"
    assert flags["--seed"] == "8"
    assert flags["--uds"] == str(tmp_path / "e.sock")
    assert flags["--middleware"].endswith("BearerAuth")
    assert "--trust-remote-code" not in command
    remote = engine_command(settings, 1, tmp_path / "e.sock", listen=("10.0.0.2", 15001))
    assert remote[remote.index("--host") + 1 : remote.index("--host") + 4] == ["10.0.0.2", "--port", "15001"]
    assert "--uds" not in remote
    assert "--enforce-eager" in command
    assert "--distributed-executor-backend" not in command
    single = engine_command(load_settings(config_file), 0, tmp_path / "e.sock")
    assert "UniProcExecutor" in single[single.index("--distributed-executor-backend") + 1]
    assert str(2**28) in command
    assert command[-2:] == ["--swap-space", "0"]
    loaded = engine_command(settings, 1, tmp_path / "e.sock", weights="checkpoint")
    assert loaded[loaded.index("--load-format") + 1] == "safetensors"  # no pickles
    on_gpu = engine_command(settings.model_copy(update={"device": "cuda"}), 0, tmp_path / "e.sock")
    assert "--enforce-eager" not in on_gpu
    assert "--distributed-executor-backend" not in on_gpu
    assert "--kv-cache-memory-bytes" not in on_gpu


def test_environment(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "other")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    environment = engine_environment(settings, 0, tmp_path, "secret")
    assert environment["RPG_ENGINE_TOKEN"] == "secret"
    assert environment["RPG_BRIDGE_DIR"] == str(tmp_path)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"  # gloo's default is the address of the host's name
    assert not {"VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"} & set(environment)
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["OMP_NUM_THREADS"] == "12"
    assert environment["TORCH_COMPILE_DISABLE"] == environment["TORCHDYNAMO_DISABLE"] == "1"
    assert "secret" not in " ".join(engine_command(settings, 0, tmp_path / "e.sock"))
    sharded = settings.model_copy(
        update={"engine": settings.engine.model_copy(update={"replicas": 2, "tensor": 2})}
    )
    assert engine_environment(sharded, 0, tmp_path, "secret")["OMP_NUM_THREADS"] == "3"
    fixed = settings.model_copy(update={"engine": settings.engine.model_copy(update={"cpu_threads": 5})})
    assert engine_environment(fixed, 0, tmp_path, "secret")["OMP_NUM_THREADS"] == "5"
    gpu = engine_environment(settings.model_copy(update={"device": "cuda"}), 0, tmp_path, "secret")
    assert gpu["OMP_NUM_THREADS"] == "64"
    assert gpu["TRITON_F32_DEFAULT"] == "ieee"  # or attention would be in TF32, and the guard stop the run
    assert "TRITON_F32_DEFAULT" not in environment
    assert not {"TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"} & set(gpu)
    # A CPU's kernels for latents have a few sizes, and a GPU's no float32.
    assert environment["VLLM_MLA_DISABLE"] == gpu["VLLM_MLA_DISABLE"] == "1"
    precise = settings.changed(precision={"dtype": "bfloat16"}).model_copy(update={"device": "cuda"})
    assert "VLLM_MLA_DISABLE" not in engine_environment(precise, 0, tmp_path, "secret")


def test_engines_have_the_gpus_behind_the_ranks(settings: Settings, tmp_path, monkeypatch) -> None:
    settings = settings.model_copy(
        update={
            "device": "cuda",
            "parallel": settings.parallel.model_copy(update={"tensor": 2}),
            "engine": settings.engine.model_copy(update={"replicas": 2, "tensor": 2}),
        }
    )

    def gpus(index: int) -> str:
        devices = assign_node(settings, 0, 1).gpus(settings, index)
        return engine_environment(settings, index, tmp_path, "secret", devices)["CUDA_VISIBLE_DEVICES"]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpus(0), gpus(1)] == ["2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 6,5,4,3,2")
    assert [gpus(0), gpus(1)] == ["5,4", "3,2"]
    # To read the trainers' memory on their GPUs, an engine must see those too, behind its own.
    settings = settings.model_copy(
        update={"bridge": settings.bridge.model_copy(update={"transport": "cuda_ipc"})}
    )
    assert [gpus(0), gpus(1)] == ["5,4,7,6", "3,2,7,6"]


def test_colocated_engines_have_the_ranks_gpus_and_can_sleep(config_file: Path, tmp_path: Path) -> None:
    overrides = ["engine.colocated=true", "parallel.tensor=2", "parallel.data=2", "engine.kv_cache_gib=2"]
    gpu = [*overrides, "engine.replicas=2", "device=cuda", "bridge.transport=cuda_ipc"]
    settings = load_settings(config_file, gpu)
    assert [assign_node(settings, 0, 1).gpus(settings, i) for i in (0, 1)] == [[0, 1, 2, 3], [1, 0, 2, 3]]
    command = engine_command(settings, 0, tmp_path / "e.sock")
    assert "--enable-sleep-mode" in command
    assert "--sleep-mode-offload-cudagraph" in command  # graphs are in host memory, too
    assert {"--sleep-mode-offload-cudagraph", "--compilation-config"} <= option_names()
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(2 * 1024**3)
    on_cpu = engine_command(load_settings(config_file, overrides), 0, tmp_path / "e.sock")
    assert "--enable-sleep-mode" not in on_cpu  # vLLM refuses it there
    with pytest.raises(UserError, match=r"6 engine workers .* share the GPUs of 4 trainer ranks"):
        load_settings(config_file, [*gpu, "engine.replicas=3", "engine.tensor=2"])


FUSED = "fuse_allreduce_rms"
OFF = ["--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}']


@pytest.mark.parametrize(
    ("overrides", "arguments", "ours", "variable"),
    [
        (["engine.tensor=2"], [], True, "0"),
        (["engine.tensor=2"], [f"-cc.pass_config.{FUSED}=false"], True, "0"),
        (["engine.tensor=2"], [f"--compilation-config.pass_config.{FUSED}", "True"], False, "1"),
        (
            ["engine.tensor=2"],
            ["--compilation-config", f'{{"pass_config": {{"{FUSED}": true}}}}'],
            False,
            "1",
        ),
        (["engine.tensor=1"], [f"-cc.pass_config.{FUSED}=true"], False, "0"),
        (["engine.tensor=2", "device=cpu"], [], False, None),
    ],
)
def test_flashinfers_all_reduces_are_off_unless_the_settings_ask(
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    arguments: list[str],
    ours: bool,
    variable: str | None,
) -> None:
    """VLLM would take them where it finds a compiler, which differs from node to node."""
    monkeypatch.delenv("VLLM_ALLREDUCE_USE_FLASHINFER", raising=False)
    settings = load_settings(config_file, ["device=cuda", *overrides, f"engine.arguments={arguments}"])
    check_engine_arguments(settings)
    command = engine_command(settings, 0, tmp_path / "e.sock")
    given = command[: len(command) - len(arguments)]
    assert (given[-2:] == OFF) == ours
    assert (OFF[0] in given) == ours
    environment = engine_environment(settings, 0, tmp_path, "secret")
    assert environment.get("VLLM_ALLREDUCE_USE_FLASHINFER") == variable


@pytest.mark.parametrize("argument", ["-cc.mode=3", "--compilation-config={}", "--compilation_c"])
def test_a_compilation_config_must_choose_all_reduces(config_file: Path, argument: str) -> None:
    """It replaces ours as a whole, so that vLLM would choose."""
    one = [f"engine.arguments=[{argument!r}]", "device=cuda"]
    check_engine_arguments(load_settings(config_file, one))
    with pytest.raises(UserError, match=r"replaces our choice of all-reduces; add .*fuse_allreduce_rms"):
        check_engine_arguments(load_settings(config_file, [*one, "engine.tensor=2"]))


def test_context_is_capped_by_the_model(config_file: Path) -> None:
    def length(*overrides: str) -> int:
        return context_length(load_settings(config_file, list(overrides)))

    assert length() == 144
    assert length("rollout.max_response_tokens=1000") == 512
    data = config_file.parent / "train.jsonl"
    assert length(f"evaluation={{data: {{path: {data}, max_prompt_tokens: 200}}}}") == 216
    sets = f"sets: [{{path: {data}, name: a, max_prompt_tokens: 90}}, {{path: {data}, name: b, OWN}}]"
    keys = "max_prompt_tokens: 80, max_response_tokens: 100"
    assert length(f"evaluation={{{sets.replace('OWN', keys)}}}") == 180
    keys = "max_prompt_tokens: 8, max_response_tokens: 1"
    assert length(f"evaluation={{max_response_tokens: 60, {sets.replace('OWN', keys)}}}") == 150
    with pytest.raises(UserError, match=r"^evaluation.data.max_prompt_tokens: .* 512 positions"):
        length(f"evaluation={{data: {{path: {data}, max_prompt_tokens: 512}}}}")


def test_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "no log" in tail_of(log)
    log.write_bytes(b"")
    assert tail_of(log) == "(the log is empty)"
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(100_000)))
    assert tail_of(log, lines=2) == "line 99998\nline 99999"


def test_a_log_that_was_deleted_is_read_where_it_is_still_open(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: it is broken\n")
    with log.open("rb") as opened:
        log.unlink()
        assert tail_of(log, opened=opened).splitlines() == [
            "(the file was deleted during the run)",
            "ValueError: it is broken",
        ]
        assert first_error(log, opened=opened) == "ValueError: it is broken"
    assert "no log" in tail_of(log)


def test_the_first_error_of_a_log_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert first_error(log) is None
    lines = [
        "(Worker pid=1) WARNING 11-21 06:03:56 [a.py:299] failed with error current limit exceeds",
        "(Worker pid=1) ERROR 11-21 06:04:45 [m.py:901] Traceback (most recent call last):",
        "(Worker pid=1) ERROR 11-21 06:04:45 [m.py:901] rust.SafetensorError: incomplete: 3",
        "(EngineCore pid=2) Exception: WorkerProc initialization failed",
        "ValueError: later",
    ]
    log.write_text("\n".join(lines))
    assert first_error(log) == "rust.SafetensorError: incomplete: 3"
    assert first_error(log, start=log.read_text().index("ValueError")) == "ValueError: later"
    log.write_text(
        "(APIServer pid=3) core.ValidationError: 1 validation error for VllmConfig\n"
        "(APIServer pid=3)   Value error, no config file [type=value_error, input_type=ArgsKwargs]\n"
    )
    message = "core.ValidationError: 1 validation error for VllmConfig: Value error, no config file"
    assert first_error(log) == message
    log.write_text(lines[0])
    assert first_error(log) is None


def test_a_head_size_that_cpu_engines_lack_is_refused(config_file, tmp_path, make_checkpoint) -> None:
    model = make_checkpoint(tmp_path / "model", head_dim=16)
    settings = load_settings(
        config_file, [f"model.path={model}", f"evaluation={{data: {{path: {tmp_path}}}}}"]
    )
    for check in (
        lambda s: check_start(CheckedRun(s)),
        lambda s: check_request(s, EvalModel(model, None)),
    ):  # training, evaluation
        with pytest.raises(
            UserError, match=r"model has heads of 16 .* on a CPU vLLM supports 32, 64, 80, .*"
        ):
            check(settings)
    check_head_dim(settings.model_copy(update={"device": "cuda"}), read_model_shape(model))
    check_head_dim(load_settings(config_file), read_model_shape(load_settings(config_file).model.path))


def test_a_gpu_keeps_latents_and_a_cpu_keys_and_values(config_file: Path) -> None:
    """Two layers: 4 heads of 32 twice in float32; in 16 bits on each of two workers a latent of 24 + 16."""
    shape = replace(TINY, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32)
    shape = replace(shape, latent=LatentAttention(0, 24, 16, 16, 24))
    settings = load_settings(config_file)
    assert kv_bytes_per_token(settings, shape) == 2 * 2 * 4 * 32 * 4
    precision = settings.precision.model_copy(update={"dtype": "bfloat16"})
    engine = settings.engine.model_copy(update={"tensor": 2})
    on_gpu = settings.model_copy(update={"device": "cuda", "engine": engine})
    assert kv_bytes_per_token(on_gpu, shape) == 2 * 2 * 2 * 32 * 4
    on_gpu = on_gpu.model_copy(update={"precision": precision})
    assert kv_bytes_per_token(on_gpu, shape) == 2 * (24 + 16) * 2


def test_a_kv_cache_smaller_than_a_sequence_is_refused(config_file: Path) -> None:
    settings = load_settings(config_file)
    tokens = context_length(settings)
    needed = kv_bytes_per_token(settings, TINY) * tokens / 2**30

    def with_cache(gib: float, **changes: object) -> Settings:
        engine = settings.engine.model_copy(update={"kv_cache_gib": gib, **changes})
        return settings.model_copy(update={"engine": engine})

    check_kv_cache(with_cache(needed), TINY)
    with pytest.raises(
        UserError, match=rf"engine.kv_cache_gib .* holds {tokens - 1:,} tokens, .* {tokens:,}"
    ):
        check_kv_cache(with_cache(needed * (1 - 1 / (2 * tokens))), TINY)
    check_kv_cache(with_cache(needed / 2, arguments=["--kv-cache-dtype=fp8"]), TINY)  # half the bytes
    check_kv_cache(with_cache(needed / 2).model_copy(update={"device": "cuda"}), TINY)  # vLLM takes the rest


@pytest.mark.parametrize(("columns", "tensor", "fits"), [(64, 2, True), (96, 2, False), (48, 1, False)])
def test_experts_that_engines_on_a_cpu_do_not_have_are_refused(
    config_file: Path, columns: int, tensor: int, fits: bool
) -> None:
    settings = load_settings(config_file, [f"engine.tensor={tensor}"])
    experts = replace(TINY_MOE.experts, ffn_hidden_size=columns)
    shape = replace(TINY_MOE, experts=experts)
    on_gpu = settings.model_copy(update={"device": "cuda"})
    for accepted in [(on_gpu, shape), (settings, TINY), *([(settings, shape)] if fits else [])]:
        check_expert_columns(*accepted)
    if not fits:
        with pytest.raises(
            UserError, match=rf"{tensor} workers share the {columns} .* a multiple of 32 on each"
        ):
            check_expert_columns(settings, shape)


NO_STAGES = "engines have no pipeline stages; remove it and raise engine.tensor, also over several nodes"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--max-num-seqz=3", "vLLM has no option --max-num-seqz; did you mean --max-num-seqs?"),
        ("--bogus", "vLLM has no option --bogus; vllm serve --help=all lists them"),
        ("--gpu_memory_utilization=0.9", None),
        ("--max-num-s=3", None),  # abbreviated
        ("--compilation-config.mode=3", None),
        ("--no-enable-prefix-caching", None),
        ("-O3", None),
        ("--trust_remote_code", "--trust-remote-code: no Python code of a model is run; remove it"),
        *(
            (
                f"{name}{value}",
                f"{name} would change the model in engines only; change config.json in model.path, "
                "which trainers read, too",
            )
            for name, value in (
                ("--hf-overrides", ""),
                ("--hf-over", '={"rope_scaling": {"factor": 4.0}}'),
                ("--hf-overrides", ".rope_scaling.factor=4"),
                ("--hf-config-path", "=elsewhere"),
            )
        ),
        ("-pp=2", f"-pp: {NO_STAGES}"),
        ("-pcp=2", "-pcp: set engine.tensor instead"),
        ("--pipeline_par", f"--pipeline-par: {NO_STAGES}"),
        ("--tensor-parallel-size", "--tensor-parallel-size: set engine.tensor instead"),
        ("--quantization=fp8", "--quantization: set engine.quantization instead"),
        ("--quant", "--quant: set engine.quantization instead"),
        ("-qfp8", "-qfp8: set engine.quantization instead"),
        *(
            (
                name + value,
                f"{name}: the launcher sets it, by engine.replicas, engine.tensor and "
                "cluster.engine_nodes; remove it",
            )
            for name, value in (("--nnodes", ""), ("--nn", "=2"), ("-n2", ""))
        ),
    ],
)
def test_options_that_vllm_lacks_or_that_change_the_model_are_refused(
    config_file: Path, argument: str, message: str | None
) -> None:
    settings = load_settings(config_file, [f"engine.arguments=[{argument!r}, '3']"])
    if message is None:
        check_engine_arguments(settings)
        return
    with pytest.raises(UserError) as error:
        check_engine_arguments(settings)
    assert str(error.value) == f"engine.arguments: {message}"


def test_the_options_of_every_engine_are_vllms(config_file: Path, tmp_path: Path) -> None:
    settings = load_settings(config_file)
    command = engine_command(settings, 0, tmp_path / "e.sock") + span_arguments(2, 1, ("10.0.0.1", 15000))
    assert command[-5:] == ["--master-addr", "10.0.0.1", "--master-port", "15000", "--headless"]
    options = [word for word in command if word.startswith("--")]
    assert set(options) <= option_names()


def test_expert_parallel_engines_are_refused_on_a_cpu(config_file: Path) -> None:
    arguments = "engine.arguments=[--enable-expert-parallel]"
    with pytest.raises(UserError, match=r"--enable-expert-parallel needs device cuda: .* crash"):
        load_settings(config_file, [arguments])
    assert load_settings(config_file, [arguments, "device=cuda"]).engine.arguments


EPISODE = "rollout.episode=tests.support.episodes:client_chat"


def test_an_unknown_parser_of_tool_calls_is_reported(config_file: Path) -> None:
    check_engine_arguments(load_settings(config_file, [EPISODE, "rollout.tool_call_parser=hermes"]))
    with pytest.raises(UserError, match="vLLM has no parser hermse; did you mean"):
        check_engine_arguments(load_settings(config_file, [EPISODE, "rollout.tool_call_parser=hermse"]))


@pytest.mark.long  # imports vLLM
def test_the_parsers_are_those_that_vllm_has() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert parser_names() == set(ToolParserManager.list_registered())
