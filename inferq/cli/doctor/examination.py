"""Asks each area that is wanted, in the order in which one explains the next."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from inferq.cli.doctor import machine, queue, rights, server, variables, worker
from inferq.cli.doctor.findings import AREAS, DEVICES, GROUPS, Area, Finding, Status
from inferq.cli.flags import Place
from inferq.producer import QueueAdmin
from inferq.producer.request import check_seconds
from inferq.producer.server import RedisServer
from inferq.protocol.acl import Role
from inferq.protocol.errors import InferqError, InvalidRequestError
from inferq.protocol.keys import QueueKeys
from inferq.protocol.servers import ServerUrl

#: Checks after whose failure there is nothing to learn from this server.
_TELLING: Final = frozenset({"connection", "part"})
_ON_SERVER: Final = frozenset({"redis", "rights", "queue"})
_OF_WORKER: Final = frozenset(GROUPS["worker"])


def examine(arguments: argparse.Namespace) -> list[Finding]:
    """Look at everything that was asked for.

    Raises `InvalidRequestError` for a bad time-out, or an empty model.
    """
    areas = [area for name in arguments.only or AREAS for area in GROUPS.get(name, (name,))]
    timeout_s = check_seconds("timeout", arguments.timeout)
    if arguments.model == "":
        raise InvalidRequestError("must not be empty", field="--model")
    findings: list[Finding] = []
    if "settings" in areas:
        findings += [*variables.examine(), *variables.similar_names()]
    if _ON_SERVER.intersection(areas):
        findings += _examine_server(arguments, areas, timeout_s)
    given = os.environ.get("INFERQ_TENSOR_PARALLEL_SIZE", "")
    ranks = max(1, int(given)) if given.isdecimal() else 1
    if "machine" in areas:
        findings += machine.examine(machine.System.read(), tensor_parallel_size=ranks)
    if _OF_WORKER.intersection(areas):
        findings += [
            finding
            for finding in _examine_worker(arguments, ranks)
            if finding.area in areas or finding.check == worker.PROCESS
        ]
    return findings


def _examine_worker(arguments: argparse.Namespace, ranks: int) -> list[Finding]:
    """Look at device and model, if it is known which device is meant."""
    device = arguments.device or os.environ.get("INFERQ_DEVICE") or "auto"
    if device not in DEVICES:
        return [
            Area("device").failure(
                worker.PROCESS,
                f"INFERQ_DEVICE: there is no device {device!r}",
                f"set it to one of {', '.join(DEVICES)}, or unset it",
            )
        ]
    model = arguments.model or os.environ.get("INFERQ_MODEL") or None
    return worker.examine(model, device, ranks=ranks)


def _examine_server(
    arguments: argparse.Namespace, areas: Sequence[str], timeout_s: float
) -> list[Finding]:
    """Look at the server, and at the rest of what is on it if it answers."""
    try:
        place = _Place.of(arguments, timeout_s)
    except InferqError as error:
        return [
            Area("redis").failure(
                "connection", str(error), "mend the flag, or the variable that gives it"
            )
        ]
    return asyncio.run(_ask_server(place, areas, [Role(role) for role in arguments.role]))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the queue is."""

    url: ServerUrl
    text: str = field(repr=False)
    keys: QueueKeys
    partitions: int
    timeout_s: float

    @classmethod
    def of(cls, arguments: argparse.Namespace, timeout_s: float) -> _Place:
        """Take the flags, else the variables; raises `InvalidRequestError`."""
        place = Place.of(arguments)
        return cls(
            ServerUrl.parse(place.redis_url),
            place.redis_url,
            QueueKeys(place.queue),
            place.partitions,
            timeout_s,
        )


async def _ask_server(place: _Place, areas: Sequence[str], roles: Sequence[Role]) -> list[Finding]:
    connection = RedisServer(place.url, place.keys.prefix, timeout_s=place.timeout_s)
    findings: list[Finding] = []
    area = "redis"
    try:
        findings = await server.examine(place.url, connection)
        if any(
            finding.check in _TELLING and finding.status is Status.FAILURE for finding in findings
        ):
            return findings
        if "redis" not in areas:
            findings = []
        area = "rights"
        if "rights" in areas:
            is_cluster = place.url.kind == "cluster"
            findings += await rights.examine(connection, place.keys, roles, is_cluster=is_cluster)
        area = "queue"
        if "queue" in areas:
            async with QueueAdmin(
                place.text, place.keys.queue, partitions=place.partitions, timeout_s=place.timeout_s
            ) as admin:
                findings += await queue.examine(admin)
    except InferqError as error:
        findings.append(
            Area(area).failure("look", str(error), "the first failure above may say why")
        )
    finally:
        await connection.aclose()
    return findings
