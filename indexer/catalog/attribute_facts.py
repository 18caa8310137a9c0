"""How the values of attributes are spread: what a page of filters is made of."""

from dataclasses import dataclass

from embedder.types import AttributeValue
from indexer.catalog.attributes import AttributeKind
from indexer.catalog.read import CatalogView

MAX_VALUES = 50
"""Values of an attribute that are counted, the most frequent first."""


@dataclass(frozen=True, slots=True)
class AttributeFacts:
    """One attribute. `values` are the most frequent ones with their numbers of items; None for
    numbers of which there are too many to choose from. `minimum` and `maximum` are of numbers.
    """

    name: str
    kind: AttributeKind
    values: tuple[tuple[AttributeValue, int], ...] | None
    minimum: float | None = None
    maximum: float | None = None


def attribute_facts(view: CatalogView) -> tuple[AttributeFacts, ...]:
    """Every attribute that was ever used, by name."""
    return tuple(_facts(view, name, kind) for name, kind in view.schema().items())


def _facts(view: CatalogView, name: str, kind: AttributeKind) -> AttributeFacts:
    if kind != "number":
        return AttributeFacts(name, kind, view.frequent_values(name, MAX_VALUES))
    minimum, maximum = view.range_of(name)
    few = view.has_few_values(name, MAX_VALUES)
    values = view.frequent_values(name, MAX_VALUES) if few else None
    return AttributeFacts(name, kind, values, minimum, maximum)
