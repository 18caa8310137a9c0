"""Customer feedback (clicks, purchases, wrong answers) of `kinlens-serve feedback export`.

A folder has `pairs.csv`, one row per judged answer, and optionally the query images. Columns:

- `query`: the query image, a path below the folder, or empty;
- `query_key`: the shop image that was the query instead, or empty;
- `item`: the returned image, by its path in the data set;
- `action`: clicked, bought or wrong.

A query image gets the class with the most votes: a click or purchase is a vote for the class of
the item, a wrong answer a vote against it. Without a single winner above 0 it has no class.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kinlens.embedder.errors import DatasetError
from kinlens.training.data.records import Feedback, QueryImage, Split, read_rows

FILE = "pairs.csv"
_LIKED = ("clicked", "bought")
_ACTIONS = (*_LIKED, "wrong")

UNKNOWN = "name items that are not in the data; train on the folder that the gallery is built from"
KEY_ONLY = "judge an answer to a search with an image of the shop itself, which adds no new image"
NOT_KEPT = "like an answer to a query image that is not kept in the folder"
OUTVOTED = "are outvoted by other rows of the same query image, or tied with them"
UNKNOWN_PRODUCT = "call an answer wrong for a query image of unknown product"
"""Reasons why rows are not used."""


class Row(NamedTuple):
    query: str
    query_key: str
    item: str
    action: str


def read_feedback(folders: Sequence[Path], classes: Mapping[str, str]) -> Feedback:
    """The feedback in `folders` on a data set; `classes` maps the path of an image to its class.

    Queries of the same path in two folders are the same image, since the content is the name.

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
    labels = _classes_of_queries(rows, classes)
    uses = [_use(row, labels, classes, kept) for row in rows]
    unused = Counter(use for use in uses if isinstance(use, str))
    return Feedback(
        rows=len(rows),
        images=tuple(sorted({use for use in uses if isinstance(use, QueryImage)})),
        unused={reason: unused[reason] for reason in sorted(unused)},
    )


def scan_feedback(folder: Path) -> tuple[list[Row], list[str]]:
    """The readable rows, and an error for each other row. Raises: DatasetError."""
    path, rows, faults = folder / FILE, [], []
    cure = "Check data.feedback: it names folders that `kinlens-serve feedback export` wrote."
    for line, content in read_rows(path, *Row._fields, cure=cure):
        row = Row(*(content[name] for name in Row._fields))
        if fault := _fault(row):
            faults.append(f"{path}, line {line}: {fault}.")
        else:
            rows.append(row)
    return rows, faults


def sentences(split: Split) -> list[str]:
    """What feedback adds to the training and what is held out, one sentence each."""
    feedback = split.feedback
    if feedback is None:
        return []
    images = split.joined()
    classes = len(set(images.labels.tolist()))
    held_out = len(feedback.images) - len(images)
    lines = [
        f"feedback: {len(images):,} query image(s) join {classes:,} train class(es)"
        + (f"; {held_out:,} of held-out classes are not used" if held_out else "")
    ]
    unused = feedback.unused.items()
    return lines + [f"feedback: {n:,} of {feedback.rows:,} rows {why}" for why, n in unused]


def _classes_of_queries(rows: Sequence[Row], classes: Mapping[str, str]) -> dict[str, str]:
    votes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.query and row.item in classes:
            votes[row.query][classes[row.item]] += 1 if row.action in _LIKED else -1
    labels = {}
    for query, found in votes.items():
        (label, most), *others = found.most_common(2)
        if most > 0 and all(most > count for _, count in others):
            labels[query] = label
    return labels


def _use(
    row: Row, labels: Mapping[str, str], classes: Mapping[str, str], kept: Mapping[str, Path]
) -> QueryImage | str | None:
    """The query image that a row adds, why it is not used, or None for a vote against an item."""
    item = classes.get(row.item)
    if item is None:
        return UNKNOWN
    if not row.query:
        return KEY_ONLY
    own = labels.get(row.query)
    if row.action in _LIKED:
        if own != item:
            return OUTVOTED
        return QueryImage(item, row.query, kept[row.query]) if row.query in kept else NOT_KEPT
    if own is None:
        return UNKNOWN_PRODUCT
    return OUTVOTED if own == item else None


def _fault(row: Row) -> str:
    if row.action not in _ACTIONS:
        return f"the action {row.action!r} must be one of {', '.join(_ACTIONS)}"
    if not row.item or not (row.query or row.query_key):
        return "it needs an item, and a query or query_key"
    path = PurePosixPath(row.query)
    if path.is_absolute() or ".." in path.parts:
        return f"the query {row.query!r} must be a relative path below the folder"
    return ""
