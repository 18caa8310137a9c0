"""Galleries of the first format, which are read once, to be imported.

versions/<version>/
  catalog.sqlite   one table: what each item is, attributes as JSON text
  index.faiss      IndexIDMap2 over IndexFlatIP: a unit vector per item number
  report.json
  manifest.json    schema_version 1, with the sha256 of the other three and of itself
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from embedder.bundle import sha256_of
from embedder.errors import SourceError
from indexer.exchange.dump import Dump
from indexer.types import Entry

_SCHEMA_VERSION = 1
_SHORT = 12
_FILES = ("catalog.sqlite", "index.faiss", "report.json")
_FACTS = ("name", "bundle_id", "created_at", "source", "source_root")
_BATCH = 1000
_PAGE = """
SELECT id, key, path, sha256, attributes, format FROM items
WHERE id > ? ORDER BY id LIMIT ?
"""
_CURE = "Import an undamaged copy, or build the gallery again from its images."


def import_legacy(path: Path | str) -> Dump:
    """The content of a gallery of the first format; all its hashes are checked first.

    Raises: SourceError.
    """
    folder = _current(Path(path))
    manifest = _manifest(folder)
    for name in _FILES:
        _check_hash(folder / name, manifest["files"][name])
    index = _index(folder / "index.faiss")
    size, dim = int(manifest["size"]), int(manifest["dim"])
    if (index.ntotal, index.d) != (size, dim):
        raise SourceError(
            f"{folder} does not fit together: {index.ntotal} vectors of length {index.d} in the "
            f"index, {size} of length {dim} in the manifest. {_CURE}"
        )
    facts = {name: str(manifest[name]) for name in _FACTS}
    return Dump(facts, dim, size, lambda: _entries(folder / "catalog.sqlite", index, size))


def _current(path: Path) -> Path:
    try:
        name = (path / "CURRENT").read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise SourceError(
            f"{path} is not a gallery: CURRENT cannot be read ({error.strerror}). Give the folder "
            "that `kinlens-index build ... --out` wrote."
        ) from error
    folder = path / "versions" / name
    if not re.fullmatch(f"[0-9a-f]{{{_SHORT}}}", name) or not folder.is_dir():
        raise SourceError(
            f"{path / 'CURRENT'} points to the version {name[:40]!r}, which is not there. {_CURE}"
        )
    return folder


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = manifest["schema_version"]
        if schema == _SCHEMA_VERSION:
            _check_manifest(path, manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SourceError(f"{path} is not a gallery manifest: {reason}. {_CURE}") from error
    if schema != _SCHEMA_VERSION:
        raise SourceError(
            f"{folder.parent.parent} is a gallery of schema {schema}, only one of schema "
            f"{_SCHEMA_VERSION} is read here. To copy a newer one use `kinlens-index backup`, or "
            "`kinlens-index export` and import its file."
        )
    return manifest


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    missing = {*_FACTS, "dim", "size", "files", "version"} - manifest.keys()
    missing |= set(_FILES) - manifest.get("files", {}).keys()
    if missing:
        raise KeyError(*sorted(missing))
    content = {name: value for name, value in manifest.items() if name != "version"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    found = hashlib.sha256(canonical.encode()).hexdigest()
    if found != manifest["version"] or found[:_SHORT] != path.parent.name:
        raise SourceError(
            f"{path} does not match its version {str(manifest['version'])[:_SHORT]} (its content "
            f"gives {found[:_SHORT]}): it was edited after the build. {_CURE}"
        )


def _check_hash(path: Path, expected: str) -> None:
    try:
        found = sha256_of(path)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}. {_CURE}") from error
    if found != expected:
        raise SourceError(
            f"{path} has sha256 {found[:_SHORT]}, the manifest says {expected[:_SHORT]}: the file "
            f"is damaged or was changed. {_CURE}"
        )


def _index(path: Path) -> Any:
    try:
        index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, MemoryError) as error:
        raise SourceError(f"{path} is not a readable index. {_CURE}") from error
    flat = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap2) else None
    if not isinstance(flat, faiss.IndexFlat):
        raise SourceError(f"{path} holds {type(index).__name__}, expected IndexIDMap2. {_CURE}")
    return index


def _entries(path: Path, index: Any, size: int) -> Iterator[Entry]:
    last, count = -1, 0
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            while rows := connection.execute(_PAGE, (last, _BATCH)).fetchall():
                yield from _page(rows, index)
                last, count = rows[-1][0], count + len(rows)
    except (sqlite3.Error, ValueError) as error:
        raise SourceError(f"{path} cannot be read as a catalogue: {error}. {_CURE}") from error
    if count != size:
        raise SourceError(f"{path} holds {count} items, the manifest says {size}. {_CURE}")


def _page(rows: list[tuple[Any, ...]], index: Any) -> list[Entry]:
    numbers = np.array([row[0] for row in rows], dtype=np.int64)
    try:
        vectors = index.reconstruct_batch(numbers)
    except RuntimeError as error:
        raise SourceError(
            f"The items {numbers[0]} to {numbers[-1]} are not all in the index. {_CURE}"
        ) from error
    return [
        Entry(key, vector, sha256, json.loads(attributes), path, kind)
        for (_, key, path, sha256, attributes, kind), vector in zip(rows, vectors, strict=True)
    ]
