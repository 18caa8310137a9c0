"""Rows of CSV files, as spreadsheets write them."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

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
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(file)) from error
    except csv.Error as error:
        raise ValueError(
            f"{file}:{reader.line_num} is not valid CSV: {error}. Check its quotes."
        ) from error


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
