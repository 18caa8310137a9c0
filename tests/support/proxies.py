"""HAProxy, nginx and Caddy with their files of deploy/, before services of a test."""

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.own_process import ROOT
from tests.support.servers import WAIT_S, free_port
from tests.support.waiting import until

HOST = "search.example.com"
HAPROXY = ROOT / "deploy/haproxy/haproxy.cfg"
NGINX = ROOT / "deploy/nginx/kinlens.conf"
CADDY = ROOT / "deploy/caddy/Caddyfile"

CHECK_MS = 100
"""How often HAProxy and Caddy ask /ready here; the shipped files are slower."""

SLOW_S, STALLED_S = 1, 4
"""Seconds for a head, and for a client that does not read; the shipped files have more."""

_FILES = ("nginx.conf", "Caddyfile")
_CERTIFICATE, _KEY = "certificate.pem", "key.pem"


@dataclass(frozen=True)
class Proxy:
    """A proxy that runs; with a certificate it speaks TLS."""

    url: str
    certificate: Path | None = None

    @contextmanager
    def client(self, address: str = "127.0.0.1") -> Iterator[httpx.Client]:
        """A client at this address of the machine, which trusts the certificate of the proxy."""
        context = ssl.create_default_context(cafile=self.certificate)
        with httpx.Client(
            base_url=self.url,
            headers={"Host": HOST} if self.certificate else {},
            timeout=WAIT_S,
            transport=httpx.HTTPTransport(verify=context, local_address=address),
        ) as client:
            client.event_hooks["request"].append(
                lambda request: request.extensions.update(sni_hostname=HOST)
            )
            yield client

    def connect(self, sent: bytes = b"") -> socket.socket:
        """A connection on which these bytes are sent."""
        address = ("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        connection = socket.create_connection(address, WAIT_S)
        if self.certificate:
            context = ssl.create_default_context(cafile=self.certificate)
            connection = context.wrap_socket(connection, server_hostname=HOST)
        connection.sendall(sent)
        return connection


@contextmanager
def started(
    name: str, urls: Sequence[str], folder: Path, *, is_below_path: bool = False
) -> Iterator[Proxy]:
    """The proxy `name` before the services at `urls`, once one is ready; its files are in a folder
    of its own in `folder`. Without the program the test is skipped. With `is_below_path`, its file
    is changed by the command in it, and the proxy passes on only /visual/.
    """
    path, port, folder = program(name), free_port(), folder / name
    folder.mkdir()
    services = [url.removeprefix("http://") for url in urls]
    has_tls = name != "haproxy"
    if has_tls:
        write_certificate(folder)
    options = OPTIONS[name](folder, services, port)
    if is_below_path:
        file = next(
            path for path in folder.iterdir() if path.suffix == ".cfg" or path.name in _FILES
        )
        [expression] = re.findall(r"^#   sed -E '(.+)'$", file.read_text(), re.MULTILINE)
        subprocess.run(["sed", "-i", "-E", expression, str(file)], check=True)
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        variables = {"HOME": str(folder)}
        process = subprocess.Popen([path, *options], stdout=log, stderr=log, env=variables)
        stack.callback(process.wait, WAIT_S)
        stack.callback(process.terminate)
        stack.callback(_check_alive, process, folder)
        scheme, certificate = ("https", folder / _CERTIFICATE) if has_tls else ("http", None)
        proxy = Proxy(f"{scheme}://127.0.0.1:{port}", certificate)
        with proxy.client() as client:
            path = "/visual/ready" if is_below_path else "/ready"
            until(lambda: _check_alive(process, folder) or _is_ready(client, path))
        yield proxy


def program(name: str) -> str:
    """Where it is; without it the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; install it to test the files of deploy/")
    return path


def write_certificate(folder: Path) -> None:
    """A certificate of HOST, self-signed."""
    command = [program("openssl"), "req", "-x509", "-nodes", "-days", "2", "-subj", f"/CN={HOST}"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-addext", f"subjectAltName=DNS:{HOST}"]
    command += ["-keyout", str(folder / _KEY), "-out", str(folder / _CERTIFICATE)]
    subprocess.run(command, check=True, capture_output=True)


def replaced(path: Path, *changes: tuple[str, str]) -> str:
    """The text of a shipped file with each change made once; what it replaces must be there."""
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} in {path}"
        text = text.replace(old, new)
    return text


def _haproxy(folder: Path, services: Sequence[str], port: int) -> list[str]:
    checked = f"check inter {CHECK_MS}ms fall 2 rise 1"
    template = "server-template replica 3 replica:8000 check inter 5s fall 2 rise 1"
    servers = "\n  ".join(f"server s{n} {each} {checked}" for n, each in enumerate(services))
    text = replaced(
        HAPROXY,
        (f"{template} resolvers docker init-addr libc,none", servers),
        ("bind :8080", f"bind 127.0.0.1:{port}"),
        ("timeout http-request 10s", f"timeout http-request {SLOW_S}s"),
        ("timeout client 60s", f"timeout client {STALLED_S}s"),
    )
    (folder / "haproxy.cfg").write_text(text)
    return ["-dW", "-db", "-f", str(folder / "haproxy.cfg")]


def _nginx(folder: Path, services: Sequence[str], port: int) -> list[str]:
    """Without root; the shipped file is the http block."""
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = replaced(
        NGINX,
        ("listen 80;", f"listen 127.0.0.1:{free_port()};"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("client_header_timeout 10s", f"client_header_timeout {SLOW_S}s"),
        ("\n    send_timeout 60s", f"\n    send_timeout {STALLED_S}s"),
        (f"/etc/letsencrypt/live/{HOST}/fullchain.pem", f"{folder}/{_CERTIFICATE}"),
        (f"/etc/letsencrypt/live/{HOST}/privkey.pem", f"{folder}/{_KEY}"),
        (
            "server 127.0.0.1:8000 max_fails=0;",
            "\n".join(f"server {each} max_fails=0;" for each in services),
        ),
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off;\n{temporary}{text}}}\n"
    )
    return ["-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def _caddy(folder: Path, services: Sequence[str], port: int) -> list[str]:
    """Without root, and with our certificate in place of one of an authority."""
    text = replaced(
        CADDY,
        ("{\n\tservers {", "{\n\tadmin off\n\tauto_https disable_redirects\n\tservers {"),
        (
            f"\n{HOST} {{\n",
            f"\nhttps://{HOST}:{port}, https://localhost:{port} {{\n\tbind 127.0.0.1\n"
            f"\ttls {folder}/{_CERTIFICATE} {folder}/{_KEY}\n",
        ),
        ("reverse_proxy 127.0.0.1:8000", f"reverse_proxy {' '.join(services)}"),
        ("read_header 10s", f"read_header {SLOW_S}s"),
        ("write 2m", f"write {STALLED_S}s"),
        ("health_interval 5s", f"health_interval {CHECK_MS}ms"),
        ("lb_try_duration 5s", "lb_try_duration 500ms"),
    )
    (folder / "Caddyfile").write_text(text)
    return ["run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


OPTIONS: dict[str, Callable[[Path, Sequence[str], int], list[str]]] = {
    "haproxy": _haproxy,
    "nginx": _nginx,
    "caddy": _caddy,
}
"""What a program is started with, after its files are written."""


def _check_alive(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    if process.poll() is not None:
        pytest.fail(f"The proxy has ended; what it wrote:\n{(folder / 'log').read_text()[-9000:]}")


def _is_ready(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False
