"""Real nginx, Caddy and HAProxy with the files of deploy/, in front of a service."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

import pytest
import structlog

from kinlens.service.http.server import KEEP_ALIVE_S
from kinlens.service.settings import Settings
from tests.support.proxies import CADDY, HOST, NGINX, Proxy, started
from tests.support.routes import FREE, RIGHTS
from tests.support.servers import DEFAULTS, FakeGallery, GatedEmbedder, Running, create_app, run
from tests.support.waiting import until

OPERATOR, CUSTOMER = "127.0.0.1", "127.0.0.9"
PRIVATE = ("/metrics", "/ready", "/startup", "/admin", "/jobs", "/jobs/1", "/jobs/1/log")


@dataclass
class Setup:
    """A proxy, and the service behind it."""

    proxy: Proxy
    service: Running


@pytest.fixture(scope="module", params=["nginx", "caddy", "haproxy"])
def setup(
    request: pytest.FixtureRequest, photos: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    embedder = GatedEmbedder()
    settings = Settings(**DEFAULTS, trusted_proxies=(OPERATOR,), allowed_hosts=(HOST, "127.0.0.1"))
    with ExitStack() as stack:
        service = run(create_app(settings, embedder, {"shop": FakeGallery(embedder, photos)}))
        stack.callback(service.close)
        folder = tmp_path_factory.mktemp(request.param)
        yield Setup(stack.enter_context(started(request.param, [service.url], folder)), service)


def test_customers_search_over_tls_and_cannot_forge_their_address(setup, photos) -> None:
    with setup.proxy.client(CUSTOMER) as client, structlog.testing.capture_logs() as events:
        for header in ({}, {"X-Forwarded-For": "6.6.6.6"}):
            files = {"image": ("q.png", photos[0])}
            answer = client.post("/search", files=files, headers=header)
            assert answer.status_code == 200, answer.text
            if setup.proxy.certificate:
                assert answer.headers["strict-transport-security"] == "max-age=31536000"
        assert client.get("/").status_code == 200
        assert client.get("/galleries").status_code == 200
    assert [e["client"] for e in events if e.get("route") == "/search"] == [CUSTOMER] * 2


def test_operator_routes_are_closed_to_customers(setup) -> None:
    with setup.proxy.client(CUSTOMER) as client:
        for path in (
            *PRIVATE,
            "/%6Detrics",
            "/%2Fmetrics",
            "/ui/%2e%2e/metrics",
            "/metrics;x",
            "/metrics/",
        ):
            answer = client.get(path)
            assert answer.status_code in {403, 404}, path
            assert "kinlens_" not in answer.text, path
        for path in PRIVATE:
            assert client.get(path).status_code == 403, path
            answer = client.get(f"/x{path}", headers={"X-Forwarded-Prefix": "/x"})
            assert answer.status_code == 404, path
    with setup.proxy.client(OPERATOR) as client:
        assert "kinlens_ready" in client.get("/metrics").text
        assert client.get("/admin").status_code == 200
        assert client.get("/jobs").headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["nginx", "caddy", "haproxy"])
def test_a_proxy_serves_below_a_path(name, photos, embedder, tmp_path, closes) -> None:
    settings = Settings(
        **DEFAULTS, trusted_proxies=(OPERATOR,), allowed_hosts=("*",), prefix="/visual"
    )
    service = closes(run(create_app(settings, embedder, {"shop": FakeGallery(embedder, photos)})))
    with (
        started(name, [service.url], tmp_path, is_below_path=True) as proxy,
        proxy.client(CUSTOMER) as client,
    ):
        page = client.get("/visual/")
        for link in re.findall(r'(?:href|src)="([^"#][^"]*)"', page.text):
            if link != "admin":
                assert client.get(urljoin("/visual/", link)).status_code == 200, link
        sent = {"X-Forwarded-Prefix": "/x"}  # by the customer
        answer = client.post("/visual/search", files={"image": photos[0]}, headers=sent)
        link = answer.json()["hits"][0]["image"]
        assert link.startswith("/visual/galleries/")
        assert client.get(link).status_code == 200
        for path in PRIVATE:
            assert client.get(f"/visual{path}").status_code == 403, path
        assert client.get("/metrics").status_code in {200, 403, 404, 503}
        assert "kinlens_" not in client.get("/metrics").text


def test_every_open_route_is_for_customers_or_closed_by_name() -> None:
    """A new route without a key must be added to a list here."""
    opened = {route.removeprefix("GET ") for route, right in RIGHTS.items() if right.scope is FREE}
    assert opened - set(PRIVATE) == {
        "/", "/ui/{path:path}", "/live", "/docs", "/docs/{path:path}", "/openapi.json",
    }  # fmt: skip


def test_without_a_service_the_proxy_answers_503(setup) -> None:
    setup.service.close()
    with setup.proxy.client(CUSTOMER) as client:
        until(lambda: client.get("/galleries").status_code == 503)
        answer = client.get("/galleries")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["type"] == "urn:kinlens:problem:overloaded"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (NGINX, (r"client_max_body_size (\d+)k;", r"\n    keepalive_timeout", "_read_timeout")),
        (CADDY, (r"max_size (\d+)KiB", r"\bkeepalive", "response_header_timeout")),
    ],
    ids=["nginx", "caddy"],
)
def test_limits_of_a_proxy_match_the_service(path: Path, names: tuple[str, str, str]) -> None:
    settings, text, (body, idle, answer) = Settings(), path.read_text(), names
    [size] = re.findall(body, text)
    assert int(size) * 1024 == settings.largest_body()
    assert "KINLENS_MAX_UPLOAD_BYTES" in text
    [kept_s] = re.findall(rf"{idle} (\d+)s", text)
    assert int(kept_s) < KEEP_ALIVE_S
    [waited_s] = re.findall(rf"{answer} (\d+)s", text)
    assert int(waited_s) > 2 * settings.request_timeout_ms / 1e3
