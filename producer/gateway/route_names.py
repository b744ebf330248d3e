"""The names of routes in metrics: one for each template of a path, one for all other paths."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from fastapi import APIRouter
from fastapi.routing import APIRoute

#: Of OpenAI's routes that this gateway refuses, and of paths that are nobody's.
UNSUPPORTED: Final = "unsupported"
UNKNOWN: Final = "unknown"
STATIC: Final = "/static"


class RouteNames:
    """Finds a path's template among the routes of `routers`; all of `refused` have one name."""

    def __init__(self, routers: Iterable[APIRouter], *, refused: APIRouter) -> None:
        routes = [(route, route.path) for router in routers for route in _routes(router)]
        routes += [(route, UNSUPPORTED) for route in _routes(refused)]
        self._literal: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        for route, name in routes:
            if "{" in route.path:
                self._patterns.append((route.path_regex, name))
            else:
                self._literal[route.path] = STATIC if name.startswith(f"{STATIC}/") else name

    def find(self, path: str) -> str:
        """Return the name of the route that a path leads to."""
        if (name := self._literal.get(path)) is not None:
            return name
        found = (name for pattern, name in self._patterns if pattern.match(path))
        return next(found, UNKNOWN)


def _routes(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]
