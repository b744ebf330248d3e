"""What a model's makers recommend for requests that do not say: generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.protocol.params import MODEL_DEFAULTS, SamplingParams

_FILE: Final = "generation_config.json"
#: What also holds for a beam search, which does not sample.
_OF_BEAMS: Final = ("repetition_penalty",)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for the sampling parameters `MODEL_DEFAULTS` of requests that leave them out."""

    values: Mapping[str, float | int] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> SamplingDefaults:
        """Read a model folder's file; none without it. Raises `ModelError` for a bad value."""
        path = folder / _FILE
        if not path.is_file():
            return cls()
        try:
            content: Any = json.loads(path.read_bytes())
            values: dict[str, Any] = {
                name: content[name] for name in MODEL_DEFAULTS if content.get(name) is not None
            }
        except (ValueError, AttributeError):
            raise ModelError(f"{path} does not hold a JSON object") from None
        try:
            SamplingParams(**values)
        except InvalidRequestError as error:
            raise ModelError(f"{path}: {error}; generation_config=none ignores the file") from None
        return cls(values)

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with these values in the place of what was not given."""
        names = MODEL_DEFAULTS if params.beam_width is None else _OF_BEAMS
        missing: dict[str, Any] = {
            name: self.values[name]
            for name in names
            if name in self.values and not params.is_given(name)
        }
        return replace(params, **missing) if missing else params
