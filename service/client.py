"""A typed client of the service, thin over its HTTP: `Kinlens`, and `AsyncKinlens` for event loops.

    with Kinlens("http://127.0.0.1:8000", key="kl_...") as client:
        for hit in client.search("shoe.jpg", k=5).hits:
            print(hit.key, hit.score)

Answers are the models of `service.api.models`, failures the tree of `service.client_errors`. Each
call is written once, as a coroutine. `AsyncKinlens` has it as it is. `Kinlens` runs it to its end:
there it never stops half-way, since what it awaits (an answer, a pause) is waited for in the
thread.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from asyncio import sleep as async_sleep
from asyncio import to_thread
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from time import monotonic, sleep
from types import NoneType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)
from urllib.parse import urlencode

import httpx

from embedder.types import AttributeValue
from service.api.models import (
    BatchAnswer,
    Galleries,
    GalleryDetail,
    GalleryModel,
    ItemModel,
    ItemPage,
    JobLog,
    JobModel,
    Jobs,
    Live,
    PatchAnswer,
    PutAnswer,
    Ready,
    RemoveAnswer,
    SamplesAnswer,
    SearchAnswer,
)
from service.client_calls import (
    MAX_ITEMS,
    Attributes,
    Call,
    Crop,
    Filter,
    Image,
    Images,
    ImageSearchOptions,
    Listing,
    NewItem,
    Query,
    RebuildOptions,
    SearchOptions,
    TrainOptions,
    address,
    batch_json,
    put_requests,
    put_sum,
    retry_after_s,
    search_form,
)
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

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
C = TypeVar("C", bound=type)

_AGAIN = frozenset({429, 503})
_MAX_WAIT_S = 30.0
_FIRST_WAIT_S = 0.25
_ADDRESS_CHARACTERS = 4000  # longer ones may be cut off on the way


class _Operation(Protocol[P, R_co]):
    """What a type checker sees of a call: a function of `Kinlens`, a coroutine of the other."""

    @overload
    def __get__(self, client: "Kinlens", owner: Any) -> Callable[P, R_co]: ...
    @overload
    def __get__(
        self, client: "AsyncKinlens", owner: Any
    ) -> Callable[P, Coroutine[Any, Any, R_co]]: ...
    @overload
    def __get__(
        self, client: None, owner: type["Kinlens"]
    ) -> Callable[Concatenate["Kinlens", P], R_co]: ...
    @overload
    def __get__(
        self, client: None, owner: type["AsyncKinlens"]
    ) -> Callable[Concatenate["AsyncKinlens", P], Coroutine[Any, Any, R_co]]: ...


def _operation(
    coroutine: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> _Operation[P, R]:
    operation: Any = coroutine
    return operation  # type: ignore[no-any-return]


def _ended(coroutine: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine that never stops half-way."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    raise AssertionError("the coroutine waits for an event loop")


def _blocking(cls: C) -> C:
    """Give a class plain functions in place of its public coroutines."""

    def function_of(coroutine: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
        @functools.wraps(coroutine)
        def function(*args: P.args, **options: P.kwargs) -> R:
            return _ended(coroutine(*args, **options))

        return function

    for name, method in inspect.getmembers(cls, inspect.iscoroutinefunction):
        if not name.startswith("_"):
            setattr(cls, name, function_of(method))
    return cls


class _Client(ABC):
    """Every call of the service, and how calls are sent, again where that is safe."""

    _http_client: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 2,
        transport: Any = None,
    ) -> None:
        """`key` is sent with every request. A call that takes longer than `timeout_s` at any step
        fails. An idempotent call that meets a busy service (429, 503), or no service, is sent again
        `retries` times, after the time that the service asks for. `transport` is one of httpx.
        """
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._retries = max(retries, 0)
        try:
            self._http = self._http_client(
                base_url=url, headers=headers, timeout=timeout_s, transport=transport
            )
        except httpx.InvalidURL as error:
            raise ArgumentError(f"url = {url!r} is no address: {error}.") from error
        except UnicodeError:  # not told as the cause, which shows a part of the key
            raise ArgumentError("The key has characters that no key has; copy it again.") from None

    @abstractmethod
    async def _exchange(self, request: httpx.Request) -> httpx.Response: ...

    @abstractmethod
    async def _pause(self, seconds: float) -> None: ...

    @abstractmethod
    async def _aside(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """What a function returns that reads files, which would hold up an event loop."""

    async def _send(self, call: Call[R]) -> R:
        try:
            request = self._http.build_request(call.method, call.path, **call.options())
        except (httpx.InvalidURL, UnicodeError, TypeError) as error:
            raise ArgumentError(f"{call.method} {call.path} cannot be sent: {error}.") from error
        attempt = 0
        while True:
            is_last = not call.idempotent or attempt == self._retries
            wait_s = _FIRST_WAIT_S * 2**attempt
            try:
                response = await self._exchange(request)
            except httpx.RequestError as error:
                if is_last:
                    reason = str(error) or type(error).__name__
                    raise ConnectionFailedError(
                        f"{call.method} {call.path} got no answer: {reason}."
                        " Is the service running at this address, and is the timeout long enough?"
                    ) from error
            else:
                status = response.status_code
                if is_last or status not in _AGAIN or status in call.accepted:
                    return call.answer(response)
                asked_s = retry_after_s(response)
                wait_s = wait_s if asked_s is None else asked_s
            await self._pause(min(wait_s, _MAX_WAIT_S))
            attempt += 1

    async def _get(self, result: type[R], *path: str | int, **query: Any) -> R:
        return await self._send(Call("GET", address(*path), result, query=query))

    async def _start(self, *path: str, body: Any = None) -> JobModel:
        return await self._send(Call("POST", address(*path), JobModel, json=body, idempotent=False))

    @_operation
    async def live(self) -> Live:
        """Whether the process answers. Example: `client.live().status`"""
        return await self._get(Live, "live")

    @_operation
    async def ready(self) -> Ready:
        """What is served and the verdict of each check, also when it is not ready.

        Example: `client.ready().checks`
        """
        return await self._send(Call("GET", "/ready", Ready, accepted=[503]))

    @_operation
    async def metrics(self) -> str:
        """The metrics in the text format of Prometheus. Example: `client.metrics().splitlines()`"""
        return await self._get(str, "metrics")

    @_operation
    async def samples(self) -> SamplesAnswer:
        """The sample queries. Example: `[sample.name for sample in client.samples().samples]`"""
        return await self._get(SamplesAnswer, "samples")

    @_operation
    async def sample(self, number: int) -> bytes:
        """The picture of a sample query. Example: `client.search(client.sample(0))`"""
        return await self._get(bytes, "samples", number)

    @_operation
    async def search(
        self, images: Images = (), **options: Unpack[ImageSearchOptions]
    ) -> SearchAnswer:
        """The items most like the mean of the images, crops and positives.

        Example: `client.search("shoe.jpg", k=5, filter='colour = "red"').hits[0].key`
        """
        parts = await self._aside(search_form, images, options)
        return await self._send(Call("POST", "/search", SearchAnswer, parts=parts))

    @_operation
    async def search_each(
        self, images: Images = (), **options: Unpack[ImageSearchOptions]
    ) -> BatchAnswer:
        """As `search`, with an answer for each image and crop.

        Example: `client.search_each("street.jpg", crops=[(0, 0, 0.5, 1), (0.5, 0, 0.5, 1)])`
        """
        parts = await self._aside(search_form, images, options)
        parts.append(("combine", (None, "separate")))
        return await self._send(Call("POST", "/search", BatchAnswer, parts=parts))

    @_operation
    async def search_batch(self, queries: Sequence[Query]) -> BatchAnswer:
        """Several searches at once; each fails alone.

        Example: `client.search_batch([Query("a.jpg"), Query("b.jpg", {"k": 3})]).answers`
        """
        body = await self._aside(batch_json, queries)
        return await self._send(Call("POST", "/search/batch", BatchAnswer, json=body))

    @_operation
    async def similar(
        self, gallery: str, item_id: int, **options: Unpack[SearchOptions]
    ) -> SearchAnswer:
        """The items most like one of the gallery, without it.

        Example: `client.similar("shop", 17, k=10)`
        """
        path = ("galleries", gallery, "items", item_id, "similar")
        return await self._get(SearchAnswer, *path, **options)

    @_operation
    async def galleries(self) -> Galleries:
        """Every gallery; the first is the default of a search.

        Example: `[gallery.name for gallery in client.galleries().galleries]`
        """
        return await self._get(Galleries, "galleries")

    @_operation
    async def gallery(self, name: str) -> GalleryDetail:
        """A gallery with its attributes, its index and its calibration.

        Example: `client.gallery("shop").attributes`
        """
        return await self._get(GalleryDetail, "galleries", name)

    @_operation
    async def create_gallery(self, name: str, bundle_id: str | None = None) -> GalleryModel:
        """An empty gallery that can be written at once.

        Example: `client.create_gallery("summer").version`
        """
        body = {"name": name, "bundle_id": bundle_id}
        return await self._send(
            Call("POST", "/galleries", GalleryModel, json=body, idempotent=False)
        )

    @_operation
    async def delete_gallery(self, name: str) -> None:
        """Delete a gallery that was created here, with its items and uploads.

        Example: `client.delete_gallery("summer")`
        """
        path = address("galleries", name)
        await self._send(Call("DELETE", path, NoneType, idempotent=False))

    @_operation
    async def put(
        self, gallery: str, key: str, image: Image, attributes: Attributes | None = None
    ) -> PutAnswer:
        """Add an item, or replace the one with this key.

        Example: `client.put("shop", "hats/1", "hat.jpg", {"price": 9.5}).items[0].id`
        """
        item = NewItem(key, image, attributes or {})
        request = await self._aside(next, put_requests(gallery, [item]))
        return await self._send(request.call)

    @_operation
    async def put_many(
        self,
        gallery: str,
        items: Iterable[NewItem],
        on_progress: Callable[[int, PutAnswer], None] | None = None,
        *,
        per_request: int = MAX_ITEMS,
    ) -> PutAnswer:
        """Put any number of items, in several requests; a bad image fails alone. `on_progress` is
        told after each request how many items are done, and its answer.

        Example: `client.put_many("shop", [NewItem("a", "a.jpg"), NewItem("b", "b.jpg")]).failed`
        """
        answers: list[PutAnswer] = []
        done, version = 0, ""
        requests = put_requests(gallery, items, per_request)
        while request := await self._aside(next, requests, None):
            try:
                answer = await self._send(request.call)
            except ProblemError as error:
                answer = request.refused(error)
            answers.append(answer)
            done, version = done + len(answer.items), answer.version or version
            if on_progress is not None:
                on_progress(done, answer)
        if not version:
            version = (await self._get(GalleryDetail, "galleries", gallery)).version
        return put_sum(answers, version)

    @_operation
    async def items(
        self,
        gallery: str,
        *,
        offset: int = 0,
        limit: int = 50,
        after: int | None = None,
        filter: Filter | None = None,  # noqa: A002 (the name that the service has)
        key_prefix: str = "",
    ) -> ItemPage:
        """A page of items, of those with numbers above `after`, in the order of their numbers.

        Example: `client.items("shop", filter="price < 20", limit=10).total`
        """
        page = {"offset": offset, "limit": limit, "after": after}
        query = {**page, "filter": filter, "key_prefix": key_prefix}
        return await self._get(ItemPage, "galleries", gallery, "items", **query)

    @_operation
    async def item(self, gallery: str, item_id: int) -> ItemModel:
        """What is known of an item. Example: `client.item("shop", 17).attributes`"""
        return await self._get(ItemModel, "galleries", gallery, "items", item_id)

    @_operation
    async def image(self, gallery: str, item_id: int) -> bytes:
        """The picture of an item, as a browser can show it.

        Example: `Path("17.png").write_bytes(client.image("shop", 17))`
        """
        return await self._get(bytes, "galleries", gallery, "items", item_id, "image")

    @_operation
    async def patch(
        self, gallery: str, changes: Mapping[str, Mapping[str, AttributeValue | None]]
    ) -> PatchAnswer:
        """Change attributes by key, all or none; None takes one away.

        Example: `client.patch("shop", {"hats/1": {"price": 8, "sale": None}}).changed`
        """
        path = address("galleries", gallery, "items")
        return await self._send(Call("PATCH", path, PatchAnswer, json={"changes": changes}))

    @_operation
    async def remove(self, gallery: str, keys: Sequence[str]) -> RemoveAnswer:
        """Remove items by key; unknown keys are not counted.

        Example: `client.remove("shop", ["hats/1"]).removed`
        """
        path = address("galleries", gallery, "items")
        query = {"key": list(keys)}
        if len(urlencode(query, doseq=True)) <= _ADDRESS_CHARACTERS:
            return await self._send(Call("DELETE", path, RemoveAnswer, query=query))
        body = {"keys": list(keys)}
        return await self._send(Call("POST", f"{path}/delete", RemoveAnswer, json=body))

    @_operation
    async def remove_where(self, gallery: str, filter: Filter) -> RemoveAnswer:  # noqa: A002
        """Remove all items that fit a filter.

        Example: `client.remove_where("shop", "stock = 0").removed`
        """
        path = address("galleries", gallery, "items", "delete")
        return await self._send(Call("POST", path, RemoveAnswer, json={"filter": filter}))

    @_operation
    async def remove_item(
        self, gallery: str, item_id: int, version: str | None = None
    ) -> RemoveAnswer:
        """Remove an item by its number, one of the generation `version` of the gallery.

        Example: `client.remove_item("shop", 17)`
        """
        path = address("galleries", gallery, "items", item_id)
        query = {"version": version}
        return await self._send(Call("DELETE", path, RemoveAnswer, query=query, idempotent=False))

    @_operation
    async def compact(self, gallery: str) -> JobModel:
        """Start to make the index of a gallery again, without what was removed.

        Example: `client.wait(client.compact("shop"))`
        """
        return await self._start("galleries", gallery, "compact")

    @_operation
    async def swap(self, gallery: str, other: str) -> JobModel:
        """Start to put the state of another gallery in the place of this one.

        Example: `client.wait(client.swap("shop", "summer"))`
        """
        return await self._start("galleries", gallery, "swap", body={"with": other})

    @_operation
    async def rebuild(
        self, gallery: str, bundle_id: str, **options: Unpack[RebuildOptions]
    ) -> JobModel:
        """Start to make a gallery again with another bundle, beside the old one.

        Example: `client.wait(client.rebuild("shop", bundle_id, swap="never")).report`
        """
        body = {"bundle_id": bundle_id, **options}
        return await self._start("galleries", gallery, "rebuild", body=body)

    @_operation
    async def train(self, job: str, gallery: str, **options: Unpack[TrainOptions]) -> JobModel:
        """Start to train a model, and to give it to a gallery if it passes its gate.

        Example: `client.train("shop", "shop", overrides={"optimizer.epochs": 2}).id`
        """
        return await self._start("jobs", "train", body={"job": job, "gallery": gallery, **options})

    @_operation
    async def jobs(
        self,
        *,
        state: Literal["queued", "running", "succeeded", "failed", "cancelled"] | None = None,
        limit: int | None = None,
    ) -> Jobs:
        """Jobs, newest first. Example: `[job.id for job in client.jobs(state="running").jobs]`"""
        return await self._get(Jobs, "jobs", state=state, limit=limit)

    @_operation
    async def job(self, job_id: str) -> JobModel:
        """A job as it is now. Example: `client.job("4f2a90c1be77").step`"""
        return await self._get(JobModel, "jobs", job_id)

    @_operation
    async def job_log(self, job_id: str, offset: int = 0) -> JobLog:
        """What a job has written from byte `offset` on.

        Example: `client.job_log("4f2a90c1be77").text`
        """
        return await self._get(JobLog, "jobs", job_id, "log", offset=offset)

    @_operation
    async def cancel_job(self, job_id: str) -> JobModel:
        """Ask a job to end. Example: `client.cancel_job("4f2a90c1be77").state`"""
        return await self._start("jobs", job_id, "cancel")

    @_operation
    async def swap_job(self, job_id: str) -> JobModel:
        """Start to put the gallery that a job has made in place.

        Example: `client.wait(client.swap_job("4f2a90c1be77"))`
        """
        return await self._start("jobs", job_id, "swap")

    @_operation
    async def resume_job(self, job_id: str) -> JobModel:
        """Start a job that failed or was cancelled anew, from where it stopped.

        Example: `client.resume_job("4f2a90c1be77").id`
        """
        return await self._start("jobs", job_id, "resume")

    @_operation
    async def wait(
        self,
        job: JobModel | str,
        on_progress: Callable[[JobModel], None] | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = 0.5,
    ) -> JobModel:
        """The job when it has succeeded; `on_progress` is told each state that differs from the one
        before. Raises: JobFailedError, JobTimeoutError.

        Example: `client.wait(job, lambda job: print(job.step, job.done, job.total))`
        """
        job_id = job if isinstance(job, str) else job.id
        started = monotonic()
        told: JobModel | None = None
        while True:
            now = await self._get(JobModel, "jobs", job_id)
            if on_progress is not None and now != told:
                on_progress(now)
                told = now
            if now.state == "succeeded":
                return now
            if now.state in ("failed", "cancelled"):
                raise JobFailedError(now)
            waited_s = monotonic() - started
            if timeout_s is not None and waited_s > timeout_s:
                raise JobTimeoutError(
                    f"Job {now.id} is still {now.state} ({now.step}) after {waited_s:.0f} s. Wait "
                    "for it again, or cancel it."
                )
            await self._pause(poll_s)


@_blocking
class Kinlens(_Client):
    """The service at an address; a context manager, safe for several threads.

    Every method raises a `ClientError`.
    """

    _http_client = httpx.Client

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._http.send(request)
        return response

    async def _pause(self, seconds: float) -> None:
        sleep(seconds)

    async def _aside(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        return function(*args, **options)

    def each_item(
        self,
        gallery: str,
        *,
        filter: Filter | None = None,  # noqa: A002
        key_prefix: str = "",
    ) -> Iterator[ItemModel]:
        """Every item that fits, page by page, also while items are added, replaced and removed:
        each that is there from beginning to end comes once, none that came later.

        Example: `[item.key for item in client.each_item("shop", key_prefix="hats/")]`
        """
        listing = Listing(gallery, filter, key_prefix)
        while not listing.ended:
            yield from listing.take(_ended(self._send(listing.call())))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncKinlens(_Client):
    """The same methods in an event loop: `async with AsyncKinlens(url) as client`.

    What the examples of `Kinlens` call is awaited here: `(await client.search("shoe.jpg")).hits`.
    """

    _http_client = httpx.AsyncClient

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = await self._http.send(request)
        return response

    async def _pause(self, seconds: float) -> None:
        await async_sleep(seconds)

    async def _aside(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        return await to_thread(function, *args, **options)

    async def each_item(
        self,
        gallery: str,
        *,
        filter: Filter | None = None,  # noqa: A002
        key_prefix: str = "",
    ) -> AsyncIterator[ItemModel]:
        """Every item that fits, page by page, also while items are added, replaced and removed:
        each that is there from beginning to end comes once, none that came later.

        Example: `[item.key async for item in client.each_item("shop")]`
        """
        listing = Listing(gallery, filter, key_prefix)
        while not listing.ended:
            for item in listing.take(await self._send(listing.call())):
                yield item

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
