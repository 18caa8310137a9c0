"""What is served: every route with the scope that it needs and the body that it takes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute, Mount, Route, compile_path

from service.access.keys import Scope

BodyKind = Literal["plain", "keys", "image", "batch"]

_READ = frozenset({"GET", "HEAD"})
_CHANGE = frozenset({"PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class Rule:
    """What these methods need at the templates that `path` fits; the scope None is open to all."""

    methods: frozenset[str]
    path: str
    scope: Scope | None
    body: BodyKind = "plain"

    def fits(self, method: str, template: str) -> bool:
        """Whether this rule speaks of a route."""
        return method in self.methods and re.fullmatch(self.path, template) is not None


RULES = (
    Rule(_READ, r"/(live|ready|metrics|docs|openapi\.json|admin)?", None),
    Rule(_READ, r"/ui/", None),
    Rule(frozenset({"POST"}), r"/search", "search", "image"),
    Rule(frozenset({"POST"}), r"/search/batch", "search", "batch"),
    Rule(_READ, r"/(galleries|samples)(/.*)?", "search"),
    Rule(frozenset({"PUT"}), r"/galleries/[^/]+/items", "write", "batch"),
    Rule(_CHANGE, r"/galleries/[^/]+/items", "write", "keys"),
    Rule(frozenset({"POST"}), r"/galleries/[^/]+/items/delete", "write", "keys"),
    Rule(_CHANGE, r"/galleries/[^/]+/items/.*", "write"),
)
"""The first rule that fits counts; a route without one needs `admin` and takes a plain body."""


def rule_of(method: str, template: str) -> Rule:
    """What a route needs."""
    for rule in RULES:
        if rule.fits(method, template):
            return rule
    return Rule(frozenset({method}), template, "admin")


@dataclass(frozen=True, slots=True)
class ServedRoute:
    """One method of one route; `pattern` is the very one that the router compares paths with."""

    method: str
    template: str
    pattern: re.Pattern[str]
    rule: Rule


class RouteTable:
    """The routes of an app, found once for each request before the router looks at it."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self.served = tuple(_served(routes))

    def match(self, method: str, path: str) -> ServedRoute | None:
        """The route of a request; None if nothing is served there."""
        for route in self.served:
            if route.method == method and route.pattern.match(path):
                return route
        return None

    def at(self, path: str) -> list[ServedRoute]:
        """What is at `path` under any method.

        A word of an address may also be the value of a parameter: the routes with the fewest count.
        """
        known = [route for route in self.served if route.pattern.match(path)]
        fewest = min((route.template.count("{") for route in known), default=0)
        return [route for route in known if route.template.count("{") == fewest]


def _served(routes: Sequence[BaseRoute]) -> Iterator[ServedRoute]:
    for context in iter_route_contexts(routes):
        route = context.original_route
        if isinstance(route, Mount):  # a folder of files
            methods, template, path = sorted(_READ), f"{route.path}/", f"{route.path}/{{path:path}}"
        elif isinstance(route, Route):
            methods, template = sorted(route.methods or ()), str(context.path)
            path = template
        else:
            raise LookupError(f"{type(route).__name__} is no route that the gate can match")
        for method in methods:
            yield ServedRoute(method, template, compile_path(path)[0], rule_of(method, template))
