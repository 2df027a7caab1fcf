"""A training step of rpg_megatron compared with one of TRL's GRPOTrainer, on this machine's CPU.

The same on both sides: checkpoint (the quickstart's, or 32 million random weights), prompts, reward (our
grader), prompts and responses per step, token limit, updates per step, learning rate, AdamW and its decays,
gradient norm of at most 1, float32, temperature 1, advantage (reward minus mean of the group), mean over a
mini-batch's tokens; as in examples/quickstart.yaml.

Not the same:

- Processes. Ours: launcher, sampler, a vLLM server, and two ranks (``tensor2`` or ``data2``) that share the
  cores. TRL: one process with a thread per core, which samples with transformers' generate, all responses at
  once (its vLLM mode needs a GPU). Its threads sleep while they wait (OMP_WAIT_POLICY=PASSIVE), as ours do.
- Loss. Ours: the quickstart's RPG-REINFORCE with a KL term to the old policy. TRL's: GRPO with the same clip
  bounds, without KL term, for which it would compute a reference model's log-probs.
- Random generators, so the prompts and responses of a step differ.
- Log-probs of the old policy. TRL computes them by a pass before several updates, and takes them from the
  update where it is one; so does ours (``training.old: auto``). ``--settings`` chooses otherwise.
- Ours compares the engine's log-probs with the trainer's, and writes each step's rollouts.

Neither evaluates or saves checkpoints in between. Afterwards one function, in TRL's environment, measures
held-out accuracy of the initial and both trained weights. TRL's part of this file runs there: it imports our
grader and no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil

from benchmarks.setup import QUICKSTART, Table, Watch, benchmark, main, process_tree, python_path, train

REQUIREMENTS = Path(__file__).with_suffix(".txt")
PHASES = ("step", "rollout", "log-probs", "update", "sync")
LAYOUTS = {"tensor2": "parallel={tensor: 2}", "data2": "parallel={tensor: 1, data: 2}"}
PROMPTS, SAMPLES, TOKENS, MICROBATCHES = 64, 8, 64, 16
"""Of a step: prompts, responses to each, their token limit, TRL's micro-batches."""


@dataclass
class Side:
    """The runs of one side, all rounds together."""

    start_up: list[float] = field(default_factory=list)
    """Seconds from the command to the first rollout, of each run."""
    phases: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {p: [] for p in PHASES})
    """(seconds, CPU seconds of all processes) of each step but the first of each run."""
    lengths: list[float] = field(default_factory=list)
    """Mean tokens of a response, of each step."""
    rewards: list[list[float]] = field(default_factory=list)
    """Mean reward of each step of a run."""
    memory: list[float] = field(default_factory=list)
    """Peak of the sum of PSS (shared pages count once), GiB, of each run."""

    def add(self, started: float, steps: list[dict[str, Any]], cpu: Watch[float], memory: Watch[int]) -> None:
        """A run. steps: rows as ``train_with_trl`` writes them, with spans of time by phase."""
        self.start_up.append(steps[0]["spans"]["step"][0][0] - started)
        self.lengths += [step["length"] for step in steps]
        self.rewards.append([step["reward"] for step in steps])
        self.memory.append(max(size for _, size in memory.samples) / 2**30)
        for step in steps[1:]:
            for phase, values in self.phases.items():
                spans = step["spans"].get(phase, ())
                wall = sum(end - begin for begin, end in spans)
                values.append((wall, sum(_at(cpu, end) - _at(cpu, begin) for begin, end in spans)))


def _at(cpu: Watch[float], when: float) -> float:
    """CPU seconds at a time, interpolated between samples."""
    import numpy as np

    return float(np.interp(when, *zip(*cpu.samples, strict=True)))


@benchmark(rounds=1, steps=2)
def against_trl(
    folder: Path,
    layout: Literal["tensor2", "data2"] = "tensor2",
    rounds: int = 2,
    steps: int = 6,
    updates: Literal["16", "4", "1"] = "16",
    model: Literal["quickstart", "32m"] = "quickstart",
    settings: tuple[str, ...] = (),
) -> None:
    """A round is one run of ours, then one of TRL; medians are over the steps of all rounds but the first of
    each run.

    folder: gets TRL's environment, FOLDER/venv, built from ``against_trl.txt`` (5 GB), and its runs.
    updates: of a step. settings: of our runs. "Command to first step" ends as the first rollout begins. On a
    machine that does other work, only the ratios mean something; CPU seconds (user and system, all processes
    of a side) depend on it least.
    """
    if steps < 2:
        raise SystemExit("at least 2 steps")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = trl_environment(folder)
    weights = QUICKSTART / "model" if model == "quickstart" else make_larger(folder / model)
    overrides = [LAYOUTS[layout], f"training.minibatches={updates}", f"model.path={weights}", *settings]
    overrides += ["engine.kv_cache_gib=1.5"] * (model != "quickstart")
    sides = ours, trl = Side(), Side()
    for _ in range(rounds):
        for place in (folder / "runs", folder / "trl"):
            shutil.rmtree(place, ignore_errors=True)
        (folder / "runs").mkdir()
        run_folder = run_ours(ours, folder / "runs", steps, overrides)
        started = time.time()
        process = run_trl(python, "train", folder / "trl", weights, steps, updates)
        cpu, memory = watch_processes(process.pid)
        with cpu, memory:
            process.wait()
        if process.returncode:
            raise SystemExit(f"TRL ended with {process.returncode}")
        rows = (folder / "trl" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
        trl.add(started, [json.loads(row) for row in rows], cpu, memory)
    print(f"not the same:{__doc__.partition('Not the same:')[2].partition('Neither')[0].rstrip()}")
    counted = f"{updates} update{'s' if updates != '1' else ''} a step"
    title = f"{model}, {layout}, {counted}; medians of {len(ours.phases['step'])} steps in {rounds} runs each"
    columns = ("", "ours|.2f", "TRL|.2f", "ratio|.2f", "ours, CPU s|.2f", "TRL, CPU s|.2f", "CPU ratio|.2f")
    table = Table(*columns, title=title)
    for phase in PHASES:
        cells: list[float | None] = []
        for kind in (0, 1):
            x, y = (median(step[kind] for step in side.phases[phase]) for side in sides)
            cells += [x, y or None, x / y if y else None]
        table.row(f"{phase}, s", *cells)
    rest: list[tuple[str, list[float]]] = [
        ("command to first step, s", [median(side.start_up) for side in sides]),
        ("peak memory, GiB", [median(side.memory) for side in sides]),
        ("response, tokens", [median(side.lengths) for side in sides]),
        ("reward of the first step", [median(run[0] for run in side.rewards) for side in sides]),
        ("reward of the last step", [median(run[-1] for run in side.rewards) for side in sides]),
    ]
    results = (weights, run_folder / "hf" / f"step_{steps:06d}", folder / "trl" / "hf")
    process = run_trl(python, "score", *results, stdout=subprocess.PIPE)
    before, *after = json.loads(process.communicate()[0].splitlines()[-1])
    rest.append((f"held out, % ({before:.1f} before)", after))
    for name, (x, y) in rest:
        ratio = x / y if name in ("command to first step, s", "peak memory, GiB") else None
        table.row(name, x, y, ratio, None, None, None)


def make_larger(folder: Path) -> Path:
    """A checkpoint of 32 million random weights with the quickstart's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if folder.is_dir():
        return folder
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "max_window_layers": 10}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = AutoConfig.from_pretrained(QUICKSTART / "model")
    config.update(sizes | {"layer_types": ["full_attention"] * 10})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART / "model").save_pretrained(folder)
    return folder


def run_ours(side: Side, place: Path, steps: int, settings: list[str]) -> Path:
    """One run of ours, added to its side; its folder."""
    overrides = [f"training.steps={steps}", "evaluation=null", "checkpoint.every=null", *settings]
    watches: list[Watch[Any]] = []
    with contextlib.ExitStack() as stack:
        started = time.time()
        enter = stack.enter_context
        run = train(place, *overrides, on_start=lambda pid: watches.extend(map(enter, watch_processes(pid))))
    rows = []
    for row, end in list(zip(run.rows, run.ends, strict=True))[-steps:]:
        begin, sync = end - row["time/step"], end - row["time/sync"]  # a row is written right after the step
        scoring = begin + row["time/collect"]
        spans = {"step": [(begin, end)], "rollout": [(begin, scoring)], "sync": [(sync, end)]}
        spans["log-probs"] = [(scoring, scoring + row["time/logprobs"])]
        spans["update"] = [(sync - row["time/update"], sync)]
        rows.append({"spans": spans, "reward": row["reward/mean"], "length": row["response/length_mean"]})
    side.add(started, rows, *watches)
    return run.folder


def watch_processes(pid: int) -> tuple[Watch[float], Watch[int]]:
    """CPU seconds of a process and its descendants, including ended ones, and their total PSS in bytes."""
    used: dict[tuple[int, float], float] = {}
    lock = threading.Lock()

    def cpu() -> float:
        with lock:
            for process in process_tree(pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    used[process.pid, process.create_time()] = sum(process.cpu_times()[:2])
            return sum(used.values())

    def memory() -> int:
        return sum(process.memory_full_info().pss for process in process_tree(pid))

    return Watch(cpu, every=0.1), Watch(memory, every=2.0)


# -- TRL's environment ---------------------------------------------------------------------------------------


def trl_environment(folder: Path) -> Path:
    """The Python of TRL's environment, which is built if it is missing or its requirements have changed."""
    python, requirements = folder / "venv" / "bin" / "python", REQUIREMENTS.read_text(encoding="utf-8")
    complete = folder / "venv" / "complete"
    if not complete.is_file() or complete.read_text(encoding="utf-8") != requirements:
        print(f"installing TRL into {folder / 'venv'} (minutes, 5 GB) ...", flush=True)
        shutil.rmtree(folder / "venv", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True, stderr=subprocess.DEVNULL)
        complete.write_text(requirements, encoding="utf-8")
    return python


def run_trl(python: Path, *arguments: Any, stdout: int | None = None) -> subprocess.Popen[str]:
    """TRL's part of this file."""
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "TOKENIZERS_PARALLELISM": "false"}
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | python_path() | threads
    environment["HF_HUB_OFFLINE"] = "1"
    code = "from benchmarks.against_trl import trl_main; trl_main()"
    command = [str(python), "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=stdout or sys.stderr, text=True)


def trl_main() -> None:
    """``train FOLDER WEIGHTS STEPS UPDATES`` or ``score WEIGHTS ...``."""
    if sys.argv[1] == "train":
        train_with_trl(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        print(json.dumps([heldout_accuracy(Path(weights)) for weights in sys.argv[2:]]))


def train_with_trl(out: Path, weights: Path, steps: int, updates: int) -> None:
    """Train with GRPOTrainer. ``out`` gets ``hf``, and ``steps.jsonl``: spans of each phase, reward and
    length. updates: of a step.
    """
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    from rpg_megatron.rewards import Grader

    grader = Grader(workers=2)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        verdicts = [grader.submit(c, a, "answer_line") for c, a in zip(completions, answer, strict=True)]
        return [1.0 if v.result().correct else -1.0 for v in verdicts]

    out.mkdir(parents=True)
    rows = (out / "steps.jsonl").open("w", encoding="utf-8", buffering=1)
    spans: dict[str, list[tuple[float, float]]] = {}
    rewards: list[float] = []
    lengths: list[int] = []

    def finish(end: float) -> None:
        if spans:
            spans["update"] = [(spans["rollout"][-1][1], end)]
            spans["step"] = [(spans["rollout"][0][0], end)]
            row = {"spans": spans, "reward": sum(rewards) / len(rewards)}
            rows.write(json.dumps(row | {"length": sum(lengths) / len(lengths)}) + "\n")

    class Timed(GRPOTrainer):
        """Record when a step's phases begin and end; rewards belong to the rollout, as in our metrics."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            nonlocal spans
            start = time.time()
            finish(start)
            spans = {"log-probs": []}
            result = super()._generate_and_score_completions(inputs)
            scored, end = spans["log-probs"], time.time()
            edges = [start, *(edge for span in scored for edge in span), end]
            spans["rollout"] = list(zip(edges[::2], edges[1::2], strict=True))
            lengths[:] = result["completion_mask"].sum(1).tolist()
            return result

        def _calculate_rewards(self, *arguments: Any) -> Any:
            result = super()._calculate_rewards(*arguments)
            rewards[:] = result[:, 0].tolist()
            return result

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
            start = time.time()
            result = super()._get_per_token_logps_and_entropies(*arguments, **options)
            if not options.get("compute_entropy"):  # the pass for the old policy; updates set it
                spans["log-probs"].append((start, time.time()))
            return result

    options: dict[str, Any] = {
        **{"max_steps": steps * updates, "steps_per_generation": MICROBATCHES, "seed": 17},
        **{"per_device_train_batch_size": PROMPTS * SAMPLES // MICROBATCHES, "top_k": 0},
        **{"gradient_accumulation_steps": MICROBATCHES // updates, "gradient_checkpointing": False},
        **{"num_generations": SAMPLES, "max_completion_length": TOKENS, "temperature": 1.0},
        **{"learning_rate": 1e-4, "lr_scheduler_type": "constant", "weight_decay": 0.1, "max_grad_norm": 1.0},
        **{"loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28, "delta": 10.0},
        **{
            "scale_rewards": "none",
            "model_init_kwargs": {"dtype": "float32"},
            "use_cpu": True,
            "bf16": False,
        },
        **{"disable_tqdm": True, "logging_steps": updates, "save_strategy": "no", "report_to": "none"},
    }
    config = GRPOConfig(output_dir=str(out), **options)
    data = load_dataset("json", data_files=str(QUICKSTART / "train.jsonl"), split="train")
    trainer = Timed(model=str(weights), reward_funcs=reward, args=config, train_dataset=data)
    trainer.train()
    finish(time.time())
    trainer.save_model(str(out / "hf"))
    grader.close()


def heldout_accuracy(weights: Path) -> float:
    """Right answers in %, two samples of each held-out problem at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rpg_megatron.rewards import Grader

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model", padding_side="left")
    lines = (QUICKSTART / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    problems = 2 * [json.loads(line) for line in lines]
    inputs = tokenizer([p["prompt"] for p in problems], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    sampled = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=64)
    texts = tokenizer.batch_decode(sampled[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    with Grader() as grader:
        graded = zip(texts, problems, strict=True)
        correct = sum(grader.submit(t, p["answer"], "answer_line").result().correct for t, p in graded)
    return 100 * correct / len(texts)


if __name__ == "__main__":
    main(__doc__, against_trl)
