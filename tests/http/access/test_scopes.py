"""Every route and every kind of caller, in a table; and secrets that are never shown."""

import json
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from tests.support.own_process import own_process
from tests.support.seams import KeyStore, RouteTable
from tests.support.servers import Running
from tests.tiny import encoded, photo

FREE, SEARCH, WRITE, ADMIN = None, "search", "write", "admin"
SCOPES: dict[str | None, str] = {
    FREE: """
        GET /               HEAD /              GET /admin          HEAD /admin
        GET /ui/            HEAD /ui/           GET /live           GET /ready
        GET /startup        GET /metrics        GET /docs           HEAD /docs
        GET /openapi.json   HEAD /openapi.json
    """,
    SEARCH: """
        POST /search        POST /search/batch
        GET /galleries      GET /galleries/{}   GET /galleries/{}/items
        GET /galleries/{}/items/{}              GET /galleries/{}/items/{}/image
        GET /galleries/{}/items/{}/similar      POST /galleries/{}/items/{}/explain
        POST /feedback
        GET /galleries/{}/items/by-key/{}       GET /galleries/{}/items/by-key/{}/image
        GET /galleries/{}/items/by-key/{}/similar
        POST /galleries/{}/items/by-key/{}/explain
    """,
    WRITE: """
        PUT /galleries/{}/items                 PATCH /galleries/{}/items
        DELETE /galleries/{}/items              POST /galleries/{}/items/delete
        POST /galleries/{}/items/restore
        DELETE /galleries/{}/items/{}           GET /galleries/{}/golden
        PATCH /galleries/{}/items/by-key/{}     DELETE /galleries/{}/items/by-key/{}
        POST /galleries/{}/golden               DELETE /galleries/{}/golden/{}
        GET /galleries/{}/golden/{}/image       POST /galleries/{}/golden/run
        GET /galleries/{}/golden/runs
    """,
    ADMIN: """
        GET /galleries/{}/feedback
        POST /galleries     DELETE /galleries/{}                    POST /galleries/{}/compact
        POST /galleries/{}/swap                 POST /galleries/{}/rebuild
        POST /jobs/train    GET /jobs           GET /jobs/{}        GET /jobs/{}/log
        GET /galleries/{}/duplicates            GET /jobs/options
        POST /jobs/{}/cancel                    POST /jobs/{}/swap  POST /jobs/{}/resume
        GET /keys           POST /keys          DELETE /keys/{}     POST /keys/{}/rotate
        GET /audit
    """,
}
EXPECTED: dict[tuple[str, str], str | None] = {
    (method, path): scope
    for scope, text in SCOPES.items()
    for method, path in re.findall(r"([A-Z]+) (/\S*)", text)
}
ORDER = list(SCOPES)
CALLERS = ("none", "search", "write", "admin", "revoked", "expired", "garbage")
REFUSED = {401, 403}


def plain(path: str) -> str:
    """A template without the names of its parameters."""
    parts = ["{}" if part.startswith("{") else part for part in path.split("/")]
    return "/".join(parts)


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "state" / "keys.json")


@pytest.fixture
def texts(store: KeyStore) -> dict[str, str]:
    """What each caller sends; nothing for `none`."""
    day = timedelta(days=1)
    ends = datetime.now(UTC) + day
    sent = {name: store.create(name, [name], ends) for name in ("search", "write", "admin")}
    sent |= {"expired": store.create("expired", ["admin"], ends - 2 * day)}
    sent |= {"revoked": store.create("revoked", ["admin"])}
    sent |= {"garbage": "kl_12345678_garbage", "none": ""}
    store.revoke("revoked")
    return sent


def ask(service: Running, method: str, path: str, headers: dict[str, str] | None = None) -> Any:
    return service.client.request(method, path, headers=headers or {})


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"} if text else {}


def refusal(caller: str, scope: str | None) -> int | None:
    """The status that keeps a caller out; nothing if it is let in."""
    if scope is FREE:
        return None
    if caller in ("revoked", "expired", "garbage"):
        return 401
    if caller == "none":
        return None if scope == SEARCH else 401
    return None if ORDER.index(caller) >= ORDER.index(scope) else 403


def test_every_route_answers_every_caller_as_the_table_states(start_service, store, texts) -> None:
    """Each request comes from an address of its own, since wrong keys are limited by address."""
    service = start_service(state=store.path.parent, trusted_proxies=("127.0.0.1",))
    for number, (caller, text) in enumerate(texts.items()):
        ways = (bearer(text), {"X-API-Key": text} if text else {})
        for place, ((method, path), scope) in enumerate(EXPECTED.items()):
            origin = {"x-forwarded-for": f"203.0.{number}.{place}"}
            answer = ask(service, method, path.replace("{}", "17"), ways[place % 2] | origin)
            expected, found = refusal(caller, scope), answer.status_code
            named = (caller, method, path)
            assert found == expected or (expected is None and found not in REFUSED), named
            if found == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["type"] == "urn:kinlens:problem:key-needed"
            if found == 403:
                assert answer.json()["type"] == "urn:kinlens:problem:scope-needed"
                assert f"this needs {scope}" in answer.json()["detail"]
            assert not text or text not in answer.text


def test_every_route_requires_the_scope_of_the_table(running_service) -> None:
    served = RouteTable(running_service.app.routes).served
    found = {(route.method, plain(route.template)): route.rule.scope for route in served}
    assert {address: EXPECTED[address] for address in found} == found
    assert EXPECTED.items() - found.items() == set(), "nothing of the table is without a route"


def test_without_keys_changes_are_closed_with_a_hint(start_service, store) -> None:
    for settings, hint in (({"state": store.path.parent}, "keys create"), ({}, "--state DIR")):
        service = start_service(**settings)
        put, job = ask(service, "PUT", "/galleries/a/items"), ask(service, "GET", "/jobs")
        assert (put.status_code, job.status_code) == (403, 403)
        assert hint in put.json()["detail"]
        assert "admin" in job.json()["detail"]
    store.create("a", ["admin"])
    store.revoke("a")
    service = start_service(state=store.path.parent)
    assert ask(service, "PUT", "/galleries/a/items").status_code == 403


def test_without_anonymous_scopes_a_search_needs_a_key(start_service, store, texts) -> None:
    service = start_service(state=store.path.parent, anonymous_scopes=())
    callers = ("none", "search", "garbage")
    statuses = [ask(service, "GET", "/galleries", bearer(texts[n])).status_code for n in callers]
    assert statuses == [401, 200, 401]
    assert ask(service, "GET", "/live").status_code == 200


def test_anonymous_scopes_do_not_apply_to_pages_of_other_sites(start_service, tmp_path) -> None:
    evil = "https://evil.example"
    service = start_service(state=tmp_path, anonymous_scopes=("admin",))

    def compact(service: Running, **headers: str) -> Any:
        return ask(service, "POST", "/galleries/a/compact", headers)

    for headers in ({}, {"origin": service.url}):
        assert compact(service, **headers).status_code == 404
    for origin in (evil, "null", "http://["):
        assert compact(service, origin=origin).status_code == 403
    assert evil in compact(service, origin=evil).json()["detail"]
    assert ask(service, "GET", "/galleries", {"origin": evil}).status_code == 200
    allowing = start_service(state=tmp_path, anonymous_scopes=("admin",), cors_origins=(evil,))
    assert compact(allowing, origin=evil).status_code == 404


def test_two_keys_are_refused_and_other_schemes_ignored(start_service, store, texts) -> None:
    service = start_service(state=store.path.parent)
    both = bearer(texts["admin"]) | {"x-api-key": texts["search"]}
    same = bearer(texts["admin"]) | {"x-api-key": texts["admin"]}
    basic = {"authorization": "Basic dXNlcjpodW50ZXIy"}
    with_basic = basic | {"x-api-key": texts["admin"]}
    lower = {"authorization": f"bearer {texts['admin']}"}
    sent = (both, same, basic, with_basic, lower)
    statuses = [ask(service, "GET", "/jobs", headers).status_code for headers in sent]
    assert statuses == [401, 200, 401, 200, 200]


def test_a_damaged_key_file_is_503_and_closes_all_changes(start_service, store, texts) -> None:
    service = start_service(state=store.path.parent)
    store.path.write_text("{damaged")
    with structlog.testing.capture_logs() as events:
        found = [ask(service, "PUT", "/galleries/a/items", bearer(texts[n])) for n in CALLERS]
    found.append(ask(service, "GET", "/jobs"))
    assert {answer.status_code for answer in found} == {503}
    assert ask(service, "GET", "/galleries").status_code == 200
    assert found[0].json()["type"] == "urn:kinlens:problem:keys-unreadable"
    assert str(store.path) not in found[0].text
    assert any(str(store.path) in str(event) for event in events)


def test_only_wrong_keys_are_limited_by_address(start_service, store, texts) -> None:
    service = start_service(state=store.path.parent)
    wrong = [ask(service, "GET", "/galleries", bearer("kl_guess")) for _ in range(40)]
    statuses = [answer.status_code for answer in wrong]
    assert statuses[:30] == [401] * 30
    assert 429 in statuses
    assert 1 <= int(wrong[statuses.index(429)].headers["retry-after"]) <= 60
    for text in (texts["search"], ""):
        assert ask(service, "GET", "/galleries", bearer(text)).status_code == 200


def test_a_wrong_key_above_its_limit_reads_no_file(start_service, store, monkeypatch) -> None:
    service = start_service(state=store.path.parent)
    reads: list[float] = []
    read = store.list
    monkeypatch.setattr(
        service.runtime.keys, "list", lambda: reads.append(time.monotonic()) or read()
    )
    wrong = f"kl_{'0' * 8}_{'0' * 64}"
    while ask(service, "GET", "/galleries", bearer(wrong)).status_code == 401:
        pass
    began, before = time.monotonic(), len(reads)
    for _ in range(80):
        ask(service, "GET", "/galleries", bearer(wrong))
    seconds = time.monotonic() - began
    assert len(reads) - before <= seconds + 5, "one a second, and one for each that is let in"


def test_unknown_paths_reveal_nothing_about_keys(start_service, store, texts) -> None:
    service = start_service(state=store.path.parent)
    for method, path, status in (("GET", "/nowhere", 404), ("DELETE", "/search", 405)):
        sent = ({}, bearer("kl_12345678_x"), bearer(texts["search"]))
        shown = [ask(service, method, path, headers).json() for headers in sent]
        assert [problem["status"] for problem in shown] == [status] * 3
        assert len({problem["detail"] for problem in shown}) == 1


def test_an_upload_may_be_refused_while_it_is_sent(start_service, tmp_path) -> None:
    service = start_service(state=tmp_path)
    headers = {"authorization": "Bearer kl_12345678_x"}
    answer = service.client.post("/search", content=bytes(5 * 2**20), headers=headers)
    assert answer.status_code == 401
    assert answer.headers["connection"] == "close"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


PASSWORD = "hunter2"
WRONG = "kl_0badc0de_wrong"


@pytest.mark.redis
def test_no_secret_is_in_any_answer_or_log(tiny_settings, tmp_path, redis_server) -> None:
    store = KeyStore(tmp_path / "state" / "keys.json")
    text = store.create("till", ["search"])
    with own_process(
        tmp_path / "log",
        **tiny_settings,
        state=tmp_path / "state",
        redis_url=f"redis://user:{PASSWORD}@127.0.0.1:{redis_server.port}/0",
        rate_limit_per_key="3/minute",
        log_level="debug",
    ) as process:
        seen = used(process.url, text)
        store.path.write_text(f'{{"keys": "{PASSWORD}"}}')  # damaged, with something in it
        seen += used(process.url, text)
    log = (tmp_path / "log").read_text("utf-8")
    events = [json.loads(line) for line in log.splitlines()]
    assert {event["event"] for event in events} >= {"request", "keys cannot be read"}
    assert any(event.get("principal") == "till" for event in events)
    for secret in (text, text.rsplit("_", 1)[1], PASSWORD, WRONG):
        assert secret not in log
        assert all(secret not in answer for answer in seen)


def used(url: str, text: str) -> list[str]:
    """Right, wrong and odd requests; everything that was answered."""
    seen = []
    files = {"image": encoded(photo(0))}
    with httpx.Client(base_url=url, timeout=60) as client:
        for key in [text] * 4 + [WRONG, f"{text}x", f"{text} {text}"]:
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                for method, path in (("POST", "/search"), ("PUT", "/galleries/shop/items")):
                    answer = client.request(method, path, headers=headers, files=files)
                    seen.append(answer.text + str(answer.headers))
        seen += [client.get(f"/nowhere?key={text}").text.replace(f"?key={text}", "")]
        for path in ("/live", "/ready", "/metrics", "/openapi.json", "/docs", "/galleries"):
            answer = client.get(path, headers={"x-api-key": text})
            seen.append(answer.text + str(answer.headers))
    return seen
