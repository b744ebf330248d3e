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
from inferq.protocol.messages import Event
from inferq.protocol.output_log import JobLog
from inferq.protocol.stream_pages import read_pages


async def read_published(
    client: Redis, keys: QueueKeys, job_id: str, *, total: int, num_outputs: int
) -> JobLog:
    """Return the log of the first `total` tokens of a job, as its result stream has them.

    Raises `DecodeError` if the stream does not hold exactly these (it expired, say), `ServerLost`
    if the server cannot be reached.
    """
    out = keys.out(job_id)

    async def read(start: str, count: int) -> Any:
        with translate_errors(client):
            return await client.xrange(out, min=start, count=count)

    log = JobLog(num_outputs)
    async for page in read_pages(read):
        for _, fields in page:
            event = Event.decode(fields[b"e"])
            try:
                log.replay(event)
            except ValueError as error:
                raise DecodeError(f"the events of job {job_id} are damaged: {error}") from None
    if log.total != total:
        raise DecodeError(f"{total} tokens of job {job_id} were published, {log.total} are left")
    return log
