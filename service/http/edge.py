"""The middleware for host and path of a request; headers, log and compression of its answer.

BodyLimit ─► Edge ─► CORS ─► Compression ─► router
             400, 308
"""

import functools
import ipaddress
import random
import re
import time
from collections.abc import Iterable
from http import HTTPStatus

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kinlens.service.access.links import PREFIX, forwarded_prefix, public_path
from kinlens.service.access.rates import Account
from kinlens.service.http.bodies import header
from kinlens.service.observe.metrics import PROBES, Metrics, trace_fields
from kinlens.service.problems import (
    BAD_REQUEST,
    HEAD_TOO_LARGE,
    UNKNOWN_HOST,
    ProblemType,
    problem,
    request_id_of,
)
from kinlens.service.redis import begin_budget
from kinlens.service.settings import ANY_HOST, Settings, parse_network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

HEAD_BYTES = 16 * 2**10
"""Limit of the head of a request."""

_VERSIONS = frozenset({"1.0", "1.1", "2", "3"})
_READ = frozenset({"GET", "HEAD"})
_SLASHED = ("/admin/", "/docs/")  # pages with a wrong slash at the end
_THIS_MACHINE = ("127.0.0.0/8", "::1")
_UNMATCHED = "unmatched"
_SHOWN_CHARACTERS = 64
_KNOWN_CODINGS = 64
_FORWARDED = "x-forwarded-for"
# Some gateways add a port: 10.0.0.5:443, [2001:db8::1]:443, "[2001:db8::1]".
_WITH_PORT = re.compile(r'"?(?:\[([^\[\]]+)\]|([\d.]+))(?::\d{1,5})?"?')
_NO_ADDRESS = "local"
_IPV6_PREFIX = 64
_KNOWN_ADDRESSES = 1_024
_IDS = random.Random()  # ids are not secrets, and this needs no system call per request
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(:\d+)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
SECURITY_HEADERS = {
    # No inline script or style, no other host. The page shows images that it made itself (blob:).
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


class Edge:
    """Refuses unknown hosts and odd paths, and observes every answer.

    `scope["state"]` gets the `request_id` and the `address` of the client.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics
        self._is_traced = settings.otlp_endpoint is not None
        self._has_redis = settings.redis_url is not None
        self._hosts = settings.hosts()
        self._prefix = settings.prefix
        self._addresses = Addresses(settings.trusted_proxies)
        # A proxy on this machine may send a prefix unless others are named: it only changes the
        # links of the same answer.
        is_set = settings.trusted_proxies or settings.prefix
        self._prefixing = self._addresses if is_set else Addresses(_THIS_MACHINE)
        headers = dict(SECURITY_HEADERS)
        sources = " ".join(("img-src 'self'", *settings.shown_origins()))
        policy = headers["Content-Security-Policy"].replace("img-src 'self'", sources)
        headers["Content-Security-Policy"] = policy
        if settings.cors_origins:
            headers["Cross-Origin-Resource-Policy"] = "cross-origin"  # images on their pages
        self._headers = [(name.lower().encode(), text.encode()) for name, text in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._has_redis:
            begin_budget()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(scope)
        state["address"] = self._addresses.of(scope)
        started, status, size, is_reported = time.perf_counter(), 0, 0, False

        def report() -> None:
            nonlocal is_reported
            if not is_reported:
                is_reported = True
                self._report(scope, status, size, time.perf_counter() - started)

        async def observe(message: Message) -> None:
            nonlocal status, size
            size += len(message.get("body", b"")) if scope["method"] != "HEAD" else 0
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(state, message)
            elif not message.get("more_body", False):
                report()  # before the client has the whole answer and can read the metrics
            await send(message)

        traced = trace_fields() if self._is_traced else {}
        structlog.contextvars.bind_contextvars(request_id=request_id, **traced)
        try:
            await self._pass(scope, receive, observe)
        finally:
            report()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_bare = self._remove_prefix(scope)
        answer = self._bad_request(scope)
        if answer is None and is_bare and scope["method"] in _READ:
            # Relative links of the page need the slash.
            answer = Response(status_code=308, headers={"Location": public_path("/")})
        if answer is None and scope["path"] in _SLASHED and scope["method"] in _READ:
            # Without the slash, for the same reason; relative, whatever prefix a proxy has removed.
            page, query = scope["path"][1:-1], scope["query_string"].decode("latin-1")
            location = f"../{page}?{query}" if query else f"../{page}"
            answer = Response(status_code=308, headers={"Location": location})
        if answer is not None:
            await answer(scope, receive, send)
            return
        # A copy, since the server omits the body of a HEAD answer by the method of the original.
        is_head = scope["method"] == "HEAD"
        await self.app({**scope, "method": "GET"} if is_head else scope, receive, send)

    def _remove_prefix(self, scope: Scope) -> bool:
        """Set the prefix of links, and remove that of the settings from the path of the request.
        Returns whether the path is the prefix without a slash.

        A prefix in a header is never removed: a client could send it to get past a proxy that
        blocks paths.
        """
        prefix, sent = self._prefix, None
        if header(scope, b"x-forwarded-prefix") and self._prefixing.trusts(scope):
            sent = forwarded_prefix(Headers(scope=scope).getlist("x-forwarded-prefix"))
        PREFIX.set(prefix if sent is None else sent)
        path = scope["path"]
        if not prefix or not f"{path}/".startswith(f"{prefix}/"):
            return False
        scope["path"] = path[len(prefix) :] or "/"
        scope["raw_path"] = scope["raw_path"][len(prefix) :] or b"/"
        return bool(path == prefix)

    def _bad_request(self, scope: Scope) -> Response | None:
        """The refusal of a head, an unknown host or control characters in the path, or None.

        The host check prevents DNS rebinding: a web page could point its own name at this machine
        and read the responses. Probes are exempt, since orchestrators and monitoring call by IP
        address. Control characters are refused because `$` in a regex also matches before a
        trailing newline, so route matchers could disagree.
        """
        given = ", ".join(Headers(scope=scope).getlist("host"))
        match = _HOST.fullmatch(given)
        is_known = ANY_HOST in self._hosts or (match and match[1].lower() in self._hosts)
        is_probe = scope["method"] in _READ and scope["path"] in PROBES
        control = _CONTROL.search(scope["path"])
        if (refusal := _refusal_of_head(scope)) is not None:
            kind, text = refusal
        elif not is_known and not is_probe:
            kind = UNKNOWN_HOST
            text = (
                f"The host {given[:_SHOWN_CHARACTERS]!r} is not allowed; allowed are "
                f"{', '.join(sorted(self._hosts))}. Add it to KINLENS_ALLOWED_HOSTS to allow it."
            )
        elif control is not None:
            kind = BAD_REQUEST
            text = (
                f"The path has the control character U+{ord(control[0]):04X} at position "
                f"{control.start()}; remove it."
            )
        else:
            return None
        return problem(kind, text, request_id=request_id_of(scope), instance=scope["path"])

    def _add_headers(self, state: Scope, message: Message) -> None:
        sent = dict(message.get("headers", ()))  # the route may have other values
        message["headers"] = [
            *message.get("headers", ()),
            (b"x-request-id", state["request_id"].encode()),
            *[each for each in self._headers if each[0] not in sent],
        ]
        account: Account | None = state.get("account")
        if account is not None and (verdict := account.verdict).amount is not None:
            headers = MutableHeaders(scope=message)
            headers["RateLimit-Limit"] = str(verdict.amount)
            headers["RateLimit-Remaining"] = str(verdict.remaining)
            headers["RateLimit-Reset"] = str(verdict.retry_after_s)

    def _report(self, scope: Scope, status: int, size: int, seconds: float) -> None:
        state = scope["state"]
        route = state["route"].path if "route" in state else _UNMATCHED
        self._metrics.observe_request(route, scope["method"], status, seconds)
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            self._metrics.rate_limited.labels("key" if "key" in state else "address").inc()
        if "key" in state and "account" in state:
            self._metrics.observe_key(state["key"].name, state["account"].units)
        structlog.get_logger().info(
            "request",
            route=route,
            method=scope["method"],
            status=status,
            principal=state.get("principal", "anonymous"),
            client=state["address"],
            bytes=size,
            ms=round(seconds * 1e3, 1),
        )


def _refusal_of_head(scope: Scope) -> tuple[ProblemType, str] | None:
    """Why the head of a request is refused, or None.

    A server may accept a larger head that arrives at once, and a body with two lengths, which a
    proxy in front of it could read as two requests.
    """
    size = len(scope["path"]) + len(scope["query_string"])
    codings, has_length = [], False
    for name, value in scope["headers"]:
        size += len(name) + len(value) + 4
        has_length |= name == b"content-length"
        if name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if size > HEAD_BYTES:
        return (
            HEAD_TOO_LARGE,
            f"The head of the request has more than {HEAD_BYTES // 2**10} KiB. Shorten it.",
        )
    version = scope["http_version"]
    if version not in _VERSIONS:
        return BAD_REQUEST, f"HTTP/{version[:_SHOWN_CHARACTERS]} is not supported. Send HTTP/1.1."
    if codings and (has_length or codings != [b"chunked"] or version == "1.0"):
        text = "Transfer-Encoding must be chunked, without a length, in HTTP/1.1."
        return BAD_REQUEST, text
    return None


class Addresses:
    """Finds client addresses; X-Forwarded-For is only read from `trusted` proxies."""

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        self._trusted = tuple(parse_network(text) for text in trusted)

    def of(self, scope: Scope) -> str:
        """The address of the client; for IPv6 its /64 network, which usually is one client.

        X-Forwarded-For is read from its end, where the nearest proxy appends, up to the first
        address that is not a trusted proxy.
        """
        address = _peer(scope)
        if address is None:
            return _NO_ADDRESS
        if not self._is_trusted(address):
            return _shown(address)
        forwarded = ",".join(Headers(scope=scope).getlist(_FORWARDED))
        for text in reversed(forwarded.split(",")):
            match = _WITH_PORT.fullmatch(text.strip())
            sender = _address(match[1] or match[2] if match else text.strip())
            if sender is None:
                break
            address = sender
            if not self._is_trusted(address):
                break
        return _shown(address)

    def trusts(self, scope: Scope) -> bool:
        """Whether a request comes directly from a trusted proxy."""
        peer = _peer(scope)
        return peer is not None and self._is_trusted(peer)

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def _peer(scope: Scope) -> Address | None:
    client = scope.get("client")
    return _address(client[0]) if client else None


@functools.lru_cache(_KNOWN_ADDRESSES)
def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@functools.lru_cache(_KNOWN_ADDRESSES)
def _shown(address: Address) -> str:
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    return str(address)


@functools.lru_cache(_KNOWN_CODINGS)
def accepts_gzip(value: str) -> bool:
    """Whether the value of an Accept-Encoding header permits gzip."""
    qualities = {}
    for part in value.lower().split(","):
        coding, _, quality = part.replace(" ", "").partition(";q=")
        qualities[coding] = bool(re.sub(r"[0.]", "", quality or "1"))
    return qualities.get("gzip", qualities.get("x-gzip", qualities.get("*", False)))


class Compression:
    """gzip for answers of texts above 4 KiB; images are compressed already."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = GZipMiddleware(app, minimum_size=4 * 2**10, compresslevel=3)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            value = header(scope, b"accept-encoding")
            # The middleware looks for the word gzip alone, which is also in `gzip;q=0`. It adds
            # `Vary` to plain answers too, so that caches tell them from compressed ones.
            if (is_accepted := accepts_gzip(value)) != ("gzip" in value):
                coding = b"gzip" if is_accepted else b"identity"
                others = [each for each in scope["headers"] if each[0] != b"accept-encoding"]
                scope = {**scope, "headers": [*others, (b"accept-encoding", coding)]}
        await self._app(scope, receive, send)


def _request_id(scope: Scope) -> str:
    given = header(scope, b"x-request-id")
    return given if _REQUEST_ID.fullmatch(given) else f"{_IDS.getrandbits(128):032x}"
