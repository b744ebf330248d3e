"""Serves the application over HTTP, and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import structlog
import uvicorn

from inferq.producer.gateway.app import create_app
from inferq.producer.gateway.batch_files import BatchFiles
from inferq.producer.gateway.in_flight import InFlight
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import InvalidRequestError
from inferq.runtime.health import HealthServer

logger = structlog.get_logger("inferq.gateway")

_UVICORN_LOGGER: Final = logging.getLogger("uvicorn.error")

#: Connections that may wait to be accepted.
BACKLOG: Final = 2048
#: Seconds that an idle connection is kept, longer than load balancers keep theirs.
IDLE_S: Final = 75


class GatewayServer:
    """One gateway process: listens from the start, serves until `run` is told to stop.

    Raises `InvalidRequestError` for an address that cannot be listened on, or a bad file of keys.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.app = create_app(settings)
        self._socket = _listen(settings.host, settings.port)
        #: The port of metrics alone, once it is listened on.
        self.metrics_port: int | None = None
        self._server = _Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="on",
                ws="none",
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout_s),
            )
        )

    @property
    def url(self) -> str:
        """Where it listens, as a client writes it."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(
        self,
        stop: asyncio.Event,
        hurry: asyncio.Event | None = None,
        *,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until `stop` is set, then end in order; `hurry` cuts that short.

        `on_ready` is called when requests are answered. Raises `InvalidRequestError` for a port of
        metrics that cannot be listened on, and for a storage of files that can never be written.
        """
        batches: BatchFiles | None = self.app.state.gateway.batches
        try:
            if batches is not None:
                await batches.storage.check_at_start()
            async with self._metrics_port():
                await self._run(stop, hurry or asyncio.Event(), on_ready)
        finally:
            self._socket.close()

    async def _run(
        self, stop: asyncio.Event, hurry: asyncio.Event, on_ready: Callable[[], None]
    ) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        ending = asyncio.create_task(self._end(stop, hurry))
        starting = asyncio.create_task(self._server.is_up.wait())
        try:
            await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                logger.info("serving", url=self.url, queues=list(self._settings.queues))
                on_ready()
            await serving
        finally:
            _UVICORN_LOGGER.removeFilter(_is_no_cut_stream)
            starting.cancel()
            ending.cancel()

    @contextlib.asynccontextmanager
    async def _metrics_port(self) -> AsyncIterator[None]:
        """Answer /metrics on a port of their own while this is entered, if the settings say so."""
        settings, page = self._settings, self.app.state.gateway.metrics.page
        if settings.metrics_port is None:
            yield
            return
        async with HealthServer(
            {},
            port=settings.metrics_port,
            host=settings.metrics_host or settings.host,
            pages={"/metrics": page.answer},
            setting="metrics_port",
        ) as server:
            self.metrics_port = server.port
            logger.info("telling metrics", port=server.port)
            yield

    async def _end(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        in_flight: InFlight = self.app.state.gateway.in_flight
        await stop.wait()
        in_flight.is_ending = True
        logger.info("ending", requests=len(in_flight))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.shutdown_delay_s):
                await hurry.wait()
        _UVICORN_LOGGER.addFilter(_is_no_cut_stream)
        in_flight.closing.set()
        self._server.should_exit = True
        await hurry.wait()
        self._server.force_exit = True


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is up, and leaves signals to whoever runs it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _is_no_cut_stream(record: logging.LogRecord) -> bool:
    """Whether a log line says something else than that a stream was cut, as all are at the end."""
    return "without completing response" not in record.getMessage()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_any = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_any
        )
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host} port {port}: {error.strerror or error}", field="port"
        ) from None
