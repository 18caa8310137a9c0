"""The rule of each route, and how its callers are admitted before their bodies are read.

    router ─► Route ─► key, scope, binding ─► rate ─► body, function ─► audit log
    404, 405                401, 403           429

A route has the rule that its function declares with `rule`. A route without a rule cannot be made,
and an app with another kind of route does not start. The binding of the key is set for the request,
and the registry of galleries enforces it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

import structlog
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from kinlens import models
from kinlens.embedder import errors
from kinlens.embedder.errors import AccessError, KeyMissingError, KinlensError, StateError
from kinlens.service.access import keys, links
from kinlens.service.access.audit import AuditLog, warn
from kinlens.service.access.keys import CALLER, EVERYTHING, FreshKeys, KeyStore
from kinlens.service.access.rates import Account, RateLimits, parse_rates
from kinlens.service.concurrency import BoundedPool
from kinlens.service.http.bodies import BodyKind
from kinlens.service.problems import CLIENT_DISCONNECTED, RefusedError, from_error
from kinlens.service.redis import SharedRedis
from kinlens.service.settings import ANY_HOST, Settings

Extent = Literal["none", "items", "galleries", "service"]
"""The part of the service that a route is about.

- none: no gallery; bindings of keys do not matter.
- items: items that the filter of a key can exclude.
- galleries: whole galleries; keys with a filter are refused.
- service: more than some galleries; all bound keys are refused.
"""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

ANONYMOUS = "anonymous"
KEY_HEADER = "X-API-Key"

_FAILURES = "30/minute"
# Limits the refusals of all callers in the audit log: at this rate it takes months until they push
# out the changes. Keys of shop fronts are public, so anybody can cause refusals.
_REFUSALS = "120/hour"
_EVERYBODY = "everybody"
_AUDIT_S = 2.0
_WATCH_AFTER_S = 0.1
_UNWRITTEN = 1_000
_UNREADABLE_TEXT = (
    "The file of API keys cannot be read, so no key is accepted. The service log shows the cause."
)
_BEARER = b"bearer "
_KEY_HEADER = KEY_HEADER.lower().encode()
_SHOWN_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Rule:
    """The requirements of a route; a decorator declares them for its function.

    Attributes:
        scope: None is public.
        stores: whether it stores data although the scope `search` is enough.
        is_counted: whether its requests are charged to a rate.
        docs: makes what the OpenAPI of its operation has in addition, when it is asked for.
    """

    scope: models.Scope | None
    extent: Extent
    body: BodyKind = "plain"
    stores: bool = field(default=False, kw_only=True)
    is_counted: bool = field(default=True, kw_only=True)
    docs: Callable[[], dict[str, Any]] | None = field(default=None, kw_only=True)

    def __call__(self, function: F) -> F:
        """Declare this rule for the route that is made from `function`."""
        vars(function)["rule"] = self
        return function


rule = Rule


class Route(APIRoute):
    """A route that admits its callers by the rule of its function.

    Raises: LookupError if the function has no rule.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if "rule" not in vars(endpoint):
            raise LookupError(
                f"The route {path} has no rule. Declare one with @rule(scope, extent)."
            )
        self.rule: Rule = vars(endpoint)["rule"]
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Handler:
        """The function of the route behind its rule."""
        handler = self.function()
        is_change = self.rule.scope in ("write", "admin") and self.methods != {"GET"}

        async def admit(request: Request) -> Response:
            admission: Admission = request.app.state.admission
            state = request.scope["state"]
            state["route"], state["read_at"] = self, asyncio.get_running_loop().time()
            status = 0
            try:
                answer = await self._answer(admission, handler, request)
                status = answer.status_code
            finally:
                if is_change:  # even if the client has left, since the change may have been made
                    await admission.note(request, self, status)
            return answer

        return admit

    def function(self) -> Handler:
        """The function with the parsing of its parameters."""
        return super().get_route_handler()

    async def _answer(self, admission: "Admission", handler: Handler, request: Request) -> Response:
        """The answer to a request, also to one that failed: an error that leaves the route would
        get no headers for other origins, so a page would see a network error.
        """
        try:
            key = await admission.admit(request, self.rule)
            # Also without a key: a server may start a request in the context of another.
            CALLER.set(EVERYTHING if key is None else key.binding())
            if admission.signs:
                links.SIGNER.set(key)
            return await handler(request)
        except Exception as error:
            return await from_error(request, error)


class RequestRoute(Route):
    """A route whose function only takes the request, without FastAPI's handling of parameters and
    of what these leave open.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        handler = self.get_route_handler()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            answer = await handler(Request(scope, receive, send))
            await answer(scope, receive, send)

        self.app = app

    def function(self) -> Handler:
        """The function itself."""
        return cast("Handler", self.endpoint)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, for a request whose body was read; cancel it if the client disconnects.

    Raises: RefusedError, any error of `work`.
    """
    working = asyncio.current_task()
    assert working is not None
    watching: asyncio.Task[None] | None = None
    is_disconnected = False

    async def watch() -> None:
        nonlocal is_disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        working.cancel()

    def begin() -> None:
        nonlocal watching
        watching = asyncio.create_task(watch())

    # A task costs more than most answers from the cache.
    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if is_disconnected and not working.uncancel():
            raise RefusedError(
                CLIENT_DISCONNECTED, "The client disconnected before its answer."
            ) from None
        raise
    finally:
        timer.cancel()
        if watching is not None:
            watching.cancel()


def check_rules(routes: Sequence[BaseRoute]) -> None:
    """Raises: LookupError for a route without a rule, which would be open to everybody."""
    if others := [route for route in routes if not isinstance(route, Route)]:
        raise LookupError(f"{others[0]} has no rule; make it with the class {Route.__name__}.")


class Admission:
    """Admits a request if the scopes of its caller and its rate allow it.

    - A caller without a key has the anonymous scopes of the settings.
    - `signs` is whether image links are signed for the key of the caller.
    - `scope["state"]` gets the `account`, and with a key the `key` and its name as `principal`.
    """

    def __init__(
        self,
        settings: Settings,
        store: KeyStore | None,
        audit: AuditLog | None,
        redis: SharedRedis | None,
    ) -> None:
        self._keys = None if store is None else FreshKeys(store)
        self._rates = RateLimits({"failure": _FAILURES, "refusal": _REFUSALS}, redis)
        self._per_key = settings.rate_limit_per_key
        self._per_address = parse_rates(settings.rate_limit_per_address)
        self._audit = audit
        self._writers = BoundedPool("audit", 1, _UNWRITTEN)
        self.signs = settings.image_links == "signed"
        self._anonymous = keys.allowed(settings.anonymous_scopes)
        self._origins = frozenset(settings.cors_origins)

    async def admit(self, request: Request, rule: Rule) -> keys.Key | None:
        """The key of the caller; None without one. Raises: KinlensError for a refusal."""
        scope = request.scope
        try:
            if rule.scope is not None:
                await self._authorize(request, rule, rule.scope)
            elif rule.extent != "none":
                await self._recognize(scope, rule)
        except StateError as error:
            structlog.get_logger().error("keys cannot be read", detail=str(error))
            raise errors.KeysUnreadableError(_UNREADABLE_TEXT) from error
        if rule.scope is not None and rule.is_counted:
            await self._count(scope)
        key: keys.Key | None = scope["state"].get("key")
        return key

    async def unmatched(self, request: Request, error: Exception) -> Response:
        """The answer to a path or method without a route, which is counted like a search."""
        assert isinstance(error, HTTPException)
        path, status = request.url.path, error.status_code
        try:
            await self._count(request.scope)
        except KinlensError as refusal:
            return await from_error(request, refusal)
        if status == HTTPStatus.NOT_FOUND:
            error = HTTPException(status, f"{path} does not exist. /openapi.json lists the paths.")
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            if isinstance(route := request.scope.get("route"), Route):
                request.scope["state"]["route"] = route  # for the log and the metrics
            methods = ", ".join(sorted(_methods_at(request)))
            text = f"{request.method} is not allowed here; use {methods}."
            error = HTTPException(status, text, {"Allow": methods})
        return await from_error(request, error)

    async def note(self, request: Request, route: Route, status: int) -> None:
        """Write a change to the audit log, unless it was refused with a 4xx other than 403."""
        if self._audit is None or (400 <= status < 500 and status != HTTPStatus.FORBIDDEN):
            return
        if status == HTTPStatus.FORBIDDEN:
            verdict = await self._rates.hit("refusal", _EVERYBODY)
            if not verdict.allowed:
                return
        state, key = request.scope["state"], request.scope["state"].get("key")
        is_of_gallery = route.path.startswith("/galleries/{name}")
        named = {"gallery": request.path_params["name"]} if is_of_gallery else {}
        change = models.Change(
            action=f"{request.method} {route.path}",
            by=state.get("principal", ANONYMOUS),
            status=status,
            key_id=None if key is None else key.id,
            client=state["address"],
            request_id=state["request_id"],
            **named | state.get("change", {}),
        )
        writing = asyncio.ensure_future(self._writers.run(partial(self._audit.add, change)))
        try:
            async with asyncio.timeout(_AUDIT_S):
                await asyncio.shield(writing)
        except errors.OverloadedError:
            warn(change, f"{_UNWRITTEN:,} changes wait to be written")
        except TimeoutError:  # the thread continues
            structlog.get_logger().warning("audit log is slow", limit_s=_AUDIT_S)

    async def _authorize(self, request: Request, rule: Rule, needed: models.Scope) -> None:
        scope = request.scope
        text = _sent_key(scope)
        if text is None and self.signs and (link := _signed_link(scope)) is not None:
            signer = None if self._keys is None else await self._keys.by_id(link["signed_by"])
            signed_by = links.check(signer, request.path_params, link)
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
        scope["state"] |= {"principal": key.name, "key": key}
        if needed not in keys.allowed(key.scopes):
            raise errors.ScopeError(
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
            scope["state"] |= {"principal": key.name, "key": key}

    async def _created(self, scope: Scope, text: str) -> keys.Key:
        """The key, if it was created after the last read of the file.

        Reading the file is costly, so every attempt is rate-limited, including those with new keys.
        """
        verdict = await self._rates.hit("failure", scope["state"]["address"])
        if not verdict.allowed:
            raise errors.RateLimitedError(
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
            address = scope["state"]["address"]
            account = Account(self._rates, "address", address, self._per_address)
        else:
            account = Account(self._rates, "key", key.id, key.rates(self._per_key))
        scope["state"]["account"] = account
        if account.rates:
            await account.open()
        else:
            account.units = 1


def _methods_at(request: Request) -> set[str]:
    """The methods of the routes at the path of a request: those with the fewest parameters, since a
    fixed word also matches a parameter.
    """
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    at = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    fewest = min(route.path.count("{") for route in at)
    methods = {m for route in at if route.path.count("{") == fewest for m in route.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods


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


def _signed_link(scope: Scope) -> dict[str, str] | None:
    """The query of a signed image link, or None for any other request."""
    if not scope["state"]["route"].path.endswith(links.IMAGE_OF_ITEM):
        return None
    query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
    return query if "signed_by" in query else None


def _sent_key(scope: Scope) -> str | None:
    """The key of a request, None without a key, or "" (invalid) for two different keys.

    An `Authorization` header of another scheme is ignored: it may be meant for a proxy.
    """
    sent: set[str] = set()
    for name, value in scope["headers"]:
        if name == b"authorization" and value.lower().startswith(_BEARER):
            sent.add(value[len(_BEARER) :].decode("latin-1").strip())
        elif name == _KEY_HEADER:
            sent.add(value.decode("latin-1").strip())
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
