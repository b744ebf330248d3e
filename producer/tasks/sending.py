"""One attempt to deliver a webhook: a signed POST, and what its answer means."""

from __future__ import annotations

import asyncio
import email.utils
import ssl
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

import httpcore

from inferq.producer.tasks.addresses import AddressRefused, CheckedBackend
from inferq.producer.tasks.deliveries import TakenDelivery
from inferq.producer.tasks.signing import Secrets, signed_headers
from inferq.protocol.trace_context import TraceContext
from inferq.version import __version__

#: Longest wait in seconds that a receiver may ask for.
MAX_RETRY_AFTER_S: Final = 86_400.0

_GONE: Final = 410
_BUSY: Final = frozenset({429, 503})


class Outcome(StrEnum):
    """What an attempt came to."""

    DELIVERED = "delivered"
    RETRY = "retry"
    #: No other attempt can succeed, or the receiver wants none.
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that was made; `pause_s` is for how long its host is to be left alone."""

    outcome: Outcome
    reason: str = ""
    status: int = 0
    pause_s: float = 0.0


class Sender:
    """Makes attempts, several at once if asked.

    `backend` decides where they may go, `timeout_s` bounds each from the look-up of the name to the
    answer's headers; its body is not read.
    """

    def __init__(
        self,
        secrets: Secrets,
        backend: CheckedBackend,
        *,
        timeout_s: float,
        allow_http: bool,
    ) -> None:
        self._secrets = secrets
        self._backend = backend
        self._timeout_s = timeout_s
        self._allow_http = allow_http
        self._tls = ssl.create_default_context()

    async def send(self, delivery: TakenDelivery, trace: TraceContext | None = None) -> Attempt:
        """Post a delivery once, in a trace that the receiver may go on from."""
        if urlsplit(delivery.url).scheme != "https" and not self._allow_http:
            return Attempt(Outcome.DEAD, "plain http is not allowed here")
        secrets = self._secrets.get(delivery.secret)
        if secrets is None:
            return Attempt(Outcome.RETRY, f"there is no secret named {delivery.secret!r} here")
        headers = {
            **signed_headers(secrets, delivery.delivery_id, int(time.time()), delivery.body),
            "content-type": "application/json",
            "content-length": str(len(delivery.body)),
            "user-agent": f"inferq/{__version__}",
            **_headers_of(trace),
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(delivery, headers)
        except TimeoutError:
            # a host that hangs shall not take all places again at once
            reason = f"no answer within {self._timeout_s:.15g} s"
            return Attempt(Outcome.RETRY, reason, pause_s=self._timeout_s)
        except AddressRefused as error:
            return Attempt(Outcome.DEAD, str(error))
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            return Attempt(Outcome.RETRY, f"{type(error).__name__}: {error}"[:500])
        except (httpcore.UnsupportedProtocol, ValueError) as error:
            return Attempt(Outcome.DEAD, f"{type(error).__name__}: {error}"[:500])

    async def _post(self, delivery: TakenDelivery, headers: dict[str, str]) -> Attempt:
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self._tls,
                max_connections=1,
                max_keepalive_connections=0,
                network_backend=self._backend,
            ) as pool,
            pool.stream(
                "POST", delivery.url, headers=list(headers.items()), content=delivery.body
            ) as response,
        ):
            return _judge(response)


def _headers_of(trace: TraceContext | None) -> dict[str, str]:
    if trace is None:
        return {}
    state = {} if trace.tracestate is None else {"tracestate": trace.tracestate}
    return {"traceparent": trace.traceparent, **state}


def _judge(response: httpcore.Response) -> Attempt:
    status = response.status
    if 200 <= status < 300:
        return Attempt(Outcome.DELIVERED, status=status)
    if status == _GONE:
        return Attempt(Outcome.DEAD, "the receiver answered 410: it wants no more", status)
    reason = f"the receiver answered {status}"
    if 300 <= status < 400:
        reason += ", and redirects are not followed"
    return Attempt(Outcome.RETRY, reason, status, _retry_after(response) if status in _BUSY else 0)


def _retry_after(response: httpcore.Response) -> float:
    """Return the seconds that `Retry-After` asks for; 0 where it asks for nothing readable."""
    value = next((v for k, v in response.headers if k.lower() == b"retry-after"), b"")
    text = value.decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        seconds = float(text)
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
