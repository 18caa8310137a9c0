"""Which methods an address takes."""

from collections.abc import Sequence

from starlette.routing import BaseRoute, compile_path

from service.http.scopes import addresses


def methods_at(routes: Sequence[BaseRoute], path: str) -> list[str]:
    """The methods of all routes at `path`, sorted; none if nothing is there.

    A word of an address may also be the value of a parameter: the routes with the fewest count.
    """
    known = [
        (method, template)
        for method, template in addresses(routes)
        if compile_path(template)[0].match(path)
    ]
    fewest = min((template.count("{") for _, template in known), default=0)
    return sorted({method for method, template in known if template.count("{") == fewest})
