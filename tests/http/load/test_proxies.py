"""nginx and Caddy with the files of deploy/, for real, with TLS, before a service."""

import re
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import structlog

from service.app import create_app
from service.http.gate import RULES, bounds_of
from service.http.server import config_of
from service.settings import Settings
from tests.support.own_process import ROOT
from tests.support.servers import DEFAULTS, WAIT_S, FakeGallery, GatedEmbedder, free_port, run
from tests.support.waiting import until

HOST = "search.example.com"
OPERATOR, CUSTOMER = "127.0.0.1", "127.0.0.9"
PRIVATE = ("/metrics", "/ready", "/startup", "/admin", "/jobs", "/jobs/1", "/jobs/1/log")
NGINX = ROOT / "deploy/nginx/kinlens.conf"
CADDY = ROOT / "deploy/caddy/Caddyfile"


def replaced(text: str, *changes: tuple[str, str]) -> str:
    """`text` with each change made; each must be there."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def nginx_options(folder: Path, service: str, port: int) -> list[str]:
    """The options of an nginx without root, whose http block is the shipped file."""
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    shipped = replaced(
        NGINX.read_text(),
        ("listen 80;", f"listen 127.0.0.1:{free_port()};"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        (f"/etc/letsencrypt/live/{HOST}/fullchain.pem", f"{folder}/certificate.pem"),
        (f"/etc/letsencrypt/live/{HOST}/privkey.pem", f"{folder}/key.pem"),
        ("127.0.0.1:8000", service),
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off;\n{temporary}{shipped}}}\n"
    )
    return ["-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def caddy_options(folder: Path, service: str, port: int) -> list[str]:
    """The options of a Caddy without root, with our certificate in place of one of an authority."""
    text = replaced(
        CADDY.read_text(),
        ("{\n\tservers {", "{\n\tadmin off\n\tauto_https disable_redirects\n\tservers {"),
        (
            f"{HOST} {{\n",
            f"https://{HOST}:{port} {{\n\tbind 127.0.0.1\n"
            f"\ttls {folder}/certificate.pem {folder}/key.pem\n",
        ),
        ("reverse_proxy 127.0.0.1:8000", f"reverse_proxy {service}"),
        ("health_interval 5s", "health_interval 100ms"),
        ("lb_try_duration 5s", "lb_try_duration 500ms"),
    )
    (folder / "Caddyfile").write_text(text)
    return ["run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


OPTIONS: dict[str, Callable[[Path, str, int], list[str]]] = {
    "nginx": nginx_options,
    "caddy": caddy_options,
}


@dataclass
class Proxy:
    """A proxy that runs, and how to end the service behind it."""

    port: int
    certificate: Path
    end_service: Callable[[], None]

    @contextmanager
    def client(self, address: str) -> Iterator[httpx.Client]:
        """A client at this address, which trusts the certificate of the proxy."""
        context = ssl.create_default_context(cafile=self.certificate)
        transport = httpx.HTTPTransport(verify=context, local_address=address)
        with httpx.Client(
            base_url=f"https://127.0.0.1:{self.port}",
            headers={"Host": HOST},
            timeout=WAIT_S,
            transport=transport,
        ) as client:
            client.event_hooks["request"].append(
                lambda request: request.extensions.update(sni_hostname=HOST)
            )
            yield client


def program(name: str) -> str:
    """Where it is; without it the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; install it to test the proxies of deploy/")
    return path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate of the host, signed by itself."""
    folder = tmp_path_factory.mktemp("certificate")
    command = [
        program("openssl"),
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={HOST}"]
    command += ["-addext", f"subjectAltName=DNS:{HOST}"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", params=OPTIONS)
def proxy(
    request: pytest.FixtureRequest, certificate: Path, pictures: list[bytes], tmp_path_factory
) -> Iterator[Proxy]:
    name = request.param
    path, folder = program(name), tmp_path_factory.mktemp(name)
    for file in certificate.iterdir():
        shutil.copy(file, folder)
    embedder, port = GatedEmbedder(), free_port()
    settings = Settings(**DEFAULTS, trusted_proxies=(OPERATOR,), allowed_hosts=(HOST,))
    service = run(create_app(settings, embedder, {"shop": FakeGallery(embedder, pictures)}))
    with ExitStack() as stack:
        stack.callback(service.close)
        options = OPTIONS[name](folder, service.url.removeprefix("http://"), port)
        log = stack.enter_context((folder / "log").open("w"))
        variables = {"HOME": str(folder)}
        process = subprocess.Popen([path, *options], stdout=log, stderr=log, env=variables)
        stack.callback(process.wait, WAIT_S)
        stack.callback(process.terminate)
        found = Proxy(port, folder / "certificate.pem", service.close)
        with found.client(OPERATOR) as client:
            until(lambda: answers(client, process))
        yield found


def answers(client: httpx.Client, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "the proxy has ended; its log says why"
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_customers_search_over_tls_and_cannot_choose_their_address(
    proxy: Proxy, pictures: list[bytes]
) -> None:
    with proxy.client(CUSTOMER) as client, structlog.testing.capture_logs() as events:
        for header in ({}, {"X-Forwarded-For": "6.6.6.6"}):
            files = {"image": ("q.png", pictures[0])}
            answer = client.post("/search", files=files, headers=header)
            assert answer.status_code == 200, answer.text
            assert answer.headers["strict-transport-security"] == "max-age=31536000"
        assert client.get("/").status_code == 200
        assert client.get("/galleries").status_code == 200
    assert [e["client"] for e in events if e.get("route") == "/search"] == [CUSTOMER] * 2


def test_what_is_for_operators_is_closed_to_customers(proxy: Proxy) -> None:
    with proxy.client(CUSTOMER) as client:
        for path in (*PRIVATE, "/%6Detrics", "/%2Fmetrics", "/ui/%2e%2e/metrics", "/metrics;x"):
            answer = client.get(path)
            assert answer.status_code in {403, 404}, path
            assert "kinlens_" not in answer.text, path
        for path in PRIVATE:
            assert client.get(path).status_code == 403, path
    with proxy.client(OPERATOR) as client:
        assert "kinlens_ready" in client.get("/metrics").text
        assert client.get("/admin").status_code == 200
        assert client.get("/jobs").headers["content-type"] == "application/problem+json"


def test_every_open_route_is_of_customers_or_closed_by_name() -> None:
    """A route without a key that is new must be thought of here."""
    [opened] = [rule.path for rule in RULES if rule.scope is None and "live" in rule.path]
    words = {f"/{word}".replace("\\", "") for word in opened.strip("/()?").split("|")}
    assert words - set(PRIVATE) == {"/live", "/docs", "/openapi.json"}


def test_without_a_process_the_answer_says_when_to_try_again(proxy: Proxy) -> None:
    proxy.end_service()
    with proxy.client(CUSTOMER) as client:
        until(lambda: client.get("/galleries").status_code == 503)
        answer = client.get("/galleries")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["type"] == "urn:kinlens:problem:overloaded"


@pytest.mark.parametrize(
    ("path", "body", "idle", "answer"),
    [
        (
            NGINX,
            r"client_max_body_size (\d+)k;",
            r"\n    keepalive_timeout (\d+)s;",
            r"_read_timeout (\d+)s",
        ),
        (CADDY, r"max_size (\d+)KiB", r"\bkeepalive (\d+)s", r"response_header_timeout (\d+)s"),
    ],
    ids=["nginx", "caddy"],
)
def test_the_limits_of_a_proxy_fit_those_of_the_service(
    path: Path, body: str, idle: str, answer: str
) -> None:
    settings, text = Settings(), path.read_text()
    [size] = re.findall(body, text)
    assert int(size) * 1024 == bounds_of(settings).largest
    [kept_s] = re.findall(idle, text)
    assert int(kept_s) < config_of(create_app, settings).timeout_keep_alive
    [waited_s] = re.findall(answer, text)
    assert int(waited_s) > 2 * settings.request_timeout_ms / 1e3
