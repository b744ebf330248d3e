"""The commands about jobs: submit, result, status, cancel."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from datetime import datetime

from inferq.cli import exit_codes
from inferq.cli.flags import place_of
from inferq.cli.printing import print_fields, print_json, print_result, print_stream
from inferq.cli.prompt_input import read_prompt
from inferq.cli.sampling_flags import sampling_params
from inferq.cli.worker_watch import tell_if_no_worker
from inferq.producer import Client, JobHandle
from inferq.protocol.errors import InvalidRequestError, JobCancelled, JobExpired, JobFailed


def submit(arguments: argparse.Namespace) -> int:
    """Put a job into the queue and, unless told not to, wait for its answer."""
    params = sampling_params(arguments)
    prompt = read_prompt(arguments)
    with _client(arguments) as client:
        job = client.submit(
            prompt,
            params,
            lane=arguments.lane,
            deadline_s=arguments.deadline,
            delay_s=arguments.delay,
            not_before=_time(arguments.not_before),
            idempotency_key=arguments.idempotency_key,
            metadata=_metadata(arguments.metadata),
            model=arguments.model,
            cache_salt=arguments.cache_salt,
        )
        if arguments.wait:
            with tell_if_no_worker(client, client.queue, job):
                return _wait(job, arguments, from_offset=0, several=params.n > 1)
    if arguments.json:
        print_json({"job_id": job.id, "created": job.created})
    else:
        print(job.id)
    return exit_codes.OK


def result(arguments: argparse.Namespace) -> int:
    """Wait for the answer of a job submitted before."""
    with _client(arguments) as client:
        job = client.job(arguments.job_id)
        with tell_if_no_worker(client, client.queue, job):
            return _wait(job, arguments, from_offset=arguments.from_offset)


def status(arguments: argparse.Namespace) -> int:
    """Say where a job stands."""
    with _client(arguments) as client:
        found = client.job(arguments.job_id).status()
    shown = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    if found.note is not None:
        with contextlib.suppress(UnicodeDecodeError):  # the producer's own, and mostly text
            shown["note"] = found.note.decode()
    if arguments.json:
        print_json(shown)
    else:
        print_fields(shown)
    return exit_codes.OK


def cancel(arguments: argparse.Namespace) -> int:
    """Ask for a job's end."""
    with _client(arguments) as client:
        outcome = client.job(arguments.job_id).cancel()
    if arguments.json:
        print_json({"job_id": arguments.job_id, "outcome": str(outcome)})
    else:
        print(outcome)
    return exit_codes.OK


def _wait(
    job: JobHandle, arguments: argparse.Namespace, *, from_offset: int, several: bool = False
) -> int:
    timeout_s = arguments.timeout
    try:
        if arguments.stream or from_offset:
            stream = job.stream(from_offset, timeout_s=timeout_s)
            print_stream(stream, as_json=arguments.json, several=several)
        else:
            _print_whole(job, timeout_s, as_json=arguments.json)
    except KeyboardInterrupt:
        print(
            f"interrupted; the job goes on. Its answer: inferq result {job.id}\n"
            f"To end it: inferq cancel {job.id}",
            file=sys.stderr,
        )
        return exit_codes.INTERRUPTED
    return exit_codes.OK


def _print_whole(job: JobHandle, timeout_s: float, *, as_json: bool) -> None:
    try:
        print_result(job.result(timeout_s=timeout_s), as_json=as_json)
    except (JobCancelled, JobExpired, JobFailed):
        if not as_json:
            # its stream has what there was before the end, and then raises this again
            print_stream(job.stream(timeout_s=timeout_s), as_json=False)
        raise


def _client(arguments: argparse.Namespace) -> Client:
    place = place_of(arguments)
    return Client(place.redis_url, place.queue, partitions=place.partitions)


def _metadata(pairs: list[str]) -> dict[str, str]:
    metadata = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequestError(f"{pair!r} is not of the form KEY=VALUE", field="metadata")
        metadata[key] = value
    return metadata


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(
            f"{text!r} is not a time such as 2030-01-31T08:00:00+00:00", field="not_before"
        ) from None
