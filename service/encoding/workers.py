"""Model workers: processes that decode and embed images, each for one call at a time.

They are forked from a process that has loaded the model (`kinlens.service.encoding.fork_server`).
While that process does not run, the service decodes and embeds without workers.
"""

import sys
import threading
import weakref
from collections.abc import Sequence
from functools import partial

import structlog

from kinlens.embedder.errors import KinlensError
from kinlens.embedder.preprocess import Box
from kinlens.embedder.session import OnnxEmbedder
from kinlens.service.encoding.decoders import (
    Decoder,
    DecoderPool,
    NoProcessError,
    ProcessDecoder,
    Vector,
)
from kinlens.service.encoding.fork_server import ForkServer
from kinlens.service.encoding.sandbox import Layer, active_names

_SAME_COSINE = 0.999
_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 600.0


class Workers:
    """The workers of one CPU model. Thread safe.

    `gains_from_single`: on an idle service, embedding one image in the service is faster.
    """

    def __init__(
        self, embedder: OnnxEmbedder, memory_mb: int, timeout_s: float, count: int
    ) -> None:
        """A worker may allocate `memory_mb`, and decode an image for `timeout_s`. Up to `count`
        idle workers are kept.
        """
        self.gains_from_single = embedder.gains_from_single
        self._embedder = embedder
        self._server = ForkServer(embedder.bundle, embedder.mode, memory_mb, timeout_s)
        self._make = partial(ProcessDecoder, memory_mb, timeout_s, self._server.fork)
        self.pool = DecoderPool(self._make, count)
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._pause_s = _FIRST_PAUSE_S
        self._end = weakref.finalize(self, _end, self.pool, self._server)
        self._reference: tuple[bytes, Vector, frozenset[str]]

    @staticmethod
    def can_run() -> bool:
        """Whether a fork server can run on this system."""
        return sys.platform == "linux"

    @property
    def is_ready(self) -> bool:
        """Whether `embed` may be called."""
        return self._ready.is_set()

    def start(self, image: bytes, expected: Vector, layers: Sequence[Layer] = ()) -> None:
        """Start in the background, and again whenever the fork server has ended.

        Workers are ready once one of them returns the `expected` vector (D,) of `image`, in a
        sandbox with all the active `layers` of other decoders.
        """
        self._reference = image, expected, frozenset(active_names(layers))
        self._embedder.share_single_session()  # otherwise the model is in memory three times
        self._start()

    def fail(self) -> None:
        """Handle a failed fork: if the fork server has ended, start another one."""
        if self._server.is_running:
            return
        with self._lock:
            was_ready = self._ready.is_set()
            self._ready.clear()
        if was_ready:
            self._start()

    def owns(self, decoder: Decoder) -> bool:
        """Whether `decoder` is a worker of this model."""
        return decoder in self.pool.decoders

    def embed(
        self, data: bytes, box: Box | None = None, decoder: Decoder | None = None
    ) -> tuple[Vector, float]:
        """The vector (D,) of an image, and the milliseconds for decoding it. Uses `decoder` if it
        is a worker of this model, otherwise a worker of the pool.

        Raises: ImageError (ImageCostError if the worker was killed or crashed),
            InvalidParameterError for the box, NoProcessError.
        """
        if decoder is not None and self.owns(decoder):
            return self._embedded_by(decoder, data, box)
        try:
            with self.pool.one() as worker:
                return self._embedded_by(worker, data, box)
        except NoProcessError:
            self.fail()
            raise

    def close(self) -> None:
        """End all processes, also in the middle of an image."""
        self._ready.clear()
        self._end()

    def _embedded_by(self, worker: Decoder, data: bytes, box: Box | None) -> tuple[Vector, float]:
        assert isinstance(worker, ProcessDecoder)
        embedder = self._embedder
        return worker.embed(data, embedder.preprocessing, embedder.limits, box, embedder.dim)

    def _start(self) -> None:
        if self._end.alive:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        fault = self._try_to_start()
        if not self._end.alive:
            return  # the service is shutting down
        log = structlog.get_logger().bind(bundle_id=self._embedder.bundle_id)
        if fault is None:
            self._pause_s = _FIRST_PAUSE_S
            self._ready.set()
            log.info("workers embed")
            return
        log.warning("workers do not embed", cause=fault, retry_in_s=self._pause_s)
        again = threading.Timer(self._pause_s, _start_again, [weakref.ref(self)])
        again.daemon = True
        again.start()
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _try_to_start(self) -> str | None:
        """Start the server and its first worker; the reason if they are unusable, or None."""
        image, expected, layers = self._reference
        try:
            self._server.start()
        except OSError as error:
            return f"the fork server did not start: {error}"
        worker = self._make()
        fault = None
        try:
            vector, _ = self._embedded_by(worker, image, None)
        except KinlensError as error:
            fault = str(error)
        else:
            cosine = float(vector @ expected)
            if cosine < _SAME_COSINE:
                fault = f"wrong vector for the reference image: cosine {cosine:.4f}"
            elif missing := layers.difference(active_names(worker.layers)):
                fault = f"their sandbox lacks {', '.join(sorted(missing))}"
        if fault is None:
            self.pool.add(worker)
        else:
            worker.close()
            self._server.stop()
        return fault


def _start_again(workers: "weakref.ref[Workers]") -> None:
    if (found := workers()) is not None:
        found._start()


def _end(pool: DecoderPool, server: ForkServer) -> None:
    server.close()
    pool.close()
