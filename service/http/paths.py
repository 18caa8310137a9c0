"""Addresses that no route has, refused before anything compares them."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.refusal import refuse
from service.problems import BAD_REQUEST, problem, request_id_of

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class PlainPaths:
    """Refuses (400) a path with control characters, also written as %0A.

    What compares paths does not agree about a line break at their end: `$` overlooks it.
    """

    def __init__(self, app: ASGIApp, *, drain_bytes: int) -> None:
        self.app = app
        self._drain_bytes = drain_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _CONTROL.search(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self.app(scope, receive, send)
            return
        answer = problem(
            BAD_REQUEST,
            f"The address has the control character U+{ord(found[0]):04X} at place "
            f"{found.start()}; leave it out.",
            request_id=request_id_of(scope),
            instance=scope["path"],
        )
        await refuse(answer, scope, receive, send, drain_bytes=self._drain_bytes)
