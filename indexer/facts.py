"""What a gallery knows about itself."""

from pydantic import BaseModel, ConfigDict

from indexer.index.segment_manifest import SegmentManifest


class GalleryFacts(BaseModel):
    """One state of a gallery: `size` items alive, of which `delta` came after the segment.

    `tombstones` items of the segment have been removed and wait for the next compaction.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    generation: str
    bundle_id: str
    dim: int
    size: int
    delta: int
    tombstones: int
    created_at: str
    source: str
    source_root: str
    compaction_due: str | None
    segment: SegmentManifest | None
