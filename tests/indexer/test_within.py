"""Changes that are limited to a filter: nothing outside it changes, and nothing crosses it."""

import random

from kinlens.embedder.errors import InvalidParameterError, ItemNotFoundError
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Entry
from tests.indexer.oracle import contents, entry, units

SEVEN = parse_filter("tenant = 7")
VECTORS = units(40)
KEYS = [f"k{n}" for n in range(12)]


def outside(gallery: Gallery) -> dict[str, tuple[object, ...]]:
    return {key: one for key, one in contents(gallery).items() if not SEVEN.matches(one[1])}


def some(chance: random.Random) -> Entry:
    tenant = chance.choice([{"tenant": 7}, {"tenant": 7}, {"tenant": 8}, {}])
    made = entry(chance.choice(KEYS), VECTORS[chance.randrange(40)], tenant)
    return Entry(made.key, made.vector, made.sha256, made.attributes, keeps=chance.random() < 0.3)


def test_whatever_is_done_within_a_filter_the_items_outside_stay_as_they_are(gallery) -> None:
    """By drawing changes; those that are refused have changed nothing at all."""
    chance = random.Random(7)
    others = [f"other{n}" for n in range(4)]
    gallery.add(entry(key, VECTORS[n], {"tenant": 8, "n": n}) for n, key in enumerate(others))
    gallery.add([entry("k0", VECTORS[9], {"tenant": 8}), entry("gone", VECTORS[8], {"tenant": 8})])
    gallery.remove(["gone"])
    before, done, refused = outside(gallery), 0, 0
    ways = {
        "add": lambda: gallery.add([some(chance), some(chance)], within=SEVEN),
        "update": lambda: gallery.update(
            {chance.choice([*KEYS, *others]): {"tenant": chance.choice([7, 8, None]), "n": 1}},
            SEVEN,
        ),
        "where": lambda: gallery.update_where(
            parse_filter("tenant = 7"), {"tenant": chance.choice([7, 7, 8])}, SEVEN
        ),
        "remove": lambda: gallery.remove([chance.choice([*KEYS, *others])], within=SEVEN),
        "number": lambda: gallery.remove_items([chance.randrange(60)], SEVEN),
        "restore": lambda: gallery.restore([chance.choice(KEYS), "gone", *others], SEVEN),
    }
    for _ in range(250):
        inside = {key: item.attributes for key, item in gallery.stored(KEYS).items()}
        try:
            ways[chance.choice([*ways])]()
            done += 1
        except (InvalidParameterError, ItemNotFoundError):
            refused += 1
            now = {key: item.attributes for key, item in gallery.stored(KEYS).items()}
            assert now == inside
        assert outside(gallery) == before
    assert done > 80
    assert refused > 40
