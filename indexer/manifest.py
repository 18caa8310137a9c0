"""The manifest of a gallery version: frozen, versioned, an unknown key is an error."""

import hashlib
import json
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from embedder.errors import InvalidParameterError

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


class GalleryManifest(BaseModel):
    """All that is known about a gallery version; `files` holds the sha256 of each of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: str = Field(pattern=f"^{_NAME}$")
    bundle_id: str = Field(min_length=1)
    dim: int = Field(ge=1)
    size: int = Field(ge=1)
    created_at: str
    source: str
    source_root: str
    index: Literal["exact"] = "exact"
    files: dict[str, str]
    version: str = ""

    def computed_version(self) -> str:
        """sha256 (hex) over this manifest without its version."""
        content = self.model_dump(mode="json", exclude={"version"})
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def with_version(self) -> "GalleryManifest":
        """The same manifest, stamped with its own version."""
        return self.model_copy(update={"version": self.computed_version()})


def checked_name(name: str) -> str:
    """`name` itself, if it can stand in the address of a gallery.

    Raises: InvalidParameterError.
    """
    if not re.fullmatch(_NAME, name):
        raise InvalidParameterError(
            f"The gallery name {name!r} cannot stand in an address. Give up to 64 letters, "
            "digits, '.', '_' or '-' with --name, beginning with a letter or digit."
        )
    return name


def name_of(folder: Path) -> str:
    """A gallery name made from the name of its folder."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name)[:64]
    return cleaned.strip("-._") or "gallery"
