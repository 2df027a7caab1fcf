"""``plan``, ``doctor`` and ``train --dry-run`` refuse the same settings: their checks are one table.

Why: a plan that says "fits" for settings that ``train`` refuses costs a night in a queue, and six lists of
checks had drifted apart. The source of the table is parsed: no check is outside it. Then the three commands
check each example and random settings. Not covered: the machine's checks (test_limits, test_precision,
tests/integration/test_doctor_command); what only a rank or an engine finds out.
"""

import ast
import contextlib
import io
import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import rpg_megatron
from rpg_megatron import cli
from rpg_megatron.commands import train as train_command
from rpg_megatron.commands.doctor.command import PROBES
from rpg_megatron.commands.doctor.machine import probe_memory
from rpg_megatron.commands.doctor.probe import Subject
from rpg_megatron.commands.plan import command as plan_command
from rpg_megatron.commands.plan.plan import find_target, make_plan, smallest, sweep
from rpg_megatron.commands.train import dry_run, train
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape, renamed
from rpg_megatron.config.explanation import valid_keys
from rpg_megatron.launcher import checks
from rpg_megatron.launcher.checks import CHECKS, LAYOUT, CheckedRun, run_checks
from rpg_megatron.launcher.nodes import Nodes
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.models.registry import mapping_for
from tests.support.checks import doctor_rows
from tests.support.random_settings import OWN_MODULE, random_changes
from tests.support.recipes import AHEAD, EXAMPLES, H100, MIXTURES, ROWS
from tools.draw_architecture import PACKAGE, read_imports

SMALL = [EXAMPLES / f"{name}.yaml" for name in ("quickstart", "quickstart_moe", "judge", "gsm8k_smoke")]
LARGE = [*ROWS, *H100, *AHEAD, *MIXTURES]
CHECK_MEMORY = train_command.check_memory
WITHOUT_MACHINE = tuple(check for check in CHECKS if "machine" not in check.needs)


# -- no check outside the table ------------------------------------------------------------------------------

CHECK_MODULES = (
    "preflight",
    "input_checks",
    "reward_trial",
    "episode_trial",
    "teacher_checks",
    "fine_tuning",
)
"""In launcher/: the functions of the table."""


def functions_of(module: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((PACKAGE / "launcher" / f"{module}.py").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def names_in(node: ast.AST) -> set[str]:
    """Names, and attributes such as the function of ``preflight.check_gpus``."""
    nodes = list(ast.walk(node))
    attributes = {child.attr for child in nodes if isinstance(child, ast.Attribute)}
    return {child.id for child in nodes if isinstance(child, ast.Name)} | attributes


def test_every_function_that_refuses_is_reached_from_the_table() -> None:
    functions = {name: node for module in CHECK_MODULES for name, node in functions_of(module).items()}
    helpers = functions_of("checks")
    table = ast.parse((PACKAGE / "launcher" / "checks.py").read_text(encoding="utf-8"))
    (rows,) = [
        node.value for node in table.body if isinstance(node, ast.Assign) and names_in(node) & {"CHECKS"}
    ]
    reached, frontier = set(), names_in(rows)
    while frontier:
        reached |= frontier
        frontier = {
            name for at in frontier for name in names_in((helpers | functions).get(at, ast.Pass()))
        } - reached
    refusing = {
        name
        for name, node in functions.items()
        for inner in ast.walk(node)
        if isinstance(inner, ast.Raise) and "UserError" in names_in(inner)
    }
    assert refusing - reached == set()
    assert {name for name in functions if name.startswith(("check_", "warn_"))} - reached == set()


def test_only_the_table_imports_a_check() -> None:
    """Commands use checks only as rows of the table; ``convert`` is exempt, as it starts no run."""
    allowed = {"launcher.checks", *(f"launcher.{module}" for module in CHECK_MODULES)}
    for module in read_imports():
        if module in allowed or not module.startswith(("cli", "commands.", "launcher.")):
            continue
        file = PACKAGE.joinpath(*module.split("."))
        file = file.with_suffix(".py") if file.with_suffix(".py").exists() else file / "__init__.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module == "rpg_megatron.launcher.checks":
                continue
            folders = ("launcher", "engine", "models", "system")
            if not (node.module or "").startswith(tuple(f"rpg_megatron.{folder}" for folder in folders)):
                continue
            names = {alias.name for alias in node.names}
            checking = {
                n for n in names if n.startswith(("check_", "warn_of")) or n in ("try_reward", "try_episode")
            }
            if not module.startswith("commands.convert."):
                assert checking == set(), f"{module} imports {checking}"


def test_every_command_that_starts_a_run_uses_the_check_table() -> None:
    imports = read_imports()
    users = {module for module, imported in imports.items() if "launcher.checks" in imported}
    assert users == {
        "commands.train",
        "commands.study",
        "launcher.node_agent",
        "commands.audit.command",
        "commands.replay.command",
        "commands.eval.settings",
        "commands.launch.job_script",
        "commands.plan.command",
        "commands.plan.plan",
        "commands.doctor.command",
        "commands.doctor.run_inputs",
    }


def test_doctor_has_a_row_for_each_check() -> None:
    names = [name for name, *_ in PROBES]
    assert len(set(names)) == len(names)
    assert {check.name for check in CHECKS} <= set(names)


# -- the three commands agree --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """``train`` and ``doctor`` without the machine's rows and memory; a plan without other layouts."""
    monkeypatch.setattr(checks, "CHECKS", WITHOUT_MACHINE)
    monkeypatch.setattr(train_command, "check_memory", lambda *_: None)
    for name in ("smallest", "smallest_engine", "lighter"):
        monkeypatch.setattr(plan_command, name, lambda *_: None)


def refusals(settings: Settings) -> dict[str, str]:
    """Command -> the message with which it refuses these settings; empty: it accepts them."""

    def message_of(run: Callable[[], object]) -> str:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                run()
            except UserError as e:
                return str(e)
        return ""

    failed = [
        row
        for row in doctor_rows(settings, *(check.name for check in WITHOUT_MACHINE))
        if row.verdict == "failed"
    ]
    return {
        "plan": message_of(
            lambda: plan_command.run_plan(settings, find_target(settings, None), sweep=False, as_json=True)
        ),
        "doctor": f"{failed[0].found}; {failed[0].fix}" if failed else "",
        "train": message_of(lambda: dry_run(settings, Nodes())),
    }


def check_agreement(settings: Settings) -> str:
    """Assert that all commands accept the settings, or that all refuse them; returns the message."""
    messages = refusals(settings)
    assert len({bool(text) for text in messages.values()}) == 1, messages
    assert messages["plan"] == messages["train"]
    first = messages["train"].splitlines()[0] if messages["train"] else ""
    assert messages["doctor"].startswith(first.rpartition("; ")[0])
    return messages["train"]


@pytest.fixture
def write_whole(tmp_path: Path) -> Callable[[Settings], Settings]:
    """Settings with existing data, and a model of the same shape whose weights are a sparse file."""
    columns = {"prompt": "1+1", "answer": "2", "final_answer": ["2"], "solution": "\\boxed{2}"}
    row = columns | {"problem": "1+1", "question": "1+1"}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))

    def make(settings: Settings) -> Settings:
        model = shutil.copytree(EXAMPLES / "quickstart" / "model", tmp_path / "model", dirs_exist_ok=True)
        shutil.copy(settings.model.path / "config.json", model / "config.json")
        header, end = {}, 0
        for name, dims in mapping_for(read_model_shape(model)).hf_tensors().items():
            begin, end = end, end + 2 * math.prod(dims)
            header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (model / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        raw = settings.model_dump()
        raw["model"]["path"] = raw["data"]["path"] = model
        evaluation = raw["evaluation"]
        for part in (raw["data"], *((evaluation or {}).get("sets") or ()), (evaluation or {}).get("data")):
            if part is not None:
                part.update(path=data, split=None, subset=None)
        return Settings.model_validate(raw)

    return make


@pytest.mark.parametrize("file", SMALL, ids=lambda file: file.stem)
def test_small_examples(file: Path, tmp_path: Path) -> None:
    """The judge's server does not run, and a plan does not call it; so its failure only warns here."""
    rows = [json.dumps({"question": "1+1", "answer": "so #### 2"})] * 8
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    overrides = [f"data.path={tmp_path}/gsm8k.jsonl"] if "gsm8k" in file.stem else []
    assert check_agreement(load_settings(file, ["guards.reward_failures=warn", *overrides])) == ""
    assert "more than the model's" in check_agreement(
        load_settings(file, [*overrides, "guards.reward_failures=warn", "rollout.max_response_tokens=99999"])
    )


FEW = (ROWS[0], MIXTURES[0])


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=[] if file in FEW else pytest.mark.long) for file in LARGE],
    ids=lambda file: f"{file.parent.name}/{file.stem}",
)
def test_large_examples(file: Path, write_whole: Callable[[Settings], Settings]) -> None:
    """They name a model with only a config.json, which ``plan`` accepts and ``train`` refuses."""
    settings = load_settings(file)
    messages = refusals(settings)
    assert messages["plan"] == ""
    assert "holds only a config.json, which is enough for plan" in messages["train"]
    assert check_agreement(write_whole(settings)) == ""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, list[str]], Settings]:
    """Load settings; names in capitals are paths of data and models that exist or are damaged."""
    (tmp_path / "own_code_of_test.py").write_text(OWN_MODULE)
    monkeypatch.chdir(tmp_path)
    dense = EXAMPLES / "quickstart" / "model"
    damaged = shutil.copytree(dense, tmp_path / "damaged")
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    (tmp_path / "description").mkdir()
    shutil.copy(dense / "config.json", tmp_path / "description")
    places = {
        "TRAIN": EXAMPLES / "quickstart" / "train.jsonl",
        "MIXTURE": dense.with_name("moe_model"),
        "DENSE": dense,
        "DAMAGED": damaged,
        "DESCRIPTION": tmp_path / "description",
    }

    def load(file: Path, changes: list[str]) -> Settings:
        for name, place in places.items():
            changes = [change.replace(name, str(place)) for change in changes]
        return load_settings(file, [f"runs={tmp_path}/runs", *changes])

    return load


def agreement_on(seeds: range, start: Callable[[Path, list[str]], Settings]) -> dict[str, int]:
    """How many of the random settings cannot be loaded, are refused, and are accepted."""
    counts = {"not loaded": 0, "refused": 0, "accepted": 0}
    for seed in seeds:
        random = Random(seed)
        file, changes = random.choice(SMALL[:2]), random_changes(random)
        try:
            settings = start(file, changes)
        except UserError:  # the same for all commands
            counts["not loaded"] += 1
            continue
        try:
            if "DESCRIPTION" in "".join(changes):
                messages = refusals(settings)
                assert messages["train"]
            else:
                messages = {"train": check_agreement(settings)}
        except BaseException as e:
            e.add_note(f"seed {seed}: {file.name} {' '.join(changes)}")
            raise
        counts["refused" if messages["train"] else "accepted"] += 1
    return counts


def test_some_random_settings(start: Callable[[Path, list[str]], Settings]) -> None:
    counts = agreement_on(range(18), start)
    assert counts["refused"] >= 3, counts
    assert counts["accepted"] >= 3, counts


@pytest.mark.long
def test_many_random_settings(start: Callable[[Path, list[str]], Settings]) -> None:
    """At least 200 of them can be loaded."""
    counts = agreement_on(range(1000, 1500), start)
    print(counts)
    assert counts["refused"] + counts["accepted"] >= 200, counts


@pytest.mark.parametrize(
    ("example", "changes", "message"),
    [
        ("quickstart_moe", ["precision={dtype: bfloat16, fp8: {}}"], "not supported for mixtures"),
        ("quickstart", ["precision={dtype: bfloat16, fp8: {}}"], "requires multiples of 128"),
        ("quickstart_moe", ["engine.tensor=4"], "4 workers share the 64 feed-forward columns"),
        ("quickstart", ["reward.type=no_such_module:f"], "there is no module 'no_such_module'"),
        ("quickstart", ["objective={type: 'own_code_of_test:Loss', bet: 1}"], "no setting 'bet'"),
        ("quickstart", ["objective={type: 'own_code_of_test:loss'}"], "without __call__"),
        ("quickstart", ["model.path=DAMAGED"], "truncated or corrupt"),
        ("quickstart", ["data.path=/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
        (
            "quickstart",
            ["data={mixture: [{preset: aime24}, {path: /nowhere.jsonl}], max_prompt_tokens: 32}"],
            "/nowhere.jsonl",
        ),
    ],
)
def test_what_only_train_refused(
    example: str, changes: list[str], message: str, start: Callable[[Path, list[str]], Settings]
) -> None:
    settings = start(EXAMPLES / f"{example}.yaml", changes)
    if "aime24" in changes[0]:  # train would ask the hub first
        with pytest.raises(UserError, match=r"^data\.mixture\[1\]\.path: /nowhere"):
            plan_command.run_plan(settings, find_target(settings, None), sweep=False, as_json=True)
        return
    assert message in check_agreement(settings)


# -- a sweep, a dry run, a key that is gone ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        # Pipelined replicas do not fit a node of 8: engines there could not read all weights over CUDA IPC.
        (
            EXAMPLES / "qwen3_8b_dapo_math_8k.yaml",
            [
                "engine={colocated: true, kv_cache_gib: 30, replicas: 16}",
                "parallel={tensor: 2, pipeline: 2, data: 4}",
                "bridge={transport: cuda_ipc}",
            ],
        ),
        # Routers would be recomputed with the routes of a later micro-batch.
        (MIXTURES[-1], ["training.router_replay=rollout", "memory.recompute=full"]),
        (EXAMPLES / "qwen3_8b_dapo_math_8k.yaml", ["precision.fp8={}"]),
    ],
)
def test_a_sweep_recommends_no_layout_that_fails_a_check(file: Path, overrides: list[str]) -> None:
    settings = load_settings(file, overrides)
    plan = make_plan(settings, "b200-180")
    best, swept = smallest(plan), sweep(plan, settings.parallel.world)
    assert any(plan.fits for plan in swept)
    for plan in [*swept, *([best] if best else [])]:
        run_checks(CheckedRun(plan.settings, LAYOUT))
        Settings.model_validate(plan.settings.model_dump())
        assert plan.gpus.nodes or not plan.fits


def test_a_dry_run_starts_nothing(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = config_file.parent / "runs"
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(config_file), "--dry-run", "parallel.data=2", "rollout.workers=3"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    (config_file.parent / "resolved.yaml").write_text(out)
    assert load_settings(config_file.parent / "resolved.yaml").parallel.data == 2, "it is a config file"
    assert "/runs/tiny-001\n" in out
    lines = [line.removeprefix("#").split(": ")[0].strip() for line in out.splitlines() if line[:3] == "#  "]
    assert lines == ["engine_0", "sampler", "sampler workers", "reward workers", "rank_0", "rank_1"]
    assert "-m rpg_megatron.engine.server --model" in out
    assert not runs.exists()
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(config_file), "--dryrun", "parallel.tensor=3"])
    assert end.value.code == 2
    assert "tensor=3 does not divide" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_by_all(config_file, capsys, monkeypatch) -> None:
    monkeypatch.setattr(train_command, "check_memory", CHECK_MEMORY)
    settings = load_settings(config_file, ["engine.kv_cache_gib=1000000"])
    (problem,) = make_plan(settings).problems
    assert problem.endswith("; lower training.tokens_per_microbatch or engine.kv_cache_gib")
    (row,) = probe_memory(Subject(settings, read_model_shape(settings.model.path)))
    assert (row.verdict, row.found) == ("failed", problem)
    for start in (lambda: dry_run(settings, Nodes()), lambda: train(settings, StopSignals(resumable=False))):
        with pytest.raises(UserError) as refused:
            start()
        assert str(refused.value) == problem
    assert not settings.runs.exists()
    CHECK_MEMORY(settings, 2)  # a plan is for one machine
    gpu = settings.model_copy(update={"device": "cuda"})
    capsys.readouterr()
    monkeypatch.setattr(train_command, "gpu_memory", lambda: "80GiB")
    CHECK_MEMORY(gpu, 1)
    assert capsys.readouterr().err == "", "separate engines take their own share of a GPU"
    monkeypatch.setattr(train_command, "gpu_memory", lambda: "1GiB")
    CHECK_MEMORY(gpu, 1)
    assert "warning: rpg-megatron plan: a trainer rank needs" in capsys.readouterr().err


def test_a_run_on_gpus_has_what_plan_chooses(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its folder, the sampler and engines on all nodes have one number."""
    gpu = ["device=cuda", "bridge.transport=cuda_ipc", "engine.max_sequences=null"]
    settings = load_settings(config_file, [*gpu, "training.share_prompts=auto", "precision.dtype=bfloat16"])
    monkeypatch.setattr(train_command, "gpu_memory", lambda: "80GiB")
    chosen, planned = train_command.with_choices(settings), make_plan(settings, "80GiB").settings
    assert chosen.engine.max_sequences == planned.engine.max_sequences
    assert planned.engine.max_sequences is not None
    assert chosen.training.share_prompts == planned.training.share_prompts is not True
    fixed = settings.changed(engine={"max_sequences": 7}, training={"share_prompts": True})
    assert train_command.with_choices(fixed) == fixed
    monkeypatch.setattr(train_command, "gpu_memory", lambda: None)
    assert train_command.with_choices(settings) is settings
    cpu = load_settings(config_file, ["engine.max_sequences=null"])
    monkeypatch.setattr(train_command, "gpu_memory", lambda: "80GiB")
    assert train_command.with_choices(cpu) is cpu


def test_a_dry_run_on_two_nodes(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spread = ["parallel.data=2", "engine.replicas=2", "bridge.transport=process_group"]
    settings = load_settings(config_file, spread)
    dry_run(settings, Nodes(0, 2))
    parts = capsys.readouterr().out.split("# node ")[1:]
    names = ("engine_0", "sampler", "rank_0", "engine_1", "rank_1")
    processes = [[name for name in names if f"#   {name}:" in part] for part in parts]
    assert processes == [["engine_0", "sampler", "rank_0"], ["engine_1", "rank_1"]]
    assert "--host ADDRESS" in parts[1]
    over_both = load_settings(config_file, [*spread, "engine={replicas: 1, tensor: 2}"])
    dry_run(over_both, Nodes(0, 2))
    parts = capsys.readouterr().out.split("# node ")[1:]
    assert re.search(r"#   engine_0: .*--nnodes 2 --node-rank 0 .*--master-port 0\n", parts[0])
    assert re.search(r"#   engine_0_part_1: .*--nnodes 2 --node-rank 1 .*--headless\n", parts[1])
    by_ray = over_both.changed(engine={"arguments": ("--distributed-executor-backend=ray",)})
    with pytest.raises(UserError, match=r"--distributed-executor-backend: each engine is on 2 nodes"):
        dry_run(by_ray, Nodes(0, 2))
    dry_run(settings, Nodes(0, 2))
    capsys.readouterr()
    dry_run(settings, Nodes(1, 2))
    assert capsys.readouterr().out == "", "the first node tells of all"
    with pytest.raises(UserError, match="works within one node only"):
        dry_run(load_settings(config_file, spread[:2]), Nodes(0, 2))


def test_what_is_gone_names_what_to_use_instead(config_file, monkeypatch, capsys) -> None:
    gone = {"rollout.oversampling": ("use rollout.dynamic.oversample",), "--gpus": ("use --gpu",)}
    monkeypatch.setattr(renamed, "RENAMED", gone)
    with pytest.raises(UserError, match=r"'rollout\.oversampling' is gone; use rollout\.dynamic\.oversample"):
        load_settings(config_file, ["rollout.oversampling=2"])
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", str(config_file), "--gpus", "h100-80"])
    assert end.value.code == 2
    assert "'--gpus' is gone; use --gpu" in " ".join(capsys.readouterr().err.split())


def test_the_table_of_what_is_gone() -> None:
    keys = set(valid_keys(Settings))
    for key, (replacement, *_) in renamed.RENAMED.items():
        assert key not in keys or key == "trackers.responses", "it exists"  # of other trackers
        assert replacement
    version = tuple(int(part) for part in rpg_megatron.__version__.split(".")[:2])
    assert version < (0, 3) or not renamed.RENAMED, "an entry is kept until version 0.3"
