"""Rotary position embeddings: settings, frequencies, and the table of angles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from inferq.worker.model.architecture.fields import Fields

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA: Final = 10000.0
#: Names of old configurations.
_ALIASES: Final = {"su": "longrope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How fast each pair of a head's dimensions turns with the position."""

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    #: Share of a head's dimensions that turn, from the first on.
    rotary_share: float = 1.0
    #: Length that the model was trained with, before it was stretched.
    original_max_positions: int = 2048
    #: Of llama3: wavelengths longer than original / low are stretched by `factor`, those shorter
    #: than original / high are kept, those between are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Of yarn: pairs that turn more than `beta_fast` times within the original length are kept,
    #: those below `beta_slow` are stretched, those between are blended.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    #: Of yarn and longrope: what cosines and sines are multiplied with.
    attention_factor: float = 1.0
    #: Of longrope: each pair's own divisor, for texts within the original length and beyond it.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @classmethod
    def from_fields(
        cls,
        config: Fields,
        max_positions: int,
        *,
        layer_type: str | None = None,
        default_theta: float = DEFAULT_THETA,
    ) -> RopeConfig:
        """Read transformers 5's `rope_parameters`, or `rope_theta` beside `rope_scaling`.

        `rope_parameters` may hold an object per type of layer, of which `layer_type`'s is read.
        """
        fields = _scaling(config, layer_type)
        kind = fields.raw.get("rope_type") or fields.raw.get("type") or "default"
        kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        if kind == "yarn" and "long_factor" in fields.raw:
            kind = "longrope"  # what Phi-3 called it first
        if kind not in ROPE_TYPES:
            raise fields.error(
                "rope_type", f"{kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        share = fields.number("partial_rotary_factor", 1.0)
        if share > 1:
            raise fields.error("partial_rotary_factor", f"{share} is more than the whole head")
        settings: dict[str, Any] = {
            "theta": fields.number("rope_theta", default_theta),
            "kind": kind,
            "rotary_share": share,
            "original_max_positions": max_positions,
        }
        if kind in ("linear", "dynamic", "llama3"):
            settings["factor"] = fields.number("factor")
        if kind in ("llama3", "yarn", "longrope"):
            settings["original_max_positions"] = _original_length(config, fields, max_positions)
        if kind == "llama3":
            settings["low_freq_factor"] = fields.number("low_freq_factor")
            settings["high_freq_factor"] = fields.number("high_freq_factor")
        elif kind == "yarn":
            settings |= _yarn_settings(fields, max_positions / settings["original_max_positions"])
        elif kind == "longrope":
            settings |= _longrope_settings(
                fields, settings["original_max_positions"], max_positions
            )
        return cls(**settings)

    def check(self, config: Fields, head_dim: int) -> None:
        """Raise `ModelError` where the settings do not fit heads of this size."""
        dim = self.rotary_dim(head_dim)
        if dim < 2 or dim % 2:
            raise config.error(
                "partial_rotary_factor", f"{dim} of {head_dim} dimensions turn: not whole pairs"
            )
        if self.kind == "longrope":
            for name in ("short_factors", "long_factors"):
                if (count := len(getattr(self, name))) != dim // 2:
                    raise config.error(
                        name.removesuffix("s"), f"has {count} numbers for {dim // 2} pairs"
                    )

    @property
    def longest(self) -> int:
        """Positions to which the original length is stretched; 0 where the model's own number says.

        llama3 and longrope come with max_position_embeddings that count it already.
        """
        stretches = self.kind in ("linear", "dynamic", "yarn")
        return int(self.original_max_positions * self.factor) if stretches else 0

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many of a head's dimensions turn."""
        return int(head_dim * self.rotary_share)

    def inverse_frequencies(self, head_dim: int, max_positions: int) -> Tensor:
        """Return the angle per position of each pair, float32 [rotary_dim / 2].

        dynamic and longrope depend on the length of the text. We take the longest that is served,
        `max_positions`: keys in the cache keep their angles whatever is appended later, and a
        prefix has the same keys in every request.
        """
        dim = self.rotary_dim(head_dim)
        theta = self.theta
        if self.kind == "dynamic" and max_positions > self.original_max_positions:
            stretch = self.factor * max_positions / self.original_max_positions - self.factor + 1
            theta *= stretch ** (dim / (dim - 2))
        frequencies: Tensor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._llama3(frequencies)
        if self.kind == "yarn":
            return self._yarn(frequencies, dim)
        if self.kind == "longrope":
            is_long = max_positions > self.original_max_positions
            return frequencies / torch.tensor(self.long_factors if is_long else self.short_factors)
        return frequencies

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Stretch long wavelengths, keep short ones, blend between (Llama 3.1's formula)."""
        wavelengths = 2 * math.pi / frequencies
        kept_share = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return self._blend(frequencies, kept_share)

    def _yarn(self, frequencies: Tensor, dim: int) -> Tensor:
        """Keep the fast pairs, stretch the slow ones, blend between (arXiv 2309.00071, 3.2)."""
        first, last = (self._pair_turning(turns, dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float32)
        # The paper's ramp is not defined over no pairs: a thousandth of one makes it a step.
        stretched_share = (pairs - first) / ((last - first) or 0.001)
        return self._blend(frequencies, 1 - stretched_share)

    def _pair_turning(self, turns: float, dim: int) -> float:
        """Return the index of the pair that turns so many times within the original length."""
        share = math.log(self.original_max_positions / (turns * 2 * math.pi))
        return dim * share / (2 * math.log(self.theta))

    def _blend(self, frequencies: Tensor, kept_share: Tensor) -> Tensor:
        kept_share = kept_share.clamp(0.0, 1.0)
        return frequencies * kept_share + frequencies / self.factor * (1 - kept_share)


def _scaling(config: Fields, layer_type: str | None) -> Fields:
    """Return the entries about rotary embeddings, the configuration's own ones as defaults."""
    name = "rope_parameters" if config.raw.get("rope_parameters") else "rope_scaling"
    entries = config.raw.get(name) or {}
    source = f"config.json: {name}"
    if isinstance(entries, dict) and layer_type is not None and layer_type in entries:
        entries, source = entries[layer_type] or {}, f"{source}.{layer_type}"
    if not isinstance(entries, dict):
        raise config.error(name, f"must be an object, not {entries!r}")
    shared = ("rope_theta", "partial_rotary_factor")
    return Fields(entries, source).with_defaults({key: config.raw.get(key) for key in shared})


def _original_length(config: Fields, fields: Fields, max_positions: int) -> int:
    name = "original_max_position_embeddings"
    owner = config if config.raw.get(name) is not None else fields
    return owner.integer(name, max_positions)


def _yarn_settings(fields: Fields, length_ratio: float) -> dict[str, Any]:
    factor = fields.number("factor", length_ratio)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = scale(1.0)
    if fields.raw.get("mscale") and fields.raw.get("mscale_all_dim"):
        attention = scale(fields.number("mscale")) / scale(fields.number("mscale_all_dim"))
    return {
        "factor": factor,
        "beta_fast": fields.number("beta_fast", 32.0),
        "beta_slow": fields.number("beta_slow", 1.0),
        "truncate": fields.boolean("truncate", True),
        "attention_factor": fields.number("attention_factor", attention),
    }


def _longrope_settings(fields: Fields, original: int, max_positions: int) -> dict[str, Any]:
    factor = fields.number("factor", max_positions / original)
    # LongRoPE (arXiv 2402.13753) keeps the entropy of attention over a longer text.
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "short_factors": fields.numbers("short_factor"),
        "long_factors": fields.numbers("long_factor"),
        "attention_factor": fields.number("attention_factor", attention),
    }


class RotaryTable:
    """Cosines and sines of all positions below a length, computed once in float32."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, rope.inverse_frequencies(head_dim, max_positions))
        self._cos = (angles.cos() * rope.attention_factor).to(device)
        self._sin = (angles.sin() * rope.attention_factor).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, rotary_dim / 2] of positions [T]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
