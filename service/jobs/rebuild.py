"""Jobs on galleries: compact; make equal to a folder or list; swap with another gallery; rebuild
with another model.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Set
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.durable import discard, make_folder, rename, staged, sync_tree
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleError, GalleryError, JobConflictError, SourceError
from kinlens.embedder.seen import Seen
from kinlens.embedder.session import OnnxEmbedder, fitted
from kinlens.embedder.sources.tables import class_in
from kinlens.indexer.entries import Item
from kinlens.indexer.galleries import KEEP_REMOVED_S, copy_bytes, current_manifest
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.images import ANY_SIZE, image_root_of, read_image
from kinlens.indexer.ingest.rebuild import (
    CatchUp,
    ReadImage,
    adopt,
    missing_since,
    rebuild,
    swap_in,
)
from kinlens.indexer.ingest.sources import Record
from kinlens.indexer.ingest.sync import MaxRemoved, SyncSettings, source_of, sync_source
from kinlens.indexer.types import Progress
from kinlens.indexer.uploads import UploadFolder
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.gate import (
    Gate,
    Verdict,
    fair_questions,
    judge_items,
    seen_by_bundle,
)
from kinlens.quality.golden import GoldenSet
from kinlens.quality.judging import (
    MIN_JUDGED,
    GoldenResults,
    change,
    embedded,
    labelled,
    threshold_of,
)
from kinlens.service.galleries.locations import find_bundle
from kinlens.service.jobs.params import (
    ModelParams,
    Params,
    Plan,
    RebuildParams,
    SwapParams,
    SyncParams,
    params_of,
)
from kinlens.service.jobs.store import TOTAL, Job, JobFolders, JobStore

_BUNDLE_DIGITS = 16  # of its id, in the name of its folder
_REPORT_EVERY_S = 0.2
_WORDS = {True: "good enough", False: "refused", None: "not judged"}
_SHOWN = 100  # failures in a report


@dataclass(frozen=True, slots=True)
class Context:
    """A running job: its parameters, its files, and methods to log and report."""

    job: Job
    params: Params
    plan: Plan
    folders: JobFolders
    store: JobStore

    def at(self, step: str, part: float) -> None:
        """Report that the job begins this step, and that `part` (0 to 1) of its work is done."""
        self.log(step)
        self.store.progress(self.job.id, step, int(TOTAL * part))

    def log(self, line: str) -> None:
        """Write a line to the log of the job, which is the standard output of its process."""
        print(f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)  # noqa: T201

    def progress(self, step: str, start: float, end: float, units: int) -> Progress:
        """A progress callback for a step that takes the job from the part `start` to `end`.

        The callback is called with the number of `units` done since its last call.
        """
        done, reported_at = 0, 0.0
        self.log(f"{step}: {units:,}")

        def more(count: int) -> None:
            nonlocal done, reported_at
            done = min(done + count, units)
            if done == units or time.monotonic() - reported_at >= _REPORT_EVERY_S:
                reported_at = time.monotonic()
                part = done / units if units else 1.0
                now = int(TOTAL * (start + part * (end - start)))
                self.store.progress(self.job.id, f"{step} {done:,} of {units:,}", now)

        return more

    def commit(self) -> None:
        """Mark the job as committed: it changes its gallery now and cannot be cancelled any more.

        Raises: JobConflictError if it has already been cancelled.
        """
        if not self.store.commit(self.job.id):
            raise JobConflictError("The job was cancelled; nothing was changed.")

    def report(self, **found: Any) -> None:
        """Add fields to the report of the job."""
        self.store.report(self.job.id, (self.store.get(self.job.id).report or {}) | found)

    def read_image(self) -> ReadImage:
        """A function that reads the image of an item from the image root or the uploads."""
        recorded = current_manifest(self.plan.gallery).source_root
        root = image_root_of(self.plan.image_root or recorded)
        uploads = UploadFolder(self.plan.gallery)

        def read(item: Item | Record) -> bytes:
            if item.path:
                return read_image(root, item.path, ANY_SIZE.max_bytes)
            return uploads.read(item.sha256)

        return read

    def follow(self, bundle: Path) -> contextlib.closing[CatchUp]:
        """A follower that embeds the items of the job's gallery with the model in `bundle`."""
        embedder = opened(bundle, self.plan.session)
        return contextlib.closing(CatchUp(self.plan.gallery, embedder, self.read_image()))


def opened(bundle: Path, session: SessionSettings) -> OnnxEmbedder:
    """Open the model for a new gallery, in fp32 if the precision is "auto".

    Only fp32 vectors work with every precision that a service may choose. Raises: BundleError.
    """
    if session.precision == "auto":
        session = replace(session, precision="fp32")
    return OnnxEmbedder.open(bundle, session, ANY_SIZE)


def compact_gallery(context: Context) -> None:
    """Rebuild the index of a gallery without its removed items."""
    with contextlib.closing(Gallery.open(context.plan.gallery)) as gallery:
        index = context.progress("build the index", 0.0, 0.99, gallery.size)
        report = gallery.compact(wait=True, on_progress=index)
        context.report(segment=report.segment, elapsed_s=round(report.elapsed_s, 3))
    UploadFolder(context.plan.gallery).sweep()  # images of items that can no longer be restored


def sync_gallery(context: Context) -> None:
    """Make the gallery of a job equal to its image root, or to a folder of the settings.

    Raises: SourceError if more items would be removed than its parameters allow.
    """
    params, plan = context.params, context.plan
    assert isinstance(params, SyncParams)
    assert plan.bundle is not None
    bundle = plan.bundle
    settings = SyncSettings(
        MaxRemoved.parse(params.max_removed), params.uploads, params.checksum, params.dry_run
    )
    with contextlib.closing(
        Gallery.open(plan.gallery, image_root=plan.image_root, load_index=False)
    ) as gallery:
        source = source_of(gallery, plan.folder or gallery.image_root, None)
        report = sync_source(
            gallery,
            source,
            lambda: opened(bundle, plan.session),
            settings,
            context.progress("compare images", 0.0, 0.4, source.count),
            context.progress("embed images", 0.4, 0.9, source.count),
        )
        shown = report.model_copy(update={"failures": report.failures[:_SHOWN]})
        skipped = len(report.failures)
        context.report(sync=shown.model_dump(mode="json"), skipped=skipped)
        if report.refused:
            raise SourceError(report.refused)
        if not params.dry_run and gallery.needs_compaction() is not None:
            index = context.progress("build the index", 0.9, 0.99, gallery.size)
            gallery.compact(wait=True, keep_removed_s=KEEP_REMOVED_S, on_progress=index)


def swap_gallery(context: Context) -> None:
    """Publish another gallery, or the candidate of a job, as the next generation."""
    params = context.params
    assert isinstance(params, SwapParams)
    if params.job is not None:
        _swap_candidate(context, context.store.get(params.job))
    else:
        assert context.plan.other is not None
        _swap_gallery(context, context.plan.other)


def _swap_gallery(context: Context, other: Path) -> None:
    plan = context.plan
    with (
        contextlib.closing(Gallery.open(other, load_index=False)) as source,
        contextlib.closing(Gallery.open(plan.gallery, load_index=False)) as target,
    ):
        root = plan.other_root or source.image_root
        context.report(
            old={"bundle_id": target.bundle_id, "items": target.size},
            new={"bundle_id": source.bundle_id, "items": source.size},
            swapped=False,
        )
    own, others = UploadFolder(plan.gallery), UploadFolder(other)
    with own.removal_paused(), others.removal_paused():
        manifest = adopt(
            plan.gallery,
            other,
            image_root="" if root == Path() else str(root),
            before_lock=lambda _: own.import_from(others.root),
            under_lock=lambda _: context.commit(),
            on_progress=context.progress("publish", 0.0, 0.99, copy_bytes(other)),
        )
    own.sweep()
    context.report(swapped=True, generation=manifest.generation)


def _swap_candidate(context: Context, maker: Job) -> None:
    """Publish the candidate of another job with all changes since it was made. Items that were
    already missing from it do not count towards `max_missing`.
    """
    made = JobFolders(context.folders.state, maker.id)
    params = params_of(maker.kind, maker.params)
    assert isinstance(params, ModelParams)
    bundle_id = current_manifest(made.candidate).bundle_id
    bundle = find_bundle(made.state, None, bundle_id) or made.bundles / bundle_id
    with context.follow(bundle) as follower:
        old = follower.gallery
        context.report(
            old={"bundle_id": old.bundle_id}, new={"bundle_id": bundle_id}, swapped=False
        )
        missing_ids: Set[int] = frozenset()
        with contextlib.suppress(OSError, ValueError):
            missing = json.loads(made.missing.read_text(encoding="utf-8"))
            if missing["generation"] == old.generation:  # the ids are valid only in this one
                missing_ids = frozenset(missing["items"])
        _swap_in(context, follower, made.candidate, 0.1, params.max_missing, missing_ids)


def rebuild_gallery(context: Context) -> None:
    """Rebuild the gallery with another bundle that the service knows."""
    params, bundle = context.params, context.plan.bundle
    assert isinstance(params, RebuildParams)
    assert bundle is not None
    replace_model(context, bundle, Gate(max_recall_loss=params.max_recall_loss))


def replace_model(
    context: Context,
    bundle: Path,
    gate: Gate,
    start: float = 0.0,
) -> None:
    """Rebuild the gallery with `bundle`, compare, and swap if the gate and the parameters allow it.

    An interrupted job continues with its candidate. `start` is the part of the job that is already
    done.

    Raises: what `rebuild` and `swap_in` raise; JobConflictError if it was cancelled.
    """
    params, candidate = context.params, context.folders.candidate
    assert isinstance(params, ModelParams)
    embedded, indexed, compared = (start + part * (1.0 - start) for part in (0.8, 0.9, 0.94))
    with context.follow(bundle) as follower:
        old = follower.gallery
        candidate.parent.mkdir(parents=True, exist_ok=True)
        context.at("embed images", start)
        report = rebuild(
            follower,
            candidate,
            max_missing=params.max_missing,
            on_progress=context.progress("embed images", start, embedded, old.size),
            on_indexed=context.progress("build the index", embedded, indexed, old.size),
        )
        missing_ids = frozenset(follower.failures)
        missing = {"generation": old.generation, "items": sorted(missing_ids)}
        context.folders.missing.write_text(json.dumps(missing), encoding="utf-8")
        context.report(rebuild=report.model_dump(mode="json"), swapped=False)
        context.at("compare old and new", indexed)
        class_attribute = params.class_attribute or class_in(old.schema())
        before, after = seen_by_bundle(context.plan.old_bundle), seen_by_bundle(bundle)
        with contextlib.closing(Gallery.open(candidate, verify_hashes=False)) as new:
            _calibrate_as(old, new)
            questions = fair_questions(old, class_attribute, before, after)
            # A person has chosen the bundle of a rebuild, so it is judged by what there is.
            anyhow = isinstance(params, RebuildParams)
            found, verdict = judge_items(old, new, class_attribute, gate, questions, anyhow=anyhow)
            seen = Seen.of() if anyhow and questions.seen is None else questions.seen
            verdict = _judged_by_golden(context, follower, new, seen, gate, verdict)
        context.report(**found.model_dump(mode="json"), gate=asdict(verdict))
        context.log(f"{_WORDS[verdict.passed]}: {verdict.reason}")
        store_bundle(bundle, context.folders.bundles)
        if params.swap == "auto" and verdict.passed:
            _swap_in(context, follower, candidate, compared, params.max_missing, frozenset())


def _calibrate_as(old: Gallery, new: Gallery) -> None:
    """Calibrate the new gallery, with the product attribute that was chosen for the old one."""
    known = Calibrator(old).stored()
    is_chosen = known is not None and known.is_chosen and known.product in new.schema()
    Calibrator(new).fit(known.product if known is not None and is_chosen else None)


def _judged_by_golden(
    context: Context,
    follower: CatchUp,
    new: Gallery,
    seen: Seen | None,
    gate: Gate,
    otherwise: Verdict,
) -> Verdict:
    """The verdict by the golden set, without images that a model was trained on: those `seen`, or
    all if that is None. If it cannot decide, the verdict `otherwise` with the reason as a note.
    """
    plan, golden = context.plan, GoldenSet(context.plan.gallery)
    golden_queries = golden.queries()
    queries = [
        x for x in golden_queries if seen is not None and not (x.image and seen.has_image(x.image))
    ]
    if not golden_queries:
        return otherwise
    if plan.old_bundle is None or not queries:
        why = "the bundle of the old model is unknown to this service"
        if not queries:
            why = "the models may have been trained on all of it"
        return _noted(otherwise, f"The golden set was not used: {why}.")
    old = opened(plan.old_bundle, plan.session)
    fit = fitted(follower.gallery, old)
    before = GoldenResults.of(follower.gallery, queries, embedded(golden, queries, fit))
    vectors = embedded(golden, queries, follower.embedder)
    after = GoldenResults.of(new, queries, vectors)
    try:
        Calibrator(new, golden).fit_golden(partial(labelled, new, queries, vectors))
    except GalleryError as error:  # the gallery is usable, and can be calibrated later
        context.log(f"the probabilities were not fitted to the golden set: {error}")
    thresholds = [threshold_of(one.calibration) for one in (old, follower.embedder)]
    found = change(before, after, *thresholds)
    context.report(golden=found.model_dump(mode="json"))
    if found.decides:
        passed, reason = found.verdict(gate.max_recall_loss, gate.min_recall_at_1)
        would = "would refuse it" if otherwise.passed is False else "cannot judge it"
        note = "" if otherwise.passed else f"The items {would}: {otherwise.reason}"
        return Verdict(passed, reason, "golden", note if passed else "")
    few = f"{found.judged:,} of its queries can be judged, {MIN_JUDGED} are needed"
    return _noted(otherwise, f"The golden set did not decide: {few}.")


def _noted(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, note=f"{verdict.note} {note}".strip())


def _swap_in(
    context: Context,
    follower: CatchUp,
    candidate: Path,
    start: float,
    max_missing: float,
    missing_ids: Set[int],
) -> None:
    """Publish a candidate that lacks the items `missing_ids`. Of all others, at most the part
    `max_missing` may have lost their images since.
    """
    try:
        manifest = swap_in(
            follower,
            candidate,
            max_missing=max_missing,
            known_missing=missing_ids,
            on_progress=context.progress("publish", start, 0.99, copy_bytes(candidate)),
            before_publish=context.commit,
        )
    finally:
        missing = missing_since(follower, missing_ids)
        shown = [failure.model_dump(mode="json") for failure in missing[:_SHOWN]]
        context.report(missing_since={"count": len(missing), "failures": shown})
    context.report(swapped=True, generation=manifest.generation)
    context.log("the new gallery is published")
    shutil.rmtree(candidate, ignore_errors=True)


def store_bundle(bundle: Path, bundles: Path) -> None:
    """Copy a bundle atomically into the bundles of the service; a damaged copy is replaced.

    Raises: BundleError; OSError.
    """
    # With its attached files: another bundle for the same galleries may be there already.
    target = bundles / Bundle.open(bundle).manifest.bundle_id[:_BUNDLE_DIGITS]
    if target.is_dir():
        try:
            Bundle.open(target)
        except BundleError:
            discard(target)
        else:
            return
    make_folder(bundles, "bundle")
    with staged(bundles) as stage:
        copy = stage / "bundle"
        shutil.copytree(bundle, copy)
        Bundle.open(copy)
        sync_tree(copy, "bundle")
        with contextlib.suppress(FileExistsError):  # another job stored the same bundle
            rename(copy, target, "bundle")
