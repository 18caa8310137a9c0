"""Generations of galleries that could not be opened, and when each is tried again."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from service.galleries.locations import Place

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Failure:
    generation: str | None
    verdict: str
    pause_s: float
    retry_at: float


class Failures:
    """What could not be opened; each is tried again after a pause that doubles."""

    def __init__(self, on_failure: Callable[[str], None] = lambda _: None) -> None:
        """`on_failure` is called with the name of the gallery, each time."""
        self._on_failure = on_failure
        self._failures: dict[str, _Failure] = {}

    def verdicts(self) -> dict[str, str]:
        """What is wrong, by the name of the gallery; nothing of the inside of the service."""
        return {name: failure.verdict for name, failure in self._failures.items()}

    def is_waiting(self, place: Place) -> bool:
        """Whether this generation failed so lately that it is not tried again yet."""
        failure = self._failures.get(place.name)
        if failure is None or failure.generation != place.generation:
            return False
        return time.monotonic() < failure.retry_at

    def add(self, place: Place, error: Exception) -> None:
        """Remember, count and log that a generation could not be opened."""
        last = self._failures.get(place.name)
        is_again = last is not None and last.generation == place.generation
        pause_s = min(2 * last.pause_s, _LONGEST_PAUSE_S) if last and is_again else _FIRST_PAUSE_S
        verdict = f"generation {place.generation or 'none'} failed with {type(error).__name__}"
        self._failures[place.name] = _Failure(
            place.generation, verdict, pause_s, time.monotonic() + pause_s
        )
        self._on_failure(place.name)
        structlog.get_logger().error(
            "gallery not reloaded", gallery=place.name, generation=place.generation, exc_info=error
        )

    def keep(self, names: Collection[str]) -> None:
        """Forget the galleries that are gone."""
        self._failures = {n: failure for n, failure in self._failures.items() if n in names}

    def clear(self, name: str) -> None:
        """A gallery is well again."""
        self._failures.pop(name, None)
