"""Batches before a worker whose engine is a stand-in, and storages.

- `start_stand_in(**options)`  a worker of `queue` that serves the model `stand-in`
- `storage_url`, `storage`  a folder
- `s3_storage`  a bucket of moto's server, in this process
- `client`, `store`  the SDK's client, and the records
- `make_batch(lines)`  uploads lines and makes a batch of them
- `run_turn()`  what a tasks process does, in the test's own
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferq.producer import AsyncClient
from inferq.producer.batches.answering import RETENTION_S
from inferq.producer.batches.models import QueueClients
from inferq.producer.batches.records import (
    BatchRecord,
    FileRecord,
    Terms,
    new_batch_id,
    new_file_id,
)
from inferq.producer.batches.storage import FileStorage
from inferq.producer.batches.store import BatchStore
from inferq.producer.batches.turns import BatchTurn, TurnPlan

MODEL = "stand-in"
CHAT = "/v1/chat/completions"
#: Generous: the machine may be busy.
TIMEOUT_S = 90


@pytest.fixture(params=["folder", "s3"])
def any_storage(request: pytest.FixtureRequest, storage: FileStorage) -> FileStorage:
    """Each kind of storage in turn."""
    made: FileStorage = storage
    if request.param == "s3":
        made = request.getfixturevalue("s3_storage")
    return made


@pytest.fixture
def storage_url(tmp_path: Path) -> str:
    return str(tmp_path / "files")


@pytest.fixture
def storage(storage_url: str) -> FileStorage:
    return FileStorage(storage_url)


@pytest.fixture
def store(client: AsyncClient) -> BatchStore:
    return BatchStore(client)


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    """A line of a batch: a chat of one message."""
    given = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Say {custom_id}."}],
        "max_tokens": 3,
        "seed": 1,
        **body,
    }
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": given}


@pytest.fixture
def line_of() -> Callable[..., dict[str, Any]]:
    """`chat_line(custom_id, **body)`."""
    return chat_line


def encode_lines(lines: list[Any]) -> bytes:
    """Lines as JSONL; bytes as they are."""
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


@pytest.fixture
def make_batch(
    store: BatchStore, storage: FileStorage, queue: str
) -> Callable[..., Awaitable[BatchRecord]]:
    """Upload lines (or bytes) and make a batch of them."""

    async def make(
        lines: list[Any] | bytes,
        *,
        seconds: int = 3600,
        endpoint: str = CHAT,
        storage: FileStorage = storage,
        terms: dict[str, Any] | None = None,
        **fields: Any,
    ) -> BatchRecord:
        data = lines if isinstance(lines, bytes) else encode_lines(lines)
        now = int(time.time())
        file = FileRecord(
            id=new_file_id(), bytes=len(data), created_at=now, filename="in", purpose="batch"
        )
        async with storage.writer(file.id) as writer:
            await writer.write(data)
            await writer.commit()
        await store.create_file(file)
        batch = BatchRecord(
            id=new_batch_id(),
            endpoint=endpoint,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + seconds,
            terms=Terms(**{"queues": (queue,), **(terms or {})}),
            **fields,
        )
        await store.create_batch(batch)
        return batch

    return make


@pytest.fixture
async def run_turn(
    valkey_url: str, queue: str, store: BatchStore, storage: FileStorage
) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Run what is due, until there is no more or `stop` is set."""
    made: list[QueueClients] = []

    async def run(
        stop: asyncio.Event | None = None,
        *,
        storage: FileStorage = storage,
        queue_limit: int | None = None,
        **options: Any,
    ) -> None:
        clients = QueueClients(
            lambda name: AsyncClient(
                valkey_url, name, retention_s=RETENTION_S, queue_limit=queue_limit
            )
        )
        made.append(clients)
        given = {"window": 32, "lease_s": 10.0, "file_age_s": 86_400, **options}
        plan = TurnPlan(store=store, storage=storage, clients=clients, **given)
        async with asyncio.timeout(TIMEOUT_S):
            await BatchTurn(plan).run(queue, stop or asyncio.Event())

    yield run
    for clients in made:
        await clients.aclose()


@pytest.fixture
def read_lines(
    store: BatchStore, storage: FileStorage
) -> Callable[..., Awaitable[list[dict[str, Any]]]]:
    """The lines of a file that a batch made; none without a file."""

    async def read(file_id: str | None, storage: FileStorage = storage) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        data = b"".join([chunk async for chunk in storage.read(file_id)])
        record = await store.file(file_id)
        assert record is not None
        assert record.bytes == len(data)
        assert record.purpose == "batch_output"
        return [json.loads(line) for line in data.splitlines()]

    return read


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The URL of an S3 in this process, with a bucket `batches`."""
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "testing")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/batches", method="PUT")).close()
        yield endpoint
        server.stop()


@pytest.fixture
def s3_storage(s3_endpoint: str, queue: str) -> FileStorage:
    """A storage that no other test uses."""
    return FileStorage(f"s3://batches/{queue}", endpoint_url=s3_endpoint)
