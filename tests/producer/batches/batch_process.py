"""Runs what is due in a process of its own, and prints its memory in KiB before and at most."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from inferq.producer import AsyncClient
from inferq.producer.batches.models import QueueClients
from inferq.producer.batches.storage import FileStorage
from inferq.producer.batches.store import BatchStore
from inferq.producer.batches.turns import BatchTurn, TurnPlan


def memory_kib(field: str) -> int:
    """A figure of this program alone: what `getrusage` tells begins with that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


async def main(url: str, queue: str, folder: str) -> None:
    clients = QueueClients(lambda name: AsyncClient(url, name))
    plan = TurnPlan(
        store=BatchStore(clients.of(queue)),
        storage=FileStorage(folder),
        clients=clients,
        window=256,
        lease_s=30.0,
        file_age_s=86_400,
    )
    await clients.of(queue).ping()
    await plan.storage.listing()
    before = memory_kib("VmRSS")
    await BatchTurn(plan).run(queue, asyncio.Event())
    await clients.aclose()
    print(before, memory_kib("VmHWM"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
