"""Embed on a cluster: Ray Data hands a shard at a time to actors, one for each core or GPU."""

import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import (
    EngineUnavailableError,
    InvalidParameterError,
    KinlensError,
    SourceError,
)
from kinlens.embedder.formats import SUFFIXES
from kinlens.embedder.machine import core_count
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.exchange.objects import REMOTE
from kinlens.indexer.ingest.embed import (
    EmbedSettings,
    Failure,
    embedded_batches,
    entry_of,
    failure_of,
    refuse_unreadable,
)
from kinlens.indexer.ingest.shards import (
    ShardsManifest,
    VectorShards,
    image_paths,
    reader_at,
)
from kinlens.indexer.ingest.sources import (
    Record,
    Source,
    check_attributes,
    csv_source,
    folder_record,
)
from kinlens.indexer.types import Entry, Progress

SHARD_SIZE = 2048
"""Images of a shard: what a worker that is killed costs, a minute or two of one core."""

_SPARE_CPUS = 2  # logical ones: without CPUs for Ray Data's readers, they and actors wait for ever
_DEATHS = 3  # of an actor over one shard, of which each may have been another one's fault
READS, PAUSE_S = 3, 1.0  # of an image, before the source counts as unreachable


class ShardsReport(BaseModel, frozen=True):
    """What there is in the shards now; `embedded` of the `images` were looked at by this call."""

    images: int
    embedded: int
    items: int
    shards: int
    failures: tuple[Failure, ...]
    bundle_id: str


def embed_on_cluster(
    source: Source,
    bundle: Path,
    session: SessionSettings,
    out: str,
    *,
    ray_address: str | None = None,
    batch_size: int = EmbedSettings().batch_size,
    shard_size: int = SHARD_SIZE,
    on_progress: Progress | None = None,
) -> ShardsReport:
    """Embed a source into Parquet shards at `out`, a folder or any address of fsspec.

    Shards that are there stay, so the same call goes on where one has ended. Without `ray_address`
    Ray runs on the cores of this machine, or its GPUs. Each worker gets the bundle from here; it
    reads images and writes shards itself, so both must be reachable from each.

    Raises: EngineUnavailableError without Ray; InvalidParameterError for an `out` of another
        source; SourceError, BundleError, OSError.
    """
    shards, made = VectorShards(out), Bundle.open(bundle)
    asked = ShardsManifest(
        bundle_id=made.bundle_id,
        precision=session.precision,
        engine=session.engine,
        dim=made.manifest.dim,
        source=source.description,
        source_root=source.address,
        images=source.count,
        shard_size=shard_size,
    )
    if not shards.has_begun:
        check_attributes(source, {})
        shards.begin(asked, source.records())
    manifest = shards.manifest
    if manifest != asked.model_copy(update={"shard_size": manifest.shard_size}):
        raise InvalidParameterError(
            f"{out} was begun with {manifest.images:,} images of {manifest.source_root}, bundle "
            f"{manifest.bundle_id[:12]}, {manifest.precision} and {manifest.engine}. Name the same "
            "to go on, or another --out."
        )
    missing, done = shards.missing(), 0
    if on_progress is not None:
        on_progress(manifest.images - manifest.images_in(missing))
    for count in _run(shards, missing, bundle, session, ray_address, batch_size):
        done += count
        if on_progress is not None:
            on_progress(count)
    failures = tuple(shards.failures())
    refuse_unreadable(source, manifest.images, failures)
    return ShardsReport(
        images=manifest.images,
        embedded=done,
        items=manifest.images - len(failures),
        shards=manifest.shards,
        failures=failures,
        bundle_id=manifest.bundle_id,
    )


def remote_source(address: str, csv: Path | None = None) -> Source:
    """Every image below an address of fsspec, in the order of their paths; or the rows of a CSV
    list, whose paths start there.

    Raises: SourceError for an address without images, or a list that is wrong.
    """
    read = reader_at(address)
    if csv is not None:
        return replace(csv_source(csv), root=Path(address), remote=address, read=read)
    paths = image_paths(address)
    if not paths:
        raise SourceError(
            f"There are no images at {address}. Images end with one of: {', '.join(SUFFIXES)}."
        )
    records = partial(map, folder_record, paths)
    return Source(Path(address), records, len(paths), "address", read=read, remote=address)


class UnreachableError(Exception):
    """The source does not answer; no record is at fault."""


class ShardEmbedder:
    """An actor: a bundle in a session of its own, which embeds the shards that it is given."""

    def __init__(
        self, files: Any, session: SessionSettings, address: str, batch_size: int, workers: int
    ) -> None:
        """`files` refers to the content of the bundle, by name."""
        import ray

        with tempfile.TemporaryDirectory() as folder:
            for name, data in ray.get(files).items():
                place = Path(folder, name)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
            self._embedder = OnnxEmbedder.open(Path(folder), session)
        self._shards = VectorShards(address)
        manifest = self._shards.manifest
        root = manifest.source_root
        if REMOTE not in root and not Path(root).is_dir():
            raise SourceError(f"A worker does not see the folder {root}. Mount it on each.")
        self._read = reader_at(root)
        remote = root if REMOTE in root else ""
        self._source = Source(
            Path(root), lambda: iter(()), 0, manifest.source, read=self._image, remote=remote
        )
        self._settings = EmbedSettings(batch_size, workers)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Of the shards in a batch how many images each has."""
        return {"images": np.array([self._embedded(int(shard)) for shard in batch["shard"]])}

    def _embedded(self, shard: int) -> int:
        records = self._shards.records(shard)
        source = replace(self._source, records=lambda: iter(records))
        entries: list[Entry] = []
        failures: list[Failure] = []
        with embedded_batches(source, self._embedder, lambda _: (), self._settings) as batches:
            for batch in batches:
                for one in batch.outcomes:
                    if one.failure is None:
                        entries.append(entry_of(one, batch.vectors[one.sha256]))
                    else:
                        failures.append(failure_of(one))
        self._shards.write(shard, entries, failures)
        return len(records)

    def _image(self, record: Record, max_bytes: int) -> bytes:
        """The bytes of an image. A file that is missing or no image is left out; where the disk or
        the network fails the shard fails, since its images are not at fault.
        """
        for last in range(READS):
            try:
                data: bytes = self._read(record, max_bytes)
                return data
            except (KinlensError, FileNotFoundError, IsADirectoryError):
                raise
            except Exception as error:
                if isinstance(error, PermissionError) and not self._source.remote:
                    raise  # far away it is rather a token that has expired
                if last == READS - 1:
                    raise UnreachableError(f"{record.path} cannot be read: {error}") from error
                time.sleep(PAUSE_S)
        raise AssertionError


def _run(
    shards: VectorShards,
    missing: Sequence[int],
    bundle: Path,
    session: SessionSettings,
    address: str | None,
    batch_size: int,
) -> Iterator[int]:
    """How many images each missing shard had, as they are done."""
    if not missing:
        return
    ray, is_gpu = _ray(), session.device == "cuda"
    with _connected(ray, address):
        has = ray.cluster_resources()
        cpus, gpus = int(has.get("CPU", 0)), int(has.get("GPU", 0))
        actors = gpus if is_gpu else cpus - _SPARE_CPUS
        if is_gpu and not actors:
            raise EngineUnavailableError("Ray sees no GPU in its cluster. Leave --device out.")
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = -1  # a shard may take hours
        context.raise_original_map_exception = True
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        files = ray.put(_files_of(bundle))  # kept until the end, for actors that start again
        work = ray.data.from_items(
            [{"shard": n} for n in missing], override_num_blocks=len(missing)
        )
        done = work.map_batches(
            ShardEmbedder,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=max(1, min(actors, len(missing)))),
            fn_constructor_kwargs={
                "files": files,
                "session": session,
                "address": shards.address,
                "batch_size": batch_size,
                # A GPU wants images from all cores; a core waits for images from far away.
                "workers": cpus // gpus if is_gpu else 1 + (REMOTE in shards.manifest.source_root),
            },
            max_task_retries=_DEATHS,
            **{"num_gpus" if is_gpu else "num_cpus": 1},
        )
        for row in done.iter_rows():
            yield int(row["images"])


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """With a cluster; `local` is one of this process alone, whatever else runs here."""
    mine = {"num_cpus": core_count() + _SPARE_CPUS, "include_dashboard": False}
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints what befalls its workers
        try:
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level="error",
                **({} if address else mine),
            )
        except Exception as error:  # of many kinds: no answer, another version, a wrong address
            raise EngineUnavailableError(
                f"There is no Ray cluster at {address or 'this machine'}: "
                f"{_first_line(error)} Check the address, that its version of Ray is the one "
                "here, and its token (RAY_AUTH_MODE=token), or leave --ray out."
            ) from error
        try:
            yield
        except (KinlensError, GeneratorExit):
            raise
        except Exception as error:  # of a worker, or of Ray
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, KinlensError):
                raise cause from None
            raise EngineUnavailableError(
                f"A worker failed: {_first_line(cause)} What is done is kept: run the same "
                "command again once that is fixed."
            ) from error
        finally:
            ray.shutdown()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _files_of(bundle: Path) -> dict[str, bytes]:
    return {
        file.relative_to(bundle).as_posix(): file.read_bytes()
        for file in bundle.rglob("*")
        if file.is_file()
    }


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise EngineUnavailableError(
            "Embedding on a cluster needs Ray, which is not installed. Install it with "
            "`pip install 'kinlens[ray]'`."
        ) from error
    return ray
