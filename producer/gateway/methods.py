"""The methods of HTTP that metrics and traces tell by name: what else is sent stays few there."""

from __future__ import annotations

from typing import Final

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
