"""Pulls jobs while their pages fit; between pulls, sleeps until there is something to pull.

Claims go through one script that takes only what fits. New work wakes the claimer through a
blocking XREAD on a connection of its own (about a millisecond after it was enqueued); freed blocks
wake it from within.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog
from redis.asyncio import Redis

from inferq.protocol.connection import translate_errors
from inferq.protocol.errors import QueueFull, ServerLost
from inferq.protocol.keys import Lane, QueueKeys
from inferq.protocol.replies import ClaimedJob, ClaimReply
from inferq.protocol.scripts import QueueScripts
from inferq.worker.queue.outage import Outage
from inferq.worker.queue.running import RunningJobs

logger = structlog.get_logger("inferq.claimer")

#: Longest sleep between two claims, in seconds: neither what other workers hand back nor a delayed
#: job that is added wakes anybody.
MAX_SLEEP_S: Final = 0.5
#: The same for a worker that is full, which can take nothing but errands.
MAX_FULL_SLEEP_S: Final = 2.0
#: Bounds of the pause of a full worker that an arrival woke in vain; it doubles from time to time.
VAIN_PAUSE_S: Final = (0.05, 1.0)
#: Shortest sleep before something that falls due, in seconds.
MIN_SLEEP_S: Final = 0.005
#: Seconds between two looks for claims whose reply was lost.
RECONCILE_INTERVAL_S: Final = 10.0
#: Pause after a failed call, in seconds.
RETRY_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ClaimLimits:
    """What a claim tells the script besides the free tokens; times in milliseconds."""

    max_model_len: int
    block_size: int
    lease_ms: int
    max_crashes: int
    retention_ms: int
    starve_ms: int


class Claimer:
    """Claims jobs while `jobs` has room; `on_claimed(job, at)` takes each, claimed no sooner."""

    def __init__(
        self,
        redis_client: Redis,
        scripts: QueueScripts,
        keys: QueueKeys,
        worker: str,
        jobs: RunningJobs,
        limits: ClaimLimits,
        *,
        on_claimed: Callable[[ClaimedJob, float], None],
    ) -> None:
        self._redis = redis_client
        self._scripts = scripts
        self._keys = keys
        self._worker = worker
        self._jobs = jobs
        self._limits = limits
        self._on_claimed = on_claimed
        self._room_changed = asyncio.Event()
        self._stopping = False
        self._reconciled_at = 0.0
        #: Whether jobs in this worker's name are an earlier process's, which crashed.
        self._is_new = True
        #: The wait for new entries; it outlives a claim for another reason, to keep its connection.
        self._arrival: asyncio.Task[bool] | None = None
        #: The lanes of that wait.
        self._awaited: frozenset[Lane] = frozenset()
        #: Whether the last sleep ended with an entry.
        self._has_arrival = False
        #: What a full worker waits before its next claim, unless room changes; 0: nothing.
        self._pause_s = 0.0
        self._outage = Outage(logger, "claim")
        #: Whether the last claim succeeded.
        self.is_connected = False

    def room_changed(self) -> None:
        """Tell the claimer that blocks or places came free."""
        self._room_changed.set()

    def stop(self) -> None:
        """Have `run` return after the claim under way: one cut off would leave its jobs unknown."""
        self._stopping = True
        self._room_changed.set()

    async def run(self) -> None:
        """Claim until stopped."""
        try:
            await self._claim_until_stopped()
        finally:
            await self._end_arrival()

    async def _claim_until_stopped(self) -> None:
        while not self._stopping:
            self._room_changed.clear()
            if self._free_places == 0 and self._jobs.free_errands == 0:
                await self._room_changed.wait()
                continue
            try:
                await self._reconcile_if_due()
                reply = await self._claim()
                self.is_connected = True
                self._outage.succeeded()
                await self._pause_in_vain(reply)
                await self._sleep_until_due(reply)
            except (ServerLost, QueueFull) as error:
                self.is_connected = False
                self._outage.failed(error)
                await asyncio.sleep(RETRY_PAUSE_S)

    @property
    def _free_places(self) -> int:
        """Jobs that may be claimed, errands besides; none while there is no block for one."""
        return self._jobs.free_places if self._jobs.free_tokens >= self._jobs.block_size else 0

    async def _reconcile_if_due(self) -> None:
        """Hand back what was claimed in a reply that was lost, or by a process of the same name.

        Only the latter counts as a crash.
        """
        now = time.monotonic()
        if self.is_connected and now < self._reconciled_at + RECONCILE_INTERVAL_S:
            return
        returned = await self._scripts.reconcile(
            self._worker, [job.id for job in self._jobs], crashed=self._is_new
        )
        if returned:
            why = "an earlier process's" if self._is_new else "without a reply"
            logger.warning("claims handed back", jobs=returned, why=why)
        self._is_new = False
        self._reconciled_at = now

    async def _claim(self) -> ClaimReply:
        limits = self._limits
        # Leases count from before the call, so that none outlasts the server's.
        sent_at = time.monotonic()
        reply = await self._scripts.claim(
            self._worker,
            free_tokens=max(0, self._jobs.free_tokens),
            idle=len(self._jobs) == 0,
            max_jobs=self._free_places,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            lease_ms=limits.lease_ms,
            max_crashes=limits.max_crashes,
            retention_ms=limits.retention_ms,
            starve_ms=limits.starve_ms,
            max_errands=self._jobs.free_errands,
        )
        for claimed in reply.claimed:
            self._on_claimed(claimed, sent_at)
        return reply

    async def _pause_in_vain(self, reply: ClaimReply) -> None:
        """Have a full worker wait before the next arrival may wake it, if this one was not for it.

        Entries that others take would cost the server a claim of every full worker each.
        """
        if self._free_places or reply.claimed or not self._has_arrival:
            self._pause_s = 0.0
            return
        shortest, longest = VAIN_PAUSE_S
        self._pause_s = min(longest, max(shortest, 2 * self._pause_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s):
                await self._room_changed.wait()

    async def _sleep_until_due(self, reply: ClaimReply) -> None:
        """Sleep until blocks come free, an entry arrives, or something in the queue falls due."""
        due_s = MAX_SLEEP_S if self._free_places else MAX_FULL_SLEEP_S
        if reply.next_due_ms is not None:
            due_s = min(due_s, max(MIN_SLEEP_S, reply.next_due_ms / 1000))
        waits: set[asyncio.Task[Any]] = set()
        # Where a job waits that does not fit, an arrival changes nothing: only room does.
        tails = {lane: tail for lane, tail in reply.lane_tails.items() if tail}
        if tails:
            if not self._awaited >= tails.keys():
                await self._end_arrival()
            if self._arrival is None:
                # Later, its tails may be old: it then returns at once, which costs a claim.
                self._awaited = frozenset(tails)
                self._arrival = asyncio.create_task(self._wait_arrival(tails))
            waits.add(self._arrival)
        room = asyncio.create_task(self._room_changed.wait())
        try:
            await asyncio.wait({room, *waits}, timeout=due_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            room.cancel()
        self._has_arrival = False
        if self._arrival is not None and self._arrival.done():
            arrival, self._arrival = self._arrival, None
            self._has_arrival = arrival.result()

    async def _end_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            await asyncio.gather(self._arrival, return_exceptions=True)
            self._arrival = None

    async def _wait_arrival(self, tails: Mapping[Lane, str]) -> bool:
        """Return whether a lane got an entry after its tail, after `MAX_FULL_SLEEP_S` at most."""
        streams: dict[Any, Any] = {self._keys.jobs(lane): tail for lane, tail in tails.items()}
        block_ms = round(MAX_FULL_SLEEP_S * 1000)
        # A single-connection client of its own: when the wait is cancelled its connection is
        # dropped, so that no unread reply stays behind on a shared one.
        client = self._redis.client()
        try:
            with translate_errors(client):
                return bool(await client.xread(streams, count=1, block=block_ms))
        except asyncio.CancelledError:
            if client.connection is not None:
                await client.connection.disconnect(nowait=True)
            raise
        finally:
            await client.aclose()
