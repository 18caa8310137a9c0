"""Inner names of the rooms that several test modules use, in one place.

A test that needs a name of this list knows more than a user does; when a room is rebuilt, this is
where its tests are mended.
"""

from collections.abc import Sequence
from pathlib import Path

from embedder.durable import set_fault_hook
from indexer.catalog.database import Catalog
from indexer.catalog.read import CatalogView, State
from indexer.checks.compare import compare
from indexer.commands import options
from indexer.exchange.milvus import MilvusStore
from indexer.folder.backup import backup
from indexer.folder.layout import GalleryFolder
from indexer.folder.manifest import GalleryManifest
from indexer.index.faiss import SegmentIndex
from indexer.index.gpu import GpuThread
from indexer.index.kinds import Effort
from indexer.index.plan import plan_index
from indexer.index.segment import Segment, write_segment, write_vectors
from indexer.index.tune import recall_at, tune
from indexer.ingest.build import import_gallery
from indexer.ingest.embed import EmbedSettings
from indexer.ingest.rebuild import adopt
from indexer.types import Dump, Entry
from service.access.address import Addresses
from service.access.keys import KeyStore
from service.access.rates import LocalCounts, RateLimits, SharedCounts
from service.galleries.locations import GalleryLocation, Locations
from service.galleries.migration import bring_over
from service.galleries.pictures import PictureFolder, SharedPictures
from service.galleries.registry import Failures
from service.galleries.renditions import Renditions
from service.http.routes import RouteTable
from service.http.server import listen
from service.jobs.manager import JobManager
from service.jobs.store import Job, JobStore
from service.search.cache import Cache, Lookup, LruCache, embedding_key
from service.search.decoder import InlineDecoder, ProcessDecoder
from service.search.lanes import Lanes
from service.search.model import Batcher
from service.search.redis_cache import RedisStore

__all__ = [
    "Addresses",
    "Batcher",
    "Cache",
    "Catalog",
    "CatalogView",
    "Effort",
    "EmbedSettings",
    "Failures",
    "GalleryFolder",
    "GalleryLocation",
    "GalleryManifest",
    "GpuThread",
    "InlineDecoder",
    "Job",
    "JobManager",
    "JobStore",
    "KeyStore",
    "Lanes",
    "LocalCounts",
    "Locations",
    "Lookup",
    "LruCache",
    "MilvusStore",
    "PictureFolder",
    "ProcessDecoder",
    "RateLimits",
    "RedisStore",
    "Renditions",
    "RouteTable",
    "Segment",
    "SegmentIndex",
    "SharedCounts",
    "SharedPictures",
    "State",
    "adopt",
    "backup",
    "bring_over",
    "compare",
    "embedding_key",
    "import_gallery",
    "listen",
    "options",
    "plan_index",
    "publish_generation",
    "recall_at",
    "set_fault_hook",
    "tune",
    "write_segment",
    "write_vectors",
]


def publish_generation(path: Path, manifest: GalleryManifest, entries: Sequence[Entry]) -> str:
    """A new generation of these entries in the folder of a gallery; its name."""
    facts = manifest.model_dump(include={"name", "bundle_id", "source", "source_root"})
    dump = Dump(facts, manifest.dim, len(entries), lambda: iter(entries))
    return import_gallery(dump, path).generation
