"""Writes tiny random-weight models with SmolLM2's vocabulary, one per kind of memory.

A random model answers nonsense, but its KV cache is laid out, saved, restored and re-used like a
large model's of the same architecture, at a thousandth of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

from proxy.engine import bundled_model

Kind = Literal["llama", "gemma3", "lfm2"]
WIDTH, FEED_FORWARD, HEADS = 64, 128, 2
SLIDING_WINDOW = 64
TOOLS_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name' }}
{{- ' and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function else call %}
{{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@functools.cache
def _vocabulary() -> dict[str, Any]:
    reader = gguf.GGUFReader(bundled_model())
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }


def _write_vocabulary(writer: gguf.GGUFWriter, chat_template: str | None) -> int:
    known = _vocabulary()
    writer.add_tokenizer_model(known["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(known["tokenizer.ggml.pre"])
    writer.add_token_list(known["tokenizer.ggml.tokens"])
    writer.add_token_types(known["tokenizer.ggml.token_type"])
    writer.add_token_merges(known["tokenizer.ggml.merges"])
    writer.add_bos_token_id(known["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(known["tokenizer.ggml.eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template or known["tokenizer.chat_template"])
    return len(known["tokenizer.ggml.tokens"])


class _Weights:
    """Adds tensors: rows first, as numpy shows them; llama.cpp counts the other way round."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._random = np.random.default_rng(seed)

    def ones(self, *names: str, size: int = WIDTH) -> None:
        for name in names:
            self._writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    def normal(self, name: str, rows: int, columns: int, spread: float) -> None:
        values = self._random.normal(0, spread, (rows, columns)).astype(np.float32)
        self._writer.add_tensor(f"{name}.weight", values)

    def feed_forward(self, block: str) -> None:
        self.normal(f"{block}.ffn_gate", FEED_FORWARD, WIDTH, 0.2)
        self.normal(f"{block}.ffn_up", FEED_FORWARD, WIDTH, 0.2)
        self.normal(f"{block}.ffn_down", WIDTH, FEED_FORWARD, 0.2)

    def attention(self, block: str, head: int) -> None:
        """``HEADS`` query heads of width ``head`` over one key and value head."""
        self.normal(f"{block}.attn_q", HEADS * head, WIDTH, 0.3)
        self.normal(f"{block}.attn_k", head, WIDTH, 0.3)
        self.normal(f"{block}.attn_v", head, WIDTH, 0.3)
        self.normal(f"{block}.attn_output", WIDTH, HEADS * head, 0.3)


def _llama(writer: gguf.GGUFWriter, weights: _Weights, vocabulary: int) -> None:
    head, layers = WIDTH // HEADS, 4
    writer.add_block_count(layers)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head)
    weights.normal("token_embd", vocabulary, WIDTH, 0.5)
    weights.ones("output_norm")
    for layer in range(layers):
        block = f"blk.{layer}"
        weights.ones(f"{block}.attn_norm", f"{block}.ffn_norm")
        weights.attention(block, head)
        weights.feed_forward(block)


def _gemma3(writer: gguf.GGUFWriter, weights: _Weights, vocabulary: int) -> None:
    # six layers, because Gemma 3 makes every sixth one a full-attention layer
    head, layers = 32, 6
    writer.add_block_count(layers)
    writer.add_head_count_kv(1)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(SLIDING_WINDOW)
    weights.normal("token_embd", vocabulary, WIDTH, 0.5)
    weights.ones("output_norm")
    for layer in range(layers):
        block = f"blk.{layer}"
        weights.ones(f"{block}.attn_norm", f"{block}.post_attention_norm")
        weights.ones(f"{block}.ffn_norm", f"{block}.post_ffw_norm")
        weights.ones(f"{block}.attn_q_norm", f"{block}.attn_k_norm", size=head)
        weights.attention(block, head)
        weights.feed_forward(block)


def _lfm2(writer: gguf.GGUFWriter, weights: _Weights, vocabulary: int) -> None:
    head, convolution, key_heads = WIDTH // HEADS, 3, [0, 1, 0, 1]
    writer.add_block_count(len(key_heads))
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_uint32("lfm2.shortconv.l_cache", convolution)
    weights.normal("token_embd", vocabulary, WIDTH, 0.5)
    weights.ones("token_embd_norm")
    for layer, attends in enumerate(key_heads):
        block = f"blk.{layer}"
        weights.ones(f"{block}.attn_norm", f"{block}.ffn_norm")
        weights.feed_forward(block)
        if attends:
            weights.ones(f"{block}.attn_q_norm", f"{block}.attn_k_norm", size=head)
            weights.attention(block, head)
        else:
            weights.normal(f"{block}.shortconv.conv", WIDTH, convolution, 0.5)
            weights.normal(f"{block}.shortconv.in_proj", 3 * WIDTH, WIDTH, 0.2)
            weights.normal(f"{block}.shortconv.out_proj", WIDTH, WIDTH, 0.2)


_KINDS: dict[Kind, Callable[[gguf.GGUFWriter, _Weights, int], None]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "lfm2": _lfm2,
}


def build(
    path: Path,
    kind: Kind,
    seed: int = 1,
    context_length: int = 8192,
    chat_template: str | None = None,
) -> Path:
    """Write a model to ``path``: ``llama`` full attention, ``gemma3`` sliding window of 64 tokens,
    ``lfm2`` hybrid. Another ``seed`` is another set of weights of the same shape (a "fine-tune").
    """
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(context_length)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_rope_freq_base(10000.0)
    vocabulary = _write_vocabulary(writer, chat_template)
    writer.add_vocab_size(vocabulary)
    _KINDS[kind](writer, _Weights(writer, seed), vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
