"""The sizes of a model that transformers computes, as its own configuration class tells them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.config import dtype_of, eos_token_ids, read_json
from inferq.worker.model.architecture.fields import Fields

#: Rotary embeddings whose frequencies transformers takes from the longest text of a batch.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """What the runner needs to know of a model before it is loaded; a `ModelShape`."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    longest_positions: int
    dtype: str | None
    eos_token_ids: frozenset[int]
    #: Whether each layer's tokens see a part of those before them only.
    has_window: tuple[bool, ...]

    @classmethod
    def read(cls, folder: Path) -> FallbackConfig:
        """Read `folder`'s config.json through transformers, running none of the model's own code.

        Raises `ModelError` for what transformers does not know, or what the engine cannot do.
        """
        whole = Fields(read_json(folder / "config.json"), "config.json")
        names = whole.strings("architectures") or ("",)
        config = _transformers_config(folder, names[0])
        heads = _integer(config, "num_attention_heads")
        layers = _integer(config, "num_hidden_layers")
        context = _integer(config, "max_position_embeddings")
        longest = _length_bound(config, context)
        head_dim = getattr(config, "head_dim", None) or _integer(config, "hidden_size") // heads
        return cls(
            architecture=names[0],
            vocab_size=_integer(config, "vocab_size"),
            num_layers=layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            max_position_embeddings=longest,
            longest_positions=longest,
            dtype=dtype_of(whole),
            eos_token_ids=eos_token_ids(whole, whole, folder),
            has_window=_windowed_layers(config, layers),
        )


def _transformers_config(folder: Path, architecture: str) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # Whatever transformers raises about a configuration, at the edge it is one error.
        raise ModelError(
            f"{architecture or 'config.json'}: neither inferq nor transformers can read it: {error}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{architecture} has an encoder; only decoders are served")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{architecture}: quantized checkpoints need a native family")
    return config.get_text_config(decoder=True)


def _integer(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name}: must be a positive whole number, not {value!r}")
    return value


def _length_bound(config: Any, context: int) -> int:
    """Return the positions up to which a token's rotation does not depend on the batch."""
    parameters = getattr(config, "rope_parameters", None) or {}
    bound = context
    if isinstance(parameters, dict) and parameters.get("rope_type") in _LENGTH_DEPENDENT:
        bound = parameters.get("original_max_position_embeddings") or context
    return min(context, bound)


def _windowed_layers(config: Any, layers: int) -> tuple[bool, ...]:
    types = getattr(config, "layer_types", None)
    if types:
        return tuple("full" not in kind for kind in types)
    window = getattr(config, "sliding_window", None)
    return (window is not None and getattr(config, "use_sliding_window", True),) * layers
