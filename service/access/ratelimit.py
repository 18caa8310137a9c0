"""Refuses callers that ask more often than their rate allows."""

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embedder.errors import RateLimitedError
from service.access.address import address_of
from service.access.rates import RateLimits, Verdict
from service.http import scopes as access
from service.http.refusal import refuse
from service.problems import from_kinlens

KEY = "key"
ADDRESS = "address"


class RateLimit:
    """Counts requests by their key, or by address if they have none; 429 above the rate.

    What is open to all, such as /live and the files of the page, is not counted.
    """

    def __init__(self, app: ASGIApp, *, rates: RateLimits, drain_bytes: int) -> None:
        self.app = app
        self._rates = rates
        self._drain_bytes = drain_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            await self.app(scope, receive, send)
            return
        key_id = scope["state"].get("key_id")
        kind, caller = (ADDRESS, address_of(scope)) if key_id is None else (KEY, str(key_id))
        verdict = await self._rates.hit(kind, caller)
        if verdict.amount is None:
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                _describe(verdict, MutableHeaders(scope=message))
            await send(message)

        if verdict.allowed:
            await self.app(scope, receive, send_with_headers)
            return
        answer = await from_kinlens(Request(scope), _too_many(kind, verdict))
        await refuse(answer, scope, receive, send_with_headers, drain_bytes=self._drain_bytes)


def _is_open(scope: Scope) -> bool:
    rule = access.rule_of(scope["method"], scope["path"])
    return rule is not None and rule.scope is None


def _describe(verdict: Verdict, headers: MutableHeaders) -> None:
    headers["RateLimit-Limit"] = str(verdict.amount)
    headers["RateLimit-Remaining"] = str(verdict.remaining)
    headers["RateLimit-Reset"] = str(verdict.retry_after_s)


def _too_many(kind: str, verdict: Verdict) -> RateLimitedError:
    return RateLimitedError(
        f"More requests came from this {kind} than its limit of {verdict.amount:,} allows. Try "
        f"again in {verdict.retry_after_s} s.",
        verdict.retry_after_s,
    )
