"""The table of checks: everything that must hold before a run, and what each check needs.

``train`` runs all of them and stops at the first error; ``doctor`` shows each as a row; ``plan``, ``launch``,
``replay``, ``eval`` and ``audit`` run those whose needs they meet. A check is a function that raises
UserError (what is wrong, where, and how to fix it) and may return warnings. No command calls a check directly
(``tests/unit/test_checks.py``). Imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rpg_megatron.checkpoints.hf_files import describe_stored, list_checkpoint, list_untrained
from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.checkpoints.megatron_folder import weights_of
from rpg_megatron.checkpoints.peft import check_adapter
from rpg_megatron.config import ModelShape, Settings, UserError, read_model_shape
from rpg_megatron.config.combinations import find_problems
from rpg_megatron.config.data import DataSettings
from rpg_megatron.engine.arguments import check_engine_arguments
from rpg_megatron.environments.harbor_tasks import node_note
from rpg_megatron.launcher import input_checks, layer_checks, preflight, teacher_checks
from rpg_megatron.launcher.episode_trial import try_episode
from rpg_megatron.launcher.fine_tuning import check_conversations
from rpg_megatron.launcher.input_checks import check_data, list_custom_code
from rpg_megatron.launcher.nodes import NodeAssignment, assign_node, span_note
from rpg_megatron.launcher.preflight import check_model
from rpg_megatron.launcher.reward_trial import try_reward
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.system.limits import check_address_space, check_files

Need = Literal["trainer", "engines", "model", "weights", "data", "code", "machine"]
"""trainer, engines: the command starts them. model: its config.json; weights: its other files. data: the
problems. code: the user's own can be imported. machine: this is a machine that the run uses."""
ALL: frozenset[Need] = frozenset(get_args(Need))
LAYOUT: frozenset[Need] = frozenset({"trainer", "engines", "model"})
"""What a layout needs: its checks read no file but config.json, so that many layouts can be compared."""
_SILENT_SECONDS = 3.0
"""A message is printed if a check takes longer, because of large data, say."""


@dataclass(frozen=True)
class CheckedRun:
    """The run to check, and the needs (``Need``) that the command meets."""

    settings: Settings
    has: frozenset[Need] = ALL
    node: int = 0
    nodes: int = 1
    """Number of nodes, and the index of this one."""
    offline: bool = False
    """The run is only prepared here: no server is asked and nothing is downloaded."""
    known: ModelShape | None = None
    """The model's shape, if it has been read."""

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape. Raises UserError if it cannot be read."""
        return self.known or read_model_shape(self.settings.model.path)

    @property
    def assignment(self) -> NodeAssignment:
        """What the command starts on this node."""
        here, none = assign_node(self.settings, self.node, self.nodes), range(0)
        ranks, engines = here.ranks if "trainer" in self.has else none, here.engines
        return replace(here, ranks=ranks, engines=engines if "engines" in self.has else none)


class RunCheck(NamedTuple):
    """A row of the table."""

    name: str
    needs: tuple[Need, ...]
    check: Callable[..., Iterable[str] | None]
    """Raises UserError; returns warnings, if there are any. ``run`` says what its arguments get."""
    seconds: float = 30.0
    """Time limit in ``doctor``."""

    @property
    def about_engines(self) -> bool:
        """Whether it looks at engines only, which a fine-tuning run may have none of."""
        return "engines" in self.needs and "trainer" not in self.needs

    def run(self, run: CheckedRun) -> list[str]:
        """Call the check with what its arguments name: an attribute of the run, or whether it has a need."""
        given: dict[str, Any] = {}
        for name in signature(self.check).parameters:
            if name in ("settings", "shape", "assignment", "offline", "has", "nodes"):
                given[name] = getattr(run, name)
            elif name in ALL:
                given[name] = name in run.has
        return list(self.check(**given) or ())


def _check_settings(settings: Settings) -> None:
    """Settings against each other: some may have been changed after they were loaded."""
    for problem in find_problems(settings):
        raise UserError(problem)


def _check_open_files(settings: Settings, trainer: bool, engines: bool) -> list[str]:
    requests = settings.engine.replicas * settings.engine.most_sequences
    return check_files(settings.parallel.world * trainer, requests * engines)


def _check_placement(settings: Settings, nodes: int) -> list[str]:
    parts = max(assign_node(settings, node, nodes).parts for node in range(nodes))
    if parts == 1:
        return []
    if any(name.replace("_", "-").startswith("--distributed-e") for name in settings.engine.arguments):
        raise UserError(
            f"engine.arguments: --distributed-executor-backend: each engine is on {parts} nodes, where the "
            "launcher starts its workers; remove it"
        )
    return [span_note(parts)] if settings.device == "cuda" else []


def _check_weights(settings: Settings) -> list[str]:
    local = with_local_model(settings)
    path, teacher = local.model.path, local.teacher and local.teacher.path
    check_model(path)
    untrained = list_untrained(path, read_model_shape(path))
    notes = {"model": describe_stored(list_checkpoint(path))}
    notes["teacher"] = describe_stored(list_checkpoint(teacher)) if teacher else ""
    warnings = [f"{key}.path: {note}" for key, note in notes.items() if note]
    if parts := sorted({name.removeprefix("model.").partition(".")[0] for name in untrained}):
        count = f"{len(untrained)} tensors are not trained ({', '.join(parts)})"
        warnings.append(f"model.path: {count}; exports copy them from there, so keep it")
    return warnings


def _check_adapter(settings: Settings, shape: ModelShape) -> None:
    if settings.model.adapter is not None and settings.lora is not None:
        check_adapter(settings.model.adapter, AdapterMapping(shape, settings.lora))


def _check_data(settings: Settings, trainer: bool, offline: bool) -> list[str]:
    warnings = check_conversations(settings, offline=offline) if trainer else []
    return warnings + check_data(settings, trainer=trainer, offline=offline)


CHECKS = (
    RunCheck("settings", ("trainer", "engines"), _check_settings),
    RunCheck("address space", ("machine",), check_address_space),
    RunCheck("open files", ("machine",), _check_open_files),
    RunCheck("packages", ("machine",), preflight.check_packages),
    RunCheck("engine options", ("engines",), check_engine_arguments),
    RunCheck("placement", ("trainer", "engines"), _check_placement),
    RunCheck("model", ("weights",), _check_weights, 330.0),
    RunCheck("layout", ("model", "trainer"), preflight.check_parallel),
    RunCheck("layers", ("model", "trainer"), layer_checks.check_layers),
    RunCheck("kernels", ("machine", "model", "trainer"), layer_checks.check_delta_kernels),
    RunCheck("adapters", ("model", "trainer"), preflight.check_lora),
    RunCheck("adapter to start from", ("model", "weights", "trainer"), _check_adapter),
    RunCheck("teacher", ("model", "trainer"), teacher_checks.check_teacher),
    RunCheck("engine layout", ("model", "engines"), preflight.check_engine_layout),
    RunCheck("linear attention", ("model", "engines"), layer_checks.check_linear_attention),
    RunCheck("routers", ("model", "trainer"), preflight.check_routers),
    RunCheck("head size", ("model", "engines"), preflight.check_head_dim),
    RunCheck("expert columns", ("model", "engines"), preflight.check_expert_columns),
    RunCheck("precision", ("model", "trainer"), preflight.check_precision),
    RunCheck("batch", ("model", "trainer"), preflight.check_batch),
    RunCheck("KV cache", ("model", "engines"), preflight.check_kv_cache),
    RunCheck("GPUs", ("machine",), preflight.check_gpus),
    RunCheck("shared memory", ("machine", "model", "trainer", "engines"), preflight.check_shared_memory),
    RunCheck("disk space", ("machine", "model", "trainer", "engines"), input_checks.check_disk),
    RunCheck("settings without effect", ("trainer", "engines"), input_checks.warn_of_settings),
    RunCheck("data", ("data",), _check_data, 60.0),
    RunCheck("trackers", ("machine", "trainer", "engines"), input_checks.check_trackers),
    RunCheck("reward", ("data", "code", "engines"), try_reward, 330.0),
    RunCheck("teacher's server", ("data", "engines", "trainer"), teacher_checks.check_teacher_server, 90.0),
    RunCheck("own code", ("code",), input_checks.check_custom_code, 330.0),
    RunCheck("episode", ("data", "code", "engines", "weights"), try_episode, 430.0),
)
"""In the order in which a user would fix problems; the inputs last, since reading them is slow."""


def run_checks(run: CheckedRun, *, told: bool = False) -> list[str]:
    """Run the checks whose needs the command meets; returns warnings. Raises UserError at the first error.

    told: print what is waited for, if a check takes long.
    """
    warnings: list[str] = []
    for check in CHECKS:
        if not run.has.issuperset(check.needs):
            continue
        if check.about_engines and not run.settings.engine.replicas:
            continue
        try:
            with told_if_slow(check, run.settings) if told else nullcontext():
                warnings += check.run(run)
        except ImportError as e:  # a login node without numpy or tokenizers
            if not run.offline:
                raise
            warnings.append(f"{check.name}: not checked here without the python package {e.name}")
    return list(dict.fromkeys(warnings))


def check_start(run: CheckedRun) -> None:
    """Run the checks before processes are started, and print the warnings. Raises UserError."""
    for text in run_checks(run, told=True):
        print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def told_if_slow(check: RunCheck, settings: Settings) -> Iterator[None]:
    """Print what is waited for, with the user's code that is imported, if a check takes long."""
    code = {  # of the user, which may hang
        "data": (s.source.type for part in settings.prompt_sets for s in part.data.sources if s.source),
        "reward": (term.type for term in settings.reward.all_terms.values() if term.is_custom),
        "own code": (item.path for item in list_custom_code(settings)),
    }
    names = ", ".join(dict.fromkeys(code.get(check.name, ())))
    text = "reading the data" if check.name == "data" else f"waiting for the check: {check.name}"
    text += f" ({names}{'; an endless source needs data.limit' * (check.name == 'data')})" if names else ""
    slow = threading.Timer(_SILENT_SECONDS, print, [text], {"file": sys.stderr, "flush": True})
    slow.daemon = True
    slow.start()
    try:
        yield
    finally:
        slow.cancel()


def has_weights(model: Path) -> bool:
    """Whether a model's folder holds weights, maybe not all; True if it is no folder.

    Without any, it is a description, which is enough for a plan.
    """
    return (
        not model.is_dir()
        or weights_of(model) is not None
        or any(re.search(r"\.(safetensors|bin)\b", file.name) for file in model.iterdir())
    )


def has_torch() -> bool:
    """Whether this is an environment for runs, in which code of the user can be imported."""
    return importlib.util.find_spec("torch") is not None


def preparing(settings: Settings, *, weights: bool = True, nodes: int = 1) -> CheckedRun:
    """The run of a command that prepares a run on a machine that the run may not use.

    weights: whether the model's files are here. Code of the user is imported if there is torch here.
    """
    missing: set[Need] = {"machine"}
    if not weights:
        missing.add("weights")
    if not has_torch():
        missing.add("code")
    return CheckedRun(settings, ALL - missing, nodes=nodes, offline=True)


def not_checked(run: CheckedRun) -> list[str]:
    """What the checks of a run that is only prepared leave out besides the machine; empty: nothing."""
    settings, left_out = run.settings, []
    if "weights" not in run.has:
        left_out.append("the weights of the model")
    sets: list[tuple[str, DataSettings]] = [(part.where, part.data) for part in settings.prompt_sets]
    if settings.sft is not None:
        sets += settings.sft.parts
    if hub := [key for key, data in sets if any(source.on_hub for source in data.sources)]:
        left_out.append(f"data on the hub ({', '.join(hub)})")
    if "code" not in run.has and (settings.reward.has_custom or any(list_custom_code(settings))):
        left_out.append("your own code, since there is no torch")
    return [f"not checked here, but by train: {', '.join(left_out)}"] if left_out else []


def needs_of_images(settings: Settings) -> list[str]:
    """What episodes in images need on a node; empty: there are none."""
    rollout = settings.rollout
    if rollout.episode is None:
        return []
    source = settings.data.source if settings.data else None
    groups = math.ceil(rollout.prompts_per_step * (rollout.dynamic.oversample if rollout.dynamic else 1))
    at_once = groups * rollout.samples_per_prompt * (1 + rollout.ahead)
    note = node_note(rollout.episode.model_dump(), source.model_dump() if source else {}, at_once)
    return [note] if note else []
