"""What wraps every request: id, log line, metrics, its host, the headers that browsers obey."""

import re
import time
import uuid
from collections.abc import Set
from http import HTTPStatus

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.address import address_of
from service.http.templates import Templates
from service.observe.metrics import Metrics
from service.problems import UNKNOWN_HOST, from_unexpected, problem, request_id_of
from service.settings import ANY_HOST

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(:\d+)?")
_SHOWN_CHARACTERS = 64
_PROBES = frozenset({"/live", "/ready", "/metrics"})
_PROBE_METHODS = frozenset({"GET", "HEAD"})
_SECURITY_HEADERS = {
    # No inline script or style, no other host; the page shows pictures that it made itself.
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
        "script-src 'self'; style-src 'self'; connect-src 'self'; worker-src 'none'; "
        "frame-src 'none'; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}
_SHARED_HEADERS = {"Cross-Origin-Resource-Policy": "cross-origin"}


class RequestContext:
    """Gives the request an id, turns what nobody caught into a 500, counts and logs the answer.

    What was refused before it was routed counts for the route of `served` that it was meant for.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, served: Templates) -> None:
        self.app = app
        self._metrics = metrics
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        started, status, sent, reported = time.perf_counter(), 0, 0, False

        def report() -> None:
            nonlocal reported
            if not reported:
                reported = True
                self._report(scope, status, sent, time.perf_counter() - started)

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent
            sent += len(message.get("body", b""))
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

    def _route(self, scope: Scope) -> str:
        routed = getattr(scope.get("route"), "path", None)
        return str(routed or self._served.of(scope["method"], scope["path"]) or "unmatched")

    def _report(self, scope: Scope, status: int, sent: int, seconds: float) -> None:
        route = self._route(scope)
        self._metrics.observe_request(route, scope["method"], status, seconds)
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            by = "key" if "key_id" in scope["state"] else "address"
            self._metrics.observe_rate_limited(by)
        structlog.get_logger().info(
            "request",
            route=route,
            method=scope["method"],
            status=status,
            principal=scope["state"].get("principal"),
            client=address_of(scope),
            bytes=sent,
            ms=round(seconds * 1e3, 1),
        )


class AllowedHosts:
    """Refuses a request whose Host is none of `hosts`, unless they hold `*`.

    Without it a web page could point its own name at this machine and read what is served here.
    What orchestrators and monitoring read is answered under any host: they call by address.
    """

    def __init__(self, app: ASGIApp, hosts: Set[str]) -> None:
        self.app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or ANY_HOST in self._hosts or _is_probe(scope):
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("host", "")
        match = _HOST.fullmatch(given)
        if match and match[1].lower() in self._hosts:
            await self.app(scope, receive, send)
            return
        response = problem(
            UNKNOWN_HOST,
            f"The host {given[:_SHOWN_CHARACTERS]!r} is not served here; known are "
            f"{', '.join(sorted(self._hosts))}. Name it in KINLENS_ALLOWED_HOSTS to allow it.",
            request_id=request_id_of(scope),
            instance=scope["path"],
        )
        await response(scope, receive, send)


class SecurityHeaders:
    """Sets each header that the answer has not set by itself.

    With `shared`, pages of other origins may show the pictures.
    """

    def __init__(self, app: ASGIApp, *, shared: bool = False) -> None:
        self.app = app
        self._headers = _SECURITY_HEADERS | (_SHARED_HEADERS if shared else {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers)


def _is_probe(scope: Scope) -> bool:
    return scope["method"] in _PROBE_METHODS and scope["path"] in _PROBES


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
