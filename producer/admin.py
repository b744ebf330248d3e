"""What operators do with a queue: look at it, drain workers, deal with dead letters."""

from __future__ import annotations

import asyncio
import functools
from types import TracebackType
from typing import Final, Self

from inferq.producer.async_client import DEFAULT_TIMEOUT_S
from inferq.producer.partitions import Partitions
from inferq.producer.request import check_seconds
from inferq.producer.server import RedisServer
from inferq.producer.workers import WorkerInfo, read_workers
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import new_job_id
from inferq.protocol.replies import DeadLetter, QueueOverview
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.snapshots import BlockSnapshot
from inferq.protocol.watching import mark_watched, read_snapshot

#: Most dead letters read in one call.
LETTERS_AT_ONCE: Final = 100


class QueueAdmin:
    """An operator's view of one queue with all its partitions; for one event loop.

    - `url`, `queue`, `partitions`: as for `AsyncClient`.
    - `timeout_s`: longest time for one command, with its retries, in seconds.

    Every method raises `ServerLost` when the server cannot be reached or refuses us.
    """

    def __init__(
        self,
        url: str | None = None,
        queue: str | None = None,
        *,
        partitions: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._partitions = Partitions(
            url, queue, partitions, timeout_s=check_seconds("timeout_s", timeout_s)
        )

    @classmethod
    def over(cls, connections: Partitions) -> Self:
        """Return a view by the connections of somebody else, who closes them."""
        admin = cls.__new__(cls)
        admin._partitions = connections  # noqa: SLF001 - of this class
        return admin

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._partitions.queue

    @property
    def num_partitions(self) -> int:
        """Into how many partitions the queue is split."""
        return self._partitions.number

    async def overview(self) -> QueueOverview:
        """Return what the queue holds, its partitions together."""
        parts = await asyncio.gather(
            *(server.call(scripts.overview) for server, scripts in self._all())
        )
        return functools.reduce(QueueOverview.joined, parts)

    async def workers(self) -> list[WorkerInfo]:
        """Return the last report of every worker, by partition and name."""
        reports = await asyncio.gather(
            *(read_workers(server, scripts) for server, scripts in self._all())
        )
        return [worker for report in reports for worker in report]

    async def watch(self) -> None:
        """Have workers tell what their blocks hold for the next ten seconds, and report often."""
        await asyncio.gather(
            *(
                server.call(functools.partial(mark_watched, server.commands, scripts.keys))
                for server, scripts in self._all()
            )
        )

    async def block_snapshot(self, worker: str, partition: int = 0) -> BlockSnapshot | None:
        """Return what a worker's blocks held a moment ago; None unless it was watched then.

        Raises `DecodeError` for one that cannot be read.
        """
        server, scripts = self._one(partition)
        return await server.call(
            functools.partial(read_snapshot, server.commands, scripts.keys, worker)
        )

    async def drain(self, worker: str) -> None:
        """Ask a worker to drain and end, as SIGTERM does; it learns of it at its next report.

        Raises `InvalidRequestError` if no partition knows a worker of this name.
        """
        asked = [
            await server.call(functools.partial(scripts.drain, worker))
            for server, scripts in self._all()
        ]
        if not any(asked):
            raise InvalidRequestError(
                f"queue {self.queue!r} has no worker {worker!r}", field="worker"
            )

    async def dead_letters(self, partition: int = 0) -> list[DeadLetter]:
        """Return all dead letters of a partition, oldest first."""
        server, scripts = self._one(partition)
        letters: list[DeadLetter] = []
        while True:
            after = letters[-1].entry_id if letters else "-"
            more = await server.call(
                functools.partial(scripts.dead_letters, after=after, count=LETTERS_AT_ONCE)
            )
            letters += more
            if len(more) < LETTERS_AT_ONCE:
                return letters

    async def dead_letter(self, entry_id: str, partition: int = 0) -> DeadLetter:
        """Return one dead letter; raise `InvalidRequestError` if there is none of this id."""
        server, scripts = self._one(partition)
        return await server.call(lambda: scripts.dead_letter(entry_id))

    async def redrive(self, entry_id: str, partition: int = 0) -> str:
        """Submit a crashed job anew, with its count of crashes at 0; return its new id.

        Raises `InvalidRequestError` if there is no such dead letter, or it is an undecodable one.
        """
        server, scripts = self._one(partition)
        job_id = new_job_id(partition)  # the same in every retry
        return await server.call(lambda: scripts.redrive(entry_id, job_id=job_id))

    async def drop(self, entry_id: str, partition: int = 0) -> None:
        """Remove a dead letter for good; one that is gone already is no error."""
        server, scripts = self._one(partition)
        await server.call(lambda: scripts.drop_dead_letter(entry_id))

    def _one(self, partition: int) -> tuple[RedisServer, QueueScripts]:
        if not 0 <= partition < self.num_partitions:
            raise InvalidRequestError(
                f"{partition} is not in [0, {self.num_partitions})",
                field="partition",
                limit=self.num_partitions,
            )
        return self._partitions.server(partition), self._partitions.scripts(partition)

    def _all(self) -> list[tuple[RedisServer, QueueScripts]]:
        return [self._one(partition) for partition in range(self.num_partitions)]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._partitions.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
