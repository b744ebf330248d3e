"""Key names and job ids."""

from __future__ import annotations

import inspect
import re
import time
from typing import Any

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane, QueueKeys, new_job_id, partition_of


def test_all_keys_of_a_partition_share_one_hash_tag() -> None:
    keys = QueueKeys("llama", 3)
    names = [
        *(keys.jobs(lane) for lane in Lane),
        *(keys.job("x"), keys.out("x"), keys.idem("a{b}c"), keys.wake("r"), keys.drain("w")),
        *(keys.delayed, keys.leases, keys.dead, keys.load, keys.workers, keys.outbox),
        *(keys.watch, keys.blocks("w")),
    ]
    public = [n for n, _ in inspect.getmembers(QueueKeys) if not n.startswith("_")]
    assert len(names) == len(public) - len(("prefix", "queue", "partition")) + len(Lane) - 1
    assert len(set(names)) == len(names)
    for name in names:
        assert name.startswith("inferq:{llama.3}:")
        assert re.search(r"\{(.*?)\}", name)[1] == "llama.3"  # type: ignore[index]


@pytest.mark.parametrize("queue", ["", "a b", "a{b", "-a", ".a", "x" * 101, "ü", "a:b", "a\n"])
def test_a_queue_name_that_would_break_keys_is_refused(queue: str) -> None:
    with pytest.raises(InvalidRequestError, match="queue"):
        QueueKeys(queue)


@pytest.mark.parametrize("partition", [-1, 1024])
def test_a_partition_out_of_range_is_refused(partition: int) -> None:
    with pytest.raises(InvalidRequestError, match="partition"):
        QueueKeys("q", partition)


def test_job_ids_are_unique_sort_by_time_and_carry_their_partition() -> None:
    first = new_job_id(7)
    time.sleep(0.002)
    ids = [new_job_id(7) for _ in range(1000)]
    assert len({first, *ids}) == 1001
    assert all(first < other for other in ids)
    assert partition_of(first) == 7


@pytest.mark.parametrize(
    "job_id", ["", "x", "0" * 32, "0" * 32 + "-", "0" * 32 + "-1024", "G" * 32 + "-0", None, 5]
)
def test_what_is_no_job_id_is_refused(job_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="job_id"):
        partition_of(job_id)
