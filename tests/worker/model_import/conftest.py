"""Tiny GGUF files of a Llama model, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 2, 4, 2, 8
CONTEXT = 128
BYTE_TOKENS = [*map(chr, range(0x21, 0x7F)), "Ġ", "Ċ"]
TOKENS = [*BYTE_TOKENS, "ab", "abc", "Ġa", "<s>", "</s>", "<|turn|>"]
MERGES = ["a b", "ab c", "Ġ a"]
BOS, EOS, EOT = (TOKENS.index(token) for token in ("<s>", "</s>", "<|turn|>"))
CONTROL = int(gguf.TokenType.CONTROL)
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

#: Hugging Face's names and shapes, and GGUF's names.
LAYER = {
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HEADS * HEAD_DIM)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
    "mlp.gate_proj": ("ffn_gate", (INNER, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (INNER, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, INNER)),
}


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """A GGUF file, and the weights that it was made from by Hugging Face's names."""

    path: Path
    weights: dict[str, np.ndarray]


def _weights() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    random = np.random.default_rng(7)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    names = {"model.embed_tokens.weight": "token_embd.weight"}
    names["model.norm.weight"] = "output_norm.weight"
    for layer in range(LAYERS):
        for module, (source, shape) in LAYER.items():
            shapes[f"model.layers.{layer}.{module}.weight"] = shape
            names[f"model.layers.{layer}.{module}.weight"] = f"blk.{layer}.{source}.weight"
    weights = {name: random.normal(0, 0.2, shape).astype("f4") for name, shape in shapes.items()}
    return weights, names


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rows: those of a rotated pair (i, i + dim / 2) side by side."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _metadata(writer: gguf.GGUFWriter) -> dict[str, Callable[[], None]]:
    llama = {
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
    }
    types = [CONTROL if i >= BOS else 1 for i in range(len(TOKENS))]
    entries: dict[str, Callable[[], None]] = {
        key: (lambda key=key, value=value: writer.add_uint32(key, value))
        for key, value in llama.items()
    }
    entries |= {
        "llama.rope.freq_base": lambda: writer.add_float32("llama.rope.freq_base", 10000.0),
        "llama.attention.layer_norm_rms_epsilon": lambda: writer.add_layer_norm_rms_eps(1e-5),
        "tokenizer.ggml.model": lambda: writer.add_tokenizer_model("gpt2"),
        "tokenizer.ggml.pre": lambda: writer.add_tokenizer_pre("gpt-2"),
        "tokenizer.ggml.tokens": lambda: writer.add_token_list(TOKENS),
        "tokenizer.ggml.token_type": lambda: writer.add_token_types(types),
        "tokenizer.ggml.merges": lambda: writer.add_token_merges(MERGES),
        "tokenizer.chat_template": lambda: writer.add_chat_template(CHAT_TEMPLATE),
    }
    return entries


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., TinyLlama]:
    """Write a tiny Llama as GGUF, with changes.

    `override` replaces or adds metadata (a function of the writer; None leaves the key out),
    `tensors` replaces or adds tensors by GGUF's names (None leaves one out), `kind` is the type
    that the matrices are stored in.
    """

    def write(
        name: str = "tiny.gguf",
        *,
        architecture: str = "llama",
        override: dict[str, Callable[[gguf.GGUFWriter], Any] | None] | None = None,
        tensors: dict[str, np.ndarray | None] | None = None,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    ) -> TinyLlama:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        changes = override or {}
        for key, add in _metadata(writer).items():
            if key not in changes:
                add()
        for change in changes.values():
            if change is not None:
                change(writer)
        weights, names = _weights()
        stored = {}
        for hf_name, values in weights.items():
            if "q_proj" in hf_name or "k_proj" in hf_name:
                values = _interleaved(values, HEADS if "q_proj" in hf_name else KV_HEADS)
            stored[names[hf_name]] = values
        for tensor_name, values in (stored | (tensors or {})).items():
            if values is None:
                continue
            if values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
                writer.add_tensor(tensor_name, values)
            else:
                writer.add_tensor(tensor_name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return TinyLlama(path, weights)

    return write
