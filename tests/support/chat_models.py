"""A tokenizer with special tokens of several families, and templates that write chats as theirs do."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>")
MARKS += ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
"""Special tokens."""
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that are part of the text, as in Qwen3."""

_TOOLS = r"""
{%- if tools %}{{ '<|im_start|>system\nFunctions:' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}"""
_CALLS = r"""
{%- for call in m.tool_calls or [] %}
{{- '' if loop.first and not content else '\n' }}{{ '<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}"""
_RESULT = r"""
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}
{%- else %}"""
_PROMPT = r"{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
_END = r"{{ '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
QWEN25 = (
    _TOOLS
    + r"{%- for m in messages %}{%- set content = m.content %}"
    + _RESULT
    + r"{{ '<|im_start|>' + m.role + '\n' + content }}"
    + _CALLS
    + _END
    + _PROMPT
)
"""ChatML, with JSON in tags as tool calls."""
_THINKING = r"""
{%- if m.role == 'assistant' and (loop.last or m.reasoning_content) and loop.index0 > ns.query %}
{{- '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}{%- endif %}"""
QWEN3 = (
    r"{%- set ns = namespace(query=0) %}{%- for m in messages %}"
    r"{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}"
    + _TOOLS
    + r"{%- for m in messages %}{%- set content = m.content.lstrip('\n') %}"
    + _RESULT
    + r"{{ '<|im_start|>' + m.role + '\n' }}"
    + _THINKING
    + r"{{- content }}"
    + _CALLS
    + _END
    + _PROMPT
)
"""The same, without the thinking of turns before the last question. The last turn has some, if only an empty
one."""
LLAMA3 = r"""{{- '<|begin_of_text|>' }}
{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\n\n' }}{%- endfor %}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}' }}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}
{%- else %}{{ m.content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
"""Contents without spaces around them; a tool call is the whole message."""
TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3}
ENDS = {"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
PARSERS = {"qwen2.5": "hermes", "qwen3": "hermes", "llama3": "llama3_json"}


@functools.cache
def trained_tokenizer() -> str:
    """A byte-level BPE with merges, so that most texts have several encodings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    words = ["the", "answer", "is", "that", "there", "are", "seven", "more", "numbers", "name", "arguments"]
    tokenizer.train_from_iterator([" ".join(words[i:] + words[:i]) for i in range(len(words))] * 4, trainer)
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return str(tokenizer.to_str())


def write_chat_tokenizer(folder: Path, family: str) -> None:
    """The tokenizer's files, with the template and the end token of a family."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(trained_tokenizer())
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ENDS[family]}
    described |= {"pad_token": "<|endoftext|>", "chat_template": TEMPLATES[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
