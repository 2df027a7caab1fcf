"""Adapters go between PEFT's files and Megatron's shards unchanged, and broken ones end in one message.

Why: an adapter is made elsewhere, and may have any setting or size. PEFT itself writes and reads here. Not
covered: the sums of adapters and weights (tests/integration/test_convert_lora.py).
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpg_megatron.checkpoints.hf_export import export_adapter
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_adapter, peft_config
from rpg_megatron.config import UserError, read_model_shape
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.launcher import checks
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.partition import ONE_RANK
from tests.support.megatron_shards import grid, stage_shapes
from tests.support.peft_adapters import save_random_adapter
from tests.support.tiny_models import AWKWARD, TINY, make_model

LORA = LoraSettings(rank=3, alpha=6)
LAYOUT = AdapterMapping(TINY, LORA)


def write_adapter(folder: Path, **changes: Any) -> Path:
    """An adapter of TINY by LORA. changes: to adapter_config.json."""
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text(json.dumps(peft_config(LAYOUT, Path("/base")) | changes))
    save_file({n: torch.zeros(s) for n, s in LAYOUT.hf_tensors().items()}, folder / ADAPTER_WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("family", "targets", "rslora"),
    [
        ("qwen3", "all-linear", False),
        ("qwen2", ("q_proj", "down_proj"), False),
        ("llama", "all-linear", True),
        ("qwen3", ("v_proj", "lm_head"), False),
        ("qwen3_5", "all-linear", False),
        ("qwen3_5", ("q_proj", "in_proj_qkv", "in_proj_a"), True),
    ],
)
def test_pefts_own_adapter_comes_back_bit_by_bit(tmp_path, family: str, targets: Any, rslora: bool) -> None:
    from peft import PeftModel

    lora = LoraSettings(rank=3, alpha=5, targets=targets, rslora=rslora)
    model = make_model(tmp_path / "model", family, **AWKWARD)
    tokens = torch.arange(40)[None]
    logits = save_random_adapter(model, lora, tmp_path / "theirs", tokens)
    layout = AdapterMapping(read_model_shape(tmp_path / "model"), lora)
    (place,) = grid(layout.shape, 1, 1)
    params = {n: torch.full(s, float("nan")) for n, s in stage_shapes(layout, place, 1).items()}
    load_hf_weights(
        tmp_path / "theirs",
        params.items(),
        layout,
        ONE_RANK,
        stored=check_adapter(tmp_path / "theirs", layout),
    )
    export_adapter(tmp_path / "ours", params, layout, place, tmp_path / "model", dtype=torch.float32)
    theirs, ours = (load_file(tmp_path / name / ADAPTER_WEIGHTS) for name in ("theirs", "ours"))
    base_layer = "base_model.model.lm_head.base_layer.weight"  # PEFT saves the frozen weight, too
    assert theirs.keys() == ours.keys() | ({base_layer} if layout.on_output_layer else set())
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    base = make_model(tmp_path / "again", family, **AWKWARD).float()
    with torch.no_grad():
        plain = base(tokens).logits
        loaded = PeftModel.from_pretrained(base, tmp_path / "ours")(tokens).logits
    assert torch.equal(loaded, logits)
    assert (loaded - plain).abs().max() > 0.01, "the adapter does nothing"


def test_a_resized_output_layer_is_another_model(tmp_path: Path) -> None:
    """PEFT saves the weight below an adapter, and then loads it in place of the model's."""
    lora = LoraSettings(rank=3, alpha=6, targets=("lm_head",))
    mapping, base_layer = AdapterMapping(TINY, lora), "base_model.model.lm_head.base_layer.weight"
    folder = write_adapter(tmp_path / "adapter", target_modules=["lm_head"])
    tensors = {n: torch.zeros(s) for n, s in mapping.hf_tensors().items()}
    for rows in (TINY.vocab_size, TINY.vocab_size + 1):
        save_file(tensors | {base_layer: torch.zeros(rows, TINY.hidden_size)}, folder / ADAPTER_WEIGHTS)
        if rows == TINY.vocab_size:
            assert check_adapter(folder, mapping).keys() == tensors.keys()
    with pytest.raises(UserError, match=f"unexpected: {base_layer}"):
        check_adapter(folder, mapping)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": "x"}, "r is 'x', not a number above 0"),
        ({"r": True}, "r is True, not a number above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, not a number above 0"),
        ({"r": 8}, "set lora.rank to 8, it is 3"),
        ({"lora_alpha": 12}, "set lora.alpha to 12, it is 6"),
        ({"use_rslora": True}, "set lora.rslora to true"),
        ({"target_modules": ["q_proj", "k_proj"]}, "set lora.targets to [k_proj, q_proj]"),
        ({"target_modules": 5}, "target_modules is 5, not a list of names"),
        ({"target_modules": [["q_proj"]]}, "target_modules is [['q_proj']], not a list of names"),
        ({"use_dora": True}, "use_dora is True, and only False is supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}, and only {} is supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], and only None is supported"),
        ({"bias": "all"}, "bias is 'all', and only 'none' is supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1], and only None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', with which PEFT changes the model's"),
        ({"peft_type": "IA3"}, "has peft_type 'IA3'; only LORA can be trained"),
        ({"peft_type": ["\ud800\x1b[2J" * 1000]}, r"has peft_type ['\ud800\x1b[2J"),
    ],
)
def test_settings_that_are_not_ours_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_adapter(tmp_path / "adapter", **changes)
    with pytest.raises(UserError) as error:
        check_adapter(folder, LAYOUT)
    assert message in str(error.value)
    assert str(error.value).startswith(f"model.adapter: {folder / ADAPTER_CONFIG}")
    assert len(str(error.value)) < 500


def test_settings_of_pefts_that_change_nothing_are_allowed(tmp_path: Path) -> None:
    changes = {
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
        "target_modules": ".*_proj",
        "unknown": 1,
    }
    assert check_adapter(write_adapter(tmp_path / "adapter", **changes), LAYOUT).keys() == (
        LAYOUT.hf_tensors().keys()
    )


def replace(file: Path, content: str | bytes) -> None:
    file.unlink()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def become_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def grow(file: Path) -> None:
    os.truncate(file, 200_000_000)  # a hole: nothing is written


def change(file: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {k: v for k, v in (load_file(file) | changes).items() if v is not None}
    save_file(tensors, file)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BROKEN: dict[str, tuple[str, Any, str]] = {
    "no settings": (ADAPTER_CONFIG, Path.unlink, "cannot be read (No such file or directory)"),
    "not JSON": (ADAPTER_CONFIG, lambda f: replace(f, "r: 3"), "cannot be read (Expecting value"),
    "not text": (ADAPTER_CONFIG, lambda f: replace(f, b"\xff\xfe"), "cannot be read ('utf-8'"),
    "a list": (ADAPTER_CONFIG, lambda f: replace(f, "[]"), "cannot be read (not an object)"),
    "nested": (ADAPTER_CONFIG, lambda f: replace(f, "[" * 100_000), "cannot be read (nested too deeply)"),
    "a long number": (ADAPTER_CONFIG, lambda f: replace(f, "9" * 5000), "a number has too many digits"),
    "huge": (ADAPTER_CONFIG, grow, "cannot be read (larger than 100,000,000 bytes)"),
    "a FIFO": (ADAPTER_CONFIG, become_fifo, "cannot be read (not a regular file)"),
    "no weights": (ADAPTER_WEIGHTS, Path.unlink, "cannot be read (No such file or directory)"),
    "weights are a FIFO": (ADAPTER_WEIGHTS, become_fifo, "cannot be read (not a regular file)"),
    "truncated": (ADAPTER_WEIGHTS, lambda f: os.truncate(f, 1000), "truncated or corrupt"),
    "a pickle": (
        ADAPTER_WEIGHTS,
        lambda f: f.rename(f.with_name("adapter_model.bin")),
        "in adapter_model.bin, a pickle, which is not loaded; save them as adapter_model.safetensors",
    ),
    "a tensor is missing": (ADAPTER_WEIGHTS, lambda f: change(f, {FIRST: None}), f"missing: {FIRST}"),
    "one too many": (ADAPTER_WEIGHTS, lambda f: change(f, {"x": torch.ones(1)}), "unexpected: x"),
    "another model's": (
        ADAPTER_WEIGHTS,
        lambda f: change(f, {FIRST: torch.zeros(3, 32)}),
        f"wrong shape: {FIRST} is [3, 32], not [3, 24]",
    ),
    "integers": (
        ADAPTER_WEIGHTS,
        lambda f: change(f, {FIRST: torch.zeros(3, 24, dtype=torch.int8)}),
        f"{FIRST} is I8",
    ),
}


@pytest.mark.parametrize(("name", "damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_adapter_is_one_message(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    folder = write_adapter(tmp_path / "adapter")
    damage(folder / name)
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        check_adapter(folder, LAYOUT)
    assert message in str(error.value)
    assert str(folder) in str(error.value)
    assert len(str(error.value)) < 1000
    assert time.monotonic() - began < 5


def test_a_missing_folder_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.adapter: .*give a folder that PEFT has saved"):
        check_adapter(tmp_path / "nowhere", LAYOUT)


def test_the_adapter_is_checked_before_the_start() -> None:
    names = [check.name for check in checks.CHECKS]
    assert names.index("model") < names.index("adapter to start from")
