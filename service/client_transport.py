"""Sends calls over HTTP, again where that is safe; in a thread or in an event loop."""

from asyncio import sleep as async_sleep
from collections.abc import Callable
from time import sleep
from typing import Any, Self, TypeVar

import httpx

from service.client_call import Call, retry_after_s
from service.client_errors import ArgumentError, ConnectionFailedError

T = TypeVar("T")
C = TypeVar("C", httpx.Client, httpx.AsyncClient)

_AGAIN = frozenset({429, 503})
_MAX_WAIT_S = 30.0
_FIRST_WAIT_S = 0.25


class _Settings:
    """What both clients take: where the service is, the key, and how patient to be."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 2,
        transport: Any = None,
    ) -> None:
        """`key` is sent with every request. A call that takes longer than `timeout_s` at any step
        fails. An idempotent call that meets a busy service (429, 503), or no service, is sent again
        `retries` times, after the time that the service asks for. `transport` is one of httpx.
        """
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._retries = max(retries, 0)
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "timeout": timeout_s,
            "transport": transport,
        }

    def _wait_s(
        self, call: Call[T], attempt: int, response: httpx.Response | None = None
    ) -> float | None:
        """How long to wait until the next attempt; None if this was the last."""
        if not call.idempotent or attempt >= self._retries:
            return None
        asked = None
        if response is not None:
            if response.status_code not in _AGAIN or response.status_code in call.accepted:
                return None
            asked = retry_after_s(response)
        waiting = _FIRST_WAIT_S * 2**attempt if asked is None else asked
        return min(waiting, _MAX_WAIT_S)


class Sender(_Settings):
    """Sends calls and waits for their answers; a context manager that closes its connections."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._http = _opened(httpx.Client, self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, call: Call[T]) -> T:
        for attempt in range(self._retries + 1):
            response = None
            try:
                response = self._http.send(_request(self._http, call))
            except httpx.RequestError as error:
                failure = error
            wait_s = self._wait_s(call, attempt, response)
            if wait_s is None:
                break
            sleep(wait_s)
        if response is None:
            raise _failed(call, failure) from failure
        return call.answer(response)


class AsyncSender(_Settings):
    """As `Sender`, in an event loop."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._http = _opened(httpx.AsyncClient, self._options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, call: Call[T]) -> T:
        for attempt in range(self._retries + 1):
            response = None
            try:
                response = await self._http.send(_request(self._http, call))
            except httpx.RequestError as error:
                failure = error
            wait_s = self._wait_s(call, attempt, response)
            if wait_s is None:
                break
            await async_sleep(wait_s)
        if response is None:
            raise _failed(call, failure) from failure
        return call.answer(response)


def _opened(kind: Callable[..., C], options: dict[str, Any]) -> C:
    try:
        return kind(**options)
    except httpx.InvalidURL as error:
        raise ArgumentError(f"url = {options['base_url']!r} is no address: {error}.") from error
    except UnicodeError:  # not told as the cause, which shows a part of the key
        raise ArgumentError("The key has characters that no key has; copy it again.") from None


def _request(http: httpx.Client | httpx.AsyncClient, call: Call[T]) -> httpx.Request:
    try:
        return http.build_request(call.method, call.path, **call.options())
    except (httpx.InvalidURL, UnicodeError, TypeError) as error:
        raise ArgumentError(f"{call.method} {call.path} cannot be sent: {error}.") from error


def _failed(call: Call[T], error: httpx.RequestError) -> ConnectionFailedError:
    reason = str(error) or type(error).__name__
    return ConnectionFailedError(
        f"{call.method} {call.path} got no answer: {reason}. Is the service running at this "
        "address, and is the timeout long enough?"
    )
