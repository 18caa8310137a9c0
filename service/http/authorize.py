"""Lets a request in if its caller has the scope that its address needs."""

from collections.abc import Iterable
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from embedder.errors import (
    AccessError,
    KeyMissingError,
    KeysUnreadableError,
    KinlensError,
    RateLimitedError,
    ScopeError,
    StateError,
)
from service.access import keys
from service.access.address import Addresses, remember_address
from service.access.keys import Key, KeyStore
from service.access.rates import RateLimits
from service.http import scopes as access
from service.http.refusal import refuse
from service.http.templates import Templates
from service.problems import from_kinlens

ANONYMOUS = "anonymous"
KEY_HEADER = "X-API-Key"

_UNREADABLE_TEXT = (
    "The file of API keys cannot be read, so no key is accepted. The log of the service says why."
)
_BEARER = "bearer "
_SHOWN_CHARACTERS = 64


class Authorize:
    """Finds out who calls, and refuses (401, 403) who may not.

    Without a key a caller has the scopes `anonymous`. `failures` limits how many wrong keys an
    address may try. What is not among the routes `served` passes, to be told that it is not there;
    a route without a rule needs `admin`. The name of the caller is left in
    `scope["state"]["principal"]`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: KeyStore | None,
        anonymous: Iterable[keys.Scope],
        addresses: Addresses,
        served: Templates,
        failures: RateLimits,
        drain_bytes: int,
        origins: Iterable[str] = (),
    ) -> None:
        self.app = app
        self._store = store
        self._anonymous = keys.allowed(anonymous)
        self._addresses = addresses
        self._served = served
        self._failures = failures
        self._drain_bytes = drain_bytes
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address = self._addresses.of(scope)
        remember_address(scope, address)
        scope["state"]["principal"] = ANONYMOUS
        answer = await self._refusal(scope, address)
        if answer is None:
            await self.app(scope, receive, send)
        else:
            await refuse(answer, scope, receive, send, drain_bytes=self._drain_bytes)

    async def _refusal(self, scope: Scope, address: str) -> Response | None:
        needed = self._needed(scope["method"], scope["path"])
        if needed is None:
            return None
        try:
            await self._check(scope, needed, address)
        except StateError as error:
            structlog.get_logger().error("keys cannot be read", detail=str(error))
            return await from_kinlens(Request(scope), KeysUnreadableError(_UNREADABLE_TEXT))
        except KinlensError as error:
            return await from_kinlens(Request(scope), error)
        return None

    def _needed(self, method: str, path: str) -> keys.Scope | None:
        if access.rule_of(method, path) is None and self._served.of(method, path) is None:
            return None
        return access.required_scope(method, path)

    async def _check(self, scope: Scope, needed: keys.Scope, address: str) -> None:
        text = sent_key(scope)
        if text is None:
            if needed not in self._anonymous:
                raise self._closed(needed)
            if needed != "search":
                _refuse_foreign_page(scope, self._origins)
            return
        key = None if self._store is None else self._store.identify(text)
        if key is None:
            await self._refuse_unknown(address)
        else:
            scope["state"]["principal"] = key.name
            scope["state"]["key_id"] = key.id
            _check_scope(key, needed)

    async def _refuse_unknown(self, address: str) -> None:
        verdict = await self._failures.hit("failure", address)
        if not verdict.allowed:
            raise RateLimitedError(
                f"Too many unknown API keys came from this address. Try again in "
                f"{verdict.retry_after_s} s.",
                verdict.retry_after_s,
            )
        raise KeyMissingError(
            "The API key is not known: it is mistyped, expired or revoked. Send a valid one as "
            "Authorization: Bearer KEY or X-API-Key: KEY."
        )

    def _closed(self, needed: keys.Scope) -> AccessError:
        if self._store is None:
            return AccessError(
                f"This needs the scope {needed}, and the service has no folder for keys. Start it "
                "with --state DIR and make a key with kinlens-serve keys create."
            )
        if self._store.active() == 0:
            return AccessError(
                f"This needs the scope {needed}, and no API key exists yet. Make one with "
                f"kinlens-serve keys create NAME --scope {needed}."
            )
        return KeyMissingError(
            f"This needs an API key with the scope {needed}. Send it as Authorization: Bearer KEY "
            "or X-API-Key: KEY."
        )


def sent_key(scope: Scope) -> str | None:
    """The key of a request, or None.

    An `Authorization` of another scheme is meant for somebody else. Two keys are no key.
    """
    headers = Headers(scope=scope)
    bearers = [h for h in headers.getlist("authorization") if h.lower().startswith(_BEARER)]
    sent = {h[len(_BEARER) :].strip() for h in bearers}
    sent |= {h.strip() for h in headers.getlist(KEY_HEADER)}
    if not sent:
        return None
    return sent.pop() if len(sent) == 1 else ""


def _refuse_foreign_page(scope: Scope, origins: frozenset[str]) -> None:
    """Where no key is needed for a change, any page in a browser could send one unnoticed."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or origin in origins:
        return
    if urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        raise AccessError(
            f"A page of {origin[:_SHOWN_CHARACTERS]!r} may not change anything here without an "
            "API key. Send one, or name the origin in KINLENS_CORS_ORIGINS."
        )


def _check_scope(key: Key, needed: keys.Scope) -> None:
    if needed not in keys.allowed(key.scopes):
        raise ScopeError(
            f"The key {key.name} has the scopes {', '.join(key.scopes)}; this needs {needed}. "
            f"Make another with kinlens-serve keys create NAME --scope {needed}."
        )
