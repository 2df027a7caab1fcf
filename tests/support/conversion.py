"""The tools that convert checkpoints, as commands, and what they print and write."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def run(tool: str, *arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """One of tools/, by its absolute path and from another folder."""
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd="/", check=False)


def succeed(tool: str, *arguments: str | Path) -> str:
    done = run(tool, *arguments)
    assert done.returncode == 0, f"{tool} {arguments}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


def fail(tool: str, *arguments: str | Path, code: int = 2) -> str:
    done = run(tool, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def difference(output: str) -> float:
    """The difference that --verify printed."""
    match = re.search(r"max \|difference\| from transformers (\S+)", output)
    assert match, output
    return float(match[1])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
