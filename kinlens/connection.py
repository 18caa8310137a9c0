"""The address of the service, and the settings of the environment for connections to it."""

import os
import socket
import urllib.request
from typing import Any

import httpx

from kinlens.errors import ArgumentError

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")


def checked_url(url: Any) -> httpx.URL:
    """The address of a service. Raises: ArgumentError."""
    if not isinstance(url, str | httpx.URL):
        raise ArgumentError(f"url must be a string, not {type(url).__name__}.")
    text = str(url).strip()
    if not text.lower().startswith(("http://", "https://")):
        raise ArgumentError(f"url = {text!r} has no scheme. Write http://{text}, or https://.")
    try:
        parsed = httpx.URL(text)
    except (httpx.InvalidURL, ValueError, TypeError) as error:
        raise ArgumentError(f"url = {text!r} is not a valid URL: {error}.") from error
    if not parsed.host or (parsed.port is not None and not 0 < parsed.port < 65536):
        raise ArgumentError(
            f"url = {text!r} needs a host, and a port from 1 to 65535: http://127.0.0.1:8000."
        )
    return parsed


def proxy_of(url: httpx.URL) -> tuple[str, str] | None:
    """The environment variable and the proxy that apply to `url`; None without a proxy."""
    if any(map(urllib.request.proxy_bypass, (url.netloc.decode("ascii"), url.host))):
        return None
    proxies = urllib.request.getproxies()  # on macOS and Windows also those of the system
    for scheme in (url.scheme, "all"):
        if proxies.get(scheme):
            name = f"{scheme}_proxy"
            return name if name in os.environ else name.upper(), proxies[scheme]
    return None


def why_not(error: Exception, url: httpx.URL) -> str:
    """Why no client can be made for `url` in this environment, and what to do."""
    for name in _CERTIFICATES:
        path = os.environ.get(name)
        if url.scheme == "https" and path and not os.path.exists(path):  # noqa: PTH110
            return f"{name} = {path} does not exist. Unset {name}, or set it to a file that exists."
    name, proxy = proxy_of(url) or ("", "")
    scheme = proxy.partition("://")[0]
    if scheme.startswith("socks") and (scheme in _PROXY_SCHEMES or "socksio" in str(error)):
        return (
            f"{name} = {_shown(proxy)} is a SOCKS proxy, which needs the package socksio: pip "
            f"install 'httpx[socks]'. {_without(url)}"
        )
    if "://" in proxy and scheme not in _PROXY_SCHEMES:
        return (
            f"{name} = {_shown(proxy)} has the scheme {scheme}; use {', '.join(_PROXY_SCHEMES)}. "
            + _without(url)
        )
    about = f" Check {name} = {_shown(proxy)}. {_without(url)}" if proxy else ""
    return f"No connection to {url} can be prepared: {str(error).rstrip('.')}.{about}"


def why_no_answer(error: Exception, url: httpx.URL) -> str:
    """Why a request failed, and what to check."""
    text = str(error).rstrip(".") or type(error).__name__
    proxy = proxy_of(url)
    if isinstance(error, httpx.TimeoutException):
        text = f"the time of timeout_s was not enough ({type(error).__name__})"
    if isinstance(error, RuntimeError) and "event loop" in text.lower():
        return f"{text}. Use an AsyncClient in one event loop alone, that of its first call."
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"{text}. Set SSL_CERT_FILE to the certificate authority of the service, and unset it "
            "if it is wrong."
        )
    if proxy is not None:
        return f"{text}. It was sent to the proxy {_shown(proxy[1])} of {proxy[0]}. {_without(url)}"
    if isinstance(error.__cause__, socket.gaierror) or "Name or service" in text:
        return f"{text}. Check the name {url.host} and the DNS server."
    return f"{text}. Check that the service runs at this address and that timeout_s is long enough."


def _shown(proxy: str) -> str:
    """A proxy without its user name and password."""
    scheme, _, rest = proxy.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]


def _without(url: httpx.URL) -> str:
    return f"For a direct connection add the host to NO_PROXY: NO_PROXY={url.host}."
