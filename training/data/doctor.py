"""What is wrong with the folder of a data set: everything at once, not the first fault alone."""

import hashlib
import io
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from training.data.datasets import OFFICIAL, Count, Record, counts, list_records
from training.data.load import KINDS, TABLE, data_sets_in, recognise
from training.data.records import IMAGE_SUFFIXES
from training.data.shop import FEWEST, read_folder, scan_table

Severity = Literal["problem", "note"]
Watch = Callable[[int], Callable[[], object]]
"""Called with the number of images; gives a function that is called after each."""

_SMALL_PX = 32
_EXAMPLES = 5
_GREY = frozenset(("1", "L", "LA", "La", "I;16", "I;16B", "I;16L"))
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
    findings: list[Finding] = []
    try:
        base, records = _listed(root, kind, findings)
    except DatasetError as error:
        return Report(root, kind, quick, findings=(Finding("problem", "layout", 1, str(error)),))
    looks = _look_at_all(base, records, quick, watch(len(records)))
    official = OFFICIAL.get(kind or "")
    if official is not None:
        there = [r for r, look in zip(records, looks, strict=True) if look.fault != "missing"]
        differing = official.differs(there)
        cure = "" if allow_partial else ". Unpack it again, or pass --allow-partial for a subset"
        if differing:
            message = f"{official.name} has {differing}{cure}"
            severity: Severity = "note" if allow_partial else "problem"
            findings.append(Finding(severity, "counts", 1, message))
    findings += _of_images(records, looks, allow_partial)
    findings += _of_labels(records, looks, is_official=official is not None)
    findings += _of_other_files(base, records)
    expected = dict(official.expected) if official else {}
    return Report(root, kind, quick, counts(records), expected, tuple(findings))


def _listed(root: Path, kind: str | None, findings: list[Finding]) -> tuple[Path, list[Record]]:
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
    rows, faults = scan_table(root, TABLE)
    findings += _found("problem", "rows", faults, "row(s) of the CSV cannot be used")
    return root, [
        Record((row.get("split") or "").strip() or "all", row["path"], row["label"], TABLE)
        for row in rows
    ]


def _found(severity: Severity, code: str, cases: Sequence[str], what: str) -> Iterator[Finding]:
    """A finding of these cases, of which a few are shown; none without a case."""
    if cases:
        message, shown = f"{len(cases):,} {what}", tuple(cases[:_EXAMPLES])
        yield Finding(severity, code, len(cases), message, shown)


class _Look(NamedTuple):
    """What was seen of a file: a key of _FAULTS and more of it, or the content of a good image.

    `mode` is Pillow's, sizes are in pixels as stored.
    """

    fault: str = ""
    detail: str = ""
    sha256: str = ""
    mode: str = ""
    width: int = 0
    height: int = 0


def _look_at(path: Path, quick: bool) -> _Look:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return _Look("missing")
    except OSError as error:
        return _Look("unreadable", error.strerror or str(error))
    try:
        header = read_header(data)
        with Image.open(io.BytesIO(data)) as image:
            mode = image.mode
        if not quick:
            decode(data)
    except EmptyImageError as error:
        return _Look("empty", str(error))
    except UnsupportedFormatError as error:
        return _Look("not-an-image", str(error))
    except (ImageTooLargeError, ImageTooManyBytesError) as error:
        return _Look("too-large", str(error))
    except ImageError as error:
        return _Look("damaged", str(error))
    return _Look("", "", hashlib.sha256(data).hexdigest(), mode, header.width, header.height)


def _look_at_all(
    base: Path, records: Sequence[Record], quick: bool, on_image: Callable[[], object]
) -> list[_Look]:
    """A look at each image, in order, with a thread for each processor; decoding frees the lock."""
    looks = []
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # of Pillow, on oddities that do not spoil the picture
        for look in pool.map(lambda record: _look_at(base / record.path, quick), records):
            looks.append(look)
            on_image()
    return looks


def _of_images(
    records: Sequence[Record], looks: Sequence[_Look], missing_is_fine: bool
) -> Iterator[Finding]:
    """Faults of files, and pictures that are out of the ordinary but train like the others."""
    seen = [(record.path, look) for record, look in zip(records, looks, strict=True)]
    for fault, what in _FAULTS.items():
        faulty = [
            f"{path}: {look.detail}" if look.detail else path
            for path, look in seen
            if look.fault == fault
        ]
        fine = fault == "missing" and missing_is_fine
        yield from _found("note" if fine else "problem", fault, faulty, what)
    good = [(path, look) for path, look in seen if not look.fault]
    tiny = [
        f"{path}: {look.width} x {look.height} px"
        for path, look in good
        if min(look.width, look.height) < _SMALL_PX
    ]
    small = f"image(s) have a side below {_SMALL_PX} px; they are enlarged"
    yield from _found("note", "tiny", tiny, small)
    for name, modes in (("grey", _GREY), ("CMYK", {"CMYK"})):
        cases = [path for path, look in good if look.mode in modes]
        what = f"image(s) are {name}; they train like the others"
        yield from _found("note", name.lower(), cases, what)


def _of_labels(
    records: Sequence[Record], looks: Sequence[_Look], is_official: bool
) -> Iterator[Finding]:
    """Classes and copies: notes where the literature has fixed the lists."""
    severity: Severity = "note" if is_official else "problem"
    odd = sorted({repr(r.label) for r in records if r.label != " ".join(r.label.split())})
    what = "class name(s) have white space at an end, doubled or unusual. Rename them"
    yield from _found("problem", "white-space", odd, what)
    sizes = Counter(
        (record.part == "train", record.label)
        for record, look in zip(records, looks, strict=True)
        if look.fault != "missing"
    )
    alone = sorted(label for (_, label), size in sizes.items() if size == 1)
    what = 'class(es) have one image, so no pair. Add images, or set small_classes = "drop"'
    yield from _found(severity, "one-image", alone, what)
    pairs = [(is_train, label) for (is_train, label), size in sizes.items() if size > 1]
    train = sum(is_train for is_train, _ in pairs)
    is_split = any(record.part == "train" for record in records)
    enough = min(train, len(pairs) - train) >= FEWEST if is_split else len(pairs) >= 2 * FEWEST
    if not (enough or is_official):
        message = (
            f"{len(pairs):,} class(es) have 2 images or more; a training needs {2 * FEWEST}: "
            f"{FEWEST} to train on and {FEWEST} others to test with. Add classes, or images to "
            "those that have one"
        )
        names = sorted(label for _, label in pairs)
        yield Finding("problem", "few-classes", len(names), message, tuple(names[:_EXAMPLES]))
    yield from _copies(records, looks, severity)


def _copies(
    records: Sequence[Record], looks: Sequence[_Look], severity: Severity
) -> Iterator[Finding]:
    by_content: dict[str, list[Record]] = defaultdict(list)
    for record, look in zip(records, looks, strict=True):
        if look.sha256:
            by_content[look.sha256].append(record)
    cases: dict[str, list[str]] = defaultdict(list)
    for group in (group for group in by_content.values() if len(group) > 1):
        code = "copies"
        if len({record.part == "train" for record in group}) > 1:
            code = "copies-across-parts"
        elif len({record.label for record in group}) > 1:
            code = "copies-across-classes"
        cases[code].append(" = ".join(record.path for record in group))
    kinds: tuple[tuple[str, Severity, str], ...] = (
        ("copies-across-parts", severity, "picture(s) are in train and in test, byte for byte"),
        ("copies-across-classes", severity, "picture(s) are in two classes, byte for byte"),
        ("copies", "note", "picture(s) are twice in their class, byte for byte"),
    )
    for code, level, what in kinds:
        yield from _found(level, code, cases[code], what)


def _of_other_files(base: Path, records: Sequence[Record]) -> Iterator[Finding]:
    """Files beside the listed images, in the folders that these lie in."""
    listed = {record.path for record in records}
    folders = sorted({path.split("/")[0] for path in listed if "/" in path})
    inside = (path for folder in folders for path in sorted((base / folder).rglob("*")))
    names = [p.name for p in sorted(base.iterdir()) if p.suffix.lower() in IMAGE_SUFFIXES]
    names += [path.relative_to(base).as_posix() for path in inside if path.is_file()]
    left = [name for name in names if name not in listed]
    images = [name for name in left if Path(name).suffix.lower() in IMAGE_SUFFIXES]
    others = [name for name in left if Path(name).suffix.lower() not in IMAGE_SUFFIXES]
    what = "image(s) belong to no class or are hidden; they are left out"
    yield from _found("note", "unlisted", images, what)
    yield from _found("note", "other-files", others, "file(s) are no images; they are left out")
