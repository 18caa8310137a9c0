"""A typed client of the service, thin over its HTTP: `Kinlens`, and `AsyncKinlens` for event loops.

    with Kinlens("http://127.0.0.1:8000", key="kl_...") as client:
        for hit in client.search("shoe.jpg", k=5).hits:
            print(hit.key, hit.score)

Answers are the models of `service.schemas`, failures the tree of `service.client_errors`.
"""

from service.client_call import Call, Image, address, content, model
from service.client_errors import (
    AnswerError,
    ArgumentError,
    ClientError,
    ConnectionFailedError,
    GalleryReplacedError,
    ImageReadError,
    JobFailedError,
    JobTimeoutError,
    ProblemError,
)
from service.client_galleries import AsyncGalleryCalls, GalleryCalls
from service.client_items import AsyncItemCalls, ItemCalls
from service.client_jobs import AsyncJobCalls, JobCalls
from service.client_putting import NewItem
from service.client_searching import AsyncSearching, Crop, Query, Searching
from service.schemas.operations import Live, Ready
from service.schemas.samples import SamplesAnswer

__all__ = [
    "AnswerError",
    "ArgumentError",
    "AsyncKinlens",
    "ClientError",
    "ConnectionFailedError",
    "Crop",
    "GalleryReplacedError",
    "Image",
    "ImageReadError",
    "JobFailedError",
    "JobTimeoutError",
    "Kinlens",
    "NewItem",
    "ProblemError",
    "Query",
]

_LIVE = Call("GET", "/live", model(Live))
_READY = Call("GET", "/ready", model(Ready), accepted=frozenset({503}))
_METRICS = Call("GET", "/metrics", lambda response: response.text)
_SAMPLES = Call("GET", "/samples", model(SamplesAnswer))


class Kinlens(Searching, GalleryCalls, ItemCalls, JobCalls):
    """The service at an address; a context manager, safe for several threads.

    Every method raises a `ClientError`.
    """

    def live(self) -> Live:
        """Whether the process answers.

        Example: `client.live().status`
        """
        return self._send(_LIVE)

    def ready(self) -> Ready:
        """What is served and the verdict of each check, also when it is not ready.

        Example: `client.ready().checks`
        """
        return self._send(_READY)

    def metrics(self) -> str:
        """The metrics in the text format of Prometheus.

        Example: `client.metrics().splitlines()`
        """
        return self._send(_METRICS)

    def samples(self) -> SamplesAnswer:
        """The sample queries.

        Example: `[sample.name for sample in client.samples().samples]`
        """
        return self._send(_SAMPLES)

    def sample(self, number: int) -> bytes:
        """The picture of a sample query.

        Example: `client.search(client.sample(0))`
        """
        return self._send(_sample(number))


class AsyncKinlens(AsyncSearching, AsyncGalleryCalls, AsyncItemCalls, AsyncJobCalls):
    """The same methods in an event loop: `async with AsyncKinlens(url) as client`."""

    async def live(self) -> Live:
        """Whether the process answers.

        Example: `(await client.live()).status`
        """
        return await self._send(_LIVE)

    async def ready(self) -> Ready:
        """What is served and the verdict of each check, also when it is not ready.

        Example: `(await client.ready()).status`
        """
        return await self._send(_READY)

    async def metrics(self) -> str:
        """The metrics in the text format of Prometheus.

        Example: `await client.metrics()`
        """
        return await self._send(_METRICS)

    async def samples(self) -> SamplesAnswer:
        """The sample queries.

        Example: `(await client.samples()).samples`
        """
        return await self._send(_SAMPLES)

    async def sample(self, number: int) -> bytes:
        """The picture of a sample query.

        Example: `await client.search(await client.sample(0))`
        """
        return await self._send(_sample(number))


def _sample(number: int) -> Call[bytes]:
    return Call("GET", address("samples", number), content)
