"""Workers of a model: processes that decode an image and embed it, one for each call at a time.

They are forked from a process that has the model loaded (`service.encoding.fork_server`). Until
that has started, and where it cannot, the service embeds in its own process.
"""

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial

import structlog

from embedder.errors import KinlensError
from embedder.preprocess import Box
from embedder.session import OnnxEmbedder
from service.encoding.decoders import Decoder, DecoderPool, NoProcessError, ProcessDecoder, Vector
from service.encoding.fork_server import ForkServer
from service.encoding.sandbox import Layer

_SAME_COSINE = 0.999
_RETRY_S = 30.0


class Workers:
    """The workers of the model of `embedder`, which runs on the CPU. Thread safe."""

    def __init__(
        self, embedder: OnnxEmbedder, memory_mb: int, timeout_s: float, count: int
    ) -> None:
        """A worker may allocate `memory_mb` and take `timeout_s` for decoding an image; `count` are
        kept for later calls.
        """
        self._embedder = embedder
        server = ForkServer(embedder.bundle.path, embedder.mode, memory_mb, timeout_s)
        make = partial(ProcessDecoder, memory_mb, timeout_s, server.fork)
        self.pool = DecoderPool(make, count)
        self._server = server
        self._ready = threading.Event()
        self._not_before = 0.0
        self._end = weakref.finalize(self, _end, self.pool, server)

    @staticmethod
    def can_run() -> bool:
        """Whether this system has what a fork server needs."""
        return sys.platform == "linux"

    @property
    def is_ready(self) -> bool:
        """Whether `embed` may be called."""
        return self._ready.is_set() and time.monotonic() >= self._not_before

    def fail(self) -> None:
        """Be not ready for half a minute, since no process can be started."""
        self._not_before = time.monotonic() + _RETRY_S

    def start(self, image: bytes, expected: Vector, layers: Sequence[Layer] = ()) -> None:
        """Start in the background. They are ready once one of them gives the vector (D,) of
        `image`, in a sandbox with the layers that hold for other decoders.
        """
        arguments = image, expected, layers
        threading.Thread(target=self._start, args=arguments, daemon=True).start()

    def embed(
        self, data: bytes, box: Box | None = None, decoder: Decoder | None = None
    ) -> tuple[Vector, float]:
        """The vector (D,) of an image, and the milliseconds that decoding it took; by `decoder`, if
        that is a worker of this model.

        Raises: ImageError (ImageCostError if the worker was killed or crashed),
            InvalidParameterError for the box, BundleError, NoProcessError.
        """
        if decoder not in self.pool.decoders:
            with self.pool.one() as worker:
                try:
                    return self.embed(data, box, worker)
                except NoProcessError:
                    self.fail()
                    raise
        assert isinstance(decoder, ProcessDecoder)
        embedder = self._embedder
        return decoder.embed(data, embedder.preprocessing, embedder.limits, box, embedder.dim)

    def close(self) -> None:
        """End all processes, also in the middle of an image."""
        self._ready.clear()
        self._end()

    def _start(self, image: bytes, expected: Vector, layers: Sequence[Layer]) -> None:
        log = structlog.get_logger().bind(bundle_id=self._embedder.bundle_id)
        fault = self._fault(image, expected, layers)
        if not self._end.alive:  # the service stops
            return
        if fault is not None:
            log.warning("workers do not embed", cause=fault)
            self.close()
            return
        self._embedder.drop_single_session()
        self._ready.set()
        log.info("workers embed", fork_server=self._server.pid)

    def _fault(self, image: bytes, expected: Vector, layers: Sequence[Layer]) -> str | None:
        try:
            vector, _ = self.embed(image)
        except KinlensError as error:
            return str(error)
        cosine = float(vector @ expected)
        if cosine < _SAME_COSINE:
            return f"the vector of a known image is off: cosine {cosine:.4f} to that of the service"
        missing = {layer.name for layer in layers if layer.holds}
        missing -= {layer.name for layer in self.pool.decoders[0].layers if layer.holds}
        return f"their sandbox lacks {', '.join(sorted(missing))}" if missing else None


def _end(pool: DecoderPool, server: ForkServer) -> None:
    pool.close()
    server.close()
