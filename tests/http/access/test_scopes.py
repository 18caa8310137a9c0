"""Every route, odd spelling and kind of caller; and secrets that are never shown."""

import contextlib
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from fastapi import APIRouter
from fastapi.testclient import TestClient

from kinlens.embedder.errors import StateError
from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.settings import Settings
from tests.support.own_process import own_process
from tests.support.routes import FREE, RIGHTS, rights_of
from tests.support.seams import KeyStore, Route
from tests.support.servers import DEFAULTS, Running, create_app, run
from tests.tiny import encoded, photo

GRANTED = {
    "search": {"search"},
    "write": {"search", "write"},
    "admin": {"search", "write", "admin", "embed"},
    "embed": {"embed"},
}
INVALID = ("revoked", "expired", "garbage")


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "state" / "keys.json")


@pytest.fixture
def texts(store: KeyStore) -> dict[str, str]:
    """What each caller sends; nothing for `none`."""
    day = timedelta(days=1)
    ends = datetime.now(UTC) + day
    sent = {name: store.create(name, [name], ends) for name in GRANTED}
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
    if caller in INVALID:
        return 401
    if caller == "none":
        return None if scope == "search" else 401
    return None if scope in GRANTED[caller] else 403


def test_every_route_answers_every_caller_as_the_table_states(start_service, store, texts) -> None:
    """Each request comes from an address of its own, since wrong keys are limited by address."""
    service = start_service(state=store.path.parent, trusted_proxies=("127.0.0.1",))
    assert rights_of(service.app) == RIGHTS
    for number, kind in enumerate(("none", *GRANTED, "invalid")):
        for place, (route, right) in enumerate(RIGHTS.items()):
            caller = INVALID[place % 3] if kind == "invalid" else kind
            text = texts[caller]
            way = {"X-API-Key": text} if text and place % 2 else bearer(text)
            origin = {"x-forwarded-for": f"203.0.{number}.{place}"}
            method, path = re.sub(r"\{[^}]*\}", "17", route).split()
            answer = ask(service, method, path, way | origin)
            expected, found = refusal(caller, right.scope), answer.status_code
            named = (caller, route)
            assert found == expected or (expected is None and found not in {401, 403}), named
            if found == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["type"] == "urn:kinlens:problem:key-needed"
            if found == 403:
                assert answer.json()["type"] == "urn:kinlens:problem:scope-needed"
                assert f"this needs {right.scope}" in answer.json()["detail"]
            assert not text or text not in answer.text


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


def test_closed_to_callers_without_a_key_health_and_metrics_name_nothing(
    start_service, store, texts
) -> None:
    service = start_service(state=store.path.parent, anonymous_scopes=())
    assert ask(service, "GET", "/ready").json() == {"status": "ready"}
    assert ask(service, "GET", "/ready?gallery=shop").status_code == 401
    assert ask(service, "GET", "/ready?gallery=nowhere").status_code == 401
    assert ask(service, "GET", "/metrics").status_code == 401
    assert [ask(service, "GET", path).status_code for path in ("/live", "/startup")] == [200, 200]
    key = bearer(texts["search"])
    assert "shop" in ask(service, "GET", "/ready", key).json()["galleries"]
    assert ask(service, "GET", "/ready?gallery=shop", key).status_code == 200
    assert "kinlens_requests_total" in ask(service, "GET", "/metrics", key).text


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


@pytest.mark.parametrize(
    "content", [b"", b"{damaged", b'{"keys": [{}]}', b'{"schema_version": 2}', b"\xff\xfe"]
)
def test_a_damaged_key_file_is_503_and_closes_all_changes(
    start_service, store, texts, content: bytes
) -> None:
    service = start_service(state=store.path.parent)
    store.path.write_bytes(content)
    with structlog.testing.capture_logs() as events:
        found = [ask(service, "PUT", "/galleries/a/items", bearer(texts[n])) for n in texts]
    assert {answer.status_code for answer in found} == {503}
    assert ask(service, "GET", "/galleries").status_code == 200
    assert found[0].json()["type"] == "urn:kinlens:problem:keys-unreadable"
    assert str(store.path) not in found[0].text
    assert any(str(store.path) in str(event) for event in events)
    with pytest.raises(StateError, match=r"keys\.json"):
        store.create("new", ["admin"])
    assert store.path.read_bytes() == content, "a file that can be repaired is not overwritten"


def test_only_wrong_keys_are_limited_by_address(start_service, store, texts) -> None:
    service = start_service(state=store.path.parent)
    wrong = [ask(service, "GET", "/galleries", bearer("kl_guess")) for _ in range(40)]
    statuses = [answer.status_code for answer in wrong]
    assert statuses[:30] == [401] * 30
    assert 429 in statuses
    assert 1 <= int(wrong[statuses.index(429)].headers["retry-after"]) <= 60
    for text in (texts["search"], ""):
        assert ask(service, "GET", "/galleries", bearer(text)).status_code == 200


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


ODD = ("%0A", "%0D", "%00", "%0D%0A", "%C2%85", "/", "%2F", "//", "/%0A", "%0Ax", "%20", "?%0A")


def send_as_is(service: Running, method: str, target: str) -> tuple[int, bytes]:
    """Status and body, of a target that is sent just as it is."""
    body = b'{"name": "evil"}'
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with service.connect(head.encode() + body) as connection:
        answer = connection.makefile("rb").read()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


def variants(template: str) -> list[str]:
    path = "/".join("7" if part.startswith("{") else part for part in template.split("/"))
    slashed = ["/" + path, path.replace("/", "//"), path.upper(), "/%2F" + path[1:], "/." + path]
    encoded = "/" + "%2F".join(path[1:].split("/"))
    return [path, encoded, "/%0A" + path[1:], *slashed, *(path + odd for odd in ODD)]


def test_no_spelling_of_a_closed_path_is_open(tmp_path) -> None:
    settings = Settings(**DEFAULTS | {"state": tmp_path, "anonymous_scopes": ()})
    KeyStore(tmp_path / "keys.json").create("owner", ["admin"])
    seen = set()
    with contextlib.closing(run(create_app(settings, FakeEmbedder(), {}))) as service:
        for route in (route for route, right in RIGHTS.items() if right.scope is not FREE):
            method, template = route.split()
            first, *others = variants(template)
            assert send_as_is(service, method, first)[0] == 401
            for target in others:
                status, body = send_as_is(service, method, target)
                seen.add(status)
                assert status in (400, 401, 404, 405), (method, target, status, body)
        assert {400, 401, 404} <= seen
        assert service.runtime.registry.names() == []


def test_an_app_with_a_route_without_a_rule_does_not_start(tmp_path) -> None:
    app = create_app(Settings(**DEFAULTS | {"state": tmp_path}), FakeEmbedder(), {})
    with pytest.raises(LookupError, match="/export has no rule"):
        APIRouter(route_class=Route).add_api_route("/export", lambda: "all of it")
    app.add_api_route("/export", lambda: "all of it")
    with pytest.raises(LookupError, match="/export"), TestClient(app):
        pass


@pytest.mark.parametrize("path", ["/galleries/", "/ui", "/live/"])
def test_a_wrong_slash_is_404_and_never_redirected(running_service, path: str) -> None:
    answer = running_service.client.get(path)
    assert answer.status_code == 404
    assert "location" not in answer.headers


@pytest.mark.parametrize("path", ["/docs", "/admin"])
def test_a_page_with_a_slash_leads_to_the_one_without(running_service, path: str) -> None:
    answer = running_service.client.get(f"{path}/", follow_redirects=True)
    assert (answer.url.path, answer.status_code) == (path, 200)
    assert running_service.client.head(f"{path}/").status_code == 308
    assert running_service.client.post(f"{path}/").status_code in {404, 405}


@pytest.mark.parametrize("path", ["/live", "/docs", "/", "/ui/shared/icon.svg", "/galleries/shop"])
def test_head_answers_as_get_without_a_body(running_service, path: str) -> None:
    got = running_service.client.get(path)
    request = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with running_service.connect(request.encode()) as connection:
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert int(head.split()[1]) == got.status_code
    assert body == b""
    assert f"content-type: {got.headers['content-type']}".encode() in head.lower()
    assert "HEAD" in running_service.client.delete("/galleries").headers["allow"]
