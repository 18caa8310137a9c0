"""Lists of images as CSV: read as a data set, written for the indexer."""

import csv
from collections import defaultdict
from pathlib import Path

from embedder.errors import DatasetError
from training.data.records import LabelledImages, Split, labelled
from training.data.splits import require_classes


def read_table(root: Path, file: str) -> tuple[list[tuple[str, str]], dict[str, str] | None]:
    """(path, label) of each row, and the split of each path if there is such a column.

    Raises: DatasetError naming the line of the first fault.
    """
    rows, faults = scan_table(root, file)
    if faults:
        raise DatasetError(faults[0])
    splits = {row["path"]: (row.get("split") or "").strip() for row in rows}
    records = [(row["path"], row["label"]) for row in rows]
    return records, splits if any(splits.values()) else None


def scan_table(root: Path, file: str) -> tuple[list[dict[str, str]], list[str]]:
    """Rows that can be used, and what is wrong with the others.

    Raises: DatasetError if the file is missing, is not a text or lacks a column.
    """
    path = root / file
    seen: set[str] = set()
    faults, usable = [], []
    for number, row in _numbered_rows(path):
        what = _fault(root, row, seen)
        if what:
            faults.append(f"{path}, line {number}: {what}")
        else:
            usable.append(row)
        seen.add(row["path"])
    return usable, faults


def write_table(path: Path, images: LabelledImages) -> None:
    """Write a list that the indexer reads: columns key, path, class; paths relative to the root."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("key", "path", "class"))
        for image, label in zip(images.paths, images.labels, strict=True):
            writer.writerow((image, image, images.class_names[label]))


def split_by_column(root: Path, records: list[tuple[str, str]], splits: dict[str, str]) -> Split:
    """The split that the CSV states.

    Raises: DatasetError if a class is in both parts, or a part has a single class.
    """
    parts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for record in records:
        parts[splits[record[0]]].append(record)
    if set(parts) != {"train", "test"}:
        raise DatasetError(
            f"The column split holds {', '.join(repr(p) for p in sorted(parts)) or 'nothing'}; "
            "it must hold 'train' and 'test', both at least once."
        )
    split = Split(labelled(root, parts["train"]), labelled(root, parts["test"]))
    require_classes(split)
    return split


def _numbered_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    if not path.is_file():
        raise DatasetError(f"The CSV {path} does not exist. Check data.root and data.file.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = {"path", "label"} - set(reader.fieldnames or ())
            if missing:
                raise DatasetError(
                    f"{path} lacks the column(s) {', '.join(sorted(missing))}; it has "
                    f"{', '.join(reader.fieldnames or ()) or 'none'}. "
                    "The first line names the columns."
                )
            return [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(
            f"{path} is not a CSV in UTF-8 ({error}). Save it again as CSV in UTF-8."
        ) from error


def _fault(root: Path, row: dict[str, str], seen: set[str]) -> str:
    if not row["path"] or not row["label"]:
        return "path and label must not be empty."
    if row["path"] in seen:
        return f"{row['path']} is listed a second time."
    if not (root / row["path"]).is_file():
        return f"the image {root / row['path']} is missing."
    return ""
