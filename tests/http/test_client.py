"""The client: every operation of the service in both kinds, typed answers, errors, retries."""

import asyncio
import inspect
import io
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import mypy.api
import pytest

from service.client import AsyncKinlens, JobFailedError, JobTimeoutError, Kinlens, NewItem, Query
from service.client_errors import (
    AnswerError,
    ArgumentError,
    ClientError,
    ConflictError,
    ConnectionFailedError,
    GalleryReplacedError,
    ImageReadError,
    InvalidError,
    KeyNeededError,
    NotFoundError,
    ProblemError,
    RateLimitedError,
    ServiceError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from tests.support.shops import Shop, start_shop
from tests.tiny import encoded, picture

JOB = "4f2a90c1be77"
CALLS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("POST", "/search"): lambda c: c.search(b"x"),
    ("POST", "/search/batch"): lambda c: c.search_batch([Query(b"x")]),
    ("GET", "/galleries"): lambda c: c.galleries(),
    ("POST", "/galleries"): lambda c: c.create_gallery("g"),
    ("GET", "/galleries/{name}"): lambda c: c.gallery("g"),
    ("DELETE", "/galleries/{name}"): lambda c: c.delete_gallery("g"),
    ("GET", "/galleries/{name}/items"): lambda c: c.items("g"),
    ("PUT", "/galleries/{name}/items"): lambda c: c.put("g", "k", b"x"),
    ("PATCH", "/galleries/{name}/items"): lambda c: c.patch("g", {"k": {"a": 1}}),
    ("DELETE", "/galleries/{name}/items"): lambda c: c.remove("g", ["k"]),
    ("POST", "/galleries/{name}/items/delete"): lambda c: c.remove_where("g", "a = 1"),
    ("GET", "/galleries/{name}/items/{item_id}"): lambda c: c.item("g", 1),
    ("DELETE", "/galleries/{name}/items/{item_id}"): lambda c: c.remove_item("g", 1),
    ("GET", "/galleries/{name}/items/{item_id}/image"): lambda c: c.image("g", 1),
    ("GET", "/galleries/{name}/items/{item_id}/similar"): lambda c: c.similar("g", 1),
    ("POST", "/galleries/{name}/compact"): lambda c: c.compact("g"),
    ("POST", "/galleries/{name}/swap"): lambda c: c.swap("g", "h"),
    ("POST", "/galleries/{name}/rebuild"): lambda c: c.rebuild("g", "f" * 64),
    ("POST", "/jobs/train"): lambda c: c.train("shop", "g"),
    ("GET", "/jobs"): lambda c: c.jobs(),
    ("GET", "/jobs/{job_id}"): lambda c: c.job(JOB),
    ("GET", "/jobs/{job_id}/log"): lambda c: c.job_log(JOB),
    ("POST", "/jobs/{job_id}/cancel"): lambda c: c.cancel_job(JOB),
    ("POST", "/jobs/{job_id}/swap"): lambda c: c.swap_job(JOB),
    ("POST", "/jobs/{job_id}/resume"): lambda c: c.resume_job(JOB),
    ("GET", "/live"): lambda c: c.live(),
    ("GET", "/ready"): lambda c: c.ready(),
    ("GET", "/metrics"): lambda c: c.metrics(),
    ("GET", "/samples"): lambda c: c.samples(),
    ("GET", "/samples/{number}"): lambda c: c.sample(0),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = start_shop(tmp_path_factory.mktemp("client"))
    yield shop
    shop.close()


@pytest.fixture
def client(shop: Shop) -> Iterator[Kinlens]:
    with Kinlens(shop.running.url) as client:
        yield client


@pytest.fixture(scope="module")
def data() -> list[bytes]:
    return [encoded(picture(seed)) for seed in range(4)]


def operations(shop: Shop) -> set[tuple[str, str]]:
    paths = shop.running.app.openapi()["paths"]
    return {(method.upper(), path) for path, item in paths.items() for method in item}


def problem(status: int, **headers: str) -> httpx.Response:
    content = {
        "type": "urn:kinlens:problem:x",
        "title": "X",
        "status": status,
        "detail": "Do this.",
        "instance": "/x",
        "request_id": "r1",
    }
    return httpx.Response(status, json=content, headers=headers)


class Answers:
    """A transport that answers with these, one after the other, and keeps what was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.transport = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(params=[Kinlens, AsyncKinlens])
def ask(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Lets a client of either kind make a call."""

    def in_a_thread(call: Callable[[Any], Any], answers: Answers, **options: Any) -> Any:
        with Kinlens("http://x", transport=answers.transport, **options) as client:
            return call(client)

    async def in_a_loop(call: Callable[[Any], Any], answers: Answers, **options: Any) -> Any:
        async with AsyncKinlens("http://x", transport=answers.transport, **options) as client:
            return await call(client)

    if request.param is Kinlens:
        return in_a_thread
    return lambda *asked, **options: asyncio.run(in_a_loop(*asked, **options))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No retry waits; what would have been waited."""
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("service.client.sleep", waits.append)
    monkeypatch.setattr("service.client.async_sleep", note)
    return waits


def test_every_operation_of_the_service_has_a_method(shop) -> None:
    assert operations(shop) == CALLS.keys()


@pytest.mark.parametrize("operation", CALLS, ids=" ".join)
def test_a_method_asks_for_its_operation(operation: tuple[str, str], ask) -> None:
    answers = Answers(problem(404))
    with pytest.raises(NotFoundError, match="Do this"):
        ask(CALLS[operation], answers)
    [request] = answers.requests
    pattern = re.sub(r"\{\w+\}", "[^/]+", operation[1])
    assert request.method == operation[0]
    assert re.fullmatch(pattern, request.url.path)


def test_both_clients_have_the_same_methods_with_examples() -> None:
    def methods(cls: type) -> dict[str, Any]:
        found = inspect.getmembers(cls, inspect.isfunction)
        return {name: method for name, method in found if not name.startswith("_")}

    one, other = methods(Kinlens), methods(AsyncKinlens)
    assert one.keys() == other.keys()
    for name in one.keys() - {"close"}:
        assert str(inspect.signature(one[name]).parameters) == str(
            inspect.signature(other[name]).parameters
        ), name
        assert "Example: `" in (one[name].__doc__ or ""), name
        assert "Example: `" in (other[name].__doc__ or ""), name


USER = """
from collections.abc import AsyncIterator, Iterator
from typing import assert_type

from service.client import AsyncKinlens, Kinlens, NewItem
from service.api.models import ItemModel, JobModel, PutAnswer, SearchAnswer


def in_a_thread(client: Kinlens) -> None:
    assert_type(client.search("a.jpg", k=5, filter={"n": 1}), SearchAnswer)
    assert_type(client.put_many("g", [NewItem("a", b"")], per_request=9), PutAnswer)
    assert_type(client.each_item("g", filter="n = 1"), Iterator[ItemModel])
    assert_type(client.wait("job", timeout_s=9), JobModel)
    assert_type(client.image("g", 1), bytes)
    assert_type([Kinlens.job(client, "a")], list[JobModel])
    client.search("a.jpg", k="5")  # type: ignore[arg-type]
    client.search("a.jpg", limit=5)  # type: ignore[call-arg]
    client.item("g", "1")  # type: ignore[arg-type]
    client.put("g", "k")  # type: ignore[call-arg]
    client.nothing()  # type: ignore[attr-defined]
    Kinlens(retries="2")  # type: ignore[arg-type]


async def in_a_loop(client: AsyncKinlens) -> None:
    assert_type(await client.search("a.jpg", k=5, filter={"n": 1}), SearchAnswer)
    assert_type(await client.put_many("g", [NewItem("a", b"")], per_request=9), PutAnswer)
    assert_type(client.each_item("g", filter="n = 1"), AsyncIterator[ItemModel])
    assert_type(await client.wait("job", timeout_s=9), JobModel)
    assert_type(await client.image("g", 1), bytes)
    assert_type([await AsyncKinlens.job(client, "a")], list[JobModel])
    client.search("a.jpg").hits  # type: ignore[attr-defined]
    await client.search("a.jpg", k="5")  # type: ignore[arg-type]
    await client.put("g", "k")  # type: ignore[call-arg]


class Shop(Kinlens):
    def job(self, job_id: str) -> JobModel:
        return super().job(job_id)
"""


def test_a_type_checker_knows_arguments_and_answers_of_both_clients(tmp_path) -> None:
    file = tmp_path / "user.py"
    file.write_text(USER)
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=silent"]
    told, failures, status = mypy.api.run([*options, str(file)])
    assert (status, failures) == (0, ""), told


def test_a_gallery_is_made_filled_searched_and_deleted(client, data, tmp_path) -> None:
    file = tmp_path / "0.png"
    file.write_bytes(data[0])
    assert client.create_gallery("life").managed
    answer = client.put("life", "a/0", file, {"price": 9.5, "sale": True})
    assert answer.items[0].status == "added"
    many = [NewItem("a/1", data[1], {"price": 20}), NewItem("b", b"no image")]
    answer = client.put_many("life", [*many, NewItem("c", io.BytesIO(data[2]), {"t": "x"})])
    assert [item.status for item in answer.items] == ["added", "failed", "added"]
    assert answer.items[1].problem is not None
    assert answer.items[1].problem.status == 415
    assert client.gallery("life").size == 3
    assert "life" in [gallery.name for gallery in client.galleries().galleries]
    assert client.items("life", filter={"price": {"<": 10}}).total == 1
    keys = [item.key for item in client.each_item("life", key_prefix="a/")]
    assert keys == ["a/0", "a/1"]
    [item] = client.items("life", limit=1).items
    assert client.item("life", item.id) == item
    assert client.image("life", item.id) == data[0]
    assert client.patch("life", {"a/0": {"sale": None}}).changed == 1
    assert client.similar("life", item.id, k=1, filter="price > 0").hits[0].key == "a/1"
    assert client.remove("life", ["a/0", "unknown"]).removed == 1
    assert client.remove("life", [f"{n:0100}" for n in range(100)]).removed == 0
    assert client.remove_where("life", 't = "x"').removed == 1
    [item] = client.items("life").items
    assert client.remove_item("life", item.id).removed == 1
    client.delete_gallery("life")
    with pytest.raises(NotFoundError):
        client.gallery("life")


def test_searches_take_files_bytes_crops_likes_and_filters(client, data, tmp_path) -> None:
    client.put_many("shop", [NewItem(f"s/{n}", one, {"n": n}) for n, one in enumerate(data)])
    file = tmp_path / "1.png"
    file.write_bytes(data[1])
    for image in (data[1], file, str(file), io.BytesIO(data[1])):
        answer = client.search(image, gallery="shop", k=2)
        assert (answer.hits[0].key, len(answer.hits), answer.match) == ("s/1", 2, True)
    assert client.search(data[1], gallery="shop", filter={"n": {">=": 2}}).hits[0].key != "s/1"
    assert client.search(data[1], gallery="shop", min_score=1.0, filter="n = 0").match is False
    each = client.search_each([data[0], data[3]], gallery="shop", k=1)
    assert [one.answer and one.answer.hits[0].key for one in each.answers] == ["s/0", "s/3"]
    halves = [(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 0.5, 1.0)]
    assert len(client.search_each(data[0], gallery="shop", crops=halves).answers) == 2
    liked = client.search(gallery="shop", positives=["s/0"], negatives=["s/1"], k=4)
    assert {hit.key for hit in liked.hits} == {"s/2", "s/3"}
    grouped = client.search(data[2], gallery="shop", group_by="n", k=3, exact=True)
    assert grouped.groups is not None
    assert grouped.groups[0].value == 2
    batch = client.search_batch(
        [Query(data[0], {"gallery": "shop", "k": 1}), Query(b"no image", {"gallery": "shop"})]
    )
    assert [one.status for one in batch.answers] == [200, 415]


def test_the_same_in_an_event_loop(shop, data) -> None:
    async def main() -> None:
        async with AsyncKinlens(shop.running.url) as client:
            await client.create_gallery("loop")
            items = [NewItem(f"l/{n}", one) for n, one in enumerate(data)]
            assert (await client.put_many("loop", items)).added == 4
            answers = await asyncio.gather(
                *(client.search(one, gallery="loop", k=1) for one in data)
            )
            assert [answer.hits[0].key for answer in answers] == [f"l/{n}" for n in range(4)]
            assert [item.key async for item in client.each_item("loop")] == [
                f"l/{n}" for n in range(4)
            ]
            assert (await client.ready()).status == "ready"
            with pytest.raises(ConflictError):
                await client.create_gallery("loop")
            await client.delete_gallery("loop")

    asyncio.run(main())


def test_a_key_is_sent_and_its_absence_told(tmp_path) -> None:
    shop = start_shop(tmp_path, create=False, anonymous_scopes=("search",))
    keys = shop.running.runtime.keys
    assert keys is not None
    with Kinlens(shop.running.url, key=keys.create("office", ["admin"])) as client:
        assert client.create_gallery("shop").size == 0
    with Kinlens(shop.running.url) as client, pytest.raises(KeyNeededError) as caught:
        client.delete_gallery("shop")
    assert caught.value.request_id
    shop.close()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, KeyNeededError),
        (404, NotFoundError),
        (409, ConflictError),
        (413, TooLargeError),
        (415, UnsupportedError),
        (422, InvalidError),
        (418, ProblemError),
        (500, ServiceError),
        (502, ServiceError),
    ],
)
def test_a_problem_is_an_error_with_its_fields(status: int, expected: type, ask) -> None:
    answers = Answers(problem(status))
    with pytest.raises(ProblemError) as caught:
        ask(lambda c: c.galleries(), answers)
    error = caught.value
    assert type(error) is expected
    assert isinstance(error, ClientError)
    assert (error.status, error.title, error.detail) == (status, "X", "Do this.")
    assert (error.type, error.request_id) == ("urn:kinlens:problem:x", "r1")
    assert len(answers.requests) == 1


def test_a_busy_service_is_asked_again_after_the_time_that_it_says(quick, ask) -> None:
    busy = [problem(503, **{"retry-after": "3"}), problem(429, **{"retry-after": "7"})]
    answers = Answers(*busy, httpx.Response(200, json={"bundle_id": "b", "galleries": []}))
    assert ask(lambda c: c.galleries(), answers).bundle_id == "b"
    assert quick == [3.0, 7.0]


def test_retries_are_bounded_and_the_last_answer_is_told(quick, ask) -> None:
    answers = Answers(problem(429, **{"retry-after": "9999"}))
    with pytest.raises(RateLimitedError) as caught:
        ask(lambda c: c.search(b"x"), answers, retries=3)
    assert len(answers.requests) == 4
    assert caught.value.retry_after_s == 9999
    assert all(wait <= 30 for wait in quick)
    bodies = {request.content.split(b"\r\n", 1)[1] for request in answers.requests}
    assert all(b'filename="image"' in body for body in bodies)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.create_gallery("x"),
        lambda c: c.train("shop", "g"),
        lambda c: c.cancel_job(JOB),
        lambda c: c.delete_gallery("x"),
    ],
)
def test_what_is_not_idempotent_is_sent_once(call, ask) -> None:
    for answer in (problem(503), httpx.ReadTimeout("slow")):
        answers = Answers(answer)
        with pytest.raises((UnavailableError, ConnectionFailedError)):
            ask(call, answers)
        assert len(answers.requests) == 1


def test_no_service_is_a_connection_error(ask) -> None:
    answers = Answers(httpx.ConnectError("refused"))
    with pytest.raises(ConnectionFailedError, match="refused"):
        ask(lambda c: c.live(), answers, retries=1)
    assert len(answers.requests) == 2


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_of_something_else_is_told_as_that(status: int, ask) -> None:
    with pytest.raises(AnswerError):
        ask(lambda c: c.galleries(), Answers(httpx.Response(status, text="<html>")))


def test_a_service_that_is_not_ready_says_so_without_an_error(ask) -> None:
    content = {
        "status": "not ready",
        "provider": "p",
        "bundle_id": "b",
        "galleries": {},
        "queue_depth": 0,
        "redis": "off",
        "checks": {"model": "failed"},
        "last_error": None,
    }
    answers = Answers(httpx.Response(503, json=content))
    assert ask(lambda c: c.ready(), answers).checks == {"model": "failed"}
    assert len(answers.requests) == 1


def test_a_real_job_is_started_followed_and_listed(client, data) -> None:
    client.create_gallery("worked")
    client.put_many("worked", [NewItem(f"w/{n}", one) for n, one in enumerate(data)])
    steps: list[str] = []
    job = client.wait(
        client.compact("worked"), lambda one: steps.append(one.state), timeout_s=60, poll_s=0.05
    )
    assert (job.state, steps[-1], job.gallery) == ("succeeded", "succeeded", "worked")
    assert client.gallery("worked").index.segment_items == len(data)
    assert job.id in [one.id for one in client.jobs(state="succeeded", limit=10).jobs]
    assert client.job_log(job.id).offset == 0
    with pytest.raises(ConflictError):
        client.cancel_job(job.id)
    with pytest.raises(NotFoundError):
        client.job("f" * 12)


def job(state: str, done: int) -> httpx.Response:
    known = {"id": JOB, "kind": "compact", "gallery": "g", "state": state, "done": done, "by": "me"}
    known |= {"step": "s", "created_at": "2026-01-01T00:00:00.000+00:00", "params": {}}
    unknown = dict.fromkeys(("total", "started_at", "ended_at", "error", "report"))
    return httpx.Response(200, json=known | unknown)


def test_a_job_is_waited_for_with_each_step_told_once(ask) -> None:
    answers = Answers(*(job("running", n // 2) for n in range(6)), job("succeeded", 9))
    seen: list[int] = []
    ended = ask(lambda c: c.wait(JOB, lambda one: seen.append(one.done), poll_s=0.001), answers)
    assert (ended.state, seen) == ("succeeded", [0, 1, 2, 9])


def test_a_job_that_fails_or_never_ends_is_an_error(ask) -> None:
    with pytest.raises(JobFailedError) as caught:
        ask(lambda c: c.wait(JOB), Answers(job("failed", 3)))
    assert caught.value.job.done == 3
    waiting = Answers(job("running", 3))
    with pytest.raises(JobTimeoutError, match="still running"):
        ask(lambda c: c.wait(JOB, timeout_s=0), waiting)


def test_the_examples_of_the_documentation_run(tmp_path, data, monkeypatch) -> None:
    shop = start_shop(tmp_path / "state", create=False)
    for name, one in zip(("shoe", "hat", "street"), data, strict=False):
        (tmp_path / f"{name}.jpg").write_bytes(one)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        code = block.replace("http://127.0.0.1:8000", shop.running.url).replace('"kl_..."', "None")
        exec(compile(code, "docs/client.md", "exec"), names)
    shop.close()


def test_each_item_comes_once_although_each_is_removed_as_it_comes(client, shop, data) -> None:
    keys = [f"w/{n:03}" for n in range(205)]
    client.create_gallery("walk")
    client.put_many("walk", [NewItem(key, data[0], {"n": 1}) for key in keys])
    where = {"n": 1}
    seen = []
    for item in client.each_item("walk", filter=where, key_prefix="w/"):
        seen.append(item.key)
        client.remove("walk", [item.key])
    assert (seen, client.gallery("walk").size) == (keys, 0)

    async def main() -> list[str]:
        async with AsyncKinlens(shop.running.url) as other:
            await other.put_many("walk", [NewItem(key, data[0]) for key in keys])
            seen = []
            async for item in other.each_item("walk"):
                seen.append(item.key)
                await other.remove("walk", [item.key])
            return seen

    assert asyncio.run(main()) == keys
    assert client.gallery("walk").size == 0
    client.delete_gallery("walk")


def item_page(first: int, generation: str, count: int = 200) -> httpx.Response:
    item = {"attributes": {}, "sha256": "0" * 64, "path": "", "format": "PNG", "image": ""}
    items = [item | {"id": first + n, "key": f"k{first + n}"} for n in range(count)]
    content = {"total": 1000, "offset": 0, "items": items, "last": 999, "generation": generation}
    return httpx.Response(200, json=content)


def all_of(items: Any) -> Any:
    async def collected() -> list[Any]:
        return [item async for item in items]

    return collected() if isinstance(items, AsyncIterator) else list(items)


@pytest.mark.parametrize(
    ("second", "expected"),
    [((200, "b" * 12), GalleryReplacedError), ((0, "a" * 12), AnswerError)],
)
def test_items_of_another_generation_or_the_same_again_are_an_error(second, expected, ask) -> None:
    answers = Answers(item_page(0, "a" * 12), item_page(*second))
    with pytest.raises(expected):
        ask(lambda c: all_of(c.each_item("g")), answers)


class Puts:
    """A transport that takes puts, and keeps the keys of each request."""

    def __init__(self) -> None:
        self.keys: list[list[str]] = []
        self.sizes: list[int] = []
        self.transport = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return problem(404)
        found = re.findall(rb'name="key"\r\n\r\n(\S+)\r\n', request.content)
        self.keys.append([key.decode() for key in found])
        self.sizes.append(len(request.content))
        one = {"status": "added", "id": 1, "problem": None}
        counts = {"added": len(found), "replaced": 0, "updated": 0, "unchanged": 0, "failed": 0}
        items = [one | {"key": key.decode()} for key in found]
        return httpx.Response(200, json=counts | {"items": items, "version": f"v{len(self.keys)}"})


def test_many_items_are_put_in_requests_that_the_service_takes(ask) -> None:
    puts: Any = Puts()
    keys = [f"k{n}" for n in range(600)]
    told: list[int] = []
    answer = ask(
        lambda c: c.put_many(
            "g", (NewItem(key, b"x") for key in keys), lambda done, part: told.append(done)
        ),
        puts,
    )
    assert [len(one) for one in puts.keys] == [256, 256, 88]
    assert [key for one in puts.keys for key in one] == keys
    assert ([item.key for item in answer.items], answer.added) == (keys, 600)
    assert (told, answer.version) == ([256, 512, 600], "v3")


def test_large_images_are_read_and_sent_a_few_at_a_time(ask) -> None:
    puts: Any = Puts()
    ahead: list[int] = []

    class File(io.BytesIO):
        def read(self, *size: Any) -> bytes:
            ahead.append(sum(map(len, puts.keys)))
            return super().read(*size)

    sizes = [12, 12, 12, 40, 1, 1]
    items = [NewItem(f"k{n}", File(bytes(size * 2**20))) for n, size in enumerate(sizes)]
    ask(lambda c: c.put_many("g", items), puts)
    assert puts.keys == [["k0", "k1"], ["k2"], ["k3"], ["k4", "k5"]]
    assert all(size <= 32 * 2**20 for n, size in enumerate(puts.sizes) if n != 2)
    assert ahead == [0, 0, 0, 2, 3, 4]


def test_an_item_that_is_alone_in_a_request_fails_alone_too(client, data) -> None:
    items = [NewItem("a/0", data[0]), NewItem("a/1", b"no image"), NewItem("a/2", data[0])]
    client.create_gallery("alone")
    answer = client.put_many("alone", items, per_request=1)
    assert [item.status for item in answer.items] == ["added", "failed", "added"]
    assert answer.items[1].problem is not None
    assert (answer.failed, answer.version) == (1, client.gallery("alone").version)
    assert client.put_many("alone", items[1:2]).version == answer.version
    assert client.put_many("alone", []).version == answer.version
    with pytest.raises(UnsupportedError):
        client.put("alone", "a/1", b"no image")
    with pytest.raises(NotFoundError):
        client.put_many("nowhere", items[1:2])
    client.delete_gallery("alone")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda c: c.search("/nope.jpg"), ImageReadError),
        (lambda c: c.search_batch([Query(Path("/nope.jpg"))]), ImageReadError),
        (lambda c: c.put("g", "k", "/"), ImageReadError),
        (lambda c: c.put_many("g", [NewItem("k", "\0")]), ImageReadError),
        (lambda c: c.search_each(["/nope.jpg"]), ImageReadError),
        (lambda c: c.search(io.StringIO("x")), ArgumentError),
        (lambda c: c.search(17), ArgumentError),
        (lambda c: c.search([17]), ArgumentError),
        (lambda c: c.put("g", "\ud800", b"x"), ArgumentError),
        (lambda c: c.put("g", "k", b"x", {"a": float("nan")}), ArgumentError),
        (lambda c: c.patch("g", {"k": {"a": float("nan")}}), ArgumentError),
        (lambda c: c.remove_where("g", {"a": {1, 2}}), ArgumentError),
        (lambda c: c.items("g", filter={"a": object()}), ArgumentError),
        (lambda c: c.gallery("\ud800"), ArgumentError),
        (lambda c: c.put_many("g", [NewItem("k", b"x")], per_request=0), ArgumentError),
    ],
)
def test_what_cannot_be_sent_is_an_error_of_the_client(call, expected, ask) -> None:
    answers = Answers(problem(404))
    with pytest.raises(ClientError) as caught:
        ask(call, answers)
    assert type(caught.value) is expected
    assert answers.requests == []


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_of_dots_leads_to_no_other_path(name: str, ask) -> None:
    answers = Answers(problem(404))
    with pytest.raises(NotFoundError):
        ask(lambda c: c.items(name), answers)
    assert answers.requests[0].url.raw_path.startswith(b"/galleries/%2E")
