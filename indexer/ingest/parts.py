"""Embed a source into shards of vectors, or one of several parts of it on each machine.

Part k of n makes the missing ones of the shards k - 1, k - 1 + n, k - 1 + 2 n and so on. A part may
be killed at any time and repeated, also while other parts run: it makes only what is missing. A Ray
cluster runs parts as tasks, and retries those whose machine dies or whose source does not respond.
"""

import contextlib
import importlib
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import (
    EngineUnavailableError,
    InvalidParameterError,
    KinlensError,
    SourceError,
    UnreachableError,
)
from kinlens.embedder.machine import core_count
from kinlens.embedder.session import Embedder, OnnxEmbedder
from kinlens.indexer.addresses import (
    REMOTE,
    ImageAddress,
    ImageRoot,
    files_at,
    image_root_of,
)
from kinlens.indexer.entries import Entry
from kinlens.indexer.images import read_image
from kinlens.indexer.ingest.embed import (
    EmbedSettings,
    Failure,
    embedded_batches,
    entry_of,
    failure_of,
    faults_of,
)
from kinlens.indexer.ingest.shards import ShardsManifest, VectorShards
from kinlens.indexer.ingest.sources import (
    LIST,
    Record,
    Source,
    check_attributes,
    csv_source,
    existing_folder,
    source_at,
)

SHARD_SIZE = 2048
"""Images per shard. A killed part loses at most one shard, 1 to 2 minutes of one core."""

_IDENTITY = ("source", "source_root", "bundle_id", "precision", "engine", "dim")

_PARTS_PER_SLOT = 64  # so that fast machines get more of them, and progress is seen
_ANSWER_S = 10.0  # for a Ray cluster
_RETRIES = 3  # of a part whose machine dies, or whose source does not respond


class Part(NamedTuple):
    """Part `number` of `of`, from 1 on."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """The part of a text such as 3/16. Raises: InvalidParameterError."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise InvalidParameterError(
                f"part = {text!r:.40} must be like 3/16: the number of the part, from 1 on, and "
                "the number of all parts."
            )
        return cls(int(found[1]), int(found[2]))

    def shards(self, shards: VectorShards) -> range:
        """The shards of this part."""
        return range(self.number - 1, shards.manifest.shards, self.of)

    def missing(self, shards: VectorShards) -> list[int]:
        """The shards of this part without vectors."""
        return [n for n in shards.missing() if n in self.shards(shards)]


class SourceAt(NamedTuple):
    """A source that need not be listed: its description, its address, and how to list it."""

    description: str
    address: str
    listed: Callable[[], Source]

    @classmethod
    def of(cls, text: str, root: str | None = None) -> "SourceAt":
        """The folder, CSV list or address of fsspec `text`; `root` is that of a list.

        Raises: SourceError for a folder that does not exist; EngineUnavailableError without
            fsspec, or without the package of a protocol.
        """
        if not text.lower().endswith(".csv"):
            place = _existing(text)
            kind = "address" if isinstance(place, ImageAddress) else f"folder {text}"
            return cls(kind, str(place), lambda: source_at(text))
        csv = Path(text)
        place = _existing(csv.parent if root is None else root)
        return cls(f"{LIST} {csv.resolve()}", str(place), lambda: csv_source(csv, root))


def _existing(place: str | Path) -> ImageRoot:
    """A folder that exists, or an address. Raises: as `SourceAt.of`."""
    root = image_root_of(place)
    if isinstance(root, ImageAddress):
        files_at(str(root))
        return root
    return existing_folder(root)


def begun_shards(
    source: SourceAt, bundle: Path, session: SessionSettings, out: str, shard_size: int = SHARD_SIZE
) -> VectorShards:
    """The shards at `out`, a folder or any address of fsspec; lists the source if nobody has yet.

    Of several calls that list a source at the same time, all use the list of the first that ends.

    Raises: InvalidParameterError if `out` has shards of another source; SourceError, BundleError,
        OSError.
    """
    shards, made = VectorShards(out), Bundle.open(bundle)
    requested = ShardsManifest(
        bundle_id=made.bundle_id,
        precision=session.precision,
        engine=session.engine,
        dim=made.manifest.dim,
        source=source.description,
        source_root=source.address,
        images=1,  # known when they are listed
        shard_size=shard_size,
    )
    if not shards.has_begun:
        listed = source.listed()
        check_attributes(listed)
        found = {"omitted": tuple(listed.omitted.lines()), "faults": faults_of(listed)}
        shards.begin(requested.model_copy(update=found), listed.records())
    manifest = shards.manifest
    if any(getattr(manifest, name) != getattr(requested, name) for name in _IDENTITY):
        raise InvalidParameterError(
            f"{out} was started with {manifest.images:,} images of {manifest.source_root}, bundle "
            f"{manifest.bundle_id[:12]}, {manifest.precision} and {manifest.engine}. Use the same "
            "source and options to resume, or another --out."
        )
    return shards


def embed_missing(
    shards: VectorShards,
    part: Part,
    bundle: Path,
    session: SessionSettings,
    ray: str | None = None,
    batch_size: int = 32,
) -> Iterator[int]:
    """Embed the missing shards of a part on this machine, or of all parts on the cluster at `ray`.

    Yields the number of images of each shard, or part, when it is stored.

    Raises: the errors of `embed_part` and `embed_on_ray`.
    """
    if not part.missing(shards):
        return iter(())
    if ray is not None:
        return embed_on_ray(shards, bundle, session, ray, batch_size)
    # A remote source needs a second thread per core, because reads wait for the network.
    workers = core_count() * (1 + (REMOTE in shards.manifest.source_root))
    embedder = OnnxEmbedder.open(bundle, session)
    return embed_part(shards, part, embedder, EmbedSettings(batch_size, workers))


def check_ray(address: str) -> None:
    """Check that something listens at the address of a Ray cluster, since Ray waits for minutes.

    Raises: EngineUnavailableError.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # such as auto, which Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise EngineUnavailableError(
            f"No Ray cluster answers at {address}: {error}. Start it with `ray start --head`, or "
            "give the address that it printed."
        ) from error


def embed_part(
    shards: VectorShards, part: Part, embedder: Embedder, settings: EmbedSettings
) -> Iterator[int]:
    """Embed the missing shards of a part; yields the number of images of each when it is stored.

    Raises: SourceError without access to the images; UnreachableError; OSError.
    """
    root, description = image_root_of(shards.manifest.source_root), shards.manifest.source
    if isinstance(root, Path) and not root.is_dir():
        raise SourceError(f"There is no access to the folder {root}. Mount it on each machine.")
    read = partial(_explained, root)
    for shard in part.missing(shards):
        records = shards.records(shard)
        source = Source(root, partial(iter, records), len(records), description, read=read)
        entries: list[Entry] = []
        failures: list[Failure] = []
        with embedded_batches(source, embedder, lambda _: (), settings) as batches:
            for batch in batches:
                for record in batch.records:
                    if not record.failure:
                        entries.append(entry_of(record, batch.vectors[record.sha256]))
                    else:
                        failures.append(failure_of(record))
        shards.write(shard, entries, failures)
        yield len(records)


def embed_on_ray(
    shards: VectorShards, bundle: Path, session: SessionSettings, address: str, batch_size: int
) -> Iterator[int]:
    """Embed the missing shards on the cluster at `address`, a part per task and CPU or GPU.

    The bundle travels with the tasks. Yields the number of images of each part that has ended.

    Raises: EngineUnavailableError without Ray, cluster or GPU, or if a task fails; KinlensError.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise EngineUnavailableError(
            "--ray needs Ray, which is not installed. Install it with `pip install 'kinlens[ray]'`."
        ) from error
    kind = "GPU" if session.device == "cuda" else "CPU"
    files = {str(f.relative_to(bundle)): f.read_bytes() for f in bundle.rglob("*") if f.is_file()}
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.chdir("/"):
            ray.init(address=address, log_to_driver=False, logging_level="error")
        has = ray.cluster_resources()
        slots = int(has.get(kind, 0))
        if not slots:
            raise EngineUnavailableError(f"The Ray cluster has no {kind}. Change --device.")
        # Reads of a remote source wait for the network.
        workers = max(1, int(has["CPU"]) // slots) + (REMOTE in shards.manifest.source_root)
        parts = min(_PARTS_PER_SLOT * slots, shards.manifest.shards)
        needs = {f"num_{kind.lower()}s": 1}
        again = {"max_retries": _RETRIES, "retry_exceptions": [UnreachableError]}
        task = ray.remote(**needs, **again)(_embed)
        given = (ray.put(files), shards.address, session, EmbedSettings(batch_size, workers))
        waiting = [task.remote(Part(number, parts), *given) for number in range(1, parts + 1)]
        while waiting:
            ended, waiting = ray.wait(waiting)
            yield ray.get(ended[0])
    except (KinlensError, GeneratorExit):
        raise
    except Exception as error:  # many types: raised by a task, by the connection or by Ray
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, KinlensError):
            raise cause from None
        text = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise EngineUnavailableError(
            f"The Ray cluster at {address} failed: {text} Stored shards are kept. Check the "
            "address, the version of Ray on both sides and the token (RAY_AUTH_MODE=token), then "
            "run the same command again, or omit --ray."
        ) from error
    finally:
        ray.shutdown()


def _embed(
    part: Part, files: dict[str, bytes], out: str, session: SessionSettings, settings: EmbedSettings
) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        embedder = OnnxEmbedder.open(Path(folder), session)
    return sum(embed_part(VectorShards(out), part, embedder, settings))


def _explained(root: ImageRoot, record: Record, max_bytes: int) -> bytes:
    """The image of a record.

    A missing or unusable file raises an error that skips only this image. A failure of the disk or
    network, after what the client of the store repeats, raises UnreachableError, so the shard stays
    missing.
    """
    try:
        return read_image(root, record.path, max_bytes)
    except PermissionError:
        raise
    except (OSError, UnreachableError) as error:
        raise UnreachableError(
            f"{record.path} cannot be read: {error}. Stored shards are kept. Check the disk or "
            "network, then run the same command again."
        ) from error
