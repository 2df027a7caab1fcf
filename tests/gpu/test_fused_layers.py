"""Transformer Engine's layers: names and shapes that the layouts know, checkpoints that both kinds read.

Why: a name that the table does not know stops a run at its first sync; a checkpoint made on a CPU or by the
converter has no state of FP8 scales. Proved for all families, in BF16 and each recipe. Not covered: numbers.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_alone


def test_names_and_checkpoints(tmp_path: Path) -> None:
    results = run_alone("tests.gpu.layers_worker", tmp_path)
    checkpoints = {name: result for name, result in results.items() if "->" in name}
    assert checkpoints == dict.fromkeys(checkpoints, True)
    assert {name: result for name, result in results.items() if result and "->" not in name} == {}
    assert len(results) == 3 * 4 + 3 * 3
