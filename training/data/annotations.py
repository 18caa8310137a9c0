"""The text files in which official data sets list their images: one row a line."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from embedder.errors import DatasetError


def read_rows(path: Path, columns: str, skip: int = 0) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of each line that is not blank.

    Args:
        path: a text file; fields are separated by white space.
        columns: names of the fields, separated by a space. The last takes the rest of its line.
        skip: lines of heading.

    Raises: DatasetError if the file cannot be read, or naming the line that lacks a field.
    """
    names = columns.split()
    for number, line in enumerate(_lines(path)[skip:], start=skip + 1):
        fields = line.split(None, len(names) - 1)
        if not fields:
            continue
        if len(fields) < len(names):
            raise fault(path, number, f"{line.strip()!r} lacks a field; a line is '{columns}'")
        yield number, [field.strip() for field in fields]


def fault(path: Path, number: int, what: str) -> DatasetError:
    """The error for a line that does not fit."""
    return DatasetError(f"{path}, line {number}: {what}. Unpack the data set again.")


def inside(path: Path, number: int, image: str) -> str:
    """`image` as a path below the folder of images.

    Raises: DatasetError if it is absolute or climbs out of that folder.
    """
    parts = PurePosixPath(image)
    if parts.is_absolute() or ".." in parts.parts:
        raise fault(path, number, f"the image {image!r} lies outside the data set")
    return parts.as_posix()


def whole_number(path: Path, number: int, text: str, most: int) -> int:
    """`text` as a number from 1 to `most`. Raises: DatasetError naming the line."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise fault(path, number, f"{text!r} is not a number from 1 to {most:,}")
    return int(text)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path} is not a text file ({error.reason} at byte {error.start}). "
            "Unpack the data set again."
        ) from error
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}.") from error
