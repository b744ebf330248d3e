"""Which of a batch's queues serves its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.records import Terms


class QueueClients:
    """Clients by queue, made when they are asked for."""

    def __init__(self, make: Callable[[str], AsyncClient]) -> None:
        self._make = make
        self._made: dict[str, AsyncClient] = {}

    def of(self, queue: str) -> AsyncClient:
        """Return the client of a queue."""
        if queue not in self._made:
            self._made[queue] = self._make(queue)
        return self._made[queue]

    async def aclose(self) -> None:
        """Close all clients."""
        for client in self._made.values():
            await client.aclose()


@dataclass(frozen=True, slots=True)
class FoundQueue:
    """A queue for the model, if there is one now; `is_unknown` if living workers serve others."""

    client: AsyncClient | None
    is_unknown: bool = False


async def find_queue(clients: QueueClients, model: str | None, terms: Terms) -> FoundQueue:
    """Return where a model's jobs go: as the gateway's settings say, else as workers report.

    A single queue gets them all: they wait there for a worker, which may serve the model or refuse
    them. Raises `ServerLost`.
    """
    placed = None if model is None else terms.models.get(model)
    if placed is not None or len(terms.queues) == 1:
        return FoundQueue(clients.of(placed or terms.queues[0]))
    is_each_alive = True
    for queue in terms.queues:
        workers = [each for each in await clients.of(queue).workers() if each.is_alive]
        if any(model == each.model or model in each.adapters for each in workers):
            return FoundQueue(clients.of(queue))
        is_each_alive = is_each_alive and bool(workers)
    return FoundQueue(None, is_unknown=is_each_alive)
