"""Rows of CSV files, as spreadsheets write them."""

import csv
import json
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

PRODUCT = "product"
"""The attribute that joins the images of one product."""

_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with the number of its last line.

    Raises: ValueError with a message for a file that is not CSV in UTF-8; OSError.
    """
    with file.open("rb") as stream:
        if stream.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(
                f"{file} is UTF-16, as the format Unicode text of Excel. Save it as CSV UTF-8."
            )
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, skipinitialspace=True, strict=True)
            for row in reader:
                if reader.line_num == 1 and row[:1] and row[0].lower().startswith("sep="):
                    check_separator(file, row)  # a line for Excel alone
                elif any(cell.strip() for cell in row):
                    yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(file)) from error
    except csv.Error as error:
        raise ValueError(
            f"{file}:{reader.line_num} is not valid CSV: {error}. Check its quotes."
        ) from error


def class_in(names: Container[str]) -> str:
    """The attribute that a training learns: `class`, or `product` where there is no `class`."""
    return PRODUCT if PRODUCT in names and "class" not in names else "class"


def paths_in(cell: str, folder: Path) -> list[str]:
    """The files or folders in a cell `path`: one, several as `a.jpg|b.jpg`, or a JSON list.

    A file below `folder` may have such a name. Raises: ValueError for a wrong JSON list.
    """
    if not {"|", "["} & set(cell) or (folder / cell.replace("\0", "")).exists():
        return [cell]
    if not cell.startswith("["):
        return [path for part in cell.split("|") if (path := part.strip())] or [cell]
    try:
        paths = json.loads(cell)
        if not paths or not all(isinstance(path, str) for path in paths):
            raise ValueError
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the path {cell!r:.200} is not a list of files. Write a.jpg|b.jpg, or "
            '["a.jpg", "b.jpg"].'
        ) from error
    return [*map(str, paths)]


def check_separator(file: Path, header: Sequence[str]) -> None:
    """Raise ValueError if the columns of the header are separated by something else than commas."""
    for sign, name in _SEPARATORS.items():
        if len(header) == 1 and sign in header[0]:
            raise ValueError(
                f"{file} is separated by {name}: its first line is {header[0]!r:.80}. Save it "
                "separated by commas, with a point in decimals such as 2.20."
            )


def _not_utf8(file: Path) -> str:
    data = file.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return (
            f"{file}:{line} is not UTF-8 text: it has the byte {data[error.start]:#04x}, as in "
            "files of Windows. Save it as UTF-8; Excel calls that format CSV UTF-8."
        )
    return f"{file} is not UTF-8 text. Save it as UTF-8."
