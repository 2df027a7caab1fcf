"""The committed quickstart files are what the quickstart promises: a small base model and valid prompt sets.

Checked: the folder's size, the model's shape (all divisible by two, so that TP2 and PP2 work), float32
weights that match the config, a tokenizer that round-trips any UTF-8 and splits numbers into digits, and
prompt sets without duplicates, without overlap, and with right answers (recomputed here, without the script).
Not covered: how often the model is right and how fast it learns. The script that makes the assets prints the
first; the second is a training run.
"""

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from rpg_megatron.commands.convert.inspect import inspect_checkpoint

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
MODEL = QUICKSTART / "model"
MOE_MODEL = QUICKSTART / "moe_model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def read_prompts(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (QUICKSTART / name).read_text(encoding="utf-8").splitlines()]


def test_the_files_are_small():
    assert sum(f.stat().st_size for f in MODEL.rglob("*") if f.is_file()) <= 6e6
    assert (QUICKSTART / "train.jsonl").stat().st_size < 200e3
    assert len(read_prompts("train.jsonl")) == 2000
    assert len(read_prompts("heldout.jsonl")) == 200


def test_the_model_can_be_cut_in_two(tokenizer):
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is False
    assert config["vocab_size"] == len(tokenizer)
    cut = (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    assert [key for key in cut if config[key] % 2] == []


def test_the_weights_are_float32_and_match_the_config():
    config = json.loads((MODEL / "config.json").read_text())
    vocab, hidden, head = config["vocab_size"], config["hidden_size"], config["head_dim"]
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        assert {s.get_dtype() for s in slices.values()} == {"F32"}
        shapes = {name: tuple(s.get_shape()) for name, s in slices.items()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (vocab, hidden)
    layers = {int(m[1]) for name in shapes if (m := re.match(r"model\.layers\.(\d+)\.", name))}
    assert layers == set(range(config["num_hidden_layers"]))
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (config["num_key_value_heads"] * head, hidden)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (head,)


def test_the_mixture_fits_two_ranks_and_a_cpu_engine():
    assert sum(f.stat().st_size for f in MOE_MODEL.rglob("*") if f.is_file()) <= 4.5e6
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (MOE_MODEL / name).read_bytes() == (MODEL / name).read_bytes()
    config = json.loads((MOE_MODEL / "config.json").read_text())
    assert config["num_local_experts"] % 2 == 0
    assert config["moe_intermediate_size"] % 32 == 0
    assert config["dtype"] == "float32"


def test_inspect_lists_the_experts_of_the_mixture():
    report = inspect_checkpoint(MOE_MODEL)
    assert report.problems == []
    experts = [row for row in report.tensors if ".experts." in row["name"]]
    assert len(experts) == 4 * 8 * 3
    assert "1,066,368 parameters" in report.table()
    assert "8 experts of 64 in 4 layers, 4 per token" in report.table()


@pytest.mark.parametrize(
    "text",
    [
        "Compute 347+286\n",
        " two  spaces\tand a tab\r\n",
        "naïve café ≤ 日本語 🙂 \u200d",
        "x=-12.5e3",
        "\x00\x7f\u0080",
        "",
    ],
)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)


def test_every_digit_is_a_token(tokenizer):
    ids = tokenizer.encode("907 1234,5")
    pieces = [tokenizer.decode([i]) for i in ids]
    assert [p for p in pieces if re.search(r"\d", p)] == list("90712345")


def test_special_tokens(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    message = [{"role": "user", "content": "Compute 347+286"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "Compute 347+286\n"


def test_no_prompt_occurs_twice():
    prompts = [row["prompt"] for name in ("train.jsonl", "heldout.jsonl") for row in read_prompts(name)]
    assert len(prompts) == len(set(prompts))


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_answers_are_right_and_prompts_short(name, tokenizer):
    operators = set()
    for row in read_prompts(name):
        assert set(row) == {"prompt", "answer"}
        a, op, b = re.fullmatch(r"Compute (\d{3})([+-])(\d{3})\n", row["prompt"]).groups()
        assert row["answer"] == str(int(a) + int(b) if op == "+" else int(a) - int(b))
        assert len(tokenizer.encode(row["prompt"])) <= 24
        operators.add(op)
    assert operators == {"+", "-"}
