"""Jobs of one step: compact, swap with another gallery, remove by a filter."""

from pathlib import Path

from indexer.gallery import Gallery, copy_bytes
from indexer.ingest.rebuild import adopt
from service.galleries.pictures import PictureFolder
from service.jobs.context import Context
from service.jobs.params import DeleteParams, SwapParams, filter_of
from service.jobs.replace import swap_candidate


def compact_gallery(context: Context) -> None:
    """Make the index of a gallery anew, without what was removed."""
    gallery = Gallery.open(context.plan.gallery)
    try:
        index = context.steps.enter("make the index", 0.0, 0.99, gallery.size)
        report = gallery.compact(wait=True, on_progress=index)
        context.tell(segment=report.segment, elapsed_s=round(report.elapsed_s, 3))
    finally:
        gallery.close()


def remove_items(context: Context) -> None:
    """Remove every item that fits; without its attributes an unknown name is an error.

    Raises: FilterError.
    """
    assert isinstance(context.params, DeleteParams)
    gallery = Gallery.open(context.plan.gallery)
    try:
        where = filter_of(context.params.filter)
        where.check(gallery.schema())
        context.steps.set("remove items", 0.1)
        context.steps.commit()
        context.tell(removed=gallery.remove_where(where))
    finally:
        gallery.close()


def swap_gallery(context: Context) -> None:
    """The state of another gallery, or a candidate, becomes the next generation."""
    assert isinstance(context.params, SwapParams)
    other = context.plan.other
    assert other is not None
    if context.params.job is not None:
        swap_candidate(context, other)
        return
    source = Gallery.open(other, verify_hashes=False)
    target = Gallery.open(context.plan.gallery, verify_hashes=False)
    root = context.plan.other_root or source.image_root
    context.tell(
        old={"bundle_id": target.bundle_id, "items": target.size},
        new={"bundle_id": source.bundle_id, "items": source.size},
        swapped=False,
    )
    source.close()
    target.close()
    copy = context.steps.enter("put in place", 0.0, 0.99, copy_bytes(other))
    own, others = PictureFolder(context.plan.gallery), PictureFolder(other)
    calls = 0

    def commit(_: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            own.take_in(others.root)
        else:
            context.steps.commit()

    image_root = "" if root == Path() else root
    with own.receiving(others):
        manifest = adopt(
            context.plan.gallery, other, image_root=image_root, catch_up=commit, on_progress=copy
        )
    own.sweep()
    context.tell(swapped=True, generation=manifest.generation)
