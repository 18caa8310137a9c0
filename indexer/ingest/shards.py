"""Vectors embedded on a cluster: a folder of Parquet files, on any file system of fsspec.

VECTORS/
  manifest.json          ShardsManifest; written after the whole list, by the first that has one
  list-<x>/000000.json   the records of a shard
  parts/000000.json      the skipped records of the shard, with reasons
  parts/000000.parquet   the other records with their vectors, as `export` writes them; written last

Each file is written atomically, so a run that resumes computes only the missing parts. All parts
use the list that manifest.json names, whatever has happened to the source since.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from kinlens.embedder.errors import SourceError
from kinlens.embedder.programs.faults import file_fault
from kinlens.indexer.entries import Entry
from kinlens.indexer.exchange.objects import ObjectFolder
from kinlens.indexer.exchange.parquet import write_entries
from kinlens.indexer.ingest.embed import Failure
from kinlens.indexer.ingest.foreign import read_export
from kinlens.indexer.ingest.sources import Record
from kinlens.indexer.types import GalleryExport

MANIFEST = "manifest.json"
_PARTS = "parts"
_RESUME = "To resume, run kinlens-index embed again with the same source and the same --out."


class ShardsManifest(BaseModel, frozen=True, extra="forbid"):
    """Describes the source and the model of the vectors: `images`, in shards of `shard_size`.

    records: the folder of the list of records.
    omitted: what the source omits, a line for each kind.
    faults: the files that it omits although they should be images.
    """

    schema_version: Literal[1, 2] = 2
    bundle_id: str = Field(min_length=1)
    precision: str
    engine: str
    dim: int = Field(ge=1)
    source: str
    source_root: str
    images: int = Field(ge=1)
    shard_size: int = Field(ge=1)
    records: str = "list"
    omitted: tuple[str, ...] = ()
    faults: tuple[Failure, ...] = ()

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
        """Write a list of these records, then the manifest with their number.

        If another process has written a manifest meanwhile, its list is the one that counts.

        Raises: SourceError without records; OSError.
        """
        place, images, remaining = f"list-{os.urandom(4).hex()}", 0, iter(records)
        names: list[str] = []
        while some := list(islice(remaining, manifest.shard_size)):
            lines = [[one.key, one.path, _plain(one.attributes)] for one in some]
            names.append(f"{place}/{len(names):06}.json")
            self._files.write(names[-1], json.dumps(lines).encode())
            images += len(some)
        if not images:
            raise SourceError(f"The {manifest.source} has no images any more. Start again.")
        made = manifest.model_copy(update={"images": images, "records": place})
        if not self._files.create(MANIFEST, made.model_dump_json(indent=2).encode()):
            for name in names:
                self._files.remove(name)

    def missing(self) -> list[int]:
        """The shards without vectors."""
        there = self._files.names(_PARTS)
        shards = range(self.manifest.shards)
        return [shard for shard in shards if f"{shard:06}.parquet" not in there]

    def records(self, shard: int) -> list[Record]:
        """The records of one shard."""
        lines = json.loads(self._files.read(f"{self.manifest.records}/{shard:06}.json"))
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

    def failures(self, shards: Iterable[int] | None = None) -> Iterator[Failure]:
        """The skipped images of these shards, by default of all, as far as they have vectors."""
        every = range(self.manifest.shards) if shards is None else shards
        for shard in sorted({*every} - {*self.missing()}):
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
                self._files.download({name: part})
                try:
                    yield from read_export(part).entries()
                except SourceError as error:
                    raise SourceError(
                        f"{self.address}/{name} is damaged: {error} Remove it and run "
                        "kinlens-index embed again."
                    ) from error


def _plain(attributes: Any) -> dict[str, Any]:
    return {n: list(v) if isinstance(v, tuple) else v for n, v in attributes.items()}
