"""The data of the status page: queues with their workers, and what a worker's blocks hold."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response

from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.status.history import SAMPLE_S
from inferq.producer.gateway.status.shown import blocks_shown, queue_shown
from inferq.producer.workers import WorkerInfo

router = APIRouter(tags=["status"])


@router.get("/status/queues", summary="What the queues hold, and who serves them")
async def show_queues(request: Request) -> Response:
    """Return each queue now and over the last ten minutes, with its workers.

    A key that may not use all models sees the workers of those it may use, and their queues.
    """
    gateway: Gateway = request.app.state.gateway
    access: Access = request.state.access
    shown = []
    for queue in gateway.settings.queues:
        workers = _visible(gateway, access, queue)
        if workers or access.models is None:
            status = gateway.status
            shown.append(queue_shown(queue, status.overview(queue), status.history(queue), workers))
    return _json({"object": "status", "interval_s": SAMPLE_S, "queues": shown})


@router.get("/status/blocks", summary="What a worker's KV blocks hold")
async def show_blocks(
    request: Request,
    queue: Annotated[str, Query(description="Its queue.", max_length=100)],
    worker: Annotated[str, Query(description="Its name.", max_length=200)],
    partition: Annotated[int, Query(description="Its partition.", ge=0, lt=1024)] = 0,
) -> Response:
    """Return the blocks as they were a moment ago, null until the worker has told.

    Asking is what makes it tell, about once a second from its next report on, for ten seconds.
    `runs` has four numbers for each run of equal blocks, those of the device first: how many, their
    place in `states`, how many sequences hold each, and the place in `sequences` of the first of
    these (0 where there is none).
    """
    gateway: Gateway = request.app.state.gateway
    known = queue in gateway.settings.queues and _visible(gateway, request.state.access, queue)
    if not known or (worker, partition) not in [(each.name, each.partition) for each in known]:
        raise HttpError(
            404,
            f"There is no worker {worker!r} in partition {partition} of the queue {queue!r}.",
            param="worker",
            code="worker_not_found",
        )
    snapshot = await gateway.status.block_snapshot(queue, partition, worker)
    return _json(
        {
            "object": "blocks",
            "queue": queue,
            "partition": partition,
            "worker": worker,
            "snapshot": None if snapshot is None else blocks_shown(snapshot),
        }
    )


def _visible(gateway: Gateway, access: Access, queue: str) -> list[WorkerInfo]:
    return [
        worker
        for worker in gateway.directory.workers(queue)
        if access.models is None or any(map(access.may_use, (worker.model, *worker.adapters)))
    ]


def _json(body: dict[str, Any]) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(orjson.dumps(body), media_type="application/json", headers=headers)
