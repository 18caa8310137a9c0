"""Filters: conditions on attributes, joined by and, or and not.

A condition on a missing attribute is false, and its negation is true. If an attribute has several
values, one match is enough. A boolean never equals a number. Texts are compared by code points.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from kinlens.embedder.errors import FilterError
from kinlens.embedder.sources.names import composed
from kinlens.indexer.entries import Schema, check_name, checked_type, type_of
from kinlens.values import AttributeType, AttributeValue, Scalar

T = TypeVar("T")

MAX_DEPTH = 64
MAX_CONDITIONS = 1000
MAX_VALUES = 10_000
_SHOWN = 20
LIMITS = {"<": "below", "<=": "at_most", ">": "above", ">=": "at_least"}
"""The limits of a range by sign, in filters as text and as JSON."""

SIGNS = {limit: sign for sign, limit in LIMITS.items()}
_ABOVE: Mapping[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def located(place: str, make: Callable[[], T]) -> T:
    """The result of `make`, whose errors name this place in a filter. Raises: FilterError."""
    try:
        return make()
    except FilterError as error:
        raise FilterError(f"{error} (at {place})") from error


class _Size(NamedTuple):
    """The size of a filter: nesting depth, number of conditions, and number of values."""

    depth: int
    conditions: int
    values: int


class _Condition:
    """A condition on one attribute, which must have the type `value_type`."""

    __slots__ = ()
    name: str
    value_type: AttributeType

    def check(self, schema: Schema) -> None:
        """Check name and type. Raises: FilterError if the attribute is unknown or differs."""
        type_ = schema.get(self.name)
        if type_ is None:
            raise FilterError(f"There is no attribute {self.name!r}. {_known(schema)}")
        if type_ != self.value_type:
            raise FilterError(
                f"Attribute {self.name!r} is a {type_}, but {self._shown()} is a "
                f"{self.value_type}. Compare it with a {type_}, or "
                f"build with the column {self.name}:{self.value_type}."
            )

    def matches(self, attributes: Mapping[str, AttributeValue]) -> bool:
        """Whether an item with these attributes matches."""
        value = attributes.get(self.name)
        if isinstance(value, tuple):
            return any(self._fits(one) for one in value)
        return value is not None and self._fits(value)

    def _fits(self, value: Scalar) -> bool:
        raise NotImplementedError

    def _shown(self) -> str:
        raise NotImplementedError

    def _set_type(self, values: tuple[Scalar, ...]) -> None:
        """Set `value_type`. Raises: FilterError for an invalid name or value, or mixed types."""
        try:
            check_name(self.name)
            types = [checked_type(value) for value in values]
        except ValueError as error:
            raise FilterError(f"A filter cannot use this: {error}.") from error
        for type_, value in zip(types, values, strict=True):
            if type_ != types[0]:
                raise FilterError(
                    f"Attribute {self.name!r} is compared with {values[0]!r:.80}, a {types[0]}, "
                    f"and with {value!r:.80}, a {type_}. Use values of one type."
                )
        object.__setattr__(self, "value_type", types[0])


@dataclass(frozen=True, slots=True)
class Equals(_Condition):
    """The attribute has this value."""

    name: str
    value: Scalar
    # Part of equality, so that true and 1 are different filters.
    value_type: AttributeType = field(init=False, repr=False)
    size: ClassVar = _Size(1, 1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _composed(self.value))
        self._set_type((self.value,))

    def _fits(self, value: Scalar) -> bool:
        return _composed(value) == self.value and type_of(value) == self.value_type

    def _shown(self) -> str:
        return f"{self.value!r:.80}"


@dataclass(frozen=True, slots=True)
class In(_Condition):
    """The attribute has one of these values, which must be of one type."""

    name: str
    values: tuple[Scalar, ...]
    value_type: AttributeType = field(init=False, repr=False)
    size: _Size = field(init=False, repr=False, compare=False)
    _set: frozenset[Scalar] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.values:
            raise FilterError(
                f"{self.name!r:.160} in () matches no item. Give at least one value, or omit it."
            )
        object.__setattr__(self, "values", tuple(map(_composed, self.values)))
        size = _checked_size(_Size(1, 1, len(self.values)))
        self._set_type(self.values)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "_set", frozenset(self.values))

    def _fits(self, value: Scalar) -> bool:
        return _composed(value) in self._set and type_of(value) == self.value_type

    def _shown(self) -> str:
        return f"{self.values[0]!r:.80}"


@dataclass(frozen=True, slots=True)
class Range(_Condition):
    """The attribute, a number or a text, is between these limits; None means no limit."""

    name: str
    at_least: Scalar | None = None
    above: Scalar | None = None
    at_most: Scalar | None = None
    below: Scalar | None = None
    value_type: AttributeType = field(init=False, repr=False)
    size: ClassVar = _Size(1, 1, 2)

    def __post_init__(self) -> None:
        for name in _ABOVE:
            object.__setattr__(self, name, _composed(getattr(self, name)))
        limits = tuple(value for _, value in self.limits)
        both = {"at_least", "above"}, {"at_most", "below"}
        given = {limit for limit, _ in self.limits}
        if not limits or any(pair <= given for pair in both):
            raise FilterError(
                f"The range of {self.name!r:.160} has {len(limits)} limits. Give one lower limit, "
                "one upper limit, or one of each."
            )
        self._set_type(limits)
        if self.value_type == "boolean":
            raise FilterError(
                f"Attribute {self.name!r} is compared by order with {limits[0]!r}. Compare true "
                "and false only with =."
            )

    @property
    def limits(self) -> list[tuple[str, Scalar]]:
        """The limits that are set, by the names of their fields."""
        values = (self.at_least, self.above, self.at_most, self.below)
        return [(n, v) for n, v in zip(_ABOVE, values, strict=True) if v is not None]

    def _fits(self, value: Scalar) -> bool:
        if type_of(value) != self.value_type:
            return False
        return all(_ABOVE[name](value, limit) for name, limit in self.limits)

    def _shown(self) -> str:
        return f"{self.limits[0][1]!r:.80}"


@dataclass(frozen=True, slots=True)
class StartsWith(_Condition):
    """The attribute, a text, starts with this text."""

    name: str
    start: str
    value_type: AttributeType = field(init=False, repr=False)
    size: ClassVar = _Size(1, 1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", _composed(self.start))
        self._set_type((self.start,))
        if self.value_type != "text":
            raise FilterError(
                f"{self.name!r:.160} starts with {self.start!r:.80}: the value must be a text."
            )

    def _fits(self, value: Scalar) -> bool:
        return isinstance(value, str) and composed(value).startswith(self.start)

    def _shown(self) -> str:
        return f"{self.start!r:.80}"


@dataclass(frozen=True, slots=True)
class Exists:
    """The item has the attribute."""

    name: str
    size: ClassVar = _Size(1, 1, 0)

    def __post_init__(self) -> None:
        try:
            check_name(self.name)
        except ValueError as error:
            raise FilterError(f"A filter cannot use this: {error}.") from error

    def check(self, schema: Schema) -> None:
        """Check the name. Raises: FilterError if the attribute is unknown."""
        check_attribute(self.name, schema, "look for")

    def matches(self, attributes: Mapping[str, AttributeValue]) -> bool:
        """Whether an item with these attributes matches."""
        return self.name in attributes


@dataclass(frozen=True, slots=True)
class _Branch:
    """Several filters, at least two."""

    parts: "tuple[Filter, ...]"
    size: _Size = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise FilterError(
                f"{type(self).__name__} has {len(self.parts)} parts. Join at least two filters."
            )
        object.__setattr__(self, "size", _joined(*(part.size for part in self.parts)))

    def check(self, schema: Schema) -> None:
        """Check all parts. Raises: FilterError if an attribute is unknown or of another type."""
        for part in self.parts:
            part.check(schema)


class And(_Branch):
    """All parts match."""

    __slots__ = ()

    def matches(self, attributes: Mapping[str, AttributeValue]) -> bool:
        """Whether an item with these attributes matches."""
        return all(part.matches(attributes) for part in self.parts)


class Or(_Branch):
    """At least one part matches."""

    __slots__ = ()

    def matches(self, attributes: Mapping[str, AttributeValue]) -> bool:
        """Whether an item with these attributes matches."""
        return any(part.matches(attributes) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Not:
    """The part does not match. Also matches items without the attribute."""

    part: "Filter"
    size: _Size = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _joined(self.part.size))

    def check(self, schema: Schema) -> None:
        """Check the part. Raises: FilterError if an attribute is unknown or of another type."""
        self.part.check(schema)

    def matches(self, attributes: Mapping[str, AttributeValue]) -> bool:
        """Whether an item with these attributes matches."""
        return not self.part.matches(attributes)


Condition = Equals | In | Range | StartsWith | Exists
"""A filter on one attribute."""

Filter = Condition | And | Or | Not
"""A filter of items. Immutable; equal filters have equal hashes."""


def check_attribute(name: object, schema: Schema, purpose: str) -> None:
    """Check that an attribute is known; `purpose` is for the message, such as "sort by".

    Raises: FilterError if no item ever had it.
    """
    if name not in schema:
        raise FilterError(f"There is no attribute {name!r:.160} to {purpose}. {_known(schema)}")


def check_boosted(name: object, schema: Schema) -> None:
    """Check the attribute of a boost. Raises: FilterError if it is not a number."""
    numeric = {known: type_ for known, type_ in schema.items() if type_ == "number"}
    if name not in numeric:
        known = _known(numeric) if numeric else "No attribute of this gallery is a number."
        raise FilterError(f"There is no numeric attribute {name!r:.160} to boost by. {known}")


def _composed(value: Any) -> Any:
    """A text in the composed Unicode form, in which texts are stored; other values as they are."""
    return composed(value) if isinstance(value, str) else value


def _joined(*sizes: _Size) -> _Size:
    depths, conditions, values = zip(*sizes, strict=True)
    return _checked_size(_Size(1 + max(depths), sum(conditions), sum(values)))


def _checked_size(size: _Size) -> _Size:
    limits = (
        (MAX_DEPTH, "levels of and, or, not"),
        (MAX_CONDITIONS, "conditions"),
        (MAX_VALUES, "values"),
    )
    for number, (limit, unit) in zip(size, limits, strict=True):
        if number > limit:
            raise FilterError(
                f"The filter has {number:,} {unit}, the limit is {limit:,}. Split it into several "
                "searches, or add one attribute to the items for this selection."
            )
    return size


def _known(schema: Schema) -> str:
    if not schema:
        return "No item of this gallery has attributes."
    names = sorted(schema)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"Known are {', '.join(repr(name) for name in names[:_SHOWN])}{more}."
