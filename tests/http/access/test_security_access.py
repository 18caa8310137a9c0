"""Every address of the service against every kind of caller, by a table written down twice."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, request_response

from service.http.gate import Gate
from service.observe.metrics import Metrics
from service.settings import Settings
from tests.support.seams import KeyStore, RateLimits, RouteTable

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


def plain(path: str) -> str:
    """A template without the names of its parameters."""
    parts = ["{}" if part.startswith("{") else part for part in path.split("/")]
    return "/".join(parts)


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "keys.json")


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


def answers(store: KeyStore | None, calls: list[tuple[str, str, dict[str, str]]], **options: Any):
    """What the gate answers to each call in front of routes that answer 204 to everything."""

    def inside(request: Request) -> Response:
        return Response(status_code=204, headers={"x-principal": request.state.principal})

    failures = options.pop("failures", RateLimits({}))
    gate = Middleware(
        Gate,
        settings=Settings(**{"allowed_hosts": ("shop",)} | options),
        metrics=Metrics(),
        store=store,
        rates=failures,
    )
    addresses = {path.replace("{}", "{name}", 1).replace("{}", "{item}") for _, path in EXPECTED}
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
    routes = [
        Route(path, inside, methods=[m for m in methods if (m, plain(path)) in EXPECTED])
        for path in sorted(addresses - {"/ui/"})
    ]
    app = Starlette(routes=[*routes, Mount("/ui", request_response(inside))], middleware=[gate])

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [await client.request(m, p, headers=h) for m, p, h in calls]

    return asyncio.run(ask())


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"} if text else {}


def expected_status(caller: str, scope: str | None) -> int:
    if scope is FREE:
        return 204
    if caller in ("revoked", "expired", "garbage"):
        return 401
    if caller == "none":
        return 204 if scope == SEARCH else 401
    return 204 if ORDER[caller] >= ORDER[scope] else 403


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_every_address_answers_every_caller_as_the_table_says(
    store: KeyStore, texts: dict[str, str], caller: str, header: str
) -> None:
    text = texts[caller]
    sent = bearer(text) if header == "authorization" else {"X-API-Key": text} if text else {}
    calls = [(method, path.replace("{}", "17"), sent) for method, path in EXPECTED]
    for (address, scope), answer in zip(EXPECTED.items(), answers(store, calls), strict=True):
        assert answer.status_code == expected_status(caller, scope), address
        if answer.status_code == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["type"] == "urn:kinlens:problem:key-needed"
        if answer.status_code == 403:
            assert answer.json()["type"] == "urn:kinlens:problem:scope-needed"
            assert f"this needs {scope}" in answer.json()["detail"]
        if answer.status_code == 204 and scope is not FREE:
            assert answer.headers["x-principal"] == (
                "anonymous" if caller == "none" else texts and caller
            )
        assert not text or text not in answer.text


def test_every_route_of_the_app_needs_what_the_table_says(running_service) -> None:
    served = RouteTable(running_service.app.routes).served
    found = {(route.method, plain(route.template)): route.rule.scope for route in served}
    assert {address: EXPECTED[address] for address in found} == found
    assert EXPECTED.items() - found.items() == set(), "nothing of the table is without a route"


def test_while_no_key_exists_changes_are_closed_and_the_answer_says_how_to_open_them(
    store: KeyStore,
) -> None:
    for kept, hint in ((store, "keys create"), (None, "--state DIR")):
        put, job = answers(kept, [("PUT", "/galleries/a/items", {}), ("GET", "/jobs", {})])
        assert (put.status_code, job.status_code) == (403, 403)
        assert hint in put.json()["detail"]
        assert "admin" in job.json()["detail"]
    store.revoke(store.create("a", ["admin"]) and "a")
    (put,) = answers(store, [("PUT", "/galleries/a/items", {})])
    assert put.status_code == 403


def test_with_no_anonymous_scope_the_search_needs_a_key_too(
    store: KeyStore, texts: dict[str, str]
) -> None:
    calls = [("POST", "/search", bearer(texts[name])) for name in ("none", "search", "garbage")]
    calls += [("GET", "/live", {})]
    statuses = [answer.status_code for answer in answers(store, calls, anonymous_scopes=())]
    assert statuses == [401, 204, 401, 204]


def test_anonymous_scopes_open_changes_but_not_to_pages_of_other_sites(store: KeyStore) -> None:
    here, there = {"origin": "http://shop"}, {"origin": "https://evil.example"}
    calls = [("POST", "/galleries/a/compact", headers) for headers in ({}, here, there)]
    odd = [{"origin": "null"}, {"origin": "http://["}]
    calls += [("POST", "/galleries/a/compact", headers) for headers in odd]
    calls += [("POST", "/search", there)]
    found = answers(store, calls, anonymous_scopes=("admin",))
    assert [answer.status_code for answer in found] == [204, 204, 403, 403, 403, 204]
    assert "evil.example" in found[2].json()["detail"]
    allowed = answers(
        store, calls[2:3], anonymous_scopes=("admin",), cors_origins=("https://evil.example",)
    )
    assert allowed[0].status_code == 204


def test_two_keys_are_no_key_and_another_scheme_is_not_ours(
    store: KeyStore, texts: dict[str, str]
) -> None:
    both = bearer(texts["admin"]) | {"x-api-key": texts["search"]}
    same = bearer(texts["admin"]) | {"x-api-key": texts["admin"]}
    basic = {"authorization": "Basic dXNlcjpodW50ZXIy"}
    with_basic = basic | {"x-api-key": texts["admin"]}
    lower = {"authorization": f"bearer {texts['admin']}"}
    calls = [("GET", "/jobs", headers) for headers in (both, same, basic, with_basic, lower)]
    statuses = [answer.status_code for answer in answers(store, calls)]
    assert statuses == [401, 204, 401, 204, 204]


def test_a_damaged_file_of_keys_is_503_to_every_key_and_lets_nobody_change_anything(
    store: KeyStore, texts: dict[str, str]
) -> None:
    store.path.write_text("{damaged")
    calls = [("PUT", "/galleries/a/items", bearer(texts[name])) for name in CALLERS]
    calls += [("GET", "/jobs", {}), ("POST", "/search", {}), ("GET", "/live", {})]
    with structlog.testing.capture_logs() as events:
        found = answers(store, calls)
    assert [answer.status_code for answer in found] == [503] * len(CALLERS) + [503, 204, 204]
    assert found[0].json()["type"] == "urn:kinlens:problem:keys-unreadable"
    assert str(store.path) not in found[0].text
    assert any(str(store.path) in str(event) for event in events)


def test_wrong_keys_are_limited_by_address_and_right_ones_go_on(
    store: KeyStore, texts: dict[str, str]
) -> None:
    wrong, right = bearer("kl_guess"), bearer(texts["search"])
    calls = [("POST", "/search", headers) for headers in [wrong] * 5 + [right, {}]]
    found = answers(store, calls, failures=RateLimits({"failure": "3/minute"}))
    assert [answer.status_code for answer in found] == [401, 401, 401, 429, 429, 204, 204]
    assert 1 <= int(found[3].headers["retry-after"]) <= 60


def test_the_app_itself_is_guarded_and_unknown_addresses_say_nothing_about_keys(
    start_service: Callable[..., Any], tmp_path: Path
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
    start_service: Callable[..., Any], tmp_path: Path
) -> None:
    service = start_service(state=tmp_path)
    headers = {"authorization": "Bearer kl_12345678_x"}
    answer = service.client.post("/search", content=bytes(5 * 2**20), headers=headers)
    assert answer.status_code == 401
    assert answer.headers["connection"] == "close"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
