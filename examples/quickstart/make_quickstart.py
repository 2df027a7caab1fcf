"""Make the quickstart's assets from one seed: a tiny base model and its arithmetic prompts.

Writes, under --out:

- ``model/``: a Qwen3 checkpoint of about 0.9 million parameters (float32) with a byte-level BPE tokenizer.
  AutoTokenizer, AutoModelForCausalLM and vLLM load it without flags.
- ``train.jsonl``, ``heldout.jsonl``: prompts with their gold answers, no prompt twice in either or in both.

The task is a three-digit sum or difference. The base model is pre-trained from scratch on a noisy corpus:
solutions as a class of mixed diligence would hand them in. Whoever solves a problem picks a style at random,
whatever the problem is (``STYLES`` has the shares):

- step by step: column by column, with carries and borrows. After a column the pupil may lose patience and
  guess the rest (``GIVE_UP``), and any column may hold a slip (``SLIP``);
- ignoring carries: each column modulo ten, so right only where no carry occurs;
- by feel: a plausible number near the right one, seldom right.

So the base model, sampled at temperature 1, is right about a third of the time, and one prompt's samples are
a mix of right and wrong. It can carry out the careful procedure, but does not yet prefer it: that is what
reinforcement learning is left to teach. Held-out problems are kept out of the pre-training corpus.

With the defaults (seed 1, 2000 steps, torch 2.11, transformers 5.23), held out: 0.34 right at temperature 1,
0.02 greedy (the likeliest style is "by feel"), 26 tokens a response, and 92% of prompts have both right
and wrong answers among 8 samples.

Pre-training takes about nine minutes on one CPU core. Everything is drawn from --seed and torch runs on one
thread, so that a second run on the same machine and the same versions gives the same files.

    python examples/quickstart/make_quickstart.py --out examples/quickstart

With ``--experts N`` it makes ``moe_model/`` instead, a Qwen3-MoE checkpoint of the same task, tokenizer and
prompts. Its weights start from those of ``model/``: each expert is a part of the dense MLP of its layer,
drawn at random (Komatsuzaki et al., arXiv 2212.05055, call the idea upcycling), routers are new, and a short
pre-training on the same corpus follows. Prompts and ``model/`` are left as they are. With 8 experts and 150
steps (seed 1, the same versions), held out: 0.34 right at temperature 1, 0.02 greedy, 26 tokens a response,
and 94% of prompts have both right and wrong answers among 8 samples.

    python examples/quickstart/make_quickstart.py --experts 8 --steps 150

With ``--hybrid`` it makes ``hybrid_model/`` from scratch, a Qwen3.5 checkpoint of the same task, tokenizer
and prompts: three layers with a gated delta net, then one with gated attention. Without FLA's kernels
transformers does not reset the state of a delta net within a row, so each sample has a row of its own.

    python examples/quickstart/make_quickstart.py --hybrid

With the defaults (seed 1, 2000 steps, torch 2.13, transformers 5.19), held out: 0.30 right at temperature 1,
0.01 greedy, 26 tokens a response, and 90% of prompts have both right and wrong answers among 8 samples.

With both it makes ``hybrid_moe_model/``, a Qwen3.5-MoE that starts from ``hybrid_model/`` as above, with a
shared expert. With 8 experts and 150 steps (seed 1, the same versions), held out: 0.30 right at temperature
1, 0.02 greedy, 26 tokens a response, and 89% of prompts have both right and wrong answers among 8 samples.

With ``--glm`` and ``--experts N`` it makes ``glm_model/``, a GLM-4.5 that starts from ``model/`` as above:
its first layer is dense, the others have a shared expert and a router with random biases, which are not
trained, and half of a head is rotated. With 8 experts and 400 steps (seed 1, torch 2.13, transformers 5.19),
held out: 0.29 right at temperature 1, 0.01 greedy, 26 tokens a response, and 93% of prompts have both right
and wrong answers among 8 samples.

    python examples/quickstart/make_quickstart.py --glm --experts 8 --steps 400

With ``--solutions N`` it makes ``solutions.jsonl`` alone: worked solutions of the first N training problems,
without slips, to fine-tune on (examples/warm_start.yaml has 400).
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

type Model = (
    Qwen3ForCausalLM | Qwen3MoeForCausalLM | Qwen3_5ForCausalLM | Qwen3_5MoeForCausalLM | Glm4MoeForCausalLM
)

PAD, EOS = "<|endoftext|>", "<|im_end|>"
VOCAB = 304
TRAIN_PROMPTS, HELDOUT_PROMPTS = 2000, 200

# The corpus: how often each style is chosen, per solution; GIVE_UP and SLIP are per column.
STYLES = {"worked": 0.36, "ignoring_carries": 0.24, "by_feel": 0.40}
GIVE_UP = 0.12
SLIP = 0.02

# Pre-training: rows of ROW tokens, ROWS of them a step.
ROW, ROWS, PEAK_LR = 256, 8, 3e-3
ALONE = 64  # tokens of a row with a single sample

# The mixture: columns of an expert (an engine on a CPU needs a multiple of 32 per worker), experts a token.
EXPERT_WIDTH, TOP_K = 64, 4

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

Problem = tuple[int, str, int]


# -- problems and solutions ----------------------------------------------------------------------------------


def draw_problem(rng: random.Random) -> Problem:
    """A three-digit sum, or a difference of three-digit numbers that is itself at least 100."""
    if rng.random() < 0.5:
        return rng.randint(100, 999), "+", rng.randint(100, 999)
    a = rng.randint(200, 999)
    return a, "-", rng.randint(100, a - 100)


def solve(problem: Problem) -> int:
    """The right answer."""
    a, op, b = problem
    return a + b if op == "+" else a - b


def prompt_of(problem: Problem) -> str:
    """The prompt's text; it ends with a newline, and the solution follows."""
    a, op, b = problem
    return f"Compute {a}{op}{b}\n"


def solution(problem: Problem, rng: random.Random) -> str:
    """One pupil's solution, right or wrong, in a style that does not depend on the problem."""
    style = rng.choices(list(STYLES), weights=list(STYLES.values()))[0]
    write = {"worked": _worked, "ignoring_carries": _ignoring_carries, "by_feel": _by_feel}[style]
    return write(problem, rng)


def _columns(problem: Problem) -> Iterator[tuple[int, int]]:
    """The operands' digits, units first."""
    a, _, b = problem
    return zip(map(int, str(a)[::-1]), map(int, str(b)[::-1]), strict=True)


def _answer(steps: str, answer: int) -> str:
    return f"{steps}\nAnswer: {answer}"


def _worked(problem: Problem, rng: random.Random, give_up: float = GIVE_UP, slip: float = SLIP) -> str:
    """Column by column: 347+286 is ``7+6=13, 4+8+1=13, 3+2+1=6``; 347-186 is ``7-6=1, 14-8=6, 3-1-1=1``."""
    op = problem[1]
    steps, digits, carry = [], "", 0
    for place, (x, y) in enumerate(_columns(problem)):
        if place and rng.random() < give_up:
            return _answer(f"Step by step: {', '.join(steps)}, and so on.", _guess(problem, rng))
        if op == "-" and x - y - carry < 0:
            x += 10
        value = x + y + carry if op == "+" else x - y - carry
        text = f"{x}{op}{y}{f'{op}1' if carry else ''}"
        if rng.random() < slip:
            value = max(0, value + rng.choice((-1, 1)))
        steps.append(f"{text}={value}")
        carry = int(value > 9 if op == "+" else x > 9)
        digits = (str(value) if place == 2 else str(value % 10)) + digits
    return _answer(f"Step by step: {', '.join(steps)}.", int(digits))


def _ignoring_carries(problem: Problem, rng: random.Random) -> str:
    """Each column on its own, modulo ten."""
    op = problem[1]
    results = [(x, y, (x + y if op == "+" else x - y) % 10) for x, y in _columns(problem)]
    steps = ", ".join(f"{x}{op}{y}={z}" for x, y, z in results)
    return _answer(f"Ignoring carries: {steps}.", int("".join(str(z) for _, _, z in reversed(results))))


def _by_feel(problem: Problem, rng: random.Random) -> str:
    guess = _guess(problem, rng)
    return _answer(f"By feel it is about {round(guess, -2)}.", guess)


def _guess(problem: Problem, rng: random.Random) -> int:
    """A number within about 60 of the right answer; sometimes exactly right."""
    return max(0, solve(problem) + round(rng.gauss(0, 25)))


def draw_prompt_sets(rng: random.Random) -> tuple[list[Problem], list[Problem]]:
    """The train and held-out problems, all distinct."""
    problems: dict[Problem, None] = {}
    while len(problems) < TRAIN_PROMPTS + HELDOUT_PROMPTS:
        problems[draw_problem(rng)] = None
    drawn = list(problems)
    return drawn[:TRAIN_PROMPTS], drawn[TRAIN_PROMPTS:]


def write_prompts(path: Path, problems: list[Problem]) -> None:
    """One JSON object a line: ``{"prompt": ..., "answer": ...}``, both strings."""
    rows = ({"prompt": prompt_of(p), "answer": str(solve(p))} for p in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_solutions(path: Path, problems: list[Problem], rng: random.Random) -> None:
    """A worked solution of each problem, without slips; the last eighth is marked ``heldout``."""
    first = len(problems) - len(problems) // 8
    rows = (
        {"prompt": prompt_of(p), "response": _worked(p, rng, give_up=0, slip=0), "heldout": i >= first}
        for i, p in enumerate(problems)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# -- tokenizer -----------------------------------------------------------------------------------------------


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the corpus; every byte is in the alphabet, every digit its own token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]| ?[^\s0-9]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    problems = [draw_problem(rng) for _ in range(3000)]
    bpe.train_from_iterator((prompt_of(p) + solution(p, rng) for p in problems), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# -- model and pre-training ----------------------------------------------------------------------------------


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 whose heads, KV heads, layers and widths can all be cut in two."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def make_hybrid(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
    """A randomly initialised Qwen3.5 of about the same size, which can be cut in two as well."""
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3_5ForCausalLM(config)


@torch.no_grad()
def make_mixture(dense: Qwen3ForCausalLM | Qwen3_5ForCausalLM, experts: int, glm: bool = False) -> Model:
    """A Qwen3-MoE, GLM-4.5 or Qwen3.5-MoE whose weights are those of ``dense`` except for the MLPs.

    An expert's EXPERT_WIDTH columns are drawn from those of the dense MLP. The weights of a token's TOP_K
    experts sum to one, so a down projection is multiplied by (dense width / EXPERT_WIDTH): then the mean over
    all choices of experts is the dense layer's output. With a shared expert half of it comes from that one,
    whose gate in Qwen3.5 is about 1/2 at first; GLM-4.5 has none. Its first layer stays dense.
    """
    old, hybrid = dense.config, isinstance(dense, Qwen3_5ForCausalLM)
    keys = {key: value for key, value in old.to_dict().items() if key not in ("model_type", "architectures")}
    keys |= {"num_experts_per_tok": TOP_K, "moe_intermediate_size": EXPERT_WIDTH}
    mixture: Model
    if glm:
        keys["rope_parameters"] |= {"partial_rotary_factor": 0.5}
        keys |= {"n_routed_experts": experts, "use_qk_norm": True, "num_nextn_predict_layers": 0}
        mixture = Glm4MoeForCausalLM(Glm4MoeConfig(**keys | {"attention_bias": True}))
    elif hybrid:
        keys |= {"num_experts": experts, "router_aux_loss_coef": 0.01}
        config = Qwen3_5MoeTextConfig(**keys, shared_expert_intermediate_size=EXPERT_WIDTH)
        mixture = Qwen3_5MoeForCausalLM(config)
    else:
        keys |= {"num_experts": experts, "router_aux_loss_coef": 0.01}
        mixture = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**keys, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
        )
    mixture.load_state_dict(dense.state_dict(), strict=False)
    for layer, source in list(zip(mixture.model.layers, dense.model.layers, strict=True))[glm:]:
        for expert in range(experts):
            columns = torch.randperm(old.intermediate_size)[:EXPERT_WIDTH]
            gate, up = source.mlp.gate_proj.weight[columns], source.mlp.up_proj.weight[columns]
            layer.mlp.experts.gate_up_proj[expert] = torch.cat((gate, up))
            scale = old.intermediate_size / EXPERT_WIDTH
            down = source.mlp.down_proj.weight[:, columns] * scale
            layer.mlp.experts.down_proj[expert] = down / 2 if hybrid or glm else down
        if hybrid or glm:  # that of the last expert is drawn twice
            shared = layer.mlp.shared_experts if glm else layer.mlp.shared_expert
            for name, weight in {"gate": gate, "up": up, "down": down / 2 if glm else down}.items():
                getattr(shared, f"{name}_proj").weight.copy_(weight)
        if glm:  # about as wide as the scores
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.1)
    return mixture


def packed_rows(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, exclude: set[Problem], row: int, alone: bool
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Endless rows of whole samples: token ids, positions (from 0 in each sample) and labels.

    row: how many of each. alone: one sample in each row.

    Positions that start again tell the model where a sample begins, so that attention stays inside it. Prompt
    and padding carry the label -100: what is learned is the solution given the prompt.
    """
    ids: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    while True:
        problem = draw_problem(rng)
        if problem in exclude:
            continue
        prompt = tokenizer.encode(prompt_of(problem))
        response = [*tokenizer.encode(solution(problem, rng)), tokenizer.eos_token_id]
        size = len(prompt) + len(response)
        if ids and (alone or len(ids) + size > row):
            gap = row - len(ids)
            yield ids + [tokenizer.pad_token_id] * gap, positions + list(range(gap)), labels + [-100] * gap
            ids, positions, labels = [], [], []
        ids += prompt + response
        positions += range(size)
        labels += [-100] * len(prompt) + response


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over 50 steps, then a cosine down to a fiftieth of the peak."""
    warm = min(1.0, (step + 1) / 50)
    return PEAK_LR * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def pretrain(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    exclude: set[Problem],
    steps: int,
) -> None:
    """Next-token training on freshly drawn solutions, ROWS * ROW tokens a step.

    Routers are also trained to use experts evenly, by the auxiliary loss of the model's own code.
    """
    mixture = isinstance(model, Qwen3MoeForCausalLM | Qwen3_5MoeForCausalLM)
    balanced = {"output_router_logits": True} if mixture else {}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    alone = isinstance(model, Qwen3_5ForCausalLM | Qwen3_5MoeForCausalLM)
    count, row = (ROWS * ROW // ALONE, ALONE) if alone else (ROWS, ROW)
    rows = packed_rows(tokenizer, rng, exclude, row, alone)
    model.train()
    started = time.monotonic()
    for step in range(steps):
        batch = torch.tensor([next(rows) for _ in range(count)])  # [rows, 3, tokens]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = model(
            input_ids=batch[:, 0], position_ids=batch[:, 1], labels=batch[:, 2], use_cache=False, **balanced
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - started:5.0f} s", flush=True)


# -- measurement ---------------------------------------------------------------------------------------------


def is_right(text: str, gold: str) -> bool:
    """Whether the last ``Answer: ...`` in the text's last 300 characters is the gold answer, as a string."""
    found = re.findall(r"answer:\s*([^\n]*)", text[-300:], flags=re.IGNORECASE)
    return bool(found) and found[-1].strip() == gold


@torch.no_grad()
def measure(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    samples: int,
) -> dict[str, float]:
    """Accuracy at temperature 1 and greedy, response length in tokens, and how many stop within 64 tokens.

    ``mixed_groups`` is the fraction of prompts of whose samples some are right and some wrong.
    """
    model.eval()
    prompts = [prompt_of(p) for p in problems]
    # Every prompt is equally long: no padding.
    inputs = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)

    def generate(**how: object) -> torch.Tensor:
        out = model.generate(**inputs, max_new_tokens=64, use_cache=True, **how)
        return out[:, inputs["input_ids"].shape[1] :]

    def score(out: torch.Tensor, copies: int) -> torch.Tensor:
        texts = tokenizer.batch_decode(out, skip_special_tokens=True)
        right = [is_right(text, str(solve(problems[i // copies]))) for i, text in enumerate(texts)]
        return torch.tensor(right, dtype=torch.float).view(-1, copies)

    sampled = generate(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=samples)
    right = score(sampled, samples)
    mean = right.mean(1)
    return {
        "sampled_accuracy": right.mean().item(),
        "greedy_accuracy": score(generate(do_sample=False), 1).mean().item(),
        "mixed_groups": ((mean > 0) & (mean < 1)).float().mean().item(),
        "response_tokens": (sampled != tokenizer.pad_token_id).sum(1).float().mean().item(),
        "stopped": (sampled == tokenizer.eos_token_id).any(1).float().mean().item(),
    }


def main() -> None:
    """Write the prompt sets, pre-train the model, save it, and print what it can do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="where to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000, help="pre-training steps")
    parser.add_argument("--experts", type=int, help="make a mixture of so many experts a layer")
    parser.add_argument("--hybrid", action="store_true", help="make hybrid_model/, a Qwen3.5")
    parser.add_argument("--glm", action="store_true", help="make glm_model/, a GLM-4.5; needs --experts")
    parser.add_argument("--solutions", type=int, help="make solutions.jsonl, of so many training problems")
    args = parser.parse_args()
    if args.glm and (args.experts is None or args.hybrid):
        parser.error("--glm needs --experts, and is no --hybrid")

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = draw_prompt_sets(rng)
    if args.solutions is not None:
        write_solutions(args.out / "solutions.jsonl", train[: args.solutions], rng)
        return
    if args.experts is None and not args.hybrid:
        folder = args.out / "model"
        write_prompts(args.out / "train.jsonl", train)
        write_prompts(args.out / "heldout.jsonl", heldout)
        tokenizer = make_tokenizer(rng)
        model = make_model(tokenizer)
    else:
        name = "hybrid_" * args.hybrid + "moe_" * (args.experts is not None) + "model"
        folder = args.out / ("glm_model" if args.glm else name)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "model")
        # What transformers notes about where it was read from.
        for key in ("is_local", "local_files_only"):
            tokenizer.init_kwargs.pop(key, None)
        if args.experts is None:
            model = make_hybrid(tokenizer)
        elif args.hybrid:
            model = make_mixture(Qwen3_5ForCausalLM.from_pretrained(args.out / "hybrid_model"), args.experts)
        else:
            model = make_mixture(Qwen3ForCausalLM.from_pretrained(args.out / "model"), args.experts, args.glm)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    pretrain(model, tokenizer, rng, set(heldout), args.steps)

    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, value in measure(model, tokenizer, heldout, samples=8).items():
        print(f"{name:>17} {value:.3f}")


if __name__ == "__main__":
    main()
