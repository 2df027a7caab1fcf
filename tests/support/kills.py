"""Kill parts of a run at moments drawn from a seed, and compare the result with an undisturbed run.

A kill waits for its phase, then for a part of the phase's shortest duration. Then all processes are stopped
(SIGSTOP) and the moment is read: if the phase has changed, they continue and the kill waits for the next one.
If not, the target is killed while everything is stopped, so the moment of the kill is known, and the others
continue.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from tests.support.ahead_runs import compare_ahead, count_mixed
from tests.support.moments import EVALUATION, EXPORT, PHASES, ROLLOUT, SAVE, START, SYNC, UPDATE, Moment
from tests.support.same_runs import (
    compare_files,
    compare_names,
    compare_rows,
    find_missing_rollouts,
    read_rows,
)
from tests.support.watched_runs import (
    AHEAD,
    EVERY,
    LAYOUTS,
    LIMIT,
    STEPS,
    VERIFIERS,
    WORKERS,
    NodesCommand,
    Reference,
    WatchedRun,
    name_of,
)

TREE, LAUNCHER, RANK, SAMPLER = "every process", "launcher", "rank", "sampler"
WORKER, SERVER, CORE = "reward worker", "engine's server", "engine's core"
SAMPLER_WORKER, ENVIRONMENT = "sampler worker", "environment's server"
TARGETS = (TREE, LAUNCHER, RANK, SAMPLER, WORKER, SERVER, CORE)
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
"""Targets that are no kill: signals to the launcher, after which the run saves and ends."""
CODES = {"Ctrl-C": 130, "SIGTERM": 75}
ENDS = (TREE, LAUNCHER, RANK, SAMPLER, *SIGNALS)
"""Targets whose death ends the run. A run that has started survives the death of the others."""
PER_RUN = 5


def targets_of(layout: str) -> tuple[str, ...]:
    """Targets of a layout: not all layouts have sampler workers in processes of their own."""
    more = (SAMPLER_WORKER,) * (WORKERS in LAYOUTS[layout])
    more += (ENVIRONMENT,) * (layout == VERIFIERS)
    return (*TARGETS, *more, *(SIGNALS if layout == AHEAD else ()))


def phases_of(layout: str) -> tuple[str, ...]:
    """Phases to aim at: those in which responses are under way, in a run that samples ahead."""
    return (ROLLOUT, UPDATE, SYNC) if layout == AHEAD else PHASES


@dataclass(frozen=True)
class Kill:
    """What to kill, and when."""

    target: str
    phase: str
    step: int
    """Not before this step."""
    fraction: float
    """Part of the phase's shortest duration."""
    choice: float
    """In [0, 1): which of several ranks, engines or workers."""


def draw(layout: str, seed: int, count: int = PER_RUN) -> list[Kill]:
    """The kills of a run, in their order. Twelve seeds in a row (with AHEAD: six, with VERIFIERS: thirteen)
    aim at each pair of target and phase.
    """
    pairs = list(product(targets_of(layout), phases_of(layout)))
    block, place = divmod(seed, -(-len(pairs) // count))
    random.Random(f"{layout} {block}").shuffle(pairs)
    rng = random.Random(f"{layout} {seed}")
    chosen = [pairs[i % len(pairs)] for i in range(place * count, (place + 1) * count)]
    steps = sorted(rng.randint(1, STEPS - 1) for _ in chosen)
    starts = [pair for pair in chosen if pair[1] == START]
    # Only a run that starts can be killed in its start, and the export comes last; there, a target that does
    # not end the run comes after those that do.
    exports = sorted((pair for pair in chosen if pair[1] == EXPORT), key=lambda pair: pair[0] not in ENDS)
    order = [pair for pair in chosen if pair[1] not in (START, EXPORT)]
    rng.shuffle(order)
    order += exports
    for pair in starts:
        places = [0, *(i + 1 for i, (target, phase) in enumerate(order) if target in ENDS or phase == START)]
        order.insert(rng.choice(places), pair)
    return [
        Kill(target, phase, step, rng.random(), rng.random())
        for (target, phase), step in zip(order, steps, strict=True)
    ]


class KilledRun(WatchedRun):
    """A run with kills; each is recorded when its outcome is known."""

    def __init__(
        self,
        folder: Path,
        layout: str,
        tmp: Path,
        reference: Reference,
        record: Callable[[dict[str, Any]], None],
    ):
        super().__init__(folder, layout, tmp)
        self.reference, self.record = reference, record
        self.expected = read_rows(reference.folder)
        self.row: dict[str, Any] | None = None
        """Of the last kill, until it is recorded."""
        self.killed_at = 0.0
        self.lost: int | None = None
        self.over = self.exporting = False
        self.known_pids: list[int] = []
        """The processes when they were last listed."""

    def go(self, kills: Sequence[Kill]) -> None:
        """Run to the end, with the kills; raises AssertionError as soon as something is wrong."""
        try:
            self.launch()
            for number, kill in enumerate(kills):
                self.strike(kill, number)
            while not self.over:
                assert time.monotonic() < self.killed_at + LIMIT, f"the run does not end\n{self.output()}"
                if not self.pump(0.1):
                    self.go_on()
            wrong = self.compare()
            if (rows := len(read_rows(self.run))) != len(self.expected):
                wrong.append(f"{rows} rows of metrics, not {len(self.expected)}")
            compare = compare_names if self.layout == AHEAD else compare_files
            wrong += compare(self.run, self.reference.folder) + self.wait_nothing_left(5.0)
            self.conclude(wrong)
        except BaseException as e:
            if self.row is not None:
                self.row["outcome"] += f"; {type(e).__name__}: {str(e)[:1000]}"
                self.record(self.row | {"identical": False})
            raise
        finally:
            self.end_all()

    def compare(self) -> list[str]:
        """The rows so far with those of the reference, and whether each has its rollouts."""
        if self.layout == AHEAD:
            problems = compare_ahead(self.run, self.reference.folder)
        else:
            problems = compare_rows(read_rows(self.run), self.expected, engines=self.engines, lost=self.lost)
        return problems + find_missing_rollouts(self.run)

    def strike(self, kill: Kill, number: int) -> None:
        """Wait for the kill's moment and kill; prepares the check that the run continues."""
        delay = kill.fraction * self.reference.seconds.get(kill.phase, 1.0)
        while self.wait_for(kill):
            if kill.phase == EXPORT or not self.exporting:
                self.pump_for(delay)
                delay /= 4  # another try comes earlier
            stopped = self.stop()
            moment = self.look()
            last = EXPORT in moment.proven  # the moment aimed at will not come again
            hit = next((p for p in self.wanted_phases(kill, moment) if p in moment.proven), None)
            hit = hit or (EXPORT if last else None)
            victims = self.find(kill, stopped) if hit else None
            if victims is None:
                send(stopped, signal.SIGCONT)
                self.pump_for(0.1)
                continue
            self.conclude(self.compare())
            self.traces.memory |= self.command.shared_memory()
            killed = name_of(victims[0]) if len(victims) == 1 else f"{len(victims)} processes"
            send(victims, SIGNALS.get(kill.target, signal.SIGKILL))
            self.killed_at, self.killed = time.monotonic(), self.command
            send(stopped, signal.SIGCONT)
            self.row = {
                "kill": number,
                "target": kill.target,
                "killed": killed,
                "aimed": kill.phase,
                "hit": hit,
            }
            self.row |= {"step": moment.rows, "event": moment.phase, "outcome": "went on"}
            if self.layout == AHEAD:
                self.row["interrupted"] = count_mixed(self.run)
            self.after(kill, moment)
            return
        self.conclude([])
        self.row = {
            "kill": number,
            "target": kill.target,
            "aimed": kill.phase,
            "hit": None,
            "outcome": "missed",
        }
        self.killed_at, self.killed = time.monotonic(), self.command

    def wait_for(self, kill: Kill) -> bool:
        """Wait until a kill's phase has begun; False if the run is over before."""
        end = time.monotonic() + LIMIT
        step = kill.step + (kill.phase == SAVE)  # which follows the step's row
        before = UPDATE if kill.phase in (SAVE, ROLLOUT) else ROLLOUT
        self.known_pids, last_phase = self.command.processes(), self.look().phase if self.tap else START
        if kill.phase == EVALUATION:
            step += -step % EVERY
        while not self.over:
            assert time.monotonic() < end, f"{kill} does not come\n{self.output()}"
            if not self.pump():
                self.go_on()
            elif self.tap is not None:
                moment = self.look()
                if moment.phase != last_phase and (last_phase := moment.phase) == before:
                    self.known_pids = self.command.processes()  # now, since it takes a while
                if kill.phase == START:
                    due = self.has_started_so_far(kill.fraction)
                else:
                    due = kill.phase == EXPORT or moment.rows >= step
                self.exporting = EXPORT in moment.proven
                assert self.tap.ranks_ready or moment.phase == START, "a start is told in other words"
                meets = any(phase in moment.proven for phase in self.wanted_phases(kill, moment))
                if (meets and due) or self.exporting:
                    return True
        return False

    def wanted_phases(self, kill: Kill, moment: Moment) -> tuple[str, ...]:
        """A run that samples ahead does not always wait for rollouts: a kill whose phase did not occur in a
        step takes another phase.
        """
        late = self.layout == AHEAD and moment.rows > kill.step
        return (kill.phase, *phases_of(self.layout)) if late else (kill.phase,)

    def has_started_so_far(self, fraction: float) -> bool:
        """A third of the kills in a start come in its first seconds, a third when the ranks are ready, a
        third when an engine has opened its socket: what that takes differs from start to start.
        """
        assert self.tap is not None
        if fraction < 1 / 3:
            return time.time() - self.since > 30 * fraction
        if fraction < 2 / 3:
            return self.tap.ranks_ready
        return any(folder.glob("engine-*.sock") for folder in self.command.folders())

    def stop(self) -> list[int]:
        """Stop every process, those that are known first; returns all."""
        send(self.known_pids, signal.SIGSTOP)
        stopped = list(self.known_pids)
        while new := [pid for pid in self.command.processes() if pid not in stopped]:
            send(new, signal.SIGSTOP)
            stopped += new
        return stopped

    def find(self, kill: Kill, running: list[int]) -> list[int] | None:
        """The processes to kill; None if there is none of that kind yet."""
        command, choice = self.command, kill.choice
        if kill.target == TREE:
            return running
        if kill.target in (LAUNCHER, *SIGNALS):
            on_second = isinstance(command, NodesCommand) and choice >= 0.5
            return [command.second.process.pid if on_second else command.process.pid]
        if kill.target == RANK:
            with suppress(AssertionError, OSError):
                return [command.rank(int(choice * 2))]
            return None
        if kill.target == SAMPLER:
            return _listed(command.search("rpg_megatron.rollout.sampler"))
        forked = [pid for pid in running if "system.fork_server" in name_of(pid)]
        servers = [pid for pid in forked if name_of(pid).endswith("verifiers_server")]
        if kill.target == WORKER:  # the fork server, the parent of all, is among them
            workers = [pid for pid in forked if pid not in servers]
            return [workers[int(choice * len(workers))]] if workers else None
        if kill.target == SAMPLER_WORKER:
            workers = [pid for pid in running if "rpg_megatron.rollout.worker" in name_of(pid)]
            return [workers[int(choice * len(workers))]] if workers else None
        if kill.target == ENVIRONMENT:
            return [servers[int(choice * len(servers))]] if servers else None
        server = command.search("engine.server", f"engine-{int(choice * self.engines)}.sock")
        if kill.target == SERVER or server is None:
            return _listed(server)
        children = [
            c.pid for c in psutil.Process(server).children() if "resource_tracker" not in name_of(c.pid)
        ]
        return children[:1] or None

    def after(self, kill: Kill, moment: Moment) -> None:
        """Check the consequence of the kill: the run ends and is started again, or continues by itself."""
        assert self.row is not None
        if kill.target in (SERVER, CORE):
            self.lost = moment.rows if self.lost is None else min(self.lost, moment.rows)
        if kill.target not in ENDS:
            # A starting run ends because of it, unless the engine was up: another kill would hide which.
            end = time.monotonic() + LIMIT
            while self.tap and self.tap.phase == START and self.pump(0.1):
                assert time.monotonic() < end, f"the start does not end\n{self.output()}"
            return
        code, err = self.finish()
        self.row["outcome"] = f"exit code {code}"
        wrong = self.compare()
        if code == 0 and kill.target == SAMPLER and self.row["hit"] == EXPORT:
            self.over = True  # the ranks had ended: nothing but them was needed
            wrong += self.wait_nothing_left(1.0)
        elif kill.target in (RANK, SAMPLER):
            if code != 1 or "was killed (SIGKILL" not in err or "Traceback (most" in self.output():
                wrong.append(f"exit code {code}: {err.strip()[-500:]}")
            wrong += self.wait_nothing_left(1.0)
        elif kill.target in SIGNALS:
            if code != 0 and (code != CODES[kill.target] or not err.startswith("stopped: ")):
                wrong.append(f"exit code {code}: {err.strip()[-500:]}")
            wrong += self.wait_nothing_left(5.0)
        elif kill.target == LAUNCHER:
            wrong += self.wait_nothing_left(60.0)
        else:  # the reaper as well: the next start removes the folders
            wrong += self.wait_nothing_left(60.0, processes=True)
        if wrong:
            self.conclude(wrong)
        if not self.over:
            self.start_again()

    def go_on(self) -> None:
        """The command has ended by itself: start it again, unless the run is over."""
        code, err = self.finish()
        if code == 0:
            self.over = True
            return
        assert self.row is not None, f"ended with code {code} before any kill\n{self.output()}{err}"
        self.row["outcome"] = f"exit code {code}"
        # A run that starts ends when an engine or the graders die: nothing is lost.
        wrong = [] if self.row["hit"] == START else [f"ended with code {code}: {err.strip()[-500:]}"]
        wrong += self.compare() + self.wait_nothing_left(1.0)
        if wrong:
            self.conclude(wrong)
        self.start_again()

    def start_again(self) -> None:
        assert self.row is not None
        if (self.run / "summary.json").exists():  # the ranks had finished before they noticed
            self.row["outcome"] += ", finished"
            self.over = True
        else:
            self.launch()

    def conclude(self, wrong: list[str]) -> None:
        """Record the last kill after the run has continued. Raises AssertionError if something is wrong."""
        if self.row is None:
            return
        row, self.row = self.row, None
        resumed = re.search(r"from step (\d+)", self.output())
        if self.command is not self.killed:  # it was started again
            row["outcome"] += f", resumed from step {resumed[1] if resumed else 0}"
        row |= {"identical": not wrong, "seconds": round(time.monotonic() - self.killed_at)}
        self.record(row | ({"wrong": wrong[:5]} if wrong else {}))
        assert not wrong, f"after {row}: " + "; ".join(wrong)


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _listed(pid: int | None) -> list[int] | None:
    return None if pid is None else [pid]
