"""One rank of test_lazy_gloo: all that is used of gloo.

Arguments: FOLDER MESH [MODULE]. MESH: the largest group that is connected at once. MODULE: run that instead.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.system import collectives
from rpg_megatron.system.collectives import (
    any_rank,
    barrier,
    broadcast_object,
    control_group,
    default_group_on_host,
    gather_objects,
    gather_on_first,
    max_over_ranks,
    new_host_group,
    new_host_subgroup,
    run_together,
    sum_arrays,
)
from tests.support.sockets import connections

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")


def tensor_collectives(group: dist.ProcessGroup) -> dict[str, Any]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    out: dict[str, Any] = {}
    for name in DTYPES:
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
            values = torch.arange(5, dtype=torch.float32).add(rank / 3).to(getattr(torch, name))
            dist.all_reduce(values, op=op, group=group)
            out[f"all_reduce {name} {op}"] = values.double().tolist()
    mine = torch.arange(2 * world, dtype=torch.float32) + 100 * rank
    for root in range(world):
        values = mine.clone()
        dist.broadcast(values, group=group, group_src=root)
        out[f"broadcast {root}"] = values.tolist()
        rows = [torch.empty_like(mine) for _ in range(world)] if rank == root else None
        dist.gather(mine, rows, group=group, group_dst=root)
        out[f"gather {root}"] = [row.tolist() for row in rows or ()]
        part = torch.empty(2)
        dist.scatter(part, list(mine.view(world, 2)) if rank == root else None, group=group, group_src=root)
        out[f"scatter {root}"] = part.tolist()
        values = mine.clone()
        dist.reduce(values, group=group, group_dst=root)
        out[f"reduce {root}"] = values.tolist() if rank == root else None
    gathered = torch.empty(world * 2 * world)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    reduced = torch.empty(2)
    dist.reduce_scatter_tensor(reduced, mine, group=group)
    exchanged = torch.empty(2 * world)
    dist.all_to_all_single(exchanged, mine, group=group)
    out["into tensors"] = [gathered.tolist(), reduced.tolist(), exchanged.tolist()]
    return out


def messages(group: dist.ProcessGroup) -> dict[str, Any]:
    """Between all pairs, one way and at the same time."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    out: dict[str, Any] = {}
    for source in range(world):
        for to in (to for to in range(world) if to != source):
            value = torch.full((3,), float(rank))
            if rank == source:
                dist.send(value, group=group, group_dst=to)
            elif rank == to:
                dist.recv(value, group=group, group_src=source)
                out[f"from {source}"] = value.tolist()
    others = [peer for peer in range(world) if peer != rank]
    received = {peer: torch.empty(2) for peer in others}
    ops = [dist.P2POp(dist.irecv, received[p], group=group, group_peer=p) for p in others]
    ops += [dist.P2POp(dist.isend, torch.full((2,), 10.0 * rank), group=group, group_peer=p) for p in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out["at the same time"] = {peer: value.tolist() for peer, value in received.items()}
    return out


def objects() -> dict[str, Any]:
    rank = dist.get_rank()
    failures = []
    for fails in (None, 0, 3):
        try:
            run_together(lambda fails=fails: [][1] if rank == fails else None)
        except (RuntimeError, IndexError) as e:
            failures.append(str(e))
    everyone: list[Any] = [None] * dist.get_world_size()
    with default_group_on_host():
        dist.all_gather_object(everyone, {"rank": rank})
    return {
        "everyone": everyone,
        "gathered": gather_objects("x" * rank),
        "on the first": gather_on_first("y" * rank),
        "broadcast": broadcast_object(f"from {rank}"),
        "flags": [any_rank(False), any_rank(rank == 2), max_over_ranks(rank - 7)],
        "sums": sum_arrays(np.full(3, rank / 7)).tolist(),
        "failures": failures,
    }


def two_threads(first: dist.ProcessGroup, second: dist.ProcessGroup) -> list[list[Any]]:
    """Both groups are new, so that the threads connect at the same time."""
    out: list[list[Any]] = [[], []]

    def gather(i: int, group: dist.ProcessGroup) -> None:
        for n in range(5):
            out[i].append(gather_objects([dist.get_rank(), n, i], group=group))

    thread = threading.Thread(target=gather, args=(1, second))
    thread.start()
    gather(0, first)
    thread.join()
    return out


def checkpoint(folder: Path) -> list[float]:
    """Torch's distributed checkpoint, planned and loaded over the control group."""
    rank = dist.get_rank()
    with default_group_on_host():
        dcp.save({f"part {rank}": torch.full((4,), rank + 0.5), "all": torch.ones(2)}, checkpoint_id=folder)
        part = (rank + 1) % dist.get_world_size()
        state = {f"part {part}": torch.zeros(4), "all": torch.zeros(2)}
        dcp.load(state, checkpoint_id=folder)
    return [*state[f"part {part}"].tolist(), *state["all"].tolist()]


def deaths() -> dict[str, Any]:
    """Rank 3 ends: ranks that had messages with it, and ranks that first need it then, fail in time."""
    seconds = timedelta(seconds=4)
    used, fresh = (dist.new_group(backend="gloo", timeout=seconds) for _ in range(2))
    dist.barrier(group=used)
    barrier()
    if dist.get_rank() == 3:
        os._exit(0)
    errors: dict[str, Any] = {}
    for name, group in (("used", used), ("fresh", fresh)):
        start = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=group)
            dist.barrier(group=group)
        except RuntimeError as e:
            errors[name] = [time.monotonic() - start, str(e)]
    return errors


def main() -> None:
    folder, collectives._LARGEST_MESH = Path(sys.argv[1]), int(sys.argv[2])
    if module := sys.argv[3:]:
        del sys.argv[2:]
        runpy.run_module(*module, run_name="__main__", alter_sys=True)
        return
    start_process_group(start_device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    before = connections()
    dist.new_group(backend="gloo")
    out: dict[str, Any] = {"connections": connections() - before}
    doomed, other = new_host_group(), new_host_group()
    dist.monitored_barrier(control_group(), timeout=timedelta(seconds=60))
    out["tensors"] = tensor_collectives(doomed)
    pair = new_host_subgroup([[0, 1], [2, 3]])
    out["pair"] = [tensor_collectives(pair), messages(pair)]
    out["messages"] = messages(doomed)
    dist.destroy_process_group(doomed)
    out["after another group's end"] = [tensor_collectives(g) for g in (pair, other)]
    out["objects"] = objects()
    out["threads"] = two_threads(new_host_group(), new_host_group())
    out["checkpoint"] = checkpoint(folder / "checkpoint")
    everyone = gather_on_first(out)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(everyone))
    barrier()
    (folder / f"deaths_{rank}.json").write_text(json.dumps(deaths()))
    assert world == 4
    os._exit(0)  # groups with a dead rank cannot be destroyed together


if __name__ == "__main__":
    main()
