"""Which queue serves a model, as the workers' reports tell, and how fast each queue drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from inferq.producer.async_client import AsyncClient
from inferq.producer.gateway.admission.access import ANYONE, Access
from inferq.producer.gateway.drain_rate import DrainRate
from inferq.producer.gateway.errors import DEFAULT_RETRY_S, BadRequest, ModelNotServed, NoWorker
from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.workers import WorkerInfo
from inferq.protocol.errors import InferqError

logger = structlog.get_logger("inferq.gateway")

#: Seconds that a model is known after its last worker: its absence is a 503, not a 404.
REMEMBERED_S: Final = 300.0
#: Seconds without a successful look after which the gateway is not ready, at least.
STALE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Served:
    """A model and the queue that gets its jobs."""

    queue: str
    client: AsyncClient
    model: str
    #: Whether a worker that serves it has reported lately.
    is_alive: bool
    #: The shortest context of its workers, in tokens; 0: not known.
    max_model_len: int
    #: The model that this one is an adapter of.
    parent: str | None = None


@dataclass(slots=True)
class _View:
    """What was last seen of one queue."""

    client: AsyncClient
    #: By name.
    models: dict[str, Served] = field(default_factory=dict)
    workers: list[WorkerInfo] = field(default_factory=list)
    num_alive: int = 0
    looked_s: float | None = None
    is_lost: bool = False
    rate: DrainRate = field(default_factory=DrainRate)


class Directory:
    """The models of all queues, looked up once in a while by one task (`run`)."""

    def __init__(self, settings: GatewaySettings, clients: Mapping[str, AsyncClient]) -> None:
        self._settings = settings
        self._views = {queue: _View(clients[queue]) for queue in settings.queues}
        self._served: dict[str, Served] = {}
        #: When each model was served last (monotonic clock) and first (since 1970), in seconds.
        self._seen: dict[str, tuple[float, int]] = {}
        self._warned: set[str] = set()
        self._choose()

    @property
    def num_alive(self) -> int:
        """How many workers have reported lately, over all queues."""
        return sum(view.num_alive for view in self._views.values())

    @property
    def is_current(self) -> bool:
        """Whether every queue was looked at within the last seconds."""
        limit = time.monotonic() - max(STALE_S, 3 * self._settings.poll_interval_s)
        return all(view.looked_s and view.looked_s > limit for view in self._views.values())

    def workers(self, queue: str) -> list[WorkerInfo]:
        """Return the last reports of a queue's workers, those that are gone included."""
        return self._views[queue].workers

    def served(self) -> list[Served]:
        """Return every model that can be asked for now, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def first_seen_s(self, model: str) -> int:
        """Return when this gateway first saw the model, in seconds since 1970."""
        return self._seen[model][1] if model in self._seen else int(time.time())

    def find(self, model: str | None, access: Access = ANYONE) -> Served:
        """Return who serves a model; without a name, the only one there is (adapters aside).

        Raises a 404 that lists the models, a 400 without a name, a 403 for one that `access` does
        not allow, or a 503 when no worker lives.
        """
        if model is None:
            return self._only(access)
        if model in self._served:
            access.check_model(model)
            return self._served[model]
        if model in self._settings.models or model in self._seen:
            raise NoWorker(f"No worker serves the model {model!r} at present. Try again later.")
        if not self._served:
            raise NoWorker("No worker is alive. Try again later.")
        raise ModelNotServed(model, filter(access.may_use, self._served))

    def retry_after(self, queue: str | None, excess: int = 1) -> float:
        """Return in how many seconds a full queue will have room for `excess` jobs, at its rate.

        None means the slowest queue: for where nobody knows which was full.
        """
        views = self._views.values() if queue is None else [self._views[queue]]
        waits = [view.rate.seconds_for(excess) for view in views]
        return max((wait for wait in waits if wait is not None), default=DEFAULT_RETRY_S)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.poll_interval_s)
            await self.look()

    async def look(self) -> None:
        """Look at all queues once; of one whose server is away, keep what was known."""
        await asyncio.gather(*(self._look_at(queue) for queue in self._views))
        self._choose()

    async def _look_at(self, queue: str) -> None:
        view = self._views[queue]
        try:
            workers = await view.client.workers()
            length = await view.client.queue_length()
        except InferqError as error:
            if not view.is_lost:
                logger.error("queue not reached", queue=queue, error=str(error))
            view.is_lost = True
            return
        if view.is_lost:
            logger.info("queue reached again", queue=queue)
        view.is_lost = False
        alive = [worker for worker in workers if worker.is_alive and worker.model]
        view.workers = workers
        view.num_alive = len(alive)
        view.models = _models_of(queue, view.client, alive)
        view.looked_s = time.monotonic()
        view.rate.note(length.finished_total, view.looked_s)

    def _choose(self) -> None:
        """Give each model its queue: the one in `models`, else the first that serves it."""
        placed = self._settings.models
        chosen: dict[str, Served] = {}
        for queue, view in self._views.items():
            for name, served in view.models.items():
                if placed.get(name, queue) != queue:
                    continue
                if name in chosen:
                    self._warn_of_two(chosen[name], queue)
                chosen.setdefault(name, served)
        if self._settings.accept_without_workers:
            for name, queue in placed.items():
                waiting = Served(queue, self._views[queue].client, name, False, 0)
                chosen.setdefault(name, waiting)
        self._served = chosen
        now = time.monotonic()
        seen = {name: last for name, last in self._seen.items() if last[0] > now - REMEMBERED_S}
        self._seen = seen | {name: (now, self.first_seen_s(name)) for name in chosen}

    def _only(self, access: Access) -> Served:
        models = [served for served in self._served.values() if access.may_use(served.model)]
        models = [served for served in models if served.parent is None] or models
        if not self._served:
            raise NoWorker("No worker is alive. Try again later.")
        if len(models) != 1:
            names = ", ".join(sorted(served.model for served in models)) or "none"
            raise BadRequest(
                f"Missing required parameter: 'model'. Served are: {names}.",
                param="model",
                code="missing_required_parameter",
            )
        return models[0]

    def _warn_of_two(self, first: Served, other: str) -> None:
        if first.model not in self._warned:
            self._warned.add(first.model)
            logger.warning(
                "model served by two queues, the first gets its jobs",
                model=first.model,
                queue=first.queue,
                other=other,
            )


def _models_of(queue: str, client: AsyncClient, workers: Iterable[WorkerInfo]) -> dict[str, Served]:
    """Return what the workers of one queue serve; a context is that of the shortest."""
    models: dict[str, Served] = {}
    for worker in workers:
        parents = {worker.model: None} | dict.fromkeys(worker.adapters, worker.model)
        for name, parent in parents.items():
            served = Served(queue, client, name, True, worker.max_model_len, parent)
            known = models.get(name, served)
            models[name] = replace(
                known, max_model_len=min(known.max_model_len, worker.max_model_len)
            )
    return models
