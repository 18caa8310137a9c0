"""What is wrong with the folder of a data set: everything at once, not the first fault alone."""

import hashlib
import io
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from embedder.errors import (
    DatasetError,
    EmptyImageError,
    ImageError,
    ImageTooLargeError,
    ImageTooManyBytesError,
    UnsupportedFormatError,
)
from embedder.preprocess import decode, read_header
from training.data.datasets import OFFICIAL, Count, Official, Record, counts, list_records
from training.data.load import KINDS, TABLE, data_sets_in, recognise
from training.data.records import IMAGE_SUFFIXES
from training.data.shop import FEWEST, read_folder, scan_table

Severity = Literal["problem", "note"]
Watch = Callable[[int], Callable[[], object]]
"""Called with the number of images; gives a function that is called after each."""

_SMALL_PX = 32
_EXAMPLES = 5
_GREY = frozenset(("1", "L", "LA", "La", "I;16", "I;16B", "I;16L"))
_FAULTS: tuple[tuple[type[ImageError], str], ...] = (
    (EmptyImageError, "empty"),
    (UnsupportedFormatError, "not-an-image"),
    (ImageTooLargeError, "too-large"),
    (ImageTooManyBytesError, "too-large"),
    (ImageError, "damaged"),
)
_PROBLEMS = {
    "rows": "row(s) of the CSV cannot be used",
    "missing": "image(s) are listed but missing. Unpack the images again",
    "unreadable": "image(s) cannot be read. Check owner and rights of the files",
    "empty": "image(s) are empty files (0 bytes). Copy them again or remove them",
    "not-an-image": "file(s) are named like images but are none of a known format. Remove them",
    "too-large": "image(s) are over the limits of size. Resize them",
    "damaged": "image(s) are truncated or damaged. Copy them again or remove them",
    "white-space": "class name(s) have white space at an end, doubled or unusual. Rename them",
    "one-image": 'class(es) have one image, so no pair. Add images, or set small_classes = "drop"',
    "copies-across-parts": "picture(s) are in train and in test, byte for byte",
    "copies-across-classes": "picture(s) are in two classes, byte for byte",
}
_NOTES = {
    "copies": "picture(s) are twice in their class, byte for byte",
    "tiny": f"image(s) have a side below {_SMALL_PX} px; they are enlarged",
    "grey": "image(s) are grey; they train like the others",
    "cmyk": "image(s) are CMYK; they train like the others",
    "unlisted": "image(s) belong to no class or are hidden; they are left out",
    "other-files": "file(s) are no images; they are left out",
}
_NOTES_IF_OFFICIAL = {"one-image", "copies-across-parts", "copies-across-classes"}
"""Of lists that the literature has fixed."""


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


@dataclass(frozen=True)
class Report:
    """The state of a data set.

    `parts` are the images that its lists state, whether they exist or not; `expected` are the
    official sizes, where there are any.
    """

    root: Path
    kind: str | None
    quick: bool
    parts: dict[str, Count] = field(default_factory=dict)
    expected: dict[str, Count] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing keeps the data set from being trained on."""
        return not any(finding.is_problem for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "root": str(self.root),
            "kind": self.kind,
            "healthy": self.healthy,
            "quick": self.quick,
            "parts": {part: size._asdict() for part, size in self.parts.items()},
            "expected": {part: size._asdict() for part, size in self.expected.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def lines(self) -> Iterator[str]:
        """Layout, sizes, findings (problems first) and verdict, for a person."""
        yield f"{self.root}: layout {self.kind or 'unknown'}"
        for part, size in self.parts.items():
            line = f"  {part}: {size.images:,} images of {size.classes:,} classes"
            wanted = self.expected.get(part, size)
            if wanted != size:
                line += f" (expected {wanted.images:,} of {wanted.classes:,})"
            yield line
        for finding in sorted(self.findings, key=lambda finding: not finding.is_problem):
            sign = "PROBLEM" if finding.is_problem else "note"
            yield f"{sign} [{finding.code}] {finding.message}"
            yield from (f"    {example}" for example in finding.examples)
            if finding.count > len(finding.examples) > 0:
                yield f"    ... and {finding.count - len(finding.examples):,} more"
        problems = sum(finding.is_problem for finding in self.findings)
        if problems:
            yield f"{problems} kind(s) of problems must be mended."
        else:
            yield "Healthy, as far as headers show." if self.quick else "Healthy."


def examine(
    root: Path,
    kind: str | None = None,
    quick: bool = False,
    allow_partial: bool = False,
    watch: Watch = lambda _total: lambda: None,
) -> Report:
    """Read the lists of a data set and look at every image.

    Args:
        root: its folder.
        kind: one of KINDS; None recognises it.
        quick: look at headers alone; damage inside an image is not found.
        allow_partial: accept a subset of an official data set.
        watch: told of the progress.

    Raises: DatasetError if there is no such folder or kind.
    """
    if not root.is_dir():
        raise DatasetError(f"{root} is not a folder. Give the folder of a data set.")
    if kind is not None and kind not in KINDS:
        raise DatasetError(f"--kind {kind}: no such layout. Give one of {', '.join(KINDS)}.")
    kind = kind or recognise(root)
    cases: dict[str, list[str]] = defaultdict(list)  # by the code of their finding
    try:
        base, records = _listed(root, kind, cases["rows"])
    except DatasetError as error:
        return Report(root, kind, quick, findings=(Finding("problem", "layout", 1, str(error)),))
    there = _look_at_all(base, records, quick, watch(len(records)), cases)
    _look_at_classes(records, there, cases)
    _look_beside(base, records, cases)
    official = OFFICIAL.get(kind or "")
    notes = {*_NOTES, *(("missing", "counts") if allow_partial else ())}
    if official is None:
        found = list(_few_classes(there))
    else:
        found = list(_other_counts(official, there, allow_partial))
        notes |= _NOTES_IF_OFFICIAL
    for code, what in (_PROBLEMS | _NOTES).items():
        if cases[code]:
            found.append(_finding(code, cases[code], what))
    findings = [replace(f, severity="note") if f.code in notes else f for f in found]
    expected = dict(official.expected) if official else {}
    return Report(root, kind, quick, counts(records), expected, tuple(findings))


def _finding(code: str, cases: Sequence[str], what: str) -> Finding:
    """A problem, until it is made a note, with a few of its cases."""
    return Finding("problem", code, len(cases), f"{len(cases):,} {what}", tuple(cases[:_EXAMPLES]))


def _listed(root: Path, kind: str | None, faults: list[str]) -> tuple[Path, list[Record]]:
    """The folder that paths are relative to, and the records that can be used."""
    if kind is None:
        inside = data_sets_in(root)
        hint = f" {inside[0]} looks like one: give that." if inside else ""
        raise DatasetError(
            f"{root} has no layout that is known: neither one of {', '.join(OFFICIAL)}, nor a file "
            f"{TABLE}, nor a sub-folder with images for each class.{hint}"
        )
    if kind in OFFICIAL:
        return OFFICIAL[kind].image_root(root), list_records(OFFICIAL[kind], root)
    if kind == "folder":
        return root, [Record("all", path, label, path) for path, label in read_folder(root)]
    rows, found = scan_table(root, TABLE)
    faults += found
    return root, [
        Record((row.get("split") or "").strip() or "all", row["path"], row["label"], TABLE)
        for row in rows
    ]


def _look_at_all(
    base: Path,
    records: Sequence[Record],
    quick: bool,
    on_image: Callable[[], object],
    cases: dict[str, list[str]],
) -> list[Record]:
    """Look at each image, with a thread for each processor; returns those that exist."""
    there = []
    same: dict[str, list[Record]] = defaultdict(list)
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # of Pillow, on oddities that do not spoil the picture
        looks = pool.map(lambda record: _look_at(base / record.path, quick), records)
        for record, (said, digest) in zip(records, looks, strict=True):
            for code, detail in said.items():
                cases[code].append(f"{record.path}: {detail}" if detail else record.path)
            if "missing" not in said:
                there.append(record)
            if digest:
                same[digest].append(record)
            on_image()
    for group in (group for group in same.values() if len(group) > 1):
        code = "copies"
        if len({record.part == "train" for record in group}) > 1:
            code = "copies-across-parts"
        elif len({record.label for record in group}) > 1:
            code = "copies-across-classes"
        cases[code].append(" = ".join(record.path for record in group))
    return there


def _look_at(path: Path, quick: bool) -> tuple[dict[str, str], str]:
    """What there is to say of a file, by code, and the digest of its content if it is an image."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {"missing": ""}, ""
    except OSError as error:
        return {"unreadable": error.strerror or str(error)}, ""
    try:
        header = read_header(data)
        with Image.open(io.BytesIO(data)) as image:
            mode = image.mode
        if not quick:
            decode(data)
    except ImageError as error:
        return {next(code for kind, code in _FAULTS if isinstance(error, kind)): str(error)}, ""
    said = {}
    if min(header.width, header.height) < _SMALL_PX:
        said["tiny"] = f"{header.width} x {header.height} px"
    if mode == "CMYK" or mode in _GREY:
        said["cmyk" if mode == "CMYK" else "grey"] = ""
    return said, hashlib.sha256(data).hexdigest()


def _look_at_classes(
    records: Sequence[Record], there: Sequence[Record], cases: dict[str, list[str]]
) -> None:
    odd = {repr(r.label) for r in records if r.label != " ".join(r.label.split())}
    cases["white-space"] = sorted(odd)
    sizes = Counter((record.part == "train", record.label) for record in there)
    cases["one-image"] = sorted(label for (_, label), size in sizes.items() if size == 1)


def _few_classes(there: Sequence[Record]) -> Iterator[Finding]:
    """Too few classes with a pair to train on some and test with others."""
    sizes = Counter((record.part == "train", record.label) for record in there)
    pairs = sorted((label, is_train) for (is_train, label), size in sizes.items() if size > 1)
    train = sum(is_train for _, is_train in pairs)
    is_split = any(record.part == "train" for record in there)
    if min(train, len(pairs) - train) < FEWEST if is_split else len(pairs) < 2 * FEWEST:
        what = (
            f"class(es) have 2 images or more; a training needs {2 * FEWEST}: {FEWEST} to train on "
            f"and {FEWEST} others to test with. Add classes, or images to those that have one"
        )
        yield _finding("few-classes", [label for label, _ in pairs], what)


def _other_counts(
    official: Official, there: Sequence[Record], allow_partial: bool
) -> Iterator[Finding]:
    differing = official.differs(there)
    cure = "" if allow_partial else ". Unpack it again, or pass --allow-partial for a subset"
    if differing:
        yield Finding("problem", "counts", 1, f"{official.name} has {differing}{cure}")


def _look_beside(base: Path, records: Sequence[Record], cases: dict[str, list[str]]) -> None:
    """Files beside the listed images, in the folders that these lie in."""
    listed = {record.path for record in records}
    folders = sorted({path.split("/")[0] for path in listed if "/" in path})
    inside = (path for folder in folders for path in sorted((base / folder).rglob("*")))
    names = [p.name for p in sorted(base.iterdir()) if p.suffix.lower() in IMAGE_SUFFIXES]
    names += [path.relative_to(base).as_posix() for path in inside if path.is_file()]
    for name in names:
        if name not in listed:
            is_image = Path(name).suffix.lower() in IMAGE_SUFFIXES
            cases["unlisted" if is_image else "other-files"].append(name)
