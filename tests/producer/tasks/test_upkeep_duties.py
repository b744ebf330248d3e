"""Maintenance through RQ: sweeping, counting anew, promoting, trimming; each in its interval."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from inferq import Client
from inferq.producer.tasks.batches import EXPIRE_BATCHES
from inferq.producer.tasks.command import run_burst
from inferq.producer.tasks.conductor import Conductor
from inferq.producer.tasks.duties import SWEEP, Duties
from inferq.producer.tasks.rq_connection import rq_connection
from inferq.producer.tasks.safe_rq import TaskRefused, task_queue
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.keys import Lane, QueueKeys, TaskKeys
from inferq.protocol.servers import ServerUrl


def test_upkeep_mends_what_is_wrong(
    make_settings: Callable[..., TasksSettings], sync_client: Client, plain_redis: redis.Redis,
    queue: str,
) -> None:  # fmt: skip
    keys = QueueKeys(queue)
    delayed = sync_client.submit("x", delay_s=60)
    sync_client.submit("y")
    plain_redis.zadd(keys.delayed, {delayed.id: 1})
    plain_redis.hset(keys.load, "queued", 17)
    plain_redis.hset(keys.workers, "gone", b"\x80")  # a report without a time
    plain_redis.xadd(keys.dead, {"kind": "undecodable"}, id="1000-0")
    plain_redis.xadd(keys.dead, {"kind": "undecodable"})

    run_burst(make_settings())

    assert plain_redis.xlen(keys.jobs(Lane.NORMAL)) == 2
    assert plain_redis.hexists(keys.workers, "gone") is False
    assert plain_redis.xlen(keys.dead) == 1
    # again in the next interval, counted after the promotion
    plain_redis.delete(TaskKeys(queue).interval("sweep"))
    run_burst(make_settings())
    assert plain_redis.hget(keys.load, "queued") == b"2"


def test_two_conductors_give_each_duty_once_in_its_interval(
    settings: TasksSettings, plain_redis: redis.Redis, queue: str
) -> None:
    async def conduct() -> None:
        url = ServerUrl.parse(settings.redis_url.get_secret_value())
        with rq_connection(url) as connection:
            both = [Conductor(settings, connection) for _ in range(2)]
            for _ in range(3):
                await asyncio.gather(*(conductor.run_once() for conductor in both))
            assert all(conductor.check_ready() is None for conductor in both)
            for conductor in both:
                await conductor.aclose()

    asyncio.run(conduct())
    assert task_queue(plain_redis, queue).count == 3
    names = sorted(job.func_name or "" for job in task_queue(plain_redis, queue).jobs)
    assert names == ["promote_delayed", "sweep", "trim_dead_letters"]


def test_what_is_for_all_queues_is_given_once_however_many_there_are(
    make_settings: Callable[..., TasksSettings], plain_redis: redis.Redis, queue: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    plain_redis.delete(TaskKeys.shared_interval(EXPIRE_BATCHES))
    queues = tuple(f"{queue}-{number}" for number in range(3))
    settings = make_settings(queues=queues, batch_storage=str(tmp_path))

    async def conduct() -> None:
        with rq_connection(ServerUrl.parse(settings.redis_url.get_secret_value())) as connection:
            conductor = Conductor(settings, connection)
            for _ in range(2):
                await conductor.run_once()
            await conductor.aclose()

    asyncio.run(conduct())
    given = [job.func_name for name in queues for job in task_queue(plain_redis, name).jobs]
    assert given.count(EXPIRE_BATCHES) == 1
    assert given.count(SWEEP) == 3


async def test_a_task_for_another_processs_queue_is_refused(settings: TasksSettings) -> None:
    with pytest.raises(TaskRefused, match="not one of this process's"):
        await Duties(settings).sweep("someone-elses")
