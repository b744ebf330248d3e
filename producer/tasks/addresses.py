"""Where webhooks may go: addresses of the public internet, checked after the name is resolved."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import httpcore

IPAddress = IPv4Address | IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

#: What is routed on the public internet as IPv6; all else is private, reserved or embeds IPv4.
_GLOBAL_V6: Final = ipaddress.IPv6Network("2000::/3")
#: IPv6 that a gateway of the network turns into IPv4 (RFC 6052).
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_TEREDO: Final = ipaddress.IPv6Network("2001::/32")
#: Of the protocols' own (RFC 6890), where a cloud has its metadata, and of 6to4 relays, which
#: forward to addresses inside (RFC 7526).
_SPECIAL_V4: Final = (
    ipaddress.IPv4Network("192.0.0.0/24"),
    ipaddress.IPv4Network("192.88.99.0/24"),
)


class AddressRefused(Exception):
    """A receiver's host is, or resolves to, an address that webhooks may not go to."""


def is_public(address: IPAddress) -> bool:
    """Whether an address is one of the public internet.

    Not loopback, private, link-local (cloud metadata), shared (CGNAT), multicast or reserved, nor
    IPv6 that leads to such an IPv4 address.
    """
    if isinstance(address, IPv4Address):
        is_special = any(address in network for network in _SPECIAL_V4)
        return address.is_global and not address.is_multicast and not is_special
    embedded = _embedded(address)
    if embedded is not None:
        return is_public(embedded)
    return address in _GLOBAL_V6 and address.is_global and address not in _TEREDO


def _embedded(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to the very addresses that were checked: a second look-up cannot name another one.

    `allowed` are networks that webhooks may go to although they are not public. Raises
    `AddressRefused` if any address of a host is refused, and httpcore's errors.
    """

    def __init__(self, allowed: Sequence[IPNetwork] = ()) -> None:
        self._allowed = tuple(allowed)
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve, check, and connect to the first address that answers."""
        failure: httpcore.ConnectError | httpcore.ConnectTimeout | None = None
        for address in await self._resolve(host, port):
            try:
                return await self._backend.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or httpcore.ConnectError(f"{host} has no address")

    async def sleep(self, seconds: float) -> None:
        """Wait, for httpcore."""
        await asyncio.sleep(seconds)

    async def _resolve(self, host: str, port: int) -> list[IPAddress]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from None
        addresses = list(dict.fromkeys(ipaddress.ip_address(row[4][0]) for row in found))
        for address in addresses:
            if not is_public(address) and not self._is_allowed(address):
                name = host if host == str(address) else f"{host} is {address}, which"
                raise AddressRefused(f"{name} is not a public address")
        return addresses

    def _is_allowed(self, address: IPAddress) -> bool:
        return any(
            address.version == network.version and address in network for network in self._allowed
        )
