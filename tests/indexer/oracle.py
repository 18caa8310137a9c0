"""A random shop, and what a gallery of it should answer: numpy over all vectors."""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.types import Hit
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.tree import And, Equals, Exists, Filter, In, Not, Or, Range, StartsWith
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import Group, Grouping, SearchOptions
from kinlens.values import AttributeValue, values_in

BUNDLE = "b" * 64
DIM = 16
COLOURS = ("red", "blue", 'gr"een\\')


def units(count: int, seed: int = 0, dim: int = DIM) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clumped(count: int, dim: int = DIM, seed: int = 0) -> np.ndarray:
    """Some fifty vectors around each of many centres, (count, dim), in random order."""
    rng = np.random.default_rng(seed)
    centres = units(max(2, count // 50), 1, dim)
    rows = centres[rng.integers(0, len(centres), count)] + 0.15 * units(count, seed + 2, dim)
    rows += 0.05 * rng.standard_normal(rows.shape).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def bitmap(chosen: np.ndarray) -> np.ndarray:
    """A mask (N,) as a little-endian bitmap."""
    return np.packbits(chosen, bitorder="little")


def entry(
    key: str,
    vector: np.ndarray,
    attributes: Mapping[str, AttributeValue] | None = None,
    content: str | None = None,
) -> Entry:
    sha256 = hashlib.sha256((content or key).encode()).hexdigest()
    return Entry(key, vector, sha256, attributes or {}, path=f"{key}.png", format="PNG")


def shop(count: int = 120, seed: int = 0) -> list[Entry]:
    """Items with a few colours, products of some four items, and equal contents now and then."""
    draw = np.random.default_rng(seed + 1)
    entries: list[Entry] = []
    for n, vector in enumerate(units(count, seed)):
        attributes: dict[str, AttributeValue] = {}
        if n % 7:
            attributes["colour"] = COLOURS[int(draw.integers(3))]
        if n % 3:
            attributes["sku"] = f"sku{int(draw.integers(count // 4 + 1))}"
        if n % 5:
            price = int(draw.integers(-5, 15))
            attributes["price"] = price if n % 2 else price + 0.5
        if n % 4:
            attributes["sale"] = bool(draw.integers(2))
        entries.append(entry(f"key{n}", vector, attributes))
        if n % 10 == 9:  # a copy of an earlier item under another key
            entries[-1] = replace(entries[n // 2], key=f"key{n}")
    return entries


def random_filter(
    rng: random.Random, values: Mapping[str, Sequence[Any]], depth: int = 4
) -> Filter:
    """A filter on these attributes, each compared with values of its own."""
    kind = rng.choice([And, Or, Not, None]) if depth else None
    if kind is Not:
        return Not(random_filter(rng, values, depth - 1))
    if kind is not None:
        parts = (random_filter(rng, values, depth - 1) for _ in range(rng.randint(2, 3)))
        return kind(tuple(parts))
    name = rng.choice([*values])
    known = values[name]
    match rng.choice(["equals", "in", "range", "starts", "exists"]):
        case "exists":
            return Exists(name)
        case "starts" if isinstance(known[0], str):
            text = rng.choice(known)
            text = re.split(r"[%_\\]", text)[0]  # which Milvus does not take
            return StartsWith(name, text[: rng.randint(0, len(text))])
        case "in":
            return In(name, tuple(rng.choices(known, k=rng.randint(1, 4))))
        case "range" if not isinstance(known[0], bool):
            limits = {rng.choice(["at_least", "above"]): rng.choice(known)}
            if rng.random() < 0.5:
                limits |= {rng.choice(["at_most", "below"]): rng.choice(known)}
            return Range(name, **limits)
    return Equals(name, rng.choice(known))


def ids_of(store: VectorStore) -> dict[str, int]:
    return {item.key: item.id for item in store.items()}


def contents(store: VectorStore) -> dict[str, tuple[Any, ...]]:
    """All that is known of each item except its id, by key."""
    return {
        one.key: (one.sha256, dict(one.attributes), one.path, one.format, one.vector.tobytes())
        for batch in store.scan()
        for one in batch
    }


class Oracle:
    """What the store should answer, from its entries and the numbers that it gave them."""

    def __init__(self, store: VectorStore, entries: Sequence[Entry]) -> None:
        numbers = ids_of(store)
        assert numbers.keys() == {e.key for e in entries}
        self.entries = sorted(entries, key=lambda e: numbers[e.key])
        self.numbers = numbers
        self.vectors = np.array([e.vector for e in self.entries], np.float32).reshape(-1, DIM)

    def ranked(self, query: np.ndarray, options: SearchOptions) -> list[tuple[float, Entry]]:
        scores = self.vectors.astype(np.float64) @ query.astype(np.float64)
        fitting = [
            (float(score), e)
            for score, e in zip(scores.round(7), self.entries, strict=True)
            if (options.where is None or options.where.matches(e.attributes))
            and self.numbers[e.key] not in options.exclude
        ]
        return sorted(fitting, key=lambda pair: (-pair[0], self.numbers[pair[1].key]))

    def hits(self, query: np.ndarray, k: int, options: SearchOptions) -> list[tuple[float, str]]:
        ranked = self.ranked(query, options)
        if options.distinct:
            ranked = without_copies(ranked)
        lowest = -2.0 if options.min_score is None else options.min_score
        kept = [(score, e.key) for score, e in ranked if score >= lowest]
        return kept[options.offset :][:k]

    def groups(
        self, query: np.ndarray, k: int, grouping: Grouping, options: SearchOptions
    ) -> list[tuple[AttributeValue | None, float, list[str]]]:
        parts: dict[tuple[bool | None, Any], list[tuple[float, Entry]]] = {}
        for score, e in self.ranked(query, options):
            alone = (e.sha256, e.vector.tobytes()) if options.distinct else e.key
            for value in dict.fromkeys(values_in(e.attributes.get(grouping.by))) or [None]:
                key = (None, alone) if value is None else (isinstance(value, bool), value)
                parts.setdefault(key, []).append((score, e))
        lowest = -2.0 if options.min_score is None else options.min_score
        found = []
        for (kind, value), part in parts.items():
            kept = without_copies(part) if options.distinct else part
            if kept[0][0] >= lowest:
                found.append((kept[0][0], kept, None if kind is None else value))
        found.sort(key=lambda group: (-round(group[0], 7), self.numbers[group[1][0][1].key]))
        return [
            (value, score, [e.key for _, e in kept][: grouping.size])
            for score, kept, value in found[options.offset :][:k]
        ]


def without_copies(ranked: Sequence[tuple[float, Entry]]) -> list[tuple[float, Entry]]:
    contents = [(e.sha256, e.vector.tobytes()) for _, e in ranked]
    return [pair for n, pair in enumerate(ranked) if contents[n] not in contents[:n]]


def assert_hits(found: Sequence[Hit], expected: Sequence[tuple[float, str]]) -> None:
    assert [h.key for h in found] == [key for _, key in expected]
    assert [h.score for h in found] == pytest.approx([s for s, _ in expected], abs=1e-5)


def assert_groups(
    found: Sequence[Group], expected: Sequence[tuple[AttributeValue | None, float, list[str]]]
) -> None:
    assert [(g.value, [h.key for h in g.hits]) for g in found] == [
        (v, keys) for v, _, keys in expected
    ]
    assert [g.score for g in found] == pytest.approx([s for _, s, _ in expected], abs=1e-5)


def same(found: Entry, expected: Entry) -> bool:
    assert np.allclose(found.vector, expected.vector, atol=1e-6)
    others = [field.name for field in fields(Entry) if field.name != "vector"]
    return all(getattr(found, name) == getattr(expected, name) for name in others)
