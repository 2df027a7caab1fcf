"""Fine-tuning compared with TRL's SFTTrainer: the loss of every step, and speed, on this machine's CPU.

The same on both sides: checkpoint, conversations and their order, conversations a step, epochs, AdamW and its
decays, learning rate, gradient norm of at most 1, float32, the mean over the trained tokens of a step. The
conversations are answers without their solutions, which the model must guess: their loss stays large, so that
relative differences are not those of rounding.

Not the same: ours has two data-parallel ranks of one thread and packs sequences into rows; TRL has one
process with a thread per core and pads the sequences of a step to the longest one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.against_trl import trl_environment
from benchmarks.setup import QUICKSTART, Report, benchmark, main, python_path, train

EXAMPLE = QUICKSTART.parent / "warm_start.yaml"
BATCH, EPOCHS = 64, 3
SETTINGS = ("evaluation=null", "checkpoint.every=null", "parallel={data: 2}")
SETTINGS += (f"sft.batch_size={BATCH}", f"sft.epochs={EPOCHS}", "optimizer.warmup_steps=1", "sft.every=1000")


@benchmark(rounds=1)
def sft_against_trl(report: Report, folder: Path, rounds: int = 3) -> None:
    """A round is one run of ours, then one of TRL.

    folder: gets TRL's environment, FOLDER/venv (5 GB), and its runs.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = trl_environment(folder)
    data = [json.loads(row) for row in (QUICKSTART / "train.jsonl").read_text("utf-8").splitlines()]
    pairs = [{"prompt": r["prompt"], "completion": f"Answer: {r['answer']}"} for r in data]
    for name, part in (("train", pairs[:512]), ("heldout", pairs[512:640])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        place = folder / "runs"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        run = train(
            place,
            *SETTINGS,
            f"sft.data={{path: {folder}/train.jsonl, shuffle: false, max_tokens: 128}}",
            f"sft.heldout={{path: {folder}/heldout.jsonl, max_tokens: 128}}",
            config=EXAMPLE,
        )
        rows = [row for row in run.rows if row["step"]]
        ours += [row["throughput/tokens_per_second"] for row in rows[1:]]
        result = run_trl(python, folder)
        seconds = [b - a for a, b in zip(result["times"][:-1], result["times"][1:], strict=True)]
        theirs += [row["step/tokens"] / s for row, s in zip(rows[1:], seconds, strict=True)]
    gaps = [abs(row["policy/loss"] / loss - 1) for row, loss in zip(rows, result["losses"], strict=True)]
    held_out = run.rows[0]["sft/heldout_loss"], rows[-1]["sft/heldout_loss"]
    title = f"{len(rows)} steps of {BATCH} conversations, {rounds} runs each"
    table = report.table("", "ours|.6g", "TRL|.6g", "ratio|.3f", title=title)
    table.row("tokens/s, median of the steps", a := median(ours), b := median(theirs), a / b)
    for name, mine, other in zip(("before", "after"), held_out, result["held_out"], strict=True):
        table.row(f"held-out loss {name}", mine, other, mine / other)
    report.say(f"largest relative difference of a step's loss: {max(gaps):.1e}")
    report.say(
        f"relative difference of the last held-out loss: {abs(held_out[1] / result['held_out'][1] - 1):.1e}"
    )


def run_trl(python: Path, folder: Path) -> dict[str, Any]:
    """Losses, times of the steps, and held-out losses of TRL's run, in its own environment."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | python_path()
    environment |= {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1"}
    code = "from benchmarks.sft_against_trl import fine_tune_with_trl; fine_tune_with_trl()"
    subprocess.run([str(python), "-c", code, str(folder)], env=environment, check=True, stdout=sys.stderr)
    result: dict[str, Any] = json.loads((folder / "trl.json").read_text("utf-8"))
    return result


def fine_tune_with_trl() -> None:
    """In TRL's environment: train on ``train.jsonl`` in FOLDER; writes ``trl.json`` there."""
    import torch
    from datasets import load_dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    folder = Path(sys.argv[1])
    losses: list[float] = []
    times: list[float] = []

    class InOrder(SFTTrainer):  # type: ignore[misc]
        """Takes the rows in their order."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset if dataset is None else dataset)

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Keeps the loss and the end of each step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    options = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 1000, "max_length": 128}
    options |= {"num_train_epochs": EPOCHS, "learning_rate": 3e-4, "lr_scheduler_type": "constant"}
    options |= {"weight_decay": 0.1, "max_grad_norm": 1.0, "warmup_steps": 0, "optim": "adamw_torch"}
    options |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    options |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    data = {
        name: load_dataset("json", data_files=str(folder / f"{name}.jsonl"), split="train")
        for name in ("train", "heldout")
    }
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(QUICKSTART / "model", dtype=torch.float32),
        args=SFTConfig(output_dir=str(folder / "trl"), **options),
        train_dataset=data["train"],
        eval_dataset=data["heldout"],
        processing_class=AutoTokenizer.from_pretrained(QUICKSTART / "model"),
        callbacks=[Watch()],
    )
    held_out = [trainer.evaluate()["eval_loss"]]
    trainer.train()
    held_out.append(trainer.evaluate()["eval_loss"])
    (folder / "trl.json").write_text(json.dumps({"losses": losses, "times": times, "held_out": held_out}))


if __name__ == "__main__":
    main(__doc__, sft_against_trl)
