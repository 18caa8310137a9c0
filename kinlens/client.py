"""A typed client of the service, thin over its HTTP: `Client`, and `AsyncClient` for event loops.

    with Client("http://127.0.0.1:8000", key="kl_...") as client:
        for hit in client.search("shoe.jpg", k=5).hits:
            print(hit.key, hit.score)

Answers are the models of `kinlens.models`, failures the tree of `kinlens.errors`;
docs/client.md has more examples. Each call is written once, as a coroutine. `AsyncClient` has it
as it is. `Client` runs it to its end: there it never stops half-way, since what it awaits (an
answer, a pause) is waited for in the thread.
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

from kinlens import calls
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
from kinlens.golden import GoldenQueries, GoldenQuery, GoldenRun, GoldenRuns
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
]

P = ParamSpec("P")
R = TypeVar("R")

_AGAIN = frozenset({429, 503})
_MAX_WAIT_S = 30.0
_FIRST_WAIT_S = 0.25
_ODD_KEY = "The key has characters that no key has; copy it again."
_PAGE = 200  # items, the most that the service gives
_OF_THE_ITEM = frozenset({413, 415, 422})


def _ended(coroutine: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine that never stops half-way, since it waits in the thread."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    raise AssertionError("the coroutine waits for an event loop")


def _blocking(
    call: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """A function in place of a coroutine."""

    @functools.wraps(call)
    def function(client: Any, /, *args: P.args, **options: P.kwargs) -> R:
        return _ended(call(client, *args, **options))

    return function


def _iterating(
    call: Callable[Concatenate[Any, P], AsyncIterator[R]],
) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """A generator in place of an asynchronous one."""

    @functools.wraps(call)
    def generator(client: Any, /, *args: P.args, **options: P.kwargs) -> Iterator[R]:
        items: Any = call(client, *args, **options)
        try:
            while True:
                yield _ended(anext(items))
        except StopAsyncIteration:
            return
        finally:
            _ended(items.aclose())

    return generator


class _BaseClient:
    """How a call is sent, again where that is safe. What it awaits is waited for in the thread."""

    _http_client: ClassVar[Callable[..., Any]] = httpx.Client

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
        key = (key or "").strip()  # a key from a file ends with a line break
        if not key.isprintable():
            raise ArgumentError(_ODD_KEY)
        if not url.lower().startswith(("http://", "https://")):
            raise ArgumentError(f"url = {url!r} has no scheme. Write http://{url}, or https://.")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._retries = max(retries, 0)
        try:
            self._http = self._http_client(
                base_url=url, headers=headers, timeout=timeout_s, transport=transport
            )
        except httpx.InvalidURL as error:
            raise ArgumentError(f"url = {url!r} is no address: {error}.") from error
        except UnicodeError:  # not told as the cause, which shows a part of the key
            raise ArgumentError(_ODD_KEY) from None

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._http.send(request)
        return response

    async def _pause(self, seconds: float) -> None:
        sleep(seconds)

    async def _aside(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """What a function returns that reads files, which would hold up an event loop."""
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
        """The answer to a request with a form or JSON. One that must not arrive twice is sent
        `once`; `accepted` statuses beside 2xx are answers too.
        """
        body: dict[str, Any] = {"files": list(parts)} if parts else {}
        if json is not None:
            headers = {"content-type": "application/json"}
            body = {"content": calls.json_of(json).encode(), "headers": headers}
        params = calls.fields(query or {})
        try:
            request = self._http.build_request(method, calls.address(*path), params=params, **body)
        except (httpx.InvalidURL, UnicodeError, TypeError) as error:
            raise ArgumentError(f"{method} {path!a} cannot be sent: {error}.") from error
        attempt = 0
        while True:
            is_last = once or attempt == self._retries
            wait_s = _FIRST_WAIT_S * 2**attempt
            try:
                response = await self._exchange(request)
            except httpx.RequestError as error:
                if is_last:
                    raise ConnectionFailedError(
                        f"{method} {request.url.copy_with(query=None)} got no answer: "
                        f"{str(error).rstrip('.') or type(error).__name__}. Is the service running "
                        "at this address, and is the timeout long enough?"
                    ) from error
            else:
                if is_last or response.status_code not in _AGAIN - {*accepted}:
                    return calls.answer_of(response, result, accepted)
                asked_s = calls.retry_after_s(response)
                wait_s = wait_s if asked_s is None else asked_s
            await self._pause(min(wait_s, _MAX_WAIT_S))
            attempt += 1

    async def _start(self, *path: str, json: Any = None) -> api.JobModel:
        return await self._send(api.JobModel, "POST", *path, json=json, once=True)


class AsyncClient(_BaseClient):
    """The same methods in an event loop: `async with AsyncClient(url) as client`.

    Each is awaited, as in `(await client.search("shoe.jpg")).hits`; `each_item` is for `async for`.
    """

    _http_client = httpx.AsyncClient

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = await self._http.send(request)
        return response

    async def _pause(self, seconds: float) -> None:
        await async_sleep(seconds)

    async def _aside(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        return await asyncio.to_thread(function, *args, **options)

    async def live(self) -> api.Live:
        """Whether the process answers."""
        return await self._send(api.Live, "GET", "live")

    async def startup(self) -> api.Startup:
        """Whether the service was ready once."""
        return await self._send(api.Startup, "GET", "startup", accepted=[503])

    async def ready(self, gallery: str | None = None) -> api.Ready:
        """What is served and the verdict of each check, also when it is not ready; with `gallery`
        the status is that of this one.
        """
        query = None if gallery is None else {"gallery": gallery}
        return await self._send(api.Ready, "GET", "ready", query=query, accepted=[503])

    async def metrics(self) -> str:
        """The metrics in the text format of Prometheus."""
        return (await self._send(bytes, "GET", "metrics")).decode()

    async def search(
        self, images: Images = (), **options: Unpack[calls.ImageSearchOptions]
    ) -> api.SearchAnswer:
        """The items most like the mean of the images, crops and positives."""
        parts = await self._aside(calls.search_form, images, options)
        return await self._send(api.SearchAnswer, "POST", "search", parts=parts)

    async def search_batch(self, queries: Sequence[Query]) -> api.BatchAnswer:
        """Several searches at once; each fails alone."""
        body = await self._aside(calls.batch_json, queries)
        return await self._send(api.BatchAnswer, "POST", "search", "batch", json=body)

    async def similar(
        self, gallery: str, item: int | str, **options: Unpack[calls.SearchOptions]
    ) -> api.SearchAnswer:
        """The items most like one of the gallery, without it."""
        path = ("galleries", gallery, *calls.item_path(item), "similar")
        return await self._send(api.SearchAnswer, "GET", *path, query=options)

    async def feedback(
        self, answer_id: str, item: str, action: api.Action, image: Image | None = None
    ) -> None:
        """Say that an item (its key) was right or wrong for the question of an answer. `image` is
        the picture that was searched with, for a service that keeps pictures.
        """
        parts = await self._aside(calls.feedback_form, answer_id, item, action, image)
        await self._send(bytes, "POST", "feedback", parts=parts)

    async def gallery_feedback(self, gallery: str) -> str:
        """The feedback on a gallery as CSV: query, query_key, item, action."""
        return (await self._send(bytes, "GET", "galleries", gallery, "feedback")).decode()

    async def explain(
        self,
        gallery: str,
        item: int | str,
        images: Images,
        *,
        crops: Sequence[Crop] = (),
        positives: Sequence[str] = (),
        negatives: Sequence[str] = (),
    ) -> api.ExplainAnswer:
        """Where a hit matches the images, crops, likes and dislikes that found it."""
        options: calls.ImageSearchOptions = {"crops": crops}
        options |= {"positives": positives, "negatives": negatives}
        parts = await self._aside(calls.search_form, images, options)
        path = ("galleries", gallery, *calls.item_path(item), "explain")
        return await self._send(api.ExplainAnswer, "POST", *path, parts=parts)

    async def galleries(self) -> api.Galleries:
        """Every gallery; the first is the default of a search."""
        return await self._send(api.Galleries, "GET", "galleries")

    async def gallery(self, name: str) -> api.GalleryDetail:
        """A gallery with its attributes, its index and its calibration."""
        return await self._send(api.GalleryDetail, "GET", "galleries", name)

    async def create_gallery(self, name: str, bundle_id: str | None = None) -> api.GalleryModel:
        """An empty gallery that can be written at once."""
        body = {"name": name, "bundle_id": bundle_id}
        return await self._send(api.GalleryModel, "POST", "galleries", json=body, once=True)

    async def delete_gallery(self, name: str) -> None:
        """Delete a gallery that was created here, with its items and uploads."""
        await self._send(bytes, "DELETE", "galleries", name, once=True)

    async def put(
        self, gallery: str, key: str, image: Image, attributes: Attributes | None = None
    ) -> api.PutAnswer:
        """Add an item, or replace the one with this key. Without attributes those that it has stay;
        {} clears them.
        """
        item = NewItem(key, image, attributes)
        _, parts = await self._aside(next, calls.put_forms([item], 1))
        return await self._send(api.PutAnswer, "PUT", "galleries", gallery, "items", parts=parts)

    async def put_many(
        self,
        gallery: str,
        items: Iterable[NewItem],
        on_progress: Callable[[int, api.PutAnswer], None] | None = None,
        *,
        per_request: int = calls.MAX_ITEMS,
    ) -> api.PutAnswer:
        """Put any number of items, in several requests; a bad image fails alone. `on_progress` is
        told after each request how many items are done, and its answer.
        """
        answers: list[api.PutAnswer] = []
        done, version = 0, ""
        forms = calls.put_forms(items, per_request)
        while form := await self._aside(next, forms, None):
            keys, parts = form
            try:
                answer = await self._send(
                    api.PutAnswer, "PUT", "galleries", gallery, "items", parts=parts
                )
            except ProblemError as error:
                if len(keys) > 1 or error.status not in _OF_THE_ITEM:
                    raise
                answer = calls.refused_put(keys[0], error.problem)
            answers.append(answer)
            done, version = done + len(answer.items), answer.version or version
            if on_progress is not None:
                on_progress(done, answer)
        if not version:
            version = (await self._send(api.GalleryDetail, "GET", "galleries", gallery)).version
        return calls.put_sum(answers, version)

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
    ) -> api.ItemPage:
        """A page of items, of those with numbers above `after`, in the order of their numbers, or
        `sort_by` an attribute ("price", "price:desc"); with the values of the attributes `facets`
        counted over all that fits.
        """
        page = {"offset": offset, "limit": limit, "after": after, "facets": facets}
        page |= {"sort_by": sort_by or None}
        query = {**page, "filter": filter, "key_prefix": key_prefix}
        return await self._send(api.ItemPage, "GET", "galleries", gallery, "items", query=query)

    async def each_item(
        self,
        gallery: str,
        *,
        filter: Filter | None = None,
        key_prefix: str = "",
    ) -> AsyncIterator[api.ItemModel]:
        """Every item that fits, page by page, also while items are added, replaced and removed:
        each that is there from beginning to end comes once, none that came later.
        """
        # Numbers only grow, and a replaced item gets a new one. What is above the first page's
        # `last` was put meanwhile: with it a caller that replaces each item would never end.
        query = {"limit": _PAGE, "filter": filter, "key_prefix": key_prefix, "after": None}
        first: api.ItemPage | None = None
        while True:
            path = ("galleries", gallery, "items")
            page = await self._send(api.ItemPage, "GET", *path, query=query)
            first = first or page
            if page.generation != first.generation:
                raise GalleryReplacedError(
                    f"Gallery {gallery} was built again while its items were read, and their "
                    "numbers are others now. Read them again."
                )
            for item in page.items:
                if first.last is not None and item.id > first.last:
                    return
                yield item
            if len(page.items) < _PAGE or page.items[-1].id == first.last:
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
        """Groups of items that show one product, in a gallery of up to 10,000 items."""
        query = {"offset": offset, "limit": limit, "min_score": min_score}
        path = ("galleries", gallery, "duplicates")
        return await self._send(api.DuplicatesAnswer, "GET", *path, query=query)

    async def item(self, gallery: str, item: int | str) -> api.ItemModel:
        """What is known of an item, by its number or its key."""
        return await self._send(api.ItemModel, "GET", "galleries", gallery, *calls.item_path(item))

    async def image(self, gallery: str, item: int | str) -> bytes:
        """The picture of an item, as a browser can show it."""
        path = ("galleries", gallery, *calls.item_path(item), "image")
        return await self._send(bytes, "GET", *path)

    async def patch(
        self, gallery: str, changes: Mapping[str, Mapping[str, AttributeInput | None]]
    ) -> api.PatchAnswer:
        """Change attributes by key, all or none; None takes one away."""
        path = ("galleries", gallery, "items")
        return await self._send(api.PatchAnswer, "PATCH", *path, json={"changes": changes})

    async def patch_item(
        self, gallery: str, key: str, changes: Mapping[str, AttributeInput | None]
    ) -> api.PatchAnswer:
        """Change attributes of one item; None takes one away."""
        path = ("galleries", gallery, *calls.item_path(key))
        return await self._send(api.PatchAnswer, "PATCH", *path, json=changes)

    async def patch_where(
        self, gallery: str, filter: Filter, changes: Mapping[str, AttributeInput | None]
    ) -> api.PatchAnswer:
        """Make one change of attributes in every item that fits a filter."""
        body = {"filter": filter, "set": changes}
        path = ("galleries", gallery, "items")
        return await self._send(api.PatchAnswer, "PATCH", *path, json=body)

    async def remove(
        self, gallery: str, keys: Sequence[str], *, keep: Sequence[str] = ()
    ) -> api.RemoveAnswer:
        """Remove items by key; unknown keys are not counted. With `keep`, only while one of these
        other keys is there: the last copy of a product stays.
        """
        path = ("galleries", gallery, "items", "delete")
        which = {"keys": list(keys), "keep": list(keep)}
        return await self._send(api.RemoveAnswer, "POST", *path, json=which)

    async def restore(self, gallery: str, keys: Sequence[str]) -> api.RestoreAnswer:
        """Undo the removal of the items with these keys, for a day or until `compact`."""
        path = ("galleries", gallery, "items", "restore")
        return await self._send(api.RestoreAnswer, "POST", *path, json={"keys": list(keys)})

    async def remove_where(self, gallery: str, filter: Filter) -> api.RemoveAnswer:
        """Remove all items that fit a filter."""
        path = ("galleries", gallery, "items", "delete")
        return await self._send(api.RemoveAnswer, "POST", *path, json={"filter": filter})

    async def remove_item(
        self, gallery: str, item: int | str, version: str | None = None
    ) -> api.RemoveAnswer:
        """Remove an item by its key, or by its number, one of the generation `version`."""
        path = ("galleries", gallery, *calls.item_path(item))
        query = {} if isinstance(item, str) else {"version": version}
        return await self._send(api.RemoveAnswer, "DELETE", *path, query=query, once=True)

    async def golden(self, gallery: str) -> GoldenQueries:
        """The queries that the owner of a gallery has labelled."""
        return await self._send(GoldenQueries, "GET", "galleries", gallery, "golden")

    async def add_golden(
        self,
        gallery: str,
        image: Image,
        *,
        keys: Sequence[str] = (),
        attribute: str | None = None,
        value: Scalar | None = None,
        name: str = "",
    ) -> GoldenQuery:
        """Label an image: items with these keys, or with this value of an attribute, are right for
        it; without either nothing is. The same image again gets the new label.
        """
        label: dict[str, Any] = {"keys": [*keys], "attribute": attribute, "value": value}
        label["no_match"] = not keys and attribute is None
        parts = await self._aside(calls.golden_form, image, label, name)
        return await self._send(GoldenQuery, "POST", "galleries", gallery, "golden", parts=parts)

    async def remove_golden(self, gallery: str, sha256: str) -> None:
        """Remove a labelled query."""
        await self._send(bytes, "DELETE", "galleries", gallery, "golden", sha256, once=True)

    async def golden_image(self, gallery: str, sha256: str, size: int = 320) -> bytes:
        """The picture of a labelled query as a JPEG of 160, 320 or 640 pixels a side."""
        path = ("galleries", gallery, "golden", sha256, "image")
        return await self._send(bytes, "GET", *path, query={"size": size})

    async def run_golden(self, gallery: str, min_score: float | None = None) -> GoldenRun:
        """Ask with every labelled query; how many are answered right. Give the client a timeout
        that is long enough; a run goes on without it, and `golden_runs` has its report.
        """
        path, query = ("galleries", gallery, "golden", "run"), {"min_score": min_score}
        return await self._send(GoldenRun, "POST", *path, query=query, once=True)

    async def golden_runs(self, gallery: str, limit: int | None = None) -> GoldenRuns:
        """The reports over time, newest first."""
        path, query = ("galleries", gallery, "golden", "runs"), {"limit": limit}
        return await self._send(GoldenRuns, "GET", *path, query=query)

    async def compact(self, gallery: str) -> api.JobModel:
        """Start to make the index of a gallery again, without what was removed."""
        return await self._start("galleries", gallery, "compact")

    async def swap(self, gallery: str, other: str) -> api.JobModel:
        """Start to put the state of another gallery in the place of this one."""
        return await self._start("galleries", gallery, "swap", json={"with": other})

    async def rebuild(
        self, gallery: str, bundle_id: str, **options: Unpack[calls.RebuildOptions]
    ) -> api.JobModel:
        """Start to make a gallery again with another bundle, beside the old one."""
        return await self._start(
            "galleries", gallery, "rebuild", json={"bundle_id": bundle_id, **options}
        )

    async def train(
        self, job: str, gallery: str, **options: Unpack[calls.TrainOptions]
    ) -> api.JobModel:
        """Start to train a model, and to give it to a gallery if it passes its gate."""
        body = {"job": job, "gallery": gallery, **options}
        return await self._start("jobs", "train", json=body)

    async def keys(self) -> api.Keys:
        """Every API key without its secret."""
        return await self._send(api.Keys, "GET", "keys")

    async def create_key(
        self,
        name: str,
        scopes: Sequence[Literal["search", "write", "admin"]],
        *,
        galleries: Sequence[str] | None = None,
        filter: str | None = None,
        rate: str | None = None,
        daily_units: int | None = None,
        expires_days: int | None = None,
    ) -> api.NewKey:
        """Make a key; its `text` is in this answer alone. With `galleries` no other one exists for
        it, with `filter` only items that fit.
        """
        body: dict[str, Any] = {"name": name, "scopes": [*scopes], "filter": filter, "rate": rate}
        body |= {"galleries": None if galleries is None else list(galleries)}
        body |= {"daily_units": daily_units, "expires_days": expires_days}
        return await self._send(api.NewKey, "POST", "keys", json=body, once=True)

    async def revoke_key(self, name: str) -> api.KeyModel:
        """End a key with all its secrets."""
        return await self._send(api.KeyModel, "DELETE", "keys", name, once=True)

    async def rotate_key(self, name: str, overlap_hours: float = 24) -> api.NewKey:
        """Give a key a new secret; the last one stays valid for `overlap_hours`."""
        body = {"overlap_hours": overlap_hours}
        return await self._send(api.NewKey, "POST", "keys", name, "rotate", json=body, once=True)

    async def audit(self, *, limit: int = 100, before: int | None = None) -> api.Audit:
        """Who changed what, newest first, of the entries with numbers below `before`."""
        return await self._send(api.Audit, "GET", "audit", query={"limit": limit, "before": before})

    async def jobs(
        self,
        *,
        state: Literal["queued", "running", "succeeded", "failed", "cancelled"] | None = None,
        limit: int | None = None,
    ) -> api.Jobs:
        """Jobs, newest first."""
        return await self._send(api.Jobs, "GET", "jobs", query={"state": state, "limit": limit})

    async def job_options(self) -> api.JobOptions:
        """The training jobs, data sets, weights and bundles that jobs can be given."""
        return await self._send(api.JobOptions, "GET", "jobs", "options")

    async def job(self, job_id: str) -> api.JobModel:
        """A job as it is now."""
        return await self._send(api.JobModel, "GET", "jobs", job_id)

    async def job_log(self, job_id: str, offset: int = 0) -> api.JobLog:
        """What a job has written from byte `offset` on."""
        path = ("jobs", job_id, "log")
        return await self._send(api.JobLog, "GET", *path, query={"offset": offset})

    async def cancel_job(self, job_id: str) -> api.JobModel:
        """Ask a job to end."""
        return await self._start("jobs", job_id, "cancel")

    async def swap_job(self, job_id: str) -> api.JobModel:
        """Start to put the gallery that a job has made in place."""
        return await self._start("jobs", job_id, "swap")

    async def resume_job(self, job_id: str) -> api.JobModel:
        """Start a job that failed or was cancelled anew, from where it stopped."""
        return await self._start("jobs", job_id, "resume")

    async def wait(
        self,
        job: api.JobModel | str,
        on_progress: Callable[[api.JobModel], None] | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = 0.5,
    ) -> api.JobModel:
        """The job when it has succeeded; `on_progress` is told each state that differs from the one
        before. Raises: JobFailedError, JobTimeoutError.
        """
        job_id = job if isinstance(job, str) else job.id
        ends = None if timeout_s is None else monotonic() + timeout_s
        told: api.JobModel | None = None
        while True:
            now = await self._send(api.JobModel, "GET", "jobs", job_id)
            if on_progress is not None and now != told:
                on_progress(now)
            told = now
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
    """The service at an address; a context manager, safe for several threads.

    Every method raises a `ClientError`.
    """

    live = _blocking(AsyncClient.live)
    startup = _blocking(AsyncClient.startup)
    ready = _blocking(AsyncClient.ready)
    metrics = _blocking(AsyncClient.metrics)
    search = _blocking(AsyncClient.search)
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
    image = _blocking(AsyncClient.image)
    patch = _blocking(AsyncClient.patch)
    patch_item = _blocking(AsyncClient.patch_item)
    patch_where = _blocking(AsyncClient.patch_where)
    remove = _blocking(AsyncClient.remove)
    remove_where = _blocking(AsyncClient.remove_where)
    restore = _blocking(AsyncClient.restore)
    remove_item = _blocking(AsyncClient.remove_item)
    golden = _blocking(AsyncClient.golden)
    add_golden = _blocking(AsyncClient.add_golden)
    remove_golden = _blocking(AsyncClient.remove_golden)
    golden_image = _blocking(AsyncClient.golden_image)
    run_golden = _blocking(AsyncClient.run_golden)
    golden_runs = _blocking(AsyncClient.golden_runs)
    compact = _blocking(AsyncClient.compact)
    swap = _blocking(AsyncClient.swap)
    rebuild = _blocking(AsyncClient.rebuild)
    train = _blocking(AsyncClient.train)
    keys = _blocking(AsyncClient.keys)
    create_key = _blocking(AsyncClient.create_key)
    revoke_key = _blocking(AsyncClient.revoke_key)
    rotate_key = _blocking(AsyncClient.rotate_key)
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
