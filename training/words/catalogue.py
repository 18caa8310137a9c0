"""The texts of a catalogue and the items that each of them describes.

Letters: T texts, I items, D numbers of an image vector.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import DatasetError
from kinlens.embedder.sources.tables import PRODUCT
from kinlens.embedder.types import Embeddings
from kinlens.embedder.views.text import MAX_CHARACTERS
from kinlens.training.data.records import read_rows

MIN_PRODUCTS_OF_A_PIECE = 2
MAX_WORDS_IN_PAIRS = 2

_LETTER = re.compile(r"[^\W\d_]")
_ADDRESS = re.compile(r"://|\.(jpe?g|png|webp|avif|heic|html?)$", re.IGNORECASE)
_JOINTS = re.compile(r"[-_/]+")
_CLASS = "class"  # of a gallery that was built from folders, one for each product

Numbers = NDArray[np.int64]


class Item(Protocol):
    """An item of a gallery with its vector (D,)."""

    @property
    def key(self) -> str: ...
    @property
    def vector(self) -> NDArray[np.float32]: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Catalogue:
    """Items and their texts.

    Attributes:
        vectors: of the items, (I, D).
        products: the number of the product of each item, (I,).
        texts: in lowercase, each once.
        members: the items that each text describes, ascending, T arrays.
        written: whether a text is in the catalogue as such, (T,). Others are pieces of titles and
            pairs of values, which are taught and not tested.
    """

    vectors: Embeddings
    products: Numbers
    texts: tuple[str, ...]
    members: tuple[Numbers, ...]
    written: NDArray[np.bool_]

    def without(self, held: NDArray[np.bool_]) -> "Catalogue":
        """The same items, of which no text describes those in `held` (I,)."""
        members = tuple(each[~held[each]] for each in self.members)
        return Catalogue(self.vectors, self.products, self.texts, members, self.written)

    def sampled(self, most: int) -> "Catalogue":
        """About `most` items: all of some products, at random. T stays the same."""
        count = int(self.products.max()) + 1
        chosen = np.random.default_rng(0).random(count) < most / len(self.products)
        kept = chosen[self.products]
        number = np.cumsum(kept) - 1
        _, products = np.unique(self.products[kept], return_inverse=True)
        members = tuple(number[each[kept[each]]] for each in self.members)
        return Catalogue(self.vectors[kept], products, self.texts, members, self.written)


def read_catalogue(
    items: Iterable[Item],
    names: Sequence[str] = (),
    product: str = "",
    clicks: Path | None = None,
) -> Catalogue:
    """The texts of the items of a gallery.

    A value of a text attribute is a text, and so is the name of a boolean attribute that is true.
    Values without a letter, addresses and names of files are none. One or two words of a text are
    a text as well if several products share them, and so are two short values of one item.

    Args:
        names: the attributes to read; by default all of them.
        product: the attribute that items of one product share; by default `product`, else `class`.
            An item without it is a product of its own.
        clicks: a CSV with the columns `text` and `item`: text queries, and the key of the item that
            was clicked or bought after each.

    Raises: DatasetError if there are too few texts, or for an unknown attribute.
    """
    vectors, rows, keys = [], [], {}
    found: defaultdict[str, set[int]] = defaultdict(set)
    known: set[str] = set()
    for number, item in enumerate(items):
        vectors.append(item.vector)
        rows.append(item.attributes)
        keys[item.key] = number
        known |= item.attributes.keys()
        for name in names or item.attributes:
            for text in _texts_of(name, item.attributes.get(name)):
                found[text].add(number)
    if unknown := {*names, *([product] if product else [])} - known:
        listed = ", ".join(sorted(known))
        raise DatasetError(f"No item has the attribute {min(unknown)!r}. They have: {listed}.")
    for text, key in _clicked(clicks):
        if key in keys:
            found[text].add(keys[key])
    by = product or (PRODUCT if PRODUCT in known else _CLASS)
    labels = [str(row.get(by, f"\0{number}")) for number, row in enumerate(rows)]
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    products = np.array([numbers[label] for label in labels], np.int64)
    written = set(found)
    pieces = {**_pairs(rows, names, products), **_pieces(found, products)}
    found |= {n: each for n, each in pieces.items() if n not in written}
    if len(written) < 2 or len(numbers) < 2:
        raise DatasetError(
            f"The gallery has {len(written)} texts and {len(numbers)} products; two of each are "
            "needed. Give its items attributes with words, such as a title, a class or a colour: "
            "kinlens-index attributes lists those that it has."
        )
    texts = sorted(found)
    return Catalogue(
        np.array(vectors, np.float32),
        products,
        tuple(texts),
        tuple(np.array(sorted(found[text]), np.int64) for text in texts),
        np.array([text in written for text in texts]),
    )


def _texts_of(name: str, value: object) -> Iterator[str]:
    """The texts that the value of an attribute gives its item."""
    if value is True:
        yield _plain(name)
    for text in value if isinstance(value, tuple | list) else (value,):
        if isinstance(text, str) and _LETTER.search(text) and not _ADDRESS.search(text):
            yield _plain(text)


def _plain(text: str) -> str:
    """In lowercase. The joints of a name without spaces, as of a folder, become spaces."""
    words = text.split() if " " in text.strip() else _JOINTS.sub(" ", text).split()
    return " ".join(words).lower()[:MAX_CHARACTERS]


def _clicked(file: Path | None) -> Iterator[tuple[str, str]]:
    """Text queries and the keys of their items. Raises: DatasetError."""
    if file is None:
        return
    cure = "It needs the columns text,item: a text query, and the key of the item clicked after it."
    for _, row in read_rows(file, "text", "item", cure=cure):
        if _LETTER.search(row["text"]):
            yield _plain(row["text"]), row["item"]


def _pairs(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], products: Numbers
) -> dict[str, set[int]]:
    """Two short texts of one item after each other, such as a colour and a class."""
    pairs: defaultdict[str, set[int]] = defaultdict(set)
    for number, row in enumerate(rows):
        texts = {
            text
            for name in names or row
            for text in _texts_of(name, row.get(name))
            if len(text.split()) <= MAX_WORDS_IN_PAIRS
        }
        for one in texts:
            for other in texts - {one}:
                pairs[f"{one} {other}"].add(number)
    return _shared(pairs, products)


def _pieces(found: Mapping[str, set[int]], products: Numbers) -> dict[str, set[int]]:
    """Words, and pairs of neighbouring words, that texts of several products share."""
    pieces: defaultdict[str, set[int]] = defaultdict(set)
    for text, members in found.items():
        words = text.split()
        if len(words) > 1:
            for piece in {*words, *(f"{one} {two}" for one, two in pairwise(words))}:
                if _LETTER.search(piece):
                    pieces[piece] |= members
    return _shared(pieces, products)


def _shared(found: Mapping[str, set[int]], products: Numbers) -> dict[str, set[int]]:
    """The texts that items of several products have."""
    return {
        text: members
        for text, members in found.items()
        if len({int(products[number]) for number in members}) >= MIN_PRODUCTS_OF_A_PIECE
    }
