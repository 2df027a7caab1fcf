"""One rank of test_control_group: what it exchanges with the others, and the ports it listens on."""

from __future__ import annotations

import json
import math
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpg_megatron.commands.audit.trace_megatron import _receive, _rows, _send, _Sent
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.system.collectives import (
    _gather,
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

TRACES = [torch.randn(3, 5).bfloat16(), torch.randn(3, 5).t()]
"""As ``audit`` sends them: numpy has no bfloat16."""


@dataclass(frozen=True)
class Message:
    """All kinds of values that callers exchange."""

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


def message_of(rank: int) -> Message:
    """Its size differs between ranks. The NaN in the array has an unusual payload."""
    array = np.array([1.5, 0, -0.0] * (rank * 500 + 1), np.float32)
    array.view(np.uint32)[1] = 0x7FC01234
    numbers = [0.1, -0.0, math.inf, math.nan, 5e-324, 3.0]
    sums = {("weight", 2): 2**64 - 1, ("weight", 0): 0}
    return Message(rank, sums, {"a", "ü"}, (True, "no"), numbers, array)


def same(received: Any, expected: Message) -> bool:
    pairs = (received.array, expected.array), (np.array(received.numbers), np.array(expected.numbers))
    return bool(received == expected) and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs
    )


def main() -> None:
    folder = Path(sys.argv[1])
    start_process_group(start_device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = start_mesh(ParallelSettings(tensor=world))
    BatchScatter(mesh)
    with default_group_on_host():
        dist.all_gather_object([None] * world, "as Megatron plans a save")
    message, messages = message_of(rank), [message_of(r) for r in range(world)]
    rows = [
        *zip(gather_objects(message, Message), messages, strict=True),
        *zip(gather_objects(message, Message, new_host_group()), messages, strict=True),
        *zip(gather_on_first(message, Message), messages if rank == 0 else [], strict=True),
        (broadcast_object(message, Message), messages[0]),
    ]
    dist.barrier()
    result = {
        "same": gather_objects(all(same(*row) for row in rows)),
        "traces": all(torch.equal(_receive(decode(encode(_send(_rows(t))), _Sent)), t) for t in TRACES),
        "ports": gather_objects(len(listening_ports())),
    }
    touched, error = folder / "touched", ""
    if rank == 0:
        try:
            gather_objects("hello")
        except RuntimeError as e:
            error = str(e)
        result |= {"touched": touched.exists(), "said": error}
        (folder / "result.json").write_text(json.dumps(result))
    else:
        # What a process that connects in this rank's place could send: a pickle.
        _gather(pickle.dumps(Evil(touched)), control_group(), to_all=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
