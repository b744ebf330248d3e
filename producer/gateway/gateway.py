"""What every route uses: one object for the life of the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from inferq.producer.admin import QueueAdmin
from inferq.producer.async_client import AsyncClient
from inferq.producer.gateway.admission.keys import KeyRing
from inferq.producer.gateway.admission.limits import Limiter
from inferq.producer.gateway.batch_files import BatchFiles
from inferq.producer.gateway.directory import Directory
from inferq.producer.gateway.errors import HttpError, to_http_error
from inferq.producer.gateway.in_flight import InFlight
from inferq.producer.gateway.metrics import GatewayMetrics
from inferq.producer.gateway.requests.body import BodyMemory
from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.gateway.status.watcher import StatusWatcher
from inferq.protocol.errors import QueueFull
from inferq.protocol.task_ends import end_tasks
from inferq.runtime.tracing import start_tracing

if TYPE_CHECKING:
    from inferq.runtime.spans import Tracing

logger = structlog.get_logger("inferq.gateway")

#: Seconds until a part that failed is run again.
RESTART_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """Everything that routes share, as `request.app.state.gateway`; frozen, its parts are not."""

    settings: GatewaySettings
    #: By queue, in the order of the settings.
    clients: Mapping[str, AsyncClient]
    directory: Directory
    keys: KeyRing
    limiter: Limiter
    in_flight: InFlight
    bodies: BodyMemory
    metrics: GatewayMetrics
    status: StatusWatcher
    #: None where the settings name no storage for files.
    batches: BatchFiles | None
    #: None where nobody wants traces.
    tracing: Tracing | None

    @classmethod
    def build(cls, settings: GatewaySettings) -> Gateway:
        """Make all parts; connects to nothing yet.

        Raises `InvalidRequestError`, and `MissingExtraError` for a storage that needs one.
        """
        clients = {
            queue: AsyncClient(
                settings.redis_url.get_secret_value(),
                queue,
                partitions=settings.partitions,
                queue_limit=settings.queue_limit,
                retention_s=settings.retention_s,
            )
            for queue in settings.queues
        }
        directory = Directory(settings, clients)
        # by the clients' connections, of which there are few
        admins = {queue: QueueAdmin.over(client.connections) for queue, client in clients.items()}
        in_flight = InFlight(settings.max_concurrent_requests)
        bodies = BodyMemory(settings.max_bodies_bytes)
        return cls(
            settings=settings,
            clients=clients,
            directory=directory,
            keys=KeyRing(settings.api_keys_file),
            limiter=Limiter(clients[settings.queues[0]]),
            in_flight=in_flight,
            bodies=bodies,
            metrics=GatewayMetrics(admins, in_flight, bodies),
            status=StatusWatcher(admins, directory.workers),
            batches=BatchFiles.build(settings, clients[settings.queues[0]]),
            tracing=start_tracing("inferq-gateway", settings.tracing_endpoint),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the parts up to date that follow something; close clients and storage at the end."""
        await self.directory.look()
        parts: tuple[_Part, ...] = (self.directory, self.keys, self.limiter, self.status)
        tasks = [asyncio.create_task(_kept_running(part)) for part in parts]
        try:
            yield
        finally:
            await end_tasks(tasks)
            await self.limiter.aclose()
            for client in self.clients.values():
                await client.aclose()
            if self.batches is not None:
                self.batches.storage.close()
            if self.tracing is not None:
                await asyncio.to_thread(self.tracing.close)

    def to_http_error(self, error: Exception, queue: str | None = None) -> HttpError:
        """Return any error as an answer; a full `queue` says when it will have room."""
        if not isinstance(error, QueueFull):
            return to_http_error(error)
        excess = 1
        if error.depth is not None and error.limit is not None:
            excess += error.depth - error.limit
        return to_http_error(error, retry_after_s=self.directory.retry_after(queue, excess))


class _Part(Protocol):
    async def run(self) -> None:
        """Work until cancelled."""


async def _kept_running(part: _Part) -> None:
    """Run a part, again if a fault of ours ends it."""
    while True:
        try:
            await part.run()
            return
        except Exception:
            logger.exception("part failed", part=type(part).__name__)
        await asyncio.sleep(RESTART_S)
