"""``rpg-megatron audit``: starts the processes of a run, compares engine and trainer, prints the findings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.checkpoints.megatron_folder import is_megatron
from rpg_megatron.checkpoints.run_folder import ADAPTERS
from rpg_megatron.commands.rank_job import report_file, run_ranks
from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.files import atomic_write_text
from rpg_megatron.config.model_shape import Scales
from rpg_megatron.data.rollout_files import list_rollouts
from rpg_megatron.launcher.checks import CheckedRun, check_start
from rpg_megatron.launcher.run_dir import CONFIG, load_run_settings
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.launcher.summary import display_path

_EAGER = ("--enforce-eager", "--no-enable-prefix-caching")
"""Hooks see neither the modules of a compiled model nor tokens of a cached prefix, which routes need."""
_SHOWN = 6  # findings per engine
_MAY_DIFFER = ("rope", "norm_eps", "dtype", "max_positions")
_COLUMNS = {
    "input": ("input",),
    "norm": ("input_norm",),
    "qkv": ("query", "key", "value"),
    "qk_norm": ("query_norm", "key_norm"),
    "rope": ("query_rope", "key_rope"),
    "attn": ("attention",),
    "o_proj": ("attention_output",),
    "mlp_norm": ("middle", "mlp_norm"),
    "router": ("router",),
    "experts": ("experts",),
    "gate_up": ("gate", "up"),
    "act": ("activation",),
    "down": ("mlp_output",),
}
"""Columns of the table, and the sites of a layer that each covers."""


def audit(
    target: Path,
    overrides: list[str] | None,
    signals: StopSignals,
    engine_model: Path | None,
    copy: Path | None,
) -> bool:
    """Audit a config file or a run's folder; prints the report and returns whether it is clean.

    engine_model: a checkpoint for the engines to load, instead of a sync. copy: a second file for the report.
    Raises UserError, RunFailed or Interrupted as ``commands.train`` does; leaves only the audit's folder.
    """
    settings, request = plan_audit(target, overrides)
    if copy is not None and not copy.absolute().parent.is_dir():
        raise UserError(f"--out: {copy.absolute().parent} is not a folder; create it, or choose another")
    shape = read_model_shape(settings.model.path)
    other = shape.post_norm or shape.is_part or shape.scales != Scales() or shape.gated_attention
    if other or (shape.experts is not None and shape.experts.router is not None):
        raise UserError(
            f"audit: it does not know the modules of {shape.family} models in vLLM; compare log-probs by the "
            "run's mismatch metrics (guards)"
        )
    check_start(CheckedRun(settings))
    engines, arguments = settings, (*settings.engine.arguments, *_EAGER)
    if engine_model is not None:
        _check_engine_model(settings, engine_model)
        request["sync"] = False
        arguments += ("--load-format", "safetensors")
        engines = settings.changed(model={"path": engine_model.absolute()})
        engines = engines.model_copy(update={"lora": None})  # what it loads is whole
    engines = engines.changed(engine={"arguments": arguments}, training={"router_replay": "off"})
    options: dict[str, Any] = {"engine_settings": engines, "synced": engine_model is None}
    folder, report = run_ranks("audit", settings, signals, request, **options)
    if copy is not None:
        try:
            atomic_write_text(copy, json.dumps(report, indent=2) + "\n")
        except OSError as e:
            raise UserError(f"--out: {copy}: {e.strerror}; choose another file") from None
    print(f"{show(report)}\n\nreport: {display_path(report_file(folder, 'audit'))}", flush=True)
    return bool(report["clean"])


def plan_audit(target: Path, overrides: list[str] | None) -> tuple[Settings, dict[str, Any]]:
    """Settings and request for a config file, or for a run's folder with its newest weights and rollouts.

    Raises UserError if the settings cannot be read.
    """
    request: dict[str, Any] = {}
    if not target.is_dir():
        settings = with_local_model(load_settings(target, overrides))
    else:
        if not (target / CONFIG).is_file():
            raise UserError(f"{target}: holds no {CONFIG}; give a config file, or the folder of a run")
        settings = load_run_settings(target / CONFIG, overrides)
        exports = sorted((target / "hf").glob("step_*/"))
        if exports:
            old = {f"model.path ({display_path(settings.model.path)})": str(settings.model.path)}
            old |= {display_path(path): str(path.absolute()) for path in exports[:-1]}
            request["others"] = old
            model = {"path": exports[-1].absolute(), "adapter": None}
            adapter = target.absolute() / ADAPTERS / exports[-1].name
            if settings.lora is not None and adapter.is_dir():
                model = {"adapter": adapter}  # instead of the sums: engines are to add them
            settings = settings.changed(model=model)
        if saved := list_rollouts(target):
            request["rollouts"] = str(saved[-1].absolute())
        settings = settings.model_copy(update={"runs": target.absolute().parent})
    settings.prompts("audit")
    settings = settings.changed(
        rollout={"ahead": 0, "inflight": "continue"},  # it sends one request at a time
        guards={"uncorrected": False},
        training={"share_prompts": False},  # its references compute one sequence at a time
    )
    return settings.model_copy(update={"name": f"{settings.name}-audit", "trackers": ()}), request


def _check_engine_model(settings: Settings, path: Path) -> None:
    """Check that the engine's checkpoint has the trainer's sizes; the audit finds other differences."""
    if is_megatron(path):
        raise UserError(
            f"--engine-model: {path} is a Megatron checkpoint, which engines do not load; convert it with "
            "rpg-megatron convert megatron-to-hf"
        )
    policy_shape = read_model_shape(settings.model.path)
    try:
        engine_shape = read_model_shape(path)
    except UserError as e:
        raise UserError(f"--engine-model: {str(e).removeprefix('model.path: ')}") from None
    policy, engine = asdict(policy_shape) | {"fp8_files": False}, asdict(engine_shape)  # has bfloat16
    differing = [name for name in policy if name not in _MAY_DIFFER and policy[name] != engine[name]]
    if differing:
        listed = ", ".join(f"{name} {engine[name]}, not {policy[name]}" for name in differing)
        raise UserError(f"--engine-model: {path} is a different model than model.path ({listed})")


def show(report: dict[str, Any]) -> str:
    """The layers of the first engine with findings, or of the first one, and the verdicts, as text."""
    engines = report["engines"]
    worst = next((e for e in engines if not e["clean"]), engines[0])
    source = "weights synced through the bridge" if report["synced"] else "weights as the engine loaded them"
    logprobs, routes, first = worst["logprobs"], worst["routes"], worst["first"]
    head = "*" if _broken(worst, ("logits", "logprobs")) else ""
    lines = [
        f"\nengine {worst['engine']} against the trainer: {worst['sequences']} sequences, {worst['tokens']} "
        f"tokens, {report['dtype']}, {source}",
        "relative difference of engine and trainer; * marks a module whose output does not match its input\n",
        *_table(worst),
        f"\nfinal norm {_cell(worst, 'final_norm')}   log-probs {head}mean {_number(logprobs['mean'])}, "
        f"max {_number(logprobs['max'])} nats over {logprobs['tokens']:.0f} sampled tokens\n",
    ]
    if routes:
        lines.append(
            f"choices of experts: {routes['changed']} of {routes['choices']} (tokens x layers) differ; "
            f"{routes['unused']} of {routes['experts']} experts were not chosen for any token\n"
        )
    if first:
        lines.append(
            f"first: {first['site']} of the {first['side']}, off by {_number(first['error'])} "
            f"(rounding explains {first['tolerance']:.0e})"
        )
    for engine in engines:
        name = f"engine {engine['engine']}: " if len(engines) > 1 else ""
        if engine["clean"]:
            lines.append(f"{name}clean: every module of both sides matches its input; they agree")
        for finding in engine["findings"][:_SHOWN]:
            lines.append(f"{name}{finding['kind']}: {finding['text']}.\n  What to do: {finding['advice']}.")
        if (more := len(engine["findings"]) - _SHOWN) > 0:
            lines.append(f"{name}and {more} more findings, see the report")
    return "\n".join(lines)


def _table(engine: dict[str, Any]) -> list[str]:
    """One line per layer; not a rich table, which would truncate digits if it does not fit."""
    inside = [site.split(".")[1:] for site in engine["drift"] if site.startswith("layers.")]
    present = {part for _, part in inside}
    columns = {title: parts for title, parts in _COLUMNS.items() if present & set(parts)}
    lines = ["layer" + "".join(f"{title:>9}" for title in columns)]
    for i in sorted({int(layer) for layer, _ in inside}):
        cells = (_cell(engine, *(f"layers.{i}.{part}" for part in parts)) for parts in columns.values())
        lines.append(f"{i:>5}" + "".join(f"{cell:>9}" for cell in cells))
    return lines


def _cell(engine: dict[str, Any], *sites: str) -> str:
    values = [engine["drift"][site] for site in sites if site in engine["drift"]]
    if not values:
        return "-"
    return ("*" if _broken(engine, sites) else "") + _number(None if None in values else max(values), 0)


def _number(value: float | None, digits: int = 1) -> str:
    """None means not finite."""
    return "nan" if value is None else f"{value:.{digits}e}"


def _broken(engine: dict[str, Any], sites: tuple[str, ...]) -> bool:
    return any(b["site"] in sites for b in engine["broken"])
