"""Which route a request is meant for, known before the router has looked at it."""

import re
from collections.abc import Sequence

from starlette.routing import BaseRoute, compile_path

from service.http.scopes import addresses


class Templates:
    """The path templates of an app; none are known until `learn`."""

    def __init__(self) -> None:
        self._known: list[tuple[str, str, re.Pattern[str]]] = []

    def learn(self, routes: Sequence[BaseRoute]) -> None:
        """Know these routes, and paths by the very patterns that the router compares them with."""
        self._known = [
            (method, template, _pattern(template)) for method, template in addresses(routes)
        ]

    def of(self, method: str, path: str) -> str | None:
        """The template of what is served there; None if nothing is."""
        for known, template, pattern in self._known:
            if known == method and pattern.match(path):
                return template
        return None


def _pattern(template: str) -> re.Pattern[str]:
    is_folder = template.endswith("/") and template != "/"
    return compile_path(template + "{path:path}" if is_folder else template)[0]
