"""Which hosts and origins are answered, and with which headers for browsers."""

from typing import Any

import pytest

from kinlens.service.settings import Settings
from tests.support.shops import assert_problem


def get(service: Any, host: str, path: str = "/galleries") -> Any:
    return service.client.get(path, headers={"host": host})


OWN_HOSTS = ("localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000")
OTHER_HOSTS = (
    *("shop.example", "shop.example:8000", "localhost.shop.example", "127.0.0.1.shop.example"),
    *("shop.example:127.0.0.1", "shop@localhost", "localhost:port", "localhost.", "::1", "[::1"),
    *("[::2]", "", "*"),
)


@pytest.mark.parametrize("path", ["/galleries", "/ui/search/app.js"])
def test_any_host_but_the_names_of_this_machine_is_a_400(running_service, path: str) -> None:
    for host in OWN_HOSTS:
        assert get(running_service, host, path).status_code == 200
    for host in OTHER_HOSTS:
        response = get(running_service, host, path)
        problem = assert_problem(response, 400, "unknown-host")
        assert repr(host) in problem["detail"]
        assert "KINLENS_ALLOWED_HOSTS" in problem["detail"]
        assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: shop.example\r\n"])
def test_a_request_without_a_host_or_with_two_is_a_400(running_service, hosts: bytes) -> None:
    connection = running_service.connect(b"GET /galleries HTTP/1.0\r\n" + hosts + b"\r\n")
    assert connection.makefile("rb").readline().split()[1] == b"400"


def test_the_hosts_follow_from_the_bound_address_unless_they_are_set(start_service) -> None:
    own = {"localhost", "127.0.0.1", "[::1]"}
    more = {"127.0.0.1": own, "10.0.0.5": own | {"10.0.0.5"}, "fe80::1": own | {"[fe80::1]"}}
    for bound, expected in (more | {"0.0.0.0": {"*"}, "::": {"*"}}).items():
        assert Settings(host=bound).hosts() == expected
    service = start_service(allowed_hosts=("Shop.example", "127.0.0.1"))
    assert get(service, "shop.EXAMPLE:443").status_code == 200
    assert get(service, "localhost").status_code == 400
    assert get(start_service(allowed_hosts=("*",)), "shop.example").status_code == 200


def test_only_probes_and_metrics_are_answered_under_any_host(running_service) -> None:
    host = "10.0.3.17:8000"
    for path in ("/live", "/ready", "/metrics"):
        assert get(running_service, host, path).status_code == 200
        answer = running_service.client.head(path, headers={"host": host})
        assert "unknown-host" not in answer.headers.get("content-type", "")
        assert answer.status_code in {200, 405}
        for method in ("POST", "OPTIONS", "DELETE"):
            answer = running_service.client.request(method, path, headers={"host": host})
            assert answer.status_code == 400
    for path in ("/live/", "/ready/x", "/metrics/..", "/galleries", "//live", "/"):
        assert get(running_service, host, path).status_code == 400


SHOP = "https://shop.example"
PREFLIGHT = {
    "origin": SHOP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-api-key,content-type",
}


def test_the_policy_allows_this_service_alone_and_nothing_inline(running_service) -> None:
    headers = running_service.client.get("/").headers
    parts = [part.split() for part in headers["content-security-policy"].split(";")]
    found = {name: set(sources) for name, *sources in parts}
    assert found.pop("img-src") == {"'self'", "blob:", "data:"}
    assert found.pop("media-src") == {"'self'", "blob:"}
    assert all(sources <= {"'self'", "'none'"} for sources in found.values())
    for name in ("default-src", "script-src", "style-src", "connect-src", "form-action"):
        assert found[name] == {"'self'"}
    for name in ("object-src", "base-uri", "frame-ancestors", "frame-src", "worker-src"):
        assert found[name] == {"'none'"}
    assert headers["permissions-policy"] == "camera=(self), geolocation=(), microphone=()"


def test_other_origins_get_no_cors_headers_by_default(running_service) -> None:
    answer = running_service.client.get("/galleries", headers={"origin": SHOP})
    assert not any(name.startswith("access-control-") for name in answer.headers)
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    preflight = running_service.client.options("/search", headers=PREFLIGHT)
    assert preflight.status_code == 405
    assert not any(name.startswith("access-control-") for name in preflight.headers)


def test_only_a_configured_origin_may_call_with_a_key(start_service, photos) -> None:
    service = start_service(cors_origins=(SHOP,), anonymous_scopes=())
    preflight = service.client.options("/search", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == SHOP
    assert "X-API-Key" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    refused = service.client.get("/galleries", headers={"origin": SHOP})
    assert refused.status_code == 403
    assert refused.headers["access-control-allow-origin"] == SHOP
    assert "Retry-After" in refused.headers["access-control-expose-headers"]
    assert refused.headers["cross-origin-resource-policy"] == "cross-origin"
    other = service.client.options("/search", headers=PREFLIGHT | {"origin": "https://evil.org"})
    assert "access-control-allow-origin" not in other.headers


def test_a_vote_from_a_foreign_page_is_refused(start_service, tmp_path) -> None:
    service = start_service(state=tmp_path, feedback="pairs", cors_origins=(SHOP,))

    def vote(headers: dict[str, str]) -> int:
        form = {"answer_id": (None, "x"), "item": (None, "a"), "action": (None, "wrong")}
        return int(service.client.post("/feedback", files=form, headers=headers).status_code)

    foreign = ({"origin": "https://evil.example"}, {"origin": "null"})
    assert {vote(headers) for headers in (*foreign, {"sec-fetch-site": "cross-site"})} == {403}
    own = ({}, {"origin": service.url}, {"origin": SHOP}, {"sec-fetch-site": "same-origin"})
    assert {vote(headers) for headers in own} == {422}, "the id of the answer is checked"
