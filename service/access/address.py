"""Who a request comes from, by address, past the proxies that are trusted."""

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_FORWARDED = "x-forwarded-for"
_NO_ADDRESS = "local"
_IPV6_PREFIX = 64


def parse_network(text: str) -> Network:
    """An address or network such as 10.0.0.0/8. Raises: ValueError that says what to write."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f"{text!r} is no address of a proxy; write an address such as 10.0.0.5 or a network "
            "such as 10.0.0.0/8"
        ) from None
    if network.prefixlen == 0:
        raise ValueError(
            f"{text!r} would believe every client what it writes in X-Forwarded-For; write the "
            "address of your proxy"
        )
    return network


class Addresses:
    """Finds the address of the client; only `trusted` proxies may say that it is another."""

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        self._trusted = tuple(parse_network(text) for text in trusted)

    def of(self, scope: Scope) -> str:
        """The address of the client; of IPv6 its /64 network, which is what one client has.

        X-Forwarded-For is read from its end, where the nearest proxy wrote, up to the first
        address that is no trusted proxy.
        """
        client = scope.get("client")
        peer = _parse(client[0]) if client else None
        if peer is None:
            return _NO_ADDRESS
        if self._is_trusted(peer):
            peer = self._behind(peer, scope)
        return _shown(peer)

    def _behind(self, peer: Address, scope: Scope) -> Address:
        forwarded = ",".join(Headers(scope=scope).getlist(_FORWARDED))
        for text in reversed(forwarded.split(",")):
            address = _parse(text.strip())
            if address is None:
                break
            peer = address
            if not self._is_trusted(address):
                break
        return peer

    def _is_trusted(self, address: Address) -> bool:
        return any(
            address.version == network.version and address in network for network in self._trusted
        )


def address_of(scope: Scope) -> str:
    """The address that the gate found for this request."""
    return str(scope["state"]["address"])


def _parse(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _shown(address: Address) -> str:
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    return str(address)
