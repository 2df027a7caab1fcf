"""TRL's part of ``benchmarks.against_trl``, which runs it in TRL's environment; our grader is on PYTHONPATH.

``train WEIGHTS FOLDER SIZE STEPS`` or ``score WEIGHTS ...``; SIZE is a JSON object, as ``against_trl.Size``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rpg_megatron.rewards import Grader

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"


def main() -> None:
    if sys.argv[1] == "train":
        weights, out, size, steps = sys.argv[2:]
        train(Path(weights), Path(out), json.loads(size), int(steps))
    else:
        print(json.dumps([heldout_accuracy(Path(weights)) for weights in sys.argv[2:]]))


def train(weights: Path, out: Path, size: dict[str, int], steps: int) -> None:
    """Train with GRPOTrainer. ``out`` gets ``steps.jsonl``, one ``against_trl.Step`` a line, and ``hf``."""
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

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

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Notes when a step's phases begin and end; rewards belong to the rollout, as in our metrics."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            nonlocal spans
            start = time.time()
            finish(start)
            spans = {"log-probs": []}
            result = super()._generate_and_score_completions(inputs)
            [(first, last)] = spans["log-probs"]
            spans["rollout"] = [(start, first), (last, time.time())]
            lengths[:] = result["completion_mask"].sum(1).tolist()
            return result

        def _calculate_rewards(self, *arguments: Any) -> Any:
            result = super()._calculate_rewards(*arguments)
            rewards[:] = result[:, 0].tolist()
            return result

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
            start = time.time()
            result = super()._get_per_token_logps_and_entropies(*arguments, **options)
            if not options.get("compute_entropy"):  # the pass for the old policy; an update's asks for it
                spans["log-probs"].append((start, time.time()))
            return result

    batch = size["prompts"] * size["samples"] // size["updates"]
    sizes = {"max_steps": steps * size["updates"], "per_device_train_batch_size": batch}
    sizes |= {"steps_per_generation": size["updates"], "gradient_accumulation_steps": 1}
    sampling = {
        "num_generations": size["samples"],
        "max_completion_length": size["tokens"],
        "temperature": 1.0,
    }
    optimizer = {"learning_rate": 1e-4, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    loss = {"loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28, "delta": 10.0}
    loss |= {"scale_rewards": "none", "max_grad_norm": 1.0, "top_k": 0}
    numbers = {"model_init_kwargs": {"dtype": "float32"}, "use_cpu": True, "bf16": False}
    quiet = {
        "disable_tqdm": True,
        "logging_steps": size["updates"],
        "save_strategy": "no",
        "report_to": "none",
    }
    every = sizes | sampling | optimizer | loss | numbers | quiet
    config = GRPOConfig(output_dir=str(out), gradient_checkpointing=False, seed=17, **every)
    data = load_dataset("json", data_files=str(QUICKSTART / "train.jsonl"), split="train")
    trainer = Timed(model=str(weights), reward_funcs=reward, args=config, train_dataset=data)
    trainer.train()
    finish(time.time())
    trainer.save_model(str(out / "hf"))
    grader.close()


def heldout_accuracy(weights: Path) -> float:
    """Share of right answers, two samples of each held-out problem at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
        return sum(grader.submit(t, p["answer"], "answer_line").result().correct for t, p in graded) / len(
            texts
        )


if __name__ == "__main__":
    main()
