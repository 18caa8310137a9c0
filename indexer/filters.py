"""Filters by attributes: the classes, and their two written forms, text and JSON."""

from indexer.attributes import AttributeKind, Schema, kind_of
from indexer.filter_json import filter_from_json
from indexer.filter_text import filter_to_text, parse_filter
from indexer.filter_tree import And, Condition, Equals, Filter, In, Not, Or, Range

__all__ = [
    "And",
    "AttributeKind",
    "Condition",
    "Equals",
    "Filter",
    "In",
    "Not",
    "Or",
    "Range",
    "Schema",
    "filter_from_json",
    "filter_to_text",
    "kind_of",
    "parse_filter",
]
