"""Pages without a key or a rate limit are cheap to request often."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kinlens.service.http import openapi
from kinlens.service.observe import metrics


class Counted:
    """Calls `work`, and counts the calls, apart those that held up the event loop."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.calls = self.on_the_loop = 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        try:
            asyncio.get_running_loop()
            self.on_the_loop += 1
        except RuntimeError:  # a thread without a loop
            pass
        return self._work(*given, **named)


def ask_often(url: str, path: str) -> list[httpx.Response]:
    """Eighty answers, asked for by four clients at once."""

    def ask(_: int) -> list[httpx.Response]:
        with httpx.Client(base_url=url) as client:
            return [client.get(path) for _ in range(20)]

    with ThreadPoolExecutor(4) as clients:
        return [answer for answers in clients.map(ask, range(4)) for answer in answers]


@pytest.mark.parametrize("is_shared", [False, True])
def test_scrapes_share_one_rendering(start_service, tmp_path, monkeypatch, is_shared: bool) -> None:
    service = start_service()
    if is_shared:  # as of several processes, whose files are all read for a rendering
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    rendered = Counted(metrics.render)
    monkeypatch.setattr(metrics, "render", rendered)
    started = time.monotonic()
    answers = ask_often(service.url, "/metrics")
    seconds = time.monotonic() - started
    assert {answer.status_code for answer in answers} == {200}
    assert all(b"kinlens_gallery_items" in answer.content for answer in answers)
    assert 1 <= rendered.calls <= seconds + 1
    assert rendered.on_the_loop == 0


def test_the_document_and_its_page_are_rendered_once(start_service, monkeypatch) -> None:
    made = Counted(openapi.render_docs), Counted(openapi.get_openapi)
    monkeypatch.setattr(openapi, "render_docs", made[0])
    monkeypatch.setattr(openapi, "get_openapi", made[1])
    service = start_service()
    for path in ("/docs", "/openapi.json"):
        answers = ask_often(service.url, path)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
    assert [one.calls for one in made] == [1, 1]
    assert [one.on_the_loop for one in made] == [0, 0]


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_a_known_document_is_304(running_service, path: str) -> None:
    answer = running_service.client.get(path)
    known = {"If-None-Match": answer.headers["etag"]}
    again = running_service.client.get(path, headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == answer.headers["etag"]
    assert running_service.client.get(path, headers={"If-None-Match": '"x"'}).status_code == 200
