"""The sync and async clients: every operation, typed answers, errors, retries."""

import asyncio
import doctest
import inspect
import io
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageOps

import kinlens
from kinlens import errors
from kinlens.client import AsyncClient, Client, NewItem, Query
from kinlens.embedder.errors import KinlensError
from tests.support.shops import Shop, start_shop
from tests.tiny import encoded, photo

JOB = "4f2a90c1be77"
CALLS: dict[str, Callable[[Any], Any]] = {
    "POST /search": lambda c: c.search(b"x"),
    "POST /search/batch": lambda c: c.search_batch([Query(b"x")]),
    "POST /boxes": lambda c: c.boxes(b"x", gallery="g"),
    "POST /feedback": lambda c: c.feedback("i", "k", "wrong"),
    "GET /galleries/{name}/feedback": lambda c: c.gallery_feedback("g"),
    "POST /v1/embeddings": lambda c: c.embed(b"x"),
    "GET /galleries": lambda c: c.galleries(),
    "POST /galleries": lambda c: c.create_gallery("g"),
    "GET /galleries/{name}": lambda c: c.gallery("g"),
    "POST /galleries/{name}/count": lambda c: c.count("g"),
    "DELETE /galleries/{name}": lambda c: c.delete_gallery("g"),
    "GET /galleries/{name}/duplicates": lambda c: c.duplicates("g"),
    "GET /galleries/{name}/items": lambda c: c.items("g"),
    "PUT /galleries/{name}/items": lambda c: c.put("g", "k", b"x"),
    "PATCH /galleries/{name}/items": lambda c: c.patch("g", {"k": {"a": 1}}),
    "POST /galleries/{name}/items/delete": lambda c: c.remove("g", ["k"]),
    "POST /galleries/{name}/items/restore": lambda c: c.restore("g", ["k"]),
    "GET /galleries/{name}/items/{item_id}": lambda c: c.item("g", 1),
    "DELETE /galleries/{name}/items/{item_id}": lambda c: c.remove_item("g", 1),
    "GET /galleries/{name}/items/by-key/{key}": lambda c: c.item("g", "k"),
    "PATCH /galleries/{name}/items/by-key/{key}": lambda c: c.patch_item("g", "k", {"p": 1}),
    "DELETE /galleries/{name}/items/by-key/{key}": lambda c: c.remove_item("g", "k"),
    "GET /galleries/{name}/items/by-key/{key}/image": lambda c: c.image("g", "k"),
    "GET /galleries/{name}/items/by-key/{key}/similar": lambda c: c.similar("g", "k"),
    "POST /galleries/{name}/items/by-key/{key}/explain": lambda c: c.explain("g", "k", b"x"),
    "GET /galleries/{name}/items/{item_id}/image": lambda c: c.image("g", 1),
    "GET /galleries/{name}/items/{item_id}/similar": lambda c: c.similar("g", 1),
    "GET /galleries/{name}/items/{item_id}/vector": lambda c: c.vector("g", 1),
    "GET /galleries/{name}/items/by-key/{key}/vector": lambda c: c.vector("g", "k"),
    "GET /galleries/{name}/golden": lambda c: c.golden("g"),
    "POST /galleries/{name}/golden": lambda c: c.add_golden("g", b"x", keys=["k"]),
    "DELETE /galleries/{name}/golden/{sha256}": lambda c: c.remove_golden("g", "0" * 64),
    "GET /galleries/{name}/golden/{sha256}/image": lambda c: c.golden_image("g", "0" * 64),
    "GET /galleries/{name}/golden/unlabelled": lambda c: c.unlabelled("g"),
    "GET /galleries/{name}/golden/unlabelled/{sha256}": lambda c: c.unlabelled_image("g", "0" * 64),
    "DELETE /galleries/{name}/golden/unlabelled/{sha256}": lambda c: c.skip_unlabelled(
        "g", "0" * 64
    ),
    "PUT /galleries/{name}/golden/unlabelled/{sha256}": lambda c: c.unskip_unlabelled(
        "g", "0" * 64
    ),
    "POST /galleries/{name}/golden/run": lambda c: c.run_golden("g"),
    "GET /galleries/{name}/golden/runs": lambda c: c.golden_runs("g"),
    "POST /galleries/{name}/items/{item_id}/explain": lambda c: c.explain("g", 1, b"x"),
    "POST /galleries/{name}/compact": lambda c: c.compact("g"),
    "POST /galleries/{name}/sync": lambda c: c.sync("g", max_removed="5%"),
    "POST /galleries/{name}/swap": lambda c: c.swap("g", "h"),
    "POST /galleries/{name}/rebuild": lambda c: c.rebuild("g", "f" * 64),
    "POST /jobs/train": lambda c: c.train("shop", "g"),
    "GET /access": lambda c: c.access(),
    "GET /keys": lambda c: c.keys(),
    "POST /keys": lambda c: c.create_key("shop7", ["search"], galleries=["g"]),
    "DELETE /keys/{name}": lambda c: c.revoke_key("shop7"),
    "POST /keys/{name}/rotate": lambda c: c.rotate_key("shop7"),
    "GET /audit": lambda c: c.audit(before=7),
    "GET /jobs": lambda c: c.jobs(),
    "GET /jobs/options": lambda c: c.job_options(),
    "GET /jobs/{job_id}": lambda c: c.job(JOB),
    "GET /jobs/{job_id}/log": lambda c: c.job_log(JOB),
    "POST /jobs/{job_id}/cancel": lambda c: c.cancel_job(JOB),
    "POST /jobs/{job_id}/swap": lambda c: c.swap_job(JOB),
    "POST /jobs/{job_id}/resume": lambda c: c.resume_job(JOB),
    "GET /live": lambda c: c.live(),
    "GET /startup": lambda c: c.startup(),
    "GET /ready": lambda c: c.ready(),
    "GET /metrics": lambda c: c.metrics(),
}
IN_THE_BODY = {"DELETE /galleries/{name}/items"}
"""What the client asks with keys in a body, which may be longer than an address."""

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = start_shop(tmp_path_factory.mktemp("client"))
    yield shop
    shop.close()


@pytest.fixture
def client(shop: Shop) -> Iterator[Client]:
    with Client(shop.running.url) as client:
        yield client


@pytest.fixture(scope="module")
def data() -> list[bytes]:
    return [encoded(photo(seed)) for seed in range(4)]


def problem(status: int, **headers: str) -> httpx.Response:
    content = {"type": "urn:kinlens:problem:x", "title": "X", "status": status}
    content |= {"detail": "Do this.", "instance": "/x", "request_id": "r1"}
    return httpx.Response(status, json=content, headers=headers)


class Answers:
    """A transport that answers with these, one after the other, and keeps what was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.transport = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        found: httpx.Response = answer(request) if callable(answer) else answer
        return found


@pytest.fixture(params=[Client, AsyncClient])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Lets a client of either kind make a call; of several items it gives all."""

    def in_a_thread(call: Callable[[Any], Any], answers: Answers, **options: Any) -> Any:
        with Client("http://x", transport=answers.transport, **options) as client:
            called = call(client)
            return list(called) if isinstance(called, Iterator) else called

    async def in_a_loop(call: Callable[[Any], Any], answers: Answers, **options: Any) -> Any:
        async with AsyncClient("http://x", transport=answers.transport, **options) as client:
            called = call(client)
            if isinstance(called, AsyncIterator):
                return [item async for item in called]
            return await called

    if request.param is Client:
        return in_a_thread
    return lambda *asked, **options: asyncio.run(in_a_loop(*asked, **options))


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No retry waits; what would have been waited."""
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("kinlens.client.sleep", waits.append)
    monkeypatch.setattr("kinlens.client.async_sleep", note)
    return waits


def test_every_operation_of_the_service_has_a_method(shop) -> None:
    paths = shop.running.app.openapi()["paths"]
    operations = {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    assert operations - CALLS.keys() == IN_THE_BODY
    assert CALLS.keys() <= operations


@pytest.mark.parametrize("operation", CALLS)
def test_a_method_asks_for_its_operation(operation: str, ask) -> None:
    answers = Answers(problem(404))
    with pytest.raises(errors.NotFoundError, match="Do this"):
        ask(CALLS[operation], answers)
    [request] = answers.requests
    pattern = re.sub(r"\{\w+\}", "[^/]+", operation)
    assert re.fullmatch(pattern, f"{request.method} {request.url.path}")


def test_a_key_may_end_with_a_line_break_and_is_never_shown(ask) -> None:
    answers = Answers(problem(404))
    with pytest.raises(errors.NotFoundError):
        ask(lambda client: client.gallery("shop"), answers, key="kl_secret\n")
    assert answers.requests[0].headers["Authorization"] == "Bearer kl_secret"
    for odd in ("kl_se\ncret", "kl_sé"):
        with pytest.raises(errors.ArgumentError, match="copy it again") as refused:
            ask(lambda client: client.gallery("shop"), answers, key=odd)
        assert "kl_s" not in str(refused.value)


def test_both_clients_have_the_same_methods_with_the_same_help() -> None:
    def methods(cls: type) -> dict[str, Any]:
        found = inspect.getmembers(cls, inspect.isfunction)
        shown = {name: (inspect.signature(method), method.__doc__) for name, method in found}
        return {name: each for name, each in shown.items() if name[0] != "_"}

    assert methods(Client) == methods(AsyncClient)
    assert all(text for _, text in methods(Client).values())


def test_the_examples_in_the_help_of_both_clients_run(tmp_path, monkeypatch, closes) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shoe.jpg").write_bytes(encoded(photo(1)))
    names = {"Client": Client, "AsyncClient": AsyncClient, "asyncio": asyncio}
    shop = closes(start_shop(tmp_path / "state"))
    for cls in (Client, AsyncClient):  # the second example finds the item of the first
        text = inspect.getdoc(cls) or ""
        assert ">>>" in text
        text = text.replace("http://127.0.0.1:8000", shop.running.url)
        example = doctest.DocTestParser().get_doctest(text, names, cls.__name__, None, 0)
        assert doctest.DocTestRunner().run(example).failed == 0


def test_a_gallery_is_made_filled_searched_and_deleted(client, data, tmp_path) -> None:
    file = tmp_path / "0.png"
    file.write_bytes(data[0])
    assert client.create_gallery("life").managed
    answer = client.put("life", "a/0", file, {"price": 9.5, "sale": True})
    assert answer.items[0].status == "added"
    many = [NewItem("a/1", data[1], {"price": 20}), NewItem("b", b"no image")]
    answer = client.put_many("life", [*many, NewItem("c", io.BytesIO(data[2]), {"t": "x"})])
    assert [item.status for item in answer.items] == ["added", "failed", "added"]
    assert answer.items[1].problem.status == 415
    assert client.gallery("life").size == 3
    assert client.items("life", filter={"price": {"<": 10}}).total == 1
    assert [item.key for item in client.each_item("life", key_prefix="a/")] == ["a/0", "a/1"]
    first = next(client.each_item("life"))
    assert client.item("life", first.id) == first
    assert client.image("life", first.id) == data[0]
    for image in (data[1], tmp_path / "0.png", str(file), io.BytesIO(data[2])):
        assert client.search(image, gallery="life", k=2, exact=True).match
    assert client.search(gallery="life", positives=["a/0"], negatives=["c"]).hits[0].key == "a/1"
    windows = {"gallery": "life", "crops": "auto"}
    hits = client.search(data[1], **windows).hits
    assert {len(hit.view.crop or ()) for hit in hits} <= {0, 4}
    [batch] = client.search_batch([Query(data[1], windows)]).answers
    assert batch.answer.hits == hits
    queries = [Query(data[1], {"gallery": "life", "k": 1}), Query(b"", {"gallery": "life"})]
    assert [one.status for one in client.search_batch(queries).answers] == [200, 400]
    assert client.similar("life", first.id, k=1, filter="price > 0").hits[0].key == "a/1"
    assert client.patch("life", {"a/0": {"sale": None}}).changed == 1
    many = ["a/0", *(f"{n:0100}" for n in range(100))]
    assert client.remove("life", many, keep=["a/1"]).removed == 1
    assert [item.key for item in client.restore("life", many).items] == ["a/0"]
    assert client.remove("life", many).removed == 1
    assert client.remove_where("life", 't = "x"').removed == 1
    assert client.remove_item("life", client.items("life").items[0].id).removed == 1
    client.delete_gallery("life")
    with pytest.raises(errors.NotFoundError):
        client.gallery("life")


ERRORS = {
    401: errors.KeyNeededError,
    409: errors.ConflictError,
    413: errors.TooLargeError,
    415: errors.UnsupportedError,
    422: errors.InvalidError,
    418: errors.ProblemError,
    502: errors.ServiceError,
}


@pytest.mark.parametrize("status", ERRORS)
def test_a_problem_is_an_error_with_its_fields(status: int, ask) -> None:
    answers = Answers(problem(status))
    with pytest.raises(errors.ProblemError) as caught:
        ask(lambda c: c.galleries(), answers)
    error = caught.value
    assert type(error) is ERRORS[status]
    assert (error.status, error.title, error.detail) == (status, "X", "Do this.")
    assert (error.type, error.request_id) == ("urn:kinlens:problem:x", "r1")
    assert len(answers.requests) == 1


def test_a_busy_service_is_retried_after_its_retry_after_a_few_times(waits, ask) -> None:
    busy = [problem(503, **{"retry-after": "3"}), problem(429, **{"retry-after": "7"})]
    answers = Answers(*busy, httpx.Response(200, json={"bundle_id": "b", "galleries": []}))
    assert ask(lambda c: c.galleries(), answers).bundle_id == "b"
    assert waits == [3.0, 7.0]
    waits.clear()
    answers = Answers(problem(429, **{"retry-after": "9999"}))
    with pytest.raises(errors.RateLimitedError) as caught:
        ask(lambda c: c.search(b"x"), answers, retries=3)
    assert caught.value.retry_after_s == 9999
    assert waits == [30.0] * 3
    assert len(answers.requests) == 4
    assert all(b'filename="image"' in request.content for request in answers.requests)


@pytest.mark.parametrize(
    "operation",
    [
        *("POST /galleries", "POST /jobs/train", "DELETE /galleries/{name}"),
        "DELETE /galleries/{name}/items/{item_id}",
    ],
)
def test_requests_that_are_not_idempotent_are_sent_once(operation: str, ask) -> None:
    for answer in (problem(503), httpx.ReadTimeout("slow")):
        answers = Answers(answer)
        with pytest.raises((errors.UnavailableError, errors.ConnectionFailedError)):
            ask(CALLS[operation], answers)
        assert len(answers.requests) == 1


def test_no_service_and_the_answer_of_another_service_are_errors(ask) -> None:
    answers = Answers(httpx.ConnectError("refused"))
    with pytest.raises(errors.ConnectionFailedError, match=r"GET http://x/live got no.*refused"):
        ask(lambda c: c.live(), answers, retries=1)
    assert len(answers.requests) == 2
    for status in (200, 404):
        with pytest.raises(errors.AnswerError):
            ask(lambda c: c.galleries(), Answers(httpx.Response(status, text="<html>")))


def test_what_is_no_answer_of_kinlens_is_named(ask) -> None:
    html = {"content-type": "text/html"}
    cases: dict[str, Any] = {
        "a redirect to https://login": httpx.Response(302, headers={"location": "https://login"}),
        "text/html": httpx.Response(200, text="<html>", headers=html),
        "not valid JSON": httpx.Response(200, text='{"galleries": ['),
        "its field 'bundle_id' is missing": httpx.Response(200, json={}),
        "is damaged": httpx.DecodingError("incorrect header check"),
    }
    for match, response in cases.items():
        with pytest.raises(errors.AnswerError, match=match):
            ask(lambda c: c.galleries(), Answers(response))
    with pytest.raises(errors.AnswerError, match="login page"):
        ask(lambda c: c.image("g", 1), Answers(httpx.Response(200, text="<html>", headers=html)))


NO_FILE = "/opt/none/cacert.pem"
ENVIRONMENTS: dict[str, tuple[dict[str, str], str, str]] = {
    "a SOCKS proxy": ({"ALL_PROXY": "socks5://u:p@127.0.0.1:9"}, "http", "pip install 'httpx"),
    "a SOCKS proxy of a desktop": ({"all_proxy": "socks://127.0.0.1:9/"}, "http", "scheme socks;"),
    "a dead proxy": ({"HTTP_PROXY": "http://u:p@127.0.0.1:9"}, "http", "proxy http://127.0.0.1:9 "),
    "no certificates": ({"SSL_CERT_FILE": NO_FILE}, "https", f"SSL_CERT_FILE = {NO_FILE} does not"),
    "no folder of them": ({"SSL_CERT_DIR": NO_FILE}, "https", "CERT"),
}
NAMES = [f"{name}_PROXY" for name in ("HTTP", "HTTPS", "ALL", "NO")] + ["SSL_CERT_FILE"]


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*NAMES, "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_setting_of_the_environment_is_not_in_the_way_or_is_named(
    name: str, shop, plain_environment: pytest.MonkeyPatch
) -> None:
    variables, scheme, match = ENVIRONMENTS[name]
    for variable, value in variables.items():
        plain_environment.setenv(variable, value)
    url = shop.running.url
    if scheme == "http":
        with pytest.raises(errors.ClientError, match=re.escape(match)) as caught:
            Client(url, retries=0).live()
        assert "NO_PROXY=127.0.0.1" in str(caught.value)
        assert "u:p" not in str(caught.value)
        plain_environment.setenv("NO_PROXY", "example.org,127.0.0.1")
    elif "FILE" in match:
        with pytest.raises(errors.ArgumentError, match=re.escape(match)):
            Client("https://localhost:1", retries=0)
    with Client(url) as client:
        client.live()
    asyncio.run(_live(url))


async def _live(url: str) -> None:
    async with AsyncClient(url) as client:
        await client.live()


WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no scheme": ({"url": "localhost:8000"}, "http://localhost:8000"),
    "no host": ({"url": "http://"}, "needs a host"),
    "a port": ({"url": "http://x:99999"}, "99999"),
    "port 0": ({"url": "http://x:0"}, "1 to 65535"),
    "no string": ({"url": None}, "url must be a string"),
    "a bracket": ({"url": "http://[::1"}, "not a valid URL"),
    "a letter": ({"key": "kl_\xe9"}, "copy it again"),
    "a line break": ({"key": "kl_\nx"}, "copy it again"),
    "bytes": ({"key": b"kl_"}, "key must be a string"),
    "text as time": ({"timeout_s": "3"}, "timeout_s"),
    "no time": ({"timeout_s": 0}, "timeout_s"),
    "NaN": ({"timeout_s": float("nan")}, "timeout_s"),
    "retries": ({"retries": "3"}, "retries"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_a_wrong_argument_of_a_client_is_named(name: str) -> None:
    arguments, match = WRONG_ARGUMENTS[name]
    for kind in (Client, AsyncClient):
        with pytest.raises(errors.ArgumentError, match=re.escape(match)):
            kind(**arguments)


def test_the_ways_to_get_no_answer_are_connection_errors() -> None:
    for failure in (
        httpx.ConnectError("[Errno -2] Name or service not known"),
        httpx.ReadTimeout(""),
        httpx.RemoteProtocolError("peer closed connection"),
        RuntimeError("Event loop is closed"),
        ConnectionResetError("reset"),
    ):
        client = Client("http://x", retries=0, transport=httpx.MockTransport(raising(failure)))
        with pytest.raises(errors.ConnectionFailedError, match=r"GET http://x/live got no answer"):
            client.live()
    client.close()
    with pytest.raises(errors.ArgumentError, match="closed"):
        client.live()


def raising(failure: Exception) -> Callable[[httpx.Request], httpx.Response]:
    def answer(_: httpx.Request) -> httpx.Response:
        raise failure

    return answer


def test_images_of_pillow_and_arrays_are_sent_upright_as_png(client) -> None:
    client.create_gallery("pixels")
    shown = photo(3)
    turned = shown.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[274] = 6  # a quarter turn to the right shows it upright
    sent = {"pillow": shown, "array": np.asarray(shown), "turned": turned}
    sent |= {"alpha": shown.convert("RGBA"), "cmyk": shown.convert("CMYK")}
    for key, image in sent.items():
        assert client.put("pixels", key, image).added == 1
        with Image.open(io.BytesIO(client.image("pixels", key))) as stored:
            pixels = np.asarray(ImageOps.exif_transpose(stored).convert("RGB")).astype(int)
        assert np.abs(pixels - np.asarray(shown)).max() <= (3 if key == "cmyk" else 0)
    client.delete_gallery("pixels")
    for wrong in (np.zeros((4, 4, 2), "u1"), np.zeros((4, 4, 3)), object()):
        with pytest.raises(errors.ArgumentError, match=r"array|image must be"):
            client.search(wrong)


def job(state: str, done: int) -> httpx.Response:
    known = {"id": JOB, "kind": "compact", "gallery": "g", "state": state, "done": done, "by": "me"}
    known |= {"step": "s", "created_at": "2026-01-01T00:00:00.000+00:00", "params": {}}
    unknown = dict.fromkeys(("total", "started_at", "ended_at", "error", "report"))
    return httpx.Response(200, json=known | unknown)


def test_a_job_is_waited_for_with_its_steps_and_its_failure(ask) -> None:
    answers = Answers(*(job("running", n // 2) for n in range(6)), job("succeeded", 9))
    seen: list[int] = []
    ended = ask(lambda c: c.wait(JOB, lambda one: seen.append(one.done)), answers)
    assert (ended.state, seen) == ("succeeded", [0, 1, 2, 9])
    with pytest.raises(errors.JobFailedError) as caught:
        ask(lambda c: c.wait(JOB), Answers(job("failed", 3)))
    assert caught.value.job.done == 3
    with pytest.raises(errors.JobTimeoutError, match="still running"):
        ask(lambda c: c.wait(JOB, timeout_s=0), Answers(job("running", 3)))


def test_each_item_is_yielded_once_despite_removals(client, shop, data) -> None:
    keys = [f"w/{n:03}" for n in range(205)]
    items = [NewItem(key, data[0], {"n": 1}) for key in keys]
    client.create_gallery("walk")
    client.put_many("walk", items)
    seen = []
    for item in client.each_item("walk", filter={"n": 1}, key_prefix="w/"):
        seen.append(item.key)
        client.remove("walk", [item.key])
    assert seen == keys


def test_items_of_another_generation_are_an_error(ask) -> None:
    def page(first: int, generation: str) -> httpx.Response:
        item = {"attributes": {}, "sha256": "0" * 64, "path": "", "format": "PNG", "image": ""}
        items = [item | {"id": first + n, "key": f"k{first + n}"} for n in range(200)]
        content = {"total": 1000, "offset": 0, "items": items, "last": 999}
        return httpx.Response(200, json=content | {"generation": generation})

    with pytest.raises(errors.GalleryReplacedError):
        ask(lambda c: c.each_item("g"), Answers(page(0, "a" * 12), page(200, "b" * 12)))


def keys_of(request: httpx.Request) -> list[str]:
    return [key.decode() for key in re.findall(rb'name="key"\r\n\r\n(\S+)\r\n', request.content)]


def added(request: httpx.Request) -> httpx.Response:
    """The answer to a put of new items."""
    keys = keys_of(request)
    items = [{"key": key, "status": "added", "id": 1, "problem": None} for key in keys]
    counts = {"added": len(keys), "replaced": 0, "updated": 0, "unchanged": 0, "failed": 0}
    return httpx.Response(200, json=counts | {"items": items, "version": f"after {keys[-1]}"})


def test_many_items_are_put_in_requests_of_allowed_size(ask) -> None:
    keys = [f"k{n}" for n in range(600)]
    items = (NewItem(key, b"x") for key in keys)
    answers = Answers(added)
    reported: list[int] = []
    note = lambda done, part: reported.append(done)
    answer = ask(lambda c: c.put_many("g", items, note), answers)
    assert [len(keys_of(request)) for request in answers.requests] == [256, 256, 88]
    assert ([item.key for item in answer.items], answer.added) == (keys, 600)
    assert (reported, answer.version) == ([256, 512, 600], "after k599")


def test_large_images_are_read_and_sent_a_few_at_a_time(ask) -> None:
    answers = Answers(added)
    ahead: list[int] = []

    class File(io.BytesIO):
        def read(self, *size: Any) -> bytes:
            ahead.append(sum(len(keys_of(request)) for request in answers.requests))
            return super().read(*size)

    sizes = [12, 12, 12, 40, 1, 1]
    items = [NewItem(f"k{n}", File(bytes(size * 2**20))) for n, size in enumerate(sizes)]
    ask(lambda c: c.put_many("g", items), answers)
    assert [" ".join(keys_of(one)) for one in answers.requests] == ["k0 k1", "k2", "k3", "k4 k5"]
    assert [len(one.content) <= 32 * 2**20 for one in answers.requests] == [True, True, False, True]
    assert ahead == [0, 0, 0, 2, 3, 4]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda c: c.search("/nope.jpg"), errors.ImageReadError),
        (lambda c: c.search(io.StringIO("x")), errors.ArgumentError),
        (lambda c: c.put("g", "k", b"x", {"a": float("nan")}), errors.ArgumentError),
        (lambda c: c.items("g", filter={"a": object()}), errors.ArgumentError),
        (lambda c: c.gallery("\ud800"), errors.ArgumentError),
        (lambda c: c.put_many("g", [NewItem("k", b"x")], per_request=0), errors.ArgumentError),
        (lambda c: c.put("g", "k", b"x", {"a": pd.NaT}), errors.ArgumentError),
        (lambda c: c.put("g", "k", b"x", {"a": np.timedelta64(1, "s")}), errors.ArgumentError),
        (lambda c: c.put("g", 7, b"x"), errors.ArgumentError),
        (lambda c: c.put("g", "k"), errors.ArgumentError),
        (lambda c: c.put("g", "k", b"x", vector=[1.0]), errors.ArgumentError),
        (lambda c: c.put("g", "k", vector=7), errors.ArgumentError),
        (lambda c: c.search(b"x", crops=[1]), errors.ArgumentError),
        (lambda c: c.search(b"x", crops="all"), errors.ArgumentError),
        (lambda c: c.search(positives="k"), errors.ArgumentError),
        (lambda c: c.search(vectors=[[0.6, 0.8]]), errors.ArgumentError),
        (lambda c: c.search(vectors=[{"vector": ["a"]}]), errors.ArgumentError),
        (lambda c: c.search(vectors=[{"vector": [1e300]}]), errors.ArgumentError),
    ],
)
def test_what_cannot_be_sent_is_a_client_error(call, expected, ask) -> None:
    answers = Answers(problem(404))
    with pytest.raises(errors.ClientError) as caught:
        ask(call, answers)
    assert type(caught.value) is expected
    assert answers.requests == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("nope.jpg", "does not exist"),
        ("file/x.jpg", "does not exist"),
        ("", "is a folder"),
        (f"{'x' * 300}.jpg", "cannot be read: File name too long"),
        ("a\0b", "cannot be read"),
    ],
)
def test_a_path_that_cannot_be_read_is_named_with_its_fault(name, fault, ask, tmp_path) -> None:
    (tmp_path / "file").touch()
    path = f"{tmp_path}/{name}".rstrip("/")
    for call in (
        lambda c: c.search(path),
        lambda c: c.search([b"x", Path(path)]),
        lambda c: c.search_batch([Query(path)]),
        lambda c: c.put("g", "k", path),
        lambda c: c.put_many("g", [NewItem("k", path)]),
    ):
        with pytest.raises(errors.ImageReadError, match=fault) as caught:
            ask(call, Answers(problem(404)))
        assert repr(path)[:150] in str(caught.value)
        assert "Errno" not in str(caught.value)
    for opening in (kinlens.load_bundle, kinlens.open_gallery):
        with pytest.raises(KinlensError) as refused:
            opening(path)
        assert str(tmp_path) in str(refused.value)
        assert "Errno" not in str(refused.value)
        with pytest.raises(KinlensError, match="is a file"):
            opening(tmp_path / "file")


def test_keys_with_scopes_of_a_later_version_are_read() -> None:
    later = ["search", "later"]
    access = {"key": "till", "scopes": later, "galleries": None, "filter": None}
    times = dict.fromkeys(("expires_at", "revoked_at", "rotated_at", "old_until"))
    limits = dict.fromkeys(("galleries", "filter", "rate", "daily_units"))
    key = {"id": "1", "name": "till", "scopes": later, "state": "active", **times, **limits}
    keys = {"keys": [key | {"created_at": "2030-01-01T00:00:00Z"}]}
    answers = {"/access": access, "/keys": keys}
    transport = httpx.MockTransport(lambda asked: httpx.Response(200, json=answers[asked.url.path]))
    with Client("http://shop", transport=transport) as client:
        assert client.access().scopes == client.keys().keys[0].scopes == later
