"""How the OpenAPI document says which operation needs which scope."""

from collections.abc import Iterable
from typing import Any

from embedder import errors
from service.access import keys
from service.http import scopes as access
from service.problems import KINDS

_METHODS = frozenset({"get", "head", "post", "put", "patch", "delete"})
_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key as `Authorization: Bearer KEY`, made with "
        "`kinlens-serve keys create`.",
    },
    "key": {
        "type": "apiKey",
        "in": "header",
        "name": "X-API-Key",
        "description": "The same key in a header of its own.",
    },
}
PROBLEMS = (
    KINDS[errors.AccessError],
    KINDS[errors.KeyMissingError],
    KINDS[errors.ScopeError],
    KINDS[errors.RateLimitedError],
)
"""What the guard may answer instead of an operation that needs a scope."""


def add_security(
    document: dict[str, Any], anonymous: Iterable[keys.Scope], refusals: dict[int | str, Any]
) -> None:
    """Name the scope of every operation, and add the answers `refusals` to it.

    The scope is the role that each scheme needs; an operation that anonymous callers may use
    has the empty requirement as well.
    """
    document.setdefault("components", {})["securitySchemes"] = _SCHEMES
    free = keys.allowed(anonymous)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method in _METHODS:
                _describe(operation, access.required_scope(method.upper(), path), free, refusals)


def _describe(
    operation: dict[str, Any],
    scope: keys.Scope | None,
    free: frozenset[keys.Scope],
    refusals: dict[int | str, Any],
) -> None:
    if scope is None:
        operation["security"] = []
        return
    operation["security"] = [{name: [scope]} for name in _SCHEMES]
    operation["security"] += [{}] if scope in free else []
    text = operation.get("description", "")
    operation["description"] = f"{text}\n\nNeeds the scope `{scope}`.".strip()
    for status, response in refusals.items():
        operation["responses"].setdefault(str(status), response)
