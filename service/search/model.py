"""The models that are served: for each bundle one session, one queue and one encoder."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray

from embedder.calibration import Calibration
from embedder.session import Embedder
from service.search.batching import MicroBatcher
from service.search.encoding import Encoder
from service.search.single_flight import SingleFlight

Connect = Callable[[Embedder], tuple[MicroBatcher, Encoder]]
"""Gives an embedder the queue before it and the encoder before that; neither is started."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A bundle that runs, and the image that it is checked with: its vector at the warm-up (D,)."""

    embedder: Embedder
    batcher: MicroBatcher
    encoder: Encoder
    known_image: bytes = field(repr=False)
    known_vector: NDArray[np.float32] = field(repr=False)

    @property
    def bundle_id(self) -> str:
        """The bundle that it runs."""
        return self.embedder.bundle_id

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.embedder.dim

    @property
    def provider(self) -> str:
        """What runs it."""
        return self.embedder.provider

    @property
    def calibration(self) -> Calibration | None:
        """From a score to a probability, if the bundle has it."""
        return self.embedder.calibration

    @property
    def no_calibration(self) -> str | None:
        """Why the bundle has none."""
        return self.embedder.no_calibration


class Models:
    """Opens a model when a gallery needs it, and stops it when none does any more."""

    def __init__(self, find: Callable[[str], Embedder], connect: Connect) -> None:
        """`find` opens the embedder of a bundle; it may block. Raises: BundleError."""
        self._find = find
        self._connect = connect
        self._opened: dict[str, Embedder] = {}
        self._models: dict[str, Model] = {}
        self._flights: SingleFlight[Model] = SingleFlight()

    def running(self) -> list[Model]:
        """Every model that has been started."""
        return list(self._models.values())

    @property
    def depth(self) -> int:
        """Images that wait for any model."""
        return sum(model.batcher.depth for model in self._models.values())

    @property
    def alive(self) -> bool:
        """Whether every model accepts images."""
        return bool(self._models) and all(m.batcher.alive for m in self._models.values())

    @property
    def restarts(self) -> int:
        """How many workers were started again, of the models that run."""
        return sum(model.batcher.restarts for model in self._models.values())

    def open(self, bundle_id: str) -> Embedder:
        """Open the embedder of a bundle before the event loop runs; `get` starts it.

        Raises: BundleNotFoundError, BundleError.
        """
        if bundle_id not in self._opened:
            self._opened[bundle_id] = self._find(bundle_id)
        return self._opened[bundle_id]

    async def get(self, bundle_id: str) -> Model:
        """The model of a bundle, started and warm; it stays as long as a gallery uses it.

        Raises: BundleNotFoundError, BundleError.
        """
        model = self._models.get(bundle_id)
        return model or await self._flights.run(bundle_id, lambda: self._start(bundle_id))

    async def keep(self, bundle_ids: Collection[str]) -> None:
        """Stop every other model and let go of its memory."""
        dropped = [model for name, model in self._models.items() if name not in bundle_ids]
        self._models = {n: model for n, model in self._models.items() if n in bundle_ids}
        for model in dropped:
            await model.batcher.stop()
            structlog.get_logger().info("model stopped", bundle_id=model.bundle_id)

    async def _start(self, bundle_id: str) -> Model:
        embedder = self._opened.pop(bundle_id, None)
        if embedder is None:
            embedder = await asyncio.to_thread(self._find, bundle_id)
        batcher, encoder = self._connect(embedder)
        batcher.start()
        try:
            image = embedder.known_images()[0]
            known = await encoder.infer(image, urgent=True)
        except BaseException:
            await batcher.stop()
            raise
        model = Model(embedder, batcher, encoder, image, known.vector)
        self._models[bundle_id] = model
        structlog.get_logger().info(
            "model started",
            bundle_id=bundle_id,
            provider=embedder.provider,
            precision=embedder.precision,
            precision_reason=embedder.precision_reason,
        )
        return model
