"""Everything in this folder needs a GPU, and is skipped with the reason where there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, without importing torch."""
    missing = not Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="this machine has no NVIDIA GPU"))
