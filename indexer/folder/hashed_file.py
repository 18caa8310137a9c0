"""A new file that is hashed while it is written, so that nobody has to read it again."""

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class FileFacts(BaseModel):
    """Size and sha256 (hex) of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class HashedFile:
    """Opened for writing, as a context manager; an error removes nothing. Raises: OSError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any) -> int:
        """Append bytes, or anything with a contiguous buffer; how many bytes."""
        # Through a Python file, because FAISS' own writer does not notice a full disk on closing.
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        self._file.write(view)
        self._hash.update(view)
        self._bytes += len(view)
        return len(view)

    @property
    def facts(self) -> FileFacts:
        """Of what was written so far."""
        return FileFacts(bytes=self._bytes, sha256=self._hash.hexdigest())

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
