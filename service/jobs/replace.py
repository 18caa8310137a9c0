"""Rebuild beside, compare, decide, swap: how a gallery gets another model."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import asdict
from pathlib import Path

from embedder.bundle import Bundle
from embedder.durable import make_folder, rename, staged, sync_tree
from embedder.session import Embedder
from indexer.checks.compare import compare
from indexer.gallery import Gallery, copy_bytes
from indexer.ingest.embed import Failure
from indexer.ingest.rebuild import Follower, missing_since, rebuild, swap_in
from indexer.types import Progress
from service.jobs.context import Context
from service.jobs.folders import JobFolders
from service.jobs.gate import judge
from service.jobs.missing import read_missing, write_missing
from service.jobs.params import Gate, RebuildParams, TrainParams, checked
from service.jobs.plan import BUNDLE_DIGITS
from service.jobs.record import Job
from service.jobs.unseen import Unseen

_SHOWN = 100


def rebuild_gallery(context: Context) -> None:
    """The work of a rebuild."""
    params, bundle = context.params, context.plan.bundle
    assert isinstance(params, RebuildParams)
    assert bundle is not None
    gate = Gate(max_recall_loss=params.max_recall_loss, min_queries=0)
    replace_model(context, bundle, gate, start=0.0)


def replace_model(
    context: Context,
    bundle: Path,
    gate: Gate,
    start: float,
    choose: Callable[[Gallery], Unseen] | None = None,
) -> None:
    """Make the gallery with `bundle`, compare, and swap if the gate and the parameters say so.

    `start` is the part of the job that is done already. `choose` says which items are fair
    questions about the new model; without it all are.

    Raises: what `rebuild` and `swap_in` raise; JobCancelledError.
    """
    params = context.params
    assert isinstance(params, RebuildParams | TrainParams)
    rest = 1.0 - start
    with _following(context, context.open_embedder(bundle)) as follower:
        _build(context, follower, params.max_missing, start, rest)
        context.steps.set("compare old and new", start + 0.9 * rest)
        passed = _compare(context, follower, params.class_attribute, gate, choose)
        store_bundle(bundle, context.folders.bundles)
        if params.swap == "auto" and passed:
            part, candidate = start + 0.94 * rest, context.folders.candidate
            _swap(context, follower, candidate, part, params.max_missing, frozenset())
            context.folders.drop_candidate()


def swap_candidate(context: Context, candidate: Path) -> None:
    """Put the candidate of an earlier job in place, with all that changed since.

    Of items whose pictures have gone missing since, no more may be left out than that job allowed.

    Raises: as `replace_model`.
    """
    reader = Gallery.open(candidate, verify_hashes=False)
    bundle_id = reader.bundle_id
    reader.close()
    bundle = context.folders.bundles / bundle_id[:BUNDLE_DIGITS]
    maker = JobFolders(context.folders.state, candidate.name)
    max_missing = _max_missing(context.store.get(candidate.name))
    with _following(context, context.open_embedder(bundle)) as follower:
        old = follower.gallery.bundle_id
        context.tell(old={"bundle_id": old}, new={"bundle_id": bundle_id}, swapped=False)
        known = read_missing(maker, follower.gallery.generation)
        _swap(context, follower, candidate, 0.1, max_missing, known)
    shutil.rmtree(candidate, ignore_errors=True)


def store_bundle(bundle: Path, bundles: Path) -> Path:
    """Keep a bundle among those of the service, whole or not at all; its folder there.

    Raises: BundleError; OSError.
    """
    bundle_id = Bundle.open(bundle).bundle_id
    target = bundles / bundle_id[:BUNDLE_DIGITS]
    if target.is_dir():
        Bundle.open(target)
        return target
    make_folder(bundles, "bundle")
    with staged(bundles) as stage:
        copy = stage / "bundle"
        shutil.copytree(bundle, copy)
        Bundle.open(copy)
        sync_tree(copy, "bundle")
        with contextlib.suppress(FileExistsError):  # another job had the same one
            rename(copy, target, "bundle")
    return target


@contextlib.contextmanager
def _following(context: Context, embedder: Embedder) -> Iterator[Follower]:
    gallery = Gallery.open(context.plan.gallery, verify_hashes=False)
    try:
        follower = Follower(context.plan.gallery, embedder, context.read_image(gallery))
    finally:
        gallery.close()
    try:
        yield follower
    finally:
        follower.close()


def _build(
    context: Context, follower: Follower, max_missing: float, start: float, rest: float
) -> None:
    size = follower.gallery.size
    context.folders.candidate.parent.mkdir(parents=True, exist_ok=True)
    embed = context.steps.enter("embed pictures", start, start + 0.8 * rest, size)
    index: list[Progress] = []

    def indexed(count: int) -> None:
        if not index:
            parts = (start + 0.8 * rest, start + 0.9 * rest)
            index.append(context.steps.enter("make the index", *parts, size))
        index[0](count)

    report = rebuild(
        follower,
        context.folders.candidate,
        max_missing=max_missing,
        on_progress=embed,
        on_indexed=indexed,
    )
    write_missing(context.folders, follower)
    context.tell(rebuild=report.model_dump(mode="json"), swapped=False)


def _compare(
    context: Context,
    follower: Follower,
    name: str,
    gate: Gate,
    choose: Callable[[Gallery], Unseen] | None,
) -> bool:
    fair = choose(follower.gallery) if choose is not None else None
    new = Gallery.open(context.folders.candidate, verify_hashes=False)
    try:
        found = compare(follower.gallery, new, name, asked=None if fair is None else fair.keys)
    finally:
        new.close()
    verdict = judge(found, gate, fair.clause if fair is not None else "")
    context.tell(**found.model_dump(mode="json"), gate=asdict(verdict))
    return verdict.passed


def _max_missing(job: Job) -> float:
    params = checked(job.kind, job.params)
    assert isinstance(params, RebuildParams | TrainParams)
    return params.max_missing


def _swap(
    context: Context,
    follower: Follower,
    candidate: Path,
    start: float,
    max_missing: float,
    known: Set[int],
) -> None:
    """`known` are the numbers of the items that may be missing beside the part `max_missing`."""
    copy = context.steps.enter("put in place", start, 0.99, copy_bytes(candidate))
    try:
        manifest = swap_in(
            follower,
            candidate,
            max_missing=max_missing,
            known_missing=known,
            on_progress=copy,
            before_publish=context.steps.commit,
        )
    finally:
        earlier = read_missing(
            JobFolders(context.folders.state, candidate.name), follower.gallery.generation
        )
        context.tell(missing_since=_shown(missing_since(follower, earlier)))
    context.tell(swapped=True, generation=manifest.generation)


def _shown(missing: Sequence[Failure]) -> dict[str, object]:
    listed = [failure.model_dump(mode="json") for failure in missing[:_SHOWN]]
    return {"count": len(missing), "failures": listed}
