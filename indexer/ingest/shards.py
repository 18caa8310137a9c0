"""Vectors on their way from a cluster: a folder of Parquet files, anywhere that fsspec reaches.

VECTORS/
  manifest.json          ShardsManifest; written once the whole list is there
  list/000000.json       the records of a shard
  parts/000000.json      which of them were left out, and why
  parts/000000.parquet   the others with their vectors, as `export` writes them; written last

A part is there whole or not at all, so whoever goes on makes those that are missing.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from kinlens.embedder.errors import SourceError
from kinlens.embedder.formats import SUFFIXES
from kinlens.indexer.exchange.objects import ObjectFolder, files_at, is_local
from kinlens.indexer.exchange.parquet import read_dump, write_entries
from kinlens.indexer.images import read_image
from kinlens.indexer.ingest.embed import Failure
from kinlens.indexer.ingest.sources import Record, walk
from kinlens.indexer.types import Dump, Entry

MANIFEST = "manifest.json"
_LIST, _PARTS = "list", "parts"
_AGAIN = "Run kinlens-index embed again with the same source and the same --out: it goes on."


class ShardsManifest(BaseModel, frozen=True, extra="forbid"):
    """What the vectors are of: `images` of a source, in shards of `shard_size`."""

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
        """How many there are."""
        return -(-self.images // self.shard_size)

    def images_in(self, shards: Sequence[int]) -> int:
        """How many images these shards have; the last one may have fewer than the others."""
        empty = self.shards * self.shard_size - self.images
        return len(shards) * self.shard_size - empty * (self.shards - 1 in shards)


class VectorShards:
    """The folder at an address: of this machine, or of any file system of fsspec."""

    def __init__(self, address: str) -> None:
        """Raises: EngineUnavailableError without fsspec, or without the package of a protocol."""
        self._files = ObjectFolder(address)
        self.address = self._files.address
        self._known: ShardsManifest | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the list is complete."""
        return self._files.exists(MANIFEST)

    @property
    def manifest(self) -> ShardsManifest:
        """What stands in manifest.json. Raises: SourceError."""
        if self._known is None:
            try:
                data = self._files.read(MANIFEST)
                self._known = ShardsManifest.model_validate_json(data)
            except FileNotFoundError as error:
                raise SourceError(
                    f"{self.address} has no {MANIFEST}: no vectors of `kinlens-index embed` are "
                    "there, or its list was not finished. Check the address."
                ) from error
            except (OSError, ValidationError) as error:
                raise SourceError(
                    f"{self.address}/{MANIFEST} cannot be read: {str(error).splitlines()[0]}"
                ) from error
        return self._known

    def begin(self, manifest: ShardsManifest, records: Iterable[Record]) -> None:
        """Write the list, and the manifest last. Raises: SourceError if the source has changed
        since its images were counted; OSError.
        """
        count, rest = 0, iter(records)
        for shard in range(manifest.shards):
            some = list(islice(rest, manifest.shard_size))
            lines = [[one.key, one.path, _plain(one.attributes)] for one in some]
            self._files.write(f"{_LIST}/{shard:06}.json", json.dumps(lines).encode())
            count += len(some)
        if count != manifest.images or next(rest, None) is not None:
            raise SourceError(
                f"The {manifest.source} had {manifest.images:,} images and has another number now. "
                "Start again when nobody changes it."
            )
        self._files.write(MANIFEST, manifest.model_dump_json(indent=2).encode())

    def missing(self) -> list[int]:
        """The shards whose vectors are not there yet."""
        there = self._files.names(_PARTS)
        shards = range(self.manifest.shards)
        return [shard for shard in shards if f"{shard:06}.parquet" not in there]

    def records(self, shard: int) -> list[Record]:
        """Those of one shard."""
        lines = json.loads(self._files.read(f"{_LIST}/{shard:06}.json"))
        return [
            Record(key, path, {n: tuple(v) if isinstance(v, list) else v for n, v in own.items()})
            for key, path, own in lines
        ]

    def write(self, shard: int, entries: Sequence[Entry], failures: Sequence[Failure]) -> None:
        """Keep the vectors of a shard, and what was left out. Raises: OSError."""
        told = [failure.model_dump() for failure in failures]
        self._files.write(f"{_PARTS}/{shard:06}.json", json.dumps(told).encode())
        facts = {"name": "vectors", "bundle_id": self.manifest.bundle_id}
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part")
            write_entries(part, entries, self.manifest.dim, facts)
            self._files.write(f"{_PARTS}/{shard:06}.parquet", part.read_bytes())

    def failures(self) -> Iterator[Failure]:
        """What was left out, of all shards that are there."""
        for shard in sorted({*range(self.manifest.shards)} - {*self.missing()}):
            data = self._files.read(f"{_PARTS}/{shard:06}.json")
            yield from map(Failure.model_validate, json.loads(data))

    def dump(self, name: str) -> Dump:
        """All of it, for a gallery of this name. Raises: SourceError if shards are missing."""
        manifest = self.manifest
        if missing := self.missing():
            raise SourceError(
                f"{self.address} lacks {len(missing):,} of {manifest.shards:,} shards. {_AGAIN}"
            )
        left_out = sum(1 for _ in self.failures())
        if left_out == manifest.images:
            raise SourceError(f"None of the {left_out:,} images of {self.address} could be used.")
        facts = {
            "name": name,
            "bundle_id": manifest.bundle_id,
            "precision": manifest.precision,
            "source": manifest.source,
            "source_root": manifest.source_root,
        }
        return Dump(facts, manifest.dim, manifest.images - left_out, self._entries)

    def _entries(self) -> Iterator[Entry]:
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part.parquet")
            for shard in range(self.manifest.shards):
                place = f"{_PARTS}/{shard:06}.parquet"
                self._files.download(place, part)
                try:
                    yield from read_dump(part).entries()
                except SourceError as error:
                    raise SourceError(
                        f"{self.address}/{place} is damaged: {error} Remove it and run "
                        "kinlens-index embed again."
                    ) from error


def reader_at(root: str) -> Any:
    """What reads the bytes of a record below an address, at most so many."""
    files, path = files_at(root)
    if is_local(files):
        return lambda record, max_bytes: read_image(Path(path), record.path, max_bytes)
    return partial(_read, files, path)


def image_paths(address: str) -> list[str]:
    """The images below an address, relative to it, in order; without hidden files and folders."""
    files, root = files_at(address)
    if is_local(files):
        return [path.relative_to(root).as_posix() for path in walk(Path(root))]
    files.invalidate_cache()
    found = (str(path)[len(root) :].lstrip("/") for path in files.find(root))
    return sorted(
        path
        for path in found
        if path.lower().endswith(SUFFIXES) and not any(p.startswith(".") for p in path.split("/"))
    )


def _read(files: Any, root: str, record: Record, max_bytes: int) -> bytes:
    data: bytes = files.cat_file(f"{root}/{record.path}", end=max_bytes + 1)
    if len(data) > max_bytes:
        raise SourceError(
            f"The file has more than {max_bytes:,} bytes, the limit. Make it smaller, or leave it."
        )
    return data


def _plain(attributes: Any) -> dict[str, Any]:
    return {n: list(v) if isinstance(v, tuple) else v for n, v in attributes.items()}
