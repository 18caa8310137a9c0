"""Inner names of the packages that several test modules use, in one place.

A test that needs a name of this list knows more than a user does; when a package is rebuilt, its
tests are fixed here.
"""
# ruff: noqa: F401

from kinlens.commands import options
from kinlens.embedder.durable import set_fault_hook
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.exchange.objects import ObjectFolder
from kinlens.indexer.exchange.publish import publish
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.index.faiss import SegmentIndex
from kinlens.indexer.index.index_types import Effort
from kinlens.indexer.index.plan import plan_compaction, plan_index
from kinlens.indexer.index.segment import Segment
from kinlens.indexer.index.tune import tune
from kinlens.indexer.ingest.build import import_gallery
from kinlens.indexer.ingest.embed import EmbedSettings
from kinlens.indexer.ingest.rebuild import adopt
from kinlens.indexer.live.backup import write_backup
from kinlens.indexer.types import GalleryExport
from kinlens.indexer.uploads import UploadFolder
from kinlens.models import Change
from kinlens.quality.compare import compare
from kinlens.service.access.audit import AuditLog
from kinlens.service.access.keys import FreshKeys, KeyStore, Limits
from kinlens.service.access.rates import (
    FIRST,
    Account,
    Charge,
    LocalCounts,
    RateLimits,
    parse_rates,
)
from kinlens.service.encoding import sandbox, spawn, worker
from kinlens.service.encoding.cache import LruCache
from kinlens.service.encoding.fork_server import ForkServer
from kinlens.service.encoding.model import Batcher
from kinlens.service.encoding.workers import Workers
from kinlens.service.galleries.bundles import Bundles
from kinlens.service.galleries.feedback import FeedbackStore, Question
from kinlens.service.galleries.locations import known_bundles
from kinlens.service.galleries.uploads import SharedUploads
from kinlens.service.http.bodies import Part, parse_form
from kinlens.service.http.edge import Addresses
from kinlens.service.http.rules import Route
from kinlens.service.jobs.manager import JobManager
from kinlens.service.jobs.params import params_of
from kinlens.service.jobs.rebuild import store_bundle
from kinlens.service.jobs.store import Job, JobStore
from kinlens.service.redis import SharedRedis
