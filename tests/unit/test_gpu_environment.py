"""``requirements/gpu.txt``, ``slurm/Dockerfile``, docs/install.md, ``pyproject.toml``: one GPU environment.

Why: nothing here installs it, so a version raised in one place would be noticed on a cluster only. Every rule
is shown to find a planted mismatch. Not covered: whether the environment installs and runs.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK, TORCH_PART, RECIPE = "requirements/gpu.txt", "requirements/te-torch.txt", "slurm/Dockerfile"
LOOSE, CPU, PROJECT = "requirements/gpu.in", "requirements/cpu.txt", "pyproject.toml"
FILES = (LOCK, TORCH_PART, RECIPE, LOOSE, CPU, PROJECT, "docs/install.md")
HELD_BACK = {"apache-tvm-ffi"}
"""Packages that vLLM pins to other versions than cpu.txt."""


def requirements(text: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def pins(text: str) -> dict[str, str]:
    """Package -> exact version; AssertionError for a line that is no plain pin."""
    versions = {}
    for r in requirements(text):
        (pin,) = r.specifier
        assert (pin.operator, "*" in pin.version, r.extras) == ("==", False, set()), f"{r} is no pin"
        versions[canonicalize_name(r.name)] = pin.version
    return versions


def commands(recipe: str) -> list[str]:
    """The recipe's instructions, each in one line."""
    lines = [line for line in recipe.splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def mismatches(files: dict[str, str]) -> list[str]:
    """Mismatches, one sentence each."""
    problems = []
    for name in (LOCK, TORCH_PART, RECIPE):
        if re.search(r"://|--(extra-)?index|^\s*-i\s|--find-links", files[name], re.MULTILINE):
            problems.append(f"{name} names an index")
    if problems:  # no pins, so nothing below could be read
        return problems
    project = tomllib.loads(files[PROJECT])["project"]
    locked = pins(files[LOCK]) | pins(files[TORCH_PART])
    required = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["gpu"]]
    for r in required + requirements(files[LOOSE]):
        version = locked.get(canonicalize_name(r.name), "")
        if not version or not r.specifier.contains(version):
            problems.append(f"{r} is wanted, {version or 'nothing'} is pinned")
    parts = {n: v for n, v in locked.items() if n.startswith("transformer-engine")}
    if len(parts) != 3 or len(set(parts.values())) != 1:
        problems.append(f"parts of Transformer Engine: {parts}")
    cpu_pins = pins(files[CPU])
    different = {n for n in locked.keys() & cpu_pins.keys() if locked[n] != cpu_pins[n]}
    problems += [f"{n} is not what cpu.txt has" for n in sorted(different ^ HELD_BACK)]

    recipe = commands(files[RECIPE])
    image, *rest = recipe
    release = re.fullmatch(r"FROM nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu24\.04", image)
    cuda = ".".join(locked.get("cuda-toolkit", "").split(".")[:2])
    if release is None or release[1] != cuda:
        problems.append(f"{image}: CUDA is not {cuda}, or not from that place")
    python = re.search(r"(\d+\.\d+)", project["requires-python"])
    for name in (LOCK, RECIPE, "docs/install.md"):
        named = set(re.findall(r"python ?(3\.\d+)", files[name].lower()))
        if named != {python[1]}:
            problems.append(f"{name} has Python {named}, pyproject.toml {python[1]}")
    order = [
        next((i for i, c in enumerate(rest) if all(word in c for word in words)), -1)
        for words in (
            ("pip install --no-deps", f"{LOCK} "),
            ("pip install --no-deps --no-build-isolation", TORCH_PART),
            ("pip install --no-deps --no-build-isolation --editable /opt/rpg/rpg_megatron",),
        )
    ]
    if -1 in order or order != sorted(order):
        problems.append(f"{RECIPE} does not install {LOCK}, {TORCH_PART} and the package, in this order")
    node_packages = (
        "build-essential",
        f"python{python[1]}-dev",
        "libibverbs1",
        "librdmacm1",
        "ibverbs-providers",
    )
    installed = next((c.split() for c in rest if "apt-get install" in c), [])
    problems += [f"{RECIPE} does not install {name}" for name in node_packages if name not in installed]
    for c in rest:
        copied = c.split()[1:-1] if c.startswith("COPY") else []
        problems += [f"{RECIPE}: {name} is not there" for name in copied if not (ROOT / name).exists()]
    flags = [set(re.findall(r"NVTE_\w+=\w+", files[n])) for n in (TORCH_PART, RECIPE, "docs/install.md")]
    if not flags[0] == flags[1] == flags[2]:
        problems.append(f"Transformer Engine is compiled in several ways: {flags}")
    return problems


def test_the_gpu_environment_is_described_once() -> None:
    assert mismatches({name: (ROOT / name).read_text() for name in FILES}) == []


def changed(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (LOCK, changed("megatron-core==0.19.2", "megatron-core==0.19.1"), "megatron-core==0.19.2 is wanted"),
        (LOCK, changed("math-verify==0.9.0\n", ""), "math-verify is wanted, nothing is pinned"),
        (LOCK, changed("transformer-engine-cu13==2.20.2", "transformer-engine-cu13==2.19"), "parts of"),
        (LOCK, changed("numpy==2.3.5", "numpy==2.3.4"), "numpy is not what cpu.txt has"),
        (LOCK, lambda text: f"--index-url somewhere\n{text}", "names an index"),
        (TORCH_PART, changed("2.20.2", "2.20.1"), "parts of"),
        (PROJECT, changed("vllm==0.32.0", "vllm==0.32.1"), "vllm==0.32.1 is wanted"),
        (PROJECT, changed(">=3.12,<3.13", ">=3.13,<3.14"), "pyproject.toml 3.13"),
        (
            "docs/install.md",
            changed("python3.12 -m venv", "python3.13 -m venv"),
            "docs/install.md has Python",
        ),
        (RECIPE, changed("python3.12-dev", "python3.11-dev"), "slurm/Dockerfile has Python"),
        (RECIPE, changed("cuda:13.0.2", "cuda:12.9.1"), "CUDA is not 13.0,"),
        (RECIPE, changed("nvidia/cuda", "registry.example/nvidia/cuda"), "not from that place"),
        (RECIPE, changed("requirements/gpu.txt ", "requirements/cpu.txt "), "does not install"),
        (RECIPE, changed("NVTE_WITH_NCCL_EP=0", "NVTE_WITH_NCCL_EP=1"), "compiled in several ways"),
        (RECIPE, changed(" librdmacm1", ""), "does not install librdmacm1"),
        (RECIPE, changed("COPY pyproject.toml", "COPY setup.cfg"), "setup.cfg is not there"),
    ],
)
def test_a_mismatch_is_found(file: str, change: Callable[[str], str], message: str) -> None:
    files = {name: (ROOT / name).read_text() for name in FILES}
    assert message in "\n".join(mismatches(files | {file: change(files[file])}))
