"""Opens model bundles by their ids: starts the workers that embed, or a session on the GPU."""

import contextlib
from concurrent.futures import Future
from dataclasses import replace

import structlog

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import (
    BundleNotFoundError,
    GalleryError,
    ProviderError,
)
from kinlens.embedder.session import BundleFacts, Embedder, OnnxEmbedder
from kinlens.embedder.types import SHORT
from kinlens.embedder.views.text import can_read_words
from kinlens.indexer.galleries import current_manifest
from kinlens.indexer.types import mismatch
from kinlens.service.concurrency import begin_in_thread
from kinlens.service.encoding.fork_server import ForkServer
from kinlens.service.encoding.model import Backend
from kinlens.service.encoding.workers import Workers
from kinlens.service.galleries.locations import (
    Locations,
    find_bundle,
    known_bundles,
    manifest_of,
    session_of,
    vectors_id,
)
from kinlens.service.settings import Settings


class Bundles:
    """Finds a bundle by its id and opens it; the hashes of its files are checked each time."""

    def __init__(
        self,
        settings: Settings,
        embedder: Embedder | None = None,
        workers: Workers | None = None,
    ) -> None:
        """A given `embedder` replaces the bundle of the settings, and runs in this process; given
        `workers` decode for it.
        """
        self._settings = settings
        self._embedder = embedder
        self._workers = workers
        self._primary = settings.bundle if embedder is None else None
        self._state = settings.state
        self._limits = settings.image_limits()
        self._begun: dict[str, Future[Backend]] = {}
        self._session = session_of(settings)

    def primary(self) -> str:
        """The id of the bundle that the settings name. Raises: BundleNotFoundError, BundleError."""
        if self._embedder is not None:
            return self._embedder.bundle_id
        if self._primary is None:
            raise BundleNotFoundError(
                "No model bundle was given. Set its folder with --bundle or KINLENS_BUNDLE."
            )
        known = vectors_id(manifest_of(self._primary))
        return known or Bundle.open(self._primary).bundle_id

    def begin(self) -> None:
        """Start the primary bundle while the galleries are opened, unless these decide its mode."""
        if self._embedder is None and self._session.precision != "auto":
            primary = self.primary()
            self._begun[primary] = begin_in_thread(lambda: self._start(primary, ""))

    def end_unused(self) -> None:
        """End the primary bundle if no gallery uses it."""

        def end(started: Future[Backend]) -> None:
            if started.exception() is None:
                started.result().workers.close()

        for started in self._begun.values():
            started.add_done_callback(end)
        self._begun = {}

    def open(self, bundle_id: str, precision: str = "fp32") -> Backend:
        """Start a bundle that can search vectors of `precision`, and of the precisions of all its
        galleries. Raises: BundleNotFoundError, BundleError, SearchError.
        """
        begun = self._begun.pop(bundle_id, None)
        return self._start(bundle_id, precision) if begun is None else begun.result()

    def _start(self, bundle_id: str, precision: str) -> Backend:
        if self._embedder is not None and bundle_id == self._embedder.bundle_id:
            workers = self._workers or self._started(_detecting(self._embedder), None)
            return Backend(self._embedder, workers, self._embedder.embed)
        session = self._session
        if session.precision == "auto":
            precisions = {precision, *self._precisions_of(bundle_id)}
            session = replace(session, galleries=frozenset(precisions))
        bundle = self.bundle(bundle_id)
        if bundle.manifest.text is not None and not can_read_words():
            structlog.get_logger().warning(
                "words are not searched: the package tokenizers is missing",
                cure="pip install 'kinlens[text]'",
                bundle_id=bundle_id,
            )
        if session.device == "cuda":
            embedder = OnnxEmbedder.open(bundle, session, self._limits)
            workers = self._started(_detecting(embedder), None)
            return Backend(embedder, workers, embedder.embed)
        if session.threads != 1:  # threads of OpenVINO do not survive a fork
            if session.engine == "openvino":
                raise ProviderError(
                    f"OpenVINO runs with one thread in each worker (got threads = "
                    f"{session.threads}). Set KINLENS_THREADS to 1, or use --engine onnxruntime."
                )
            session = replace(session, engine="onnxruntime")
        workers = self._started(bundle, session)
        choice = workers.choice
        facts = BundleFacts(bundle, choice.provider, self._limits, choice.mode, choice.reason)
        return Backend(facts, workers)

    def _started(self, bundle: Bundle | None, session: SessionSettings | None) -> Workers:
        settings = self._settings
        timeout_s = settings.decode_timeout_ms / 1e3
        server = ForkServer(settings.decode_memory_mb, timeout_s, bundle, session)
        workers = Workers(server, timeout_s, settings.search_threads)
        workers.start()
        return workers

    def _precisions_of(self, bundle_id: str) -> set[str]:
        """The precisions of the galleries of a bundle; unreadable galleries are skipped."""
        found = set()
        with contextlib.suppress(GalleryError, OSError):
            for location in Locations(self._settings).list_galleries():
                if location.path is not None and location.exists:
                    manifest = current_manifest(location.path)
                    found |= {manifest.precision} if manifest.bundle_id == bundle_id else set()
        return found

    def bundle(self, bundle_id: str) -> Bundle:
        """The bundle to serve for an id. Of several in the state folder a damaged one is passed
        over. Raises: BundleNotFoundError naming the known bundles; BundleError.
        """
        folder = find_bundle(self._state, self._primary, bundle_id)
        if folder is not None:
            return Bundle.open(folder)
        ids = [name[:SHORT] for name in known_bundles(self._state, self._primary)]
        if self._embedder is not None:
            ids.append(self._embedder.bundle_id[:SHORT])
        raise BundleNotFoundError(
            mismatch(
                bundle_id,
                f"The bundle {bundle_id[:SHORT]} is unknown to this service. Known are: "
                f"{', '.join(ids) or 'none'}. Set its folder with --bundle, or put it into "
                "the folder bundles of --state.",
            )
        )


def _detecting(embedder: Embedder) -> Bundle | None:
    """The bundle whose detector the workers open for a model in this process; None without one."""
    if isinstance(embedder, BundleFacts) and embedder.boxes is not None:
        return embedder.bundle
    return None
