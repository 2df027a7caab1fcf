# ruff: noqa: E501  templates
"""Twelve chat templates of our own, in the styles of families in use, and three kinds of tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, processors

from tests.support.chat_models import trained_tokenizer

BOS, EOS = "<|begin_of_text|>", "<|endoftext|>"
MARKS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
MARKS += (
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|observation|>",
)
MARKS += ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
MARKS += ("<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|turn|>", "<|end_of_turn|>")
KINDS = ("plain", "truncating and padding", "adding BOS and EOS")


class Style(NamedTuple):
    """A template, and what it is to do."""

    source: str
    end: str
    """Text of the token that ends a turn of the assistant; empty if it writes none."""
    eos: str
    """The tokenizer's end-of-sequence token."""
    thinks: bool = False
    """Whether it writes ``reasoning_content``."""
    calls: int = 0
    """Calls of tools that it writes in a turn; 0: no tools."""
    beside: bool = False
    """Whether it writes a content beside calls."""
    system: bool = True
    """Whether it writes a message of the system."""


_CALLS = r"""{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n{"name": ' + (call.function.name | tojson) +
', "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}"""
_CHATML = r"""{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"""
_CHATML_END = r"""{{ '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
_TOOLS = r"""{%- if tools %}{{ '<|im_start|>system\n# Tools' }}{%- for tool in tools %}{{ '\n' + (tool | tojson) }}
{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}"""

STYLES = {
    "chatml": Style(_CHATML + _CHATML_END, "<|im_end|>", EOS),
    "chatml with tools": Style(
        _TOOLS + _CHATML + _CALLS + _CHATML_END, "<|im_end|>", EOS, calls=3, beside=True
    ),
    "thinking": Style(
        r"""{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"""
        + _TOOLS
        + r"""{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}{%- endif %}
{{- m.content if m.content is string else '' }}"""
        + _CALLS
        + _CHATML_END,
        "<|im_end|>",
        "<|im_end|>",
        thinks=True,
        calls=3,
        beside=True,
    ),
    "header": Style(
        r"""{{- bos_token }}{%- for tool in tools or [] %}{{ (tool | tojson) + '\n\n' }}{%- endfor %}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '}' }}
{%- else %}{{ m['content'] | trim }}{%- endif %}{{ '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
        "<|eot_id|>",
        EOS,
        calls=1,
    ),
    "inst": Style(
        r"""{%- if messages[0]['role'] == 'system' %}{%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
{%- set turns = messages[1:] %}{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}
{%- for m in turns %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{%- if m['role'] == 'user' %}{{ '<s>[INST] ' + (system if loop.first else '') + m['content'] | trim + ' [/INST]' }}
{%- else %}{{ ' ' + m['content'] | trim + ' </s>' }}{%- endif %}{%- endfor %}""",
        "</s>",
        "</s>",
    ),
    "inst with tools": Style(
        r"""{{- '<s>' }}{%- if tools %}{{ '[INST]' + (tools | tojson) + '[/INST]' }}{%- endif %}{%- for m in messages %}
{%- if m.role == 'system' %}{{ '[INST]' + m.content + '\n\n[/INST]' }}
{%- elif m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + ({'content': m.content, 'id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls is defined %}{{ '[TOOL_CALLS]' }}
{{- '[' }}{%- for c in m.tool_calls %}{{ (c.function | tojson) + ('' if loop.last else ', ') }}{%- endfor %}{{ ']</s>' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{%- endif %}{%- endfor %}""",
        "</s>",
        "</s>",
        calls=3,
    ),
    "turns": Style(
        r"""{{- bos_token }}{%- if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{%- endif %}
{%- for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- m['content'] | trim + '<end_of_turn>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}""",
        "<end_of_turn>",
        EOS,
        system=False,
    ),
    "end and eos": Style(
        r"""{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}""",
        "<|end|>",
        EOS,
    ),
    "sentences": Style(
        r"""{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' }}
{%- if '</think>' in (m.content or '') %}{{ m.content.split('</think>')[-1] }}{%- else %}{{ m.content or '' }}{%- endif %}
{{- '<|end_of_sentence|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{%- endif %}""",
        "<|end_of_sentence|>",
        EOS,
    ),
    "a mark for each role": Style(
        r"""{%- for m in messages %}{%- if loop.first and m.role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You help.<|im_end|>' }}{%- endif %}
{{- '<|im_' + ('system' if m.role == 'tool' else m.role) + '|>' + m.role + '<|im_middle|>' + (m.content or '') + '<|im_end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}""",
        "<|im_end|>",
        EOS,
    ),
    "zephyr": Style(
        r"""{%- for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}""",
        "</s>",
        "</s>",
    ),
    "no end": Style(
        r"""{{- '[gMASK]' }}{%- for m in messages %}
{{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + (m.content or '') }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}""",
        "",
        EOS,
    ),
    "colons": Style(
        r"""{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content + ' ' }}
{%- elif m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}
{%- else %}{{ 'ASSISTANT: {} {}'.format(m.content, '</s>') }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{%- endif %}""",
        "</s>",
        "</s>",
    ),
}
"""Some drop thoughts, write null as text, refuse roles, or leave out what they do not know, as people's do."""


def write_model(folder: Path, style: Style, kind: str) -> None:
    """Tokenizer files. kind: one of ``KINDS``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(trained_tokenizer())
    tokenizer.add_special_tokens(list(MARKS))
    if kind == KINDS[1]:
        tokenizer.enable_truncation(16)
        tokenizer.enable_padding(length=64, pad_id=tokenizer.token_to_id(EOS), pad_token=EOS)
    if kind == KINDS[2]:
        ids = [(mark, tokenizer.token_to_id(mark)) for mark in (BOS, style.eos)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A {style.eos}", special_tokens=ids
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": style.eos}
    described |= {"pad_token": EOS, "chat_template": style.source}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
