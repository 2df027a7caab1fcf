"""What rank 0 sends and allocates to hand a batch out and to get log-probs back, measured and computed.

    python -m benchmarks.batch_scatter [--tokens 8192] [--trajectories 256]

Starts small worlds over gloo on this machine. Bytes sent are what the kernel was given to write by rank 0
(``wchar`` of /proc/self/io); the peak is the largest resident memory over what there was before, without the
batch, which rank 0 keeps. The baseline is the same batch by ``scatter_object_list`` to every rank. The last
rows are computed by the formulas that the rows above them are compared with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

from tests.support.ranks import run_ranks

LAYOUTS = [{"data": 2}, {"data": 4}, {"tensor": 2, "data": 2}, {"tensor": 4, "data": 2}, {"tensor": 4}]
LARGE = {"tensor": 8, "pipeline": 8, "data": 8}
GB = 1e9


def main() -> None:
    """Measure each layout, compute the large one, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of each trajectory")
    parser.add_argument("--trajectories", type=int, default=256)
    a = parser.parse_args()
    names = ("sent, MB", "formula", "peak, MB", "formula", "pickled: sent", "peak")
    print(f"{'layout':14}", *(f"{name:>{max(9, len(name))}}" for name in names))
    for layout in LAYOUTS:
        world = math.prod(layout.values())
        with tempfile.TemporaryDirectory() as folder:
            case = {"layout": layout, "tokens": a.tokens, "trajectories": a.trajectories}
            (Path(folder) / "case.json").write_text(json.dumps(case))
            found = run_ranks("benchmarks.batch_scatter", world, Path(folder), timeout=300)
        print_row(layout, a.tokens * a.trajectories, a.trajectories, found)
    print_row(LARGE, 8192 * 8192, 8192, None)


def sent_bytes(layout: dict[str, int], tokens: int, trajectories: int) -> int:
    """What rank 0 sends: a share to each other replica's first rank, and its own down a binary tree.

    tokens: prompts and responses of the batch; taken as responses throughout, which is the most.
    """
    data = layout.get("data", 1)
    replica = math.prod(layout.values()) // data
    return (data - 1 + math.ceil(math.log2(replica))) * share_bytes(layout, tokens, trajectories)


def share_bytes(layout: dict[str, int], tokens: int, trajectories: int) -> int:
    """One replica's: int32 tokens, float32 ``behaviour``; six int32 and the advantage of each trajectory."""
    return (8 * tokens + 28 * trajectories) // layout.get("data", 1)


def peak_bytes(layout: dict[str, int], tokens: int, trajectories: int) -> int:
    """What rank 0 allocates beside the batch: one share, flat."""
    return share_bytes(layout, tokens, trajectories)


def print_row(layout: dict[str, int], tokens: int, trajectories: int, found: dict[str, float] | None) -> None:
    """One line of the table. found: as measured; None: computed only."""
    name = "x".join(f"{key[0].upper()}P{n}" for key, n in layout.items())
    size = 1e6 if found else GB
    got = found or {}

    def cell(key: str) -> str:
        return f"{got[key] / size:9.1f}" if found else f"{'':9}"

    computed = [f(layout, tokens, trajectories) / size for f in (sent_bytes, peak_bytes)]
    unit = "" if found else "  GB"
    pickled = f"   {got['pickled sent'] / size:13.1f} {got['pickled peak'] / size:7.1f}" if found else ""
    print(f"{name:14} {cell('sent')} {computed[0]:9.2f} {cell('peak')} {computed[1]:9.2f}{unit}{pickled}")
    if not found:
        kept = tokens * 8 / GB
        print(f"{'':14} the batch, which rank 0 keeps, gains {kept:.2f} GB of log-probs (old and anchor)")


def be_rank(folder: Path) -> None:
    """One rank: hand out, bring back; both ways."""
    import torch.distributed as dist

    from rpg_megatron.policy.device import start_device, start_process_group

    start_process_group(start_device("cpu"))
    import numpy as np

    from rpg_megatron.config.policy import ParallelSettings
    from rpg_megatron.data.packing import plan_batches
    from rpg_megatron.data.trajectory import Trajectory
    from rpg_megatron.policy.model import start_mesh
    from rpg_megatron.system.collectives import barrier, control_group
    from rpg_megatron.training.batch_scatter import BatchScatter, each

    case = json.loads((folder / "case.json").read_text())
    mesh = start_mesh(ParallelSettings(**case["layout"]))
    scatter = BatchScatter(mesh)
    length, count = case["tokens"], case["trajectories"]
    batch, plan = [], []
    if mesh.rank == 0:
        batch = [
            Trajectory(
                i,
                0,
                np.full(1, i, np.int32),
                np.full(length - 1, i, np.int32),
                np.full(length - 1, i, np.float32),
                np.zeros(length - 1, np.int32),
                "stop",
                "",
                group=i,
            )
            for i in range(count)
        ]
        plan = plan_batches([length] * count, minibatches=1, data=mesh.data, budget=4 * length)

    def ours() -> None:
        share = scatter.scatter(plan, batch)
        for t in each(share):
            t.old = t.behaviour
        scatter.gather("old", share)

    def pickled() -> None:
        shares = (
            [
                [
                    [[batch[i] for i in micro] for micro in mini]
                    for mini in plan[rank // mesh.tensor % mesh.data]
                ]
                for rank in range(mesh.world)
            ]
            if batch
            else None
        )
        mine = [None]
        dist.scatter_object_list(mine, shares, src=0, group=control_group())

    ours()  # connections and pools that stay
    found = {}
    for name, work in (("", ours), ("pickled ", pickled)):
        barrier()
        before, sent = reset_peak(), written()
        work()
        found |= {f"{name}sent": written() - sent, f"{name}peak": peak() - before}
    if mesh.rank == 0:
        # What came back stays in the batch and is no part of the share-out's own memory.
        found["peak"] -= sum(t.old.nbytes for t in batch if t.old is not t.behaviour)
        (folder / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def written() -> int:
    """Bytes this process has given to the kernel to write, sockets included."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


def reset_peak() -> int:
    """Forget the largest resident memory so far; returns the present one, bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Largest resident memory of this process since ``reset_peak``, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank(Path(sys.argv[1]))
    else:
        main()
