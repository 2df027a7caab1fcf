"""One rank of test_control_group: what it exchanges with the others, and the ports it listens on."""

from __future__ import annotations

import json
import math
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpg_megatron.commands.audit.trace_megatron import _receive, _send, _Sent
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.system.collectives import (
    broadcast_object,
    control_group,
    default_group_on_host,
    gather_objects,
    gather_on_first,
    new_host_group,
)
from rpg_megatron.system.encoding import decode, encode
from rpg_megatron.training.batch_scatter import BatchScatter
from tests.support.sockets import listening_ports

TRACES = [torch.randn(3, 5).bfloat16(), torch.randn(3, 5).t(), torch.zeros(0, 3)]
"""As ``audit`` sends them: numpy has no bfloat16."""


@dataclass(frozen=True)
class Told:
    """What callers exchange, all kinds of it."""

    rank: int
    sums: dict[tuple[str, int], int]
    names: set[str]
    problem: tuple[bool, str] | None
    numbers: list[float] = field(compare=False)
    array: NDArray[np.float32] = field(compare=False)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def told_by(rank: int) -> Told:
    """Of another size on each rank. NaN in an array is not the usual one."""
    array = np.array([1.5, 0, -0.0] * (rank * 500 + 1), np.float32)
    array.view(np.uint32)[1] = 0x7FC01234
    numbers = [0.1, -0.0, math.inf, math.nan, 5e-324, 3.0]
    return Told(rank, {("weight", 2): 2**64 - 1, ("weight", 0): 0}, {"a", "ü"}, (True, "no"), numbers, array)


def same(found: Any, wanted: Told) -> bool:
    pairs = (found.array, wanted.array), (np.array(found.numbers), np.array(wanted.numbers))
    return bool(found == wanted) and all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def main() -> None:
    folder = Path(sys.argv[1])
    start_process_group(start_device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = start_mesh(ParallelSettings(tensor=world))
    BatchScatter(mesh)
    with default_group_on_host():
        dist.all_gather_object([None] * world, "as Megatron plans a save")
    mine, everyone = told_by(rank), [told_by(r) for r in range(world)]
    rows = [
        *zip(gather_objects(mine, Told), everyone, strict=True),
        *zip(gather_objects(mine, Told, new_host_group()), everyone, strict=True),
        *zip(gather_on_first(mine, Told), everyone if rank == 0 else [], strict=True),
        (broadcast_object(mine, Told), everyone[0]),
    ]
    dist.barrier()
    result = {
        "same": gather_objects(all(same(*row) for row in rows)),
        "traces": all(torch.equal(_receive(decode(encode(_send(t)), _Sent)), t) for t in TRACES),
        "ports": gather_objects(len(listening_ports())),
    }
    touched, said = folder / "touched", ""
    if rank == 0:
        try:
            gather_objects("hello")
        except RuntimeError as e:
            said = str(e)
        result |= {"touched": touched.exists(), "said": said}
        (folder / "result.json").write_text(json.dumps(result))
    else:
        # As another process could that connects in this rank's place: torch's own messages, with a pickle.
        with suppress(pickle.UnpicklingError):
            dist.all_gather_object([None] * world, Evil(touched), group=control_group())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
