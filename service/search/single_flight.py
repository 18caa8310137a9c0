"""Single flight: equal work asked for at the same time is done once."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Callers of the same key share one task, which is cancelled when the last of them leaves."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    async def run(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `start()`, or of the call for `key` that is under way."""
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.create_task(start()))
            self._flights[key] = flight
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.task.done() or not flight.waiters:
                self._end(key, flight)

    def _end(self, key: str, flight: _Flight[T]) -> None:
        flight.task.cancel()
        if self._flights.get(key) is flight:
            del self._flights[key]
