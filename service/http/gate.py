"""The gate before all routes: it authenticates, authorizes and rate-limits each request.

    id, log, headers ─► host, path ─► other origins ─► key and scope ─► rate ─► BodyLimit, route
         every answer      400           CORS            401, 403        429       (404, 405)

The gate looks up the route of a request once, in a table with the required scope, the extent and
the kind of body of each route. Requests without a route never get to the router. The binding of the
key is set for the request, and the registry of galleries enforces it.
"""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

import structlog
from fastapi.routing import iter_route_contexts
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kinlens import models
from kinlens.embedder.errors import (
    AccessError,
    KeyMissingError,
    KeysUnreadableError,
    KinlensError,
    OverloadedError,
    RateLimitedError,
    ScopeError,
    StateError,
)
from kinlens.service.access import keys
from kinlens.service.access.audit import AuditLog, Change, warn
from kinlens.service.access.binding import calling
from kinlens.service.access.keys import FreshKeys, KeyStore
from kinlens.service.access.prefix import forwarded_prefix, public_path, set_prefix
from kinlens.service.access.rates import (
    Account,
    Addresses,
    RateLimits,
    SharedCounts,
    client_address,
)
from kinlens.service.concurrency import BoundedPool
from kinlens.service.galleries import links
from kinlens.service.http.bodies import BodyKind, Bounds, refuse
from kinlens.service.observe.metrics import Metrics
from kinlens.service.observe.tracing import trace_fields
from kinlens.service.problems import (
    BAD_REQUEST,
    UNKNOWN_HOST,
    from_error,
    from_http,
    problem,
    request_id_of,
)
from kinlens.service.settings import ANY_HOST, Settings

_READ = frozenset({"GET", "HEAD"})
_CHANGE = frozenset({"PUT", "PATCH", "DELETE"})
_POST = frozenset({"POST"})

Extent = Literal["none", "items", "galleries", "service"]
"""The part of the service that a route is about.

- none: no gallery; bindings of keys do not matter.
- items: items that the filter of a key can exclude.
- galleries: whole galleries; keys with a filter are refused.
- service: more than some galleries; all bound keys are refused.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """The requirements of `methods` at path templates that match `path`; scope None is public."""

    methods: frozenset[str]
    path: str
    scope: models.Scope | None
    extent: Extent
    body: BodyKind = "plain"
    stores: bool = False
    """Whether it stores data although the scope `search` is enough."""


_G = r"/galleries/[^/]+"
RULES = (
    Rule(_READ, r"/(live|startup|docs|openapi\.json|admin)?", None, "none"),
    Rule(_READ, r"/ui/", None, "none"),
    Rule(_READ, r"/ready", None, "items"),
    Rule(_READ, r"/metrics", None, "service"),
    Rule(_READ, r"/access", "search", "items"),
    Rule(_POST, r"/search", "search", "items", "image"),
    Rule(_POST, r"/search/batch", "search", "items", "batch"),
    Rule(_POST, rf"{_G}/golden", "write", "galleries", "image"),
    Rule(_READ | _CHANGE | {"POST"}, rf"{_G}/golden(/.*)?", "write", "galleries"),
    Rule(_POST, r"/feedback", "search", "items", "form_image", stores=True),
    Rule(_READ, rf"{_G}/feedback", "admin", "galleries"),
    Rule(_READ, rf"{_G}/duplicates", "admin", "galleries"),
    Rule(_POST, rf"{_G}/items/(.+)/explain", "search", "items", "image"),
    Rule(_READ, r"/galleries", "search", "items"),
    Rule(_READ, _G, "search", "items"),
    Rule(_READ, rf"{_G}/items(/.*)?", "search", "items"),
    Rule(frozenset({"PUT"}), rf"{_G}/items", "write", "items", "batch"),
    Rule(_CHANGE, rf"{_G}/items", "write", "items", "keys"),
    Rule(_POST, rf"{_G}/items/(delete|restore)", "write", "items", "keys"),
    Rule(_CHANGE, rf"{_G}/items/by-key/.*", "write", "items", "keys"),
    Rule(_CHANGE, rf"{_G}/items/.*", "write", "items"),
    Rule(_POST, r"/galleries", "admin", "galleries"),
    Rule(frozenset({"DELETE"}), _G, "admin", "galleries"),
    Rule(_POST, rf"{_G}/(compact|swap|sync)", "admin", "galleries"),
    Rule(_READ, r"/jobs(/options|/\{job_id\}(/log)?)?", "admin", "galleries"),
    Rule(_POST, r"/jobs/[^/]+/cancel", "admin", "galleries"),
)
"""The first matching rule applies. A route without a rule needs `admin`, refuses all bound keys and
accepts a plain body.
"""


def rule_of(method: str, template: str) -> Rule:
    """The rule of a route."""
    for rule in RULES:
        if method in rule.methods and re.fullmatch(rule.path, template):
            return rule
    return Rule(frozenset({method}), template, "admin", "service")


@dataclass(frozen=True, slots=True)
class ServedRoute:
    """One method of one route; `pattern` is the regex that the router matches paths with."""

    method: str
    template: str
    pattern: re.Pattern[str]
    rule: Rule


class RouteTable:
    """The routes of an app, matched once per request, before the router."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self.served = tuple(_served(routes))

    def match(self, method: str, path: str) -> ServedRoute | None:
        """The route of a request, or None.

        A HEAD request uses the GET route if the path has no HEAD route.
        """
        for wanted in (method, "GET") if method == "HEAD" else (method,):
            for route in self.served:
                if route.method == wanted and route.pattern.match(path):
                    return route
        return None

    def at(self, path: str) -> list[ServedRoute]:
        """The routes at `path`, for any method.

        A fixed word in a path also matches a parameter, so only the routes with the fewest
        parameters are returned.
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
            raise LookupError(f"the gate cannot match a {type(route).__name__}; use Route or Mount")
        for method in methods:
            yield ServedRoute(method, template, compile_path(path)[0], rule_of(method, template))


ANONYMOUS = "anonymous"
KEY_HEADER = "X-API-Key"

_THIS_MACHINE = ("127.0.0.0/8", "::1")
_FAILURES = "30/minute"
# Limits the refusals of all callers in the audit log: at this rate it takes months until they push
# out the changes. Keys of shop fronts are public, so anybody can cause refusals.
_REFUSALS = "120/hour"
_EVERYBODY = "everybody"
_AUDIT_S = 2.0
_UNWRITTEN = 1_000
_UNREADABLE_TEXT = (
    "The file of API keys cannot be read, so no key is accepted. The service log shows the cause."
)
_BEARER = "bearer "
_SHOWN_CHARACTERS = 64
_IDS = random.Random()  # ids are not secrets, and this needs no system call per request
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(:\d+)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PROBES = frozenset({"/live", "/ready", "/startup", "/metrics"})
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
_CORS_MAX_AGE_S = 600
_CORS_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_CORS_SENT = ("Authorization", "Content-Type", "If-None-Match", "X-Request-ID", KEY_HEADER)
_CORS_SHOWN = (
    "ETag",
    "Location",
    "RateLimit-Limit",
    "RateLimit-Remaining",
    "RateLimit-Reset",
    "Retry-After",
    "Server-Timing",
    "X-Kinlens-Bundle",
    "X-Request-ID",
)


class Gate:
    """Admits a request if its host, its path, the scopes of its caller and its rate allow it.

    - A caller without a key has the anonymous scopes of the settings.
    - `scope["state"]` gets the `request_id`, the `route`, the `principal` and the `key`, if sent.
    - Every answer gets the request id and the security headers, is counted and is logged.
    - Changes are also written to the audit log.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        metrics: Metrics,
        store: KeyStore | None,
        rates: RateLimits,
        audit: AuditLog | None,
    ) -> None:
        self.app = app
        self._metrics = metrics
        self._audit = audit
        self._writers = BoundedPool("audit", 1, _UNWRITTEN)
        self._per_key = settings.rate_limit_per_key
        self._keys = None if store is None else FreshKeys(store)
        self._rates = rates
        self._table: RouteTable | None = None
        self._hosts = settings.hosts()
        self._signs = settings.image_links == "signed"
        self._anonymous = keys.allowed(settings.anonymous_scopes)
        self._prefix = settings.prefix
        self._addresses = Addresses(settings.trusted_proxies)
        # A proxy on this machine may send a prefix unless others are named: it only changes the
        # links of the same answer.
        is_set = settings.trusted_proxies or settings.prefix
        self._prefixing = self._addresses if is_set else Addresses(_THIS_MACHINE)
        self._drain_bytes = bounds_of(settings).largest
        self._origins = frozenset(settings.cors_origins)
        headers = dict(SECURITY_HEADERS)
        self._inside: ASGIApp = self._answer
        if self._origins:
            headers["Cross-Origin-Resource-Policy"] = "cross-origin"  # images on their pages
            self._inside = CORSMiddleware(
                self._answer,
                allow_origins=settings.cors_origins,
                allow_methods=_CORS_METHODS,
                allow_headers=_CORS_SENT,
                expose_headers=_CORS_SHOWN,
                max_age=_CORS_MAX_AGE_S,
            )
        self._headers = [(name.lower().encode(), text.encode()) for name, text in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(scope)
        state["principal"] = ANONYMOUS
        self._remove_prefix(scope)
        state["route"] = route = self._routes(scope).match(scope["method"], scope["path"])
        state["template"] = "unmatched" if route is None else route.template
        state["address"] = self._addresses.of(scope)
        observed = _ObservedAnswer(self, scope, send)
        with structlog.contextvars.bound_contextvars(request_id=request_id, **trace_fields()):
            try:
                bad = self._bad_request(scope)
                if bad is None:
                    await self._inside(scope, receive, observed.send)
                else:
                    await refuse(bad, scope, receive, observed.send, drain_bytes=self._drain_bytes)
            finally:
                await observed.end()

    async def note(self, scope: Scope, status: int) -> None:
        """Write a change to the audit log, unless it was refused with a 4xx other than 403."""
        state = scope["state"]
        has_key = "key" in state
        if self._audit is None or not _is_change(scope):
            return
        if 400 <= status < 500 and status != HTTPStatus.FORBIDDEN:
            return
        if status == HTTPStatus.FORBIDDEN:
            verdict = await self._rates.hit("refusal", _EVERYBODY)
            if not verdict.allowed:
                return
        route = state["route"]
        named = {"gallery": _path_parameters(scope)["name"]} if _is_of_gallery(route) else {}
        change = Change(
            action=f"{route.method} {route.template}",
            by=state["principal"],
            status=status,
            key_id=state["key"].id if has_key else None,
            client=client_address(scope),
            request_id=state["request_id"],
            **named | state.get("change", {}),
        )
        writing = asyncio.ensure_future(self._writers.run(partial(self._audit.add, change)))
        try:
            async with asyncio.timeout(_AUDIT_S):
                await asyncio.shield(writing)
        except OverloadedError:
            warn(change, f"{_UNWRITTEN:,} changes wait to be written")
        except TimeoutError:  # the thread continues
            structlog.get_logger().warning("audit log is slow", limit_s=_AUDIT_S)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a request. An unexpected error is answered here, so that it gets the headers for
        other origins: without them, the page of a shop sees a network error.
        """
        started = False

        async def send_on(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._admit(scope, receive, send_on)
        except Exception as error:
            if started:
                raise
            answer = await from_error(Request(scope), error)
            await answer(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._refusal(scope)
        if answer is None:
            # Copy the scope, since the method of the original makes the server omit a HEAD body.
            method = scope["state"]["route"].method
            key: keys.Key | None = scope["state"].get("key")
            with contextlib.ExitStack() as stack:
                if key is not None:
                    stack.enter_context(calling(key.binding()))
                    if self._signs:
                        stack.enter_context(links.signing(key))
                await self.app({**scope, "method": method}, receive, send)
        else:
            await refuse(answer, scope, receive, send, drain_bytes=self._drain_bytes)

    async def _refusal(self, scope: Scope) -> Response | None:
        route = scope["state"]["route"]
        if scope["state"].get("is_bare_prefix") and scope["method"] in _READ:
            # Relative links of the page need the slash.
            return Response(status_code=308, headers={"Location": public_path("/")})
        try:
            if route is not None and route.rule.scope is not None:
                await self._authorize(scope, route.rule, route.rule.scope)
            elif route is not None and route.rule.extent != "none":
                await self._recognize(scope, route.rule)
            if route is None or route.rule.scope is not None:
                await self._count(scope)
        except StateError as error:
            structlog.get_logger().error("keys cannot be read", detail=str(error))
            return await from_error(Request(scope), KeysUnreadableError(_UNREADABLE_TEXT))
        except KinlensError as error:
            return await from_error(Request(scope), error)
        return await self._not_served(scope) if route is None else None

    async def _authorize(self, scope: Scope, rule: Rule, needed: models.Scope) -> None:
        text = _sent_key(scope)
        if text is None and (link := self._signed_link(scope)) is not None:
            signer = None if self._keys is None else await self._keys.by_id(link["signed_by"])
            signed_by = links.check(signer, _path_parameters(scope), link)
            scope["state"] |= {"principal": signed_by.name, "key": signed_by, "is_link": True}
            return
        if text is None:
            if needed not in self._anonymous:
                raise await self._closed(needed)
            if needed != "search":
                _refuse_foreign_page(scope, self._origins - {ANY_HOST})
            elif rule.stores:
                _refuse_foreign_page(scope, self._origins)
            return
        key = None if self._keys is None else await self._keys.known(text)
        if key is None:
            key = await self._created(scope, text)
        scope["state"]["principal"] = key.name
        scope["state"]["key"] = key
        if needed not in keys.allowed(key.scopes):
            raise ScopeError(
                f"The key {key.name} has the scopes {', '.join(key.scopes)}; this needs {needed}. "
                f"Create one with kinlens-serve keys create NAME --scope {needed}."
            )
        _refuse_beyond(key, rule.extent)

    async def _recognize(self, scope: Scope, rule: Rule) -> None:
        """Identify the key on a public route, so a bound key only sees what it is bound to."""
        text = _sent_key(scope)
        if text is None or self._keys is None:
            return
        key = None
        with contextlib.suppress(StateError, AccessError):  # a public route stays public
            key = await self._keys.known(text) or await self._created(scope, text)
        if key is not None:
            _refuse_beyond(key, rule.extent)
            scope["state"]["principal"] = key.name
            scope["state"]["key"] = key

    def _signed_link(self, scope: Scope) -> dict[str, str] | None:
        """The query of a signed image link, or None for any other request."""
        if not self._signs or not scope["state"]["route"].template.endswith(links.IMAGE_OF_ITEM):
            return None
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        return query if "signed_by" in query else None

    async def _created(self, scope: Scope, text: str) -> keys.Key:
        """The key, if it was created after the last read of the file.

        Reading the file is costly, so every attempt is rate-limited, including those with new keys.
        """
        verdict = await self._rates.hit("failure", client_address(scope))
        if not verdict.allowed:
            raise RateLimitedError(
                f"This address sent too many unknown API keys. Try again in "
                f"{verdict.retry_after_s} s.",
                verdict.retry_after_s,
            )
        key = None if self._keys is None else await self._keys.created(text)
        if key is None:
            raise KeyMissingError(
                "The API key is unknown: it is mistyped, expired or revoked. Send a valid key as "
                "Authorization: Bearer KEY or X-API-Key: KEY."
            )
        return key

    async def _closed(self, needed: models.Scope) -> AccessError:
        if self._keys is None:
            return AccessError(
                f"This needs the scope {needed}, but the service has no state folder for keys. "
                "Start it with --state DIR and create a key with kinlens-serve keys create."
            )
        if not await self._keys.has_active():
            return AccessError(
                f"This needs the scope {needed}, but no API key exists yet. Create one with "
                f"kinlens-serve keys create NAME --scope {needed}."
            )
        return KeyMissingError(
            f"This needs an API key with the scope {needed}. Send it as Authorization: Bearer KEY "
            "or X-API-Key: KEY."
        )

    async def _count(self, scope: Scope) -> None:
        """Count a request against the rate of its key, or of its address if it has no key."""
        key: keys.Key | None = scope["state"].get("key")
        if key is None or "is_link" in scope["state"]:  # one customer, not all who have the key
            account = Account(self._rates, "address", client_address(scope))
        else:
            account = Account(self._rates, "key", key.id, key.rates(self._per_key))
        scope["state"]["account"] = account
        await account.open()

    async def _not_served(self, scope: Scope) -> Response:
        """A 405 if the path exists with other methods, else a 404.

        A wrong trailing slash is not redirected: the client would send its key along, and behind a
        proxy the public protocol and host are unknown.
        """
        path = scope["path"]
        others = self._routes(scope).at(path)
        if others:
            scope["state"]["template"] = others[0].template
            methods = {route.method for route in others}
            methods |= {"HEAD"} if "GET" in methods else set()
            headers = {"Allow": ", ".join(sorted(methods))}
            return await from_http(Request(scope), HTTPException(405, headers=headers))
        twin = path.rstrip("/") if path.endswith("/") else f"{path}/"
        detail = None
        if self._routes(scope).at(twin):
            detail = f"{path} does not exist. Did you mean {twin}?"
        return await from_http(Request(scope), HTTPException(404, detail))

    def _remove_prefix(self, scope: Scope) -> None:
        """Set the prefix of links, and remove that of the settings from the path of the request.

        A path that is a route as it is was stripped by the proxy. A prefix in a header is never
        removed: a client could send it to get past a proxy that blocks paths.
        """
        prefix, sent = self._prefix, None
        if self._prefixing.trusts(scope):
            sent = forwarded_prefix(Headers(scope=scope).getlist("x-forwarded-prefix"))
        set_prefix(prefix if sent is None else sent)
        path = scope["path"]
        if not prefix or not f"{path}/".startswith(f"{prefix}/") or self._routes(scope).at(path):
            return
        scope["state"]["is_bare_prefix"] = path == prefix
        scope["path"] = path[len(prefix) :] or "/"
        scope["raw_path"] = scope["raw_path"][len(prefix) :] or b"/"

    def _routes(self, scope: Scope) -> RouteTable:
        if self._table is None:
            self._table = RouteTable(scope["app"].routes)
        return self._table

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
        control = _CONTROL.search(scope["path"])
        if "refusal" in scope["state"]:
            kind, text = scope["state"]["refusal"]
        elif not is_known and not _is_probe(scope):
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

    def add_headers(self, scope: Scope, message: Message) -> None:
        set_already = {name for name, _ in message.get("headers", ())}
        message["headers"] = [
            *message.get("headers", ()),
            (b"x-request-id", scope["state"]["request_id"].encode()),
            *(header for header in self._headers if header[0] not in set_already),
        ]
        headers = MutableHeaders(scope=message)
        account: Account | None = scope["state"].get("account")
        if account is not None and (verdict := account.verdict).amount is not None:
            headers["RateLimit-Limit"] = str(verdict.amount)
            headers["RateLimit-Remaining"] = str(verdict.remaining)
            headers["RateLimit-Reset"] = str(verdict.retry_after_s)

    def report(self, scope: Scope, status: int, sent: int, seconds: float) -> None:
        state = scope["state"]
        self._metrics.observe_request(state["template"], scope["method"], status, seconds)
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            self._metrics.rate_limited.labels("key" if "key" in state else "address").inc()
        if "key" in state and "account" in state:
            self._metrics.observe_key(state["key"].name, state["account"].units)
        structlog.get_logger().info(
            "request",
            route=state["template"],
            method=scope["method"],
            status=status,
            principal=state["principal"],
            client=client_address(scope),
            bytes=sent,
            ms=round(seconds * 1e3, 1),
        )


class _ObservedAnswer:
    """Observes one answer while it is sent; `status` is 0 until it has started."""

    def __init__(self, gate: Gate, scope: Scope, send: Send) -> None:
        self.status = 0
        self._gate = gate
        self._scope = scope
        self._send = send
        self._sent = 0
        self._started = time.perf_counter()
        self._is_noted = False
        self._is_reported = False

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        self._sent += len(message.get("body", b"")) if self._scope["method"] != "HEAD" else 0
        if message["type"] == "http.response.start":
            self.status = message["status"]
            await self._note()  # before the client can see the change
            self._gate.add_headers(self._scope, message)
        elif not message.get("more_body", False):
            self._report()  # before the client has the whole answer and can read the metrics
        await self._send(message)

    async def end(self) -> None:
        """Log the answer even if it was never sent, since the change may have been made."""
        await self._note()
        self._report()

    async def _note(self) -> None:
        if not self._is_noted:
            self._is_noted = True
            await self._gate.note(self._scope, self.status)

    def _report(self) -> None:
        if not self._is_reported:
            self._is_reported = True
            seconds = time.perf_counter() - self._started
            self._gate.report(self._scope, self.status, self._sent, seconds)


def bounds_of(settings: Settings) -> Bounds:
    """The limits of request bodies."""
    return Bounds(settings.max_upload_bytes, settings.max_batch_bytes)


def open_rates(settings: Settings) -> RateLimits:
    """The rate limits of the settings and of unknown keys, counted in Redis if it is configured."""
    rates = {
        "key": settings.rate_limit_per_key,
        "address": settings.rate_limit_per_address,
        "failure": _FAILURES,
        "refusal": _REFUSALS,
    }
    if settings.redis_url is None:
        return RateLimits(rates)
    shared = SharedCounts(
        settings.redis_url.get_secret_value(),
        timeout_s=settings.redis_timeout_ms / 1e3,
        retry_s=settings.redis_retry_ms / 1e3,
        connections=settings.redis_connections,
    )
    return RateLimits(rates, shared)


def _refuse_beyond(key: keys.Key, extent: Extent) -> None:
    """Raises: AccessError if the binding of a key does not cover the extent of a route."""
    binding = key.binding()
    if extent == "service" and binding.is_bound:
        raise AccessError(
            f"The key {key.name} is bound to some galleries, but this affects the whole service. "
            "Send a key that was created without --gallery."
        )
    if extent == "galleries" and binding.where is not None:
        raise AccessError(
            f"The key {key.name} has a filter, but this affects all items of a gallery. Send a "
            "key that was created without --filter."
        )


def _is_change(scope: Scope) -> bool:
    """Whether a request is written to the audit log."""
    route: ServedRoute | None = scope["state"]["route"]
    return (
        route is not None and route.method not in _READ and route.rule.scope in ("write", "admin")
    )


def _path_parameters(scope: Scope) -> dict[str, str]:
    path = scope["state"]["route"].pattern.match(scope["path"])
    return path.groupdict() if path else {}


def _is_of_gallery(route: ServedRoute) -> bool:
    return route.template.startswith("/galleries/{name}")


def _is_probe(scope: Scope) -> bool:
    return scope["method"] in _READ and scope["path"] in _PROBES


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"{_IDS.getrandbits(128):032x}"


def _sent_key(scope: Scope) -> str | None:
    """The key of a request, None without a key, or "" (invalid) for two different keys.

    An `Authorization` header of another scheme is ignored: it may be meant for a proxy.
    """
    headers = Headers(scope=scope)
    bearers = [h for h in headers.getlist("authorization") if h.lower().startswith(_BEARER)]
    sent = {h[len(_BEARER) :].strip() for h in bearers}
    sent |= {h.strip() for h in headers.getlist(KEY_HEADER)}
    if not sent:
        return None
    return sent.pop() if len(sent) == 1 else ""


def _refuse_foreign_page(scope: Scope, origins: frozenset[str]) -> None:
    """Refuse cross-site requests (CSRF): without a key, any web page could send a change.

    Raises: AccessError.
    """
    headers = Headers(scope=scope)
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin in origins or ANY_HOST in origins or site in ("same-origin", "none"):
        return
    is_own = _netloc(origin) == headers.get("host", "").lower() if origin else site is None
    if not is_own:
        page = "another site" if origin is None else repr(origin[:_SHOWN_CHARACTERS])
        raise AccessError(
            f"A page of {page} must not change anything here without an API key. Send a key, or "
            "add the origin to KINLENS_CORS_ORIGINS."
        )


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # such as http://[
        return None
