"""Inner names of the rooms that several test modules use, in one place.

A test that needs a name of this list knows more than a user does; when a room is rebuilt, this is
where its tests are mended.
"""

from indexer.catalog.database import Catalog
from indexer.catalog.read import CatalogView, State
from indexer.catalog.write import bulk_load
from indexer.checks.compare import compare
from indexer.commands import options
from indexer.exchange.milvus import MilvusStore
from indexer.folder.backup import backup, read_backup
from indexer.folder.durable import set_fault_hook
from indexer.folder.layout import GalleryFolder
from indexer.folder.manifest import GalleryManifest
from indexer.index.faiss import SegmentIndex
from indexer.index.gpu import GpuThread
from indexer.index.kinds import Effort
from indexer.index.plan import plan_index
from indexer.index.segment import Segment, write_segment, write_vectors
from indexer.index.tune import recall_at, tune
from indexer.ingest.embed import EmbedSettings, WorkFile
from indexer.ingest.generation import publish_generation
from indexer.ingest.importing import import_gallery
from indexer.ingest.rebuild import adopt
from indexer.live.ranking import Members, contents_of
from service.batching import MicroBatcher
from service.cache import Cache, Lookup, LruCache, embedding_key
from service.decoding.inline import InlineDecoder
from service.decoding.pool import DecodePool
from service.failures import Failures
from service.jobs.manager import JobManager
from service.jobs.record import Job
from service.jobs.store import JobStore
from service.jobs.work import run_worker
from service.remote import RedisStore
from service.security.access import addresses, required_scope
from service.security.address import Addresses
from service.security.keys import KeyStore
from service.security.rates import RateLimits, SharedCounts
from service.server import listen
from service.sources import Place, Sources

__all__ = [
    "Addresses",
    "Cache",
    "Catalog",
    "CatalogView",
    "DecodePool",
    "Effort",
    "EmbedSettings",
    "Failures",
    "GalleryFolder",
    "GalleryManifest",
    "GpuThread",
    "InlineDecoder",
    "Job",
    "JobManager",
    "JobStore",
    "KeyStore",
    "Lookup",
    "LruCache",
    "Members",
    "MicroBatcher",
    "MilvusStore",
    "Place",
    "RateLimits",
    "RedisStore",
    "Segment",
    "SegmentIndex",
    "SharedCounts",
    "Sources",
    "State",
    "WorkFile",
    "addresses",
    "adopt",
    "backup",
    "bulk_load",
    "compare",
    "contents_of",
    "embedding_key",
    "import_gallery",
    "listen",
    "options",
    "plan_index",
    "publish_generation",
    "read_backup",
    "recall_at",
    "required_scope",
    "run_worker",
    "set_fault_hook",
    "tune",
    "write_segment",
    "write_vectors",
]
