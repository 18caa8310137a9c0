"""Bindings of API keys: the galleries and the items that the caller of a request can see.

    rule: key ─► Binding ─► context of the request ─► registry: which gallery, and which view of it

The admission sets the binding once per request. The registry applies it to every gallery lease, so
a route cannot forget it. Background work has no binding.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from kinlens.indexer.filters.tree import Filter


@dataclass(frozen=True, slots=True)
class Binding:
    """The galleries and items that the key named `key` can see.

    Attributes:
        galleries: names of galleries; None for all.
        where: the key only sees items that match this filter; None for all.
        text: the filter as text.
    """

    key: str = ""
    galleries: tuple[str, ...] | None = None
    where: Filter | None = None
    text: str = ""

    @property
    def is_bound(self) -> bool:
        """Whether the key is restricted at all."""
        return self.galleries is not None

    def permits(self, *names: str) -> bool:
        """Whether the caller can see all these galleries."""
        return self.galleries is None or all(name in self.galleries for name in names)


EVERYTHING = Binding()
"""The binding of callers without a key, of unbound keys and of background work."""

_OF_CALLER: ContextVar[Binding] = ContextVar("kinlens_binding", default=EVERYTHING)


def of_caller() -> Binding:
    """The binding of the current request."""
    return _OF_CALLER.get()


def set_caller(binding: Binding) -> None:
    """Apply this binding to the rest of this request, including the pool calls that it starts."""
    _OF_CALLER.set(binding)
