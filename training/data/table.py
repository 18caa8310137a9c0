"""Lists of images as CSV: read as a data set, written for the indexer."""

import csv
from collections import defaultdict
from pathlib import Path

from embedder.errors import DatasetError
from training.data.records import LabelledImages, Split, labelled


def read_table(root: Path, file: str) -> tuple[list[tuple[str, str]], dict[str, str] | None]:
    """(path, label) of each row, and the split of each path if there is such a column.

    Raises: DatasetError naming the line of the first fault.
    """
    path = root / file
    if not path.is_file():
        raise DatasetError(f"The CSV {path} does not exist. Check data.root and data.file.")
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        missing = {"path", "label"} - set(reader.fieldnames or ())
        if missing:
            raise DatasetError(
                f"{path} lacks the column(s) {', '.join(sorted(missing))}; it has "
                f"{', '.join(reader.fieldnames or ()) or 'none'}. The first line names the columns."
            )
        rows = [(number, row) for number, row in enumerate(reader, start=2)]
    splits: dict[str, str] = {}
    for number, row in rows:
        _check_row(path, root, number, row)
        if row["path"] in splits:
            raise DatasetError(f"{path}, line {number}: {row['path']} is listed a second time.")
        splits[row["path"]] = (row.get("split") or "").strip()
    records = [(row["path"], row["label"]) for _, row in rows]
    return records, splits if any(splits.values()) else None


def write_table(path: Path, images: LabelledImages) -> None:
    """Write a list that the indexer reads: columns key, path, class; paths relative to the root."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("key", "path", "class"))
        for image, label in zip(images.paths, images.labels, strict=True):
            writer.writerow((image, image, images.class_names[label]))


def split_by_column(root: Path, records: list[tuple[str, str]], splits: dict[str, str]) -> Split:
    """The split that the CSV states. Raises: DatasetError if a class is in both parts."""
    parts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for record in records:
        parts[splits[record[0]]].append(record)
    if set(parts) != {"train", "test"}:
        raise DatasetError(
            f"The column split holds {', '.join(repr(p) for p in sorted(parts))}; "
            "it must hold 'train' and 'test', both at least once."
        )
    both = {name for _, name in parts["train"]} & {name for _, name in parts["test"]}
    if both:
        raise DatasetError(
            f"{len(both)} class(es) are in train and in test, for example {min(both)!r}. "
            "The classes of the two parts must differ: the model is tested on unseen classes."
        )
    return Split(labelled(root, parts["train"]), labelled(root, parts["test"]))


def _check_row(path: Path, root: Path, number: int, row: dict[str, str]) -> None:
    if not row["path"] or not row["label"]:
        raise DatasetError(f"{path}, line {number}: path and label must not be empty.")
    if not (root / row["path"]).is_file():
        raise DatasetError(f"{path}, line {number}: the image {root / row['path']} is missing.")
