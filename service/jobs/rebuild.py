"""Jobs on galleries: compact, swap with another one, and rebuild: how one gets another model."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Set
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.durable import make_folder, rename, staged, sync_tree
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import GalleryError, JobConflictError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.golden import Interval
from kinlens.indexer.checks.compare import Comparison, compare
from kinlens.indexer.gallery import Gallery, copy_bytes, current_manifest
from kinlens.indexer.golden import (
    MIN_JUDGED,
    Asked,
    GoldenSet,
    change,
    embedded,
    labelled,
    threshold_of,
)
from kinlens.indexer.ingest.rebuild import (
    Follower,
    ReadImage,
    adopt,
    missing_since,
    rebuild,
    swap_in,
)
from kinlens.indexer.ingest.sources import Record
from kinlens.indexer.pictures import ANY_SIZE, read_image
from kinlens.indexer.types import Item, Progress
from kinlens.service.galleries.uploads import UploadFolder
from kinlens.service.jobs.params import (
    Gate,
    ModelParams,
    Params,
    Plan,
    RebuildParams,
    SwapParams,
    params_of,
)
from kinlens.service.jobs.store import TOTAL, Job, JobFolders, JobStore

_BUNDLE_DIGITS = 16  # of its id, in the name of its folder
_TELL_EVERY_S = 0.2
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Context:
    """A job, what it was told, where it keeps its files, and how it tells what it does."""

    job: Job
    params: Params
    plan: Plan
    folders: JobFolders
    store: JobStore

    def at(self, step: str, part: float) -> None:
        """The job is at `part` (0 to 1) of all its work, and begins this step."""
        self.log(step)
        self.store.progress(self.job.id, step, int(TOTAL * part))

    def log(self, line: str) -> None:
        """Write a line into the log of the job, which is the output of its process."""
        print(f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)  # noqa: T201

    def progress(self, step: str, start: float, end: float, units: int) -> Progress:
        """How to tell that a step goes on, which takes the job from the part `start` to `end`.

        The returned function is told how many of the `units` are done since its last call.
        """
        done, told_at = 0, 0.0
        self.log(f"{step}: {units:,}")

        def more(count: int) -> None:
            nonlocal done, told_at
            done = min(done + count, units)
            if done == units or time.monotonic() - told_at >= _TELL_EVERY_S:
                told_at = time.monotonic()
                part = done / units if units else 1.0
                now = int(TOTAL * (start + part * (end - start)))
                self.store.progress(self.job.id, f"{step} {done:,} of {units:,}", now)

        return more

    def commit(self) -> None:
        """From now on the job changes its gallery and cannot be cancelled.

        Raises: JobConflictError if somebody has cancelled it.
        """
        if not self.store.commit(self.job.id):
            raise JobConflictError("The job was cancelled; nothing was changed.")

    def tell(self, **found: Any) -> None:
        """Add to the report of the job."""
        self.store.report(self.job.id, (self.store.get(self.job.id).report or {}) | found)

    def read_image(self) -> ReadImage:
        """How to read the picture of an item: from the image root, or as it was uploaded."""
        root = self.plan.image_root or Path(current_manifest(self.plan.gallery).source_root)
        pictures = UploadFolder(self.plan.gallery)

        def read(item: Item | Record) -> bytes:
            if item.path:
                return read_image(root, item.path, ANY_SIZE.max_bytes)
            return pictures.read(item.sha256)

        return read

    def follow(self, bundle: Path) -> contextlib.closing[Follower]:
        """The gallery of the job, read with a model."""
        embedder = opened(bundle, self.plan.session)
        return contextlib.closing(Follower(self.plan.gallery, embedder, self.read_image()))


def opened(bundle: Path, session: SessionSettings) -> OnnxEmbedder:
    """A model that makes a gallery; in fp32 where the service chooses by itself.

    Only fp32 fits whatever the service, or the next machine, chooses. Raises: BundleError.
    """
    if session.precision == "auto":
        session = replace(session, precision="fp32")
    return OnnxEmbedder.open(bundle, session, ANY_SIZE)


@dataclass(frozen=True, slots=True)
class Questions:
    """The keys of the items that are fair questions, or None for all, and what they have in common,
    as a clause. `seen` are the contents that the new model was trained on, None if unknown."""

    keys: Set[str] | None = None
    clause: str = ""
    seen: Set[str] | None = frozenset()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a new gallery is good enough to replace the old one, by which figures, and why.

    `note` is what other figures say, which do not decide.
    """

    passed: bool
    reason: str
    by: Literal["items", "golden"] = "items"
    note: str = ""


def compact_gallery(context: Context) -> None:
    """Make the index of a gallery anew, without what was removed."""
    with contextlib.closing(Gallery.open(context.plan.gallery)) as gallery:
        index = context.progress("make the index", 0.0, 0.99, gallery.size)
        report = gallery.compact(wait=True, on_progress=index)
        context.tell(segment=report.segment, elapsed_s=round(report.elapsed_s, 3))
    UploadFolder(context.plan.gallery).sweep()  # of items that cannot come back any more


def swap_gallery(context: Context) -> None:
    """The state of another gallery, or the candidate of a job, becomes the next generation."""
    params, plan = context.params, context.plan
    assert isinstance(params, SwapParams)
    assert plan.other is not None
    if params.job is not None:
        _swap_candidate(context, plan.other)
    else:
        _swap_gallery(context, plan.other)


def _swap_gallery(context: Context, other: Path) -> None:
    plan = context.plan
    with (
        contextlib.closing(Gallery.open(other, load_index=False)) as source,
        contextlib.closing(Gallery.open(plan.gallery, load_index=False)) as target,
    ):
        root = plan.other_root or source.image_root
        context.tell(
            old={"bundle_id": target.bundle_id, "items": target.size},
            new={"bundle_id": source.bundle_id, "items": source.size},
            swapped=False,
        )
    own, others = UploadFolder(plan.gallery), UploadFolder(other)
    steps = iter(
        (lambda: own.import_from(others.root), context.commit)
    )  # before and in the last moment
    with own.copying_from(others):
        manifest = adopt(
            plan.gallery,
            other,
            image_root="" if root == Path() else root,
            catch_up=lambda _: next(steps)(),
            on_progress=context.progress("put in place", 0.0, 0.99, copy_bytes(other)),
        )
    own.sweep()
    context.tell(swapped=True, generation=manifest.generation)


def _swap_candidate(context: Context, candidate: Path) -> None:
    """With all that changed since; which items were left out then is no reason to refuse."""
    maker = context.store.get(candidate.name)
    params = params_of(maker.kind, maker.params)
    assert isinstance(params, ModelParams)
    bundle_id = current_manifest(candidate).bundle_id
    with context.follow(context.folders.bundles / bundle_id[:_BUNDLE_DIGITS]) as follower:
        old = follower.gallery
        context.tell(old={"bundle_id": old.bundle_id}, new={"bundle_id": bundle_id}, swapped=False)
        known: Set[int] = frozenset()
        with contextlib.suppress(OSError, ValueError):
            file = candidate.parents[1] / "jobs" / maker.id / "missing.json"
            missing = json.loads(file.read_text(encoding="utf-8"))
            if missing["generation"] == old.generation:  # which the numbers are of
                known = frozenset(missing["items"])
        _swap_in(context, follower, candidate, 0.1, params.max_missing, known)


def rebuild_gallery(context: Context) -> None:
    """Make the gallery again with another bundle that the service knows."""
    params, bundle = context.params, context.plan.bundle
    assert isinstance(params, RebuildParams)
    assert bundle is not None
    replace_model(context, bundle, Gate(max_recall_loss=params.max_recall_loss, min_queries=0))


def replace_model(
    context: Context,
    bundle: Path,
    gate: Gate,
    start: float = 0.0,
    choose: Callable[[Gallery], Questions] = lambda _: Questions(),
) -> None:
    """Make the gallery with `bundle`, compare, and swap if the gate and the parameters say so.

    One that was stopped goes on with the candidate that it has. `start` is the part of the job that
    is done already. `choose` says which items are fair questions about the new model.

    Raises: what `rebuild` and `swap_in` raise; JobConflictError if it was cancelled.
    """
    params, candidate = context.params, context.folders.candidate
    assert isinstance(params, ModelParams)
    embedded, indexed, compared = (start + part * (1.0 - start) for part in (0.8, 0.9, 0.94))
    with context.follow(bundle) as follower:
        old = follower.gallery
        candidate.parent.mkdir(parents=True, exist_ok=True)
        context.at("embed pictures", start)
        report = rebuild(
            follower,
            candidate,
            max_missing=params.max_missing,
            on_progress=context.progress("embed pictures", start, embedded, old.size),
            on_indexed=context.progress("make the index", embedded, indexed, old.size),
        )
        known = frozenset(follower.failures)
        missing = {"generation": old.generation, "items": sorted(known)}
        context.folders.missing.write_text(json.dumps(missing), encoding="utf-8")
        context.tell(rebuild=report.model_dump(mode="json"), swapped=False)
        context.at("compare old and new", indexed)
        questions = choose(old)
        with contextlib.closing(Gallery.open(candidate, verify_hashes=False)) as new:
            _calibrate_as(old, new)
            found = compare(old, new, params.class_attribute, asked=questions.keys)
            verdict = judge(found, gate, questions.clause)
            verdict = _judged_by_golden(context, follower, new, questions, gate, verdict)
        context.tell(**found.model_dump(mode="json"), gate=asdict(verdict))
        context.log(f"{'good enough' if verdict.passed else 'refused'}: {verdict.reason}")
        store_bundle(bundle, context.folders.bundles)
        if params.swap == "auto" and verdict.passed:
            _swap_in(context, follower, candidate, compared, params.max_missing, frozenset())


def _calibrate_as(old: Gallery, new: Gallery) -> None:
    """Let the new gallery name products by the attribute that the owner of the old one chose."""
    known = old.calibration()
    if known is not None and known.is_chosen and known.product in new.schema():
        new.calibrate(known.product)


def _judged_by_golden(
    context: Context,
    follower: Follower,
    new: Gallery,
    questions: Questions,
    gate: Gate,
    otherwise: Verdict,
) -> Verdict:
    """Both galleries on the golden set, without pictures that the new model was trained on; the
    verdict `otherwise`, with the reason, where that cannot decide.
    """
    plan, golden, seen = context.plan, GoldenSet(context.plan.gallery), questions.seen
    known = golden.queries()
    queries = [one for one in known if seen is not None and one.sha256 not in seen]
    if not known:
        return otherwise
    if plan.old_bundle is None or not queries:
        why = "the bundle of the old model is not known here"
        if not queries:
            why = "the new model may have been trained on all of it"
        return replace(otherwise, note=f"The golden set was not asked: {why}.")
    old = opened(plan.old_bundle, plan.session)
    before = Asked.of(follower.gallery, queries, embedded(golden, queries, old))
    vectors = embedded(golden, queries, follower.embedder)
    after = Asked.of(new, queries, vectors)
    try:
        new.calibrate_golden(partial(labelled, new, queries, vectors))
    except GalleryError as error:  # the gallery is made, and its probabilities can be fitted later
        context.log(f"the probabilities were not fitted to the golden set: {error}")
    thresholds = [threshold_of(one.calibration) for one in (old, follower.embedder)]
    found = change(before, after, *thresholds)
    context.tell(golden=found.model_dump(mode="json"))
    if found.decides:
        passed, reason = found.verdict(gate.max_recall_loss, gate.min_recall_at_1)
        note = "" if otherwise.passed else f"The items alone would refuse it: {otherwise.reason}"
        return Verdict(passed, reason, "golden", note if passed else "")
    few = f"{found.judged:,} of its queries can be judged, {MIN_JUDGED} are needed"
    return replace(otherwise, note=f"The golden set did not decide: {few}.")


def _swap_in(
    context: Context,
    follower: Follower,
    candidate: Path,
    start: float,
    max_missing: float,
    known: Set[int],
) -> None:
    """Put a candidate in place that lacks the items with the numbers `known`; of others whose
    pictures are missing since, no more than the part `max_missing` of all.
    """
    try:
        manifest = swap_in(
            follower,
            candidate,
            max_missing=max_missing,
            known_missing=known,
            on_progress=context.progress("put in place", start, 0.99, copy_bytes(candidate)),
            before_publish=context.commit,
        )
    finally:
        missing = missing_since(follower, known)
        shown = [failure.model_dump(mode="json") for failure in missing[:_SHOWN]]
        context.tell(missing_since={"count": len(missing), "failures": shown})
    context.tell(swapped=True, generation=manifest.generation)
    context.log("the new gallery is in place")
    shutil.rmtree(candidate, ignore_errors=True)


def store_bundle(bundle: Path, bundles: Path) -> None:
    """Keep a bundle among those of the service, whole or not at all.

    Raises: BundleError; OSError.
    """
    target = bundles / Bundle.open(bundle).bundle_id[:_BUNDLE_DIGITS]
    if target.is_dir():
        Bundle.open(target)
        return
    make_folder(bundles, "bundle")
    with staged(bundles) as stage:
        copy = stage / "bundle"
        shutil.copytree(bundle, copy)
        Bundle.open(copy)
        sync_tree(copy, "bundle")
        with contextlib.suppress(FileExistsError):  # another job had the same one
            rename(copy, target, "bundle")


def judge(found: Comparison, gate: Gate, clause: str = "") -> Verdict:
    """Compare the recalls of both galleries with what the gate allows.

    A loss counts only beyond what is allowed, and only on `gate.min_queries` queries or more.
    `clause` says what the queries have in common.
    """
    old, new = found.old.recall_at_1, found.new.recall_at_1
    asked = f"{found.judged:,} photographs of {found.classes:,} classes{clause}"
    if not found.old.items:
        return Verdict(True, "The gallery has no items to compare.")
    if found.judged < gate.min_queries:
        return Verdict(
            False,
            f"Too few to judge by: {asked}, the gate asks for {gate.min_queries}. Look at the "
            "figures and swap by hand, set gate.min_queries, or hold out more with "
            "data.train_fraction.",
        )
    if old is None or new is None:
        return Verdict(
            False,
            f"Nothing can be judged: no two items have the same {found.class_attribute!r}. Name "
            "another class_attribute, or look at the overlap and swap by hand.",
        )
    figures = (
        f"recall@1 {new:.4f}{_between(found.new.recall_at_1_interval)} after {old:.4f}"
        f"{_between(found.old.recall_at_1_interval)}, a change of {new - old:+.4f}"
        f"{_between(found.change_interval)}, on {asked}"
    )
    if old - new > gate.max_recall_loss + 1e-9:
        return Verdict(
            False,
            f"{figures}: {old - new:.4f} is lost, the gate allows {gate.max_recall_loss:.4f}.",
        )
    if gate.min_recall_at_1 is not None and new < gate.min_recall_at_1:
        return Verdict(False, f"{figures}: the gate asks for {gate.min_recall_at_1:.4f}.")
    return Verdict(True, f"{figures}.")


def _between(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval[0]:.4f} to {interval[1]:.4f})"
