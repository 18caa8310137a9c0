"""A typed client of the HTTP service: `Client`, and `AsyncClient` for event loops.

Methods return the models of `kinlens.models` and raise the exceptions of `kinlens.errors`;
docs/client.md has more examples.

Each call is written once, as a coroutine of `AsyncClient`. `Client` runs the same coroutine without
an event loop: its requests and pauses block the thread, so the coroutine never suspends.
"""

import asyncio
import functools
from asyncio import sleep as async_sleep
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
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack

import httpx

from kinlens import calls, connection
from kinlens import models as api
from kinlens.calls import (
    Attributes,
    Crop,
    Filter,
    Image,
    Images,
    NewItem,
    Part,
    Query,
    QueryText,
    QueryVector,
    Vector,
)
from kinlens.errors import (
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
from kinlens.golden import GoldenQueries, GoldenQuery, GoldenRun, GoldenRuns, UnlabelledQuery
from kinlens.values import AttributeInput, Scalar

__all__ = [
    "AnswerError",
    "ArgumentError",
    "AsyncClient",
    "Client",
    "ClientError",
    "ConnectionFailedError",
    "Crop",
    "GalleryReplacedError",
    "Image",
    "ImageReadError",
    "JobFailedError",
    "JobTimeoutError",
    "NewItem",
    "ProblemError",
    "Query",
    "QueryText",
    "QueryVector",
]

P = ParamSpec("P")
R = TypeVar("R")

_RETRIED_STATUSES = frozenset({429, 503})
_MAX_WAIT_S = 30.0
_FIRST_WAIT_S = 0.25
_INVALID_KEY = "The key contains characters that are not valid in a key; copy it again."
_ITEM_ERRORS = frozenset({413, 415, 422})


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ArgumentError(f"{name} = {value!r:.80} must be a number.")
    return value


def _run(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    raise AssertionError("the coroutine waits for an event loop")


def _blocking(
    call: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Turn a coroutine function of `AsyncClient` into a blocking function."""

    @functools.wraps(call)
    def function(client: Any, /, *args: P.args, **options: P.kwargs) -> R:
        return _run(call(client, *args, **options))

    return function


def _iterating(
    call: Callable[Concatenate[Any, P], AsyncIterator[R]],
) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """Turn an asynchronous generator of `AsyncClient` into a blocking generator."""

    @functools.wraps(call)
    def generator(client: Any, /, *args: P.args, **options: P.kwargs) -> Iterator[R]:
        items: Any = call(client, *args, **options)
        try:
            while True:
                yield _run(anext(items))
        except StopAsyncIteration:
            return
        finally:
            _run(items.aclose())

    return generator


class _BaseClient:
    """Sends requests and retries those that are safe to repeat. Its waits block the thread."""

    _http_client: ClassVar[Callable[..., Any]] = httpx.Client
    _transport: ClassVar[Callable[..., Any]] = httpx.HTTPTransport

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 2,
        transport: Any = None,
    ) -> None:
        """Create a client; nothing is sent yet.

        Args:
            url: the address of the service, with its scheme.
            key: an API key, sent with every request.
            timeout_s: the limit for connecting, for sending, and for each wait for data.
            retries: how often an idempotent call is repeated after 429, 503 or a failed
                connection. Each retry waits as long as the service requests, up to 30 s.
            transport: a transport of httpx, for example for tests.

        Raises: ArgumentError if an argument is invalid, or a proxy or certificate setting of the
            environment cannot be used.
        """
        if not isinstance(key, str | None):
            raise ArgumentError(f"key must be a string, not {type(key).__name__}.")
        key = (key or "").strip()  # a key read from a file ends with a line break
        if not (key.isprintable() and key.isascii()):
            raise ArgumentError(_INVALID_KEY)
        self._retries = max(int(_number("retries", retries)), 0)
        if _number("timeout_s", timeout_s) <= 0:
            raise ArgumentError(f"timeout_s = {timeout_s} must be more than 0.")
        self._url = connection.checked_url(url)
        try:
            self._http = self._http_client(
                base_url=self._url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=timeout_s,
                transport=transport or self._direct_transport(),
                # Certificates are read for https alone: their settings may name missing files.
                verify=self._url.scheme == "https",
            )
        except (ImportError, OSError, ValueError) as error:  # no socksio, a missing file, a scheme
            raise ArgumentError(connection.why_not(error, self._url)) from error

    def _direct_transport(self) -> Any:
        """A transport without a proxy if NO_PROXY has the host; otherwise None.

        httpx fails for a proxy that it does not support even if it would not be used.
        """
        is_direct = connection.proxy_of(self._url) is None
        return self._transport(verify=self._url.scheme == "https") if is_direct else None

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._http.send(request)
        return response

    async def _pause(self, seconds: float) -> None:
        sleep(seconds)

    async def _read_files(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a function that reads files, which would block an event loop."""
        return function(*args, **options)

    async def _send(
        self,
        result: type[R],
        method: str,
        *path: str | int,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        parts: Sequence[Part] = (),
        once: bool = False,
        accepted: Sequence[int] = (),
    ) -> R:
        """Send a request with a form or JSON and return its parsed answer.

        `once` disables retries, for requests that must not be repeated. `accepted` statuses are
        parsed as answers, in addition to 2xx.
        """
        body: dict[str, Any] = {"files": list(parts)} if parts else {}
        if json is not None:
            headers = {"content-type": "application/json"}
            body = {"content": calls.json_of(json).encode(), "headers": headers}
        params = calls.fields(query or {})
        try:
            request = self._http.build_request(method, calls.path_of(*path), params=params, **body)
        except (httpx.InvalidURL, UnicodeError, TypeError) as error:
            raise ArgumentError(f"{method} {path!a} cannot be sent: {error}.") from error
        if self._http.is_closed:
            raise ArgumentError("The client is closed. Create another one.")
        attempt = 0
        while True:
            is_last = once or attempt == self._retries
            wait_s = _FIRST_WAIT_S * 2**attempt
            try:
                response = await self._exchange(request)
            except httpx.DecodingError as error:
                raise AnswerError(
                    f"The answer to {method} {request.url.path} is damaged: {error}. Check the "
                    "proxies between the client and the service."
                ) from error
            # Besides its own errors httpx raises those of sockets, TLS, and a closed event loop.
            except (httpx.HTTPError, httpx.StreamError, OSError, RuntimeError, ValueError) as error:
                if is_last:
                    address = f"{method} {request.url.copy_with(query=None)}"
                    raise ConnectionFailedError(
                        f"{address} got no answer: {connection.why_no_answer(error, self._url)}"
                    ) from error
            else:
                if is_last or response.status_code not in _RETRIED_STATUSES - {*accepted}:
                    return calls.answer_of(response, result, accepted)
                asked_s = calls.retry_after_s(response)
                wait_s = wait_s if asked_s is None else asked_s
            await self._pause(min(wait_s, _MAX_WAIT_S))
            attempt += 1

    async def _start(self, *path: str, json: Any = None) -> api.JobModel:
        return await self._send(api.JobModel, "POST", *path, json=json, once=True)


class AsyncClient(_BaseClient):
    """A client of the service for event loops; it has the methods of `Client` as coroutines.

    Every method raises a `ClientError` if it fails. `each_item` is an asynchronous generator.

    Example:
        >>> async def best_hit() -> str:
        ...     async with AsyncClient("http://127.0.0.1:8000") as client:
        ...         answer = await client.search("shoe.jpg", k=1)
        ...         return answer.hits[0].key
        >>> asyncio.run(best_hit())
        'shoes/1'
    """

    _http_client = httpx.AsyncClient
    _transport = httpx.AsyncHTTPTransport

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = await self._http.send(request)
        return response

    async def _pause(self, seconds: float) -> None:
        await async_sleep(seconds)

    async def _read_files(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        return await asyncio.to_thread(function, *args, **options)

    async def live(self) -> api.Live:
        """Check that the process responds."""
        return await self._send(api.Live, "GET", "live")

    async def startup(self) -> api.Startup:
        """Return whether the service has been ready at least once."""
        return await self._send(api.Startup, "GET", "startup", accepted=[503])

    async def ready(self, gallery: str | None = None) -> api.Ready:
        """Return the status, the galleries and the result of each check, even when not ready.

        With `gallery`, the status depends only on this gallery.
        """
        query = None if gallery is None else {"gallery": gallery}
        return await self._send(api.Ready, "GET", "ready", query=query, accepted=[503])

    async def metrics(self) -> str:
        """Return the metrics in the Prometheus text format."""
        return (await self._send(bytes, "GET", "metrics")).decode()

    async def search(
        self, images: Images = (), **options: Unpack[calls.ImageSearchOptions]
    ) -> api.SearchAnswer:
        """Search with images, vectors or words: return the items most similar to the query.

        Args:
            images: one or more images. Without `crops`, each is used as a whole.
            options: for example `gallery`, `k`, `filter`, `min_score`, `crops`, `vectors`, `texts`,
                and the item keys `positives` (liked) and `negatives` (disliked). docs/api.md
                describes each.

        All images, crops, vectors and liked items are combined into one query vector: their mean,
        moved away from the disliked items. With `combine="best"` an item has the score of its most
        similar image, crop or vector.
        """
        parts = await self._read_files(calls.search_form, images, options)
        return await self._send(api.SearchAnswer, "POST", "search", parts=parts)

    async def boxes(self, image: Image, *, gallery: str | None = None) -> api.BoxesAnswer:
        """Find the objects in a photo: boxes, best first, for `crops` of a search.

        It needs a bundle with a detector; `has_boxes` of the gallery shows whether it has one.
        """
        parts = await self._read_files(calls.search_form, image, {"gallery": gallery})
        return await self._send(api.BoxesAnswer, "POST", "boxes", parts=parts)

    async def search_batch(self, queries: Sequence[Query]) -> api.BatchAnswer:
        """Run several searches in one request; each has its own answer or problem."""
        body = await self._read_files(calls.batch_json, queries)
        return await self._send(api.BatchAnswer, "POST", "search", "batch", json=body)

    async def similar(
        self, gallery: str, item: int | str, **options: Unpack[calls.SearchOptions]
    ) -> api.SearchAnswer:
        """Search with an item of the gallery, by id or key; the item itself is not returned."""
        path = ("galleries", gallery, *calls.item_path(item), "similar")
        return await self._send(api.SearchAnswer, "GET", *path, query=options)

    async def feedback(
        self, answer_id: str, item: str, action: api.Action, image: Image | None = None
    ) -> None:
        """Report that an item was right or wrong for a search.

        Args:
            answer_id: the `answer_id` of the search's answer.
            item: the key of the item.
            action: "clicked", "bought" or "wrong".
            image: the image of the search, if the service stores query images.
        """
        parts = await self._read_files(calls.feedback_form, answer_id, item, action, image)
        await self._send(bytes, "POST", "feedback", parts=parts)

    async def gallery_feedback(self, gallery: str) -> str:
        """Return the feedback on a gallery as CSV: query, query_key, item, action."""
        return (await self._send(bytes, "GET", "galleries", gallery, "feedback")).decode()

    async def explain(
        self,
        gallery: str,
        item: int | str,
        images: Images,
        *,
        crops: Sequence[Crop] = (),
        vectors: Sequence[QueryVector] | None = None,
        positives: Sequence[str] = (),
        negatives: Sequence[str] = (),
    ) -> api.ExplainAnswer:
        """Return which regions of a hit match the query; send the query of the search."""
        options: calls.ImageSearchOptions = {"crops": crops, "vectors": vectors}
        options |= {"positives": positives, "negatives": negatives}
        parts = await self._read_files(calls.search_form, images, options)
        path = ("galleries", gallery, *calls.item_path(item), "explain")
        return await self._send(api.ExplainAnswer, "POST", *path, parts=parts)

    async def galleries(self) -> api.Galleries:
        """Return all galleries; the first is the default of a search."""
        return await self._send(api.Galleries, "GET", "galleries")

    async def gallery(self, name: str) -> api.GalleryDetail:
        """Return a gallery with its attributes, index and calibration."""
        return await self._send(api.GalleryDetail, "GET", "galleries", name)

    async def create_gallery(self, name: str, bundle_id: str | None = None) -> api.GalleryModel:
        """Create an empty gallery for a bundle, by default that of the first gallery."""
        body = {"name": name, "bundle_id": bundle_id}
        return await self._send(api.GalleryModel, "POST", "galleries", json=body, once=True)

    async def delete_gallery(self, name: str) -> None:
        """Delete a gallery that the service created, with its items and uploads."""
        await self._send(bytes, "DELETE", "galleries", name, once=True)

    async def put(
        self,
        gallery: str,
        key: str,
        image: Image | None = None,
        attributes: Attributes | None = None,
        *,
        vector: Vector | None = None,
        keep: bool = True,
    ) -> api.PutAnswer:
        """Add an item, or replace the item with this key.

        `attributes` replace the stored ones; None keeps them and {} clears them. With a `vector` of
        norm 1 in place of the image, from the bundle of the gallery, the item has no image. Without
        `keep`, the service stores the vector of the image and not the image.
        """
        item = NewItem(key, image, attributes, vector)
        _, body = await self._read_files(next, calls.put_bodies([item], 1, keep))
        return await self._send(api.PutAnswer, "PUT", "galleries", gallery, "items", **body)

    async def put_many(
        self,
        gallery: str,
        items: Iterable[NewItem],
        on_progress: Callable[[int, api.PutAnswer], None] | None = None,
        *,
        per_request: int = api.MAX_ITEMS,
        keep: bool = True,
    ) -> api.PutAnswer:
        """Add or replace any number of items, in several requests.

        Args:
            gallery: the name of the gallery.
            items: the items; a generator is read as the requests are sent, and each image just
                before its request.
            on_progress: called after each request with the number of items done so far and the
                answer to the request. These items are stored.
            per_request: the maximum number of items in a request, which has at most 32 MiB. Lower
                it if the service takes fewer in one request.
            keep: store the images, and not only their vectors.

        Returns: one result per item. A bad image only fails its own item.

        Raises: ClientError for any other failure. Items of earlier requests are stored by then, and
            it is safe to put all items again.
        """
        answers: list[api.PutAnswer] = []
        done, version = 0, ""
        bodies = calls.put_bodies(items, per_request, keep)
        while made := await self._read_files(next, bodies, None):
            keys, body = made
            try:
                answer = await self._send(
                    api.PutAnswer, "PUT", "galleries", gallery, "items", **body
                )
            except ProblemError as error:
                if len(keys) > 1 or error.status not in _ITEM_ERRORS:
                    raise
                answer = calls.failed_put(keys[0], error.problem)
            answers.append(answer)
            done, version = done + len(answer.items), answer.version or version
            if on_progress is not None:
                on_progress(done, answer)
        if not version:
            version = (await self._send(api.GalleryDetail, "GET", "galleries", gallery)).version
        return calls.merged_puts(answers, version)

    async def items(
        self,
        gallery: str,
        *,
        offset: int = 0,
        limit: int = 50,
        after: int | None = None,
        filter: Filter | None = None,
        key_prefix: str = "",
        sort_by: str = "",
        facets: Sequence[str] | None = None,
        fields: Sequence[str] | None = None,
    ) -> api.ItemPage:
        """Return a page of items.

        Args:
            gallery: the name of the gallery.
            offset: the number of items to skip.
            limit: the maximum number of items in the page, up to 200.
            after: only items with a higher id.
            filter: only items that match this filter.
            key_prefix: only items whose key starts with this.
            sort_by: an attribute ("price", "price:desc"); by default items are ordered by id.
            facets: attributes whose values are counted over all matching items.
            fields: the only attributes to return; None for all.
        """
        page = {"offset": offset, "limit": limit, "after": after, "facets": facets}
        page |= {"fields": fields}
        page |= {"sort_by": sort_by or None}
        query = {**page, "filter": filter, "key_prefix": key_prefix}
        return await self._send(api.ItemPage, "GET", "galleries", gallery, "items", query=query)

    async def each_item(
        self,
        gallery: str,
        *,
        filter: Filter | None = None,
        key_prefix: str = "",
        fields: Sequence[str] | None = None,
    ) -> AsyncIterator[api.ItemModel]:
        """Iterate over all matching items, page by page, with all attributes or only `fields`.

        Items may be added, replaced and removed during the iteration. An item that stays in the
        gallery throughout is returned exactly once; items added later are not returned.

        Raises: GalleryReplacedError if the gallery was rebuilt during the iteration.
        """
        # Ids only grow, and a replaced item gets a new id. Ids above the first page's `last` were
        # added during the iteration; without this limit, a loop that replaces each item would
        # never end.
        query: dict[str, Any] = {"limit": api.MAX_PAGE, "filter": filter, "fields": fields}
        query |= {"key_prefix": key_prefix, "after": None}
        first: api.ItemPage | None = None
        while True:
            path = ("galleries", gallery, "items")
            page = await self._send(api.ItemPage, "GET", *path, query=query)
            first = first or page
            if page.generation != first.generation:
                raise GalleryReplacedError(
                    f"Gallery {gallery} was rebuilt while its items were read, which changed their "
                    "ids. Read them again."
                )
            for item in page.items:
                if first.last is not None and item.id > first.last:
                    return
                yield item
            if len(page.items) < api.MAX_PAGE or page.items[-1].id == first.last:
                return
            query["after"] = page.items[-1].id

    async def duplicates(
        self,
        gallery: str,
        *,
        offset: int = 0,
        limit: int = 50,
        min_score: float | None = None,
    ) -> api.DuplicatesAnswer:
        """Return groups of near-duplicate items, for a gallery of up to 10,000 items."""
        query = {"offset": offset, "limit": limit, "min_score": min_score}
        path = ("galleries", gallery, "duplicates")
        return await self._send(api.DuplicatesAnswer, "GET", *path, query=query)

    async def count(self, gallery: str, filter: Filter | None = None) -> int:
        """Return the number of items, or of those that match a filter."""
        path, body = ("galleries", gallery, "count"), {"filter": filter}
        return (await self._send(api.CountAnswer, "POST", *path, json=body)).count

    async def item(
        self, gallery: str, item: int | str, fields: Sequence[str] | None = None
    ) -> api.ItemModel:
        """Return an item by its id or key, with all attributes or only `fields`."""
        path = ("galleries", gallery, *calls.item_path(item))
        return await self._send(api.ItemModel, "GET", *path, query={"fields": fields})

    async def embed(
        self, images: Images, *, model: str | None = None, dimensions: int | None = None
    ) -> api.Embeddings:
        """Return the vectors of images; the key needs the scope `embed`.

        Args:
            images: one or more images.
            model: the name or id of a bundle; by default that of the first gallery.
            dimensions: only the first numbers of each vector, again with norm 1.
        """
        body = await self._read_files(calls.embedding_json, images, model, dimensions)
        return await self._send(api.Embeddings, "POST", "v1", "embeddings", json=body)

    async def vector(self, gallery: str, item: int | str) -> api.ItemVector:
        """Return the stored vector of an item by its id or key; the key needs the scope `embed`."""
        path = ("galleries", gallery, *calls.item_path(item), "vector")
        return await self._send(api.ItemVector, "GET", *path)

    async def image(self, gallery: str, item: int | str, size: int | None = None) -> bytes:
        """Return the image of an item, in a format that browsers can show.

        With `size`, the longest side in pixels (160, 320, 480 or 640), it is a smaller JPEG.
        """
        path = ("galleries", gallery, *calls.item_path(item), "image")
        return await self._send(bytes, "GET", *path, query={"size": size})

    async def patch(
        self, gallery: str, changes: Mapping[str, Mapping[str, AttributeInput | None]]
    ) -> api.PatchAnswer:
        """Change attributes of items by key, all items or none; None removes an attribute."""
        path = ("galleries", gallery, "items")
        return await self._send(api.PatchAnswer, "PATCH", *path, json={"changes": changes})

    async def patch_item(
        self, gallery: str, key: str, changes: Mapping[str, AttributeInput | None]
    ) -> api.PatchAnswer:
        """Change attributes of one item; None removes an attribute."""
        path = ("galleries", gallery, *calls.item_path(key))
        return await self._send(api.PatchAnswer, "PATCH", *path, json=changes)

    async def patch_products(
        self, gallery: str, changes: Mapping[str, Mapping[str, AttributeInput | None]]
    ) -> api.PatchAnswer:
        """Change attributes of all items of each product, all or none; None removes an attribute.

        The products are values of the attribute `product`.
        """
        path = ("galleries", gallery, "items")
        return await self._send(api.PatchAnswer, "PATCH", *path, json={"products": changes})

    async def patch_where(
        self, gallery: str, filter: Filter, changes: Mapping[str, AttributeInput | None]
    ) -> api.PatchAnswer:
        """Change attributes of all items that match a filter; None removes an attribute."""
        body = {"filter": filter, "set": changes}
        path = ("galleries", gallery, "items")
        return await self._send(api.PatchAnswer, "PATCH", *path, json=body)

    async def remove(
        self, gallery: str, keys: Sequence[str], *, keep: Sequence[str] = ()
    ) -> api.RemoveAnswer:
        """Remove items by key; unknown keys are not counted.

        With `keep`, items are only removed if an item with one of these other keys exists, so the
        last copy of a product is not removed.
        """
        path = ("galleries", gallery, "items", "delete")
        which = {"keys": list(keys), "keep": list(keep)}
        return await self._send(api.RemoveAnswer, "POST", *path, json=which)

    async def restore(self, gallery: str, keys: Sequence[str]) -> api.RestoreAnswer:
        """Restore removed items by key, within a day and before the next `compact`."""
        path = ("galleries", gallery, "items", "restore")
        return await self._send(api.RestoreAnswer, "POST", *path, json={"keys": list(keys)})

    async def remove_where(self, gallery: str, filter: Filter) -> api.RemoveAnswer:
        """Remove all items that match a filter."""
        path = ("galleries", gallery, "items", "delete")
        return await self._send(api.RemoveAnswer, "POST", *path, json={"filter": filter})

    async def remove_item(
        self,
        gallery: str,
        item: int | str,
        version: str | None = None,
        *,
        generation: str | None = None,
    ) -> api.RemoveAnswer:
        """Remove an item by its key, or by its id.

        With an id, `generation` is the one of the gallery that the id belongs to. `version` is its
        former name.
        """
        path = ("galleries", gallery, *calls.item_path(item))
        query = {} if isinstance(item, str) else {"generation": generation or version}
        return await self._send(api.RemoveAnswer, "DELETE", *path, query=query, once=True)

    async def golden(self, gallery: str) -> GoldenQueries:
        """Return the labelled queries of a gallery (its golden set)."""
        return await self._send(GoldenQueries, "GET", "galleries", gallery, "golden")

    async def add_golden(
        self,
        gallery: str,
        image: Image | None = None,
        *,
        keys: Sequence[str] = (),
        attribute: str | None = None,
        value: Scalar | None = None,
        name: str = "",
        crop: Crop | Literal["auto"] | None = None,
        texts: Sequence[str | calls.QueryText] = (),
    ) -> GoldenQuery:
        """Add a labelled query; one that is already labelled gets the new label.

        The right items are those with these `keys`, or those whose `attribute` has this `value`.
        Without either, the label is that no item is right. `crop` and `texts` are as in a search;
        words need no image.
        """
        label: dict[str, Any] = {"keys": [*keys], "attribute": attribute, "value": value}
        label["no_match"] = not keys and attribute is None
        parts = await self._read_files(calls.golden_form, image, label, name, crop, texts)
        return await self._send(GoldenQuery, "POST", "galleries", gallery, "golden", parts=parts)

    async def remove_golden(self, gallery: str, sha256: str) -> None:
        """Remove a labelled query."""
        await self._send(bytes, "DELETE", "galleries", gallery, "golden", sha256, once=True)

    async def golden_image(self, gallery: str, sha256: str, size: int = 320) -> bytes:
        """Return the image of a labelled query as a JPEG; `size` is 160, 320 or 640 pixels."""
        path = ("galleries", gallery, "golden", sha256, "image")
        return await self._send(bytes, "GET", *path, query={"size": size})

    async def unlabelled(self, gallery: str) -> UnlabelledQuery:
        """Draw one of the queries of visitors that the feedback stores and nobody has labelled."""
        path = ("galleries", gallery, "golden", "unlabelled")
        return await self._send(UnlabelledQuery, "GET", *path)

    async def unlabelled_image(self, gallery: str, sha256: str) -> bytes:
        """Return the photo of a query to label, a JPEG; pass it to `add_golden` unchanged."""
        path = ("galleries", gallery, "golden", "unlabelled", sha256)
        return await self._send(bytes, "GET", *path)

    async def skip_unlabelled(self, gallery: str, sha256: str) -> None:
        """Do not draw a query again, since nobody can label it, or before you label it.

        Raises: APIError with status 404 if somebody else was faster; then leave it to them.
        """
        path = ("galleries", gallery, "golden", "unlabelled", sha256)
        await self._send(bytes, "DELETE", *path, once=True)

    async def unskip_unlabelled(self, gallery: str, sha256: str) -> None:
        """Undo `skip_unlabelled`: the query is drawn again. A label of it is not removed."""
        path = ("galleries", gallery, "golden", "unlabelled", sha256)
        await self._send(bytes, "PUT", *path)

    async def run_golden(self, gallery: str, min_score: float | None = None) -> GoldenRun:
        """Search with every labelled query and return the report.

        Use a client with a long `timeout_s`. After a timeout the run continues, and `golden_runs`
        returns its report.
        """
        path, query = ("galleries", gallery, "golden", "run"), {"min_score": min_score}
        return await self._send(GoldenRun, "POST", *path, query=query, once=True)

    async def golden_runs(self, gallery: str, limit: int | None = None) -> GoldenRuns:
        """Return the reports of earlier golden runs, newest first."""
        path, query = ("galleries", gallery, "golden", "runs"), {"limit": limit}
        return await self._send(GoldenRuns, "GET", *path, query=query)

    async def compact(self, gallery: str) -> api.JobModel:
        """Start a job that rebuilds the index of a gallery without its removed items."""
        return await self._start("galleries", gallery, "compact")

    async def swap(self, gallery: str, other: str) -> api.JobModel:
        """Start a job that replaces the contents of this gallery with those of `other`."""
        return await self._start("galleries", gallery, "swap", json={"with": other})

    async def sync(self, gallery: str, **options: Unpack[calls.SyncOptions]) -> api.JobModel:
        """Start a job that makes a gallery equal to its image root, or to a folder of the settings
        of the service.
        """
        return await self._start("galleries", gallery, "sync", json={**options})

    async def rebuild(
        self, gallery: str, bundle_id: str, **options: Unpack[calls.RebuildOptions]
    ) -> api.JobModel:
        """Start a job that rebuilds a gallery with another bundle, and swaps if good enough."""
        return await self._start(
            "galleries", gallery, "rebuild", json={"bundle_id": bundle_id, **options}
        )

    async def train(
        self, job: str, gallery: str, **options: Unpack[calls.TrainOptions]
    ) -> api.JobModel:
        """Start a job that trains a model, rebuilds the gallery, and swaps if it is good enough."""
        body = {"job": job, "gallery": gallery, **options}
        return await self._start("jobs", "train", json=body)

    async def keys(self) -> api.Keys:
        """Return all API keys, without their secrets."""
        return await self._send(api.Keys, "GET", "keys")

    async def create_key(
        self,
        name: str,
        scopes: Sequence[api.Scope],
        *,
        galleries: Sequence[str] | None = None,
        filter: str | None = None,
        rate: str | None = None,
        daily_units: int | None = None,
        expires_days: int | None = None,
    ) -> api.NewKey:
        """Create an API key. Only this answer contains its `text`; store it.

        Args:
            name: a name for the key.
            scopes: what the key may do.
            galleries: the galleries that it can see; None for all.
            filter: the key can see only items that match.
            rate: its rate limit, in place of KINLENS_RATE_LIMIT_PER_KEY.
            daily_units: its maximum units of work in a day.
            expires_days: the number of days that it is valid; None for no expiry.
        """
        body: dict[str, Any] = {"name": name, "scopes": [*scopes], "filter": filter, "rate": rate}
        body |= {"galleries": None if galleries is None else list(galleries)}
        body |= {"daily_units": daily_units, "expires_days": expires_days}
        return await self._send(api.NewKey, "POST", "keys", json=body, once=True)

    async def revoke_key(self, name: str) -> api.KeyModel:
        """Revoke a key with all its secrets."""
        return await self._send(api.KeyModel, "DELETE", "keys", name, once=True)

    async def rotate_key(self, name: str, overlap_hours: float = 24) -> api.NewKey:
        """Give a key a new secret; the previous one stays valid for `overlap_hours`."""
        body = {"overlap_hours": overlap_hours}
        return await self._send(api.NewKey, "POST", "keys", name, "rotate", json=body, once=True)

    async def access(self) -> api.Access:
        """Return the scopes and galleries of the key of this client."""
        return await self._send(api.Access, "GET", "access")

    async def audit(self, *, limit: int = 100, before: int | None = None) -> api.Audit:
        """Return the audit log, newest first; with `before`, only entries with lower numbers."""
        return await self._send(api.Audit, "GET", "audit", query={"limit": limit, "before": before})

    async def jobs(
        self,
        *,
        state: api.JobState | None = None,
        limit: int | None = None,
    ) -> api.Jobs:
        """Return the jobs, newest first."""
        return await self._send(api.Jobs, "GET", "jobs", query={"state": state, "limit": limit})

    async def job_options(self) -> api.JobOptions:
        """Return the training jobs, data sets, weights and bundles that jobs can use."""
        return await self._send(api.JobOptions, "GET", "jobs", "options")

    async def job(self, job_id: str) -> api.JobModel:
        """Return the current state of a job."""
        return await self._send(api.JobModel, "GET", "jobs", job_id)

    async def job_log(self, job_id: str, offset: int = 0) -> api.JobLog:
        """Return the log of a job from byte `offset` on."""
        path = ("jobs", job_id, "log")
        return await self._send(api.JobLog, "GET", *path, query={"offset": offset})

    async def cancel_job(self, job_id: str) -> api.JobModel:
        """Ask a job to stop."""
        return await self._start("jobs", job_id, "cancel")

    async def swap_job(self, job_id: str) -> api.JobModel:
        """Start a job that swaps in the gallery that a rebuild or training job has built."""
        return await self._start("jobs", job_id, "swap")

    async def resume_job(self, job_id: str) -> api.JobModel:
        """Restart a failed or cancelled job from the point where it stopped."""
        return await self._start("jobs", job_id, "resume")

    async def wait(
        self,
        job: api.JobModel | str,
        on_progress: Callable[[api.JobModel], None] | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = 0.5,
    ) -> api.JobModel:
        """Wait until a job succeeds, and return its final state.

        Args:
            job: the job or its id.
            on_progress: called with the job whenever its state or progress changes.
            timeout_s: the maximum time to wait; None for no limit.
            poll_s: the pause between two requests.

        Raises: JobFailedError if it failed or was cancelled; JobTimeoutError.
        """
        job_id = job if isinstance(job, str) else job.id
        ends = None if timeout_s is None else monotonic() + timeout_s
        reported: api.JobModel | None = None
        while True:
            now = await self._send(api.JobModel, "GET", "jobs", job_id)
            if on_progress is not None and now != reported:
                on_progress(now)
            reported = now
            if now.state == "succeeded":
                return now
            if now.state in ("failed", "cancelled"):
                raise JobFailedError(now)
            if ends is not None and monotonic() > ends:
                raise JobTimeoutError(
                    f"Job {now.id} is still {now.state} ({now.step}) after {timeout_s:g} s. Wait "
                    "for it again, or cancel it."
                )
            await self._pause(poll_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(_BaseClient):
    """A client of the service at one address; a context manager that several threads can share.

    Every method raises a `ClientError` if it fails.

    Example:
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     added = client.put("shop", "shoes/1", "shoe.jpg", {"price": 59.9})
        ...     answer = client.search("shoe.jpg", k=5, filter="price < 100")
        >>> added.items[0].status
        'added'
        >>> [hit.key for hit in answer.hits]
        ['shoes/1']
    """

    live = _blocking(AsyncClient.live)
    startup = _blocking(AsyncClient.startup)
    ready = _blocking(AsyncClient.ready)
    metrics = _blocking(AsyncClient.metrics)
    search = _blocking(AsyncClient.search)
    boxes = _blocking(AsyncClient.boxes)
    search_batch = _blocking(AsyncClient.search_batch)
    similar = _blocking(AsyncClient.similar)
    feedback = _blocking(AsyncClient.feedback)
    gallery_feedback = _blocking(AsyncClient.gallery_feedback)
    explain = _blocking(AsyncClient.explain)
    galleries = _blocking(AsyncClient.galleries)
    gallery = _blocking(AsyncClient.gallery)
    create_gallery = _blocking(AsyncClient.create_gallery)
    delete_gallery = _blocking(AsyncClient.delete_gallery)
    put = _blocking(AsyncClient.put)
    put_many = _blocking(AsyncClient.put_many)
    items = _blocking(AsyncClient.items)
    each_item = _iterating(AsyncClient.each_item)
    duplicates = _blocking(AsyncClient.duplicates)
    item = _blocking(AsyncClient.item)
    count = _blocking(AsyncClient.count)
    embed = _blocking(AsyncClient.embed)
    vector = _blocking(AsyncClient.vector)
    image = _blocking(AsyncClient.image)
    patch = _blocking(AsyncClient.patch)
    patch_item = _blocking(AsyncClient.patch_item)
    patch_products = _blocking(AsyncClient.patch_products)
    patch_where = _blocking(AsyncClient.patch_where)
    remove = _blocking(AsyncClient.remove)
    remove_where = _blocking(AsyncClient.remove_where)
    restore = _blocking(AsyncClient.restore)
    remove_item = _blocking(AsyncClient.remove_item)
    golden = _blocking(AsyncClient.golden)
    add_golden = _blocking(AsyncClient.add_golden)
    remove_golden = _blocking(AsyncClient.remove_golden)
    golden_image = _blocking(AsyncClient.golden_image)
    unlabelled = _blocking(AsyncClient.unlabelled)
    unlabelled_image = _blocking(AsyncClient.unlabelled_image)
    skip_unlabelled = _blocking(AsyncClient.skip_unlabelled)
    unskip_unlabelled = _blocking(AsyncClient.unskip_unlabelled)
    run_golden = _blocking(AsyncClient.run_golden)
    golden_runs = _blocking(AsyncClient.golden_runs)
    compact = _blocking(AsyncClient.compact)
    sync = _blocking(AsyncClient.sync)
    swap = _blocking(AsyncClient.swap)
    rebuild = _blocking(AsyncClient.rebuild)
    train = _blocking(AsyncClient.train)
    keys = _blocking(AsyncClient.keys)
    create_key = _blocking(AsyncClient.create_key)
    revoke_key = _blocking(AsyncClient.revoke_key)
    rotate_key = _blocking(AsyncClient.rotate_key)
    access = _blocking(AsyncClient.access)
    audit = _blocking(AsyncClient.audit)
    jobs = _blocking(AsyncClient.jobs)
    job_options = _blocking(AsyncClient.job_options)
    job = _blocking(AsyncClient.job)
    job_log = _blocking(AsyncClient.job_log)
    cancel_job = _blocking(AsyncClient.cancel_job)
    swap_job = _blocking(AsyncClient.swap_job)
    resume_job = _blocking(AsyncClient.resume_job)
    wait = _blocking(AsyncClient.wait)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
