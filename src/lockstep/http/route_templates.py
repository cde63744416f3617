"""Mapping of paths to the templates of their routes, such as /sessions/{id}."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.routing import BaseRoute, Mount, Route, compile_path

UNKNOWN = "unknown"


class RouteTemplates:
    """The templates of some routes and of the routes mounted below them. Their number is fixed, so
    that they can be metric labels whatever paths clients send.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._plain: set[str] = set()
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        self._add(routes, "")

    def of(self, path: str) -> str:
        """Return the template of the route of this path, or "unknown"."""
        if path in self._plain:
            return path
        for pattern, template in self._patterns:
            if pattern.match(path):
                return template
        return UNKNOWN

    def _add(self, routes: Iterable[BaseRoute], prefix: str) -> None:
        for route in routes:
            if isinstance(route, Mount):
                self._add(route.routes, prefix + route.path)
            elif isinstance(route, Route):
                pattern, template, variables = compile_path(prefix + route.path)
                if variables:
                    self._patterns.append((pattern, template))
                else:
                    self._plain.add(template)
