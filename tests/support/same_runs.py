"""Whether two runs are the same, bit for bit, and whether a run lacks rollouts.

Both results are lists of problems.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_complete, rollouts_file
from rpg_megatron.data.trajectory import Trajectory

VARIES = (
    *("time/", "throughput/", "memory/", "gpu/", "engine/", "trackers/"),
    *("sync/seconds", "checkpoint/seconds", "mismatch/logp_", "off_policy/"),
    "sampling/discarded",
)
"""Keys of a row that depend on time: which groups were in work when a batch was full, or how the engines
batched requests, from which the last bits of their log-probs follow (``Trajectory.behaviour``). mismatch and
off_policy compare these with the trainer's.
"""
_OWN = (
    *("logs/", "tensorboard/", ".lock", "report.html", "environment.json", "metrics.jsonl", "engines.jsonl"),
    "timeline",
)
"""Files that differ between runs, or are compared by rows."""


def to_row(t: Trajectory) -> dict[str, Any]:
    """All fields of a trajectory that do not depend on time, comparable and JSON-serialisable."""
    fields = vars(t) | {"parts": {k: v for k, v in t.parts.items() if not _varies(k)}}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}


def _varies(key: str) -> bool:
    """Also the time that a tool took."""
    return key.startswith(VARIES) or (key.startswith("env/") and key.endswith("_seconds"))


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The complete rows of metrics; the last row may be half written."""
    file = run / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(row) for row in whole.splitlines()]


def compare_rows(
    rows: list[dict[str, Any]], expected: list[dict[str, Any]], *, engines: int = 1, lost: int | None = None
) -> list[str]:
    """The rows so far against the first ones of another run. lost: the step from which on an engine may have
    been away, and have taken no bytes.
    """
    steps = [row["step"] for row in rows]
    if steps != list(range(len(rows))) or len(rows) > len(expected):
        return [f"rows of steps {steps}; wanted 0, 1, ... up to {len(expected) - 1}"]
    problems = []
    for row, expected_row in zip(rows, expected, strict=False):
        for key in sorted(k for k in row.keys() | expected_row.keys() if not _varies(k)):
            value, expected_value = row.get(key, "missing"), expected_row.get(key, "missing")
            shares = [expected_value * i / engines for i in range(engines)] if key == "sync/bytes" else []
            away = lost is not None and row["step"] >= lost and value in shares
            if value != expected_value and not away:
                problems.append(f"metrics of step {row['step']}: {key} is {value}, not {expected_value}")
        if row.get("mismatch/logp_max", 0) > 1e-3:
            problems.append(f"metrics of step {row['step']}: mismatch/logp_max is {row['mismatch/logp_max']}")
    return problems


def find_missing_rollouts(run: Path) -> list[str]:
    """Steps that have a row of metrics or a checkpoint, but not all their rollouts."""
    steps = {row["step"] for row in read_rows(run)} | set(list_steps(run))
    missing = [s for s in sorted(steps - {0}) if not rollouts_complete(rollouts_file(run, s))]
    return [f"step {step} is done, but its rollouts are not written" for step in missing]


def compare_names(run: Path, reference: Path) -> list[str]:
    """Names of the files of two finished runs, without their logs."""
    names, reference_names = _list_files(run), _list_files(reference)
    return [
        f"{name} is {'missing' if name in reference_names else 'too many'}"
        for name in sorted(names ^ reference_names)
    ]


def compare_files(run: Path, reference: Path) -> list[str]:
    """Every file of two finished runs but their logs: names, and contents without times and paths."""
    names, reference_names = _list_files(run), _list_files(reference)
    problems = compare_names(run, reference)
    return problems + [
        f"{name} differs" for name in sorted(names & reference_names) if _differ(run / name, reference / name)
    ]


def _list_files(run: Path) -> set[str]:
    names = {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}
    return {name for name in names if not name.startswith(_OWN)}


def _differ(file: Path, reference: Path) -> bool:
    return file.read_bytes() != reference.read_bytes() and _content(file) != _content(reference)


def _content(file: Path) -> Any:
    """The part of a file that must be equal where its bytes are not."""
    if file.name == ".metadata":  # torch's index of a checkpoint, which has a number of the save
        index = pickle.loads(file.read_bytes())
        return repr((index.state_dict_metadata, index.planner_data, index.storage_data))
    if file.name == ".metadata.json":  # the product's form of the index, with the hash of torch's
        return json.loads(file.read_text()) | {"sha256": ""}
    if file.name == "config.yaml":
        return yaml.safe_load(file.read_text()) | {"runs": ""}
    if file.name == "manifest.json":
        # Files with times or paths have other hashes; their contents are compared.
        text = json.loads(file.read_text())
        hashes = text["files"]
        return text | {"files": {n: n.endswith(".distcp") and f for n, f in hashes.items()}}
    if file.name == "rng.pt":  # each rank's generator starts from a random seed; nothing draws from it
        return file.stat().st_size
    if file.name == "state.json":
        state = json.loads(file.read_text())
        row = {k: v for k, v in (state["row"] or {}).items() if not k.startswith(VARIES)}
        summary = {k: v for k, v in state["summary"].items() if k != "rates"}
        return state | {"row": row, "summary": summary, "metrics_bytes": 0, "seconds": 0}
    if file.name == "summary.json":
        summary = json.loads(file.read_text())
        return {k: v for k, v in summary.items() if k in ("accuracy_before", "accuracy_after", "steps")}
    if file.name.endswith(".parquet"):  # what the engine computed depends on how it batched
        return [{**to_row(t), "behaviour": None} for t in read_rollouts(file)]
    return file.read_bytes()
