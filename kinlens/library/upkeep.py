"""Care for galleries and copy them: compact, verify, plan; export, import, back up, publish."""

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack, get_args

import numpy as np
from numpy.typing import ArrayLike

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import (
    BundleMismatchError,
    GalleryError,
    InvalidParameterError,
    PlanError,
    SourceError,
)
from kinlens.embedder.programs.progress import progress_bar
from kinlens.embedder.session import Embedder
from kinlens.embedder.types import SHORT
from kinlens.indexer.addresses import REMOTE, ImageRoot, image_root_of
from kinlens.indexer.checks.verify import VerifyReport, sample_size, size_of, verify_gallery
from kinlens.indexer.exchange.milvus_index import MilvusIndex
from kinlens.indexer.exchange.milvus_load import import_to_milvus
from kinlens.indexer.exchange.parquet import export_gallery
from kinlens.indexer.exchange.publish import PublishReport
from kinlens.indexer.exchange.publish import publish as publish_snapshot
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.folder.manifest import GalleryManifest, name_of
from kinlens.indexer.galleries import copy_bytes
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.index_types import IndexKind
from kinlens.indexer.index.plan import IndexChoice, IndexSettings, Plan, plan_index
from kinlens.indexer.ingest.build import ImportReport
from kinlens.indexer.ingest.build import import_gallery as import_entries
from kinlens.indexer.ingest.foreign import Tables, files_of, is_foreign, read_export, read_vectors
from kinlens.indexer.ingest.shards import MANIFEST as SHARDS
from kinlens.indexer.ingest.shards import VectorShards
from kinlens.indexer.live.backup import BackupReport, restore_backup, write_backup
from kinlens.indexer.live.compaction import CompactReport
from kinlens.indexer.types import (
    MILVUS,
    OTHER_MODEL,
    GalleryExport,
    Progress,
    VectorType,
    milvus_address,
    seconds_of,
)
from kinlens.indexer.uploads import UploadFolder
from kinlens.library import stores
from kinlens.library.bundles import bundle_folder, user_path
from kinlens.quality.golden import GoldenSet
from kinlens.reports import Report

_SIZES = ("memory_mb", "mapped_mb", "disk_mb")
_COSTS = (*_SIZES, "build_memory_mb", "gpu_memory_mb", "gpu_free_mb", "expected_recall", "reason")
_IMAGE_RETRY_S = 600.0
_DAY_S = 86_400.0
_FACTS = {"name", "bundle_id", "precision", "created_at", "source", "source_root"}


def compact(
    gallery: Gallery,
    *,
    rebuild: bool = False,
    warn: stores.Say = warnings.warn,
    shown: bool | None = None,
    **index: Unpack[IndexChoice],
) -> CompactReport:
    """Write added items to the index and erase removed ones, while the gallery is in use.

    Erased items cannot be restored. Nothing is done if nothing has changed, unless `rebuild` or a
    choice of the index is given. What is not chosen stays as it is. Afterwards the probabilities
    are fitted again if they are outdated; `warn` is called with a text if that fails.

    Raises: PlanError, RecallError, GalleryBusyError, GalleryConflictError, GalleryWriteError.
    """
    facts = gallery.facts()
    has_changed = bool(facts.delta or facts.tombstones or gallery.has_removed())
    if facts.segment is not None:  # a segment of an earlier version counts as changed
        has_changed |= facts.segment.gone > 0 or facts.segment.vectors is None
    is_chosen = any(value is not None for value in index.values())
    if not (rebuild or is_chosen or has_changed):
        return CompactReport(segment=None, manifest=None, elapsed_s=0.0, skipped=True)
    settings = gallery.index_settings().changed(**index)
    if index.get("index_device") and gallery.size:  # fail early if it does not fit
        plan_index(gallery.size, gallery.dim, settings, gallery.vector_type)
    with progress_bar(facts.size, "Indexing", shown=shown) as advance:
        report = gallery.compact(settings, wait=True, from_scratch=rebuild, on_progress=advance)
    UploadFolder(gallery.path).sweep()  # images of items that are erased now
    stores.fit_probabilities(gallery, warn)
    return report


def verify(
    path: Path | str,
    bundle: Embedder | None = None,
    *,
    sample: int | None = None,
    image_root: ImageRoot | str | None = None,
    queries: ArrayLike | Path | str | None = None,
    target_recall: float | None = None,
    shown: bool | None = None,
) -> VerifyReport:
    """Check the files of a gallery and its golden set, that items find themselves, and recall.

    Args:
        path: the folder of the gallery.
        bundle: embed the images again with it. Without it the stored vectors are the queries, so a
            vector that is stored for the wrong item is not detected.
        sample: number of items to check; None for all, or 1,000 of more than 10,000.
        image_root: folder or address of the images, if they were moved.
        queries: vectors (Q, D) of your users' queries, or a .npy file, to measure the recall that
            they get.
        target_recall: the recall that is required; None for that of the index.

    Returns:
        A report; `is_good` is whether all checks passed.

    Raises: GalleryCorruptError for a damaged file; GalleryError, InvalidParameterError.
    """
    if isinstance(queries, Path | str):
        queries = read_vectors(Path(user_path(queries)))
    vectors = None if queries is None else np.asarray(queries, np.float32)
    GoldenSet(path).check()
    with progress_bar(sample_size(size_of(path), sample), "Searching", shown=shown) as advance:
        return verify_gallery(
            path,
            bundle,
            sample=sample,
            image_root=image_root,
            queries=vectors,
            target_recall=target_recall,
            on_progress=advance,
        )


def plan(
    n: int, dim: int, *, vector_type: VectorType = "fp32", **index: Unpack[IndexChoice]
) -> Plan:
    """The index for `n` vectors of length `dim` and its cost, without building it.

    Raises: PlanError for numbers out of range, or too little memory.

    Examples:
        >>> kinlens.plan(1_000_000, 128, memory_mb=1200).kind
        'ivf-pq'
    """
    return plan_index(n, dim, IndexSettings().changed(**index), vector_type)


@dataclass(frozen=True)
class Plans(Report):
    """Index types for `n` vectors of length `dim`, each with its cost or why it is `refused`."""

    n: int
    dim: int
    device: str
    plans: list[dict[str, Any]]

    @classmethod
    def of(cls, chosen: Plan) -> "Plans":
        """The costs of one plan."""
        costs = {name: getattr(chosen, name) for name in _COSTS}
        plans = [{"kind": chosen.kind, "refused": None, **costs}]
        return cls(chosen.n, chosen.dim, chosen.device, plans)

    def lines(self) -> Iterator[str]:
        """A table of the costs."""
        yield f"{'index':11} {'memory':>10} {'mapped':>10} {'disk':>10}  recall@10"
        for one in self.plans:
            if one["refused"] is not None:
                yield f"{one['kind']:11} {one['refused']}"
                continue
            sizes = " ".join(f"{one[name]:>7,.0f} MB" for name in _SIZES)
            yield f"{one['kind']:11} {sizes}  {one['expected_recall']:.3f}"


def compare_plans(
    n: int, dim: int, *, vector_type: VectorType = "fp32", **index: Unpack[IndexChoice]
) -> Plans:
    """The costs of all index types for `n` vectors of length `dim`."""
    settings, plans = IndexSettings().changed(**index), []
    for kind in get_args(IndexKind):
        try:
            chosen = plan_index(n, dim, replace(settings, kind=kind), vector_type)
            plans += Plans.of(chosen).plans
        except PlanError as error:
            plans.append({"kind": kind, "refused": str(error), **dict.fromkeys(_COSTS)})
    return Plans(n, dim, settings.device, plans)


def export(store: stores.Store, out: Path | str, *, shown: bool | None = None) -> int:
    """Write all items with vectors and attributes to the Parquet file `out`; returns their number.

    Raises: GalleryWriteError, GalleryBusyError; EngineUnavailableError without pyarrow.
    """
    with progress_bar(store.size, "Exporting", shown=shown) as advance:
        return export_gallery(store, user_path(out), _facts_of(store), advance)


def import_gallery(
    source: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    name: str | None = None,
    vector_type: VectorType = "fp32",
    bundle: Path | str | None = None,
    model: str | None = None,
    key_column: str | None = None,
    vector_column: str | None = None,
    columns: Sequence[str] | None = None,
    keys: Path | None = None,
    csv: Path | None = None,
    image_root: str | None = None,
    shown: bool | None = None,
    **index: Unpack[IndexChoice],
) -> ImportReport:
    """Import a gallery from an exported file, vectors, or a gallery in another engine.

    A gallery in `out` is replaced. To resume an interrupted import, make the same call again.

    Args:
        source: a file of `export`, vectors of `embed`, another gallery, or files with your own
            vectors: Parquet, Arrow, .npy.
        out: a folder, or milvus://HOST:PORT/NAME.
        name: name of the gallery in URLs; None for that of the source.
        bundle, model: the bundle that computed your own vectors or those of `embed`, or the name of
            another model.
        key_column, vector_column, columns: the columns of your tables. None finds the keys and the
            vectors, and stores all others as attributes.
        keys, csv: the keys of a .npy file, one per line, or a list with attributes.
        image_root: folder or address of the images in the columns path and sha256.

    Raises: SourceError, GalleryError, InvalidParameterError, PlanError;
        EngineUnavailableError without pyarrow.

    Examples:
        >>> report = kinlens.import_gallery("vectors.parquet", "galleries/mine", model="clip")
        >>> gallery = kinlens.open_gallery("galleries/mine")
    """
    out = user_path(out)
    is_remote = out.startswith(MILVUS)
    _check_choice(is_remote, vector_type, index)
    sources = [source] if isinstance(source, Path | str) else source
    texts = [user_path(one) for one in sources]
    with contextlib.ExitStack() as stack:
        tables: Tables | None = None
        dump = stack.enter_context(_known(texts, bundle))
        if dump is None:
            tables = Tables(files_of(texts), key_column, vector_column, columns, keys=keys, csv=csv)
            dump = _foreign(tables, bundle, model, image_root)
        advance = stack.enter_context(progress_bar(dump.count, "Importing", shown=shown))
        if is_remote:
            report = _import_remote(out, dump, index.get("index") or "auto", advance)
        else:
            settings = IndexSettings().changed(**index)
            indexed = advance.then("Indexing", dump.count)
            report = import_entries(dump, out, name, settings, advance, vector_type, indexed)
    if tables is not None and tables.normalised:
        stores.note(
            f"{tables.normalised:,} vectors were not of norm 1 and were normalised: scores are "
            "cosines."
        )
    if not is_remote:
        with contextlib.closing(Gallery.open(out, verify_hashes=False)) as gallery:
            stores.fit_probabilities(gallery, stores.note)
    return report


def backup(path: Path | str, out: Path | str, *, shown: bool | None = None) -> BackupReport:
    """Write a consistent copy of the gallery in folder `path`, while it is in use.

    Raises: GalleryError if `out` exists; GalleryCorruptError, GalleryWriteError.
    """
    GoldenSet(path).check()
    with progress_bar(copy_bytes(path), "Copying", "bytes", shown) as advance:
        return write_backup(path, user_path(out), advance)


def restore_gallery(
    backup: Path | str, out: Path | str, *, replace: bool = False, shown: bool | None = None
) -> GalleryManifest:
    """Restore a gallery from a backup, after checking all its files.

    Raises: GalleryError if `out` has a gallery, without `replace`; GalleryCorruptError.
    """
    backup = user_path(backup)
    GoldenSet(backup).check()
    size = copy_bytes(backup) if GalleryFolder(backup).current_name() else 0
    with progress_bar(size, "Copying", "bytes", shown if size else False) as advance:
        return restore_backup(backup, user_path(out), replace=replace, on_progress=advance)


def publish(
    path: Path | str,
    address: str,
    *,
    images: bool = False,
    image_root: str | None = None,
    take_over: bool = False,
    shown: bool | None = None,
) -> PublishReport:
    """Publish a snapshot of the gallery in folder `path`, for services on other hosts.

    Only changes since the last snapshot are uploaded. The gallery stays in use.

    Args:
        address: a folder, or an fsspec address such as s3://shop/gallery.
        images: also upload the images of the items.
        image_root: folder or address of the images, if they were moved.
        take_over: replace the folder that published there before.

    Raises: GalleryError; UnreachableError.
    """
    with progress_bar(size_of(path), "Publishing", shown=shown) as advance:
        return publish_snapshot(
            path,
            user_path(address),
            with_images=images,
            image_root=image_root,
            take_over=take_over,
            on_progress=advance,
        )


def publish_changes(
    path: Path | str,
    address: str,
    *,
    every: str | None = None,
    images: bool = False,
    image_root: str | None = None,
    take_over: bool = False,
    shown: bool | None = None,
) -> Iterator[PublishReport]:
    """Publish as `publish` does, and changes `every` so often; yields a report of each upload.

    A publication that fails later is noted on stderr, and the next interval tries again.

    Raises: InvalidParameterError for an interval below 0.1 s or above one day; as `publish`.
    """
    interval_s = None if every is None else seconds_of(every)
    if every is not None and (interval_s is None or not 0.1 <= interval_s <= _DAY_S):
        raise InvalidParameterError(
            f"every = {every!r:.40} is not a time from 0.1 s to one day. Use a value such as 5s or "
            "2m."
        )
    yield publish(
        path,
        address,
        images=images,
        image_root=image_root,
        take_over=take_over,
        shown=shown,
    )
    checked_at = time.monotonic()
    while interval_s is not None:
        time.sleep(interval_s)
        # Retry images that could not be read before.
        is_due = images and time.monotonic() - checked_at > _IMAGE_RETRY_S
        checked_at = time.monotonic() if is_due else checked_at
        try:
            report = publish(path, address, images=is_due, image_root=image_root, shown=False)
        except GalleryError as error:
            stores.note(str(error))
            continue
        if report.uploaded_bytes:
            yield report


def _facts_of(store: stores.Store) -> dict[str, str]:
    """The metadata of a gallery that an export contains."""
    facts: dict[str, str] = store.facts().model_dump(include=_FACTS)
    if isinstance(store, Gallery) and store.manifest.shortened:
        facts["shortened"] = "true"
    return facts


@contextlib.contextmanager
def _known(sources: Sequence[str], bundle: Path | str | None) -> Iterator[GalleryExport | None]:
    """A gallery, vectors of `embed` or a file of `export`; None for files of other programs."""
    [text, *more], place = sources, Path(sources[0])
    if more:
        yield None
    elif not text.startswith(MILVUS) and (REMOTE in text or (place / SHARDS).is_file()):
        shards = VectorShards(text)
        known = shards.manifest.bundle_id
        if bundle is not None and Bundle.open(bundle_folder(bundle)).bundle_id != known:
            raise BundleMismatchError(
                f"{text} was embedded with bundle {known[:SHORT]}, not with the one in {bundle}. "
                "Pass that bundle, or none."
            )
        yield shards.dump(name_of(place))
    elif text.startswith(MILVUS) or GalleryFolder(place).current_name():
        with stores.opened(text) as store:
            entries, scan = itertools.chain.from_iterable, store.scan
            yield GalleryExport(_facts_of(store), store.dim, store.size, lambda: entries(scan()))
    elif place.is_file() and not is_foreign(place):
        yield read_export(place)
    else:
        yield None


def _foreign(
    tables: Tables, bundle: Path | str | None, model: str | None, image_root: str | None
) -> GalleryExport:
    """Vectors of another program, of the model in `bundle` or named `model`, as an export.

    Raises: SourceError, BundleError.
    """
    file = tables.files[0]
    if (bundle is None) == (model is None):
        raise SourceError(
            f"{file} was not written by Kinlens and names no model. Pass --bundle BUNDLE if "
            "its vectors are of that model; else --model NAME, to search by vector only."
        )
    opened = None if bundle is None else Bundle.open(bundle)
    facts = {
        "name": name_of(file.with_suffix("")),
        "bundle_id": f"{OTHER_MODEL}{model}" if opened is None else opened.bundle_id,
        "source": f"vectors in {file.resolve()}",
        "source_root": "" if image_root is None else _absolute(image_root),
    }
    dump = tables.dump(facts)
    if opened is not None and dump.dim != opened.manifest.dim:
        raise SourceError(
            f"The vectors in {file} have {dump.dim} components, those of {bundle} have "
            f"{opened.manifest.dim}. Pass the bundle that computed them, or name another "
            "model with --model NAME."
        )
    return dump


def _absolute(image_root: str) -> str:
    root = image_root_of(image_root)
    return str(root.resolve() if isinstance(root, Path) else root)


def _check_choice(is_remote: bool, vector_type: VectorType, index: IndexChoice) -> None:
    """Raises: InvalidParameterError for a choice that the engine does not have."""
    kind, kinds = index.get("index"), get_args(IndexKind)
    if not is_remote:
        if kind in get_args(MilvusIndex) and kind not in kinds:
            raise InvalidParameterError(
                f"--index {kind} is only for Milvus: for a gallery in a folder choose auto, "
                f"{', '.join(kinds)}."
            )
        return
    for option, value in (
        ("--memory-mb", index.get("memory_mb")),
        ("--target-recall", index.get("target_recall")),
        ("--index-device", index.get("index_device")),
        ("--vector-type", None if vector_type == "fp32" else vector_type),
    ):
        if value is not None:
            raise InvalidParameterError(
                f"{option} is only for a gallery in a folder: omit it, and choose the index on "
                "Milvus with --index (ivf-rabitq and diskann need less memory)."
            )


def _import_remote(
    address: str, dump: GalleryExport, index: str, on_progress: Progress
) -> ImportReport:
    uri, name = milvus_address(address)
    token = stores.milvus_token()
    with contextlib.closing(
        import_to_milvus(dump, uri, name, token=token, index=index, on_progress=on_progress)
    ) as store:
        stores.note(store.index_text())
        return ImportReport(
            name=store.name,
            bundle_id=store.bundle_id,
            dim=store.dim,
            items=store.size,
            generation=store.generation,
        )
