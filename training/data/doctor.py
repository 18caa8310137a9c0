"""Check the folder of a data set and report all problems at once, not only the first one."""

import hashlib
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kinlens import reports
from kinlens.embedder.decoding.formats import SUFFIXES
from kinlens.embedder.errors import DatasetError, ImageError
from kinlens.embedder.preprocess import decode, read_header
from kinlens.embedder.sources.names import composed
from kinlens.embedder.sources.walk import Omitted, fault_lines, is_omitted, read_failed, walk_images
from kinlens.training.config.settings import MAX_DAMAGED
from kinlens.training.data.datasets import OFFICIAL, Count, counts, data_sets_in
from kinlens.training.data.feedback import read_feedback, scan_feedback
from kinlens.training.data.load import (
    KINDS,
    TABLE,
    read_folder,
    recognise,
    scan_table,
    split_by_column,
)
from kinlens.training.data.records import FEWEST, Record

Watch = Callable[[int], Callable[[], object]]
"""Called with the number of images; returns a function to call after each image."""

Cases = dict[str, list[str]]
"""Findings by code."""

_FINDINGS = {
    "layout": "fault of the layout",
    "counts": "difference from the official counts. Unpack again, or pass --allow-partial",
    "rows": "row(s) of the CSV cannot be used",
    "feedback-rows": "row(s) of the feedback cannot be read. Export it again",
    "missing": "image(s) are listed but missing. Copy or unpack them again, or remove their rows",
    "unreadable": "image(s) are empty, damaged, too large or not images. Copy again or remove them",
    "few-classes": f"class(es) have 2 images or more; a training needs {2 * FEWEST}: {FEWEST} to "
    f"train on and {FEWEST} others to test with. Add classes, or images to those that have one",
    "one-image": "class(es) have one image, so no pair. Add images; `adapt` drops such classes, "
    'and so does `fit` with small_classes = "drop"',
    "copies-across-parts": "image(s) are in train and in test, byte for byte",
    "copies-across-classes": "image(s) are in two classes, byte for byte",
    "copies": "image(s) are twice in their class, byte for byte, and would find each other",
    "unusable": "file(s) or folder(s) cannot be used and are skipped",
    "feedback": "reason(s) why rows of the feedback are not used",
    "unlisted": "image(s) belong to no class; they are skipped",
    "omitted": "kind(s) of files and folders are omitted",
}
_NOTES = {"unlisted", "feedback", "omitted"}
_NOTES_IF_OFFICIAL = {"one-image", "copies", "copies-across-parts", "copies-across-classes"}
"""Notes for official data sets, whose lists are fixed by the literature."""
_NOTES_IF_PARTIAL = {"missing", "counts"}
_STOPS = {"layout", "counts", "rows", "feedback-rows", "missing", "unreadable", "few-classes"}
_EXAMPLES = 5


@dataclass(frozen=True)
class Finding:
    """A problem prevents training, or makes its figures wrong; a note does not.

    `examples` has all cases; `stops` is true if no training starts.
    """

    severity: Literal["problem", "note"]
    code: str
    count: int
    message: str
    examples: tuple[str, ...]
    stops: bool = False


@dataclass(frozen=True)
class Report(reports.Report):
    """The state of a data set; `parts` are the listed images, whether they exist or not."""

    root: Path
    kind: str | None
    parts: dict[str, Count]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return all(finding.severity == "note" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "root": str(self.root),
            "kind": self.kind,
            "healthy": self.healthy,
            "parts": {part: size._asdict() for part, size in self.parts.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def lines(self, whole: bool = False) -> Iterator[str]:
        """The report for people, with the first examples or the `whole` list of each finding."""
        yield f"{self.root}: layout {self.kind or 'unknown'}"
        for part, size in self.parts.items():
            yield f"  {part}: {size.images:,} images of {size.classes:,} classes"
        for finding in sorted(self.findings, key=lambda finding: finding.severity == "note"):
            sign = "note" if finding.severity == "note" else "PROBLEM"
            yield f"{sign} [{finding.code}] {finding.count:,} {finding.message}"
            shown = None if whole or finding.code == "omitted" else _EXAMPLES
            yield from (f"    {example}" for example in finding.examples[:shown])
            if shown is not None and finding.count > shown:
                yield f"    ... and {finding.count - shown:,} more (--all lists them)"
        if self.healthy:
            yield "Healthy."
        elif any(finding.stops for finding in self.findings):
            yield "Fix the problems before training."
        else:
            yield "These problems do not stop a training; fixed, it is better."


def examine(
    root: Path,
    kind: str | None = None,
    file: str | None = None,
    quick: bool = False,
    allow_partial: bool = False,
    watch: Watch = lambda _total: lambda: None,
    feedback: Sequence[Path] = (),
) -> Report:
    """Read the lists of a data set and check every image.

    `file` is the CSV that lists its images and implies the kind "csv". `quick` does not find damage
    inside an image. The report covers the `feedback` on all classes, while a training ignores that
    on its test classes.

    Raises: DatasetError if there is no such folder or kind.
    """
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise DatasetError(f"{root} {what}. Give the folder of a data set.")
    if kind is not None and kind not in KINDS:
        raise DatasetError(f"--kind {kind}: no such layout. Give one of {', '.join(KINDS)}.")
    if file is not None and kind not in (None, "csv"):
        raise DatasetError(f"--file is for the kind csv, not {kind}. Omit one of the two.")
    kind = "csv" if file else kind or recognise(root)
    official = OFFICIAL.get(kind or "")
    cases: Cases = defaultdict(list)
    records: list[Record] = []
    omitted = Omitted()
    try:
        records = _listed(root, kind, file or TABLE, cases, omitted)
        base = official.image_root(root) if official else root
        there = _check_images(base, records, quick, watch(len(records)), cases)
        _check_classes(there, cases)
        cases["unlisted"] = _unlisted(base, records, omitted if kind != "folder" else Omitted())
        if official:
            cases["few-classes"] = []  # the literature has fixed the split
            if differing := official.differs(there):
                cases["counts"].append(differing)
        elif any(record.part for record in there) and not cases["few-classes"]:
            split_by_column(root, there)  # raises if a training would refuse the column
    except DatasetError as error:
        cases["layout"].append(str(error))
    cases["unusable"], cases["omitted"] = fault_lines(omitted.faults), [*omitted.lines()]
    images = _check_feedback(feedback, records, quick, cases) if feedback else []
    notes = _NOTES | (_NOTES_IF_OFFICIAL if official else set())
    notes |= _NOTES_IF_PARTIAL if allow_partial else set()
    stops = _STOPS
    damaged = len(cases["unreadable"]) + len(cases["missing"])
    if not official and damaged <= MAX_DAMAGED * len(records):
        stops = _STOPS - {"unreadable", "missing"}  # a training skips them
    findings = [
        Finding(
            "note" if code in notes else "problem",
            code,
            len(found),
            message,
            tuple(found),
            code in stops - notes,
        )
        for code, message in _FINDINGS.items()
        if (found := cases[code])
    ]
    return Report(root, kind, counts(records) | counts(images), tuple(findings))


def _listed(
    root: Path, kind: str | None, file: str, cases: Cases, omitted: Omitted
) -> list[Record]:
    if kind is None:
        inside = data_sets_in(root)
        hint = f" {inside[0]} looks like one: try that." if inside else ""
        raise DatasetError(
            f"{root} has no known layout: neither one of {', '.join(OFFICIAL)}, nor a file "
            f"{TABLE}, nor a sub-folder with images for each class.{hint}"
        )
    if kind in OFFICIAL:
        return OFFICIAL[kind].records(root)
    if kind == "folder":
        return read_folder(root, omitted=omitted)
    records, cases["rows"] = scan_table(root, file, omitted=omitted)
    return records


def _check_images(
    base: Path, records: Sequence[Record], quick: bool, on_image: Callable[[], object], cases: Cases
) -> list[Record]:
    """Check each image, with a thread for each processor; returns the existing ones."""
    there = []
    same: dict[str, list[Record]] = defaultdict(list)
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # Pillow warns about harmless oddities of files
        looks = pool.map(lambda record: _check_image(base / record.path, quick), records)
        for record, (digest, fault) in zip(records, looks, strict=True):
            if digest:
                same[digest].append(record)
            elif fault:
                cases["unreadable"].append(f"{record.path}: {fault}")
            else:
                cases["missing"].append(record.path)
            if digest or fault:
                there.append(record)
            on_image()
    for group in (group for group in same.values() if len(group) > 1):
        code = "copies"
        if len({record.part == "train" for record in group}) > 1:
            code = "copies-across-parts"
        elif len({record.label for record in group}) > 1:
            code = "copies-across-classes"
        cases[code].append(" = ".join(record.path for record in group))
    return there


def _check_image(path: Path, quick: bool) -> tuple[str, str]:
    """The digest of an image, or why it is unreadable; both empty if the file is missing."""
    try:
        data = path.read_bytes()
        (read_header if quick else decode)(data)
    except FileNotFoundError:
        return "", ""
    except (OSError, ImageError) as error:
        return "", str(error)
    return hashlib.sha256(data).hexdigest(), ""


def _check_classes(there: Sequence[Record], cases: Cases) -> None:
    """Find classes without a pair, and too few classes for a train and a test part."""
    sizes = Counter((record.part == "train", record.label) for record in there)
    cases["one-image"] = sorted(label for (_, label), size in sizes.items() if size == 1)
    pairs = [(is_train, label) for (is_train, label), size in sizes.items() if size > 1]
    train = sum(is_train for is_train, _ in pairs)
    is_split = any(record.part for record in there)
    if min(train, len(pairs) - train) < FEWEST if is_split else len(pairs) < 2 * FEWEST:
        cases["few-classes"] = sorted(label for _, label in pairs)


def _check_feedback(
    folders: Sequence[Path], records: Sequence[Record], quick: bool, cases: Cases
) -> list[Record]:
    """Check the query images that feedback adds to classes; returns them as records."""
    try:
        cases["feedback-rows"] = [fault for folder in folders for fault in scan_feedback(folder)[1]]
        if cases["feedback-rows"]:
            return []
        feedback = read_feedback(folders, {record.path: record.label for record in records})
    except DatasetError as error:
        cases["feedback-rows"].append(str(error))
        return []
    cases["feedback"] = [f"{n:,} of {feedback.rows:,} {why}" for why, n in feedback.unused.items()]
    for image in feedback.images:
        if fault := _check_image(image.path, quick)[1]:
            cases["unreadable"].append(f"{image.path}: {fault}")
    return [Record(image.name, image.label, "feedback") for image in feedback.images]


def _unlisted(base: Path, records: Sequence[Record], omitted: Omitted) -> list[str]:
    """Images next to the listed ones, in the same folders, that no list has."""
    # A CSV may have ./mug/1.jpg, absolute paths, and paths out of the folder.
    listed = {os.path.relpath(base / record.path, base) for record in records}
    folders = {path.split("/")[0] for path in listed if "/" in path} - {".."}
    try:
        images = {
            path.name
            for path in base.iterdir()
            if path.suffix.lower() in SUFFIXES and path.is_file() and not is_omitted(path.name)
        }
        for folder in sorted(folders):
            images |= {path for path, _ in walk_images(base, omitted, folder, leave_root=True)}
    except OSError as error:
        raise DatasetError(read_failed(error)) from error
    return sorted(map(composed, images - listed))
