"""Who a request comes from: only a proxy that is trusted may say that it is somebody else."""

import pytest

from service.access.address import parse_network
from tests.support.seams import Addresses


def seen(peer: str | None, *forwarded: str, trusted: tuple[str, ...] = ()) -> str:
    headers = [(b"x-forwarded-for", text.encode("latin-1")) for text in forwarded]
    client = None if peer is None else (peer, 1234)
    return Addresses(trusted).of({"type": "http", "headers": headers, "client": client})


def test_what_a_client_claims_is_ignored() -> None:
    assert seen("203.0.113.9", "10.1.1.1") == "203.0.113.9"
    assert seen("127.0.0.1", "10.1.1.1") == "127.0.0.1"
    assert seen("203.0.113.9", "10.1.1.1", trusted=("10.0.0.0/8",)) == "203.0.113.9"


@pytest.mark.parametrize(
    ("forwarded", "expected"),
    [
        (("198.51.100.7",), "198.51.100.7"),
        (("6.6.6.6, 198.51.100.7",), "198.51.100.7"),
        (("6.6.6.6", "198.51.100.7"), "198.51.100.7"),
        (("198.51.100.7, 10.0.0.9",), "198.51.100.7"),
        (("198.51.100.7, junk, 10.0.0.9",), "10.0.0.9"),
        (("junk",), "10.0.0.5"),
        (("",), "10.0.0.5"),
        ((), "10.0.0.5"),
    ],
)
def test_behind_a_trusted_proxy_the_nearest_address_that_is_none_counts(
    forwarded: tuple[str, ...], expected: str
) -> None:
    assert seen("10.0.0.5", *forwarded, trusted=("10.0.0.0/8",)) == expected


def test_an_ipv6_client_is_its_network() -> None:
    assert seen("2001:db8:1:2:aaaa::1") == seen("2001:db8:1:2:bbbb::2") == "2001:db8:1:2::/64"
    assert seen("2001:db8:1:3::1") == "2001:db8:1:3::/64"
    assert seen("::ffff:203.0.113.9") == "203.0.113.9"
    assert seen("fe80::1%eth0") == "fe80::/64"
    assert seen("::1") == "::1"


def test_a_client_without_an_address_is_local() -> None:
    assert seen(None) == "local"
    assert seen("testclient") == "local"


@pytest.mark.parametrize("text", ["proxy", "10.0.0.0/33", "", "0.0.0.0/0", "::/0"])
def test_a_proxy_that_is_no_address_or_is_everybody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        parse_network(text)
