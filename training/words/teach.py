"""Teach a bundle the words of a catalogue: a text tower of kind "taught"."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kinlens.embedder.bundle import Bundle, make_room
from kinlens.embedder.durable import staged
from kinlens.embedder.errors import ExportError
from kinlens.embedder.manifest import TextTower, WordsFound
from kinlens.embedder.views.text import TextEncoder
from kinlens.training.words.attach import attach_tower, golden_texts
from kinlens.training.words.catalogue import Catalogue, Item, read_catalogue
from kinlens.training.words.graph import write_tower
from kinlens.training.words.heldout import MIN_GAIN, Kind, hold_out, is_proven
from kinlens.training.words.taught import Floats, fit_map

CONTEXT = 128
"""Tokens of a text that are read; titles are shorter."""

MEANINGS: dict[Kind, str] = {
    "photos": "other photos of products, by words it was taught",
    "products": "new products, by words that others share",
    "titles": "new products, by titles it was not taught",
}


@dataclass(frozen=True)
class Taught:
    """The bundle with its text tower, and what it was taught with."""

    bundle: Bundle
    texts: int
    items: int
    products: int

    def lines(self) -> list[str]:
        """A report: what the tower can find, with its figures, and what it cannot."""
        tower = self.bundle.manifest.text
        assert tower is not None
        head = f"{self.texts:,} texts of {self.items:,} images of {self.products:,} products"
        return [head, *(outcome(kind, tower.held_out.get(kind)) for kind in MEANINGS)]


def teach(
    bundle: Bundle,
    items: Iterable[Item],
    encoder: Path,
    tokenizer: Path,
    out: Path,
    names: Sequence[str] = (),
    product: str = "",
    clicks: Path | None = None,
    licence: str = "unspecified",
) -> Taught:
    """Write a copy of `bundle` with a text tower, fitted to the vectors of a gallery, to `out`.

    Args:
        items: of a gallery that `bundle` built.
        encoder: an ONNX file that turns token ids into vectors, such as MiniLM.
        tokenizer: its `tokenizer.json`.
        names, product, clicks: as for `read_catalogue`.
        licence: of the text encoder.

    Raises: ExportError if neither new products nor new titles are found better than by chance;
        DatasetError, BundleError.
    """
    make_room(out)
    catalogue = read_catalogue(items, names, product, clicks)
    tower = TextTower(kind="taught", context=CONTEXT, licence=licence)
    with staged(out.parent) as folder:
        size = write_tower(encoder, folder / "features.onnx")
        reader = TextEncoder(folder / "features.onnx", tokenizer, tower, size, str(encoder))
        features = reader.embed(catalogue.texts)
        found = hold_out(catalogue, features, fit_map)
        _require_proof(found)
        learnt = fit_map(catalogue, features)
        write_tower(encoder, folder / "text.onnx", learnt)
        tower = tower.model_copy(
            update={
                "held_out": found,
                "mean": _mean(learnt(features[catalogue.written])),
            }
        )
        written = attach_tower(
            bundle,
            out,
            folder / "text.onnx",
            tokenizer,
            tower,
            lambda texts: learnt(reader.embed(texts)),
            golden_texts(reader),
        )
    return Taught(written, len(catalogue.texts), *_counts(catalogue))


def outcome(kind: Kind, found: WordsFound | None) -> str:
    """One line of the report."""
    if found is None:
        return f"not measured: {MEANINGS[kind]} (no such texts)"
    word = "finds" if is_proven({kind: found}, kind) else "does NOT find"
    return (
        f"{word} {MEANINGS[kind]}: mAP {found.map:.1f} (chance {found.chance:.1f}), first item "
        f"right {found.precision_at_1:.0f} %, {found.texts:,} texts held out"
    )


def _require_proof(found: dict[Kind, WordsFound]) -> None:
    if not (is_proven(found, "products") or is_proven(found, "titles")):
        raise ExportError(
            "These words do not find products that the tower was not taught with. "
            + ". ".join(outcome(kind, found.get(kind)) for kind in MEANINGS)
            + f". At least {MIN_GAIN:.0f} % of the way from chance to 100 are needed for new "
            "products, at the lower end of the 95 % interval. No bundle was written. Give more "
            "items titles or attributes that they share, or use another text encoder."
        )


def _mean(vectors: Floats) -> tuple[float, ...]:
    return tuple(np.round(vectors.mean(axis=0, dtype=np.float64), 6).tolist())


def _counts(catalogue: Catalogue) -> tuple[int, int]:
    return len(catalogue.vectors), int(catalogue.products.max()) + 1
