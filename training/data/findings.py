"""What a look at a data set finds, each with its number and a few examples."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.data.look import GREY_MODES, Look
from training.data.official import Record
from training.data.records import IMAGE_SUFFIXES
from training.data.splits import FEWEST

Severity = Literal["problem", "note"]

SMALL_PX = 32
"""Shorter side below which a picture is called tiny."""

_EXAMPLES = 5
_FAULTS = {
    "missing": "image(s) are listed but missing. Unpack the images again",
    "unreadable": "image(s) cannot be read. Check owner and rights of the files",
    "empty": "image(s) are empty files (0 bytes). Copy them again or remove them",
    "not-an-image": "file(s) are named like images but are none of a known format. Remove them",
    "too-large": "image(s) are over the limits of size. Resize them",
    "damaged": "image(s) are truncated or damaged. Copy them again or remove them",
}


@dataclass(frozen=True)
class Finding:
    """A problem keeps a data set from training, or makes its figures wrong; a note does not."""

    severity: Severity
    code: str
    count: int
    message: str
    examples: tuple[str, ...] = ()

    @property
    def is_problem(self) -> bool:
        """Whether it must be mended."""
        return self.severity == "problem"

    @classmethod
    def of(cls, severity: Severity, code: str, cases: Sequence[str], what: str) -> "Finding":
        """From all cases, of which a few are shown."""
        return cls(severity, code, len(cases), f"{len(cases):,} {what}", tuple(cases[:_EXAMPLES]))


def of_looks(looks: Sequence[Look], missing_is_fine: bool) -> Iterator[Finding]:
    """Faults of files, and pictures that are out of the ordinary but train like the others."""
    for fault, what in _FAULTS.items():
        faulty = [look for look in looks if look.fault == fault]
        cases = [f"{look.path}: {look.detail}" if look.detail else look.path for look in faulty]
        fine = fault == "missing" and missing_is_fine
        if cases:
            yield Finding.of("note" if fine else "problem", fault, cases, what)
    good = [look for look in looks if not look.fault]
    tiny = [look for look in good if min(look.width, look.height) < SMALL_PX]
    if tiny:
        cases = [f"{look.path}: {look.width} x {look.height} px" for look in tiny]
        what = f"image(s) have a side below {SMALL_PX} px; they are enlarged"
        yield Finding.of("note", "tiny", cases, what)
    for code, modes, what in (
        ("grey", GREY_MODES, "image(s) are grey; they train like the others"),
        ("cmyk", {"CMYK"}, "image(s) are CMYK; they train like the others"),
    ):
        cases = [look.path for look in good if look.mode in modes]
        if cases:
            yield Finding.of("note", code, cases, what)


def of_labels(records: Sequence[Record], looks: Sequence[Look], fixed: bool) -> Iterator[Finding]:
    """Classes and copies. Where the lists are `fixed` by the literature, these are notes."""
    severity: Severity = "note" if fixed else "problem"
    odd = sorted({repr(r.label) for r in records if r.label != " ".join(r.label.split())})
    if odd:
        what = "class name(s) have white space at an end, doubled or unusual. Rename them"
        yield Finding.of("problem", "white-space", odd, what)
    present = {look.path for look in looks if look.fault != "missing"}
    sizes = Counter((r.part == "train", r.label) for r in records if r.path in present)
    alone = sorted(label for (_, label), size in sizes.items() if size == 1)
    if alone:
        what = 'class(es) have one image, so no pair. Add images, or set small_classes = "drop"'
        yield Finding.of(severity, "one-image", alone, what)
    if not fixed:
        yield from _too_few(records, sizes)
    yield from _copies(records, looks, severity)


def _too_few(records: Sequence[Record], sizes: Counter[tuple[bool, str]]) -> Iterator[Finding]:
    """Too few classes with a pair to train on some and test with others."""
    usable = Counter(is_train for (is_train, _), size in sizes.items() if size > 1)
    is_split = any(record.part == "train" for record in records)
    enough = min(usable[True], usable[False]) >= FEWEST if is_split else usable[False] >= 2 * FEWEST
    if not enough:
        names = sorted(label for (_, label), size in sizes.items() if size > 1)
        what = (
            f"class(es) have 2 images or more; a training needs {2 * FEWEST}: {FEWEST} to train on "
            f"and {FEWEST} others to test with. Add classes, or images to those that have one"
        )
        yield Finding.of("problem", "few-classes", names, what)


def of_files(base: Path, records: Sequence[Record]) -> Iterator[Finding]:
    """Files beside the listed images, in the folders that these lie in."""
    listed = {record.path for record in records}
    folders = sorted({path.split("/")[0] for path in listed if "/" in path})
    images = [p.name for p in sorted(base.iterdir()) if _is_image(p) and p.name not in listed]
    others: list[str] = []
    for path in (p for folder in folders for p in sorted((base / folder).rglob("*"))):
        name = path.relative_to(base).as_posix()
        if path.is_file() and name not in listed:
            (images if _is_image(path) else others).append(name)
    if images:
        what = "image(s) belong to no class or are hidden; they are left out"
        yield Finding.of("note", "unlisted", images, what)
    if others:
        yield Finding.of("note", "other-files", others, "file(s) are no images; they are left out")


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def _copies(
    records: Sequence[Record], looks: Sequence[Look], severity: Severity
) -> Iterator[Finding]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record, look in zip(records, looks, strict=True):
        if look.sha256:
            groups[look.sha256].append(record)
    copies = [group for group in groups.values() if len(group) > 1]
    kinds: tuple[tuple[str, Severity, str], ...] = (
        ("copies-across-parts", severity, "picture(s) are in train and in test, byte for byte"),
        ("copies-across-classes", severity, "picture(s) are in two classes, byte for byte"),
        ("copies", "note", "picture(s) are twice in their class, byte for byte"),
    )
    for code, level, what in kinds:
        cases = [" = ".join(r.path for r in group) for group in copies if _kind(group) == code]
        if cases:
            yield Finding.of(level, code, cases, what)


def _kind(group: Iterable[Record]) -> str:
    group = list(group)
    if len({record.part in ("train", "validation") for record in group}) > 1:
        return "copies-across-parts"
    return "copies-across-classes" if len({record.label for record in group}) > 1 else "copies"
