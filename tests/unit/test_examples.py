"""The examples and the paper's recipes: each has the values that it claims, and fits its GPUs.

Why: nobody can afford to run them all, so a wrong value would be found by a wrong result, weeks later. The
tables here were written from the paper (arXiv 2505.17508) and its scripts, not from the files. Not covered:
whether a row's figure comes out; nothing here has run on GPUs. That each loss of the files trains is shown by
tests/integration/test_recipe_runs.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.plan import Plan, make_plan
from rpg_megatron.commands.plan.run_cost import Job, cost_of
from rpg_megatron.commands.plan.step_time import estimate_step
from rpg_megatron.config import UserError, load_settings, read_model_shape
from rpg_megatron.launcher.nodes import assign_node
from rpg_megatron.launcher.preflight import check_model
from rpg_megatron.launcher.run_dir import resolved_yaml
from tests.support.recipes import (
    ADAPTERS,
    AHEAD,
    EXAMPLES,
    H100,
    HYBRIDS,
    MIXTURES,
    PAPER,
    REHEARSED,
    ROWS,
    shrunk,
)

GIB = 1024**3
CHOOSE = EXAMPLES.parent / "docs" / "choose-settings.md"

# Table -> model, longest response, the buffer of the penalty on long ones, rows.
QWEN3_ROWS = ["grpo", "dapo", "rpg-ufkl", "rpg-urkl", "rpg-reinforce-ufkl", "rpg-reinforce-urkl"]
RPG_ROWS = [f"{kind}-{d}" for kind in ("rpg", "rpg-reinforce") for d in ("fkl", "rkl", "ufkl", "urkl")]
TABLES = {
    "table3_8k": ("Qwen3-4B-Base", 8192, 2048, QWEN3_ROWS),
    "table5_4k": ("Qwen3-4B-Base", 4096, 1024, [*QWEN3_ROWS, "reinforce++", "reinforce++-baseline"]),
    "table6_2k": ("Qwen3-4B-Base", 2048, 512, QWEN3_ROWS),
    "table8_qwen2.5-7b": (
        "Qwen2.5-7B-Instruct",
        2048,
        512,
        ["grpo", "dapo", "reinforce++", "reinforce++-baseline", *RPG_ROWS],
    ),
    "ablation_clip": ("Qwen3-4B-Base", 2048, 512, ["rpg-reinforce-ufkl", "rpg-reinforce-urkl"]),
    "ablation_beta": (
        "Qwen3-4B-Base",
        4096,
        1024,
        ["rpg-reinforce-ufkl", "rpg-reinforce-ufkl-noiterref"],
    ),
    "qwen2.5-math-7b": ("Qwen2.5-Math-7B", 2048, 512, ["rpg-reinforce-urkl"]),
}
# Row -> loss, beta, low and high bound of the clip, advantage, anchor.
BASELINES = {
    "grpo": ("grpo", 1e-3, 0.2, 0.2, "grpo", "fixed"),
    "dapo": ("dapo", None, 0.2, 0.28, "grpo", "old"),
    "reinforce++": ("reinforce_plus_plus", 1e-4, 0.2, 0.28, "reinforce_plus_plus", "old"),
    "reinforce++-baseline": ("reinforce_plus_plus", 1e-4, 0.2, 0.28, "reinforce_plus_plus_baseline", "old"),
}
RPG = ("rpg", 1e-4, 0.2, 0.28, "rpg", "old")
FIGURES = {  # of all rows of an ablation; -noiterref has another anchor
    "ablation_clip": ("rpg", 1e-4, 0.1, 0.1, "rpg", "old"),
    "ablation_beta": ("rpg", 1e-3, 0.2, 0.28, "rpg", "old"),
}

PARAMETERS = {  # as published
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen3-4B-Base": 4_022_468_096,
    "Qwen3-8B-Base": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}
EXPERT_KEYS = {
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts",
    "num_experts_per_tok",
}  # fmt: skip


def label(file: Path) -> str:
    return str(file.relative_to(EXAMPLES))


def test_every_row_of_the_tables_has_its_file_and_no_other() -> None:
    named = {f"paper/{table}/{row}.yaml" for table, (*_, rows) in TABLES.items() for row in rows}
    assert {label(file) for file in ROWS} == named
    assert len(named) == 37


@pytest.mark.parametrize("file", ROWS, ids=label)
def test_a_row_is_what_the_paper_says(file: Path) -> None:
    model, response, buffer, _ = TABLES[file.parent.name]
    row = file.stem.removesuffix("-noiterref")
    loss, beta, low, high, advantage, anchor = FIGURES.get(file.parent.name) or BASELINES.get(row, RPG)
    if row != file.stem:
        anchor = "fixed"
    settings = load_settings(file)
    objective, optimizer = settings.objective, settings.optimizer
    assert settings.model.path.resolve() == EXAMPLES / "models" / model
    assert (objective.type, getattr(objective, "beta", None)) == (loss, beta)
    assert (objective.clip.kind, objective.clip.low, objective.clip.high, objective.clip.c) == (
        "dual",
        low,
        high,
        10.0,
    )
    if row in RPG_ROWS:
        estimator, divergence = row.rsplit("-", 1)
        reinforce = estimator == "rpg-reinforce"
        assert objective.divergence == divergence
        assert objective.estimator == ("reinforce" if reinforce else "differentiable")
        assert objective.kl_placement == ("folded" if reinforce else "additive")
        assert objective.ratio == "token"
    if row == "grpo":
        assert not objective.corrected
    assert (settings.advantage.type, settings.anchor.type) == (advantage, anchor)
    assert settings.aggregation.type == "token_mean"
    assert settings.correction is None
    assert (settings.data.max_prompt_tokens, settings.rollout.max_response_tokens) == (response, response)

    dynamic, overlong = settings.rollout.dynamic, settings.reward.overlong
    if row == "grpo":
        assert dynamic is None
        assert overlong is None
    else:
        assert (dynamic.rounds, dynamic.oversample) == (20, 3.0)
        assert (overlong.buffer, overlong.factor) == (buffer, 1.0)
    assert (settings.reward.correct, settings.reward.wrong, settings.reward.format) == (1.0, -1.0, 0.0)

    assert (settings.rollout.prompts_per_step, settings.rollout.samples_per_prompt) == (512, 16)
    assert (settings.training.minibatches, settings.training.steps) == (16, 400)
    assert not settings.training.mask_truncated
    assert (optimizer.type, optimizer.lr, optimizer.warmup_steps) == ("adamw", 1e-6, 10)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.999)
    assert (optimizer.weight_decay, optimizer.clip_grad) == (0.1, 1.0)
    assert (settings.rollout.temperature, settings.precision.dtype) == (1.0, "bfloat16")
    assert (settings.data.preset, settings.data.too_long) == ("dapo-math-17k", "cut")
    assert (settings.evaluation.samples, settings.evaluation.temperature) == (32, 1.0)
    assert settings.evaluation.every == 10
    heldout = {part.name: part.samples for part in settings.evaluation.heldout}
    assert heldout == {"aime24": 32, "aime25": 32, "amc23": 32, "minerva": 1, "olympiadbench": 1}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_those_of_the_published_models(name: str) -> None:
    (file,) = (EXAMPLES / "models" / name).iterdir()
    assert set(json.loads(file.read_text())) == {
        "architectures", "dtype", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
        "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
        "rope_theta", "tie_word_embeddings", "vocab_size",
    } | ({"head_dim"} if "Qwen3" in name else {"use_sliding_window"}) | (
        EXPERT_KEYS if "-A" in name else set()
    )  # fmt: skip
    short = ["data.max_prompt_tokens=1024", "rollout.max_response_tokens=1024", "reward.overlong=null"]
    settings = load_settings(ROWS[0], [f"model.path={file.parent}", "parallel={}", "engine={}", *short])
    assert make_plan(settings).parameters == PARAMETERS[name]


@pytest.mark.parametrize("file", [*ROWS, *H100, *AHEAD, *MIXTURES, *HYBRIDS, *ADAPTERS], ids=label)
def test_each_fits_its_cards(file: Path) -> None:
    plan = make_plan(load_settings(file))
    assert plan.problems == ()
    assert (plan.target.device, plan.target.name) == ("cuda", "h100-80")
    check_margin(plan)


def check_margin(plan) -> None:
    """No figure of a GPU has been measured, so something is left free; and engines hold a real batch."""
    assert plan.need < plan.target.nbytes - 8 * GIB
    assert plan.engine.total <= 0.93 * plan.target.nbytes
    assert plan.engine.full_sequences > 24


def documented_layouts() -> list[tuple[str, int, list[str], list[str]]]:
    """Model, number of cards, overrides and estimates of each line of the tables of dense models."""
    layouts = []
    for line in CHOOSE.read_text().splitlines():
        if match := re.fullmatch(r"\| `(\S+)` \| (\d+) \| (as it is|`[^`]*`) \| (.*) \|", line):
            overrides = re.findall(r"[\w.]+=\S+(?=[ `])", match[3])
            layouts.append((match[1], int(match[2]), overrides, match[4].split(" | ")))
    return layouts


@pytest.mark.parametrize("length", ["2k", "4k", "8k"])
@pytest.mark.parametrize(("model", "cards", "overrides", "expected"), documented_layouts())
def test_each_documented_layout_fits_and_fills_its_cards(
    model: str, cards: int, overrides: list[str], expected: list[str], length: str
) -> None:
    settings = load_settings(EXAMPLES / f"{model}_dapo_math_{length}.yaml", overrides)
    plan = make_plan(settings)
    assert plan.problems == ()
    check_margin(plan)
    tensor = settings.parallel.tensor
    for node in range(nodes := cards // 8):
        share = assign_node(settings, node, nodes)  # refuses what cannot be dealt out
        workers = len(share.engines) * settings.engine.tensor
        placed = (len(share.ranks), workers)
        assert placed == (8, 8) if settings.engine.colocated else sum(placed) == 8
        assert len(share.ranks) % tensor == 0  # tensor ranks stay on a node
    sizes = zip(("TP", "PP", "DP"), (tensor, settings.parallel.pipeline, settings.parallel.data), strict=True)
    trainer, engines, rank, worker, steps = expected
    assert trainer == ", ".join(f"{name} {size}" for name, size in sizes if size > 1)
    assert engines == f"{settings.engine.replicas} of TP {settings.engine.tensor}"
    step = estimate_step(plan, assume(plan.target.name)).step
    assert steps.split(" / ")[("2k", "4k", "8k").index(length)] == f"{step:,.0f}"
    if length == "8k":
        assert [rank, worker] == [f"{n / GIB:.0f}" for n in (plan.rank_total, plan.engine.total)]


def test_what_less_recomputation_leaves_is_plans() -> None:
    free_bytes = make_plan(
        load_settings(EXAMPLES / "qwen3_8b_dapo_math_8k.yaml", ["memory.recompute=selective"])
    ).left
    page = " ".join(CHOOSE.read_text().split())
    assert (
        f"`memory.recompute=selective`, Qwen3-8B at 8192 tokens still leaves {free_bytes / GIB:.2f} GiB."
        in page
    )


def test_every_example_has_its_layouts_documented() -> None:
    rows = documented_layouts()
    assert {file.name.split("_dapo_math")[0] for file in H100} == {model for model, *_ in rows}
    assert len(H100) == 12
    assert {cards for _, cards, *_ in rows} == {8, 16, 64}
    defaults = [(model, cards) for model, cards, overrides, _ in rows if not overrides]
    assert defaults == [("qwen3_4b", 8), ("qwen2.5_7b", 16), ("qwen3_8b", 16), ("qwen3_32b", 64)]
    apart = [row for row in rows if "engine.colocated=false" in row[2]]
    assert [row[:2] for row in apart] == [row[:2] for row in rows if row not in apart]


@pytest.mark.parametrize("file", H100, ids=label)
def test_an_example_has_the_lengths_of_its_name(file: Path) -> None:
    settings = load_settings(file)
    response = int(file.stem[-2]) * 1024
    assert settings.rollout.max_response_tokens == response
    assert settings.reward.overlong.buffer == response // 4
    assert settings.training.tokens_per_microbatch >= settings.data.max_prompt_tokens + response
    assert settings.name == file.stem.replace("_", "-")
    assert {part.data.thinking for part in settings.evaluation.heldout} == {settings.data.thinking}
    assert {part.data.template for part in settings.evaluation.heldout} == {settings.data.template}


def test_lengths_beyond_the_math_models_positions_are_refused() -> None:
    overrides = [f"model.path={EXAMPLES}/models/Qwen2.5-Math-7B"]
    with pytest.raises(UserError, match=r"\(4096\) is more than the model's 4096 positions"):
        make_plan(load_settings(PAPER / "table5_4k" / "rpg-urkl.yaml", overrides))


def test_names_of_runs_differ() -> None:
    names = [load_settings(file).name for file in [*ROWS, *H100, *AHEAD, *MIXTURES, *HYBRIDS, *ADAPTERS]]
    assert len(set(names)) == len(names) == 65


def test_ahead_examples_differ_from_the_others_in_few_settings() -> None:
    """In how they sample, and in the placement of as many GPUs."""
    assert {plan_of(file).gpus.total for file in AHEAD} == {8, 16, 64}
    for file in AHEAD:
        assert plan_of(file).gpus.total == plan_of(EXAMPLES / file.name).gpus.total
        ahead, base = load_settings(file), load_settings(EXAMPLES / file.name)
        assert ahead.name == f"{base.name}-ahead"
        assert ahead.rollout.ahead in (1, 2)
        assert ahead.correction.type == "truncate"
        assert not ahead.engine.colocated
        rollout = {**base.rollout.model_dump(), "ahead": ahead.rollout.ahead}
        rollout["dynamic"]["oversample"] = 1.0
        assert ahead.rollout.model_dump() == rollout
        assert ahead.model.path.resolve() == base.model.path.resolve()
        changed = {"name", "rollout", "correction", "model"}
        placement: dict[str, set[str] | bool] = {
            "parallel": {"data"},
            "engine": {"colocated", "replicas", "tensor", "arguments"},
            "bridge": {"transport"},
            "cluster": True,
        }
        without = dict.fromkeys(changed, True) | placement
        assert ahead.model_dump(exclude=without) == base.model_dump(exclude=without)


@pytest.mark.parametrize("file", AHEAD, ids=label)
def test_the_estimates_beside_an_example_are_plans(file: Path) -> None:
    """In the file's comment and in the table of docs/choose-settings.md."""
    plan, base = plan_of(file), plan_of(EXAMPLES / file.name)
    in_turn = make_plan(load_settings(file, ["rollout.ahead=0"]))
    overlapped, *others = (estimate_step(p, assume(p.target.name)) for p in (plan, in_turn, base))
    placements = [overlapped.placement, *(step.placement for step in others)]
    assert placements == ["overlapped", "by turns", "colocated"]
    assert plan.gpus.total == base.gpus.total
    of_step = overlapped.generation, overlapped.training, overlapped.step, *(step.step for step in others)
    estimates = [round(seconds) for seconds in of_step]
    comment = " ".join(line[1:] for line in file.read_text().splitlines() if line.startswith("#"))
    assert [int(n) for n in re.findall(r"(\d+) s[,;.]", comment.split("estimates")[1])] == estimates
    (row,) = re.findall(rf"\| `{file.stem}` \|(.*)\|", CHOOSE.read_text())
    expected = [f"{plan.gpus.trainer} + {plan.gpus.engines}", plan.settings.rollout.ahead, *estimates]
    assert [cell.strip() for cell in row.split("|")] == [str(value) for value in expected]


def costs() -> dict[str, str]:
    """File or folder/* -> the other cells of its row in the table of costs."""
    readme = (EXAMPLES / "README.md").read_text()
    return dict(re.findall(r"\| `(\S+(?:\.yaml|\*))` \| ((?:colocated|overlapped|by turns) .*) \|", readme))


@pytest.mark.parametrize(
    "file",
    [*ROWS, *H100, *AHEAD, *MIXTURES, *HYBRIDS, *ADAPTERS, EXAMPLES / "qwen3_4b_distil.yaml"],
    ids=label,
)
def test_the_cost_beside_an_example_is_plans(file: Path) -> None:
    plan = plan_of(file)
    assumed = assume(plan.target.name)
    step = estimate_step(plan, assumed)
    cost = cost_of(plan, step, Job(3600 * assumed.walltime))
    numbers = f"{step.step:,.0f} | {cost.jobs} | {cost.days:.1f} | {cost.gpu_hours:,.0f}"
    row = costs().get(label(file)) or costs()[label(file.parent / "*")]
    assert row == f"{step.placement} | {plan.gpus.total} | {numbers}"


def test_every_row_of_the_table_of_costs_has_its_file() -> None:
    assert all(any(EXAMPLES.glob(name)) for name in costs())


def plan_of(file: Path) -> Plan:
    return make_plan(load_settings(file))


def mixtures() -> list[tuple[str, str, list[str], list[str]]]:
    """File, number of cards, overrides and estimates of each line of the table of mixtures."""
    rows = []
    for line in CHOOSE.read_text().splitlines():
        if match := re.fullmatch(
            r"\| `(\S*(?:_a\S+b|olmoe\S+|glm\S+)_dapo\S+)` \| (\d+ (?:\+ \d+|shared)) \| (.*)"
            r" \| (\d+) \| (\d+) \| (\d+) \|",
            line,
        ):
            overrides = re.findall(r"[\w.]+=\S+(?=[ `])", match[3])
            rows.append((match[1], match[2], overrides, list(match.groups()[3:])))
    return rows


@pytest.mark.parametrize(("name", "cards", "overrides", "expected"), mixtures())
def test_a_documented_mixture_fits_with_experts_on_one_node(
    name: str, cards: str, overrides: list[str], expected: list[str]
) -> None:
    (file,) = EXAMPLES.glob(f"*/{name}.yaml")
    settings = load_settings(file, overrides)
    plan, parallel = make_plan(settings), settings.parallel
    assert plan.problems == ()
    check_margin(plan)
    shared = settings.engine.colocated
    assert cards == (f"{plan.gpus.total} shared" if shared else f"{plan.gpus.trainer} + {plan.gpus.engines}")
    assert set(plan.gpus.nodes) == ({(8, 8)} if shared else {(8, 0), (0, 8)})
    assert 8 % (parallel.expert * parallel.expert_tensor) == 0
    estimates = plan.rank_total, plan.engine.total, sum(part.nbytes for part in plan.host)
    assert [f"{nbytes / GIB:.0f}" for nbytes in estimates] == expected
    # In host memory only where no other rank shares the state.
    assert not settings.memory.offload_optimizer or parallel.tensor * parallel.data == parallel.expert


def over_nodes() -> list[tuple[str, str, list[str], str]]:
    """Model, file, overrides and estimates of each line of the table of engines over several nodes."""
    rows = re.findall(r"\| `(\S+)` \| `((?:hybrid|moe)/\S+)` \| `(.*)` \| (.*) \|\n", CHOOSE.read_text())
    return [(model, file, options.split(), estimates) for model, file, options, estimates in rows]


@pytest.mark.parametrize(("model", "file", "options", "expected"), over_nodes())
def test_a_documented_engine_over_nodes_fits(
    model: str, file: str, options: list[str], expected: str
) -> None:
    nodes = ["cluster.trainer_nodes=32", "cluster.engine_nodes=32"]
    options = [f"model.path={EXAMPLES / 'models' / model}", *options, *nodes]
    plan = make_plan(load_settings(EXAMPLES / f"{file}.yaml", options))
    assert (plan.problems, plan.target.name, plan.gpus.total) == ((), "h100-80", 512)
    assert plan.settings.engine.tensor > plan.gpus.per_node
    sizes = " | ".join(f"{nbytes / GIB:.0f}" for nbytes in (plan.rank_total, plan.engine.total))
    assert expected == f"{sizes} | {estimate_step(plan, assume(plan.target.name)).step:,.0f}"


def test_every_mixture_is_documented() -> None:
    assert [model for model, *_ in over_nodes()] == ["Qwen3.5-397B-A17B", "DeepSeek-V3", "Kimi-K2-Instruct"]

    assert {(name, cards) for name, cards, *_ in mixtures()} == {
        ("qwen3_30b_a3b_dapo_math_8k", "16 shared"),
        ("qwen3_30b_a3b_dapo_math_8k", "8 + 8"),
        ("qwen3_30b_a3b_dapo_math_8k", "16 + 16"),
        ("qwen3_235b_a22b_dapo_math_8k", "64 + 64"),
        ("qwen1.5_moe_a2.7b_dapo_math_4k", "16 shared"),
        ("olmoe_1b_7b_dapo_math_2k", "8 shared"),
        ("glm_4.5_air_dapo_math_8k", "64 + 32"),
        ("glm_4.7_flash_dapo_math_8k", "16 shared"),
        ("moonlight_16b_a3b_dapo_math_4k", "16 shared"),
        ("qwen3.5_35b_a3b_dapo_math_8k", "16 shared"),
        ("qwen3_next_80b_a3b_dapo_math_8k", "32 + 32"),
    }
    documented = {name for name, *_ in mixtures()}
    assert {file.stem for file in [*MIXTURES, *HYBRIDS] if plan_of(file).shape.experts} == documented


def test_adapters_are_documented_with_plans_estimates() -> None:
    rows = re.findall(
        r"\| `(\S+_lora)` \| (.+) \| (\d+) \| (\S+M) \| (\d+) \| (\d+) \| (\d+) \|",
        CHOOSE.read_text(),
    )
    assert [row[0] for row in rows] == [file.stem for file in sorted(ADAPTERS, key=lambda f: cards(f))]
    for name, gpus, rank, trained, *estimates in rows:
        plan, base = plan_of(EXAMPLES / f"{name}.yaml"), load_settings(EXAMPLES / "dapo_math" / "base.yaml")
        lora = plan.settings.lora
        assert (lora.publish, int(rank)) == ("adapters", lora.rank)
        assert plan.settings.optimizer.lr == pytest.approx(10 * base.optimizer.lr)
        assert gpus == (
            f"{plan.gpus.total} shared"
            if plan.gpus.colocated
            else f"{plan.gpus.trainer} + {plan.gpus.engines}"
        )
        assert trained == f"{plan.trained / 1e6:.0f}M"
        nbytes = plan.rank_total, plan.engine.total, sum(part.nbytes for part in plan.host)
        assert [f"{n / GIB:.0f}" for n in nbytes] == estimates


def cards(file: Path) -> int:
    return plan_of(file).gpus.total


def test_the_largest_mixture_fits_no_fewer_cards_with_adapters() -> None:
    """Its rank holds an eighth of the experts: with four ranks, or engines of four GPUs, it does not fit."""
    settings = load_settings(EXAMPLES / "qwen3_235b_a22b_lora.yaml")
    plan = make_plan(settings)
    weights = 2 * plan.parameters
    assert plan.gpus.total == 16
    assert weights / 4 > plan.target.nbytes
    # On the same eight, or fewer than 16: a GPU holds a share of both.
    assert weights / 8 + plan.engine.weights > plan.target.nbytes


def test_with_small_sizes_each_file_is_a_rehearsed_run() -> None:
    def run(file: Path) -> str:
        return resolved_yaml(shrunk(file).model_copy(update={"name": "run"}))

    rehearsed = {run(file) for file in REHEARSED}
    assert len(rehearsed) == len(REHEARSED)
    assert {run(file) for file in [*ROWS, *H100]} == rehearsed


def test_plan_of_a_recipe_by_the_command_line() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "rpg_megatron.cli", "plan", str(PAPER / "table3_8k" / "rpg-ufkl.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "4.02B parameters" in process.stdout
    assert process.stdout.startswith("fits, ")


def test_a_model_that_is_not_there_is_told_from_a_wrong_one(tmp_path: Path) -> None:
    settings = load_settings(ROWS[0], ["model.path=Qwen/Qwen3-4B-Base"])
    with pytest.raises(UserError, match=r"not a directory.*hf download.*plan needs only its config.json"):
        make_plan(settings)
    with pytest.raises(UserError, match=r"Qwen3-32B holds only a config.json.*model.path="):
        check_model(EXAMPLES / "models" / "Qwen3-32B")
    assert read_model_shape(EXAMPLES / "models" / "Qwen3-32B").num_layers == 64
