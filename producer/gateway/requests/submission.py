"""From a checked request to jobs in the queue: all of them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
import structlog

from inferq.producer import AsyncClient, AsyncJobHandle, StreamEvent
from inferq.producer.gateway.answers.choices import JobChoices
from inferq.producer.gateway.answers.chunks import ChunkEncoder
from inferq.producer.gateway.answers.note import MAX_LISTED_JOBS, Note
from inferq.producer.gateway.requests.delivery import IDEMPOTENCY_HEADER, Delivery
from inferq.producer.gateway.requests.webhooks import signed_for
from inferq.producer.prompt import prompt_token_bound, to_prompt
from inferq.protocol.errors import IdempotencyConflict, InferqError, InvalidRequestError
from inferq.protocol.messages import Prompt
from inferq.protocol.params import SamplingParams
from inferq.protocol.webhooks import Webhook

logger = structlog.get_logger("inferq.gateway")

#: The protocol's name of a prompt's tokens, which the errors about them have.
TOKENS_FIELD: Final = "prompt_token_ids"
JOB_ID_HEADER: Final = "X-Inferq-Job-Id"
#: Most bytes, as JSON, of a prompt that the note keeps for an answer which begins with it.
MAX_ECHO_BYTES: Final = 768
#: Submissions under way at once for one request.
_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one request asks for, checked: a job for each prompt, all with the same parameters.

    `prompts` are the arguments that say a prompt to `AsyncClient.submit`; `note` is that of the
    first job but for what the queue will say.
    """

    note: Note
    params: SamplingParams
    prompts: Sequence[Mapping[str, Any]]
    cache_salt: str | None = None
    metadata: Mapping[str, str] | None = None
    return_prompt_token_ids: bool = False
    webhook: Webhook | None = None

    @property
    def num_outputs(self) -> int:
        """Outputs that are generated, for all prompts."""
        return len(self.prompts) * self.params.num_candidates

    def token_bound(self, *, max_outputs: int, max_model_len: int) -> int:
        """Return how many tokens the request takes at most, prompts and outputs together.

        Checks every prompt, and that there are not too many outputs, before any is submitted.
        """
        if self.num_outputs > max_outputs:
            raise InvalidRequestError(
                f"{len(self.prompts)} prompts with {self.params.num_candidates} outputs each are "
                f"more than {max_outputs} outputs",
                field="n",
                limit=max_outputs,
            )
        prompts = sum(prompt_token_bound(_prompt_of(arguments)) for arguments in self.prompts)
        return prompts + (self.params.max_tokens or max_model_len) * self.num_outputs


@dataclass(frozen=True, slots=True)
class Submitted:
    """The jobs of one response, in the order of their prompts, with the note of each."""

    client: AsyncClient
    queue: str
    ids: tuple[str, ...]
    notes: tuple[Note, ...]
    #: The prompts that answers begin with, where they are texts.
    echo_texts: tuple[str | None, ...]

    @property
    def note(self) -> Note:
        """The note of the first job, which tells of the whole response."""
        return self.notes[0]

    @property
    def listed_ids(self) -> tuple[str, ...]:
        """What headers, log lines and spans list: all ids, or the first of very many."""
        return self.ids if len(self.ids) <= MAX_LISTED_JOBS else self.ids[:1]

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the jobs."""
        return {JOB_ID_HEADER: ",".join(self.listed_ids)}

    def choices(self) -> list[JobChoices]:
        """Return the choices of each job, at their beginning."""
        rows = zip(self.notes, self.ids, self.echo_texts, strict=True)
        return [JobChoices(note, job_id, echo_text=echo) for note, job_id, echo in rows]

    def encoder(self) -> ChunkEncoder:
        """Return what encodes the response's chunks."""
        return ChunkEncoder(self.note, self.ids[0])

    async def add_echo(self, choices: JobChoices, first: StreamEvent) -> None:
        """Give the choices the prompt that they begin with: nobody remembers its text."""
        token_ids = first.prompt_token_ids or ()
        told = await self.client.tokenize(list(token_ids), model=self.note.model)
        choices.echo_text = told.text

    async def cancel(self) -> None:
        """Ask for the end of all jobs; what fails is logged."""
        await cancel_all(self.client, self.ids)


async def submit(
    client: AsyncClient,
    queue: str,
    asked: Asked,
    delivery: Delivery,
    *,
    cancels_partial: bool = True,
) -> Submitted:
    """Submit a job for each prompt; if one is refused, cancel the others and raise its error.

    The first goes last, so that its note can list the others. Who asks again by the same
    idempotency key leaves the others (`cancels_partial` false).
    """
    number = len(asked.prompts)
    notes = [
        replace(
            asked.note,
            position=k,
            prompts=number,
            key=delivery.scope or None,
            echo_text=_short_echo(asked, arguments),
        )
        for k, arguments in enumerate(asked.prompts)
    ]
    slots = asyncio.Semaphore(_AT_ONCE)

    made: dict[int, AsyncJobHandle] = {}  # also when the request itself is cancelled meanwhile

    async def submit_one(k: int) -> None:
        async with slots:
            made[k] = await _submit_one(client, asked, delivery, k, notes[k])

    try:
        outcomes = await asyncio.gather(
            *(submit_one(k) for k in range(1, number)), return_exceptions=True
        )
        for failure in outcomes:
            if failure is not None:
                raise failure
        if 1 < number <= MAX_LISTED_JOBS:
            notes[0] = replace(notes[0], jobs=tuple(made[k].id for k in range(1, number)))
        await submit_one(0)
    except BaseException:
        if cancels_partial:
            await cancel_all(client, [handle.id for handle in made.values() if handle.created])
        raise
    return Submitted(
        client=client,
        queue=queue,
        ids=tuple(made[k].id for k in range(number)),
        notes=tuple(notes),
        echo_texts=tuple(_echo_text(asked, arguments) for arguments in asked.prompts),
    )


async def cancel_all(client: AsyncClient, job_ids: Sequence[str]) -> None:
    """Ask for the end of jobs; what fails is logged, since their deadline ends them too."""
    outcomes = await asyncio.gather(
        *(client.cancel(job_id) for job_id in job_ids), return_exceptions=True
    )
    for job_id, outcome in zip(job_ids, outcomes, strict=True):
        if isinstance(outcome, InferqError):
            logger.warning("job not cancelled", job_id=job_id, error=str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome


async def _submit_one(
    client: AsyncClient, asked: Asked, delivery: Delivery, position: int, note: Note
) -> AsyncJobHandle:
    try:
        return await client.submit(
            params=asked.params,
            lane=delivery.lane,
            deadline_s=delivery.deadline_s,
            idempotency_key=delivery.job_key(position),
            metadata=asked.metadata,
            model=note.model,
            cache_salt=asked.cache_salt,
            return_prompt_token_ids=asked.return_prompt_token_ids,
            note=note.encode(),
            webhook=signed_for(asked.webhook, delivery.scope),
            **asked.prompts[position],
        )
    except IdempotencyConflict as error:
        # in the client's words, not those of the queue
        raise IdempotencyConflict(delivery.key or IDEMPOTENCY_HEADER, error.job_id) from None


def _prompt_of(arguments: Mapping[str, Any]) -> Prompt:
    given = dict(arguments)
    try:
        return to_prompt(given.pop("prompt", None), given.pop("messages", None), **given)
    except InvalidRequestError as error:
        raise (error.of_field("prompt") if error.field == TOKENS_FIELD else error) from None


def _echo_text(asked: Asked, arguments: Mapping[str, Any]) -> str | None:
    prompt = arguments.get("prompt")
    return prompt if asked.note.echo and isinstance(prompt, str) else None


def _short_echo(asked: Asked, arguments: Mapping[str, Any]) -> str | None:
    text = _echo_text(asked, arguments)
    return None if text is None or len(orjson.dumps(text)) > MAX_ECHO_BYTES else text
