"""Rebuild: a gallery made again with another model, beside the old one, which stays in use."""

from collections.abc import Callable, Iterable, Set
from pathlib import Path
from time import perf_counter

from pydantic import BaseModel, ConfigDict

from embedder.errors import GalleryBusyError, SourceError
from indexer.folder.manifest import GalleryManifest
from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from indexer.ingest.adopt import adopt
from indexer.ingest.failures import Failure
from indexer.ingest.follower import Follower
from indexer.types import Progress

_ROUNDS = 8  # of changes that came while the last ones were repeated
_SHOWN = 100


class RebuildReport(BaseModel):
    """How a rebuild went: `items` of the `found` are in the new gallery, `missing` are not.

    `failures` names the first 100 of the missing, with the reasons.
    """

    model_config = ConfigDict(frozen=True)

    found: int
    items: int
    embedded: int
    missing: int
    failures: tuple[Failure, ...]
    bundle_id: str
    provider: str
    elapsed_s: float


def rebuild(
    follower: Follower,
    candidate: Path,
    *,
    max_missing: float = 0.0,
    on_progress: Progress | None = None,
    on_indexed: Progress | None = None,
) -> RebuildReport:
    """Make the gallery that `follower` reads again in the new folder `candidate`, with its model.

    Items whose pictures cannot be read are left out, up to the part `max_missing` of all. The
    kind of index and its target stay as they are. `on_progress` counts items, `on_indexed` items
    of the index.

    Raises: SourceError for more missing pictures; PlanError, RecallError; GalleryBusyError if a
        build replaces the gallery; GalleryWriteError; BundleError.
    """
    started = perf_counter()
    old, embedder = follower.gallery, follower.embedder
    made = Gallery.create(
        candidate,
        name=old.name,
        bundle_id=embedder.bundle_id,
        dim=embedder.dim,
        source=old.manifest.source,
        source_root=old.manifest.source_root,
    )
    try:
        follower.catch_up(made, on_progress)
        check_missing(follower.failures.values(), follower.found, max_missing)
        segment = old.facts().segment
        settings = IndexSettings() if segment is None else segment.settings
        made.compact(settings, wait=True, on_progress=on_indexed)
        return RebuildReport(
            found=follower.found,
            items=made.size,
            embedded=follower.embedded,
            missing=len(follower.failures),
            failures=tuple(follower.failures.values())[:_SHOWN],
            bundle_id=embedder.bundle_id,
            provider=embedder.provider,
            elapsed_s=round(perf_counter() - started, 3),
        )
    finally:
        made.close()


def swap_in(
    follower: Follower,
    candidate: Path,
    *,
    max_missing: float = 0.0,
    known_missing: Set[int] = frozenset(),
    on_progress: Progress | None = None,
    before_publish: Callable[[], None] | None = None,
) -> GalleryManifest:
    """Put `candidate` in the place of the gallery that `follower` reads.

    What changed meanwhile is repeated in rounds until a round finds nothing more; the rest, while
    nobody can change the gallery. So the new generation holds every change that was acknowledged.
    Items whose pictures cannot be read are left out, up to the part `max_missing` of all; the
    numbers `known_missing` are not counted: somebody has decided that these may be left out.
    The candidate stays as it is. Progress counts bytes. `before_publish` is called at the last
    moment at which nothing has changed; if it raises, nothing will.

    Raises: SourceError for too many missing pictures; GalleryBusyError if the changes never end,
        or a build runs; what `adopt` raises.
    """
    calls = 0

    def catch_up(copy: Path) -> None:
        nonlocal calls
        calls += 1
        made = Gallery.open(copy, verify_hashes=False)
        try:
            _catch_up(follower, made, rounds=_ROUNDS if calls == 1 else 1)
            check_missing(missing_since(follower, known_missing), follower.found, max_missing)
        finally:
            made.close()
        if calls > 1 and before_publish is not None:
            before_publish()

    return adopt(follower.path, candidate, catch_up=catch_up, on_progress=on_progress)


def missing_since(follower: Follower, known: Set[int]) -> list[Failure]:
    """The items that are missing now, without those with the numbers `known`."""
    return [failure for number, failure in follower.failures.items() if number not in known]


def check_missing(failures: Iterable[Failure], found: int, max_missing: float) -> None:
    """Raises: SourceError if more than the part `max_missing` of `found` items is missing."""
    missing = list(failures)
    if len(missing) <= max_missing * found:
        return
    first = missing[0]
    raise SourceError(
        f"The pictures of {len(missing):,} of {found:,} items cannot be read, allowed are "
        f"{max_missing:.1%}; the first is {first.key!r}: {first.reason} Put the pictures back, "
        "remove these items, or rebuild with a greater max_missing."
    )


def _catch_up(follower: Follower, made: Gallery, rounds: int) -> None:
    few = 64
    touched = 0
    for _ in range(rounds):
        touched = follower.catch_up(made)
        if not touched:
            return
    if rounds > 1 and touched > few:
        raise GalleryBusyError(
            f"The gallery {follower.path} changes faster than the new one can follow: "
            f"{touched:,} items in the last of {rounds} rounds. Swap it when fewer changes come."
        )
