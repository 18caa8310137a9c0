"""Embed on a cluster: Ray Data distributes shards to actors, one per core or GPU."""

import contextlib
import logging
import os
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
from kinlens.embedder.decoding.formats import SUFFIXES
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import (
    EngineUnavailableError,
    InvalidParameterError,
    KinlensError,
    SourceError,
)
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
"""Images per shard. A killed worker loses at most one shard, 1 to 2 minutes of one core."""

_SPARE_CPUS = 2  # logical CPUs for Ray Data's readers, which otherwise deadlock with the actors
_MAX_RETRIES = 3  # per shard, because an actor may die through no fault of the shard
READS, PAUSE_S = 3, 1.0  # attempts to read an image before the source counts as unreachable


class ShardsReport(BaseModel, frozen=True):
    """Content of the shards after a call, which processed `embedded` of the `images`."""

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

    Existing shards are kept, so the same call resumes an interrupted one. Without `ray_address` Ray
    runs on the cores or GPUs of this machine. This process sends the bundle to each worker. The
    workers read images and write shards directly, so they need access to both locations.

    Raises: EngineUnavailableError without Ray; InvalidParameterError if `out` has shards of
        another source; SourceError, BundleError, OSError.
    """
    shards, made = VectorShards(out), Bundle.open(bundle)
    requested = ShardsManifest(
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
        shards.begin(requested, source.records())
    manifest = shards.manifest
    if manifest != requested.model_copy(update={"shard_size": manifest.shard_size}):
        raise InvalidParameterError(
            f"{out} was started with {manifest.images:,} images of {manifest.source_root}, bundle "
            f"{manifest.bundle_id[:12]}, {manifest.precision} and {manifest.engine}. Use the same "
            "source and options to resume, or another --out."
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
    """All images below an address of fsspec, sorted by path, or the rows of a CSV list, whose
    paths are relative to the address.

    Raises: SourceError for an address without images, or an invalid list.
    """
    read = reader_at(address)
    if csv is not None:
        return replace(csv_source(csv), root=Path(address), remote=address, read=read)
    paths = image_paths(address)
    if not paths:
        raise SourceError(
            f"There are no images at {address}. Image names end with {', '.join(SUFFIXES)}."
        )
    records = partial(map, folder_record, paths)
    return Source(Path(address), records, len(paths), "address", read=read, remote=address)


class UnreachableError(Exception):
    """The source does not respond; no record is at fault."""


class ShardEmbedder:
    """A Ray actor: embeds shards with its own session of the bundle."""

    def __init__(
        self,
        files: Any,
        session: SessionSettings,
        address: str,
        batch_size: int,
        workers: int,
        home: str | None = None,
    ) -> None:
        """`files` is a Ray reference to the files of the bundle: bytes by relative path. `home` is
        the home folder, which may hold the credentials of a store.
        """
        import ray

        os.environ |= {} if home is None else {"HOME": home}
        with tempfile.TemporaryDirectory() as folder:
            for name, data in ray.get(files).items():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            self._embedder = OnnxEmbedder.open(Path(folder), session)
        self._shards = VectorShards(address)
        manifest = self._shards.manifest
        root = manifest.source_root
        if REMOTE not in root and not Path(root).is_dir():
            raise SourceError(
                f"A worker has no access to the folder {root}. Mount it on every worker."
            )
        self._read = reader_at(root)
        remote = root if REMOTE in root else ""
        self._source = Source(
            Path(root), lambda: iter(()), 0, manifest.source, read=self._image, remote=remote
        )
        self._settings = EmbedSettings(batch_size, workers)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Embed the shards of a batch; returns the number of images of each."""
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
        """The bytes of an image. A missing or unusable file raises an error that skips only this
        image. A failure of the disk or network raises UnreachableError, which fails the shard.
        """
        for last in range(READS):
            try:
                data: bytes = self._read(record, max_bytes)
                return data
            except (KinlensError, FileNotFoundError, IsADirectoryError):
                raise
            except Exception as error:
                if isinstance(error, PermissionError) and not self._source.remote:
                    raise  # on a remote store it is more likely an expired token
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
    """Embed the missing shards; yields the number of images of each shard when it is done."""
    if not missing:
        return
    ray, is_gpu = _ray(), session.device == "cuda"
    with _connected(ray, address):
        has = ray.cluster_resources()
        cpus, gpus = int(has.get("CPU", 0)), int(has.get("GPU", 0))
        actors = gpus if is_gpu else cpus - _SPARE_CPUS
        if is_gpu and not actors:
            raise EngineUnavailableError("The Ray cluster has no GPU. Omit --device.")
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = -1  # a shard may take hours
        context.raise_original_map_exception = True
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        files = ray.put(_files_of(bundle))  # kept until the end, for actors that restart
        work = ray.data.from_items(
            [{"shard": n} for n in missing], override_num_blocks=len(missing)
        )
        done = work.map_batches(
            ShardEmbedder,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=max(1, min(actors, len(missing)))),
            fn_constructor_kwargs={
                "files": files,
                "home": None if address else os.environ.get("HOME"),
                "session": session,
                "address": shards.address,
                "batch_size": batch_size,
                # A GPU needs all cores to decode its images. A remote source needs a second thread
                # per core, because reads wait for the network.
                "workers": cpus // gpus if is_gpu else 1 + (REMOTE in shards.manifest.source_root),
            },
            max_task_retries=_MAX_RETRIES,
            **{"num_gpus" if is_gpu else "num_cpus": 1},
        )
        for row in done.iter_rows():
            yield int(row["images"])


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster, or start a private one for this process without `address`."""
    mine = {"num_cpus": core_count() + _SPARE_CPUS, "include_dashboard": False}
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints messages about its workers
        try:
            # Ray puts the working directory on the module path of the workers.
            with contextlib.chdir("/"), contextlib.nullcontext() if address else _home_of_ray():
                ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level="error",
                    **({} if address else mine),
                )
        except Exception as error:  # many types: no response, another version, a wrong address
            raise EngineUnavailableError(
                f"Cannot connect to a Ray cluster at {address or 'this machine'}: "
                f"{_first_line(error)} Check the address, that both sides have the same version of "
                "Ray, and the token (RAY_AUTH_MODE=token), or omit --ray."
            ) from error
        try:
            yield
        except (KinlensError, GeneratorExit):
            raise
        except Exception as error:  # raised by a worker or by Ray
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, KinlensError):
                raise cause from None
            raise EngineUnavailableError(
                f"A worker failed: {_first_line(cause)} Completed shards are kept. Fix the cause, "
                "then run the same command again."
            ) from error
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _home_of_ray() -> Iterator[None]:
    """A home folder for the processes of a private cluster.

    Ray asks the metadata servers of three clouds for a report about itself, even if the report is
    switched off, unless the home folder describes the cluster. It also writes a token there.
    """
    home = os.environ.get("HOME")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ray_bootstrap_config.yaml").write_text("provider: {type: local}\n")
        os.environ["HOME"] = folder
        try:
            yield
        finally:
            os.environ.pop("HOME")
            os.environ |= {} if home is None else {"HOME": home}


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
