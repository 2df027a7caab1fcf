"""Speed of sampling ahead of the trainer, compared with synchronous runs (turns) and with a simulation.

    python -m benchmarks.async_rollouts [--cases both ranks 0 1 2 4 drain] [--repetitions 3] [KEY=VALUE ...]

Each case is ``rpg-megatron train`` with the quickstart's model and prompts on two cores of this machine:

- ``both``: turns (``rollout.ahead: 0``); engine and trainer may use both cores, with two threads each.
- ``ranks``: likewise, with two data-parallel trainer ranks.
- ``0``: turns; the engine has one core, the trainer the other.
- ``1``, ``2``, ``4``: this many steps ahead; a core each.
- ``drain``: one step ahead with ``rollout.inflight: drain``; a core each.

The launcher and the sampler may use both cores in all cases. A repetition of all takes about a quarter of an
hour; the machine should do nothing else. Cases alternate, so that a ratio within one
repetition compares runs that were made soon after each other; the table has medians of these ratios and
(lowest to highest). Responses have log-normal lengths, as long reasoning has; they follow from their seeds
(``async_rollouts_hooks.py``). The first steps, in which the stream fills, and the last, in which it runs
empty, are left out: the same ones in all cases and in the simulation.

Idle shares: the trainer collects a batch; the engine computes no step. ``simulated`` is what
``async_simulation.py`` finds for the same steps with the lengths of the run ``0`` and the times that were
measured in it. It knows nothing of caches and memory that the cores share, nor of probes; how well it
reproduces ``0`` itself is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.async_rollouts_hooks import VARIABLE, Hooks
from benchmarks.async_simulation import Costs, Simulated, simulate
from rpg_megatron.data.rollout_files import iter_rollouts, rollouts_file
from rpg_megatron.rollout.dispatcher import OVERSUBSCRIPTION, OVERSUBSCRIPTION_AHEAD
from tests.support.engine import install_plugin

ROOT = Path(__file__).parents[1]
SHARED = ["engine.cpu_threads=2"]
OWN = ["engine.cpu_threads=1"]
CASES: dict[str, list[str]] = {
    "both": [*SHARED],
    "ranks": [*SHARED, "parallel.data=2"],
    "0": [*OWN],
    "1": [*OWN, "rollout.ahead=1"],
    "drain": [*OWN, "rollout.ahead=1", "rollout.inflight=drain"],
    "2": [*OWN, "rollout.ahead=2"],
    "4": [*OWN, "rollout.ahead=4"],
}
SAMPLES = 8
AHEAD = {"1": 1, "drain": 1, "2": 2, "4": 4}
NAMES = {
    "both": "turns, both cores",
    "ranks": "turns, both cores, 2 ranks",
    "0": "turns, a core each",
    "drain": "1 ahead, drain",
}


@dataclass
class Run:
    """One run, cut to the steps that count: index i is that of step i + 1."""

    rows: list[dict[str, float]]
    """The rows of its metrics."""
    ends: list[float]
    """When each row was written, on the clock of ``engine``."""
    engine: NDArray[np.float64]
    """Steps of the engine [N, 4]: start, end, tokens decoded, prompt tokens."""
    lengths: list[list[list[int]]]
    """[step][group][sample] -> tokens of the response; [] if they were not read."""
    prompt: int
    """Mean tokens of a prompt."""


@dataclass(frozen=True)
class Figures:
    """What a run, or a simulated one, came to in the steps that count."""

    speed: float
    """Steps a second."""
    trainer_idle: float
    engine_idle: float
    """Shares of the time."""


def main() -> None:
    """Run the cases in turn and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", choices=CASES, nargs="+", default=["both", "ranks", "0", "1", "2", "4"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--edge", type=int, default=5, help="steps left out at the start, and at the end")
    parser.add_argument("--prompts", type=int, default=32, help="a step; 8 responses each")
    parser.add_argument("--mean", type=float, default=64.0, help="length of a response, tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the lengths")
    parser.add_argument("--limit", type=int, default=384, help="rollout.max_response_tokens")
    parser.add_argument("--slots", type=int, default=64, help="engine.max_sequences")
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more settings of the runs")
    a = parser.parse_intermixed_args()
    if a.steps - 2 * a.edge < 1:
        parser.error("--steps must be above twice --edge")
    if "0" not in a.cases:
        parser.error("case 0 is needed: the others are compared with it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run and its folder go, too
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("needs two cores")
    os.sched_setaffinity(0, cores)
    found: list[dict[str, Run]] = []
    for n in range(a.repetitions):
        found.append({})
        for case in a.cases:
            run = found[n][case] = run_case(case, cores, a)
            print(
                f"{n + 1}, {NAMES.get(case, f'{case} ahead')}: {figures(run, a).speed:.3f} steps/s; "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print_tables(found, a)


# -- running -------------------------------------------------------------------------------------------------


def command_of(case: str, runs: Path, a: argparse.Namespace) -> list[str]:
    """The command line of a run in the folder ``runs``."""
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(ROOT / "examples" / "quickstart.yaml")]
    command += ["--fresh", "name=ahead", f"runs={runs}", "parallel={tensor: 1}"]
    command += ["evaluation=null", "checkpoint.every=null", "export.enabled=false"]
    command += ["correction.type=truncate", f"training.steps={a.steps}"]
    command += [f"rollout.prompts_per_step={a.prompts}", f"training.minibatches={a.minibatches}"]
    command += [f"rollout.max_response_tokens={a.limit}", f"engine.max_sequences={a.slots}"]
    return [*command, *CASES[case], *a.overrides]


def run_case(case: str, cores: Sequence[int], a: argparse.Namespace) -> Run:
    """Run a case to its end."""
    with tempfile.TemporaryDirectory(prefix="rpg-bench-") as place:
        work = Path(place)
        hooks = Hooks(a.mean, a.sigma, str(work))
        if "engine.cpu_threads=1" in CASES[case]:
            hooks = Hooks(a.mean, a.sigma, str(work), *cores)
        module = "benchmarks.async_rollouts_hooks"
        inside = install_plugin(
            work / "inside", "rpg_bench", f"from {module} import record_steps as register\n"
        )
        (inside / "sitecustomize.py").write_text(f"from {module} import start\n\nstart()\n")
        paths = [str(inside), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {VARIABLE: json.dumps(asdict(hooks))}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        folder = work / "ahead-001"
        with (work / "log").open("w") as log:
            process = subprocess.Popen(
                command_of(case, work, a), env=environment, cwd=work, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                rows, ends = follow(folder / "metrics.jsonl", process)
            finally:
                process.terminate()
                process.wait()
        if process.returncode or len(rows) != a.steps:
            logs = "".join(
                f"--- {f.name}\n{f.read_text(errors='replace')[-2000:]}" for f in folder.glob("logs/*")
            )
            raise SystemExit(
                f"case {case} ended with {process.returncode}\n{(work / 'log').read_text()}{logs}"
            )
        if any(row["response/truncated_frac"] != 1 for row in rows):
            raise SystemExit("responses did not end at their lengths: the hooks are not in place")
        steps = [np.loadtxt(file, ndmin=2) for file in work.glob("*.txt")]
        lengths, prompts = [], []
        for step in range(1, a.steps + 1) if case == "0" else ():
            groups: dict[int, list[int]] = {}
            for t in iter_rollouts(rollouts_file(folder, step)):
                groups.setdefault(t.group, []).append(len(t.response))
                prompts.append(len(t.prompt))
            lengths.append([groups[number] for number in sorted(groups)])
        return Run(rows, ends, max(steps, key=len), lengths, round(statistics.fmean(prompts or [0])))


def follow(file: Path, process: subprocess.Popen[bytes]) -> tuple[list[dict[str, float]], list[float]]:
    """Rows of a file as they are written, but that of step 0, and when; until the process ends."""
    rows: list[dict[str, float]] = []
    ends: list[float] = []
    while True:
        ended = process.poll() is not None
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        complete = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
        new = [row for row in complete if row["step"] and "time/step" in row][len(rows) :]
        rows += new
        ends += [time.monotonic()] * len(new)
        if ended:
            return rows, ends
        time.sleep(0.02)


# -- figures -------------------------------------------------------------------------------------------------


def window(a: argparse.Namespace) -> tuple[int, int]:
    """Indices of the steps whose ends are the start and the end of what is measured."""
    return a.edge - 1, a.steps - a.edge - 1


def figures(run: Run, a: argparse.Namespace) -> Figures:
    """Of a run."""
    first, last = window(a)
    start, end = run.ends[first], run.ends[last]
    collected = sum(row["time/collect"] for row in run.rows[first + 1 : last + 1])
    within = np.clip(run.engine[:, :2], start, end)
    busy = float(np.sum(within[:, 1] - within[:, 0]))
    return Figures((last - first) / (end - start), collected / (end - start), 1 - busy / (end - start))


def simulated_figures(run: Simulated, a: argparse.Namespace) -> Figures:
    """Of a simulated run."""
    first, last = window(a)
    seconds = run.ends[last] - run.ends[first]
    busy = run.busy[last] - run.busy[first]
    waited = sum(run.waited[first + 1 : last + 1])
    return Figures((last - first) / seconds, waited / seconds, 1 - busy / seconds)


def costs_of(run: Run, a: argparse.Namespace) -> Costs:
    """What things took in a run in turns."""
    first, last = window(a)
    rows = run.rows[first + 1 : last + 1]
    inside = run.engine[(run.engine[:, 0] >= run.ends[first]) & (run.engine[:, 1] <= run.ends[last])]
    # The time of the run's steps is what is to be reproduced, so long ones may weigh more.
    features = np.column_stack([np.ones(len(inside)), inside[:, 2:]])
    step, token, prefill = np.linalg.lstsq(features, inside[:, 1] - inside[:, 0])[0]
    seconds = run.ends[last] - run.ends[first]
    trained = sum(row["time/logprobs"] + row["time/update"] for row in rows)
    synced = sum(row["time/sync"] for row in rows)
    sampled = float((inside[:, 1] - inside[:, 0]).sum())
    return Costs(
        step=float(step),
        token=float(token),
        prefill=float(prefill),
        train=trained / sum(row["step/tokens"] for row in rows),
        sync=synced / len(rows),
        rest=max(0.0, seconds - sampled - trained - synced) / len(rows),
    )


def groups_at_once(a: argparse.Namespace, ahead: int) -> int:
    """Groups that the sampler gives the engine before one of them is complete (``rollout/dispatcher.py``)."""
    slots: int = a.slots
    more = OVERSUBSCRIPTION_AHEAD if ahead else OVERSUBSCRIPTION
    return max(1, -(-int(more * slots) // min(SAMPLES, slots)))


def simulate_case(case: str, base: Run, a: argparse.Namespace) -> Figures:
    """A case with the lengths and costs of the run in turns."""
    out = simulate(
        base.lengths,
        base.prompt,
        costs_of(base, a),
        slots=a.slots,
        groups=groups_at_once(a, AHEAD.get(case, 0)),
        ahead=AHEAD.get(case, 0),
        drain=case == "drain",
    )
    return simulated_figures(out, a)


# -- tables --------------------------------------------------------------------------------------------------


def print_tables(found: list[dict[str, Run]], a: argparse.Namespace) -> None:
    """The ratios, then what they are made of."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("model name\t: ")[2].split("\n")[0]
    of = {case: [figures(each[case], a) for each in found] for case in a.cases}
    lengths = np.array([n for each in found for b in each["0"].lengths for g in b for n in g])
    costs = [costs_of(each["0"], a) for each in found]

    def cost(name: str) -> float:
        return 1e3 * float(np.median([getattr(c, name) for c in costs]))

    first, last = window(a)

    def mean(run: Run, *keys: str) -> float:
        return statistics.fmean(sum(r.get(k, 0.0) for k in keys) for r in run.rows[first + 1 : last + 1])

    def cell(values: Sequence[float], form: str = ".2f") -> str:
        spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
        return f"{statistics.median(values):{form}}{spread}"

    def median(value: Callable[[Run], float], case: str) -> float:
        return statistics.median(value(each[case]) for each in found)

    print(
        f"\n2 cores of {cpu}; steps {first + 2} to {last + 1} of {a.steps}, {a.repetitions} repetitions\n"
        f"{a.prompts} x 8 responses of {lengths.mean():.0f} tokens on average (median "
        f"{np.median(lengths):.0f}, longest {lengths.max()}), {a.slots} at once; "
        f"{a.minibatches} updates a step\n"
        f"in turns, a core each: sampling {median(lambda r: mean(r, 'time/rollout'), '0'):.2f} s a step, "
        f"training {median(lambda r: mean(r, 'time/logprobs', 'time/update'), '0'):.2f} s, "
        f"weight sync {median(lambda r: mean(r, 'time/sync'), '0'):.2f} s\n"
        f"an engine step: {cost('step'):.2f} ms, and {cost('token'):.3f} ms a response, "
        f"{cost('prefill'):.3f} ms a prompt token; training {cost('train'):.3f} ms a token\n"
    )
    columns = [f"x {NAMES[a.cases[0]]}"] if a.cases[0] != "0" else []
    columns += ["x turns, a core each", "simulated", "trainer idle", "simulated", "engine idle", "simulated"]
    print(f"| case | steps/s | {' | '.join(columns)} |\n{'|---' * (2 + len(columns))}|")
    for case in a.cases:
        speed = [f.speed for f in of[case]]
        cells = [NAMES.get(case, f"{case} ahead"), f"{statistics.median(speed):.3f}"]
        for base in dict.fromkeys([a.cases[0], "0"]):
            cells.append(cell([x / y.speed for x, y in zip(speed, of[base], strict=True)]))
        own = case not in ("both", "ranks")
        guess = [simulate_case(case, each["0"], a) for each in found]
        base_guess = [simulate_case("0", each["0"], a).speed for each in found]
        cells.append(cell([g.speed / b for g, b in zip(guess, base_guess, strict=True)]) if own else "")
        for name in ("trainer_idle", "engine_idle"):
            cells.append(f"{statistics.median(getattr(f, name) for f in of[case]):.0%}")
            cells.append(f"{statistics.median(getattr(g, name) for g in guess):.0%}" if own else "")
        print(f"| {' | '.join(cells)} |")
    ratio = cell(
        [
            g.speed / f.speed
            for g, f in zip((simulate_case("0", e["0"], a) for e in found), of["0"], strict=True)
        ]
    )
    print(f"\nsimulated over measured steps/s in turns, a core each: {ratio}\n")
    keys: dict[str, tuple[tuple[str, ...], float]] = {
        "tokens a response": (("response/length_mean",), 1),
        "training, s": (("time/logprobs", "time/update"), 1),
        "sync, s": (("time/sync",), 1),
        "lag": (("async/lag_mean",), 1),
        "stale tokens, %": (("async/stale_tokens",), 100),
        "mixed responses, %": (("async/mixed_responses",), 100),
        "segments": (("async/segments",), 1),
        "tokens computed again": (("async/recomputed_tokens",), 1),
        "trainer waited, s": (("async/trainer_waited",), 1),
        "sampler held, s": (("async/sampler_held",), 1),
    }
    print(f"| per step | engine step at {a.slots}, ms | {' | '.join(keys)} |\n{'|---' * (2 + len(keys))}|")
    for case in a.cases:

        def full(run: Run) -> float:  # decoding only, with all slots in use
            steps = run.engine[(run.engine[:, 2] == a.slots) & (run.engine[:, 3] == 0)]
            return 1e3 * float(np.median(steps[:, 1] - steps[:, 0])) if len(steps) else float("nan")

        cells = [NAMES.get(case, f"{case} ahead"), f"{median(full, case):.1f}"]
        for names, scale in keys.values():
            value = median(lambda r, n=names: mean(r, *n), case) * scale  # type: ignore[misc]
            cells.append(f"{value:.2f}" if any(n in r for r in found[0][case].rows for n in names) else "")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
