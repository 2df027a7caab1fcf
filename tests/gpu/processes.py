"""One process of a GPU test: it is alone on the card, and leaves its result in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_alone(worker: str, folder: Path, *arguments: str, timeout: float = 400) -> Any:
    """Run ``tests/gpu/<worker>.py FOLDER ARGUMENTS``; return FOLDER/result.json."""
    log = folder / f"{worker}.log"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", f"tests.gpu.{worker}", str(folder), *arguments]
    with log.open("w") as out:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": path},
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    return json.loads((folder / "result.json").read_text())
