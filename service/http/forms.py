"""Reads multipart/form-data that has arrived as a whole, without a file or a task for each part."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import HTTPException
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_PARTS = 1_000


@dataclass(slots=True)
class Part:
    """One part of a form: a file if it came with a file name."""

    name: str = ""
    is_file: bool = False
    chunks: list[bytes] = field(default_factory=list)

    @property
    def data(self) -> bytes:
        """The content."""
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)

    @property
    def text(self) -> str:
        """The content as text. Raises: HTTPException (400) if it is none."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise _malformed(f"{self.name[:40]!r} is not UTF-8 text") from None


def parse_form(body: bytes, content_type: str) -> list[Part]:
    """The parts in their order. Raises: HTTPException (400) for a form that cannot be read."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise HTTPException(400, "Missing boundary in multipart.")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except (FormParserError, UnicodeDecodeError, ValueError) as error:
        raise _malformed(str(error)) from error
    if not reader.is_complete:
        raise _malformed("its end is missing")
    return reader.parts


class _Reader:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.is_complete = False
        self._name = b""
        self._value = b""

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._take_data,
            "on_header_field": self._take_name,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_name,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) >= _MAX_PARTS:
            raise _malformed(f"it has more than {_MAX_PARTS:,} parts")
        self.parts.append(Part())

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].chunks.append(data[start:end])

    def _take_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self.parts[-1].name = options.get(b"name", b"").decode()
            self.parts[-1].is_file = b"filename" in options
        self._name = self._value = b""

    def _check_name(self) -> None:
        if not self.parts[-1].name:
            raise _malformed("a part has no name")

    def _end(self) -> None:
        self.is_complete = True


def _malformed(what: str) -> HTTPException:
    return HTTPException(400, f"The form cannot be read: {what}. Send multipart/form-data.")
