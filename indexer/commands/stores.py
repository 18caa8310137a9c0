"""Opening what a command works on: a gallery in a folder, or one on Milvus."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from embedder.errors import GalleryNotFoundError, InvalidParameterError
from indexer.commands.console import err, progress
from indexer.exchange.dump import Dump
from indexer.gallery import Gallery
from indexer.ingest.add import IngestStore

if TYPE_CHECKING:
    from indexer.exchange.milvus_engine import MilvusStore

MILVUS = "milvus://"


@contextlib.contextmanager
def opened(
    text: str, *, bundle_id: str | None = None, image_root: Path | None = None, device: str = "cpu"
) -> Iterator[IngestStore]:
    """The gallery that an argument names: a folder, or milvus://HOST:PORT/NAME.

    Raises: GalleryError.
    """
    store = open_store(text, bundle_id=bundle_id, image_root=image_root, device=device)
    try:
        yield store
    finally:
        store.close()


def compact_if_due(store: IngestStore, leave: bool) -> None:
    """Make a new index if so much has changed that searches would get slow.

    Raises: PlanError, RecallError, GalleryWriteError.
    """
    if not isinstance(store, Gallery):
        return
    reason = store.needs_compaction()
    if reason is None:
        return
    if leave:
        err.print(f"A compaction is due: {reason}. Run kinlens-index compact.", soft_wrap=True)
        return
    err.print(f"Compacting: {reason}.", soft_wrap=True)
    with progress(store.size, "Indexing") as advance:
        store.compact(wait=True, on_progress=advance)


def facts_of(store: IngestStore) -> dict[str, str]:
    """What goes with the items of a gallery to another engine."""
    facts = {"name": store.name, "bundle_id": store.bundle_id}
    if isinstance(store, Gallery):
        known = store.manifest
        facts |= {
            "created_at": known.created_at,
            "source": known.source,
            "source_root": known.source_root,
        }
    return facts


def open_store(
    text: str, *, bundle_id: str | None = None, image_root: Path | None = None, device: str = "cpu"
) -> IngestStore:
    """As `opened`, without closing it."""
    if not text.startswith(MILVUS):
        return Gallery.open(
            text, expected_bundle_id=bundle_id, image_root=image_root, device=device
        )
    from indexer.exchange.milvus_engine import MilvusStore

    uri, name = _address(text)
    return MilvusStore.open(
        uri, name, expected_bundle_id=bundle_id, image_root=image_root, token=_token()
    )


@contextlib.contextmanager
def on_milvus(text: str, dump: Dump) -> "Iterator[MilvusStore]":
    """The gallery on Milvus that a dump goes into; a new one, if it is not there yet.

    Raises: BundleMismatchError if it is there with another bundle; GalleryError.
    """
    from indexer.exchange.milvus_engine import MilvusStore

    uri, name = _address(text)
    facts = dump.facts
    try:
        store = MilvusStore.open(uri, name, expected_bundle_id=facts["bundle_id"], token=_token())
    except GalleryNotFoundError:
        store = MilvusStore.create(
            uri,
            name,
            dim=dump.dim,
            bundle_id=facts["bundle_id"],
            source=facts.get("source", ""),
            source_root=facts.get("source_root", ""),
            token=_token(),
        )
    with contextlib.closing(store):
        yield store


def _address(text: str) -> tuple[str, str]:
    server, _, name = text.removeprefix(MILVUS).partition("/")
    if not server or not name or "/" in name:
        raise InvalidParameterError(
            f"{text!r} is not the address of a gallery. Write milvus://HOST:PORT/NAME."
        )
    return f"http://{server}", name


def _token() -> str:
    return os.environ.get("KINLENS_MILVUS_TOKEN", "")
