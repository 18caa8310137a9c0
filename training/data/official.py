"""Data sets in the layout of their authors, with the class-disjoint splits of the literature.

A data set is a table entry: what its folder holds, how its lists are read, and how many images and
classes each part must have. Everything else is the same for all and lives here.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from embedder.errors import DatasetError
from training.data.records import Split, labelled

PARTIAL = "For a subset set data.allow_partial = true (--allow-partial)."


class Record(NamedTuple):
    """An image as a list states it; `origin` is the file and line that does."""

    part: str
    path: str
    label: str
    origin: str


class Count(NamedTuple):
    """Size of a part."""

    images: int
    classes: int


@dataclass(frozen=True)
class Official:
    """A data set.

    Args:
        name: for messages.
        needs: what its folder holds; of a tuple one is enough.
        expected: size of each part: "train", "test" and perhaps "gallery". With a gallery the
            test images are the queries.
        read: the records of a folder that has what `needs` says.
        image_root: the folder that the paths of records are relative to, from the data set's own.
    """

    name: str
    needs: tuple[tuple[str, ...], ...]
    expected: Mapping[str, Count]
    read: Callable[[Path], Iterable[Record]]
    image_root: Callable[[Path], Path] = lambda root: root

    def lacks(self, root: Path) -> list[str]:
        """What `root` lacks."""
        return [
            " or ".join(names)
            for names in self.needs
            if not any((root / name).exists() for name in names)
        ]

    def called(self, part: str) -> str:
        """The name of a part in messages."""
        return "query" if part == "test" and "gallery" in self.expected else part


def list_records(official: Official, root: Path) -> list[Record]:
    """What the lists in `root` state, whether the images exist or not.

    Raises: DatasetError if a list is missing or malformed, or states an image twice.
    """
    lacking = official.lacks(root)
    if lacking:
        raise DatasetError(_not_official(official, root, lacking))
    records = list(official.read(root))
    first: dict[str, Record] = {}
    for record in records:
        other = first.setdefault(record.path, record)
        if other is not record:
            raise DatasetError(
                f"{record.origin}: {record.path} is listed a second time; first in {other.origin}. "
                "Unpack the data set again."
            )
    return records


def read_official(official: Official, root: Path, allow_partial: bool = False) -> Split:
    """Read a data set and assert its counts.

    Args:
        official: which data set.
        root: its folder.
        allow_partial: accept missing images and other counts: a subset.

    Raises: DatasetError if lists are missing or malformed, images are missing, counts differ, or
        a part is empty.
    """
    records = list_records(official, root)
    base = official.image_root(root)
    missing = [record for record in records if not (base / record.path).is_file()]
    if missing and not allow_partial:
        raise DatasetError(
            f"{len(missing):,} of the {len(records):,} images that {official.name} lists are "
            f"missing in {base}, for example {missing[0].path} ({missing[0].origin}). Unpack the "
            f"images again. {PARTIAL}"
        )
    gone = {record.path for record in missing}
    kept = [record for record in records if record.path not in gone]
    differing = differing_counts(official, kept)
    if differing and not allow_partial:
        raise DatasetError(f"{official.name} in {root} has {differing}. {PARTIAL}")
    return _split(official, root, base, kept, allow_partial)


def counts(records: Iterable[Record]) -> dict[str, Count]:
    """Images and classes of each part."""
    classes: dict[str, Counter[str]] = {}
    for record in records:
        classes.setdefault(record.part, Counter())[record.label] += 1
    return {part: Count(labels.total(), len(labels)) for part, labels in classes.items()}


def differing_counts(official: Official, records: Iterable[Record]) -> str:
    """Found and expected counts in words; empty if they are equal."""
    found = counts(records)
    found = {part: found.get(part, Count(0, 0)) for part in official.expected}
    if found == dict(official.expected):
        return ""
    return f"{_in_words(official, found)}; expected are {_in_words(official, official.expected)}"


def _in_words(official: Official, sizes: Mapping[str, Count]) -> str:
    return ", ".join(
        f"{size.images:,} {official.called(part)} images of {size.classes:,} classes"
        for part, size in sizes.items()
    )


def _split(
    official: Official, root: Path, base: Path, records: list[Record], allow_partial: bool
) -> Split:
    parts = {
        part: labelled(base, [(r.path, r.label) for r in records if r.part == part])
        for part in official.expected
    }
    for part, images in parts.items():
        if not len(images):
            raise DatasetError(f"{root} holds no {official.called(part)} image of {official.name}.")
    split = Split(parts["train"], parts["test"], gallery=parts.get("gallery"))
    if split.without_gallery and not allow_partial:
        raise DatasetError(
            f"{len(split.without_gallery)} class(es) of queries of {official.name} have no image "
            f"in the gallery, for example {split.without_gallery[0]!r}. Unpack the data set again. "
            f"{PARTIAL}"
        )
    return split


def _not_official(official: Official, root: Path, lacking: list[str]) -> str:
    needs = ", ".join(" or ".join(names) for names in official.needs)
    message = (
        f"{root} is not {official.name} in the official layout: it must hold {needs}; "
        f"it lacks {', '.join(lacking)}."
    )
    if not root.is_dir():
        return f"{message} The folder does not exist. Check data.root."
    below = sorted(p for p in root.iterdir() if p.is_dir() and not official.lacks(p))
    return f"{message} Check data.root" + (f"; {below[0]} looks right." if below else ".")
