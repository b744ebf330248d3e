"""https: the certificate is that of the host's name, the connection that of the checked address."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from inferq.producer.tasks.addresses import CheckedBackend
from inferq.producer.tasks.deliveries import TakenDelivery
from inferq.producer.tasks.sending import Outcome, Sender

NAME = "hooks.example"


@pytest.fixture(scope="module")
def certificate(make_certificate: Callable[..., Path]) -> Path:
    return make_certificate(f"DNS:{NAME}")


@pytest.fixture
def port(certificate: Path) -> Iterator[int]:
    """An HTTPS receiver that answers 204."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(204 if self.headers["host"].startswith(NAME) else 421)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def sender(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Sender:
    """A sender that trusts the receiver's certificate, and finds every name on this machine."""

    async def getaddrinfo(_: Any, host: str, port: int, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    return Sender(
        {"default": (b"0" * 32,)},
        CheckedBackend([ipaddress.ip_network("127.0.0.0/8")]),
        timeout_s=20,
        allow_http=False,
    )


async def send(sender: Sender, url: str) -> Any:
    return await sender.send(TakenDelivery("msg_1", 1, url, "default", b"{}"))


async def test_a_certificate_of_the_hosts_name_is_accepted(sender: Sender, port: int) -> None:
    attempt = await send(sender, f"https://{NAME}:{port}/hook")
    assert (attempt.outcome, attempt.status) == (Outcome.DELIVERED, 204)


async def test_a_certificate_of_another_name_is_not(sender: Sender, port: int) -> None:
    attempt = await send(sender, f"https://other.example:{port}/hook")
    assert attempt.outcome is Outcome.RETRY
    assert "certificate verify failed" in attempt.reason


async def test_a_certificate_that_nobody_vouches_for_is_not(
    sender: Sender, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    stranger = Sender(
        {"default": (b"0" * 32,)},
        CheckedBackend([ipaddress.ip_network("127.0.0.0/8")]),
        timeout_s=20,
        allow_http=False,
    )
    attempt = await send(stranger, f"https://{NAME}:{port}/hook")
    assert attempt.outcome is Outcome.RETRY
    assert "certificate verify failed" in attempt.reason
