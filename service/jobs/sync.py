"""The job that makes a gallery equal to a folder or list."""

import contextlib

from kinlens.embedder.errors import SourceError
from kinlens.indexer.galleries import KEEP_REMOVED_S
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.sync import MaxRemoved, SyncSettings, source_of, sync_source
from kinlens.service.jobs.params import SyncParams
from kinlens.service.jobs.rebuild import Context, opened

_SHOWN = 100  # failures in the report


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
