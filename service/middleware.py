"""What wraps every request: its id, log line and metrics, and the headers that browsers obey."""

import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.metrics import Metrics
from service.problems import from_unexpected

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


class RequestContext:
    """Gives the request an id, turns what nobody caught into a 500, counts and logs the answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        started, status, reported = time.perf_counter(), 0, False

        def report() -> None:
            nonlocal reported
            if not reported:
                reported = True
                self._report(scope, status, time.perf_counter() - started)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            elif not message.get("more_body", False):
                report()  # before the client has the whole answer and looks at the metrics
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_id)
            except Exception as error:
                if status:
                    raise
                response = await from_unexpected(Request(scope), error)
                await response(scope, receive, send_with_id)
            finally:
                report()

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        route = str(getattr(scope.get("route"), "path", "unmatched"))
        self._metrics.observe_request(route, scope["method"], status, seconds)
        structlog.get_logger().info(
            "request",
            route=route,
            method=scope["method"],
            status=status,
            ms=round(seconds * 1e3, 1),
        )


class SecurityHeaders:
    """Sets each header that the answer has not set by itself."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
