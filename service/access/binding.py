"""What the caller of a request may see: some galleries, and of these the items that fit a filter.

    gate: key ─► Binding ─► context of the request ─► registry: which gallery, and which view of it

The gate sets the binding once for each request. The registry reads it whenever it gives out a
gallery, so that a route cannot forget it. Work that no request asked for has no binding.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from kinlens.indexer.filters.tree import Filter


@dataclass(frozen=True, slots=True)
class Binding:
    """What the key called `key` is bound to.

    galleries: their names; None for all that the service has.
    where: only items that fit; None for all. `text` is the same filter as it was given.
    """

    key: str = ""
    galleries: tuple[str, ...] | None = None
    where: Filter | None = None
    text: str = ""

    @property
    def is_bound(self) -> bool:
        """Whether anything of the service is out of its reach."""
        return self.galleries is not None

    def permits(self, *names: str) -> bool:
        """Whether all these galleries may be known to the caller."""
        return self.galleries is None or all(name in self.galleries for name in names)


EVERYTHING = Binding()
"""That of callers without a key, of keys that are not bound, and of work in the background."""

_OF_CALLER: ContextVar[Binding] = ContextVar("kinlens_binding", default=EVERYTHING)


def of_caller() -> Binding:
    """The binding of the request that this code works for."""
    return _OF_CALLER.get()


@contextlib.contextmanager
def calling(binding: Binding) -> Iterator[None]:
    """Work for a caller with this binding inside the block, also in tasks and pools it starts."""
    before = _OF_CALLER.set(binding)
    try:
        yield
    finally:
        _OF_CALLER.reset(before)
