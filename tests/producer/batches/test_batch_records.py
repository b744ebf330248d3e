"""Files and batches as Redis knows them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient
from inferq.producer.batches.records import (
    BatchRecord,
    Counts,
    FileFault,
    FileRecord,
    Status,
    Terms,
    encode_counts,
    is_batch_id,
    is_file_id,
    new_batch_id,
    new_file_id,
)
from inferq.producer.batches.store import BatchStore
from inferq.protocol.acl import Role, acl_rules
from inferq.protocol.errors import DecodeError, InvalidRequestError
from inferq.protocol.keys import BatchKeys, Lane


def make_file(**fields: Any) -> FileRecord:
    given = {"id": new_file_id(), "bytes": 3, "created_at": 1, "filename": "ü.jsonl"}
    return FileRecord(**{**given, "purpose": "batch", **fields})


def batch_of(file: FileRecord, **fields: Any) -> BatchRecord:
    given = {"id": new_batch_id(), "endpoint": "/v1/completions", "input_file_id": file.id}
    terms = Terms(queues=("q",), allowed_models=("a",), models={"m": "q"}, tool_format="json")
    return BatchRecord(**{**given, "created_at": 1, "expires_at": 2, "terms": terms, **fields})


@pytest.fixture
async def any_store(server: EmbeddedServer) -> Any:
    """A store on each kind of server, with the rights of a gateway."""
    async with redis.asyncio.Redis.from_url(server.url) as admin:
        rules = acl_rules(Role.GATEWAY, "q").split()
        await admin.execute_command("ACL", "SETUSER", "gate", "on", ">secret", *rules)  # type: ignore[no-untyped-call]
    async with AsyncClient(server.url.replace("redis://", "redis://gate:secret@"), "q") as client:
        yield BatchStore(client)


async def test_records_are_read_as_they_were_written(any_store: BatchStore) -> None:
    owner = new_file_id()
    file = make_file(owner=owner, expires_at=2**40)
    await any_store.create_file(file)
    await any_store.create_file(make_file(id=file.id, filename="another"))  # a repeat
    assert await any_store.file(file.id) == file
    batch = batch_of(file, owner=owner, metadata={"k": "ü"}, output_expires_after_s=3600)
    await any_store.create_batch(batch)
    await any_store.create_batch(batch)
    assert await any_store.batch(batch.id) == batch
    assert await any_store.file("file-unknown") is None
    assert await any_store.batch("batch_unknown") is None
    assert is_file_id(file.id)
    assert is_batch_id(batch.id)
    assert not is_file_id(batch.id)


async def test_pages_are_of_one_owner_in_either_order(any_store: BatchStore) -> None:
    owner = new_file_id()
    made = [make_file(owner=owner, purpose=("batch", "batch_output")[k % 2]) for k in range(7)]
    for file in made:
        await any_store.create_file(file)
    await any_store.create_file(make_file(owner=f"{owner}-2"))
    first = await any_store.files(owner, limit=3)
    rest = await any_store.files(owner, limit=99, after=first.records[-1].id)
    assert (first.has_more, rest.has_more) == (True, False)
    shown = [file.id for file in [*first.records, *rest.records]]
    assert sorted(shown) == sorted(file.id for file in made)
    upwards = await any_store.files(owner, limit=7, order="asc")
    assert [file.id for file in upwards.records] == shown[::-1]
    assert not upwards.has_more
    some = await any_store.files(owner, limit=2, purpose="batch_output", order="asc")
    assert {file.purpose for file in some.records} == {"batch_output"}
    assert some.has_more
    assert (await any_store.files("nobody")).records == []
    with pytest.raises(InvalidRequestError) as caught:
        await any_store.files(f"{owner}-2", after=made[0].id)
    assert caught.value.field == "after"
    batches = [batch_of(made[0], owner=owner) for _ in range(3)]
    for batch in batches:
        await any_store.create_batch(batch)
    page = await any_store.batches(owner, limit=2)
    assert page.has_more
    last = await any_store.batches(owner, limit=2, after=page.records[-1].id)
    assert {b.id for b in [*page.records, *last.records]} == {b.id for b in batches}


async def test_more_files_than_are_read_at_once_are_paged_too(store: BatchStore) -> None:
    owner = new_file_id()
    wanted = [make_file(owner=owner, purpose="batch_output") for _ in range(2)]
    for file in [wanted[0], *(make_file(owner=owner) for _ in range(150)), wanted[1]]:
        await store.create_file(file)
    page = await store.files(owner, limit=9, purpose="batch_output", order="asc")
    assert {file.id for file in page.records} == {file.id for file in wanted}
    assert len((await store.files(owner, limit=140)).records) == 140


async def test_the_input_of_a_batch_stays_until_its_end(store: BatchStore, queue: str) -> None:
    file = make_file()
    with pytest.raises(InvalidRequestError) as caught:
        await store.create_batch(batch_of(file))
    assert caught.value.field == "input_file_id"
    await store.create_file(file)
    await store.create_batch(batch_of(file, terms=Terms(queues=(queue,))))
    with pytest.raises(InvalidRequestError) as caught:
        await store.delete_file(file.id)
    assert caught.value.field == "file_id"
    [taken] = await store.take(queue, most=1, lease_ms=60_000)
    await store.finish(taken, Status.COMPLETED, record_expires_at=2**40)
    assert await store.delete_file(file.id)
    assert not await store.delete_file(file.id)
    assert await store.file(file.id) is None
    assert file.id not in [each.id for each in (await store.files(None, limit=9999)).records]


async def test_what_becomes_of_a_batch_is_told_with_its_times(
    store: BatchStore, queue: str
) -> None:
    file = make_file(owner="alice")
    await store.create_file(file)
    batch = batch_of(file, owner="alice", terms=Terms(queues=(queue,)))
    await store.create_batch(batch)
    [taken] = await store.take(queue, most=1, lease_ms=60_000)
    counts = Counts(3, 2, 1, 10, 5, 7)
    fields = {"counts": encode_counts(counts), "model": "m"}
    assert await store.write(taken, fields, lease_ms=60_000) is Status.VALIDATING  # type: ignore[arg-type]
    status = await store.write(taken, {}, lease_ms=60_000, status=Status.IN_PROGRESS)
    assert status is Status.IN_PROGRESS
    await store.write(taken, {}, lease_ms=60_000, status=Status.FINALIZING)
    output, errors = make_file(owner="alice", expires_at=2**40), make_file(expires_at=2**40)
    fault = FileFault("odd", "It is odd.", 7, "n")
    await store.finish(
        taken,
        Status.COMPLETED,
        record_expires_at=2**40,
        counts=counts,
        faults=[fault],
        output=output,
        errors=errors,
    )
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.status, done.counts, done.model) == (Status.COMPLETED, counts, "m")
    assert (done.output_file_id, done.error_file_id) == (output.id, errors.id)
    assert done.errors == (fault,)
    assert await store.file(output.id) == output
    times = (done.in_progress_at, done.finalizing_at, done.completed_at)
    assert all(moment is not None and abs(moment - time.time()) < 600 for moment in times)
    assert done.failed_at is done.cancelled_at is done.expired_at is None


async def test_a_batch_is_cancelled_until_its_files_are_put_together(
    store: BatchStore, queue: str
) -> None:
    file = make_file()
    await store.create_file(file)
    batches = [batch_of(file, terms=Terms(queues=(queue,))) for _ in range(2)]
    for batch in batches:
        await store.create_batch(batch)
    first, second = await store.take(queue, most=2, lease_ms=60_000)
    asked = await store.request_cancel(first.record.id)
    assert asked is not None
    assert asked.status is Status.CANCELLING
    assert asked.cancelling_at is not None
    assert await store.request_cancel(first.record.id) == asked
    kept = await store.write(first, {}, lease_ms=60_000, status=Status.FINALIZING)
    assert kept is Status.CANCELLING
    await store.write(second, {}, lease_ms=60_000, status=Status.FINALIZING)
    with pytest.raises(InvalidRequestError, match="finalizing"):
        await store.request_cancel(second.record.id)
    await store.finish(first, Status.CANCELLED, record_expires_at=2**40)
    with pytest.raises(InvalidRequestError, match="cancelled"):
        await store.request_cancel(first.record.id)
    assert await store.request_cancel("batch_unknown") is None


def spoilt(hash_field: str) -> dict[str, str]:
    """A value that the field of a batch cannot have."""
    return {
        "terms": {"terms": '{"queues": []}'},
        "status": {"status": "odd"},
        "created_at": {"created_at": "today"},
        "errors": {"errors": "[1]"},
        "counts": {"counts": "[]"},
        "owner": {"owner": b"\xff"},  # type: ignore[dict-item]
    }[hash_field]


@pytest.mark.parametrize(
    "field", ["terms", "status", "created_at", "errors", "counts", "owner", "id", "token"]
)
async def test_a_record_that_cannot_be_read_stands_in_nobodys_way(
    store: BatchStore, queue: str, valkey_client: redis.asyncio.Redis, field: str
) -> None:
    file, owner = make_file(), new_file_id()
    await store.create_file(file)
    terms = Terms(queues=(queue,))
    bad, good = (batch_of(file, owner=owner, terms=terms) for _ in "ab")
    for batch in (bad, good):
        await store.create_batch(batch)
    key = BatchKeys().batch(bad.id)
    if field == "id":
        await valkey_client.hdel(key, "id")
    elif field == "token":
        await valkey_client.hset(key, "token", "none")
    else:
        await valkey_client.hset(key, mapping=spoilt(field))
    [taken] = await store.take(queue, most=9, lease_ms=1)
    assert taken.record == good
    due = BatchKeys().due(queue)
    good_at, bad_at = [await valkey_client.zscore(due, each.id) for each in (good, bad)]
    assert bad_at - good_at > 30_000  # it is let be for longer than a lease
    if field not in ("id", "token"):
        with pytest.raises(DecodeError, match=bad.id):
            await store.batch(bad.id)
        assert (await store.batches(owner)).records == [good]


async def test_a_file_whose_record_cannot_be_read_is_left_out_of_lists(
    store: BatchStore, valkey_client: redis.asyncio.Redis
) -> None:
    owner = new_file_id()
    bad, good = (make_file(owner=owner) for _ in "ab")
    for file in (bad, good):
        await store.create_file(file)
    await valkey_client.hdel(BatchKeys().file(bad.id), "bytes")
    assert (await store.files(owner)).records == [good]
    with pytest.raises(DecodeError, match=bad.id):
        await store.file(bad.id)


async def test_what_a_newer_version_adds_to_a_record_is_passed_over(
    store: BatchStore, valkey_client: redis.asyncio.Redis
) -> None:
    file = make_file()
    await store.create_file(file)
    batch = batch_of(file)
    await store.create_batch(batch)
    counts = Counts(total=3)
    more = {
        "terms": json.dumps({**json.loads(batch.terms.encode()), "new": 1}),
        "counts": json.dumps({**json.loads(encode_counts(counts)), "new": 1}),
        "errors": json.dumps([{"code": "odd", "message": "It is odd.", "new": 1}]),
        "new": "1",
    }
    await valkey_client.hset(BatchKeys().batch(batch.id), mapping=more)
    found = await store.batch(batch.id)
    assert found == replace(batch, counts=counts, errors=(FileFault("odd", "It is odd."),))


async def test_terms_travel_whole() -> None:
    terms = Terms(
        queues=("a", "b"),
        models={"m": "a"},
        allowed_models=(),
        default_model="m",
        lane=Lane.NORMAL,
        default_max_tokens=5,
        accept_webhooks=True,
        max_prompts=2,
        max_outputs=3,
    )
    assert Terms.decode(terms.encode()) == terms


def test_all_keys_share_one_slot() -> None:
    keys = BatchKeys()
    for key in (keys.file("f"), keys.files("o"), keys.batch("b"), keys.parts("b")):
        assert key.startswith(BatchKeys.PREFIX)
    for key in (keys.batches(None), keys.due("q"), keys.expiring):
        assert key.startswith(BatchKeys.PREFIX)
    with pytest.raises(InvalidRequestError):
        keys.due("no queue")
