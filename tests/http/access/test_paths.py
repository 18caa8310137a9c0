"""Paths that are almost those of a route: none of them opens a closed route."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import Response

from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.app import create_app
from kinlens.service.settings import Settings
from tests.support.seams import KeyStore, RouteTable
from tests.support.servers import DEFAULTS, Running, run

ODD = ("%0A", "%0D", "%00", "%0D%0A", "%C2%85", "/", "%2F", "//", "/%0A", "%0Ax", "%20", "?%0A")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def owner(state: Path) -> dict[str, str]:
    """The headers of a key."""
    return {"x-api-key": KeyStore(state / "keys.json").create("owner", ["admin"])}


@pytest.fixture(scope="module")
def closed(state: Path, owner: dict[str, str]) -> Iterator[Running]:
    """A service where nobody may do anything without a key; `/export` has no rule."""
    settings = Settings(**DEFAULTS | {"state": state, "anonymous_scopes": ()})
    app = create_app(settings, FakeEmbedder(), {})
    app.add_api_route("/export", lambda: Response("all of it"), methods=["GET"])
    service = run(app)
    yield service
    service.close()


def ask(service: Running, method: str, target: str) -> tuple[int, bytes]:
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


def test_no_spelling_of_a_closed_path_is_open(closed) -> None:
    seen = set()
    for route in RouteTable(closed.app.routes).served:
        if route.rule.scope is None or route.method == "HEAD":
            continue
        for target in variants(route.template):
            status, body = ask(closed, route.method, target)
            seen.add(status)
            assert status in (400, 401, 404, 405), (route.method, target, status, body)
            assert (status == 401) or target != variants(route.template)[0]
    assert {400, 401, 404} <= seen
    assert closed.runtime.registry.names() == []


@pytest.mark.parametrize("target", ["/jobs%0A", "/live%0A", "/ui/search/app.js%00", "/%7F"])
def test_a_control_character_in_an_address_is_400_and_named(closed, target: str) -> None:
    status, body = ask(closed, "GET", target)
    assert status == 400
    assert b"control character U+00" in body


def test_a_route_that_is_served_but_has_no_rule_needs_an_admin(closed, owner) -> None:
    assert closed.client.get("/export").status_code == 401
    assert closed.client.get("/export", headers=owner).text == "all of it"
    assert closed.client.get("/exports").status_code == 404


def test_a_refused_request_counts_for_its_route(closed) -> None:
    closed.client.get("/galleries/secret-name/items/7")
    closed.client.post("/search")
    for route, method in (("/galleries/{name}/items/{item_id}", "GET"), ("/search", "POST")):
        labels = {"route": route, "method": method, "status": "401"}
        assert closed.metric("kinlens_requests_total", **labels) >= 1
    assert "secret-name" not in closed.client.get("/metrics").text


@pytest.mark.parametrize(("path", "meant"), [("/galleries/", "/galleries"), ("/ui", "/ui/")])
def test_a_wrong_slash_is_404_and_names_the_path(running_service, path: str, meant: str) -> None:
    answer = running_service.client.get(path)
    assert answer.status_code == 404
    assert "location" not in answer.headers
    assert f"Did you mean {meant}?" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path",
    [
        *("/live", "/ready", "/metrics", "/docs", "/", "/ui/shared/icon.svg"),
        *("/galleries", "/galleries/shop", "/galleries/shop/items/0/image", "/galleries/none"),
    ],
)
def test_head_answers_as_get_without_a_body(running_service, path: str) -> None:
    got = running_service.client.get(path)
    request = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with running_service.connect(request.encode()) as connection:
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert int(head.split()[1]) == got.status_code
    assert body == b""
    assert f"content-type: {got.headers['content-type']}".encode() in head.lower()
    assert "HEAD" in running_service.client.delete("/galleries").headers["allow"]
