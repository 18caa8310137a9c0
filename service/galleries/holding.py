"""Who uses a gallery: it is closed when it was replaced and the last call in it has ended."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from embedder.errors import GalleryError
from service.galleries.types import Gallery


class Holding:
    """Counts users; `on_end` is called once, when it has been retired and nobody is left."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._users = 0
        self._is_retired = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Be a user for a while. Raises: GalleryError after the end."""
        with self._lock:
            if self._is_retired and not self._users:
                raise GalleryError("The gallery was replaced meanwhile. Send the request again.")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                is_last = self._is_retired and not self._users
            if is_last:
                self._on_end()

    def retire(self) -> None:
        """There will be no new users."""
        with self._lock:
            is_first, self._is_retired = not self._is_retired, True
            is_last = is_first and not self._users
        if is_last:
            self._on_end()


class _HeldGallery:
    """A gallery each of whose calls is a user, also one that nobody waits for any more."""

    def __init__(self, gallery: Gallery, holding: Holding) -> None:
        self._gallery = gallery
        self._holding = holding

    def __getattr__(self, name: str) -> Any:
        with self._holding.use():
            value = getattr(self._gallery, name)
        return functools.partial(self._call, value) if callable(value) else value

    def _call(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._holding.use():
            result = work(*arguments, **options)
        return self._each(result) if isinstance(result, Iterator) else result

    def _each(self, values: Iterator[Any]) -> Iterator[Any]:
        with self._holding.use():
            yield from values


def held(gallery: Gallery, holding: Holding) -> Gallery:
    """The same gallery, which stays open at least as long as a call in it runs."""
    return cast(Gallery, _HeldGallery(gallery, holding))
