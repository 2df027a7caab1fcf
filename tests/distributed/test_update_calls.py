"""What the hosts ask of the GPUs in an update: operations of a layer, of a chunk of logits, of a micro-batch.

Why: each operation costs the host some microseconds, and each pass over a chunk's logits reads or writes more
than all layers keep of a token; both grow by a line that looks harmless. A rank's policy of local layers on a
fake GPU, alone and with two tensor-parallel ranks (update_calls_worker). The bounds are what was counted when
they were written; a smaller count may lower them. Not covered: kernels, time, Transformer Engine's layers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

PASSES = {"log-probs": 3, "entropy bonus": 3, "rkl": 4, "fkl": 4, "likeliest": 4}
"""Over all logits of a chunk: a largest one for each model, one kernel for all sums, one for the gradient.
The terms of a teacher's likeliest tokens are added in float32, so rounding takes a pass of its own."""
CALLS = {"log-probs": 36, "entropy bonus": 38, "rkl": 52, "fkl": 50, "likeliest": 48}
KERNELS = {"log-probs": 16, "entropy bonus": 16, "rkl": 22, "fkl": 22, "likeliest": 26}


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.long), 2])
def test_operations_of_an_update(tensor: int, tmp_path: Path) -> None:
    result = run_ranks("tests.distributed.update_calls_worker", 1, tmp_path, str(tensor))
    assert result["faults"] == []
    for name, passes in PASSES.items():
        chunk = result[f"chunk: {name}"]
        assert chunk["passes"] == passes, name
        assert chunk["calls"] <= CALLS[name] + tensor - 1, name
        assert chunk["kernels"] <= KERNELS[name], name
        # Largest logits, then all sums, in forward; backward has what it needs.
        assert chunk["messages"] == (2 if tensor > 1 else 0), name
        assert chunk["waits"] == 0
    layer, micro_batch, update = (result[part] for part in ("layer", "micro-batch", "update"))
    assert layer["kernels"] <= (253, 256)[tensor - 1]
    assert layer["calls"] <= (474, 503)[tensor - 1]
    assert micro_batch["kernels"] <= (334, 343)[tensor - 1]
    assert update["kernels"] <= (475, 490)[tensor - 1]
    assert layer["passes"] == layer["waits"] == micro_batch["waits"] == 0
