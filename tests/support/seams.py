"""Inner names of the rooms that several test modules use, in one place.

A test that needs a name of this list knows more than a user does; when a room is rebuilt, this is
where its tests are mended.
"""
# ruff: noqa: F401

from collections.abc import Sequence
from pathlib import Path

from embedder.durable import set_fault_hook
from indexer.catalog.read import CatalogView, State
from indexer.checks.compare import compare
from indexer.commands import options
from indexer.exchange.milvus import MilvusStore
from indexer.exchange.objects import ObjectFolder
from indexer.exchange.publish import publish
from indexer.folder.layout import GalleryFolder
from indexer.folder.manifest import GalleryManifest
from indexer.index.faiss import SegmentIndex
from indexer.index.gpu import GpuThread
from indexer.index.kinds import Effort
from indexer.index.plan import plan_index, plans_for
from indexer.index.segment import Rows, Segment, write_segment
from indexer.index.tune import recall_at, tune
from indexer.ingest.build import import_gallery
from indexer.ingest.embed import EmbedSettings
from indexer.ingest.rebuild import adopt
from indexer.live.backup import backup
from indexer.types import Dump, Entry
from service.access.audit import AuditLog, Change
from service.access.keys import FreshKeys, KeyStore, Limits, open_keys
from service.access.rates import (
    FIRST,
    Account,
    Addresses,
    Charge,
    LocalCounts,
    RateLimits,
    SharedCounts,
    parse_rates,
)
from service.encoding import decode_worker, decoders, fork_server, sandbox
from service.encoding import workers as workers_module
from service.encoding.cache import (
    LruCache,
    answer_key,
    decode_vector,
    embedding_key,
    encode_vector,
)
from service.encoding.decoders import InlineDecoder, NoProcessError, ProcessDecoder
from service.encoding.model import Batcher
from service.encoding.workers import Workers
from service.galleries.feedback import FeedbackStore, Question
from service.galleries.locations import GalleryLocation, Locations
from service.galleries.pictures import PictureFolder, SharedPictures
from service.galleries.registry import Failures
from service.galleries.renditions import Renditions
from service.http.forms import Part, parse_form
from service.http.gate import RouteTable
from service.http.server import listen
from service.jobs.manager import JobManager
from service.jobs.params import params_of
from service.jobs.rebuild import store_bundle
from service.jobs.store import Job, JobStore
from service.search.pipeline import recall_of
from service.search.query import (
    HitRenderer,
    encode_results,
)


def publish_generation(path: Path, manifest: GalleryManifest, entries: Sequence[Entry]) -> str:
    """A new generation of these entries in the folder of a gallery; its name."""
    facts = manifest.model_dump(include={"name", "bundle_id", "source", "source_root"})
    dump = Dump(facts, manifest.dim, len(entries), lambda: iter(entries))
    return import_gallery(dump, path).generation
