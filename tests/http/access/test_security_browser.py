"""What browsers are told: a strict policy, and no other origin unless it is configured."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

UI = Path(__file__).parents[3] / "service" / "ui"
SHOP = "https://shop.example"
PREFLIGHT = {
    "origin": SHOP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-api-key,content-type",
}


def policy(service: Any) -> dict[str, set[str]]:
    text = service.client.get("/").headers["content-security-policy"]
    parts = [part.split() for part in text.split(";")]
    return {name: set(sources) for name, *sources in parts}


def test_the_policy_allows_this_service_alone_and_nothing_inline(running_service) -> None:
    found = policy(running_service)
    assert found.pop("img-src") == {"'self'", "blob:", "data:"}
    assert found.pop("media-src") == {"'self'", "blob:"}
    assert all(sources <= {"'self'", "'none'"} for sources in found.values())
    for name in ("default-src", "script-src", "style-src", "connect-src", "form-action"):
        assert found[name] == {"'self'"}
    for name in ("object-src", "base-uri", "frame-ancestors", "frame-src", "worker-src"):
        assert found[name] == {"'none'"}


def test_the_camera_is_for_the_page_alone(running_service) -> None:
    allowed = running_service.client.get("/").headers["permissions-policy"]
    assert allowed == "camera=(self), geolocation=(), microphone=()"


@pytest.mark.parametrize("path", sorted(UI.rglob("*.html")), ids=lambda path: path.name)
def test_a_page_has_no_inline_script_or_style_and_names_no_other_host(path: Path) -> None:
    html = path.read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", html)
    assert not re.search(r"""(src|href|action)=["']?(https?:)?//""", html)


@pytest.mark.parametrize("path", sorted(UI.rglob("*.js")), ids=lambda path: path.name)
def test_a_script_of_the_page_makes_no_code_and_no_markup_from_text(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    assert not re.search(r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML", script)
    assert not re.search(r"document\.write|setAttribute\(.style.", script)


def test_other_origins_are_told_nothing_unless_they_are_configured(running_service) -> None:
    answer = running_service.client.get("/galleries", headers={"origin": SHOP})
    assert not any(name.startswith("access-control-") for name in answer.headers)
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    preflight = running_service.client.options("/search", headers=PREFLIGHT)
    assert preflight.status_code == 405
    assert not any(name.startswith("access-control-") for name in preflight.headers)


def test_a_configured_origin_may_call_with_a_key_and_another_may_not(
    start_service: Callable[..., Any], pictures: list[bytes]
) -> None:
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
