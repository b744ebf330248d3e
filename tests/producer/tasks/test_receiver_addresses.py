"""Which addresses webhooks may go to, and that the checked address is the one connected to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

import httpcore
import pytest

from inferq.producer.tasks.addresses import AddressRefused, CheckedBackend, is_public


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "127.0.0.1", "127.255.255.255", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "192.0.0.192"),
        *("198.18.0.1", "192.0.2.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.88.99.1"),
        *("::", "::1", "fe80::1", "fe80::1%lo", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1"),
        *("64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1", "2001::1"),
        *("2001:db8::1", "100::1", "5f00::1"),
    ],
)
def test_an_address_that_is_not_public_is_known_as_such(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700::1111",
     "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::1"],
)  # fmt: skip
def test_a_public_address_is_known_as_such(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


class Names:
    """A name server in a dictionary: each look-up of a name gives the next of its answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.connected: list[str] = []
        names = self

        async def getaddrinfo(_: Any, host: str, port: int, **__: Any) -> list[Any]:
            answers = names.answers[host]
            found = answers.pop(0) if len(answers) > 1 else answers[0]
            return [(0, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

        async def connect_tcp(_: Any, host: str, *__: Any) -> Any:
            names.connected.append(host)
            raise httpcore.ConnectError("nobody there")

        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect_tcp)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


async def test_a_name_of_a_private_address_is_refused(names: Names) -> None:
    names.answers["inside.example"] = [["10.0.0.1"]]
    with pytest.raises(AddressRefused, match=r"inside.example is 10\.0\.0\.1"):
        await CheckedBackend().connect_tcp("inside.example", 443)
    names.answers["10.0.0.1"] = [["10.0.0.1"]]
    with pytest.raises(AddressRefused, match=r"^10\.0\.0\.1 is not a public address$"):
        await CheckedBackend().connect_tcp("10.0.0.1", 443)
    assert names.connected == []


async def test_a_name_of_a_public_and_a_private_address_is_refused(names: Names) -> None:
    names.answers["both.example"] = [["1.1.1.1", "::ffff:7f00:1"]]
    with pytest.raises(AddressRefused):
        await CheckedBackend().connect_tcp("both.example", 443)
    assert names.connected == []


async def test_a_name_that_changes_its_address_is_looked_up_once_only(names: Names) -> None:
    names.answers["rebinding.example"] = [["1.1.1.1", "2606:4700::1111"], ["127.0.0.1"]]
    with pytest.raises(httpcore.ConnectError, match="nobody there"):
        await CheckedBackend().connect_tcp("rebinding.example", 443)
    assert names.connected == ["1.1.1.1", "2606:4700::1111"]


async def test_networks_that_are_allowed_are_let_through(names: Names) -> None:
    names.answers |= {"in.example": [["10.1.2.3"]], "out.example": [["10.2.0.1"]]}
    backend = CheckedBackend([ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("::/0")])
    with pytest.raises(httpcore.ConnectError):
        await backend.connect_tcp("in.example", 443)
    with pytest.raises(AddressRefused):
        await backend.connect_tcp("out.example", 443)
    assert names.connected == ["10.1.2.3"]


async def test_a_name_that_nobody_knows_is_a_connection_that_failed() -> None:
    with pytest.raises(httpcore.ConnectError, match="cannot be resolved"):
        await CheckedBackend().connect_tcp("no-such-name.invalid", 443)
