"""One rank of test_async_checkpoints: saves while all state changes, then onto faulty disks."""

from __future__ import annotations

import itertools
import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.checkpoints import megatron
from rpg_megatron.checkpoints.megatron import PlannedSave
from rpg_megatron.checkpoints.run_folder import CHECKPOINTS, LATEST, find_problems, list_steps
from rpg_megatron.config import Settings, read_model_shape
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.checkpoint_saver import Saver

GATE = threading.Event()
"""Writes wait until it is set."""


def hold_writes() -> None:
    """Make all writing wait for the gate."""
    write = PlannedSave.write

    def wait(self: PlannedSave) -> list:
        GATE.wait()
        return write(self)

    PlannedSave.write = wait  # type: ignore[method-assign]


GATHERED: list[bool] = []
"""Whether this rank got the state of a distributed optimizer, in each save."""


def note_gathers() -> None:
    """Record in ``GATHERED`` whether each gather of a save returns a state."""
    gather = megatron._gather_state

    def note(*arguments: Any, **more: Any) -> Any:
        state = gather(*arguments, **more)
        GATHERED.append(state is not None)
        return state

    megatron._gather_state = note


def numbers(policy: Policy, *, init: bool = False) -> Iterator[torch.Tensor]:
    """Everything that an update changes: weights, their float32 copies, moments."""
    yield from (p for _, p in policy.named_parameters())
    for part in getattr(policy._optimizer, "chained_optimizers", [policy._optimizer]):
        if init:
            part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            yield from group["params"]
            for p in group["params"]:
                yield from (t for t in part.optimizer.state[p].values() if isinstance(t, torch.Tensor))


def fill(policy: Policy, value: float) -> None:
    """Set all of them to one number."""
    with torch.no_grad():
        for tensor in numbers(policy, init=True):
            tensor.fill_(value)


def build(settings: Settings, device: torch.device) -> tuple[Mesh, Policy, HeldAnchor]:
    """A policy and its held anchor."""
    mesh = start_mesh(settings.parallel)
    policy = Policy(settings, read_model_shape(settings.model.path), mesh, device, lambda policy: None)
    return mesh, policy, HeldAnchor([p for _, p in policy.named_parameters()], settings.anchor)


def adopt(settings: Settings, mesh: Mesh, policy: Policy, folder: Path) -> SharedMemoryPublisher:
    """Move the weights into shared memory, as the bridge does."""
    place = mesh.coordinates(4)
    parameters = dict(policy.named_parameters())
    layout = mapping_for(read_model_shape(settings.model.path))
    publisher = SharedMemoryPublisher(folder, place, parameters, layout, torch.float32)
    assert publisher._adopted
    return publisher


def save_while_everything_changes(case: dict, device: torch.device) -> None:
    """Save 1 (anchor -1); all state is overwritten before anything is written. Then save 2, and wait."""
    settings = Settings.model_validate(case["settings"])
    mesh, policy, anchor = build(settings, device)
    publisher = adopt(settings, mesh, policy, Path(case["bridge"])) if case["bridge"] else None
    fill(policy, -1)
    anchor.after_step(1, 0.0)
    fill(policy, 1)
    saver = Saver(Path(case["folder"]), policy, anchor, settings.checkpoint)
    GATHERED.clear()
    GATE.clear()
    saver.start(1, dict)
    fill(policy, -1000)
    anchor.after_step(1, 0.0)
    assert not saver.pop_results()
    GATE.set()
    saver.wait()
    assert [o.problem for o in saver.pop_results()] == [None]
    fill(policy, -2)
    anchor.after_step(1, 0.0)
    fill(policy, 2)
    patient = settings.checkpoint.model_copy(update={"asynchronous": False})
    saver = Saver(Path(case["folder"]), policy, anchor, patient)
    saver.start(2, dict)
    fill(policy, -1000)
    assert [o.problem for o in saver.pop_results()] == [None]
    # Only the first replica gathers the state in host memory; on the others it would be wasted.
    assert [mesh.data_rank == 0] * 2 * settings.optimizer.distributed == GATHERED
    dist.barrier()
    if publisher:
        publisher.close()
    mpu.destroy_model_parallel()


class Disk:
    """Rank 0 changes the disk, then all ranks save; ``rows`` has the outcomes."""

    def __init__(self, case: dict, device: torch.device) -> None:
        settings = Settings.model_validate(case["settings"])
        self.mesh, self.policy, self.anchor = build(settings, device)
        self.run = Path(case["folder"])
        self.checkpoints = self.run / CHECKPOINTS
        self.saver = Saver(self.run, self.policy, self.anchor, settings.checkpoint)
        self.rows: list[dict] = []
        self.steps = itertools.count(1)
        GATE.set()

    def save(
        self, name: str, before: Callable[[], None] = lambda: None, midway: Callable[[], None] | None = None
    ) -> bool:
        """One save; returns whether it succeeded. midway: called after planning, before any write."""
        if self.mesh.rank == 0:
            before()
        dist.barrier()
        step = next(self.steps)
        fill(self.policy, step)
        if midway:
            GATE.clear()
        self.saver.start(step, dict)
        dist.barrier()
        if midway:
            if self.mesh.rank == 0:
                midway()
            dist.barrier()
            GATE.set()
        self.saver.wait()
        (outcome,) = self.saver.pop_results()
        dist.barrier()
        row: dict = {"name": name, "step": step, "problem": outcome.problem, "rank": self.mesh.rank}
        if self.mesh.rank == 0:
            steps = list_steps(self.run)
            row["whole"] = [s for s, place in steps.items() if not find_problems(place)]
            row["named"] = list(steps)
            latest = self.checkpoints / LATEST
            row["latest"] = json.loads(latest.read_text())["step"] if latest.is_file() else None
            row["parts"] = [p.name for p in self.checkpoints.glob(".*.part")]
        self.rows.append(row)
        dist.barrier()
        return outcome.problem is None

    def save_twice(self) -> None:
        """The second waits for the first."""
        steps = next(self.steps), next(self.steps)
        for step in steps:
            self.saver.start(step, dict)
        self.saver.wait()
        assert [(o.step, o.problem) for o in self.saver.pop_results()] == [(step, None) for step in steps]
        dist.barrier()

    def limit_files(self, number: int) -> None:
        """Limit the size of this rank's files; a negative number removes the limit."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (number if number >= 0 else hard, hard))

    def remove(self) -> None:
        """Remove the checkpoint folder, or the file in its place."""
        if self.checkpoints.is_dir():
            shutil.rmtree(self.checkpoints)
        else:
            self.checkpoints.unlink(missing_ok=True)

    def replace(self) -> None:
        """Put a file where the folder was."""
        self.remove()
        self.checkpoints.write_text("")

    def try_everything(self, mounted: bool) -> None:
        """All cases; after each kind of fault comes a save that must work."""
        self.save_twice()
        self.save("first")
        # Limited file sizes: on rank 1 only, then on all ranks, down to zero.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for size in (100_000, 3_000, 100, 0):
            if self.mesh.rank == 1 or size < 100_000:
                self.limit_files(size)
            self.save(f"no file over {size}")
            self.limit_files(-1)
        self.save("after a limit")
        self.save("removed between", before=self.remove)
        self.save("removed midway", midway=self.remove)
        self.save("after a removal")
        self.save("a file in its place", before=self.replace)
        self.save("after a file", before=self.remove)
        self.save("the run is gone", before=lambda: shutil.move(self.run, self.run.with_name("moved")))
        self.save("the run is back", before=lambda: self.bring_back())
        if mounted:
            self.try_small_disk()

    def bring_back(self) -> None:
        """Move the run's folder back."""
        if self.run.exists():
            shutil.rmtree(self.run)
        shutil.move(self.run.with_name("moved"), self.run)

    def mount(self, *options: str) -> None:
        """A disk of 64 MB for the checkpoints alone."""
        where = ["-t", "tmpfs", "tmpfs"] if "remount" not in ",".join(options) else []
        subprocess.run(["mount", "-o", ",".join(options), *where, str(self.checkpoints)], check=True)

    def try_small_disk(self) -> None:
        """A disk of its own: full at every point of a save, then read-only."""
        self.save("mounted", before=lambda: self.mount("size=64m"))
        ballast = self.checkpoints / "ballast"

        def leave(pages: int) -> None:
            free = shutil.disk_usage(self.checkpoints).free
            if ballast.exists():
                free += ballast.stat().st_size
                ballast.unlink()
            with ballast.open("wb") as file:
                for _ in range(free // 4096 - pages):
                    file.write(bytes(4096))

        folder = max(list_steps(self.run).items())[1] if self.mesh.rank == 0 else None
        sizes = [0]
        if folder:
            sizes = [-(-f.stat().st_size // 4096) for f in folder.rglob("*") if f.is_file()]
        counts = [sum(sizes), len(sizes)]
        dist.broadcast_object_list(counts, src=0)
        need, files = counts
        for pages in (0, 1, need // 3, 2 * need // 3, *range(need - files - 2, need + 8)):
            if self.save(f"{pages} of {need} pages", before=lambda pages=pages: leave(pages)):
                break
        self.save("room again", before=ballast.unlink)
        self.save("read-only", before=lambda: self.mount("remount", "ro"))
        self.save("writable again", before=lambda: self.mount("remount", "rw"))


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_device("cpu")
    start_process_group(device)
    hold_writes()
    note_gathers()
    cases = json.loads((folder / "cases.json").read_text())
    for case in cases["staged"].values():
        save_while_everything_changes(case, device)
    disk = Disk(cases["disk"], device)
    disk.try_everything(cases["mount"])
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, disk.rows)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
