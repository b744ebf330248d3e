"""Rotary position embeddings: settings, frequencies, and the table of angles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from inferq.worker.model.fields import Fields

ROPE_TYPES: Final = ("default", "linear", "llama3")
_DEFAULT_THETA: Final = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How fast each pair of a head's dimensions turns with the position."""

    theta: float = _DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    #: Of llama3: wavelengths longer than original / low are stretched by `factor`, those shorter
    #: than original / high are kept, those between are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    @classmethod
    def from_fields(cls, config: Fields, max_position_embeddings: int) -> RopeConfig:
        """Read transformers 5's `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
        raw: dict[str, Any] = {"rope_theta": config.raw.get("rope_theta")}
        name = "rope_parameters" if config.raw.get("rope_parameters") else "rope_scaling"
        scaling = config.raw.get(name) or {}
        if not isinstance(scaling, dict):
            raise config.error(name, f"must be an object, not {scaling!r}")
        fields = Fields({**raw, **scaling}, f"config.json: {name}")
        kind = fields.raw.get("rope_type") or fields.raw.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise fields.error(
                "rope_type", f"{kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        for owner in (config, fields):
            if owner.raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
                raise owner.error("partial_rotary_factor", "only 1.0 is supported")
        theta = fields.number("rope_theta", _DEFAULT_THETA)
        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, kind, fields.number("factor"))
        return cls(
            theta,
            kind,
            fields.number("factor"),
            fields.number("low_freq_factor"),
            fields.number("high_freq_factor"),
            fields.integer("original_max_position_embeddings", max_position_embeddings),
        )

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return the angle per position of each pair, float32 [head_dim / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies: Tensor = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._llama3(frequencies)
        return frequencies

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Stretch long wavelengths, keep short ones, blend between (Llama 3.1's formula)."""
        wavelengths = 2 * math.pi / frequencies
        kept_share = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        kept_share = kept_share.clamp(0.0, 1.0)
        return frequencies * kept_share + frequencies / self.factor * (1 - kept_share)


class RotaryTable:
    """Cosines and sines of all positions below a length, computed once in float32."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, rope.inverse_frequencies(head_dim))
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, head_dim / 2] of positions [T]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
