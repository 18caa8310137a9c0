"""What customers clicked, bought and called wrong, as `kinlens-serve feedback export` writes it.

A folder has `pairs.csv`, a row for each answer that somebody judged, and perhaps the pictures that
were searched with. `query` is such a picture, a path below the folder, or empty; `query_key` the
image of the shop that was searched with instead, or empty; `item` the image that was answered, by
its path in the data set; `action` clicked, bought or wrong.

A picture is of the product that most of its rows say: one that is clicked or bought has a vote, one
that is called wrong loses it, and without a single winner above 0 the picture tells nothing. An
item that is called wrong for a picture of another product tells that these two are confused.
"""

import csv
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kinlens.embedder.errors import DatasetError
from kinlens.training.data.records import Confused, Feedback, Picture, Split

FILE = "pairs.csv"
_LIKED = ("clicked", "bought")
_ACTIONS = (*_LIKED, "wrong")

UNKNOWN = "name items that are not in the data; train on the folder that the gallery is built from"
KEY_ONLY = "like an answer to a search with an image of the shop itself, which tells no product"
GONE = "like an answer to a picture that is not kept in the folder"
OUTVOTED = "are outvoted by other rows of the same picture, or tied with them"
UNTOLD = "call an answer wrong to a picture of which nobody told the product"
"""Why rows are of no use."""


class Row(NamedTuple):
    """One row of `pairs.csv`."""

    query: str
    query_key: str
    item: str
    action: str


def read_feedback(folders: Sequence[Path], classes: Mapping[str, str]) -> Feedback:
    """What the folders tell of a data set whose images have these classes, by their paths.

    A query of the same path in two folders is the same picture, since it is named by its content.

    Raises: DatasetError naming the line of the first fault.
    """
    rows: list[Row] = []
    kept: dict[str, Path] = {}
    for folder in folders:
        found, faults = scan_feedback(folder)
        if faults:
            raise DatasetError(faults[0])
        rows += found
        for name in {row.query for row in found if row.query} - kept.keys():
            if (folder / name).is_file():
                kept[name] = (folder / name).absolute()
    told = _told(rows, classes)
    uses = [_use(row, told, classes, kept) for row in rows]
    confused = Counter(tuple(sorted(use)) for use in uses if isinstance(use, frozenset))
    unused = Counter(use for use in uses if isinstance(use, str))
    return Feedback(
        rows=len(rows),
        pictures=tuple(sorted({use for use in uses if isinstance(use, Picture)})),
        confused=tuple(Confused(a, b, n) for (a, b), n in sorted(confused.items())),
        unused={reason: unused[reason] for reason in sorted(unused)},
    )


def scan_feedback(folder: Path) -> tuple[list[Row], list[str]]:
    """Rows that can be read, and what is wrong with the others.

    Raises: DatasetError if there is no `pairs.csv`, or if it is no text or lacks a column.
    """
    path, rows, faults = folder / FILE, [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            if not set(Row._fields) <= set(reader.fieldnames or ()):
                raise DatasetError(
                    f"The first line of {path} must name the columns {', '.join(Row._fields)}; it "
                    f"names {', '.join(reader.fieldnames or ()) or 'none'}."
                )
            for content in reader:
                row = Row(*(content[name] or "" for name in Row._fields))
                fault = _fault(row)
                if fault:
                    faults.append(f"{path}, line {reader.line_num}: {fault}.")
                else:
                    rows.append(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(
            f"The feedback {path} cannot be read as a CSV in UTF-8 ({error}). Check data.feedback: "
            "it names folders that `kinlens-serve feedback export` wrote."
        ) from error
    return rows, faults


def sentences(split: Split) -> list[str]:
    """What feedback adds to the training, and what is left out: a sentence each."""
    feedback = split.feedback
    if feedback is None:
        return []
    pictures, confused = split.joined(), split.confused()
    classes = len(set(pictures.labels.tolist()))
    said = [
        f"feedback: {len(pictures):,} picture(s) join {classes:,} train class(es); "
        f"{len(confused):,} pair(s) of train classes are confused"
    ]
    held_out = len(feedback.pictures) - len(pictures), len(feedback.confused) - len(confused)
    if any(held_out):
        said.append(
            f"feedback: {held_out[0]:,} picture(s) and {held_out[1]:,} pair(s) of held-out classes "
            "are left out"
        )
    return said + [f"feedback: {line}" for line in left_out(feedback)]


def left_out(feedback: Feedback) -> list[str]:
    """How many rows are of no use, for each reason."""
    return [f"{n:,} of {feedback.rows:,} rows {reason}" for reason, n in feedback.unused.items()]


def _told(rows: Sequence[Row], classes: Mapping[str, str]) -> dict[str, str]:
    """The class of each picture of which the rows tell one."""
    votes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.query and row.item in classes:
            votes[row.query][classes[row.item]] += 1 if row.action in _LIKED else -1
    told = {}
    for query, found in votes.items():
        (label, most), *others = found.most_common(2)
        if most > 0 and all(most > count for _, count in others):
            told[query] = label
    return told


def _use(
    row: Row, told: Mapping[str, str], classes: Mapping[str, str], kept: Mapping[str, Path]
) -> Picture | frozenset[str] | str:
    """The picture that a row joins to a class, the two classes that it confuses, or why neither."""
    item = classes.get(row.item)
    if item is None:
        return UNKNOWN
    own = told.get(row.query)
    if row.action in _LIKED:
        if not row.query:
            return KEY_ONLY
        if own != item:
            return OUTVOTED
        return Picture(item, row.query, kept[row.query]) if row.query in kept else GONE
    own = own or classes.get(row.query_key)
    if own is None:
        return UNTOLD
    return OUTVOTED if own == item else frozenset((own, item))


def _fault(row: Row) -> str:
    """Why a row cannot be read; empty if it can."""
    if row.action not in _ACTIONS:
        return f"the action {row.action!r} is none of {', '.join(_ACTIONS)}"
    if not row.item or not (row.query or row.query_key):
        return "an item and a query, or a query_key, must be given"
    place = PurePosixPath(row.query)
    if place.is_absolute() or ".." in place.parts:
        return f"the query {row.query!r} is no path below the folder"
    return ""
