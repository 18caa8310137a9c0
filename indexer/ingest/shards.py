"""Vectors embedded on a cluster: a folder of Parquet files, on any file system of fsspec.

VECTORS/
  manifest.json          ShardsManifest; written after the whole list
  list/000000.json       the records of a shard
  parts/000000.json      the skipped records of the shard, with reasons
  parts/000000.parquet   the other records with their vectors, as `export` writes them; written last

Each file is written atomically, so a run that resumes computes only the missing parts.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from kinlens.embedder.decoding.formats import SUFFIXES
from kinlens.embedder.errors import SourceError
from kinlens.embedder.programs.faults import file_fault
from kinlens.embedder.sources.walk import Omitted, is_omitted
from kinlens.indexer.exchange.objects import ObjectFolder, files_at, is_local
from kinlens.indexer.exchange.parquet import read_dump, write_entries
from kinlens.indexer.images import read_image
from kinlens.indexer.ingest.embed import Failure
from kinlens.indexer.ingest.sources import Record, folder_records
from kinlens.indexer.types import Entry, GalleryExport

MANIFEST = "manifest.json"
_LIST, _PARTS = "list", "parts"
_RESUME = "To resume, run kinlens-index embed again with the same source and the same --out."


class ShardsManifest(BaseModel, frozen=True, extra="forbid"):
    """Describes the source and the model of the vectors: `images`, in shards of `shard_size`."""

    schema_version: Literal[1] = 1
    bundle_id: str = Field(min_length=1)
    precision: str
    engine: str
    dim: int = Field(ge=1)
    source: str
    source_root: str
    images: int = Field(ge=1)
    shard_size: int = Field(ge=1)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.images // self.shard_size)

    def images_in(self, shards: Sequence[int]) -> int:
        """The number of images in the given shards; the last shard may have fewer than others."""
        empty = self.shards * self.shard_size - self.images
        return len(shards) * self.shard_size - empty * (self.shards - 1 in shards)


class VectorShards:
    """A folder of vector shards, on this machine or any file system of fsspec."""

    def __init__(self, address: str) -> None:
        """Raises: EngineUnavailableError without fsspec, or without the package of a protocol."""
        self._files = ObjectFolder(address)
        self.address = self._files.address
        self._known: ShardsManifest | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the list of records is complete."""
        return self._files.exists(MANIFEST)

    @property
    def manifest(self) -> ShardsManifest:
        """The content of manifest.json. Raises: SourceError."""
        if self._known is None:
            try:
                data = self._files.read(MANIFEST)
                self._known = ShardsManifest.model_validate_json(data)
            except FileNotFoundError as error:
                raise SourceError(
                    f"{self.address} has no {MANIFEST}: either it has no vectors of "
                    "`kinlens-index embed`, or that command was interrupted before it had listed "
                    "all images. Check the address."
                ) from error
            except (OSError, ValidationError) as error:
                why = file_fault(error) if isinstance(error, ValidationError) else error
                raise SourceError(f"{self.address}/{MANIFEST} cannot be read: {why}") from error
        return self._known

    def begin(self, manifest: ShardsManifest, records: Iterable[Record]) -> None:
        """Write the list of records, then the manifest.

        Raises: SourceError if the source has changed since its images were counted; OSError.
        """
        count, remaining = 0, iter(records)
        for shard in range(manifest.shards):
            some = list(islice(remaining, manifest.shard_size))
            lines = [[one.key, one.path, _plain(one.attributes)] for one in some]
            self._files.write(f"{_LIST}/{shard:06}.json", json.dumps(lines).encode())
            count += len(some)
        if count != manifest.images or next(remaining, None) is not None:
            raise SourceError(
                f"The {manifest.source} had {manifest.images:,} images, but their number changed "
                "while they were listed. Start again when no other process changes the source."
            )
        self._files.write(MANIFEST, manifest.model_dump_json(indent=2).encode())

    def missing(self) -> list[int]:
        """The shards without vectors."""
        there = self._files.names(_PARTS)
        shards = range(self.manifest.shards)
        return [shard for shard in shards if f"{shard:06}.parquet" not in there]

    def records(self, shard: int) -> list[Record]:
        """The records of one shard."""
        lines = json.loads(self._files.read(f"{_LIST}/{shard:06}.json"))
        return [
            Record(key, path, {n: tuple(v) if isinstance(v, list) else v for n, v in own.items()})
            for key, path, own in lines
        ]

    def write(self, shard: int, entries: Sequence[Entry], failures: Sequence[Failure]) -> None:
        """Store the vectors of a shard and its failures. Raises: OSError."""
        lines = [failure.model_dump() for failure in failures]
        self._files.write(f"{_PARTS}/{shard:06}.json", json.dumps(lines).encode())
        facts = {"name": "vectors", "bundle_id": self.manifest.bundle_id}
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part")
            write_entries(part, entries, self.manifest.dim, facts)
            self._files.write(f"{_PARTS}/{shard:06}.parquet", part.read_bytes())

    def failures(self) -> Iterator[Failure]:
        """The skipped images of all shards with vectors."""
        for shard in sorted({*range(self.manifest.shards)} - {*self.missing()}):
            data = self._files.read(f"{_PARTS}/{shard:06}.json")
            yield from map(Failure.model_validate, json.loads(data))

    def dump(self, name: str) -> GalleryExport:
        """The vectors of all shards, for a gallery named `name`.

        Raises: SourceError if shards are missing or no image could be used.
        """
        manifest = self.manifest
        if missing := self.missing():
            raise SourceError(
                f"{self.address} lacks {len(missing):,} of {manifest.shards:,} shards. {_RESUME}"
            )
        omitted = sum(1 for _ in self.failures())
        if omitted == manifest.images:
            raise SourceError(f"None of the {omitted:,} images in {self.address} could be used.")
        facts = {
            "name": name,
            "bundle_id": manifest.bundle_id,
            "precision": manifest.precision,
            "source": manifest.source,
            "source_root": manifest.source_root,
        }
        return GalleryExport(facts, manifest.dim, manifest.images - omitted, self._entries)

    def _entries(self) -> Iterator[Entry]:
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part.parquet")
            for shard in range(self.manifest.shards):
                name = f"{_PARTS}/{shard:06}.parquet"
                self._files.download(name, part)
                try:
                    yield from read_dump(part).entries()
                except SourceError as error:
                    raise SourceError(
                        f"{self.address}/{name} is damaged: {error} Remove it and run "
                        "kinlens-index embed again."
                    ) from error


def reader_at(root: str) -> Any:
    """A function that reads the image of a record below an address, up to a number of bytes."""
    files, path = files_at(root)
    if is_local(files):
        return lambda record, max_bytes: read_image(Path(path), record.path, max_bytes)
    return partial(_read, files, path)


def image_paths(address: str) -> list[str]:
    """The sorted paths of the images below an address, relative to it, as of `walk_images`."""
    files, root = files_at(address)
    if is_local(files):
        return [record.path for record in folder_records(Path(root), "", Omitted())]
    files.invalidate_cache()
    found = (str(path)[len(root) :].lstrip("/") for path in files.find(root))
    return sorted(
        path for path in found if path.lower().endswith(SUFFIXES) and not is_omitted(path)
    )


def _read(files: Any, root: str, record: Record, max_bytes: int) -> bytes:
    data: bytes = files.cat_file(f"{root}/{record.path}", end=max_bytes + 1)
    if len(data) > max_bytes:
        raise SourceError(
            f"The file has more than {max_bytes:,} bytes, the limit. Resize or compress it."
        )
    return data


def _plain(attributes: Any) -> dict[str, Any]:
    return {n: list(v) if isinstance(v, tuple) else v for n, v in attributes.items()}
