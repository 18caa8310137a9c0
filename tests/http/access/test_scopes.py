"""Every address of the service against every kind of caller, by a table written down twice."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from tests.support.seams import KeyStore, RouteTable
from tests.support.servers import Running, StartService

FREE, SEARCH, WRITE, ADMIN = None, "search", "write", "admin"
GALLERY = "/galleries/{}"
ITEMS = "/galleries/{}/items"
EXPECTED: dict[tuple[str, str], str | None] = {
    ("GET", "/"): FREE,
    ("HEAD", "/"): FREE,
    ("GET", "/admin"): FREE,
    ("HEAD", "/admin"): FREE,
    ("GET", "/ui/"): FREE,
    ("HEAD", "/ui/"): FREE,
    ("GET", "/live"): FREE,
    ("GET", "/ready"): FREE,
    ("GET", "/metrics"): FREE,
    ("GET", "/docs"): FREE,
    ("GET", "/openapi.json"): FREE,
    ("HEAD", "/openapi.json"): FREE,
    ("POST", "/search"): SEARCH,
    ("POST", "/search/batch"): SEARCH,
    ("GET", "/samples"): SEARCH,
    ("GET", "/samples/{}"): SEARCH,
    ("GET", "/galleries"): SEARCH,
    ("GET", GALLERY): SEARCH,
    ("GET", ITEMS): SEARCH,
    ("GET", f"{ITEMS}/{{}}"): SEARCH,
    ("GET", f"{ITEMS}/{{}}/image"): SEARCH,
    ("GET", f"{ITEMS}/{{}}/similar"): SEARCH,
    ("PUT", ITEMS): WRITE,
    ("PATCH", ITEMS): WRITE,
    ("DELETE", ITEMS): WRITE,
    ("POST", f"{ITEMS}/delete"): WRITE,
    ("DELETE", f"{ITEMS}/{{}}"): WRITE,
    ("POST", "/galleries"): ADMIN,
    ("DELETE", GALLERY): ADMIN,
    ("POST", f"{GALLERY}/compact"): ADMIN,
    ("POST", f"{GALLERY}/swap"): ADMIN,
    ("POST", f"{GALLERY}/rebuild"): ADMIN,
    ("POST", "/jobs/train"): ADMIN,
    ("GET", "/jobs"): ADMIN,
    ("GET", "/jobs/{}"): ADMIN,
    ("GET", "/jobs/{}/log"): ADMIN,
    ("POST", "/jobs/{}/cancel"): ADMIN,
    ("POST", "/jobs/{}/swap"): ADMIN,
    ("POST", "/jobs/{}/resume"): ADMIN,
}
ORDER = {FREE: 0, SEARCH: 1, WRITE: 2, ADMIN: 3}
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
    past = datetime.now(UTC) - timedelta(days=1)
    sent = {name: store.create(name, [name]) for name in ("search", "write", "admin")}
    sent |= {"expired": store.create("expired", ["admin"], past)}
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
    return None if ORDER[caller] >= ORDER[scope] else 403


@pytest.mark.parametrize("caller", CALLERS)
def test_every_address_answers_every_caller_as_the_table_says(
    start_service: StartService, store: KeyStore, texts: dict[str, str], caller: str
) -> None:
    service, text = start_service(state=store.path.parent), texts[caller]
    ways = (bearer(text), {"X-API-Key": text} if text else {})
    for number, ((method, path), scope) in enumerate(EXPECTED.items()):
        sent = ways[number % 2]
        answer = ask(service, method, path.replace("{}", "17"), sent)
        expected = refusal(caller, scope)
        found = answer.status_code
        assert found == expected or (expected is None and found not in REFUSED), (method, path)
        if found == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["type"] == "urn:kinlens:problem:key-needed"
        if found == 403:
            assert answer.json()["type"] == "urn:kinlens:problem:scope-needed"
            assert f"this needs {scope}" in answer.json()["detail"]
        assert not text or text not in answer.text


def test_every_route_of_the_app_needs_what_the_table_says(running_service: Running) -> None:
    served = RouteTable(running_service.app.routes).served
    found = {(route.method, plain(route.template)): route.rule.scope for route in served}
    assert {address: EXPECTED[address] for address in found} == found
    assert EXPECTED.items() - found.items() == set(), "nothing of the table is without a route"


def test_while_no_key_exists_changes_are_closed_and_the_answer_says_how_to_open_them(
    start_service: StartService, store: KeyStore
) -> None:
    for settings, hint in (({"state": store.path.parent}, "keys create"), ({}, "--state DIR")):
        service = start_service(**settings)
        put, job = ask(service, "PUT", "/galleries/a/items"), ask(service, "GET", "/jobs")
        assert (put.status_code, job.status_code) == (403, 403)
        assert hint in put.json()["detail"]
        assert "admin" in job.json()["detail"]
    store.revoke(store.create("a", ["admin"]) and "a")
    service = start_service(state=store.path.parent)
    assert ask(service, "PUT", "/galleries/a/items").status_code == 403


def test_with_no_anonymous_scope_the_search_needs_a_key_too(
    start_service: StartService, store: KeyStore, texts: dict[str, str]
) -> None:
    service = start_service(state=store.path.parent, anonymous_scopes=())
    callers = ("none", "search", "garbage")
    statuses = [ask(service, "GET", "/galleries", bearer(texts[n])).status_code for n in callers]
    assert statuses == [401, 200, 401]
    assert ask(service, "GET", "/live").status_code == 200


def test_anonymous_scopes_open_changes_but_not_to_pages_of_other_sites(
    start_service: StartService, tmp_path: Path
) -> None:
    evil = "https://evil.example"
    service = start_service(state=tmp_path, anonymous_scopes=("admin",))

    def compact(service: Running, **headers: str) -> httpx.Response:
        answer: httpx.Response = ask(service, "POST", "/galleries/a/compact", headers)
        return answer

    for headers in ({}, {"origin": service.url}):
        assert compact(service, **headers).status_code == 404
    for origin in (evil, "null", "http://["):
        assert compact(service, origin=origin).status_code == 403
    assert evil in compact(service, origin=evil).json()["detail"]
    assert ask(service, "GET", "/galleries", {"origin": evil}).status_code == 200
    allowing = start_service(state=tmp_path, anonymous_scopes=("admin",), cors_origins=(evil,))
    assert compact(allowing, origin=evil).status_code == 404


def test_two_keys_are_no_key_and_another_scheme_is_not_ours(
    start_service: StartService, store: KeyStore, texts: dict[str, str]
) -> None:
    service = start_service(state=store.path.parent)
    both = bearer(texts["admin"]) | {"x-api-key": texts["search"]}
    same = bearer(texts["admin"]) | {"x-api-key": texts["admin"]}
    basic = {"authorization": "Basic dXNlcjpodW50ZXIy"}
    with_basic = basic | {"x-api-key": texts["admin"]}
    lower = {"authorization": f"bearer {texts['admin']}"}
    sent = (both, same, basic, with_basic, lower)
    statuses = [ask(service, "GET", "/jobs", headers).status_code for headers in sent]
    assert statuses == [401, 200, 401, 200, 200]


def test_a_damaged_file_of_keys_is_503_to_every_key_and_lets_nobody_change_anything(
    start_service: StartService, store: KeyStore, texts: dict[str, str]
) -> None:
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


def test_wrong_keys_are_limited_by_address_and_right_ones_go_on(
    start_service: StartService, store: KeyStore, texts: dict[str, str]
) -> None:
    service = start_service(state=store.path.parent)
    wrong = [ask(service, "GET", "/galleries", bearer("kl_guess")) for _ in range(40)]
    statuses = [answer.status_code for answer in wrong]
    assert statuses[:30] == [401] * 30
    assert 429 in statuses
    assert 1 <= int(wrong[statuses.index(429)].headers["retry-after"]) <= 60
    for text in (texts["search"], ""):
        assert ask(service, "GET", "/galleries", bearer(text)).status_code == 200


def test_the_app_itself_is_guarded_and_unknown_addresses_say_nothing_about_keys(
    start_service: StartService, tmp_path: Path
) -> None:
    service = start_service(state=tmp_path)
    text = KeyStore(tmp_path / "keys.json").create("shop", ["search"])
    wrong, right = bearer("kl_12345678_x"), bearer(text)
    assert service.client.get("/galleries", headers=right).status_code == 200
    assert service.client.get("/galleries", headers=wrong).status_code == 401
    assert service.client.get("/live", headers=wrong).status_code == 200
    for method, path, status in (("GET", "/nowhere", 404), ("DELETE", "/search", 405)):
        shown = [
            service.client.request(method, path, headers=headers).json()
            for headers in ({}, wrong, right)
        ]
        assert [problem["status"] for problem in shown] == [status] * 3
        assert len({problem["detail"] for problem in shown}) == 1


def test_a_refused_upload_gets_its_answer_although_it_is_still_being_sent(
    start_service: StartService, tmp_path: Path
) -> None:
    service = start_service(state=tmp_path)
    headers = {"authorization": "Bearer kl_12345678_x"}
    answer = service.client.post("/search", content=bytes(5 * 2**20), headers=headers)
    assert answer.status_code == 401
    assert answer.headers["connection"] == "close"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
