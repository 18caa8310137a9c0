"""The files of one gallery version. The one module that writes and reads them.

versions/<version>/
  catalog.sqlite   what each item is
  index.faiss      a unit vector per item
  report.json      how the build went
  manifest.json    GalleryManifest with the hashes of the other three
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from embedder.bundle import sha256_of
from embedder.errors import GalleryCorruptError
from indexer.catalog import Catalog, Item, write_catalog
from indexer.engine import VectorStore
from indexer.faiss_engine import FaissStore
from indexer.layout import MANIFEST, SHORT
from indexer.manifest import GalleryManifest

CATALOG = "catalog.sqlite"
INDEX = "index.faiss"
REPORT = "report.json"

_HASHED = (CATALOG, INDEX, REPORT)
_CURE = "Build the gallery again."


def write_version(
    folder: Path,
    manifest: GalleryManifest,
    items: Iterable[Item],
    store: VectorStore,
    report: str,
) -> GalleryManifest:
    """Write a version into the empty `folder`; the manifest comes back with hashes and version.

    Raises: OSError, sqlite3.Error.
    """
    write_catalog(folder / CATALOG, items)
    store.save(folder / INDEX)
    (folder / REPORT).write_text(report, encoding="utf-8")
    files = {name: sha256_of(folder / name) for name in _HASHED}
    stamped = manifest.model_copy(update={"files": files}).with_version()
    (folder / MANIFEST).write_text(stamped.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return stamped


def read_manifest(folder: Path) -> GalleryManifest:
    """The manifest of a published version. Raises: GalleryCorruptError."""
    path = folder / MANIFEST
    try:
        manifest = GalleryManifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(
            f"{path} is not a gallery manifest that this version of Kinlens can read: "
            f"{_brief(error)}. {_CURE}"
        ) from error
    found = manifest.computed_version()
    if found != manifest.version or found[:SHORT] != folder.name:
        raise GalleryCorruptError(
            f"{path} does not match its version {manifest.version[:SHORT]} (its content gives "
            f"{found[:SHORT]}): it was edited after the build. {_CURE}"
        )
    return manifest


def open_version(
    folder: Path, manifest: GalleryManifest, verify_hashes: bool = True
) -> tuple[Catalog, VectorStore]:
    """Catalogue and index, checked against the manifest and each other.

    Raises: GalleryCorruptError.
    """
    if verify_hashes:
        for name in _HASHED:
            _check_hash(folder / name, manifest.files.get(name, "no hash"))
    catalog = Catalog.open(folder / CATALOG)
    try:
        store = FaissStore.load(folder / INDEX)
        _check_sizes(folder, manifest, catalog.count(), store)
    except BaseException:
        catalog.close()
        raise
    return catalog, store


def _brief(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def _check_sizes(
    folder: Path, manifest: GalleryManifest, item_count: int, store: VectorStore
) -> None:
    expected = (manifest.size, manifest.size, manifest.dim)
    if (item_count, store.size, store.dim) != expected:
        raise GalleryCorruptError(
            f"{folder} does not fit together: {item_count} items in the catalogue, {store.size} "
            f"vectors of length {store.dim} in the index, {manifest.size} items of length "
            f"{manifest.dim} in the manifest. {_CURE}"
        )


def _check_hash(path: Path, expected: str) -> None:
    if not path.is_file():
        raise GalleryCorruptError(f"{path} is missing. Build or copy the gallery again.")
    found = sha256_of(path)
    if found != expected:
        raise GalleryCorruptError(
            f"{path} has sha256 {found[:SHORT]}, the manifest says {expected[:SHORT]}: the file "
            "is damaged or was changed. Build or copy the gallery again."
        )


def read_report(folder: Path) -> dict[str, Any]:
    """How the build of a version went. Raises: GalleryCorruptError."""
    try:
        report: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(f"{folder / REPORT} cannot be read: {error}. {_CURE}") from error
    return report
