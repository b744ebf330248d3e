"""Reads back what was published of a job, so that another worker can go on where the last stopped.

The job and its published events are all the state there is: the detokenizer, the stop matcher and
the position of the random numbers are rebuilt from the tokens.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from inferq.protocol.connection import translate_errors
from inferq.protocol.errors import DecodeError
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import Event, TokenLogprob
from inferq.worker.queue.running import OutputLog


async def read_published(client: Redis, keys: QueueKeys, job_id: str, count: int) -> OutputLog:
    """Return the log of the first `count` tokens of a job, as its result stream has them.

    Raises `DecodeError` if the stream does not hold exactly these (it expired, say), `ServerLost`
    if the server cannot be reached.
    """
    with translate_errors(client):
        entries: list[Any] = await client.xrange(keys.out(job_id)) or []
    log = OutputLog()
    for _, fields in entries:
        event = Event.decode(fields[b"e"])
        if event.offset != len(log.token_ids):
            raise DecodeError(f"events of job {job_id} do not follow each other")
        start = 0
        for position, (token_id, end) in enumerate(
            zip(event.token_ids, event.text_ends, strict=True)
        ):
            log.append(token_id, event.text[start:end], _logprob(event, position))
            start = end
    if len(log.token_ids) != count:
        raise DecodeError(
            f"{count} tokens of job {job_id} were published, {len(log.token_ids)} are left"
        )
    return log


def _logprob(event: Event, position: int) -> TokenLogprob | None:
    return None if event.logprobs is None else event.logprobs[position]
