"""The audit log of changes: one line of JSON for each change, in STATE/audit.jsonl.

    route: note(...) ─► rule, before the answer ─► thread ─► lock, append ─► audit.jsonl
                                                                │ full
                                                                ▼
                                         audit.jsonl.1 … .7, the oldest is removed

A line names the API key and the gallery and counts the items. It contains no secrets, no item keys
or attributes, and no images. Any number of processes may write.
"""

import contextlib
import json
import os
from collections.abc import Iterator, MutableMapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from kinlens.embedder.durable import exclusive, make_folder
from kinlens.embedder.errors import StateError
from kinlens.models import AuditEntry, Change

AUDIT_FILE = "audit.jsonl"
KEPT_FILES = 8
"""Number of files of the log, including the current one."""

FILE_BYTES = 8 * 2**20
"""A file is rotated at this size."""

_STEP = "audit"
_SHOWN = 80
_TAIL_BYTES = 4_096  # longer than any line, since texts are truncated


def note(
    state: MutableMapping[str, Any],
    *,
    affected: int | None = None,
    gallery: str | None = None,
    target: str | None = None,
) -> None:
    """Record for the audit log what a request changes; later values replace earlier ones."""
    fields = {"affected": affected, "gallery": gallery, "target": target}
    known = {name: value for name, value in fields.items() if value is not None}
    state.setdefault("change", {}).update(known)


class AuditLog:
    """The log in the folder `state`. Thread safe."""

    def __init__(
        self, state: Path, *, file_bytes: int = FILE_BYTES, kept_files: int = KEPT_FILES
    ) -> None:
        self.path = state / AUDIT_FILE
        old = [state / f"{AUDIT_FILE}.{number}" for number in range(1, kept_files)]
        self._paths = [self.path, *old]  # newest first
        self._file_bytes = file_bytes

    def add(self, change: Change) -> None:
        """Append a change; if that fails, log a warning with the change instead."""
        try:
            self._append(_cut(change))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            warn(change, reason)

    def newest(self, limit: int, before: int | None = None) -> list[AuditEntry]:
        """Up to `limit` entries with numbers below `before`, newest first, without damaged lines.

        Raises: StateError.
        """
        found: list[AuditEntry] = []
        for path in self._paths:
            for line in _lines(path):
                if before is None or line.number < before:
                    found.append(line)
                    before = line.number  # a concurrent rotation would repeat lines
                if len(found) == limit:
                    return found
        return found

    def _append(self, fields: dict[str, Any]) -> None:
        make_folder(self.path.parent, _STEP)
        with exclusive(self.path.with_name(f".{AUDIT_FILE}.lock"), wait=True):
            last, size = self._last_number()
            if size >= self._file_bytes:
                self._rotate()
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = {"number": last + 1, "time": now, **fields}
            text = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode()
            self._write(text + b"\n")

    def _write(self, line: bytes) -> None:
        """Append the whole line, or nothing if the disk becomes full."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # the last line is incomplete after a power loss
            try:
                written = os.write(descriptor, line)
                if written < len(line):
                    raise OSError(None, "the disk is full")
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def _last_number(self) -> tuple[int, int]:
        """The number of the last line, and the size of the current file."""
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                for line in _parsed(file.read()):
                    return line.number, size if path == self.path else 0
        return 0, 0

    def _rotate(self) -> None:
        for newer, older in reversed([*pairwise(self._paths)]):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)


def _cut(change: Change) -> dict[str, Any]:
    """The fields of a change with all texts truncated, since clients choose some of them."""
    return {
        name: value[:_SHOWN] if isinstance(value, str) else value
        for name, value in change.model_dump(exclude_none=True).items()
    }


def _lines(path: Path) -> Iterator[AuditEntry]:
    """The lines of a file, newest first. Raises: StateError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise StateError(
            f"The audit log {path} cannot be read ({error.strerror}). Allow this user to read it."
        ) from error
    yield from _parsed(content)


def _parsed(content: bytes) -> Iterator[AuditEntry]:
    for text in reversed(content.splitlines()):
        with contextlib.suppress(ValidationError):
            yield AuditEntry.model_validate_json(text)


def warn(change: Change, reason: str) -> None:
    """Log a change that was made but cannot be written to the audit log."""
    fields = {f"change_{name}": value for name, value in _cut(change).items()}
    structlog.get_logger().warning("audit log not written", reason=reason, **fields)
