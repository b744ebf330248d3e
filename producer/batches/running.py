"""A batch's lines from first to last: read, asked, answered, kept in parts; stopped and resumed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import structlog

from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.answering import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Ending,
    LineAnswerer,
    forget_jobs,
)
from inferq.producer.batches.journals import Checkpoint, Journal, Part
from inferq.producer.batches.line_reader import InputLine, read_lines
from inferq.producer.batches.lines import LineChecks, LineRefused, LineRequest
from inferq.producer.batches.outcomes import Answered, Outcome, encode_outcome
from inferq.producer.batches.parts import Gathered, write_part
from inferq.producer.batches.records import Counts
from inferq.producer.batches.storage import FileStorage, StorageError
from inferq.producer.batches.windows import Position, Tracker, Window
from inferq.producer.server import jitter
from inferq.protocol.errors import InferqError, QueueFull, ServerLost
from inferq.protocol.task_ends import end_tasks

logger = structlog.get_logger("inferq.batches")

#: Lines, and bytes, of a part, and seconds after which a smaller one is written.
PART_LINES: Final = 1000
PART_BYTES: Final = 4 * 2**20
PART_S: Final = 15.0
#: Bytes of lines and of answers, about, that are held for what is under way.
WINDOW_BYTES: Final = 64 * 2**20
#: Windows' worth of lines that may have ended after one that has not.
SPAN: Final = 16

#: What a byte of a line costs while it is under way: parsed, packed, sent.
_BYTE_WEIGHT: Final = 8
#: Bytes of an answer for each token, and for each that is named in its log-probabilities.
_TOKEN_BYTES: Final = 16
_LOGPROB_BYTES: Final = 120
#: Tokens of an answer without a limit, for want of anything better.
_UNKNOWN_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What one run of a batch works with.

    `source` yields the input's bytes from an offset on; parts are written to `storage` below
    `folder`; `seconds_left` says how long the batch still has, None: for ever. `on_kept` is told of
    lines whose answers are kept: how many succeeded, and failed.
    """

    batch_id: str
    client: AsyncClient
    source: Callable[[int], AsyncGenerator[bytes]]
    checks: LineChecks
    answerer: LineAnswerer
    storage: FileStorage
    folder: str
    journal: Journal
    window: int
    part_s: float = PART_S
    seconds_left: Callable[[], float] | None = None
    on_kept: Callable[[int, int], None] | None = None


class BatchRunner:
    """Runs a batch from a checkpoint on; `counts` and `reached` say how far it has come."""

    def __init__(self, plan: RunPlan, checkpoint: Checkpoint) -> None:
        self._plan = plan
        self._saved = checkpoint
        self._tracker = Tracker(checkpoint.position)
        self._window = Window(most=plan.window, weight=WINDOW_BYTES)
        self._gathered = Gathered()
        self._is_due = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_over = False
        self.counts = checkpoint.counts
        self.reached = checkpoint.reached

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is kept in parts so far."""
        return self._saved.parts

    @property
    def has_expired(self) -> bool:
        """Whether the time of lines was over before they were answered."""
        return self._plan.answerer.ending is Ending.EXPIRED

    async def cancel(self) -> None:
        """Give up what has not ended; `run` goes on until each line has its end."""
        await self._plan.answerer.end(Ending.CANCELLED)

    async def run(self, stop: asyncio.Event) -> bool:
        """Return whether every line has ended, which is false after `stop` only.

        What was answered until then is kept, and jobs go on for the next run to find. Raises
        `StorageError`, `ServerLost`, `QueueFull` (the server's memory) and what the journal raises.
        """
        seconds_left = self._plan.seconds_left
        if seconds_left is not None and seconds_left() <= 0:
            await self._plan.answerer.end(Ending.EXPIRED)
        writing = asyncio.create_task(self._write_parts(stop))
        reading = asyncio.create_task(self._read_all())
        others = [asyncio.create_task(stop.wait()), asyncio.create_task(self._expire())]
        try:
            await asyncio.wait((reading, writing, others[0]), return_when=asyncio.FIRST_COMPLETED)
            is_complete = reading.done()
            await end_tasks([reading])
            self._is_over = True
            self._is_due.set()
            await writing
            if is_complete:
                reading.result()
            return is_complete
        finally:
            await end_tasks([reading, writing, *others])

    async def _expire(self) -> None:
        if self._plan.seconds_left is not None:
            await asyncio.sleep(max(0.0, self._plan.seconds_left()))
            await self._plan.answerer.end(Ending.EXPIRED)

    async def _read_all(self) -> None:
        start = self._saved.position
        reached_before = self.reached
        lines = read_lines(self._plan.source(start.offset), start.offset, start.line)
        try:
            async with aclosing(lines), asyncio.TaskGroup() as group:
                async for line in lines:
                    if self._tracker.start(line):
                        await self._begin(line, group, reached_before)
        except* InferqError as errors:
            raise errors.exceptions[0] from None

    async def _begin(self, line: InputLine, group: asyncio.TaskGroup, reached_before: int) -> None:
        """Let a line end at once, or ask it as soon as there is room."""
        await self._tracker.wait_for_span(SPAN * self._plan.window)
        try:
            request = self._plan.checks.read(line)
        except LineRefused as refused:
            await self._end(line.number, refused.custom_id, refused.outcome)
            return
        ending = self._plan.answerer.ending
        if ending is not None and line.number > reached_before:
            await self._end(line.number, request.custom_id, ending.outcome())
            return
        weight = _weight_of(request, len(line.data or b""))
        await self._window.enter(weight)
        self.reached = max(self.reached, line.number)
        group.create_task(self._answer(line.number, request, weight))

    async def _answer(self, number: int, request: LineRequest, weight: int) -> None:
        try:
            outcome = await self._plan.answerer.answer(request.asked, number)
            await self._end(number, request.custom_id, outcome)
        finally:
            self._window.leave(weight)

    async def _end(self, number: int, custom_id: str | None, outcome: Outcome) -> None:
        """Gather a line that has ended, as soon as there is room; from then on it counts."""
        await self._has_room.wait()
        entry = encode_outcome(self._plan.batch_id, number, custom_id, outcome)
        self._gathered.add(entry, is_success=outcome.is_success, job_ids=outcome.job_ids)
        self._tracker.finish(number)
        self._count(outcome)
        if self._gathered.num_lines >= PART_LINES or self._gathered.size >= PART_BYTES:
            self._is_due.set()
        if self._gathered.size >= 2 * PART_BYTES:
            self._has_room.clear()
        await asyncio.sleep(0)

    def _count(self, outcome: Outcome) -> None:
        counts = self.counts
        if not outcome.is_success:
            self.counts = replace(counts, failed=counts.failed + 1)
            return
        usage = outcome.usage if isinstance(outcome, Answered) else None
        self.counts = replace(
            counts,
            completed=counts.completed + 1,
            prompt_tokens=counts.prompt_tokens + (usage.prompt_tokens if usage else 0),
            cached_tokens=counts.cached_tokens + (usage.cached_tokens if usage else 0),
            completion_tokens=counts.completion_tokens + (usage.completion_tokens if usage else 0),
        )

    async def _write_parts(self, stop: asyncio.Event) -> None:
        """Write parts until all is over and kept: never ended in the middle of one."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), self._plan.part_s)
            self._is_due.clear()
            is_last = self._is_over
            if self._gathered.num_lines:
                await self._write_part(stop)
            if is_last:
                return

    async def _write_part(self, stop: asyncio.Event) -> None:
        # taken in one step: the position, the counts and the lines tell of the same moment
        gathered, self._gathered = self._gathered, Gathered()
        position, counts = self._tracker.position, self.counts
        self._has_room.set()
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._save(gathered, position, counts)
                break
            except (StorageError, ServerLost, QueueFull) as error:
                if stop.is_set():
                    raise
                logger.warning("part waits", batch=self._plan.batch_id, error=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), jitter(pause_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        await forget_jobs(self._plan.client, gathered.job_ids)

    async def _save(self, gathered: Gathered, position: Position, counts: Counts) -> None:
        plan, before = self._plan, self._saved.parts
        part = await write_part(
            plan.storage, plan.folder, len(before) + 1, plan.journal.token, gathered
        )
        checkpoint = Checkpoint(position, counts, self.reached, (*before, part))
        await plan.journal.save(checkpoint)
        earlier, self._saved = self._saved.counts, checkpoint
        if plan.on_kept is not None:
            plan.on_kept(counts.completed - earlier.completed, counts.failed - earlier.failed)


def _weight_of(request: LineRequest, size: int) -> int:
    """Return about how many bytes a line takes while it is under way."""
    asked = request.asked
    params = asked.params
    tokens = (params.max_tokens or _UNKNOWN_TOKENS) * asked.num_outputs
    named = 0 if params.logprobs is None else params.logprobs + 1
    weight = size * _BYTE_WEIGHT + tokens * (_TOKEN_BYTES + named * _LOGPROB_BYTES)
    if params.prompt_logprobs is not None:
        weight += size * (params.prompt_logprobs + 1) * _LOGPROB_BYTES
    return weight
