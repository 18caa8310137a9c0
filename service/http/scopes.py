"""Which address needs which scope: the one table."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute, Mount, Route

from service.access.keys import Scope

_READ = frozenset({"GET", "HEAD"})
_CHANGE = frozenset({"PUT", "PATCH", "DELETE"})
_ANY = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
_POST = frozenset({"POST"})


@dataclass(frozen=True, slots=True)
class Rule:
    """The scope that these methods need at the paths that `path` fits; None is open to all."""

    methods: frozenset[str]
    path: re.Pattern[str]
    scope: Scope | None


def _rule(methods: frozenset[str], path: str, scope: Scope | None) -> Rule:
    return Rule(methods, re.compile(path, re.DOTALL), scope)


TABLE: tuple[Rule, ...] = (
    _rule(_READ, r"/(live|ready|metrics|docs|openapi\.json|admin)?", None),
    _rule(_READ, r"/ui(/.*)?", None),
    _rule(_POST, r"/search(/.*)?", "search"),
    _rule(_READ, r"/(galleries|samples)(/.*)?", "search"),
    _rule(_POST, r"/galleries/[^/]+/items/delete", "write"),
    _rule(_CHANGE, r"/galleries/[^/]+/items(/.*)?", "write"),
    _rule(_ANY, r"/galleries(/.*)?", "admin"),
    _rule(_ANY, r"/(jobs|admin)(/.*)?", "admin"),
)
"""The first rule that fits counts."""


def rule_of(method: str, path: str) -> Rule | None:
    """The rule of a request, or of a route by its template; None for what is not served."""
    for rule in TABLE:
        if method in rule.methods and rule.path.fullmatch(path):
            return rule
    return None


def required_scope(method: str, path: str) -> Scope | None:
    """The scope that a request needs; None if it needs none. What has no rule needs `admin`."""
    rule = rule_of(method, path)
    return "admin" if rule is None else rule.scope


def check_covered(routes: Sequence[BaseRoute]) -> None:
    """Refuse an app with a route that the table does not know: none but an admin could call it.

    Raises: LookupError.
    """
    for method, path in addresses(routes):
        if rule_of(method, path) is None:
            raise LookupError(f"{method} {path} has no row in the table of scopes")


def addresses(routes: Sequence[BaseRoute]) -> list[tuple[str, str]]:
    """Method and path template of everything that is served; a folder of files is one GET."""
    found = []
    for context in iter_route_contexts(routes):
        route = context.original_route
        if isinstance(route, Mount):
            found.append(("GET", f"{route.path}/"))
        elif isinstance(route, Route):
            found += [(method, str(context.path)) for method in sorted(route.methods or ())]
        else:
            raise LookupError(f"{type(route).__name__} is no route that the table of scopes knows")
    return found
