"""Typed reading of a JSON settings file: a value of the wrong kind is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from inferq.protocol.errors import ModelError


class Fields:
    """The entries of one JSON object of file `source`; every reader raises `ModelError`."""

    def __init__(
        self, raw: Mapping[str, Any], source: str, names: Mapping[str, str] | None = None
    ) -> None:
        self.raw = raw
        self._source = source
        self._names = names or {}

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return the same entries, with `defaults` for those that are absent."""
        return Fields({**defaults, **self.raw}, self._source, self._names)

    def with_names(self, names: Mapping[str, str]) -> Fields:
        """Return the same entries; what readers call by a key of `names` is stored by its value."""
        return Fields(self.raw, self._source, names)

    def inner(self, name: str) -> Fields:
        """Return the entries of the object `name`."""
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {value!r}")
        return Fields(value, f"{self._source}: {name}")

    def error(self, name: str, message: str) -> ModelError:
        """Return an error about the entry `name`."""
        return ModelError(f"{self._source}: {self._names.get(name, name)}: {message}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry as it stands; null counts as absent."""
        value = self.raw.get(self._names.get(name, name))
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number; null counts as absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"must be a positive whole number, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive finite number; null counts as absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"must be a number, not {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.error(name, f"must be a positive finite number, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a positive finite number, or None where it is null or absent."""
        return None if self.get(name) is None else self.number(name)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of positive finite numbers."""
        values = self._value(name, None)
        if not isinstance(values, list) or not all(
            isinstance(v, (int, float)) and math.isfinite(v) and v > 0 for v in values
        ):
            raise self.error(name, f"must be a list of positive finite numbers, not {values!r}")
        return tuple(float(v) for v in values)

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; null counts as empty."""
        values = self._value(name, [])
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise self.error(name, f"must be a list of strings, not {values!r}")
        return tuple(values)

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false; null counts as absent."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        """Return the ids of an entry that is an id, a list of ids, or absent."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(name, f"must be a token id or a list of them, not {value!r}")
        return frozenset(ids)

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.error(name, "is missing")
        return value
