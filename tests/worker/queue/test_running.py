"""What a job's log turns into, and what the registry reserves."""

from __future__ import annotations

import pytest

from inferq.protocol import output_log
from inferq.protocol.keys import Lane
from inferq.protocol.messages import Event, FinishReason, Terminal, TokenLogprob
from inferq.worker.queue.running import RunningJob, RunningJobs


def make_job(job_id: str = "j", reserved: int = 0, acknowledged: int = 0) -> RunningJob:
    return RunningJob(
        id=job_id,
        epoch=1,
        lane=Lane.NORMAL,
        attempts=1,
        queued_ms=0,
        reserved=reserved,
        claimed_at=0.0,
        lease_until=1e9,
        acknowledged=acknowledged,
        inherited=acknowledged,
    )


def decode(job: RunningJob) -> list[tuple[int, Event]]:
    return [(total, Event.decode(data)) for total, data in job.unsent(2**30).events]


def test_tokens_since_the_acknowledged_offset_travel_in_one_event() -> None:
    job = make_job()
    for token_id, text in [(5, "a"), (6, ""), (7, "bc")]:
        job.log.append(token_id, text, TokenLogprob(-0.5))
    job.acknowledged = 1
    [(total, event)] = decode(job)
    assert total == 3
    assert (event.offset, event.token_ids, event.text) == (1, (6, 7), "bc")
    assert event.text_ends == (0, 2)
    assert event.logprobs == (TokenLogprob(-0.5),) * 2
    assert event.terminal is None


def test_the_end_travels_with_the_last_tokens_and_what_was_held_back() -> None:
    job = make_job()
    job.log.append(5, "a", None)
    [output] = job.log.outputs
    output.tail = "tail"
    output.finish_reason = FinishReason.STOP
    job.terminal = Terminal(FinishReason.STOP)
    [(total, event)] = decode(job)
    assert (total, event.text, event.text_ends) == (1, "atail", (1,))
    assert event.finish_reason is FinishReason.STOP
    assert event.terminal == job.terminal


def test_an_end_without_new_tokens_is_an_event_of_its_own() -> None:
    job = make_job()
    job.log.append(5, "a", None)
    job.acknowledged = 1
    assert not job.is_dirty
    job.terminal = Terminal(FinishReason.CANCELLED)
    [(total, event)] = decode(job)
    assert (total, event.token_ids) == (1, ())
    assert event.terminal == job.terminal


def test_a_long_backlog_is_split_and_only_its_last_event_is_the_end(monkeypatch) -> None:
    monkeypatch.setattr(output_log, "MAX_EVENT_TOKENS", 4)
    job = make_job()
    for i in range(10):
        job.log.append(i, "x", None)
    job.terminal = Terminal(FinishReason.LENGTH)
    events = decode(job)
    assert [total for total, _ in events] == [4, 8, 10]
    assert [event.terminal is not None for _, event in events] == [False, False, True]
    assert [t for _, event in events for t in event.token_ids] == list(range(10))


def test_reservations_are_whole_blocks_and_come_back() -> None:
    jobs = RunningJobs(capacity_tokens=160, block_size=16, max_jobs=4)
    first, second = make_job("a", jobs.round_up(17)), make_job("b", jobs.round_up(16))
    jobs.add(first)
    jobs.add(second)
    assert jobs.free_tokens == 160 - 32 - 16
    jobs.reserve(first, 1)
    assert jobs.free_tokens == 160 - 16 - 16
    jobs.remove(first)
    jobs.remove(first)
    jobs.remove(second)
    assert (jobs.free_tokens, jobs.free_places) == (160, 4)


def test_another_job_of_the_same_id_is_not_the_registered_one() -> None:
    jobs = RunningJobs(capacity_tokens=160, block_size=16, max_jobs=4)
    old, new = make_job("a", 16), make_job("a", 16)
    jobs.add(old)
    jobs.remove(old)
    jobs.add(new)
    assert new in jobs
    assert old not in jobs
    jobs.remove(old)
    assert new in jobs


@pytest.mark.parametrize(
    ("prompt", "budget", "outputs", "blocks"),
    [(3, 13, 1, 1), (3, 14, 1, 2), (32, 16, 4, 2 + 4), (33, 15, 4, 2 + 4), (40, 9, 3, 2 + 3 * 2)],
)
def test_outputs_share_the_full_blocks_of_the_prompt_and_copy_its_rest(
    prompt: int, budget: int, outputs: int, blocks: int
) -> None:
    jobs = RunningJobs(capacity_tokens=160, block_size=16, max_jobs=4)
    assert jobs.tokens_for(prompt, budget, outputs) == 16 * blocks
