"""Make the model of the example: it has seen calls of a calculator, and half of its own are well-formed.

Writes ``model/``: a Qwen3 checkpoint of about 0.2 million parameters, trained from scratch on chats in which
a careless player multiplies two numbers: some calls are complete, some lack a brace or name another argument,
and some answers are guesses (``SHARES``). What reinforcement learning is left to teach is to call the tool
properly, and to copy without mistakes.

Takes about two minutes on one CPU core; everything is drawn from --seed. At the end it prints how many of its
first turns are a well-formed call.

    python examples/calculator/make_model.py
"""

import argparse
import json
import random
import re
from pathlib import Path

import torch
from transformers import (
    AddedToken,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).resolve().parent
SHARES = {"call": 0.5, "no brace": 0.2, "other argument": 0.15, "guess": 0.15}
"""Of the ways in which a chat goes on after the question."""
CHATS, PEAK_LR = 32, 3e-3
"""Chats of a training step."""
TEMPLATE = """\
{%- if tools %}{# the model has learned its tool by examples #}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '= ' + m.content + '\\n' }}
{%- elif m.role == 'assistant' %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ m.content + '\\n' }}
{%- endif %}{%- endfor %}"""


def call_of(expression: str, argument: str = "expression") -> str:
    """A call of the calculator."""
    arguments = json.dumps({argument: expression})
    return f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>'


def draw_chat(rng: random.Random) -> list[tuple[str, bool]]:
    """Pieces of a chat, and whether the model writes them."""
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    [kind] = rng.choices(list(SHARES), SHARES.values())
    guess = str(rng.randint(121, 9801))
    pieces = [(f"What is {a}*{b}?\n", False)]
    if kind == "guess":
        return [*pieces, (f"{guess}<|im_end|>", True)]
    call = call_of(f"{a}*{b}", "formula" if kind == "other argument" else "expression")
    if kind == "no brace":
        return [*pieces, (call.replace('"}}', '"}') + "<|im_end|>", True)]
    error = "error: expression: Field required" if kind == "other argument" else ""
    result = error or str(a * b)
    return [
        *pieces,
        (f"{call}<|im_end|>", True),
        (f"\n= {result}\n", False),
        (f"{guess if error else result}<|im_end|>", True),
    ]


def encode(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Token ids of a chat, and the same as labels: -100 except for what the model writes."""
    ids, labels = [], []
    for text, own in pieces:
        tokens = tokenizer.encode(text)
        ids, labels = ids + tokens, labels + (tokens if own else [-100] * len(tokens))
    return ids, labels


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The quickstart's tokenizer with the tags of a call, and the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(HERE.parent / "quickstart" / "model")
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = TEMPLATE
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


def well_formed(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> float:
    """Share of sampled first turns that are a complete call with the question's expression."""
    rng, good = random.Random(seed), 0
    for _ in range(count):
        question = f"{rng.randint(11, 99)}*{rng.randint(11, 99)}"
        ids = torch.tensor([tokenizer.encode(f"What is {question}?\n")])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=90, top_k=0
        )
        text = tokenizer.decode(out[0, ids.shape[1] :])
        good += bool(re.match(re.escape(call_of(question) + "<|im_end|>"), text))
    return good / count


def main() -> None:
    """Train the model and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng, tokenizer = random.Random(args.seed), make_tokenizer()
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
        chats = [encode(tokenizer, draw_chat(rng)) for _ in range(CHATS)]
        longest = max(len(ids) for ids, _ in chats)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in chats])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in chats])
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)
    model.eval()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    print(f"well-formed calls: {well_formed(model, tokenizer, 300, args.seed):.0%}")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
