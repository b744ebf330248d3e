"""A GGUF file becomes the Hugging Face folder that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inferq.protocol.errors import ModelError
from inferq.protocol.messages import ChatMessage
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.model.gguf_import.gguf_import import convert_gguf

Q = gguf.GGMLQuantizationType
PROMPT = [5, 17, 33, 60, 61, 2, 98]


@pytest.fixture
def convert(tmp_path):
    """Convert a GGUF file and return the folder."""

    def convert(path: Path) -> Path:
        folder = tmp_path / f"{path.stem}-folder"
        folder.mkdir()
        convert_gguf(path, folder, progress=False)
        return folder

    return convert


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


def test_weights_and_logits_are_those_of_the_original(write_gguf, convert):
    tiny = write_gguf()
    folder = convert(tiny.path)
    imported = load_file(folder / "model.safetensors")
    assert sorted(imported) == sorted(tiny.weights)
    for name, values in tiny.weights.items():
        np.testing.assert_array_equal(imported[name], values, err_msg=name)
    original = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tiny.weights["model.embed_tokens.weight"]),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    state = {name: torch.from_numpy(values) for name, values in tiny.weights.items()}
    assert original.load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]
    original.tie_weights()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(_logits(loaded), _logits(original.eval()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(Q.F16, 1e-3), (Q.BF16, 4e-3), (Q.Q8_0, 0.01), (Q.Q4_1, 0.1)]
)
def test_every_stored_type_is_dequantized_to_float32(write_gguf, convert, kind, tolerance):
    tiny = write_gguf(kind=kind)
    imported = load_file(convert(tiny.path) / "model.safetensors")
    for name, values in tiny.weights.items():
        assert imported[name].dtype == np.float32
        np.testing.assert_allclose(imported[name], values, atol=tolerance, err_msg=name)


def test_an_untied_head_is_imported(write_gguf, convert):
    head = np.random.default_rng(1).normal(size=(102, 32)).astype("f4")
    folder = convert(write_gguf(tensors={"output.weight": head}).path)
    np.testing.assert_array_equal(load_file(folder / "model.safetensors")["lm_head.weight"], head)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_configuration_says_what_the_metadata_says(write_gguf, convert):
    folder = convert(write_gguf().path)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vocab_size": 102,
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 99, "eos_token_id": [100]}


def test_the_end_of_a_turn_is_an_end_token_too(write_gguf, convert):
    override = {"eot": lambda w: w.add_uint32("tokenizer.ggml.eot_token_id", 101)}
    folder = convert(write_gguf(override=override).path)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [100, 101]


def test_the_tokenizer_merges_and_keeps_special_tokens(write_gguf, convert):
    tokenizer = Tokenizer.load(convert(write_gguf().path))
    tokens = [tokenizer.decode_token(i) for i in tokenizer.encode("abc a</s>b")]
    assert tokens == ["abc", " a", "</s>", "b"]
    assert tokenizer.decode(tokenizer.encode("<s>abc</s>")) == "abc"
    assert tokenizer.chat_text([ChatMessage("user", "hi")]) == "hi"


def test_a_tokenizer_that_adds_bos_does_so_after_the_import(write_gguf, convert):
    override = {"bos": lambda w: w.add_bool("tokenizer.ggml.add_bos_token", True)}
    tokenizer = Tokenizer.load(convert(write_gguf(override=override).path))
    assert tokenizer.encode("ab") == [tokenizer.bos_token_id, tokenizer._fast.token_to_id("ab")]


def test_linear_rope_scaling_is_kept(write_gguf, convert):
    override = {
        "type": lambda w: w.add_string("llama.rope.scaling.type", "linear"),
        "factor": lambda w: w.add_float32("llama.rope.scaling.factor", 4.0),
    }
    config = json.loads((convert(write_gguf(override=override).path) / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_llama3_rope_factors_are_recognised(write_gguf, convert):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=rope | {"rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 500000.0 ** -(np.arange(0, 8, 2) / 8)
    tiny = write_gguf(
        override={"llama.rope.freq_base": lambda w: w.add_rope_freq_base(500000.0)},
        tensors={"rope_freqs.weight": (plain / scaled.numpy()).astype("f4")},
    )
    scaling = json.loads((convert(tiny.path) / "config.json").read_text())["rope_scaling"]
    assert scaling.pop("factor") == pytest.approx(rope.pop("factor"))
    assert scaling == rope


def _without(key):
    return {key: None}


REFUSED = {
    "another architecture": ({"architecture": "qwen2"}, "'qwen2' is not supported"),
    "experts": ({"override": {"e": lambda w: w.add_expert_count(8)}}, "experts"),
    "no head count": ({"override": _without("llama.attention.head_count")}, "head_count"),
    "a head count that is no number": (
        {
            "override": {
                "llama.attention.head_count": lambda w: w.add_string(
                    "llama.attention.head_count", "4"
                )
            }
        },
        "no int",
    ),
    "heads that cannot be shared": (
        {
            "override": {
                "llama.attention.head_count_kv": lambda w: w.add_uint32(
                    "llama.attention.head_count_kv", 3
                )
            }
        },
        "4 heads cannot share 3",
    ),
    "partial rotation": (
        {
            "override": {
                "llama.rope.dimension_count": lambda w: w.add_uint32(
                    "llama.rope.dimension_count", 4
                )
            }
        },
        "4 of 8",
    ),
    "yarn": (
        {
            "override": {
                "t": lambda w: w.add_string("llama.rope.scaling.type", "yarn"),
                "f": lambda w: w.add_float32("llama.rope.scaling.factor", 4.0),
            }
        },
        "yarn",
    ),
    "unknown rope factors": (
        {"tensors": {"rope_freqs.weight": np.array([1, 2, 3, 9], dtype="f4")}},
        "rope_freqs",
    ),
    "a missing tensor": ({"tensors": {"blk.1.ffn_up.weight": None}}, r"blk\.1\.ffn_up"),
    "no embedding": ({"tensors": {"token_embd.weight": None}}, "token_embd"),
    "an unknown tensor": (
        {"tensors": {"blk.0.attn_q.bias": np.zeros(32, dtype="f4")}},
        r"attn_q\.bias has no place",
    ),
    "a wrong shape": (
        {"tensors": {"blk.0.ffn_up.weight": np.zeros((8, 32), dtype="f4")}},
        r"\(8, 32\).*\(64, 32\)",
    ),
    "too small an embedding": (
        {"tensors": {"token_embd.weight": np.zeros((50, 32), dtype="f4")}},
        "102 tokens do not fit",
    ),
    "an unknown pre-tokenizer": (
        {"override": {"tokenizer.ggml.pre": lambda w: w.add_tokenizer_pre("nonsense")}},
        "'nonsense'",
    ),
    "an unknown tokenizer": (
        {"override": {"tokenizer.ggml.model": lambda w: w.add_tokenizer_model("bert")}},
        "'bert'",
    ),
    "a merge of unknown tokens": (
        {"override": {"tokenizer.ggml.merges": lambda w: w.add_token_merges(["zz yy"])}},
        "damaged",
    ),
    "an end token outside the vocabulary": (
        {
            "override": {
                "tokenizer.ggml.eos_token_id": lambda w: w.add_uint32(
                    "tokenizer.ggml.eos_token_id", 500
                )
            }
        },
        "500",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_imported_wrongly_is_refused(write_gguf, convert, what):
    changes, message = REFUSED[what]
    with pytest.raises(ModelError, match=message):
        convert(write_gguf(**changes).path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path, convert):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(path)


@pytest.mark.parametrize("kept", [0, 3, 4, 10, 30, 200, 2_000, 6_000, -1])
def test_a_truncated_file_is_refused(write_gguf, convert, kept):
    path = write_gguf().path
    content = path.read_bytes()
    assert len(content) > 10_000
    path.write_bytes(content[:kept])
    with pytest.raises(ModelError):
        convert(path)
