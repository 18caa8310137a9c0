"""A parser for multipart/form-data (RFC 7578) of bodies in memory: it searches for the boundary.

    --boundary CRLF  head CRLF CRLF  content  CRLF --boundary CRLF  ...  CRLF --boundary--

Clients choose a boundary that occurs in no part, so a boundary with any other continuation is an
error. A hostile form of near-boundaries therefore fails at the first one.
"""

import re
from dataclasses import dataclass
from itertools import islice

from fastapi import HTTPException

MAX_PARTS = 1_000
_HEAD_BYTES = 4 * 2**10
_MAX_FIELDS = 8  # header lines of a part, and parameters of one of them
_STEP = 2**20  # bytes searched at once; holds the GIL for a few milliseconds
_END = b"\r\n\r\n"
_FIELD = re.compile(rb"([!#-'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*)")
# Only quotes and backslashes are unescaped: Windows paths contain literal backslashes. A value
# without a closing quote extends to the end, so no part of the text is scanned twice.
_PARAMETER = re.compile(rb';[ \t]*([^\s;=]+)[ \t]*=[ \t]*(?:"((?:\\"|[^"])*+)(?:"|$)|([^;]*))')
_ESCAPED = re.compile(rb"\\([\"\\])")
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form; it is a file if it has a file name."""

    name: str
    is_file: bool
    data: bytes

    @property
    def text(self) -> str:
        """The content as text. Raises: HTTPException (400) if it is not UTF-8."""
        return _decoded(self.data, repr(self.name[:_SHOWN]))


def parse_form(body: bytes, content_type: str) -> list[Part]:
    """The parts in order. Raises: HTTPException (400) if the form cannot be read."""
    boundary = _parameters(content_type.encode("latin-1")).get(b"boundary")
    if not boundary:
        raise HTTPException(400, "Missing boundary in multipart.")
    delimiter = b"\r\n--" + boundary
    # The first boundary may start the body without a CRLF; anything before it is ignored.
    start = -2 if body.startswith(delimiter[2:]) else _find(body, delimiter, 0)
    parts: list[Part] = []
    while start != -1:
        after = start + len(delimiter)
        if body.startswith(b"--", after):
            return parts
        if not body.startswith(b"\r\n", after):
            raise _malformed(f"the boundary before byte {after:,} is not followed by a line break")
        if len(parts) == MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS:,} parts")
        end_of_head = body.find(_END, after, after + _HEAD_BYTES)
        if end_of_head == -1:
            raise _malformed(f"the head of a part has no end within {_HEAD_BYTES:,} bytes")
        content = end_of_head + len(_END)
        start = _find(body, delimiter, content)
        parts.append(_part(body[after + 2 : end_of_head], body[content : max(start, content)]))
    raise _malformed("its end is missing")


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    """Like `bytes.find`, in steps, so other threads can run in between."""
    for step in range(start, len(body), _STEP):
        found = body.find(delimiter, step, step + _STEP + len(delimiter) - 1)
        if found != -1:
            return found
    return -1


def _part(head: bytes, data: bytes) -> Part:
    disposition = b""
    lines = head.split(b"\r\n", _MAX_FIELDS)
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None or len(lines) > _MAX_FIELDS:
            raise _malformed(
                f"the head of a part must be up to {_MAX_FIELDS} lines of the form NAME: VALUE"
            )
        if field[1].lower() == b"content-disposition":
            disposition = field[2]
    given = _parameters(disposition)
    name = _decoded(given.get(b"name", b""), "a name")
    if not name:
        raise _malformed("a part has no name")
    return Part(name, b"filename" in given, data)


def _parameters(value: bytes) -> dict[bytes, bytes]:
    """The `name=value` pairs that follow the first semicolon of a header."""
    found: dict[bytes, bytes] = {}
    for match in islice(_PARAMETER.finditer(value), _MAX_FIELDS):
        name, quoted, token = match.groups()
        found[name.lower()] = token.rstrip() if quoted is None else _ESCAPED.sub(rb"\1", quoted)
    return found


def _decoded(text: bytes, what: str) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _malformed(f"{what} is not UTF-8 text") from None


def _malformed(what: str) -> HTTPException:
    return HTTPException(400, f"The form cannot be read: {what}. Send multipart/form-data.")
