"""Audits of a real engine and real trainer ranks with faulty weights (``tests.integration.audit_worker``)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rpg_megatron.config import load_settings
from tests.support.engine import Service
from tests.support.runs import QUICKSTART

SMALL = [
    "rollout.max_response_tokens=12",
    "engine.max_sequences=16",
    "engine.kv_cache_gib=0.25",
    "model.vocab_multiple=320",  # 304 rows and padding
    "evaluation=null",
]
EAGER = "engine.arguments=['--enforce-eager', '--no-enable-prefix-caching']"
Weights = dict[str, torch.Tensor]


def write_weights(folder: Path, change: Callable[[Weights], object], source: Path) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def train_a_step(weights: Weights) -> None:
    g = torch.Generator().manual_seed(0)
    for name, w in weights.items():
        weights[name] = w + 0.05 * w.std(correction=0).clamp(min=0.02) * torch.randn(w.shape, generator=g)


def scale(name: str, factor: float) -> Callable[[Weights], object]:
    return lambda weights: weights[name].mul_(factor)


def write_checkpoints(folder: Path, model: Path, faults: Mapping[str, Callable[[Weights], object]]) -> Path:
    """The trainer's weights in ``trained``; in ``faults`` the earlier weights (``earlier``) and a folder for
    each fault.
    """
    trained = write_weights(folder / "trained", train_a_step, model)
    (folder / "faults").mkdir()
    shutil.copytree(model, folder / "faults" / "earlier")
    for name, change in faults.items():
        write_weights(folder / "faults" / name, change, trained)
    return folder


def audit_faults(
    service: Service,
    checkpoints: Path,
    name: str,
    cases: Sequence[str],
    layout: Sequence[str],
    config: Path = QUICKSTART,
) -> dict[str, dict]:
    """The report of every case in one layout of the trainer, against the service's engine.

    checkpoints: as of ``write_checkpoints``.
    """
    settings = load_settings(config, [*SMALL, f"model.path={checkpoints / 'trained'}", *layout])
    run = service.folder / f"audit-{name}"
    run.mkdir()
    (run / "cases.json").write_text(json.dumps(cases))
    codes, logs = service.run_ranks(
        "tests.integration.audit_worker", settings, run, str(checkpoints / "faults")
    )
    assert set(codes) == {0}, logs
    return json.loads((run / "result.json").read_text())


def only_finding(report: dict) -> dict:
    assert not report["clean"]
    assert len(report["findings"]) == 1, report["findings"]
    return report["findings"][0]
