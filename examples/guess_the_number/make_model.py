"""Make the model of the example: it knows the form of a game, and plays it badly.

Writes ``model/``: a Qwen3 checkpoint of about 0.2 million parameters with the quickstart's tokenizer, trained
from scratch on the guesses of games by two kinds of players: careful ones draw a number that all replies so
far allow, forgetful ones any number (``CAREFUL`` has the share). What reinforcement learning is left to teach
is to be careful, and to halve what is left.

Takes about five minutes on one CPU core; everything is drawn from --seed.

    python examples/guess_the_number/make_model.py
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.guess_the_number.game import LARGEST, PROMPT, REPLIES

HERE = Path(__file__).resolve().parent
CAREFUL, TURNS = 0.85, 7
GAMES, PEAK_LR = 32, 3e-3
"""Games of a training step."""


def draw_game(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids of a game, and the same as labels: -100 except for the guesses."""
    number, careful = rng.randint(1, LARGEST), rng.random() < CAREFUL
    low, high = 1, LARGEST
    ids = tokenizer.encode(PROMPT)
    labels = [-100] * len(ids)
    for _ in range(TURNS):
        guess = rng.randint(low, high) if careful else rng.randint(1, LARGEST)
        said = [*tokenizer.encode(f"{guess:02d}"), tokenizer.eos_token_id]
        reply = tokenizer.encode(REPLIES[number > guess])
        ids, labels = ids + said + reply, labels + said + [-100] * len(reply)
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if number > guess else (low, min(high, guess - 1))
    return ids, labels


def main() -> None:
    """Train the model and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(HERE.parent / "quickstart" / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, args.steps, pct_start=0.05)
    for step in range(args.steps):
        games = [draw_game(tokenizer, rng) for _ in range(GAMES)]
        longest = max(len(ids) for ids, _ in games)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in games])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in games])
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
