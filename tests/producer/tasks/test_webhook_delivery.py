"""Webhooks from the end of a job to a receiver, through a real RQ worker."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from standardwebhooks import Webhook as Verifier

from inferq import Client, Webhook
from inferq.producer.tasks import deliveries as deliveries_module
from inferq.producer.tasks import duties, outbox
from inferq.producer.tasks.deliveries import DeadDelivery, NewDelivery
from inferq.producer.tasks.duties import Duties
from inferq.producer.tasks.sending import Sender
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import QueueKeys, TaskKeys

Settings = Callable[..., TasksSettings]


@pytest.fixture
def dead(deliveries: Any) -> Callable[[], list[DeadDelivery]]:
    return lambda: deliveries(lambda store: store.dead())  # type: ignore[no-any-return]


def test_an_end_is_told_once_and_signed(
    end_job: Any, burst_until: Any, receiver: Any, secret: str, queue: str, deliveries: Any
) -> None:
    job_id = end_job()
    burst_until(lambda: receiver.got)
    [(headers, body)] = receiver.got
    told = Verifier(secret).verify(body, headers)
    assert told["type"] == "job.completed"
    assert told["data"] == {
        "job_id": job_id,
        "queue": queue,
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 3},
        "error": None,
    }
    assert headers["webhook-id"] == outbox.delivery_id_of(job_id)
    assert headers["content-type"] == "application/json"
    [attempt] = deliveries(lambda store: store.log(most=10))
    assert (attempt.outcome, attempt.status, attempt.attempt) == ("delivered", 200, 1)
    assert attempt.host == "127.0.0.1"


def test_only_the_events_asked_for_are_told(
    end_job: Any, burst_until: Any, receiver: Any, sync_client: Client, plain_redis: redis.Redis,
    queue: str,
) -> None:  # fmt: skip
    end_job(events=("job.failed", "job.cancelled"))
    cancelled = sync_client.submit("x", webhook=Webhook(receiver.url, events=("job.cancelled",)))
    cancelled.cancel()
    burst_until(lambda: plain_redis.xlen(QueueKeys(queue).outbox) == 0)
    [told] = receiver.told
    assert told["type"] == "job.cancelled"
    assert told["data"]["job_id"] == cancelled.id


def test_failures_are_tried_again_with_the_same_id(
    end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, secret: str, deliveries: Any
) -> None:
    receiver.answers = [make_answer(500), make_answer(404), make_answer(204)]
    job_id = end_job()
    burst_until(lambda: len(receiver.got) == 3)
    assert set(receiver.ids) == {f"msg_{job_id}"}
    for headers, body in receiver.got:
        Verifier(secret).verify(body, headers)
    log = deliveries(lambda store: store.log(most=10))
    assert [(each.outcome, each.status, each.attempt) for each in reversed(log)] == [
        ("retry", 500, 1), ("retry", 404, 2), ("delivered", 204, 3),
    ]  # fmt: skip


def test_a_delivery_is_dead_when_its_tries_are_used_up_and_can_be_driven_again(
    end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, dead: Any, deliveries: Any
) -> None:
    receiver.answers = [make_answer(500)]
    job_id = end_job()
    burst_until(dead)
    [given_up] = dead()
    assert (given_up.job_id, given_up.attempts) == (job_id, 4)
    assert "500" in given_up.reason
    assert len(receiver.got) == 4
    receiver.answers = [make_answer(200)]
    deliveries(lambda store: store.redrive(given_up.delivery_id))
    burst_until(lambda: len(receiver.got) == 5)
    assert dead() == []
    assert set(receiver.ids) == {given_up.delivery_id}
    with pytest.raises(InvalidRequestError, match="no dead delivery"):
        deliveries(lambda store: store.redrive(given_up.delivery_id))


def test_410_ends_all_tries(
    end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, dead: Any
) -> None:
    receiver.answers = [make_answer(410)]
    end_job()
    burst_until(dead)
    assert len(receiver.got) == 1
    assert "410" in dead()[0].reason


def test_redirects_are_not_followed(
    end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, dead: Any
) -> None:
    receiver.answers = [make_answer(307, {"location": f"{receiver.url}/elsewhere"})]
    end_job()
    burst_until(dead)
    assert len(receiver.got) == 4
    assert "redirects are not followed" in dead()[0].reason


def test_a_receiver_that_does_not_answer_in_time_is_tried_again(
    end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, make_settings: Settings,
    deliveries: Any,
) -> None:  # fmt: skip
    receiver.answers = [make_answer(wait_s=2), make_answer()]
    end_job()
    settings = make_settings(webhook_timeout_s=0.5)
    burst_until(lambda: len(receiver.got) == 2, settings)
    last, first = deliveries(lambda store: store.log(most=10))
    assert (first.outcome, first.reason) == ("retry", "no answer within 0.5 s")
    assert last.outcome == "delivered"


def test_a_body_that_never_ends_holds_nobody_up(
    end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, deliveries: Any
) -> None:
    receiver.answers = [make_answer(drip_s=0.05)]
    end_job()
    burst_until(lambda: receiver.got)
    [attempt] = deliveries(lambda store: store.log(most=10))
    assert attempt.outcome == "delivered"
    assert attempt.took_ms < 4000  # its body takes ten seconds


def test_nobody_listening_is_tried_again(end_job: Any, burst_until: Any, dead: Any) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        end_job(f"http://127.0.0.1:{held.getsockname()[1]}/")
        burst_until(dead)
    assert dead()[0].attempts == 4
    assert "ConnectError" in dead()[0].reason


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_kept_for_all_deliveries_to_that_host(
    status: int, end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, deliveries: Any
) -> None:
    receiver.answers = [make_answer(status, {"retry-after": "3"}), make_answer()]
    end_job()
    burst_until(lambda: receiver.got)
    end_job()
    burst_until(lambda: len(receiver.got) == 3)
    *delivered, refused = deliveries(lambda store: store.log(most=10))
    assert refused.outcome == "retry"
    assert [each.outcome for each in delivered] == ["delivered", "delivered"]
    assert min(each.time_ms for each in delivered) >= refused.time_ms + 2900


def test_a_host_is_called_no_more_often_than_allowed(
    end_job: Any, burst_until: Any, receiver: Any, make_settings: Settings
) -> None:
    for _ in range(4):
        end_job()
    began = time.monotonic()
    burst_until(lambda: len(receiver.got) == 4, make_settings(webhook_host_rate=2))
    assert time.monotonic() - began >= 0.9  # two at once, then one each half second
    assert len(set(receiver.ids)) == 4


@pytest.mark.parametrize("given", ["{}", "no JSON"])
def test_a_secret_that_is_not_there_is_waited_for(
    given: str,
    end_job: Any, burst_until: Any, receiver: Any, make_settings: Settings, tmp_path: Path,
    secret: str, deliveries: Any,
) -> None:  # fmt: skip
    secrets = tmp_path / "secrets.json"
    secrets.write_text(given)
    settings = make_settings(
        webhook_secrets_file=secrets,
        webhook_secrets=None,
        webhook_retry_delays_s=",".join(["0.2"] * 50),
    )
    end_job(secret="team")
    burst_until(lambda: deliveries(lambda store: store.log(most=1)), settings)
    assert receiver.got == []
    old = "whsec_" + "A" * 32
    secrets.write_text(f'{{"team": ["{secret}", "{old}"]}}')
    burst_until(lambda: receiver.got, settings)
    [(headers, body)] = receiver.got
    for each in (secret, old):
        Verifier(each).verify(body, headers)


def test_http_is_refused_unless_it_is_allowed(
    end_job: Any, burst_until: Any, receiver: Any, make_settings: Settings, dead: Any
) -> None:
    end_job()
    burst_until(dead, make_settings(webhook_allow_http=False))
    assert "plain http" in dead()[0].reason
    assert receiver.got == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "0x7f.1", "localhost"])
def test_private_addresses_are_refused(
    host: str, end_job: Any, burst_until: Any, receiver: Any, make_settings: Settings, dead: Any
) -> None:
    end_job(receiver.url.replace("127.0.0.1", host))
    burst_until(dead, make_settings(webhook_allowed_networks=()))
    assert "not a public address" in dead()[0].reason
    assert dead()[0].attempts == 1
    assert receiver.got == []


def test_a_crash_before_the_outbox_is_emptied_delivers_once(
    end_job: Any, burst_until: Any, receiver: Any, deliveries: Any, plain_redis: redis.Redis,
    queue: str,
) -> None:  # fmt: skip
    job_id = end_job()
    [(_, fields)] = plain_redis.xrange(QueueKeys(queue).outbox)
    burst_until(lambda: receiver.got)
    # as if whoever moved it had died before it took the entry out
    plain_redis.xadd(QueueKeys(queue).outbox, fields, id="9999999999999-0")
    burst_until(lambda: plain_redis.xlen(QueueKeys(queue).outbox) == 0)
    assert receiver.ids == [f"msg_{job_id}"]
    assert plain_redis.ttl(TaskKeys(queue).delivery(f"msg_{job_id}")) > 86_400


def test_a_delivery_whose_process_died_is_taken_again_but_not_for_ever(
    end_job: Any, burst_until: Any, receiver: Any, deliveries: Any, dead: Any, queue: str,
    plain_redis: redis.Redis, make_settings: Settings,
) -> None:  # fmt: skip
    receiver.answers[0].status = 500
    end_job()
    burst_until(lambda: receiver.got, make_settings(webhook_retry_delays_s="0.3"))

    async def take_and_die(store: Any) -> Any:
        for _ in range(1000):
            if taken := await store.take(most=1, lease_ms=1):
                return taken[0]
            await asyncio.sleep(0.02)
        raise AssertionError("it was never due again")

    last = deliveries(take_and_die)
    assert last.attempt == 2
    time.sleep(0.01)
    burst_until(dead, make_settings(webhook_retry_delays_s="0.3"))
    assert len(receiver.got) == 1
    assert "2 attempts were begun" in dead()[0].reason
    assert not deliveries(lambda store: store.report(last, "delivered"))  # too late
    assert len(dead()) == 1


def test_what_is_no_webhook_in_the_outbox_is_logged_and_goes(
    burst_until: Any, plain_redis: redis.Redis, queue: str, end_job: Any, receiver: Any
) -> None:
    hook = Webhook("https://example.com").encode()
    whole = {"id": "0" * 32 + "-0", "finish": "stop", "time": "1", "hook": hook}
    for fields in ({}, {"id": "x"}, {"hook": "x"}, {"finish": "x"}, {"time": "9" * 30}):
        fields = {**whole, **fields} if fields else {"id": "x"}
        plain_redis.xadd(QueueKeys(queue).outbox, fields)  # type: ignore[arg-type]
    end_job()
    burst_until(lambda: receiver.got)
    assert plain_redis.xlen(QueueKeys(queue).outbox) == 0


def test_more_dead_deliveries_than_are_kept_push_out_the_oldest(
    end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, dead: Any,
    monkeypatch: pytest.MonkeyPatch, plain_redis: redis.Redis, queue: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(deliveries_module, "MAX_DEAD", 2)
    receiver.answers = [make_answer(410)]
    ids = [end_job() for _ in range(3)]
    burst_until(lambda: len(receiver.got) == 3)
    kept = {each.job_id for each in dead()}
    assert len(kept) == 2
    [pushed_out] = set(ids) - kept
    keys = TaskKeys(queue)
    assert not plain_redis.exists(keys.delivery(f"msg_{pushed_out}"))
    assert 0 < plain_redis.ttl(keys.delivery(f"msg_{kept.pop()}")) <= 30 * 86_400


def test_only_the_last_attempts_are_logged(
    monkeypatch: pytest.MonkeyPatch, deliveries: Any, plain_redis: redis.Redis, queue: str
) -> None:
    monkeypatch.setattr(deliveries_module, "MAX_LOG", 10)

    async def try_often(store: Any) -> None:
        await store.accept(NewDelivery("msg_1", "1", "job.failed", "https://h", "default", b"{}"))
        for _ in range(300):
            [taken] = await store.take(most=1, lease_ms=60_000)
            assert await store.report(taken, "retry", reason="x", host="h")

    deliveries(try_often)
    # whole nodes of the stream are dropped, of 100 entries
    assert 10 <= plain_redis.xlen(TaskKeys(queue).log) <= 110


def test_a_process_that_is_to_end_begins_no_more_deliveries(
    receiver: Any, deliveries: Any, settings: TasksSettings, queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(duties, "AT_ONCE", 1)

    async def accept(store: Any) -> None:
        for number in range(3):
            await store.accept(
                NewDelivery(f"msg_{number}", f"{number}", "x", receiver.url, "default", b"{}")
            )

    deliveries(accept)
    asyncio.run(Duties(settings, lambda: bool(receiver.got)).deliver_webhooks(queue))
    assert len(receiver.got) == 1
    asyncio.run(Duties(settings).deliver_webhooks(queue))
    assert sorted(receiver.ids) == ["msg_0", "msg_1", "msg_2"]


def test_a_fault_of_one_delivery_ends_no_other_amidst_its_call(
    receiver: Any, make_answer: Any, deliveries: Any, settings: TasksSettings, queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    receiver.answers = [make_answer(wait_s=0.5), make_answer()]
    send = Sender.send

    async def fail_once_the_other_is_sent(sender: Sender, delivery: Any, trace: Any = None) -> Any:
        if delivery.delivery_id != "msg_bad":
            return await send(sender, delivery, trace)
        while not receiver.got:  # noqa: ASYNC110 - a thread's
            await asyncio.sleep(0.01)
        raise RuntimeError("a fault")

    monkeypatch.setattr(Sender, "send", fail_once_the_other_is_sent)

    async def accept(store: Any) -> None:
        for name in ("bad", "good"):
            await store.accept(
                NewDelivery(f"msg_{name}", name, "x", receiver.url, "default", b"{}")
            )

    deliveries(accept)
    with pytest.raises(RuntimeError, match="a fault"):
        asyncio.run(Duties(settings).deliver_webhooks(queue))
    [attempt] = deliveries(lambda store: store.log(most=10))
    assert (attempt.delivery_id, attempt.outcome) == ("msg_good", "delivered")
    assert receiver.ids == ["msg_good"]
