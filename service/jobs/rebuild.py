"""Jobs on galleries: compact, swap with another one, and rebuild: how one gets another model."""

import contextlib
import json
import shutil
from collections.abc import Callable, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from embedder.bundle import Bundle
from embedder.durable import make_folder, rename, staged, sync_tree
from embedder.session import OnnxEmbedder
from indexer.checks.compare import Comparison, Interval, compare
from indexer.gallery import Gallery, copy_bytes, current_manifest
from indexer.ingest.rebuild import Follower, adopt, missing_since, rebuild, swap_in
from indexer.ingest.sources import ANY_SIZE
from service.galleries.pictures import PictureFolder
from service.jobs.params import (
    BUNDLE_DIGITS,
    Gate,
    RebuildParams,
    SwapParams,
    TrainParams,
    checked,
)
from service.jobs.process import Context
from service.jobs.store import JobFolders

_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Questions:
    """The keys of the items that are fair questions, or None for all, and what they have in common,
    as a clause."""

    keys: Set[str] | None = None
    clause: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a new gallery is good enough to replace the old one, and why."""

    passed: bool
    reason: str


def compact_gallery(context: Context) -> None:
    """Make the index of a gallery anew, without what was removed."""
    with contextlib.closing(Gallery.open(context.plan.gallery)) as gallery:
        index = context.progress("make the index", 0.0, 0.99, gallery.size)
        report = gallery.compact(wait=True, on_progress=index)
        context.tell(segment=report.segment, elapsed_s=round(report.elapsed_s, 3))


def swap_gallery(context: Context) -> None:
    """The state of another gallery, or a candidate, becomes the next generation."""
    params, plan = context.params, context.plan
    assert isinstance(params, SwapParams)
    assert plan.other is not None
    if params.job is not None:
        _swap_candidate(context, plan.other)
        return
    source = Gallery.open(plan.other, load_index=False)
    target = Gallery.open(plan.gallery, load_index=False)
    root = plan.other_root or source.image_root
    context.tell(
        old={"bundle_id": target.bundle_id, "items": target.size},
        new={"bundle_id": source.bundle_id, "items": source.size},
        swapped=False,
    )
    source.close()
    target.close()
    own, others = PictureFolder(plan.gallery), PictureFolder(plan.other)
    calls = 0

    def catch_up(_: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            own.take_in(others.root)
        else:
            context.commit()

    with own.receiving(others):
        manifest = adopt(
            plan.gallery,
            plan.other,
            image_root="" if root == Path() else root,
            catch_up=catch_up,
            on_progress=context.progress("put in place", 0.0, 0.99, copy_bytes(plan.other)),
        )
    own.sweep()
    context.tell(swapped=True, generation=manifest.generation)


def rebuild_gallery(context: Context) -> None:
    """The work of a rebuild."""
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
    params, folders = context.params, context.folders
    assert isinstance(params, RebuildParams | TrainParams)
    rest = 1.0 - start
    with _following(context, bundle) as follower:
        size = follower.gallery.size
        folders.candidate.parent.mkdir(parents=True, exist_ok=True)
        context.at("embed pictures", start)
        parts = start, start + 0.8 * rest, start + 0.9 * rest
        report = rebuild(
            follower,
            folders.candidate,
            max_missing=params.max_missing,
            on_progress=context.progress("embed pictures", parts[0], parts[1], size),
            on_indexed=context.progress("make the index", parts[1], parts[2], size),
        )
        missing = {"generation": follower.gallery.generation, "items": sorted(follower.failures)}
        folders.missing.write_text(json.dumps(missing), encoding="utf-8")
        context.tell(rebuild=report.model_dump(mode="json"), swapped=False)
        context.at("compare old and new", parts[2])
        passed = _compare(context, follower.gallery, gate, choose(follower.gallery))
        store_bundle(bundle, folders.bundles)
        if params.swap == "auto" and passed:
            part = start + 0.94 * rest
            _swap_in(context, follower, folders, part, params.max_missing, frozenset())


def store_bundle(bundle: Path, bundles: Path) -> None:
    """Keep a bundle among those of the service, whole or not at all.

    Raises: BundleError; OSError.
    """
    target = bundles / Bundle.open(bundle).bundle_id[:BUNDLE_DIGITS]
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


def _following(context: Context, bundle: Path) -> contextlib.closing[Follower]:
    """The gallery of the job, read with a model as the service runs it."""
    embedder = OnnxEmbedder.open(bundle, context.plan.session, ANY_SIZE)
    return contextlib.closing(Follower(context.plan.gallery, embedder, context.read_image()))


def _compare(context: Context, old: Gallery, gate: Gate, questions: Questions) -> bool:
    assert isinstance(context.params, RebuildParams | TrainParams)
    candidate = Gallery.open(context.folders.candidate, verify_hashes=False)
    with contextlib.closing(candidate) as new:
        found = compare(old, new, context.params.class_attribute, asked=questions.keys)
    verdict = judge(found, gate, questions.clause)
    context.tell(**found.model_dump(mode="json"), gate=asdict(verdict))
    return verdict.passed


def _swap_candidate(context: Context, candidate: Path) -> None:
    """Put the candidate of an earlier job in place, with all that changed since.

    Of items whose pictures have gone missing since, no more may be left out than that job allowed.
    """
    bundle_id = current_manifest(candidate).bundle_id
    bundle = context.folders.bundles / bundle_id[:BUNDLE_DIGITS]
    maker = context.store.get(candidate.name)
    params = checked(maker.kind, maker.params)
    assert isinstance(params, RebuildParams | TrainParams)
    folders = JobFolders(candidate.parents[1], maker.id)
    with _following(context, bundle) as follower:
        old = follower.gallery
        context.tell(old={"bundle_id": old.bundle_id}, new={"bundle_id": bundle_id}, swapped=False)
        known = _missing_then(folders, old.generation)
        _swap_in(context, follower, folders, 0.1, params.max_missing, known)


def _swap_in(
    context: Context,
    follower: Follower,
    maker: JobFolders,
    start: float,
    max_missing: float,
    known: Set[int],
) -> None:
    """Put the candidate that `maker` has in place.

    `known` are the numbers of the items that may be missing beside the part `max_missing`.
    """
    candidate = maker.candidate
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
        then = _missing_then(maker, follower.gallery.generation)
        missing = missing_since(follower, then)
        shown = [failure.model_dump(mode="json") for failure in missing[:_SHOWN]]
        context.tell(missing_since={"count": len(missing), "failures": shown})
    context.tell(swapped=True, generation=manifest.generation)
    shutil.rmtree(candidate, ignore_errors=True)


def _missing_then(maker: JobFolders, generation: str) -> frozenset[int]:
    """The items, by number, that were missing when a job made its candidate.

    None if the gallery was at another generation, or it is unknown.
    """
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(maker.missing.read_text(encoding="utf-8"))
        if found["generation"] == generation:
            return frozenset(found["items"])
    return frozenset()
